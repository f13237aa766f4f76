"""Updates whose numbers are not finite: what is kept of one, and where in the network it went wrong."""

import functools
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from transformer_jax.checkpointing.checkpoints import Checkpoints, load_params
from transformer_jax.checkpointing.named_arrays import json_digest, named_leaves
from transformer_jax.config import Config
from transformer_jax.data.batches import Batch, Examples, PlannedBatch, assemble
from transformer_jax.errors import UserError
from transformer_jax.ops.masks import BOS
from transformer_jax.training.placing import rows_of
from transformer_jax.training.preparation import write_whole
from transformer_jax.training.state import Params, init_params
from transformer_jax.training.step import apply_model, dropout_key_of, gradient_sums
from transformer_jax.translation.translator import warn_on_stderr

_STACKS = ("encoder", "decoder")
_DIGEST, _FILES = "sha256", "files"


@dataclass(frozen=True)
class Fault:
    """An update that was skipped."""

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    lines: list[int]
    """Lines of the training text, from 1, whose pairs the batch holds."""
    rows: list[int]
    """The row of the batch, from 0, in which each of them lies."""

    @classmethod
    def of(cls, step: int, planned: PlannedBatch, metrics: Mapping[str, float]) -> "Fault":
        """From what the loop knows of an update."""
        loss, gradient_norm, rate = (float(metrics[name]) for name in ("loss", "gradient_norm", "learning_rate"))
        return cls(step, loss, gradient_norm, rate, (planned.examples + 1).tolist(), planned.row_of.tolist())

    def __str__(self) -> str:
        """A clause for messages."""
        name = "gradient norm" if np.isfinite(self.loss) else "loss"
        value = self.gradient_norm if np.isfinite(self.loss) else self.loss
        lines = ", ".join(map(str, self.lines[:5]))
        more = f" and {len(self.lines) - 5} more" if len(self.lines) > 5 else ""
        return (
            f"the {name} is {value} at learning rate {self.learning_rate:.3g}, on lines {lines}{more} of the training "
            "text"
        )


@dataclass(frozen=True)
class Diagnosis:
    """A fault, worked through again."""

    fault: Fault
    loss: float
    gradient_norm: float
    parameters: list[str]
    """Parameters with numbers that are not finite."""
    module: str | None
    """The first module in order of computation whose output is not finite; None if all are in the forward pass."""
    lines: list[int]
    """Lines of the training text in rows that come out not finite."""
    gradients: list[str]
    """Parameters whose gradients are not finite."""


def write_fault(
    folder: pathlib.Path, fault: Fault, config: Config, planned: PlannedBatch, examples: Examples, params: Params
) -> None:
    """Writes all that `diagnose` needs: config.json, batch.npz, fault.json, and in checkpoints/ the parameters.

    Every process must call this. `params` are those before the update. fault.json has the digests of the other two.

    Raises:
        UserError: it cannot be written.
    """
    if jax.process_index() == 0:
        write_whole(folder / "config.json", config.to_json())
        rows = -(-planned.shape.rows // config.train.accumulate) * config.train.accumulate
        batch = assemble(rows_of(planned, np.arange(rows)), examples, bos_id=BOS)
        try:
            np.savez_compressed(folder / "batch.npz", **batch._asdict())
        except OSError as error:
            raise UserError(f"{folder}: cannot be written ({error.strerror or error}); make room there") from error
        # JSON has no NaN, hence text.
        numbers = {"loss": str(fault.loss), "gradient_norm": str(fault.gradient_norm)}
        facts = {
            **vars(fault),
            **numbers,
            _FILES: {name: _sha256(folder / name) for name in ("config.json", "batch.npz")},
        }
        write_whole(folder / "fault.json", json.dumps({_DIGEST: json_digest(facts), **facts}) + "\n")
    checkpoints = Checkpoints(folder / "checkpoints", keep=1, warn=warn_on_stderr)
    try:
        checkpoints.save(fault.step - 1, {"params": params}, score=None)
    finally:
        checkpoints.close()


def diagnose(folder: str | os.PathLike[str]) -> Diagnosis:
    """Works through the update in a folder that `write_fault` wrote, on one device, and looks where it went wrong.

    Same parameters, batch and dropout; on another kind of device rounding may differ, and with it what overflows.

    Raises:
        UserError: no such folder, or something in it is not as it was written.
    """
    path = pathlib.Path(folder)
    fault, config, batch = _read(path)
    expected = jax.eval_shape(lambda: init_params(config.model, 0))
    params = load_params(path / "checkpoints", fault.step - 1, abstract=expected, warn=warn_on_stderr).params
    key = dropout_key_of(config.train.seed, fault.step - 1)
    gradients, sums = jax.jit(lambda *arguments: gradient_sums(config, *arguments))(params, batch, key)
    tokens = jnp.maximum(sums["tokens"], 1.0)
    module, rows = _forward(config, params, batch, key)
    return Diagnosis(
        fault,
        float(sums["loss"] / tokens),
        float(optax.tree.norm(gradients) / tokens),
        _not_finite(params),
        module,
        [line for line, row in zip(fault.lines, fault.rows, strict=True) if row in rows],
        _not_finite(gradients),
    )


def _read(folder: pathlib.Path) -> tuple[Fault, Config, Batch]:
    if not (folder / "fault.json").is_file():
        raise UserError(
            f"{folder} has no fault.json: name RUN/fault-STEP, which a run writes that ends in such an update"
        )
    try:
        facts: dict[str, Any] = json.loads((folder / "fault.json").read_text(encoding="utf-8"))
        if facts.pop(_DIGEST) != json_digest(facts):
            raise ValueError("fault.json is not as it was written")
        for name, digest in facts.pop(_FILES).items():
            if _sha256(folder / name) != digest:
                raise ValueError(f"{name} is not as it was written")
        facts |= {name: float(value) for name, value in facts.items() if isinstance(value, str)}
        fault = Fault(**facts)
        config = Config.from_json((folder / "config.json").read_text(encoding="utf-8"), str(folder / "config.json"))
        with np.load(folder / "batch.npz") as arrays:
            batch = Batch(**arrays)
    except (OSError, ValueError, TypeError, AttributeError, LookupError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise UserError(f"{folder}: cannot be read as an update that failed ({reason}); name RUN/fault-STEP") from error
    return fault, config, batch


def _sha256(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _not_finite(tree: Params) -> list[str]:
    """Names of leaves with numbers that are not finite; a stack's with the first layer that has some."""
    found = []
    for name, leaf in named_leaves(tree).items():
        finite = np.isfinite(leaf)
        if not finite.all():
            stacked = name.split("/")[0] in _STACKS
            layer = int(np.argmin(finite.reshape(len(finite), -1).all(axis=1)))
            found.append(f"{name}, layer {layer + 1}" if stacked else name)
    return found


def _forward(config: Config, params: Params, batch: Batch, key: jax.Array) -> tuple[str | None, set[int]]:
    """The first module whose output is not finite, and the rows whose logits are not."""
    order: dict[tuple[str, ...], None] = {}

    def chosen(module: Any, method: str) -> bool:
        # flax asks at the end of each method while it traces: so the order of asking is that of computing.
        if method in ("__call__", "attend", "_embed"):
            order.setdefault((*module.path, method))
            return True
        return False

    def finite(params: Params, batch: Batch, key: jax.Array) -> dict[str, Any]:
        options = {"capture_intermediates": chosen, "mutable": ["intermediates"]}
        _, variables = apply_model(config.model, params, batch, key, **options)
        outputs: dict[str, Any] = variables["intermediates"]
        # Axis 0 is layers in a stack, rows elsewhere.
        return jax.tree.map(lambda x: jnp.isfinite(x).reshape(x.shape[0], -1).all(axis=1), outputs)

    flags = jax.device_get(jax.jit(finite)(params, batch, key))
    rows = set(np.flatnonzero(~flags["__call__"][0]).tolist())
    return next(_not_finite_outputs(flags, list(order)), None), rows


def _not_finite_outputs(flags: Mapping[str, Any], order: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Modules with outputs that are not finite in order of computing, the layers of a stack one after the other."""
    for first, group in itertools.groupby(order, key=lambda path: path[0]):
        outputs = []
        for path in group:
            leaves = jax.tree.leaves(functools.reduce(lambda tree, name: tree[name], path, flags))
            outputs.append((path, np.all(leaves, axis=0)))
        if first in _STACKS:
            for layer in range(len(outputs[0][1])):
                yield from (f"{_name(path)}, layer {layer + 1}" for path, finite in outputs if not finite[layer])
        else:
            yield from (_name(path) for path, finite in outputs if not finite.all())


def _name(path: tuple[str, ...]) -> str:
    *modules, method = path
    if method == "_embed":
        return "embeddings"
    return "/".join(modules) or "logits"
