"""One update: accumulation, clipping, the moving average, updates that are skipped, and what is float32 in bfloat16."""

import functools
import itertools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_models import BOS, QUICK, random_params, small_config

from transformer_jax.config import Config, MeshConfig, OptimizerConfig, TrainConfig
from transformer_jax.data.batches import Batch
from transformer_jax.parallel.mesh import make_mesh
from transformer_jax.training import step as step_module
from transformer_jax.training.state import (
    all_finite,
    evaluated_params,
    from_checkpoint,
    init_state,
    make_optimizer,
    to_checkpoint,
)
from transformer_jax.training.step import batch_sums, gradient_sums, make_train_step

DROPOUT = {"dropout": 0.2, "attention_dropout": 0.1, "relu_dropout": 0.1}
POISONED = 22  # a piece that is in no batch unless a test puts it there


def config_of(model=None, **train):
    optimizer = train.pop("optimizer", {})
    return Config(
        model=small_config(**(model or {})),
        optimizer=OptimizerConfig(**({"learning_rate": 0.01, "warmup_steps": 4} | optimizer)),
        mesh=MeshConfig(data=1),
        train=TrainConfig(**({"steps": 20} | train)),
    )


def batch_of(rows, seed=0, width=8):
    """A batch whose rows hold sentences of these lengths, the same on both sides."""
    rng = np.random.default_rng(seed)
    arrays = np.zeros((7, len(rows), width), np.int32)
    for row, lengths in zip(arrays.swapaxes(0, 1), rows, strict=True):
        ends = np.cumsum([0, *lengths])
        for segment, (lo, hi) in enumerate(itertools.pairwise(ends), 1):
            source, labels = rng.integers(4, POISONED, (2, hi - lo))
            places = np.arange(hi - lo)
            row[:, lo:hi] = source, places * 0 + segment, places, labels, labels, places * 0 + segment, places
            row[3, lo:hi] = [BOS, *labels[:-1]]
    return Batch(*map(jnp.asarray, arrays))


UNEVEN = batch_of([(2,), (8,), (3, 4), (), (1, 1, 1), (5,), (), (7, 1)])


@functools.cache
def compiled_step(config, optimizer):
    state = jax.eval_shape(lambda: init_state(config.model, optimizer, 0))
    return make_train_step(config, optimizer, make_mesh(config.mesh)).lower(state, UNEVEN).compile(QUICK)


@functools.cache
def compiled_gradients(config):
    return jax.jit(lambda *arguments: gradient_sums(config, *arguments), compiler_options=QUICK)


@functools.cache
def optimizer_of(config):
    return make_optimizer(config.optimizer, config.model.d_model, config.train.steps)


def state_and_step(config, optimizer=None):
    """A state with random parameters, and a step; programs are compiled once for all tests."""
    optimizer = optimizer or optimizer_of(config)
    params = random_params(config.model)
    state = jax.eval_shape(lambda: init_state(config.model, optimizer, 0))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state)
    return zeros._replace(params=params, optimizer_state=optimizer.init(params)), compiled_step(config, optimizer)


def copied(tree):
    """On the host: a state's buffers are reused by the next step."""
    return jax.tree.map(np.array, tree)


def assert_close(tree, other, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), copied(tree), copied(other))


def assert_same(tree, other):
    jax.tree.map(np.testing.assert_array_equal, copied(tree), copied(other))


DESCENT = optax.with_extra_args_support(optax.sgd(0.1))


# Accumulation


@pytest.mark.slow
def test_parts_weigh_by_their_pieces():
    """G1: parts with 2 and with 8 target pieces; the loss is the mean over 10 pieces, not that of two means."""
    batch = batch_of([(2,), (8,)])
    params = random_params(small_config())
    config = config_of(accumulate=2)
    each = [batch_sums(config, params, jax.tree.map(lambda x, i=i: x[i : i + 1], batch), None) for i in (0, 1)]
    assert [float(sums["tokens"]) for sums in each] == [2, 8]
    losses = [float(sums["loss"]) for sums in each]
    _, sums = compiled_gradients(config)(params, batch, jax.random.key(0))
    assert float(sums["loss"] / sums["tokens"]) == pytest.approx(sum(losses) / 10, rel=1e-6)
    assert abs(losses[0] / 2 - losses[1] / 8) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "changes"), [(2, {"remat": "full"}), (8, {}), (4, {"scan_layers": False})], ids=["2", "8", "4, unrolled"]
)
def test_an_accumulated_update_is_that_of_the_whole_batch(parts, changes):
    """G1: three updates by gradient descent, every kind of dropout on; at 8 some parts have no piece at all."""
    found = []
    for accumulate, model in ((1, DROPOUT), (parts, {**DROPOUT, **changes})):
        state, step = state_and_step(config_of(model, accumulate=accumulate), DESCENT)
        for seed in range(3):
            state, metrics = step(state, batch_of([(2,), (8,), (3, 4), (), (1, 1, 1), (5,), (), (7, 1)], seed))
        found.append((copied(state.params), copied(metrics)))
    assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
    assert found[1][1]["target_tokens"] == 33


def test_only_an_accumulated_update_scans_over_parts():
    """With accumulate 1 nothing is added to the program."""
    params = random_params(small_config())

    def outer_scans(accumulate):
        config = config_of(accumulate=accumulate)
        jaxpr = jax.make_jaxpr(lambda *args: gradient_sums(config, *args))(params, UNEVEN, jax.random.key(0))
        return [eqn.params["length"] for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]

    layers = small_config().encoder_layers
    assert set(outer_scans(1)) == {layers} and outer_scans(4) == [4]


# Clipping and norms


@pytest.mark.slow
@pytest.mark.parametrize("clip", [None, 1e-3])
def test_gradients_are_clipped_to_a_global_norm(clip):
    """Adam's first moment after one update is a tenth of the gradient that it was given."""
    config = config_of(optimizer={"clip_norm": clip})
    state, step = state_and_step(config)
    before = copied(state.params)
    gradients, sums = compiled_gradients(config_of())(state.params, UNEVEN, jax.random.key(0))
    norm = float(optax.tree.norm(gradients) / sums["tokens"])
    state, metrics = step(state, UNEVEN)
    given = float(optax.tree.norm(optax.tree.get(state.optimizer_state, "mu"))) / 0.1
    assert given == pytest.approx(clip or norm, rel=1e-4)
    assert float(metrics["gradient_norm"]) == pytest.approx(norm, rel=1e-5)
    assert float(metrics["param_norm"]) == pytest.approx(float(optax.tree.norm(state.params)), rel=1e-5)
    moved = optax.tree.norm(optax.tree.sub(state.params, before))
    assert float(metrics["update_norm"]) == pytest.approx(float(moved), rel=1e-3)


# The moving average


def test_the_average_follows_the_parameters():
    """d = min(decay, (1 + t) / (10 + t)): 0.1, 2/11, 0.2 at decay 0.2."""
    state, step = state_and_step(config_of(optimizer={"ema_decay": 0.2}))
    expected = copied(state.params)
    assert_same(evaluated_params(state), expected)
    for keep in (1 / 10, 2 / 11, 0.2):
        state, _ = step(state, UNEVEN)
        params = copied(state.params)
        expected = jax.tree.map(lambda old, new, keep=keep: keep * old + (1 - keep) * new, expected, params)
        assert_close(evaluated_params(state), expected, rtol=1e-5, atol=1e-7)
    assert float(optax.tree.norm(optax.tree.sub(evaluated_params(state), state.params))) > 1e-3


def test_an_average_changes_no_update():
    states = []
    for decay in (None, 0.2):
        state, step = state_and_step(config_of(optimizer={"ema_decay": decay}))
        for _ in range(3):
            state, _ = step(state, UNEVEN)
        states.append(copied(state.params))
    assert_same(*states)


@pytest.mark.slow
@pytest.mark.parametrize("decay", [None, 0.2])
def test_a_checkpoint_holds_what_translates_as_its_params(decay):
    state, step = state_and_step(config_of(optimizer={"ema_decay": decay}))
    state, _ = step(state, UNEVEN)
    tree = to_checkpoint(state)
    assert_same(tree["params"], evaluated_params(state))
    assert ("trained_params" in tree) == (decay is not None)
    assert len(jax.tree.leaves(tree)) == len(jax.tree.leaves(state))
    back = from_checkpoint(tree)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert_same(back, state)


# Skipped updates


def poisoned_step(config):
    """A state with a piece whose source embedding is NaN, a step, and batches without and with that piece."""
    state, step = state_and_step(config)
    state.params["source_embedding"] = state.params["source_embedding"].at[POISONED].set(jnp.nan)
    bad = UNEVEN._replace(source=jnp.where(UNEVEN.source == UNEVEN.source[1, 2], POISONED, UNEVEN.source))
    return state, step, UNEVEN, bad


UNTIED = {"tied_embeddings": False, **DROPOUT}


def test_a_bad_batch_is_skipped_and_training_goes_on():
    """N3: parameters, moments and average stay to the last bit; the step, and with it rate and dropout, goes on."""
    state, step, good, bad = poisoned_step(config_of(UNTIED, optimizer={"ema_decay": 0.9, "clip_norm": 1.0}))
    state, _ = step(state, good)
    before = copied(state)
    state, metrics = step(state, bad)
    assert np.isnan(metrics["loss"]) and metrics["update_norm"] == 0
    assert_same((state.params, state.optimizer_state), (before.params, before.optimizer_state))
    assert [int(n) for n in (state.step, state.skipped, state.skipped_in_row)] == [2, 1, 1]
    state, metrics = step(state, good)
    assert [int(n) for n in (state.step, state.skipped, state.skipped_in_row)] == [3, 1, 0]
    assert float(metrics["learning_rate"]) == pytest.approx(0.01 * 3 / 4) and metrics["update_norm"] > 0
    # As a state would that had come to step 2 without the bad batch.
    other, metrics = step(jax.tree.map(jnp.asarray, before._replace(step=np.int32(2))), good)
    assert_same((other.params, other.optimizer_state), (state.params, state.optimizer_state))


def test_a_gradient_alone_that_is_not_finite_is_skipped(monkeypatch):
    """N3: the loss is finite, the derivative of a square root at 0 is not."""

    def with_root(config, params, batch, key):
        sums = batch_sums(config, params, batch, key)
        scale = params["encoder"]["residual_1"]["norm"]["scale"][0, 0]
        return sums | {"loss": sums["loss"] + jnp.sqrt(scale - jax.lax.stop_gradient(scale))}

    monkeypatch.setattr(step_module, "batch_sums", with_root)
    state, step = state_and_step(config_of(steps=21))  # a program of its own
    before = copied(state)
    state, metrics = step(state, UNEVEN)
    assert np.isfinite(metrics["loss"]) and not np.isfinite(metrics["gradient_norm"])
    assert_same(state.params, before.params)
    assert int(state.skipped) == 1


@pytest.mark.slow
def test_after_the_limit_no_update_is_made_until_the_host_has_looked():
    """The loop looks at an update when the next is under way, which must not change what the fault was found with."""
    state, step, good, bad = poisoned_step(config_of(UNTIED, skip_limit=2))
    before = copied(state.params)
    counts = []
    for batch in (bad, good, bad, bad, good, bad):
        state, metrics = step(state, batch)
        counts.append((int(metrics["skipped"]), int(metrics["skipped_in_row"])))
        if len(counts) == 2:
            before = copied(state.params)
    assert counts == [(1, 1), (1, 0), (2, 1), (3, 2), (4, 2), (5, 2)]
    assert_same(state.params, before)
    # Where another limit is given the run goes on.
    _, higher, _, _ = poisoned_step(config_of(UNTIED, skip_limit=3))
    state, metrics = higher(state, good)
    assert int(metrics["skipped_in_row"]) == 0 and metrics["update_norm"] > 0


def test_every_parameter_is_looked_at():
    assert not all_finite({"a": jnp.ones(3), "b": {"c": jnp.array([1.0, jnp.nan])}})
    assert all_finite({"a": jnp.ones(3)})


# bfloat16


def equations(jaxpr):
    """All, those inside scans and functions too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.slow
def test_what_stays_float32_in_bfloat16():
    """Parameters, moments, average, sums of gradients; exponentials, logarithms and roots, so softmax, loss, norms."""
    config = config_of({"dtype": "bfloat16", **DROPOUT}, accumulate=2, optimizer={"ema_decay": 0.9, "clip_norm": 1.0})
    optimizer = make_optimizer(config.optimizer, 8, 20)
    state = init_state(config.model, optimizer, 0)
    step = make_train_step(config, optimizer, make_mesh(config.mesh))
    new, metrics = jax.eval_shape(step, state, UNEVEN)
    floats = {leaf.dtype for leaf in jax.tree.leaves((state, new, metrics)) if leaf.dtype.kind not in "iu"}
    assert floats == {jnp.dtype(jnp.float32)}
    found = list(equations(jax.make_jaxpr(step)(state, UNEVEN).jaxpr))
    delicate = [eqn for eqn in found if eqn.primitive.name in ("exp", "log", "rsqrt", "sqrt", "reduce_max")]
    assert len(delicate) > 6
    assert {variable.aval.dtype for eqn in delicate for variable in eqn.invars} == {jnp.dtype(jnp.float32)}
    products = [eqn for eqn in found if eqn.primitive.name == "dot_general"]
    assert {variable.aval.dtype for eqn in products for variable in eqn.invars} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.slow
def test_bfloat16_learns_as_float32_does():
    losses = []
    for dtype in ("float32", "bfloat16"):
        state, step = state_and_step(config_of({"dtype": dtype}, label_smoothing=0.0))
        found = []
        for i in range(30):
            state, metrics = step(state, batch_of([(2,), (8,), (3, 4), (), (1, 1, 1), (5,), (), (7, 1)], i % 2))
            found.append(float(metrics["loss"]))
        losses.append(np.array(found))
    assert losses[0][-1] < 0.75 * losses[0][0]
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.03)


# Memory


def lowered_gradients(**changes):
    config = config_of({"encoder_layers": 3, "decoder_layers": 3, "d_model": 16, "d_ff": 64, **changes})
    batch = batch_of([(64,)] * 8, width=64)
    return compiled_gradients(config).lower(random_params(config.model), batch, jax.random.key(0))


@pytest.mark.slow
def test_remat_lowers_the_memory_of_an_update():
    """What XLA allocates besides arguments and results."""
    none, dots, full = (
        lowered_gradients(remat=remat).compile().memory_analysis().temp_size_in_bytes
        for remat in ("none", "dots", "full")
    )
    assert none > 1.2 * dots and dots > 1.2 * full, (none, dots, full)


@pytest.mark.parametrize(("remat", "there"), [("none", False), ("dots", True), ("full", True)])
def test_unrolled_layers_ask_for_recomputation(remat, there):
    """By barriers, without which the compiler finds that it has the numbers already, and keeps them. The CPU's takes no
    notice of them: there scanned layers alone save memory."""
    assert ("optimization_barrier" in lowered_gradients(remat=remat, scan_layers=False).as_text()) == there


# On several devices

PROGRAM = """
import json, jax
jax.config.update("jax_num_cpu_devices", 4)
from eight_devices import collectives
from small_models import QUICK, random_params
from test_step import DESCENT, DROPOUT, UNEVEN, config_of, copied
from transformer_jax.config import MeshConfig
from transformer_jax.parallel.mesh import make_mesh, rows_sharding
from transformer_jax.parallel.rules import shardings
from transformer_jax.training.state import init_state
from transformer_jax.training.step import make_train_step

first, found = None, []
for parts, shape in ((1, (1, 1, 1)), (2, (4, 1, 1)), (2, (2, 2, 1))):
    config, mesh = config_of(DROPOUT, accumulate=parts), make_mesh(MeshConfig(*shape))
    state = init_state(config.model, DESCENT, 0)._replace(params=random_params(config.model))
    state = jax.device_put(state, shardings(state, mesh))
    batch = jax.device_put(UNEVEN, rows_sharding(mesh))
    step = make_train_step(config, DESCENT, mesh).lower(state, batch).compile(compiler_options=QUICK)
    state, metrics = step(state, batch)
    params = copied(state.params)
    first = first or params
    apart = jax.tree.map(lambda x, y: float(abs(x - y).max()), params, first)
    found.append([max(jax.tree.leaves(apart)), float(metrics["loss"]), collectives(step.as_text())])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_parts_stay_on_their_devices():
    """G1 with J4: the update of one device, and no row is sent to another."""
    tests = pathlib.Path(__file__).parent
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    one, data, fsdp = json.loads(result.stdout.strip().split("\n")[-1])
    for apart, loss, sent in (data, fsdp):
        assert apart < 1e-6 and loss == pytest.approx(one[1], rel=1e-6)
        assert not {kind for kind, _, _ in sent} & {"all-to-all", "collective-permute"}
    # Gradients are added up once, after the last part.
    assert [in_loop for kind, _, in_loop in data[2] if kind == "all-reduce"].count(True) == 0
