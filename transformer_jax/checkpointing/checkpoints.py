"""Checkpoints of a run: written beside training, verified when read, the best kept with the newest.

A run's checkpoint folder holds one folder a step, named by a plain decimal number; `checkpoint_files` says what is
inside, and what makes a step complete. Steps and scores are always read from the disk. orbax's `CheckpointManager`
would take an empty folder for the newest step, count such folders when it rotates, and skip a save of step 5 without a
word when step 10 exists: it is not used.
"""

import concurrent.futures
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from etils import epath

from transformer_jax.checkpointing.array_files import (
    first_line,
    one_error_only,
    stored_arrays,
    wait_for_processes,
    write_arrays,
)
from transformer_jax.checkpointing.checkpoint_files import (
    AnyPath,
    DamagedError,
    as_folder,
    best_step,
    candidates,
    complete_steps,
    leftovers,
    name_aside,
    none_sound,
    numbered_steps,
    publish,
    put_back,
    remove,
    remove_step,
    remove_unfinished,
    staging,
    storage_errors,
)
from transformer_jax.checkpointing.loading import Restored, load_params, read_extra
from transformer_jax.checkpointing.named_arrays import (
    PyTree,
    digest_tree,
    entry,
    gathered_entry,
    is_spread,
    named_leaves,
    rebuild,
    snapshot,
    to_host,
)
from transformer_jax.errors import UserError

__all__ = ["Checkpoints", "Restored", "digest_tree", "load_params", "read_extra"]


class Checkpoints:
    """The checkpoints of one training run: the newest `keep`, every `keep_every`-th, and that with the highest score.

    Made by the process that trains: it removes what a killed save has left. Use `load_params` to read only. With
    several processes each makes one and each calls every method, with the folder on a file system they share.

    Args:
        folder: made if missing; a local folder, or one at gs:// given as text.
        keep: newest steps that stay; the best by score stays beside them.
        keep_every: steps that are a multiple of this stay for good, say for averaging later; None for none.
        warn: takes one sentence for everything that was skipped, removed or moved; may be called while saving, from
            another thread.
        scheduled: whether a step's checkpoint counts among the newest `keep`; one that does not, saved when a run was
            stopped, stays until the next, so that what is kept does not depend on where a run was stopped.

    Raises:
        UserError: the folder cannot be made or read.
    """

    def __init__(
        self,
        folder: AnyPath,
        *,
        keep: int,
        warn: Callable[[str], None],
        keep_every: int | None = None,
        scheduled: Callable[[int], bool] = lambda step: True,
    ) -> None:
        if keep < 1 or (keep_every is not None and keep_every < 1):
            raise ValueError(f"keep is {keep} and keep_every {keep_every}, but both must be at least 1")
        self._folder = as_folder(folder)
        self._keep = keep
        self._keep_every = keep_every
        self._warn = warn
        self._scheduled = scheduled
        self._pending: concurrent.futures.Future[None] | None = None
        self._executor = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if _is_primary():
                put_back(self._folder)
            cut_short = leftovers(self._folder)
        except storage_errors() as error:
            raise UserError(f"cannot use {self._folder} for checkpoints: {error}; choose another folder") from error
        for leftover in cut_short if _is_primary() else []:
            remove(leftover)
            self._warn(f"removed {leftover}, left by a save that was cut short")

    def save(
        self,
        step: int,
        state: Mapping[str, PyTree],
        extra: Mapping[str, Any] | None = None,
        *,
        score: float | None,
        first: Callable[[], None] = lambda: None,
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
            first: called by process 0, in the thread that saves, before the step is complete, which it is not if this
                raises: for what must be safe when the step is.

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
        self._pending = self._executor.submit(self._save, leaves, body, first)

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
                record, arrays = stored_arrays(self._folder / str(candidate), abstract_state)
                state = rebuild(abstract_state, arrays)
            except DamagedError as damage:
                reasons[candidate] = str(damage)
                continue
            for skipped, reason in reasons.items():
                moved = self._move_aside(skipped, "damaged")
                self._warn(
                    f"skipped checkpoint {self._folder / str(skipped)}: {reason} "
                    f"(now {moved.name}); using step {candidate}"
                )
            if step is None and _is_primary():
                # A kill may have come between a save and its rotation.
                self._rotate()
            return Restored(candidate, state, record["extra"], record["score"])
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

    def _save(self, leaves: dict[str, Any], body: dict[str, Any], first: Callable[[], None]) -> None:
        with one_error_only():
            failure = self._failure_of_save(leaves, body, first)
            if failure is not None:
                # Without the error itself, which holds what its writers have to say until Python ends.
                raise UserError(failure)

    def _failure_of_save(self, leaves: dict[str, Any], body: dict[str, Any], first: Callable[[], None]) -> str | None:
        step = body["step"]
        try:
            # Popped one by one, so that the copy on the devices shrinks as the one on the host grows.
            values = {name: to_host(leaves.pop(name)) for name in list(leaves)}
            body["arrays"] |= {name: entry(value) for name, value in values.items() if not is_spread(value)}
            write_arrays(staging(self._folder, step, make_room=_is_primary()), values)
            try:
                if _is_primary():
                    first()
                    self._supersede(step)
                    publish(self._folder, step, body)
                    self._rotate()
            finally:
                wait_for_processes()
        except Exception as error:
            if _is_primary():
                remove_unfinished(self._folder, step)
            try:
                kept = f"step {max(self.steps())} is saved and intact"
            except (ValueError, UserError):
                kept = "no step is saved there"
            return (
                f"cannot save step {step} to {self._folder}: {first_line(error)}; {kept}: "
                "free space there or make it writable, then resume"
            )
        return None

    def _supersede(self, step: int) -> None:
        for later in numbered_steps(self._folder):
            if later > step:
                moved = self._move_aside(later, "superseded")
                self._warn(f"checkpoint {later} is of a history that ended at step {step}: now {moved.name}")

    def _rotate(self) -> None:
        steps = self.steps()
        kept = {*[step for step in steps if self._scheduled(step)][-self._keep :], *steps[-1:], self.best_step()}
        if self._keep_every is not None:
            kept |= {step for step in steps if step % self._keep_every == 0 and self._scheduled(step)}
        for step in steps:
            if step not in kept:
                remove_step(self._folder, step)

    def _move_aside(self, step: int, word: str) -> epath.Path:
        target = name_aside(self._folder, step, word)
        if _is_primary():
            (self._folder / str(step)).rename(target)
        return target


def _is_primary() -> bool:
    return jax.process_index() == 0
