"""From a configuration to everything a run needs before its first update: tokenizer, tokenized text, batch plan."""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

import transformer_jax
from transformer_jax.checkpointing.checkpoint_files import AnyPath
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
from transformer_jax.training.run_home import RunHome
from transformer_jax.translation.run_folder import with_vocabulary

# Fields of the model by which an update is worked out in another way, and rounded in another.
_ROUNDING = {"scan_layers", "attention_impl", "remat"}
# Fields that may differ between a run and the command that continues it: none changes an update.
_FREE = {
    "model": _ROUNDING,
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
# Where a refusal would surprise.
_WHY = {"train.steps": ", to which its learning rate falls since the first update (optimizer.decay is linear)"}


@dataclass(frozen=True)
class Prepared:
    """A run's text, ready for training."""

    home: RunHome
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
    meeting: str = ""
    """Of several processes: what the first has written into the folder, so that the others see it is the same."""

    @property
    def identity(self) -> dict[str, str]:
        """What a checkpoint's parameters and data position belong to: digests, and fields as JSON."""
        return {
            "tokenizer": self.tokenizer.digest,
            "text": self.train.folder.name,
            "configuration": json.dumps(_binding(self.config)),
        }

    @property
    def common(self) -> dict[str, str]:
        """What all processes of a run must have alike: on other text they would make unlike numbers of batches, and
        wait for one another for ever; parts of a checkpoint in folders of their own are no checkpoint."""
        test = self.splits.test
        return {
            **self.identity,
            "dev text": self.dev.folder.name,
            "test text": "" if test is None else test.digest(),
            "folder behind --workdir, which must be one that all share (or gs://),": self.meeting,
        }


def prepare(config: Config, workdir: AnyPath, say: Callable[[str], None]) -> Prepared:
    """Makes or opens a run's folder: tokenizer.model, tokenized text and, when all is checked, config.json.

    What an earlier command made is used again. A folder without a checkpoint holds no run yet: what a command that
    failed early has left there does not bind the next one. Of several processes the first writes; the others call this
    after it.

    Raises:
        UserError: faulty text or files, or a folder that holds a run of another configuration, tokenizer or text.
    """
    home = RunHome.at(workdir)
    if is_first():
        home.fetch()
    else:
        home.fetch("config.json", "tokenizer.model")
        require_shared(home.local / "tokenizer.model")
        require_shared(home.local / "config.json")
    begun = _has_begun(home)
    if begun:
        stored = stored_config(home)
        require_same_run(stored, config, str(home))
        _say_what_rounds(stored, config, say)
    folder = pathlib.Path(config.data.cache_dir) if config.data.cache_dir else home.local / "data"
    readings = Readings(folder / "files.json")
    splits = load_splits(config.data, readings)
    for note in splits.notes:
        say(note)
    tokenizer = _tokenizer(config, home.local, begun, splits.train, folder, say)
    config = dataclasses.replace(config, model=with_vocabulary(config.model, tokenizer))
    train, dev = (build_store(text, tokenizer, folder) for text in (splits.train, splits.dev))
    plan, dev_plan = (
        plan_batches(store.lengths, config.data, seed=config.train.seed, name=text.name)
        for store, text in ((train, splits.train), (dev, splits.dev))
    )
    readings.save()
    _require_rows(config, plan)
    prepared = Prepared(home, config, tokenizer, splits, train, dev, plan, dev_plan, _meeting(home))
    if begun:
        _require_same_text(prepared)
    if is_first():
        write_whole(home.local / "config.json", config.to_json())
        home.keep("config.json", "tokenizer.model")
    return prepared


def _require_rows(config: Config, plan: BatchPlan) -> None:
    rows = max(shape.rows for shape in plan.shapes)
    if config.train.accumulate > rows:
        raise UserError(
            f"train.accumulate is {config.train.accumulate}, but a batch has {rows} rows to share out: give at most as "
            "many parts, or raise data.batch_tokens"
        )


def _meeting(home: RunHome) -> str:
    if jax.process_count() == 1:
        return ""
    path = home.kept / ".meeting"
    with contextlib.suppress(OSError):
        if is_first():
            path.write_text(uuid.uuid4().hex)
        return path.read_text()
    return "none"


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


def _has_begun(home: RunHome) -> bool:
    if home.local.exists() and not home.local.is_dir():
        raise UserError(f"{home} is a file: choose another --workdir")
    if home.checkpoints.is_dir() and any(home.checkpoints.iterdir()):
        return True
    for name in ("averaged", "results.json"):
        if (home.kept / name).exists():
            raise UserError(
                f"{home} has {name}, the result of a run, but no checkpoint to go on from: choose another --workdir"
            )
    return False


def stored_config(home: RunHome) -> Config:
    """The configuration in a run's folder; what is kept elsewhere must have been fetched.

    Raises:
        UserError: it is missing or damaged.
    """
    path = home.local / "config.json"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{home}: has checkpoints but no config.json; choose another --workdir") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); choose another --workdir") from error
    return Config.from_json(text, str(path))


def require_same_run(stored: Config, config: Config, workdir: AnyPath) -> None:
    """Raises UserError where `config` would go on with a run in another way than it began."""
    before = _binding(stored)
    for name, now in _binding(config).items():
        if before.get(name, now) != now and (name, now) != ("model.vocab_size", None):
            raise UserError(
                f"{workdir} holds a run with {name} {before[name]!r}, and this command says {now!r}"
                f"{_WHY.get(name, '')}: choose another --workdir, or give the run's own value to go on with it"
            )


def _say_what_rounds(stored: Config, config: Config, say: Callable[[str], None]) -> None:
    changed = [
        f"model.{name} is {getattr(config.model, name)!r} from here on and was {getattr(stored.model, name)!r}"
        for name in sorted(_ROUNDING)
        if getattr(config.model, name) != getattr(stored.model, name)
    ]
    if changed:
        say(f"{', '.join(changed)}: the numbers are those of the run as it was, to rounding only")


def _binding(config: Config) -> dict[str, Any]:
    """The fields, by name, that a run has from its first update to its last."""
    found = {
        f"{section.name}.{name}": value
        for section in dataclasses.fields(Config)
        if section.name not in _FREE_SECTIONS
        for name, value in vars(getattr(config, section.name)).items()
        if name not in _FREE.get(section.name, ())
    }
    if config.optimizer.decay == "inverse_sqrt":
        del found["train.steps"]
    return found


def _require_same_text(prepared: Prepared) -> None:
    home = prepared.home
    extra = read_extra(home.checkpoints)
    for name in ("tokenizer", "text"):
        digest = prepared.identity[name]
        if extra.get(name, digest) != digest:
            raise UserError(
                f"{home}: its checkpoints were trained with another {name} than there is now; "
                f"choose another --workdir, or bring that {name} back"
            )
    theirs = json.loads(extra.get("configuration", "{}"))
    for name, value in _binding(prepared.config).items():
        if theirs.get(name, value) != value:
            raise UserError(
                f"{home}/checkpoints is of another run: it was trained with {name} {theirs[name]!r}, and "
                f"config.json beside it has {value!r}; bring this run's own back, or choose another --workdir"
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
