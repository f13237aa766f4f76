"""Averages of checkpoints (section 6.1)."""

import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from transformer_jax.checkpointing.checkpoint_files import DamagedError, complete_steps, read_step
from transformer_jax.checkpointing.checkpoints import Checkpoints, read_extra
from transformer_jax.checkpointing.named_arrays import nest
from transformer_jax.errors import UserError
from transformer_jax.translation.translator import warn_on_stderr


def average_run(
    run: pathlib.Path, last: int, *, warn: Callable[[str], None] = warn_on_stderr
) -> tuple[pathlib.Path, list[int]]:
    """Writes RUN/averaged, a folder that translates by itself: config.json, tokenizer.model, one checkpoint.

    An earlier one is replaced when the new one is whole.

    Returns:
        The folder, and the steps whose parameters' mean it holds.

    Raises:
        UserError: as `average_checkpoints`; or the folder cannot be written.
    """
    checkpoints = run / "checkpoints"
    params, steps = average_checkpoints(checkpoints, last, warn)
    extra = {**read_extra(checkpoints, steps[-1]), "averaged_steps": steps}
    final, unfinished, old = (run / name for name in ("averaged", ".averaged.unfinished", ".averaged.old"))
    try:
        for leftover in (unfinished, old):
            shutil.rmtree(leftover, ignore_errors=True)
        _write(unfinished, run, params, extra, warn)
        if final.exists():
            final.rename(old)
        unfinished.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"{error.filename or final}: {error.strerror or error}; the mean of checkpoints was not written"
        ) from error
    return final, steps


def average_checkpoints(
    folder: pathlib.Path, last: int, warn: Callable[[str], None]
) -> tuple[dict[str, Any], list[int]]:
    """The mean of the parameters of the newest `last` checkpoints, and their steps.

    One checkpoint at a time is in memory beside the sum, which is float64: the mean of copies is the copy. A damaged
    checkpoint is left out, with a warning.

    Raises:
        UserError: fewer checkpoints than asked for, none sound, or shapes that differ.
    """
    folder = folder.absolute()  # as orbax wants it
    steps = complete_steps(folder)[-last:]
    if len(steps) < last:
        raise UserError(f"{folder} has {len(steps)} checkpoints, fewer than the {last} to average: ask for fewer")
    sums: dict[str, Any] = {}
    dtypes: dict[str, Any] = {}
    averaged: list[int] = []
    for step in steps:
        try:
            _, arrays = read_step(folder / str(step), None, params_only=True)
        except DamagedError as damage:
            warn(f"checkpoint {folder / str(step)} is left out of the mean: {damage}")
            continue
        if averaged and {n: a.shape for n, a in arrays.items()} != {n: a.shape for n, a in sums.items()}:
            raise UserError(
                f"checkpoint {folder / str(step)} has parameters of other names or shapes than checkpoint "
                f"{averaged[-1]}: average checkpoints of one run"
            )
        dtypes = {name: array.dtype for name, array in arrays.items()}
        sums = {name: sums.get(name, 0.0) + array.astype(np.float64) for name, array in arrays.items()}
        averaged.append(step)
    if not averaged:
        raise UserError(f"none of the newest {last} checkpoints in {folder} is sound: train on to save others")
    means = {name: (total / len(averaged)).astype(dtypes[name]) for name, total in sums.items()}
    params: dict[str, Any] = nest(means)["params"]
    return params, averaged


def _write(
    folder: pathlib.Path,
    run: pathlib.Path,
    params: Mapping[str, Any],
    extra: Mapping[str, Any],
    warn: Callable[[str], None],
) -> None:
    folder.mkdir()
    for name in ("config.json", "tokenizer.model"):
        shutil.copyfile(run / name, folder / name)
    checkpoints = Checkpoints(folder / "checkpoints", keep=1, warn=warn)
    checkpoints.save(extra["averaged_steps"][-1], {"params": params}, extra, score=None)
    checkpoints.close()
