"""A configuration's own programs, compiled for a slice of TPUs by libtpu on a machine that has none."""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from transformer_jax.compile_check import hlo
from transformer_jax.compile_check.costs import program_costs
from transformer_jax.compile_check.roofline import Estimate, estimate
from transformer_jax.config import Config, ModelConfig
from transformer_jax.data.batches import Batch
from transformer_jax.errors import UserError
from transformer_jax.model.flops import TRAINING, forward_flops
from transformer_jax.parallel import rules
from transformer_jax.parallel.chips import Slice
from transformer_jax.parallel.mesh import make_mesh, row_shares, rows_sharding
from transformer_jax.training.state import init_params, init_state, make_optimizer
from transformer_jax.training.step import make_train_step
from transformer_jax.translation.batching import rows_for
from transformer_jax.translation.sharing import shared
from transformer_jax.translation.translate import make_translate

SENTENCE_WIDTH = 32
"""Source pieces of a sentence that the translate function is compiled for; WMT14's have 30 on average. It is taken to
write as many pieces as the source has."""
# libtpu asks the cloud what machine this is, and waits for an answer, unless it is told; and it lets one process of a
# machine load it, since a TPU belongs to one: here there is none.
_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "none", "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_STDERR_LOG_LEVEL": "3", "TPU_MIN_LOG_LEVEL": "3",
}  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """Bytes on each device."""

    arguments: int
    """Parameters, optimizer state and batch; results that take their place are counted here."""
    results: int
    """Results with buffers of their own."""
    temporaries: int
    code: int
    capacity: int

    @property
    def peak(self) -> int:
        """All together."""
        return self.arguments + self.results + self.temporaries + self.code


@dataclass(frozen=True)
class Report:
    """A program on a slice."""

    program: str
    topology: str
    mesh: dict[str, int]
    rows: int
    """Rows of the whole batch."""
    source_width: int
    target_width: int
    memory: Memory
    estimate: Estimate
    model_flops: int
    """What the model's mathematics needs on all chips, no recomputation; of translation all products of the program."""
    tokens_per_second: float
    """Positions of both sides, padding counted; of translation pieces written."""
    mfu: float
    """model_flops / (seconds x chips x peak)."""
    open_loops: tuple[str, ...]
    compiler_flops: float
    """The compiler's own count for one device, in which a loop's body counts once."""


def devices_of(where: Slice) -> list[Any]:
    """The slice's devices, which can be compiled for and nothing else.

    Raises:
        UserError: libtpu is missing, or does not know the slice.
    """
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise UserError("compile-check needs libtpu: in the project's folder, pip install -e '.[tpu-check]'")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    options: dict[str, Any] = {}
    if where.chip.name == "v4":
        options["chip_config_name"] = "megacore"  # as Cloud TPU sets it: both cores of a chip are one device
    if where.chips == 1:
        options["chips_per_host_bounds"] = [1, 1, 1]
    try:
        with _quiet():
            return list(topologies.get_topology_desc(platform="tpu", topology_name=where.name, **options).devices)
    except (jax.errors.JaxRuntimeError, RuntimeError) as error:
        raise UserError(f"--topology {where.name}: libtpu does not build it ({_first_line(error)})") from error


def check_train_step(config: Config, where: Slice, devices: list[Any]) -> Report:
    """Compiles the train step for full packed rows (data.batch_tokens in rows of the batch plan's width).

    Raises:
        UserError: the mesh does not divide the model or the devices, or the program does not fit the chips' memory.
    """
    config = dataclasses.replace(config, model=_with_vocabulary(config))
    mesh = make_mesh(config.mesh, devices=devices)
    rows, width = training_shape(config, row_shares(mesh) * config.train.accumulate)
    optimizer = make_optimizer(config.optimizer, config.model.d_model, config.train.steps)
    state = jax.eval_shape(functools.partial(init_state, config.model, optimizer, 0))
    state = rules.placed_shapes(state, rules.shardings(state, mesh, over_data=config.mesh.shard_weight_update))
    field: Any = jax.ShapeDtypeStruct((rows, width), jnp.int32, sharding=rows_sharding(mesh))
    step: Any = make_train_step(config, optimizer, mesh)
    compiled = _compile(lambda: step.lower(state, Batch(*[field] * len(Batch._fields))), where)
    flops = TRAINING * rows * forward_flops(config.model, width, width)
    return _report("train", where, mesh, compiled, (rows, width, width), flops, 2 * rows * width, 1)


def check_translate(config: Config, where: Slice, devices: list[Any]) -> Report:
    """Compiles the translate function for the widest batch of sentences of SENTENCE_WIDTH pieces on each device.

    Of several devices each searches its share of the rows for itself, as `translation.sharing` has it. The search is
    counted as if it took as many steps as a sentence has source pieces: how many it takes is known when it ends.
    """
    model = _with_vocabulary(config)
    mesh = make_mesh(config.mesh, devices=devices)
    shares = row_shares(mesh)
    rows = rows_for(SENTENCE_WIDTH, config.search.batch_tokens, "many") * shares
    params = jax.eval_shape(functools.partial(init_params, model, 0))
    params = rules.placed_shapes(params, rules.shardings(params, mesh))
    source = jax.ShapeDtypeStruct((rows, SENTENCE_WIDTH), jnp.int32, sharding=rows_sharding(mesh))
    translate: Any = make_translate(model, config.search)
    if mesh.size > 1:
        translate = shared(translate, mesh, 1)
    compiled = _compile(lambda: translate.lower(params, source), where)
    shape = (rows, SENTENCE_WIDTH, SENTENCE_WIDTH)
    return _report("translate", where, mesh, compiled, shape, None, rows * SENTENCE_WIDTH, SENTENCE_WIDTH)


def training_shape(config: Config, multiple: int) -> tuple[int, int]:
    """Rows and width of a packed batch, both sides full: what the batch plan makes of texts of equal length."""
    data = config.data
    width = (data.row_length or data.max_length) if data.packing else data.max_length
    rows = max(data.batch_tokens // width, 1)
    return -(-rows // multiple) * multiple, width


def _with_vocabulary(config: Config) -> ModelConfig:
    """As many pieces as the tokenizer may have, where the model does not say."""
    return dataclasses.replace(config.model, vocab_size=config.model.vocab_size or config.data.vocab_size)


def _compile(lower: Callable[[], Any], where: Slice) -> Any:
    try:
        with _quiet():
            return lower().compile()
    except jax.errors.JaxRuntimeError as error:
        used = re.search(r"Used (\S+) of (\S+) hbm", str(error))
        if used is None:
            raise
        raise UserError(
            f"the program does not fit {where.name}: it needs {used.group(1)} of {used.group(2)} on each device; give "
            "more devices to mesh.fsdp, or raise train.accumulate, or set model.remat, or lower data.batch_tokens"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No line of libtpu's log, which writes to the process's standard error whatever Python says."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def _report(
    program: str,
    where: Slice,
    mesh: Mesh,
    compiled: Any,
    shape: tuple[int, int, int],
    model_flops: int | None,
    tokens: int,
    open_trips: int,
) -> Report:
    costs = program_costs(hlo.parse(compiled.as_text()), open_trips)
    places = [tuple(device.coords[: len(where.shape)]) for device in np.asarray(mesh.devices).flat]
    found = estimate(costs, where, places)
    stats = compiled.memory_analysis()
    memory = Memory(
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes - stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.generated_code_size_in_bytes,
        where.chip.hbm_bytes // where.chip.devices,
    )
    peak = len(places) / where.chip.devices * where.chip.flops
    model_flops = found.flops * len(places) if model_flops is None else model_flops
    return Report(
        program=program,
        topology=where.name,
        mesh=dict(mesh.shape),
        rows=shape[0],
        source_width=shape[1],
        target_width=shape[2],
        memory=memory,
        estimate=found,
        model_flops=model_flops,
        tokens_per_second=tokens / found.seconds,
        mfu=model_flops / (found.seconds * peak),
        open_loops=costs.open_loops,
        compiler_flops=float((compiled.cost_analysis() or {}).get("flops", 0.0)),
    )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
