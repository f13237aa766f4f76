"""From a configuration to everything a run needs before its first update: tokenizer, tokenized text, batch plan."""

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Callable
from dataclasses import dataclass

import jax

import transformer_jax
from transformer_jax.checkpointing.checkpoints import read_extra
from transformer_jax.config import Config
from transformer_jax.data.batches import BatchPlan, plan_batches
from transformer_jax.data.readings import Readings
from transformer_jax.data.sources import ParallelText, Splits, load_splits
from transformer_jax.data.store import TokenStore, build_store
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.data.vocabulary import learn_vocabulary
from transformer_jax.errors import UserError
from transformer_jax.parallel.processes import is_first, require_shared
from transformer_jax.translation.run_folder import with_vocabulary

# Fields that may differ between a run and the command that continues it: none changes an update.
_FREE = {
    # A text may be named by another path, or be moved: `Prepared.identity` knows it by its digest.
    "data": {
        "data_dir", "cache_dir", "tokenizer", "train_source", "train_target", "dev_source", "dev_target",
        "test_source", "test_target",
    },
    "train": {
        "evaluate_every", "evaluate_sentences", "checkpoint_every", "keep_checkpoints", "keep_every",
        "average_checkpoints", "log_every", "skip_limit", "accumulate",
    },
}  # fmt: skip
_FREE_SECTIONS = {"search", "mesh"}


@dataclass(frozen=True)
class Prepared:
    """A run's text, ready for training."""

    config: Config
    """The configuration with model.vocab_size filled in."""
    tokenizer: Tokenizer
    splits: Splits
    train: TokenStore
    dev: TokenStore
    plan: BatchPlan
    """Batches of the training text."""
    dev_plan: BatchPlan
    """Batches of the dev text."""

    @property
    def identity(self) -> dict[str, str]:
        """Digests of what a checkpoint's parameters and data position belong to."""
        return {"tokenizer": self.tokenizer.digest, "text": self.train.folder.name}


def prepare(config: Config, workdir: pathlib.Path, say: Callable[[str], None]) -> Prepared:
    """Makes or opens a run's folder: tokenizer.model, tokenized text and, when all is checked, config.json.

    What an earlier command made is used again. A folder without a checkpoint holds no run yet: what a command that
    failed early has left there does not bind the next one. Of several processes the first writes; the others call this
    after it.

    Raises:
        UserError: faulty text or files, or a folder that holds a run of another configuration, tokenizer or text.
    """
    if not is_first():
        require_shared(workdir / "tokenizer.model")
        require_shared(workdir / "config.json")
    begun = _has_begun(workdir)
    if begun:
        require_same_run(stored_config(workdir), config, workdir)
    folder = pathlib.Path(config.data.cache_dir) if config.data.cache_dir else workdir / "data"
    readings = Readings(folder / "files.json")
    splits = load_splits(config.data, readings)
    for note in splits.notes:
        say(note)
    tokenizer = _tokenizer(config, workdir, begun, splits.train, folder, say)
    config = dataclasses.replace(config, model=with_vocabulary(config.model, tokenizer))
    train, dev = (build_store(text, tokenizer, folder) for text in (splits.train, splits.dev))
    plan, dev_plan = (
        plan_batches(store.lengths, config.data, seed=config.train.seed, name=text.name)
        for store, text in ((train, splits.train), (dev, splits.dev))
    )
    readings.save()
    prepared = Prepared(config, tokenizer, splits, train, dev, plan, dev_plan)
    if begun:
        _require_same_text(prepared, workdir)
    if is_first():
        write_whole(workdir / "config.json", config.to_json())
    return prepared


def started_with(config: Config) -> dict[str, str]:
    """Digests of what all processes of a run must have been started with."""
    code = hashlib.sha256()
    for path in sorted(pathlib.Path(transformer_jax.__file__).parent.rglob("*.py")):
        code.update(path.read_bytes())
    return {
        "configuration": hashlib.sha256(config.to_json().encode()).hexdigest(),
        "version of jax": jax.__version__,
        "version of the package": code.hexdigest(),
    }


def _has_begun(workdir: pathlib.Path) -> bool:
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f"{workdir} is a file: choose another --workdir")
    checkpoints = workdir / "checkpoints"
    if checkpoints.is_dir() and any(checkpoints.iterdir()):
        return True
    for name in ("averaged", "results.json"):
        if (workdir / name).exists():
            raise UserError(
                f"{workdir} has {name}, the result of a run, but no checkpoint to go on from: choose another --workdir"
            )
    return False


def stored_config(workdir: pathlib.Path) -> Config:
    """The configuration in a run's folder.

    Raises:
        UserError: it is missing or damaged.
    """
    path = workdir / "config.json"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{workdir}: has checkpoints but no config.json; choose another --workdir") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); choose another --workdir") from error
    return Config.from_json(text, str(path))


def require_same_run(stored: Config, config: Config, workdir: pathlib.Path) -> None:
    """Raises UserError where `config` would go on with a run in another way than it began."""
    for section in dataclasses.fields(Config):
        old, new = getattr(stored, section.name), getattr(config, section.name)
        if section.name in _FREE_SECTIONS:
            continue
        for name in (item.name for item in dataclasses.fields(old)):
            before, now = getattr(old, name), getattr(new, name)
            free = name in _FREE.get(section.name, ()) or (section.name, name, now) == ("model", "vocab_size", None)
            if (section.name, name) == ("train", "steps") and config.optimizer.decay == "inverse_sqrt":
                free = True
            if before != now and not free:
                raise UserError(
                    f"{workdir} holds a run with {section.name}.{name} {before!r}, and this command says {now!r}: "
                    "choose another --workdir, or give the run's own value to go on with it"
                )


def _require_same_text(prepared: Prepared, workdir: pathlib.Path) -> None:
    extra = read_extra(workdir / "checkpoints")
    for name, digest in prepared.identity.items():
        if extra.get(name, digest) != digest:
            raise UserError(
                f"{workdir}: its checkpoints were trained with another {name} than there is now; "
                f"choose another --workdir, or bring that {name} back"
            )


def write_whole(path: pathlib.Path, text: str) -> None:
    """Writes a small file so that readers see the old or the new one, never a part."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.unfinished")
        with unfinished.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error}); choose another --workdir") from error


def _tokenizer(
    config: Config,
    workdir: pathlib.Path,
    begun: bool,
    text: ParallelText,
    folder: pathlib.Path,
    say: Callable[[str], None],
) -> Tokenizer:
    path = workdir / "tokenizer.model"
    given = Tokenizer.load(config.data.tokenizer) if config.data.tokenizer else None
    if path.exists() and (begun or not is_first()):
        tokenizer = Tokenizer.load(path)
        if given is not None and given.digest != tokenizer.digest:
            raise UserError(
                f"{path} is not the tokenizer of data.tokenizer ({config.data.tokenizer}): choose another --workdir"
            )
        return tokenizer
    if given is not None:
        given.save(path)
        return given
    tokenizer = learn_vocabulary(text, config.data, folder, say)
    tokenizer.save(path)
    return tokenizer
