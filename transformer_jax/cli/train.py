"""`transformer-jax train --config FILE[:VARIANT] --workdir FOLDER [--SECTION.FIELD VALUE ...]`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformer_jax.cli.options import ConfigFields, parse_options, split_overrides
from transformer_jax.config import Config
from transformer_jax.config_fields import field_types
from transformer_jax.config_loading import load_config


@dataclass(frozen=True)
class Options:
    """Train a model, or go on with a run that was stopped: the same command again resumes it.

    The options with a dot change fields of the configuration; the defaults shown are the paper's, or
    beside --config FILE that file's.
    """

    config: str
    """Configuration: a Python file with get_config, say configs/demo.py, or with a variant, configs/table3.py:B1."""
    workdir: str
    """Folder of the run, or gs://BUCKET/NAME: config.json, tokenizer.model, checkpoints, metrics.jsonl, log.txt,
    TensorBoard events."""
    profile_steps: str | None = None
    """A:B records updates a to b with JAX's profiler: WORKDIR/profile then has a trace for TensorBoard, xprof or
    Perfetto."""
    coordinator: str | None = None
    """HOST:PORT of process 0, for a run of several processes that no launcher tells of one another (SLURM, Open MPI and
    Cloud TPU do). Also JAX_COORDINATOR_ADDRESS."""
    processes: int | None = None
    """How many processes train together. Also JAX_NUM_PROCESSES."""
    process: int | None = None
    """Which of them this is, from 0. Also JAX_PROCESS_ID."""
    start_timeout: int = 300
    """Seconds in which all processes must have met."""
    peer_timeout: int = 100
    """Seconds without a sign of life after which a process counts as dead, and the others are ended."""
    settings: ConfigFields = field(default_factory=Config)
    """For the help page; `load_config` applies these options to what the file gives."""


def run(argv: Sequence[str]) -> None:
    """Parse the options, load the configuration and train."""
    rest, overrides = split_overrides(argv)
    options = parse_options(Options, rest, "train", field_types(Config))
    config = load_config(options.config, overrides)
    from transformer_jax.parallel.processes import joined
    from transformer_jax.training.interruption import Interruptible
    from transformer_jax.training.loop import train
    from transformer_jax.training.profiling import parse_steps

    profile = parse_steps(options.profile_steps, config.train.steps) if options.profile_steps is not None else None
    together = joined(
        options.coordinator,
        options.processes,
        options.process,
        start_timeout=options.start_timeout,
        peer_timeout=options.peer_timeout,
    )
    with together, Interruptible():
        train(config, options.workdir, profile=profile)
