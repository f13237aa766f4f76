"""`transformer-jax evaluate RUN [--split test | --source FILE --reference FILE]`."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from transformer_jax.cli.options import Run, given, parse_options
from transformer_jax.cli.text import check_output, read_pairs, write_lines
from transformer_jax.config import DataConfig
from transformer_jax.errors import UserError


@dataclass(frozen=True)
class Options:
    """Translate a test set, every line of it, and score it: BLEU and chrF with sacreBLEU's signatures."""

    run: Run
    """The model: a run's folder, an averaged checkpoint or an exported folder."""
    split: Literal["dev", "test"] = "test"
    """Which part of the run's own corpus; unused with --source and --reference."""
    source: str | None = None
    """Your own test set: source text, one sentence a line."""
    reference: str | None = None
    """Its reference translations, line by line."""
    output: str | None = None
    """File for the translations; they are not kept where none is given."""
    json: bool = False
    """The scores as one JSON object in place of a table."""
    beam_size: int | None = None
    """Hypotheses kept; 1 is greedy. None: the run's setting."""
    length_penalty: float | None = None
    """alpha in log P / ((5 + length) / 6)^alpha. None: the run's setting."""
    batch_tokens: int | None = None
    """Padded source pieces in a batch. None: the run's setting."""


def run(argv: Sequence[str]) -> None:
    """Parse the options, translate the test set and print its scores."""
    options = parse_options(Options, argv, "evaluate")
    if (options.source is None) != (options.reference is None):
        raise UserError("--source and --reference go together: give both, or neither for the run's own corpus")
    if options.source is not None:
        check_output(options.output, options.source, options.reference)
    elif options.output is not None:
        check_output(options.output)
    own_text = None
    if options.source is not None and options.reference is not None:
        own_text = read_pairs(options.source, options.reference)
    from transformer_jax.evaluation.bleu import corpus_scores
    from transformer_jax.evaluation.report import scores_table
    from transformer_jax.translation.translator import Translator

    translator = Translator.load(options.run)
    data = translator.config.data
    sources, references = own_text or _split(data, options.split)
    found = translator.translate(sources, n_best=1, **given(options, "beam_size", "length_penalty", "batch_tokens"))
    hypotheses = [translations[0].text for translations in found]
    if options.output is not None:
        write_lines(options.output, hypotheses)
    scores = corpus_scores(hypotheses, references, data.target_language)
    name = f"{options.source}" if own_text else f"{data.train_source or data.corpus}, {options.split}"
    title = f"{options.run} on {name} ({data.source_language} to {data.target_language})"
    write_lines(None, [json.dumps(dataclasses.asdict(scores)) if options.json else scores_table(scores, title)])


def _split(data: DataConfig, split: Literal["dev", "test"]) -> tuple[list[str], list[str]]:
    from transformer_jax.data.sources import load_splits

    text = getattr(load_splits(data), split)
    if text is None:
        raise UserError(f"the run's corpus has no {split} set; give one with --source and --reference")
    pairs = list(text)
    return [source for source, _ in pairs], [target for _, target in pairs]
