"""What is to be trained: the rows of a table at a scale, each as a configuration, for as many seeds as wanted."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformer_jax.ablation.scale import Scale, scaled
from transformer_jax.ablation.table import Row, choose_rows, load_rows
from transformer_jax.config import Config
from transformer_jax.config_fields import field_types
from transformer_jax.config_loading import load_config, override
from transformer_jax.errors import UserError


@dataclass(frozen=True)
class Settings:
    """An ablation as it is asked for."""

    table: str
    """A configuration file with ROWS."""
    workdir: pathlib.Path
    """Folder of the runs and of the report."""
    rows: str | None = None
    """Names of rows by commas; None: all."""
    scale: Scale = "full"
    """See `ablation.scale`."""
    seeds: int = 1
    """Runs of each row."""
    steps: int | None = None
    """Updates of the first row; the others keep their ratio to it. None: the table's at that scale."""
    overrides: tuple[str, ...] = ()
    """Fields changed in every row, as `load_config` takes them."""


@dataclass(frozen=True)
class Run:
    """One row with one seed."""

    row: Row
    seed: int
    config: Config
    folder: pathlib.Path


@dataclass(frozen=True)
class Experiment:
    """An ablation as it can be done."""

    settings: Settings
    rows: tuple[Row, ...]
    """The first is what the others are compared with."""
    configs: Mapping[str, Config]
    """By row; without those that cannot be built."""
    failures: Mapping[str, str]
    """Why a row cannot be built."""
    shrunk: tuple[tuple[str, object, object], ...]
    """Fields of the first row that the scale, the number of updates and the overrides change: name, from, to."""

    def runs(self) -> list[Run]:
        """Breadth first: seed 0 of every row, then seed 1, so that an early end leaves a whole table."""
        found = []
        for number in range(self.settings.seeds):
            for row in self.rows:
                if row.name not in self.configs:
                    continue
                config = self.configs[row.name]
                seed = config.train.seed + number
                config = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))
                found.append(Run(row, seed, config, self.settings.workdir / row.name / f"seed{seed}"))
        return found


def plan(settings: Settings) -> Experiment:
    """Reads the table and builds its rows; a row that cannot be built is a failure that stops no other.

    Raises:
        UserError: a faulty file or option, unknown rows, an override of what rows differ in, or no row can be built.
    """
    if settings.seeds < 1:
        raise UserError(f"--seeds is {settings.seeds}, but must be at least 1")
    if settings.steps is not None and settings.steps < 1:
        raise UserError(f"--steps is {settings.steps}, but must be at least 1")
    table = load_rows(settings.table)
    rows = choose_rows(table, settings.rows)
    _refuse_overrides(settings.overrides, rows)
    first = load_config(f"{settings.table}:{table[0].name}")
    configs, failures = {}, {}
    for row in rows:
        try:
            configs[row.name] = _at_scale(load_config(f"{settings.table}:{row.name}"), first.train.steps, settings)
        except UserError as error:
            failures[row.name] = str(error)
    if not configs:
        raise UserError(f"no row can be built; {next(iter(failures))}: {next(iter(failures.values()))}")
    before, after = flat(first), flat(configs.get(table[0].name, first))
    shrunk = tuple((name, before[name], after[name]) for name in before if before[name] != after[name])
    return Experiment(settings, rows, configs, failures, shrunk)


def flat(config: Config) -> dict[str, object]:
    """Every field by dotted name."""
    return {
        name: getattr(getattr(config, name.partition(".")[0]), name.partition(".")[2]) for name in field_types(Config)
    }


def _at_scale(config: Config, first_steps: int, settings: Settings) -> Config:
    ratio = config.train.steps / first_steps
    config = scaled(config, settings.scale)
    if settings.steps is not None:
        steps = max(1, round(settings.steps * ratio))
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))
    return override(config, settings.overrides)


def _refuse_overrides(overrides: Sequence[str], rows: Sequence[Row]) -> None:
    """A field that rows differ in, set for all, would make them one."""
    for item in overrides:
        name = item.partition("=")[0].removeprefix("--").replace("-", "_")
        changing = [row.name for row in rows if name in row.changes]
        if name == "train.steps":
            raise UserError("train.steps cannot be set for all rows: write --steps N, which keeps the rows' ratio")
        if changing:
            raise UserError(f"{name} is what row {changing[0]} changes, so it cannot be set for all rows: leave it out")
