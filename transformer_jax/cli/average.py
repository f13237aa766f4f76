"""`transformer-jax average RUN [--last N]`."""

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass

from transformer_jax.cli.options import Run, parse_options
from transformer_jax.errors import UserError


@dataclass(frozen=True)
class Options:
    """Average the newest checkpoints of a run into RUN/averaged, a folder that translates by itself (section 6.1)."""

    run: Run
    """The run's folder."""
    last: int = 5
    """Checkpoints to average, the newest ones; the paper takes 5 for its base model and 20 for its big one."""


def run(argv: Sequence[str]) -> None:
    """Parse the options, average, and say which steps went in and where the result is."""
    options = parse_options(Options, argv, "average")
    if options.last < 1:
        raise UserError(f"--last is {options.last}, but must be at least 1")
    folder = pathlib.Path(options.run)
    if not (folder / "checkpoints").is_dir():
        raise UserError(f"{folder} has no checkpoints; name the --workdir of a run")
    from transformer_jax.training.averaging import average_run

    path, steps = average_run(folder, options.last)
    print(f"{path}: mean of the checkpoints of updates {', '.join(map(str, steps))}")
