"""`transformer-jax translate RUN < in.txt > out.txt`."""

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from transformer_jax.cli.options import Run, given, parse_options
from transformer_jax.cli.progress import counting_up
from transformer_jax.cli.text import check_output, read_input, write_lines
from transformer_jax.errors import UserError

if TYPE_CHECKING:
    from transformer_jax.translation.results import Translation


@dataclass(frozen=True)
class Options:
    """Translate text, one sentence a line: as many lines out as in, in the same order; blank lines stay blank.

    With --n-best above 1, each sentence gives that many lines (a blank one gives one), best first, and each line starts
    with the number of its input line. Columns are separated by tabs.
    """

    run: Run
    """The model: a run's folder, whose averaged model is taken if it is as new as the newest checkpoint, or a folder
    of checkpoints' mean itself: RUN/averaged."""
    input: str | None = None
    """Text file to translate, .gz too; standard input where none is given."""
    output: str | None = None
    """File to write; standard output where none is given."""
    beam_size: int | None = None
    """Hypotheses kept; 1 is greedy. None: the run's setting."""
    length_penalty: float | None = None
    """alpha in log P / ((5 + length) / 6)^alpha. None: the run's setting."""
    n_best: int = 1
    """Translations of each sentence, at most the beam size."""
    scores: bool = False
    """Put a column with the score (log P over the length penalty) before the text."""
    json: bool = False
    """One JSON object a line in place of text: line, source, and translations with text, score and word pieces."""
    batch_tokens: int | None = None
    """Padded source pieces in a batch. None: the run's setting."""
    buffer_size: int | None = None
    """Lines that are read before the first is translated; 1 answers each as it comes, and takes several times as long.
    None: 1 at a terminal, else 2048."""


def run(argv: Sequence[str]) -> None:
    """Parse the options, read, translate and write."""
    options = parse_options(Options, argv, "translate")
    if options.input is not None and options.input.removesuffix(".gz").endswith(".tsv"):
        raise UserError(
            f"--input {options.input} has columns, where one sentence a line is wanted: give the source alone"
        )
    lines = read_input(options.input)
    check_output(options.output, options.input)
    from transformer_jax.parallel.mesh import all_devices
    from transformer_jax.translation.translator import Translator

    # The translator reads ahead; tee keeps the source text of those, and no more.
    lines, sources = itertools.tee(lines)
    search = given(options, "beam_size", "length_penalty", "n_best", "batch_tokens", "buffer_size")
    if options.input is None and options.buffer_size is None and sys.stdin.isatty():
        search["buffer_size"] = 1
    translator = Translator.load(options.run, mesh=all_devices())
    on_progress = counting_up(Console(stderr=True, highlight=False, soft_wrap=True), "translated", " lines")
    found = zip(sources, translator.translate_stream(lines, **search, on_progress=on_progress), strict=True)
    write_lines(options.output, _json(found) if options.json else _text(found, options))


def _text(found: "Iterable[tuple[str, Sequence[Translation]]]", options: Options) -> Iterator[str]:
    for number, (_, translations) in enumerate(found, start=1):
        for translation in translations:
            columns = [str(number)] if options.n_best > 1 else []
            columns += [f"{translation.score:.4f}"] if options.scores else []
            yield "\t".join([*columns, translation.text])


def _json(found: "Iterable[tuple[str, Sequence[Translation]]]") -> Iterator[str]:
    for number, (source, translations) in enumerate(found, start=1):
        entries = [dataclasses.asdict(translation) for translation in translations]
        yield json.dumps({"line": number, "source": source, "translations": entries}, ensure_ascii=False)
