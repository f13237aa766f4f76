"""Averages of checkpoints (section 6.1)."""

import contextlib
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from etils import epath

from transformer_jax.checkpointing.array_files import grouped, read_arrays, stored_params
from transformer_jax.checkpointing.checkpoint_files import (
    AnyPath,
    DamagedError,
    as_folder,
    complete_steps,
    is_remote,
    read_record,
    remove,
    storage_errors,
)
from transformer_jax.checkpointing.checkpoints import Checkpoints, read_extra
from transformer_jax.checkpointing.named_arrays import Entry, nest
from transformer_jax.data.workplace import alone_in
from transformer_jax.errors import UserError
from transformer_jax.heap import freed_blocks_given_back
from transformer_jax.parallel.processes import first_alone, is_first
from transformer_jax.translation.translator import warn_on_stderr

Warn = Callable[[str], None]

_OF_A_RUN = {"tokenizer", "text", "configuration"}
"""What all checkpoints of a run have alike in their records."""


def average_run(
    run: AnyPath, last: int, *, minutes_apart: float = 0.0, warn: Warn = warn_on_stderr
) -> tuple[epath.Path, list[int]]:
    """Writes RUN/averaged, a folder that translates by itself: config.json, tokenizer.model, one checkpoint.

    An earlier one is replaced when the new one is whole; at gs://, where no folder can be renamed, it is removed first.

    Args:
        run: a run's folder, local or at gs://.
        last: checkpoints to average; the paper takes 5 for its base model and 20 for its big one.
        minutes_apart: training time that must lie between two of them; the paper's were written every 10 minutes. The
            newest is always taken.
        warn: takes one sentence for each damaged checkpoint that is left out.

    Returns:
        The folder, and the steps whose parameters' mean it holds.

    Raises:
        UserError: as `choose_steps` and `average_checkpoints`; or the folder cannot be written.
    """
    as_folder(run)  # which knows the addresses that there are
    home = epath.Path(run)
    source = home / "checkpoints"
    params, steps = average_checkpoints(source, choose_steps(source, last, minutes_apart, warn), warn)
    extra = {**read_extra(source, steps[-1]), "averaged_steps": steps}
    final, old = home / "averaged", home / ".averaged.old"
    unfinished = final if is_remote(home) else home / ".averaged.unfinished"
    try:
        with _others_wait(home):
            with first_alone("the folder of the mean of checkpoints"):
                if is_first():
                    for leftover in (unfinished, old):
                        remove(leftover)
                    _copy_files(home, unfinished)
            checkpoints = Checkpoints(unfinished / "checkpoints", keep=1, warn=warn)
            checkpoints.save(steps[-1], {"params": params}, extra, score=None)
            checkpoints.close()
            with first_alone("the mean of checkpoints in its place"):
                if is_first() and unfinished != final:
                    if final.exists():
                        final.rename(old)
                    unfinished.rename(final)
                    remove(old)
    except storage_errors() as error:
        what = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(
            f"{getattr(error, 'filename', None) or final}: {what}; the mean of checkpoints was not written"
        ) from error
    return final, steps


def _others_wait(run: epath.Path) -> contextlib.AbstractContextManager[object]:
    """Keeps out a second command, or the end of the run itself, that writes a mean of the same run."""
    if is_remote(run) or not is_first():
        return contextlib.nullcontext()
    return alone_in(pathlib.Path(run / ".averaging"))


def choose_steps(folder: AnyPath, last: int, minutes_apart: float, warn: Warn) -> list[int]:
    """The newest `last` steps, or those that go back from the newest by at least so many minutes of training each.

    Raises:
        UserError: there are fewer; or a record does not say how long the run had trained.
    """
    steps = complete_steps(folder)
    if minutes_apart:
        steps = _apart(as_folder(folder), steps, last, 60 * minutes_apart, warn)
    if not steps:
        raise UserError(f"{folder} has no whole checkpoint to average: train the run first")
    if len(steps) < last:
        apart = f" that lie {minutes_apart:g} minutes of training apart" if minutes_apart else ""
        raise UserError(
            f"{folder} has {len(steps)} checkpoints{apart}, fewer than the {last} to average: ask for fewer"
            + (", or for less time between them (train.keep_every keeps more)" if apart else "")
        )
    return steps[-last:]


def _apart(folder: epath.Path, steps: list[int], last: int, seconds_apart: float, warn: Warn) -> list[int]:
    chosen: list[int] = []
    limit = float("inf")
    for step in reversed(steps):
        try:
            seconds = read_record(folder / str(step))["extra"].get("seconds")
        except DamagedError as damage:
            warn(f"checkpoint {folder / str(step)} is left out of the mean: {damage}")
            continue
        if seconds is None:
            raise UserError(
                f"checkpoint {folder / str(step)} does not say how long its run had trained: average by number"
            )
        if seconds <= limit and len(chosen) < last:
            chosen.append(step)
            limit = seconds - seconds_apart
    return chosen[::-1]


def average_checkpoints(folder: AnyPath, steps: list[int], warn: Warn) -> tuple[dict[str, Any], list[int]]:
    """The mean of the parameters of some steps, and those whose parameters are in it.

    A sum is float64, so that the mean of copies is the copy. In memory are the means so far, and of the arrays whose
    turn it is, GROUP_BYTES or one, the sum and one checkpoint's: twice the parameters in all, whatever the number of
    steps. A damaged checkpoint is left out, with a warning.

    Raises:
        UserError: none is sound, or their shapes differ.
    """
    root = as_folder(folder)
    averaged = list(steps)
    while averaged:
        try:
            with freed_blocks_given_back():
                return _mean(root, averaged), averaged
        except _LeftOut as damage:
            # What was read of it is in the sum by now: the sum begins again without it.
            warn(f"checkpoint {root / str(damage.step)} is left out of the mean: {damage}")
            averaged.remove(damage.step)
    raise UserError(f"none of the checkpoints {', '.join(map(str, steps))} in {root} is sound: train on to save others")


class _LeftOut(Exception):
    """A step that is damaged; the message is the reason."""

    def __init__(self, step: int, reason: DamagedError) -> None:
        super().__init__(str(reason))
        self.step = step


def _mean(folder: epath.Path, steps: list[int]) -> dict[str, Any]:
    stored = _all_stored(folder, steps)
    means: dict[str, np.ndarray] = {}
    for group in grouped(stored[steps[0]]):
        sums: dict[str, np.ndarray] = {}
        for step in steps:
            with _left_out_if_damaged(step):
                for name, array in read_arrays(folder / str(step), {name: stored[step][name] for name in group}):
                    if name in sums:
                        np.add(sums[name], array, out=sums[name])
                    else:
                        sums[name] = array.astype(np.float64)
        for name in group:
            total = sums.pop(name)
            total /= len(steps)
            means[name] = total.astype(stored[steps[0]][name]["dtype"])
            means[name].flags.writeable = False  # which spares a copy of all when they are saved
    params: dict[str, Any] = nest(means)["params"]
    return params


def _all_stored(folder: epath.Path, steps: list[int]) -> dict[int, dict[str, Entry]]:
    stored: dict[int, dict[str, Entry]] = {}
    of_run: dict[str, str] = {}
    for step in steps:
        with _left_out_if_damaged(step):
            record = read_record(folder / str(step))
            stored[step] = stored_params(folder / str(step), record)
        extra = record.get("extra", {})
        for name in _OF_A_RUN & extra.keys():
            if not _alike(name, of_run.setdefault(name, extra[name]), extra[name]):
                raise UserError(
                    f"checkpoint {folder / str(step)} is of another run than checkpoint {steps[0]}, by its {name}: "
                    "average checkpoints of one run"
                )
        shapes = [
            {name: (found["shape"], found["dtype"]) for name, found in stored[at].items()} for at in (step, steps[0])
        ]
        if shapes[0] != shapes[1]:
            raise UserError(
                f"checkpoint {folder / str(step)} has parameters of other names or shapes than checkpoint {steps[0]}: "
                "average checkpoints of one run"
            )
    return stored


def _alike(name: str, one: str, other: str) -> bool:
    """Configurations in the fields that both have: the run may have gone on with another version, which knows more."""
    if name != "configuration":
        return one == other
    fields, others = json.loads(one), json.loads(other)
    return all(fields[name] == others[name] for name in fields.keys() & others.keys())


@contextlib.contextmanager
def _left_out_if_damaged(step: int) -> Iterator[None]:
    try:
        yield
    except DamagedError as damage:
        raise _LeftOut(step, damage) from damage


def _copy_files(run: epath.Path, folder: epath.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.model"):
        (run / name).copy(folder / name, overwrite=True)
