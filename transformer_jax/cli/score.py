"""`transformer-jax score RUN --source FILE --target FILE`."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

from transformer_jax.cli.options import Run, parse_options
from transformer_jax.cli.text import check_output, read_pairs, write_lines


@dataclass(frozen=True)
class Options:
    """Log-probability (natural, summed over word pieces and the end) that a model gives to each translation."""

    run: Run
    """The model: a run's folder, whose averaged model is taken if it is as new as the newest checkpoint, or a folder
    of checkpoints' mean itself: RUN/averaged."""
    source: str
    """Source text, one sentence a line."""
    target: str
    """Its translations, line by line."""
    output: str | None = None
    """File to write; standard output where none is given."""
    json: bool = False
    """One JSON object a line in place of the number."""


def run(argv: Sequence[str]) -> None:
    """Parse the options, read both files, score and write a line for each pair."""
    options = parse_options(Options, argv, "score")
    check_output(options.output, options.source, options.target)
    sources, targets = read_pairs(options.source, options.target)
    from transformer_jax.parallel.mesh import all_devices
    from transformer_jax.translation.translator import Translator

    scores = Translator.load(options.run, mesh=all_devices()).score(sources, targets)
    if options.json:
        write_lines(options.output, (json.dumps(dataclasses.asdict(score), ensure_ascii=False) for score in scores))
    else:
        write_lines(options.output, (f"{score.log_prob:.4f}" for score in scores))
