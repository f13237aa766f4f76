"""`transformer-jax describe CONFIG|RUN [--SECTION.FIELD VALUE ...]`: the size and cost of a configuration."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from transformer_jax.cli.digest import digest_lines
from transformer_jax.cli.options import ConfigFields, parse_options, split_overrides
from transformer_jax.cli.shardings import Shardings, describe_shardings
from transformer_jax.cli.text import write_lines
from transformer_jax.config import Config, MeshConfig
from transformer_jax.config_fields import field_types
from transformer_jax.config_loading import load_config

SENTENCE_PIECES = 30
"""Pieces on each side of the sentence pair that FLOPs are counted for; about WMT14's average."""
STATE_BYTES = 16
"""Bytes for each parameter while training: float32 value, gradient and Adam's two moments."""


@dataclass(frozen=True)
class Options:
    """Parameters by module, FLOPs and memory of a configuration, or of a run."""

    config: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CONFIG|RUN")]
    """A configuration file, with a variant or without (configs/table3.py:B1), or a run's folder."""
    json: bool = False
    """One JSON object in place of the page."""
    digest: bool = False
    """Of a run: step and SHA-256 digests of the newest sound checkpoint, in place of the page. Runs that end alike have
    the same."""
    devices: int | None = None
    """Show each parameter's sharding on so many devices, which need not be there. Default, where --mesh.* is given: as
    many as these ask for, or for -1 all of this machine."""
    settings: ConfigFields = field(default_factory=Config)
    """For the help page; `load_config` applies these options to what the file gives."""


@dataclass(frozen=True)
class Description:
    """What a configuration costs."""

    vocab_size: int
    """Rows of the embedding that the figures are for."""
    parameters: dict[str, int]
    """Parameters by module, layers of a stack added up."""
    total_parameters: int
    """All parameters."""
    forward_flops: int
    """For one target piece, in a pair of SENTENCE_PIECES on each side, its share of the encoder's work included."""
    training_flops: int
    """Forward and backward: three times as many."""
    run_flops: int
    """Of all updates, were every batch full of target pieces; docs/results/table2.md has the paper's count."""
    training_bytes: int
    """Parameters, gradients, Adam's moments and the moving average, if any, on one device; activations come on top."""
    shardings: Shardings | None = None
    """On the mesh that was asked for."""


def run(argv: Sequence[str]) -> None:
    """Parse the options and print the description."""
    rest, overrides = split_overrides(argv)
    options = parse_options(Options, rest, "describe", field_types(Config))
    if options.digest:
        write_lines(None, digest_lines(options.config, as_json=options.json))
        return
    config = load_config(options.config, overrides)
    vocab_size = _vocab_size(config, pathlib.Path(options.config))
    description = describe(config, vocab_size)
    if options.devices is not None or config.mesh != MeshConfig():
        shardings = describe_shardings(config, vocab_size, options.devices)
        description = dataclasses.replace(description, shardings=shardings)
    write_lines(None, [json.dumps(dataclasses.asdict(description)) if options.json else _page(description)])


def describe(config: Config, vocab_size: int) -> Description:
    """The description of a configuration with an embedding of `vocab_size` rows; nothing is computed or allocated."""
    import jax
    import jax.numpy as jnp

    from transformer_jax.model.flops import TRAINING, forward_flops
    from transformer_jax.model.transformer import Transformer

    pieces = jnp.ones((1, 2), jnp.int32)
    network = Transformer(dataclasses.replace(config.model, vocab_size=vocab_size))
    variables = jax.eval_shape(network.init, jax.random.key(0), pieces, pieces)
    sizes = _sizes(variables["params"])
    by_module: dict[str, int] = {}
    for path, size in sizes.items():
        module = "/".join(path[:2] if len(path) > 2 else path[:1])
        by_module[module] = by_module.get(module, 0) + size
    forward = forward_flops(network.config, SENTENCE_PIECES, SENTENCE_PIECES) // SENTENCE_PIECES
    training = TRAINING * forward
    total = sum(sizes.values())
    return Description(
        vocab_size=vocab_size,
        parameters=by_module,
        total_parameters=total,
        forward_flops=forward,
        training_flops=training,
        run_flops=training * config.data.batch_tokens * config.train.steps,
        training_bytes=(STATE_BYTES + (0 if config.optimizer.ema_decay is None else 4)) * total,
    )


def _sizes(params: Mapping[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], int]:
    sizes: dict[tuple[str, ...], int] = {}
    for name, value in params.items():
        sizes |= _sizes(value, (*path, name)) if isinstance(value, Mapping) else {(*path, name): value.size}
    return sizes


def _vocab_size(config: Config, path: pathlib.Path) -> int:
    """The model's own figure, else the size of the run's tokenizer, else as many pieces as there may be."""
    if config.model.vocab_size is not None:
        return config.model.vocab_size
    tokenizer = path / "tokenizer.model"
    if not tokenizer.is_file():
        return config.data.vocab_size
    from transformer_jax.data.tokenizer import Tokenizer

    return Tokenizer.load(tokenizer).size


def _page(description: Description) -> str:
    rows = [*description.parameters.items(), ("all", description.total_parameters)]
    width = max(len(name) for name, _ in rows)
    lines = [f"Parameters, with {description.vocab_size:,} word pieces"]
    lines += [f"  {name:{width}}  {size:>13,}" for name, size in rows]
    lines += [
        f"FLOPs for a target piece, in pairs of {SENTENCE_PIECES} pieces a side: "
        f"{description.forward_flops:.3g} forward, {description.training_flops:.3g} in training, "
        f"{description.run_flops:.2g} in all updates if their batches are full",
    ]
    if description.shardings is not None:
        return "\n".join([*lines, *description.shardings.lines()])
    lines.append(
        f"Memory in training: {description.training_bytes / 2**30:.2f} GiB on each device for parameters, gradients "
        "and the optimizer's state; activations come on top"
    )
    return "\n".join(lines)
