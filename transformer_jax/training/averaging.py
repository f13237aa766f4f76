"""Averages of checkpoints (section 6.1)."""

import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from transformer_jax.checkpointing.checkpoint_files import complete_steps
from transformer_jax.checkpointing.checkpoints import Checkpoints, load_params
from transformer_jax.errors import UserError


def average_checkpoints(
    folder: pathlib.Path, last: int, warn: Callable[[str], None]
) -> tuple[dict[str, Any], list[int]]:
    """The mean of the parameters of the newest `last` checkpoints, and their steps.

    One checkpoint at a time is in memory beside the sum, which is float64: the mean of copies is the copy.

    Raises:
        UserError: fewer checkpoints than asked for, a damaged one, or shapes that differ.
    """
    steps = complete_steps(folder)[-last:]
    if len(steps) < last:
        raise UserError(f"{folder} has {len(steps)} checkpoints, fewer than the {last} to average: ask for fewer")
    total: Any = None
    params: Any = None
    for step in steps:
        params = load_params(folder, step, warn=warn).params
        wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
        total = wide if total is None else _add(total, wide, folder / str(step))
    return jax.tree.map(lambda leaf, like: (leaf / len(steps)).astype(like.dtype), total, params), steps


def _add(total: Any, wide: Any, name: pathlib.Path) -> Any:
    shapes = [jax.tree.map(np.shape, tree) for tree in (total, wide)]
    if shapes[0] != shapes[1]:
        raise UserError(f"{name}: its parameters have other shapes than those of the checkpoints before it")
    return jax.tree.map(np.add, total, wide)


def save_averaged(
    run: pathlib.Path,
    params: Mapping[str, Any],
    steps: list[int],
    extra: Mapping[str, Any],
    warn: Callable[[str], None],
) -> pathlib.Path:
    """Writes RUN/averaged, a folder that translates by itself: config.json, tokenizer.model, one checkpoint."""
    folder = run / "averaged"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.model"):
        shutil.copyfile(run / name, folder / name)
    checkpoints = Checkpoints(folder / "checkpoints", keep=1, warn=warn)
    checkpoints.save(steps[-1], {"params": params}, {**extra, "averaged_steps": steps}, score=None)
    checkpoints.close()
    return folder
