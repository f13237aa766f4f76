"""Checkpoints read by those that do not train: nothing on disk changes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from transformer_jax.checkpointing.array_files import stored_arrays
from transformer_jax.checkpointing.checkpoint_files import (
    AnyPath,
    DamagedError,
    as_folder,
    candidates,
    none_sound,
    read_record,
)
from transformer_jax.checkpointing.named_arrays import PyTree, json_digest, nest, rebuild
from transformer_jax.errors import UserError


@dataclass(frozen=True)
class Restored:
    """A checkpoint, verified and placed; `state` has the keys that were asked for, `params` always among them."""

    step: int
    state: PyTree
    extra: dict[str, Any]
    score: float | None

    @property
    def params(self) -> PyTree:
        """The parameters in `state`."""
        return self.state["params"]


def load_params(
    folder: AnyPath,
    step: int | Literal["best"] | None = None,
    *,
    abstract: PyTree | None = None,
    warn: Callable[[str], None],
) -> Restored:
    """Parameters alone, verified; the optimizer's arrays are neither read nor given memory, nothing on disk changes.

    Args:
        folder: a run's checkpoint folder.
        step: a step by name; "best" for the highest score (the newest if no step has one); None for the newest.
        abstract: the parameters' tree, as in `Checkpoints.restore`; None gives nested dicts of numpy arrays.
        warn: takes one sentence for each damaged step that was passed over; the next newest is then used.

    Returns:
        A state of `params` alone, with the step's number, extra values and score.

    Raises:
        UserError: no checkpoint, none sound, or one of another configuration.
    """
    root = as_folder(folder)
    reasons: dict[int, str] = {}
    for candidate in candidates(root, step):
        try:
            wanted = None if abstract is None else {"params": abstract}
            record, arrays = stored_arrays(root / str(candidate), wanted, params_only=True)
            state = nest(dict(arrays)) if wanted is None else rebuild(wanted, arrays)
        except DamagedError as damage:
            reasons[candidate] = str(damage)
            continue
        for skipped, reason in reasons.items():
            warn(f"skipped checkpoint {root / str(skipped)}: {reason}; using step {candidate}")
        return Restored(candidate, state, record["extra"], record["score"])
    if reasons:
        raise UserError(none_sound(root, reasons))
    raise UserError(f"no checkpoint in {root}: train first, or name the folder of a run that has been trained")


def read_extra(folder: AnyPath, step: int | Literal["best"] | None = None) -> dict[str, Any]:
    """The extra values of the step that `load_params` tries first, or of the next that has a record; {} if none has.

    Raises:
        UserError: the folder cannot be read, or has no step of that name.
    """
    root = as_folder(folder)
    for candidate in candidates(root, step):
        try:
            extra: dict[str, Any] = read_record(root / str(candidate))["extra"]
        except DamagedError:
            continue
        return extra
    return {}


@dataclass(frozen=True)
class Digests:
    """SHA-256 (hex) of a checkpoint's arrays, as `named_arrays.digest_tree` gives them."""

    step: int
    params: str
    optimizer_state: str
    """Adam's moments and update count; with no such state, the digest of nothing."""
    state: str
    """All arrays: those above and whatever else training carries."""


def newest_digests(folder: AnyPath, *, warn: Callable[[str], None]) -> Digests:
    """The digests of the newest step whose every array is as it was written.

    Raises:
        UserError: no checkpoint, or none sound.
    """
    root = as_folder(folder)
    reasons: dict[int, str] = {}
    for step in candidates(root, None):
        try:
            record, arrays = stored_arrays(root / str(step), None)
            for _ in arrays:  # each is verified as it is taken
                pass
        except DamagedError as damage:
            reasons[step] = str(damage)
            warn(f"skipped checkpoint {root / str(step)}: {damage}")
            continue
        stored = record["arrays"]
        return Digests(step, _digest(stored, "params/"), _digest(stored, "optimizer_state/"), json_digest(stored))
    if reasons:
        raise UserError(none_sound(root, reasons))
    raise UserError(f"no checkpoint in {root}: train first, or name the folder of a run that has been trained")


def _digest(stored: dict[str, Any], prefix: str) -> str:
    found = {name.removeprefix(prefix): value for name, value in stored.items() if name.startswith(prefix)}
    return json_digest(found)
