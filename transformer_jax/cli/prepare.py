"""`transformer-jax prepare CONFIG --workdir RUN | --data.cache-dir FOLDER [--SECTION.FIELD VALUE ...]`."""

import pathlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from transformer_jax.cli.options import ConfigFields, parse_options, split_overrides
from transformer_jax.cli.progress import counting
from transformer_jax.config import Config
from transformer_jax.config_fields import field_types
from transformer_jax.config_loading import load_config
from transformer_jax.data.batches import plan_batches
from transformer_jax.data.readings import Readings
from transformer_jax.data.sources import ParallelText, load_splits
from transformer_jax.data.store import build_store
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.data.vocabulary import learn_vocabulary
from transformer_jax.errors import UserError

if TYPE_CHECKING:
    from transformer_jax.training.run_home import RunHome


@dataclass(frozen=True)
class Options:
    """Do all that comes before training: download, clean, learn word pieces, tokenize. Training then starts at once.

    Stopped at any moment, the same command goes on from there: archives that arrived whole, the learned pieces and
    the text tokenized so far are kept.
    """

    config: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CONFIG")]
    """A configuration file, with a variant or without: configs/base.py:fr."""
    workdir: str | None = None
    """Folder of the run that will be trained; what is made goes into its folder `data` (of a run at gs://, into the
    user's cache on this machine). Or give --data.cache-dir, which any number of runs can share."""
    processes: int | None = None
    """Processes that tokenize. Without: one for each processor."""
    settings: ConfigFields = field(default_factory=Config)
    """For the help page; `load_config` applies these options to what the file gives."""


def run(argv: Sequence[str]) -> None:
    """Parse the options, load the configuration and prepare its text."""
    rest, overrides = split_overrides(argv)
    options = parse_options(Options, rest, "prepare", field_types(Config))
    config = load_config(options.config, overrides)
    if options.processes is not None and options.processes < 1:
        raise UserError(f"--processes is {options.processes}, but must be at least 1")
    if config.data.cache_dir is None and options.workdir is None:
        raise UserError("--workdir or --data.cache-dir must be given: where the tokenized text goes")
    prepare(config, options.workdir, options.processes, Console(highlight=False, soft_wrap=True))


def prepare(config: Config, workdir: str | None, processes: int | None, console: Console) -> None:
    """Prepares the training and the dev text of a configuration, and says what came of it."""

    def say(line: str) -> None:
        console.print(line, markup=False)

    from transformer_jax.training.run_home import RunHome

    home = None if workdir is None else RunHome.at(workdir)
    folder = pathlib.Path(config.data.cache_dir or (home and home.local / "data") or "")
    readings = Readings(folder / "files.json")
    splits = load_splits(config.data, readings)
    for note in splits.notes:
        say(note)
    count = splits.train.check()
    say(f"text       {splits.train.name}: {count:,} pairs; dev {splits.dev.name}: {splits.dev.check():,}")
    readings.save()
    tokenizer = _tokenizer(config, home, folder, splits.train, say)
    begin = time.monotonic()
    with counting(console, "tokenizing", count) as on_progress:
        store = build_store(splits.train, tokenizer, folder, processes=processes, on_progress=on_progress)
    dev = build_store(splits.dev, tokenizer, folder)
    pieces = [int(offsets[-1]) for offsets in (store.source_offsets, store.target_offsets)]
    say(
        f"tokenized  {len(store):,} pairs, {pieces[0]:,} + {pieces[1]:,} word pieces, "
        f"{time.monotonic() - begin:,.0f} s, in {store.folder}"
    )
    plan = plan_batches(store.lengths, config.data, seed=config.train.seed, name=splits.train.name)
    plan_batches(dev.lengths, config.data, seed=config.train.seed, name=splits.dev.name)  # or training would refuse it
    say(f"cleaned    {len(plan.kept):,} pairs are left; dropped are {plan.reasons}")
    outlook = plan.outlook
    say(
        f"batches    {'' if outlook.exact else 'about '}{outlook.batches:,} an epoch, "
        f"fill {plan.fill(outlook.planned):.1%}"
    )
    where = f"--data.cache-dir {config.data.cache_dir}" if config.data.cache_dir else f"--workdir {workdir}"
    say(f"ready      train with the same configuration and {where}")


def _tokenizer(
    config: Config, home: "RunHome | None", folder: pathlib.Path, text: ParallelText, say: Callable[[str], None]
) -> Tokenizer:
    """A run that has begun keeps its own; else the one that is given, or one learned from the text."""
    if home is not None and home.checkpoints.is_dir() and any(home.checkpoints.iterdir()):
        home.fetch("tokenizer.model")
        return Tokenizer.load(home.local / "tokenizer.model")
    if config.data.tokenizer is not None:
        return Tokenizer.load(config.data.tokenizer)
    return learn_vocabulary(text, config.data, folder, say)
