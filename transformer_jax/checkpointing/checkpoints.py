"""Checkpoints of a run: written beside training, verified when read, the best kept with the newest.

A run's checkpoint folder holds one folder a step, named by a plain decimal number; `checkpoint_files` says what is
inside. A step is written under another name and renamed when whole, so a killed save leaves no numbered folder. Steps
and scores are always read from the disk. orbax's `CheckpointManager` would take an empty folder for the newest step,
count such folders when it rotates, and skip a save of step 5 without a word when step 10 exists: it is not used.
"""

import concurrent.futures
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax

from transformer_jax.checkpointing.checkpoint_files import (
    DamagedError,
    best_step,
    candidates,
    complete_steps,
    first_line,
    none_sound,
    numbered_steps,
    read_record,
    read_step,
    write_step,
)
from transformer_jax.checkpointing.named_arrays import (
    PyTree,
    digest_tree,
    entry,
    gathered_entry,
    is_spread,
    json_digest,
    named_leaves,
    nest,
    rebuild,
    snapshot,
    to_host,
)
from transformer_jax.errors import UserError

__all__ = ["Checkpoints", "Restored", "digest_tree", "load_params", "read_extra"]

_LEFTOVER = re.compile(r"[0-9]+\..*tmp.*")


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


class Checkpoints:
    """The checkpoints of one training run: the newest `keep` steps, and the one with the highest score.

    Made by the process that trains: it removes what a killed save has left. Use `load_params` to read only. With
    several processes each makes one and each calls every method, with the folder on a file system they share.

    Args:
        folder: made if missing.
        keep: newest steps that stay; the best by score stays beside them.
        warn: takes one sentence for everything that was skipped, removed or moved; may be called while saving, from
            another thread.
        scheduled: whether a step's checkpoint counts among the newest `keep`; one that does not, saved when a run was
            stopped, stays until the next, so that what is kept does not depend on where a run was stopped.

    Raises:
        UserError: the folder cannot be made or read.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        warn: Callable[[str], None],
        scheduled: Callable[[int], bool] = lambda step: True,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}, but must be at least 1")
        # orbax wants absolute paths.
        self._folder = Path(folder).absolute()
        self._keep = keep
        self._warn = warn
        self._scheduled = scheduled
        self._pending: concurrent.futures.Future[None] | None = None
        self._executor = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            leftovers = [path for path in self._folder.iterdir() if _LEFTOVER.fullmatch(path.name)]
        except OSError as error:
            raise UserError(f"cannot use {self._folder} for checkpoints: {error}; choose another folder") from error
        for leftover in leftovers if _is_primary() else []:
            shutil.rmtree(leftover, ignore_errors=True)
            self._warn(f"removed {leftover}, left by a save that was cut short")

    def save(
        self, step: int, state: Mapping[str, PyTree], extra: Mapping[str, Any] | None = None, *, score: float | None
    ) -> None:
        """Saves a step without waiting for the disk: returns when the arrays are copied on their devices.

        A save still running is waited for first. Whether the state is finite is for the caller to know before.
        An earlier save of the same step is replaced. Later steps, there when an earlier one was restored by name, are
        renamed to `superseded-N`, so that the newest step is always of the history that goes on.

        Args:
            step: updates made so far; 0 is a step like any other.
            state: a dict with `params` (nested dicts) and any other trees of arrays or Python numbers.
            extra: values that JSON can hold; tuples come back as lists.
            score: higher is better; None or a number that is not finite is never best. Of equals the first is best.

        Raises:
            UserError: the save before this one failed; the steps before that are intact.
        """
        self.wait()
        if step < 0:
            raise ValueError(f"step is {step}, but must be at least 0")
        # A round trip, so that what is digested is what will be read.
        extra = json.loads(json.dumps(dict(extra or {})))
        score = float(score) if score is not None and math.isfinite(score) else None
        leaves = {name: snapshot(leaf) for name, leaf in named_leaves(state).items()}
        spread = {name: gathered_entry(leaf) for name, leaf in leaves.items() if is_spread(leaf)}
        body = {"step": step, "score": score, "extra": extra, "arrays": spread}
        self._pending = self._executor.submit(self._save, leaves, body)

    def steps(self) -> list[int]:
        """Steps whose saves are finished, in order; what only a full read can tell is not checked."""
        return complete_steps(self._folder)

    def best_step(self) -> int | None:
        """The finished step with the highest score, the first of equals; None if no step has a score."""
        return best_step(self._folder)

    def restore(self, abstract_state: Mapping[str, PyTree], step: int | None = None) -> Restored | None:
        """The newest step whose every array is as it was written, or the step asked for.

        Newer steps that are damaged are renamed to `damaged-N`, each with a warning.

        Args:
            abstract_state: the state's tree. A `jax.ShapeDtypeStruct` or `jax.Array` gives dtype, shape and sharding
                (any mesh, not only that of the save; none: the default device); numpy arrays come back as numpy
                arrays, Python numbers as Python numbers.
            step: a step by name, 0 included; None for the newest.

        Returns:
            None if the folder holds no checkpoint at all.

        Raises:
            UserError: the checkpoint is of another configuration (the message names a parameter and both shapes); or
                no step is sound; or the step asked for is missing or damaged.
        """
        self.wait()
        reasons: dict[int, str] = {}
        for candidate in candidates(self._folder, step):
            try:
                record, arrays = read_step(self._folder / str(candidate), abstract_state)
            except DamagedError as damage:
                reasons[candidate] = str(damage)
                continue
            for skipped, reason in reasons.items():
                moved = self._move_aside(skipped, "damaged")
                self._warn(
                    f"skipped checkpoint {self._folder / str(skipped)}: {reason} "
                    f"(now {moved.name}); using step {candidate}"
                )
            return Restored(candidate, rebuild(abstract_state, arrays), record["extra"], record["score"])
        if not reasons:
            return None
        raise UserError(none_sound(self._folder, reasons))

    def wait(self) -> None:
        """Returns when the save under way is on disk.

        Raises:
            UserError: it failed; the steps before it are intact.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Waits as `wait` does, and ends the saving thread. An unclosed save may be lost when Python exits."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()

    def _save(self, leaves: dict[str, Any], body: dict[str, Any]) -> None:
        step = body["step"]
        staging = self._folder / f"{step}.tmp"
        try:
            # Popped one by one, so that the copy on the devices shrinks as the one on the host grows.
            values = {name: to_host(leaves.pop(name)) for name in list(leaves)}
            body["arrays"] |= {name: entry(value) for name, value in values.items() if not is_spread(value)}
            write_step(staging, values, {"sha256": json_digest(body), **body})
            if _is_primary():
                self._publish(staging, step)
                self._rotate()
        except Exception as error:
            self._remove_unfinished(step)
            try:
                kept = f"step {max(self.steps())} is saved and intact"
            except (ValueError, UserError):
                kept = "no step is saved there"
            raise UserError(
                f"cannot save step {step} to {self._folder}: {first_line(error)}; {kept}: "
                "free space there or make it writable, then resume"
            ) from error

    def _remove_unfinished(self, step: int) -> None:
        # More than once: when one of orbax's writers fails, the others may still be at work for a moment.
        for _ in range(20):
            for path in self._folder.glob(f"{step}.tmp*"):
                shutil.rmtree(path, ignore_errors=True)
            time.sleep(0.1)
            if not any(self._folder.glob(f"{step}.tmp*")):
                break

    def _publish(self, staging: Path, step: int) -> None:
        for later in numbered_steps(self._folder):
            if later > step:
                moved = self._move_aside(later, "superseded")
                self._warn(f"checkpoint {later} is of a history that ended at step {step}: now {moved.name}")
        target = self._folder / str(step)
        if target.exists():
            os.rename(target, self._folder / f"{step}.replaced.tmp")
        os.rename(staging, target)
        shutil.rmtree(self._folder / f"{step}.replaced.tmp", ignore_errors=True)

    def _rotate(self) -> None:
        steps = self.steps()
        kept = {*[step for step in steps if self._scheduled(step)][-self._keep :], steps[-1], self.best_step()}
        for step in steps:
            if step not in kept:
                # Renamed first: a process killed half-way leaves no step that lacks some of its files.
                old = self._folder / f"{step}.old.tmp"
                os.rename(self._folder / str(step), old)
                shutil.rmtree(old, ignore_errors=True)

    def _move_aside(self, step: int, word: str) -> Path:
        names = (f"{word}-{step}" + (f"-{count}" if count > 1 else "") for count in range(1, 1_000_000))
        target = next(path for name in names if not (path := self._folder / name).exists())
        if _is_primary():
            os.rename(self._folder / str(step), target)
        return target


def load_params(
    folder: Path,
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
    folder = Path(folder).absolute()
    reasons: dict[int, str] = {}
    for candidate in candidates(folder, step):
        try:
            wanted = None if abstract is None else {"params": abstract}
            record, arrays = read_step(folder / str(candidate), wanted, params_only=True)
        except DamagedError as damage:
            reasons[candidate] = str(damage)
            continue
        for skipped, reason in reasons.items():
            warn(f"skipped checkpoint {folder / str(skipped)}: {reason}; using step {candidate}")
        state = nest(arrays) if wanted is None else rebuild(wanted, arrays)
        return Restored(candidate, state, record["extra"], record["score"])
    if reasons:
        raise UserError(none_sound(folder, reasons))
    raise UserError(f"no checkpoint in {folder}: train first, or name the folder of a run that has been trained")


def read_extra(folder: Path, step: int | Literal["best"] | None = None) -> dict[str, Any]:
    """The extra values of the step that `load_params` tries first, or of the next that has a record; {} if none has.

    Raises:
        UserError: the folder cannot be read, or has no step of that name.
    """
    for candidate in candidates(folder, step):
        try:
            extra: dict[str, Any] = read_record(folder / str(candidate))["extra"]
        except DamagedError:
            continue
        return extra
    return {}


def _is_primary() -> bool:
    return jax.process_index() == 0
