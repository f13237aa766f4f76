"""A program for tests/test_multidevice.py, in a process of its own: small runs on eight simulated devices.

python tests/eight_devices.py float32|float64 FOLDER       prints one JSON object
"""

import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
from small_models import QUICK
from small_runs import pairs, run_config, write_pairs

from transformer_jax.checkpointing.named_arrays import named_leaves
from transformer_jax.config import MeshConfig
from transformer_jax.parallel.mesh import make_mesh, row_shares, rows_sharding
from transformer_jax.parallel.rules import placed_shapes, shardings
from transformer_jax.training.placing import place
from transformer_jax.training.preparation import prepare
from transformer_jax.training.state import init_state, make_optimizer
from transformer_jax.training.step import make_loss_step, make_train_step
from transformer_jax.translation.sharing import shared
from transformer_jax.translation.translate import make_translate
from transformer_jax.translation.translator import Translator

MESHES = {
    "float32": [(1, 1, 1), (2, 1, 1), (4, 1, 1), (8, 1, 1), (1, 8, 1), (1, 1, 4), (2, 2, 2)],
    "float64": [(1, 1, 1), (8, 1, 1), (2, 4, 1), (1, 2, 4), (2, 2, 2)],
}
TRANSLATING = [(8, 1, 1), (2, 2, 2)]
SEARCHING = [(8, 1, 1), (1, 8, 1)]
UPDATES = 4
COLLECTIVE = re.compile(r" = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def prepared_run(folder, precision):
    """13 rows to a batch, sentences of 1 to 12 words; the tensor axis divides the word pieces in float32 only."""
    text = write_pairs(folder / "train.tsv", pairs(60, longest=12))
    changes = {
        "model__encoder_layers": 2, "model__decoder_layers": 2, "model__num_heads": 4, "model__d_ff": 32,
        "model__attention_dropout": 0.1, "model__relu_dropout": 0.1,
        "model__vocab_size": 300 if precision == "float32" else 301,
        "optimizer__clip_norm": 1.0, "optimizer__ema_decay": 0.9,
        "data__train_source": text, "data__batch_tokens": 13 * 16, "data__packing": False,
    }  # fmt: skip
    return prepare(run_config(folder / "text", **changes), folder / "run", lambda line: None)


def collectives(program):
    """[kind, shapes of the result, whether it stands in a loop] of each collective in a compiled program's text."""
    found, in_loop = [], True
    for line in program.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            in_loop = not line.startswith("ENTRY")
        elif match := COLLECTIVE.search(line):
            found.append([match[2], re.findall(r"\[([\d,]*)\]", match[1]), in_loop])
    return found


def updates(prepared, mesh, state, count):
    """Metrics of each update, the last state, and what the program is."""
    config = prepared.config
    optimizer = make_optimizer(config.optimizer, config.model.d_model, 10)
    batches = sorted(prepared.plan.epoch(0), key=lambda batch: -len(batch.examples))[:1] * count
    state = jax.device_put(state, shardings(state, mesh))
    placed = [place(planned, prepared.train, mesh) for planned in batches]
    step = make_train_step(config, optimizer, mesh).lower(state, placed[0]).compile(compiler_options=QUICK)
    metrics = []
    for batch in placed:
        state, values = step(state, batch)
        metrics.append({name: float(value) for name, value in values.items()})
    facts = {
        "metrics": metrics,
        "rows": placed[0].source.shape[0],
        "pieces": [int((part.data != 0).sum()) for part in placed[0].labels.addressable_shards],
        "held": [leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(state.params)],
    }
    return facts, state, step.as_text()


def dev_sums(prepared, mesh, params):
    step = make_loss_step(prepared.config, mesh)
    params = jax.device_put(params, shardings(params, mesh))
    sums = jax.device_get([step(params, place(batch, prepared.dev, mesh)) for batch in prepared.dev_plan.epoch(-1)])
    return {name: float(sum(part[name] for part in sums)) for name in sums[0]}


def search_collectives(config, params, mesh):
    program = shared(make_translate(config.model, config.search), mesh, 1)
    source = jax.ShapeDtypeStruct((8, 16), jnp.int32, sharding=rows_sharding(mesh))
    compiled = program.lower(placed_shapes(params, shardings(params, mesh)), source).compile(compiler_options=QUICK)
    return collectives(compiled.as_text())


def beginning(prepared, precision):
    """Configuration, optimizer and first state of a run, computed in that precision from here on."""
    config = prepared.config
    if precision == "float64":
        # All that the package computes in float32, for a comparison that rounding has no part in.
        jax.config.update("jax_enable_x64", True)
        jnp.float32 = jnp.float64
        object.__setattr__(config.model, "dtype", "float64")
    optimizer = make_optimizer(config.optimizer, config.model.d_model, 10)
    return config, optimizer, jax.device_get(jax.jit(lambda: init_state(config.model, optimizer, 0))())


def main(precision, folder):
    prepared = prepared_run(folder, precision)
    config, optimizer, start = beginning(prepared, precision)
    meshes = {shape: make_mesh(MeshConfig(*shape)) for shape in MESHES[precision]}
    found = {"shapes": [leaf.shape for leaf in jax.tree.leaves(start.params)], "runs": {}}
    first = None
    for shape, mesh in meshes.items():
        facts, state, program = updates(prepared, mesh, start, 1 if precision == "float32" else UPDATES)
        facts |= {"shares": row_shares(mesh)}
        # A constant added to all keys of a head changes no weight: the gradient of b_k is rounding and nothing else.
        leaves = {name: leaf for name, leaf in named_leaves(jax.device_get(state)).items() if not name.endswith("b_k")}
        first = first or leaves
        differences = [(abs(leaf - first[name]).max(), abs(leaf).max()) for name, leaf in leaves.items()]
        facts["apart"] = max(float(most / (largest + 1e-30)) for most, largest in differences)
        if precision == "float32":
            facts["collectives"] = collectives(program)
        found["runs"][str(shape)] = facts
    if precision == "float32":
        last = meshes[2, 2, 2]
        init = jax.jit(lambda: init_state(config.model, optimizer, 0), out_shardings=shardings(start, last))
        same = jax.tree.map(lambda a, b: bool((a == b).all()), jax.device_get(init()), start)
        found["same start"] = all(jax.tree.leaves(same))
        found["dev"] = [dev_sums(prepared, meshes[shape], start.params) for shape in [(1, 1, 1), *TRANSLATING]]
        found["dev pieces"] = int(prepared.dev.lengths[prepared.dev_plan.kept, 1].sum())
        lines = [source for source, _ in pairs(11, longest=9)] + [""]
        found["texts"] = [
            Translator(config, start.params, prepared.tokenizer, mesh=mesh)(lines)
            for mesh in (None, *(meshes[shape] for shape in TRANSLATING))
        ]
        found["search"] = {str(shape): search_collectives(config, start.params, meshes[shape]) for shape in SEARCHING}
    print(json.dumps(found))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main(sys.argv[1], pathlib.Path(sys.argv[2]))
