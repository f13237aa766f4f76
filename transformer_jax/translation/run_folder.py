"""Which of a run's parameters to translate with, and whether its files belong together."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from etils import epath

from transformer_jax.checkpointing.checkpoint_files import (
    as_folder,
    best_step,
    complete_steps,
    is_remote,
    storage_errors,
)
from transformer_jax.checkpointing.checkpoints import load_params, read_extra
from transformer_jax.config import Config, ModelConfig
from transformer_jax.config_loading import load_config
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Transformer

Step = int | Literal["best"] | None


@dataclass(frozen=True)
class Run:
    """A trained model, as its folder holds it."""

    config: Config
    """With model.vocab_size filled in."""
    params: dict[str, Any]
    tokenizer: Tokenizer
    step: int
    note: str


def read_run(path: str | os.PathLike[str], step: Step, warn: Callable[[str], None]) -> Run:
    """Reads config.json, tokenizer.model and a checkpoint of a run's folder, local or at gs://.

    `Translator.load` says which checkpoint.

    Raises:
        UserError: no run there, no checkpoint yet, no such step, files that do not belong together, a damaged file.
    """
    as_folder(path)  # which knows the addresses that there are
    folder = epath.Path(path)
    _require_run(folder)
    checkpoints, step = _choose(folder, step)
    try:
        return _read(checkpoints, step, warn)
    except UserError as error:
        if checkpoints.parent == folder or not complete_steps(folder / "checkpoints"):
            raise
        warn(f"{checkpoints.parent} is passed over, make it anew with `transformer-jax average`: {error}")
        return _read(*_choose(folder, step, averaged=False), warn)


def _read(checkpoints: epath.Path, step: Step, warn: Callable[[str], None]) -> Run:
    config, tokenizer = run_config(checkpoints.parent), _tokenizer(checkpoints.parent)
    # Before the shapes are compared: another tokenizer may make them differ, which would then be all that one reads.
    digest = read_extra(checkpoints, step).get("tokenizer", tokenizer.digest)
    if digest != tokenizer.digest:
        raise UserError(
            f"{checkpoints.parent / 'tokenizer.model'} is not the tokenizer that {checkpoints} was trained with "
            f"(SHA-256 {tokenizer.digest[:12]}..., trained with {digest[:12]}...): bring back the run's own"
        )
    config = dataclasses.replace(config, model=with_vocabulary(config.model, tokenizer))
    piece = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    abstract = jax.eval_shape(Transformer(config.model).init, jax.random.key(0), piece, piece)["params"]
    restored = load_params(checkpoints, step, abstract=abstract, warn=warn)
    return Run(config, restored.params, tokenizer, restored.step, _note(restored.step, restored.extra, restored.score))


def run_config(run: str | os.PathLike[str]) -> Config:
    """The configuration in a run's folder, local or at gs://.

    Raises:
        UserError: it is missing or damaged.
    """
    path = as_folder(run) / "config.json"
    if not is_remote(path):
        return load_config(os.fspath(epath.Path(run) / "config.json"))
    try:
        return Config.from_json(path.read_text(), str(path))
    except storage_errors() as error:
        raise UserError(f"{path} cannot be read ({error}); check the address") from error


def _tokenizer(run: epath.Path) -> Tokenizer:
    path = run / "tokenizer.model"
    if not is_remote(run):
        return Tokenizer.load(path)
    try:
        return Tokenizer(path.read_bytes(), str(path))
    except storage_errors() as error:
        raise UserError(f"{path} cannot be read ({error}); check the address") from error


def with_vocabulary(model: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """`model` with its vocab_size filled in.

    Raises:
        UserError: it has fewer rows than the tokenizer has pieces.
    """
    rows = model.vocab_size
    if rows is not None and rows < tokenizer.size:
        raise UserError(
            f"model.vocab_size is {rows}, but the tokenizer has {tokenizer.size} pieces; use the tokenizer.model and "
            "config.json of one run"
        )
    return dataclasses.replace(model, vocab_size=rows or tokenizer.size)


def _require_run(folder: epath.Path) -> None:
    if not folder.exists():
        raise UserError(f"there is no folder {str(folder)!r}; name the --workdir of a run")
    if not (folder / "config.json").is_file():
        what = "a file" if folder.is_file() else "no run's folder: it has no config.json"
        raise UserError(f"{str(folder)!r} is {what}; name the --workdir of a run")


def _choose(folder: epath.Path, step: Step, *, averaged: bool = True) -> tuple[epath.Path, Step]:
    """The folder of checkpoints to take, and which of them."""
    checkpoints = folder / "checkpoints"
    steps = complete_steps(checkpoints) if checkpoints.is_dir() else []
    mean = folder / "averaged" / "checkpoints"
    if averaged and step is None and mean.is_dir():
        # Made at the run's end, of its newest checkpoints; older than those once the run has gone on.
        averaged_steps = complete_steps(mean)
        if averaged_steps and averaged_steps[-1] >= max(steps, default=0):
            return mean, None
    if not steps:
        raise UserError(f"the run {str(folder)!r} has no checkpoint yet: train it until the first is saved")
    return checkpoints, "best" if step is None and best_step(checkpoints) is not None else step


def named_steps(steps: Sequence[int]) -> str:
    """`mean of checkpoints 3, 6`, or `checkpoint 6` where there is one alone."""
    listed = ", ".join(map(str, steps))
    return f"checkpoint {listed}" if len(steps) == 1 else f"mean of checkpoints {listed}"


def _note(step: int, extra: dict[str, Any], score: float | None) -> str:
    averaged = extra.get("averaged_steps")
    if averaged:
        return named_steps(averaged)
    return f"checkpoint {step}" + (f", dev BLEU {score:.2f}" if score is not None else "")
