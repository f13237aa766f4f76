"""`transformer-jax average RUN [--last N] [--minutes-apart M]`."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformer_jax.cli.options import Run, parse_options
from transformer_jax.errors import UserError


@dataclass(frozen=True)
class Options:
    """Average the newest checkpoints of a run into RUN/averaged, a folder that translates by itself (section 6.1)."""

    run: Run
    """The run's folder."""
    last: int | None = None
    """Checkpoints to average, the newest ones. None: train.average_checkpoints of the run, for which the paper's base
    model has 5 and its big one 20."""
    minutes_apart: float = 0.0
    """Minutes of training that must lie between two of them, 10 in the paper; 0 takes the newest as they are. Only
    those that train.keep_checkpoints and train.keep_every have kept can be taken."""


def run(argv: Sequence[str]) -> None:
    """Parse the options, average, and say which steps went in and where the result is."""
    options = parse_options(Options, argv, "average")
    if options.last is not None and options.last < 1:
        raise UserError(f"--last is {options.last}, but must be at least 1")
    if not 0 <= options.minutes_apart < float("inf"):
        raise UserError(f"--minutes-apart is {options.minutes_apart}, but must be at least 0")
    from transformer_jax.checkpointing.checkpoint_files import as_folder
    from transformer_jax.training.averaging import average_run
    from transformer_jax.translation.run_folder import run_config

    if not (as_folder(options.run) / "checkpoints").is_dir():
        raise UserError(f"{options.run} has no checkpoints; name the --workdir of a run")
    last = options.last or run_config(options.run).train.average_checkpoints
    path, steps = average_run(options.run, last, minutes_apart=options.minutes_apart)
    print(
        f"{path}: mean of the checkpoints of updates {', '.join(map(str, steps))}; "
        f"translate, evaluate and score take it for {options.run} from now on"
    )
