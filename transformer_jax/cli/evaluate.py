"""`transformer-jax evaluate RUN [--split test | --source FILE --reference FILE]`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console

from transformer_jax.cli.options import Run, given, parse_options
from transformer_jax.cli.progress import counting
from transformer_jax.cli.text import check_output, read_pairs, write_lines
from transformer_jax.config import DataConfig
from transformer_jax.errors import UserError


@dataclass(frozen=True)
class Options:
    """Translate a test set, every line of it, and score it: the paper's BLEU, sacreBLEU, chrF2, perplexity."""

    run: Run
    """The model: a run's folder, whose averaged model is taken if it is as new as the newest checkpoint, or a folder
    of checkpoints' mean itself: RUN/averaged."""
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
    from transformer_jax.evaluation.forced_decoding import reference_perplexity
    from transformer_jax.evaluation.report import Evaluation
    from transformer_jax.parallel.mesh import all_devices
    from transformer_jax.translation.translator import Translator, warn_on_stderr

    translator = Translator.load(options.run, mesh=all_devices())
    data = translator.config.data
    name, sources, references = _split(data, options.split) if own_text is None else (options.source, *own_text)
    settings = given(options, "beam_size", "length_penalty", "batch_tokens")
    with counting(Console(stderr=True), "translating", len(sources)) as on_progress:
        found = translator.translate(sources, n_best=1, on_progress=on_progress, **settings)
    hypotheses = [translations[0].text for translations in found]
    if options.output is not None:
        write_lines(options.output, hypotheses)
    evaluation = Evaluation(
        system=options.run,
        test_set=str(name),
        direction=f"{data.source_language}-{data.target_language}",
        scores=corpus_scores(hypotheses, references, data.target_language),
        perplexity=reference_perplexity(translator, list(zip(sources, references, strict=True)), warn_on_stderr),
    )
    write_lines(None, [json.dumps(evaluation.to_dict()) if options.json else evaluation.table()])


def _split(data: DataConfig, split: Literal["dev", "test"]) -> tuple[str, list[str], list[str]]:
    """Its name, and both sides."""
    from transformer_jax.data.sources import load_splits

    text = getattr(load_splits(data), split)
    if text is None:
        raise UserError(f"the run's corpus has no {split} set; give one with --source and --reference")
    pairs = list(text)
    return text.name, [source for source, _ in pairs], [target for _, target in pairs]
