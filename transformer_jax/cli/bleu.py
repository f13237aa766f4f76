"""`transformer-jax bleu --hypothesis FILE --reference FILE --language de`: scores of any system, from plain files."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from transformer_jax.cli.options import parse_options
from transformer_jax.cli.text import check_output, read_pairs, write_lines
from transformer_jax.evaluation.language import require_code


@dataclass(frozen=True)
class Options:
    """Score translations that are there already, line by line: the paper's BLEU, sacreBLEU, chrF2."""

    hypothesis: str
    """The translations, plain text: no word pieces, not tokenized, one a line, empty ones too."""
    reference: str
    """The reference translations, plain text, line by line."""
    language: str
    """Code of the language of both (de, fr, zh ...); chooses the tokenisation."""
    json: bool = False
    """The scores as one JSON object in place of a table."""


def run(argv: Sequence[str]) -> None:
    """Parse the options, read both files and print the scores."""
    options = parse_options(Options, argv, "bleu")
    check_output(None)
    require_code(options.language, "--language")
    hypotheses, references = read_pairs(options.hypothesis, options.reference)
    from transformer_jax.evaluation.bleu import corpus_scores
    from transformer_jax.evaluation.plain_text import signs_of_processing
    from transformer_jax.evaluation.report import Evaluation

    for path, lines in ((options.hypothesis, hypotheses), (options.reference, references)):
        for sign in signs_of_processing(lines):
            print(f"warning: {path}: {sign}", file=sys.stderr)
    scores = corpus_scores(hypotheses, references, options.language)
    evaluation = Evaluation(options.hypothesis, options.reference, options.language, scores)
    write_lines(None, [json.dumps(evaluation.to_dict()) if options.json else evaluation.table()])
