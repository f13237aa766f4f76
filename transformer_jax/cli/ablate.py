"""`transformer-jax ablate TABLE --workdir FOLDER [--scale demo --seeds 3 --rows A1,B2 --SECTION.FIELD VALUE ...]`."""

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from transformer_jax.ablation.experiment import Settings, plan
from transformer_jax.ablation.scale import Scale
from transformer_jax.checkpointing.checkpoint_files import as_folder, is_remote
from transformer_jax.cli.options import ConfigFields, parse_options, split_overrides
from transformer_jax.config import Config
from transformer_jax.config_fields import field_types
from transformer_jax.errors import UserError


@dataclass(frozen=True)
class Options:
    """Train every row of a table of experiments and set the results side by side: the same command again goes on.

    FOLDER/ROW/seedN is a run like any other. report.md, report.json and report.png are written anew after each run, and
    seed 0 of all rows comes before seed 1. The options with a dot change a field of every row.
    """

    table: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TABLE")]
    """A configuration file with ROWS, say configs/table3.py; the first row is what the others are compared with."""
    workdir: str
    """Folder of the runs and of the report."""
    rows: str | None = None
    """Rows by name, with commas: A1,B2; the first of the table is always there. None: all."""
    scale: Scale = "full"
    """full: the table as it stands. demo: a quarter of the widths, half of the layers, on the embedded corpus."""
    seeds: int = 1
    """Runs of each row, each with its own seed."""
    steps: int | None = None
    """Updates of the first row; the others keep their ratio to it. None: the table's own at that scale."""
    report_only: bool = False
    """Train nothing: write the report from what is finished."""
    settings: ConfigFields = field(default_factory=Config)
    """For the help page; these options are applied to every row."""


def run(argv: Sequence[str]) -> None:
    """Parse the options, train what is not trained yet and print where the report is."""
    rest, overrides = split_overrides(argv)
    options = parse_options(Options, rest, "ablate", field_types(Config))
    if is_remote(as_folder(options.workdir)):
        raise UserError(
            f"--workdir is {options.workdir}, but a table's runs go into a local or mounted folder: name one"
        )
    settings = Settings(
        options.table,
        pathlib.Path(options.workdir),
        options.rows,
        options.scale,
        options.seeds,
        options.steps,
        tuple(overrides),
    )
    experiment = plan(settings)
    for name, reason in experiment.failures.items():
        print(f"warning: row {name} is left out: {reason}", flush=True)
    if options.report_only:
        from transformer_jax.ablation.report import write_report
        from transformer_jax.ablation.runs import require_same_settings

        require_same_settings(experiment)
        path = write_report(experiment, experiment.failures)
    else:
        from transformer_jax.ablation.runs import train_all
        from transformer_jax.training.interruption import Interruptible

        with Interruptible():
            path = train_all(experiment, lambda message: print(message, flush=True))
    print(path)
