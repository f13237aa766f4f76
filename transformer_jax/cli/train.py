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

    The options with a dot change fields of the configuration; the defaults shown are the paper's, a file has its own.
    """

    config: str
    """Configuration: a Python file with get_config, say configs/demo.py, or with a variant, configs/table3.py:B1."""
    workdir: str
    """Folder of the run: config.json, tokenizer.model, checkpoints, metrics.jsonl, log.txt, TensorBoard events."""
    settings: ConfigFields = field(default_factory=Config)
    """For the help page; `load_config` applies these options to what the file gives."""


def run(argv: Sequence[str]) -> None:
    """Parse the options, load the configuration and train."""
    rest, overrides = split_overrides(argv)
    options = parse_options(Options, rest, "train", field_types(Config))
    config = load_config(options.config, overrides)
    from transformer_jax.training.loop import train

    train(config, options.workdir)
