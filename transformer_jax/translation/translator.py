"""Text in, text out: a model with its word pieces, wherever the two come from."""

import collections
import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

import jax
import numpy as np
from jax.sharding import Mesh

from transformer_jax.config import Config, SearchConfig
from transformer_jax.data.text import is_blank
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import UserError
from transformer_jax.ops.masks import EOS
from transformer_jax.parallel.mesh import row_shares
from transformer_jax.search.beam import SearchResult
from transformer_jax.translation.batching import Amount, SourceBatch, amount_of, plan
from transformer_jax.translation.results import BLANK, Score, Translation, piece_names, translations_of
from transformer_jax.translation.run_folder import Step, read_run, with_vocabulary
from transformer_jax.translation.sharing import on_devices_of, run_shared
from transformer_jax.translation.translate import Params, make_score, make_translate

BUFFER_SIZE = 2048
"""Lines that are read, tokenized, sorted by length and translated together: what is in memory at a time."""
SCORE_SHARE = 4
"""Scoring needs the logits of every target position at once: its batches have a fourth of the pieces."""


def warn_on_stderr(message: str) -> None:
    """Where warnings go unless a translator is given another place."""
    print(f"warning: {message}", file=sys.stderr)


class Translator:
    """Translates lines: as many come out as go in, in the same order, and blank ones stay blank.

    A line's translation does not depend on its neighbours. Programs compile once for each of a few shapes (see
    `translation.batching`) and are shared by all translators of one model configuration in a process.

    Args:
        config: the run's; `model.vocab_size` may be None.
        params: as `Transformer(config.model).init` gives them.
        tokenizer: the one that the model was trained with.
        warn: takes one sentence for each line that was cut.
        step: updates that made the parameters, if known.
        note: which parameters these are, for people.
        mesh: its devices share out the sentences; every process of the run must call then, with the same lines, and
            gets all translations. None: the device that the parameters lie on.

    Raises:
        UserError: the tokenizer's control pieces have other ids than this package's, or it has more pieces than
            `model.vocab_size`.
    """

    def __init__(
        self,
        config: Config,
        params: Params,
        tokenizer: Tokenizer,
        *,
        warn: Callable[[str], None] = warn_on_stderr,
        step: int | None = None,
        note: str = "",
        mesh: Mesh | None = None,
    ) -> None:
        self.config = dataclasses.replace(config, model=with_vocabulary(config.model, tokenizer))
        self._mesh = mesh
        self.tokenizer = tokenizer
        self.step = step
        self.note = note
        # Arrays that are on devices already stay where they are.
        self._params: Params = jax.device_put(params) if mesh is None else on_devices_of(mesh, params)
        self._warn = warn

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        step: Step = None,
        warn: Callable[[str], None] = warn_on_stderr,
        mesh: Mesh | None = None,
    ) -> "Translator":
        """The model of a run's folder, which needs nothing outside of it; `.step` and `.note` say what was taken.

        Args:
            path: the folder that training wrote, or its `averaged`.
            step: a checkpoint by its step; "best" for that with the highest dev BLEU (the newest if there is none).
                None: the averaged model if it was made at the newest checkpoint's step, which is the run's end; else
                as "best".
            warn: takes one sentence for each damaged checkpoint that was passed over, and for each line that was cut.
            mesh: as for `Translator`.

        Raises:
            UserError: no run there, no checkpoint yet, no such step, a checkpoint of another configuration or
                tokenizer, or a damaged file.
        """
        run = read_run(path, step, warn)
        return cls(run.config, run.params, run.tokenizer, warn=warn, step=run.step, note=run.note, mesh=mesh)

    def with_params(self, params: Params, *, step: int | None = None, note: str = "") -> "Translator":
        """The same translator with other parameters; nothing is compiled again."""
        return Translator(self.config, params, self.tokenizer, warn=self._warn, step=step, note=note, mesh=self._mesh)

    @overload
    def __call__(self, lines: str) -> str: ...  # type: ignore[overload-overlap]  # a str is an Iterable[str] too

    @overload
    def __call__(self, lines: Iterable[str]) -> list[str]: ...

    def __call__(self, lines: str | Iterable[str]) -> str | list[str]:
        """The best translation of a line, or of each line, by the run's search settings."""
        if isinstance(lines, str):
            return self([lines])[0]
        return [translations[0].text for translations in self.translate_stream(lines)]

    def translate(
        self,
        lines: Iterable[str],
        *,
        beam_size: int | None = None,
        length_penalty: float | None = None,
        n_best: int = 1,
        batch_tokens: int | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[list[Translation]]:
        """The `n_best` translations of each line, the best first; a blank line has one, which is blank.

        Lines with more than `search.max_source_length` pieces (EOS counted) are cut there, with a warning that has
        the line's number, and translated.

        Args:
            lines: sentences, in any iterable; a string is one sentence.
            beam_size: hypotheses kept, 1 is greedy; None: the run's setting, here and below.
            length_penalty: alpha in `Translation.score`.
            n_best: translations of each line, at most beam_size. They are distinct as word pieces.
            batch_tokens: padded source pieces in a batch.
            on_progress: takes the number of lines that are done, after each batch.

        Raises:
            UserError: a setting out of range, settings that the model's learned positions do not reach, or a line that
                is no string.
        """
        found = self.translate_stream(
            lines,
            beam_size=beam_size,
            length_penalty=length_penalty,
            n_best=n_best,
            batch_tokens=batch_tokens,
            on_progress=on_progress,
        )
        return list(found)

    def translate_stream(
        self,
        lines: Iterable[str],
        *,
        beam_size: int | None = None,
        length_penalty: float | None = None,
        n_best: int = 1,
        batch_tokens: int | None = None,
        buffer_size: int | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> Iterator[list[Translation]]:
        """As `translate`, one line's list after the other: input of any length in memory that does not grow.

        `lines` is read `buffer_size` lines at a time (None: 2048), and their translations come before the next are
        read: 1 answers each line before the next is asked for, at several times the price. Settings are checked at the
        call.
        """
        size = BUFFER_SIZE if buffer_size is None else buffer_size
        if size < 1:
            raise UserError(f"buffer_size is {size}, but must be at least 1")
        given = {"beam_size": beam_size, "length_penalty": length_penalty, "batch_tokens": batch_tokens}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        search = dataclasses.replace(self.config.search, n_best=n_best, **changes)
        # batch_tokens has no part in the program: one for all its values.
        program = make_translate(self.config.model, dataclasses.replace(search, batch_tokens=SearchConfig.batch_tokens))
        return self._stream(_listed(lines), size, search, program, on_progress or (lambda done: None))

    def score(self, sources: Iterable[str], targets: Iterable[str]) -> list[Score]:
        """log P of each target given its source, in one pass (forced decoding).

        Targets are tokenized anew, so a translation whose pieces are not those that the tokenizer would choose for its
        text gets another score than in `translate`. A blank target is EOS alone; a blank source is no exception.

        Raises:
            UserError: unequal numbers of sources and targets, a line that is no string, or a target longer than the
                model's learned positions.
        """
        sources, targets = list(_listed(sources)), list(_listed(targets))
        if len(sources) != len(targets):
            raise UserError(f"there are {len(sources)} sources but {len(targets)} targets; they must go line by line")
        amount = amount_of(len(sources))
        scores: list[Score] = []
        for start in range(0, len(sources), BUFFER_SIZE):
            window = slice(start, start + BUFFER_SIZE)
            scores += self._score_window(sources[window], targets[window], start, amount)
        return scores

    def _stream(
        self,
        lines: Iterable[str],
        buffer_size: int,
        search: SearchConfig,
        program: Callable[..., SearchResult],
        on_progress: Callable[[int], None],
    ) -> Iterator[list[Translation]]:
        remaining = iter(lines)
        start, amount = 0, None
        while window := list(itertools.islice(remaining, buffer_size)):
            sources = self._encode(window, start, search.max_source_length)
            # EOS alone: the tokenizer removes every character of the line.
            members = [i for i, line in enumerate(window) if len(sources[i]) > 1 and not is_blank(line)]
            # As in the first buffer, so that a short last one compiles nothing.
            amount = amount or amount_of(len(members))
            found = [[BLANK] for _ in window]
            done = start + len(window) - len(members)
            for batch, result in self._run([sources[i] for i in members], search, program, amount):
                translated = translations_of(jax.device_get(result), len(batch.members), self.tokenizer)
                for member, translations in zip(batch.members, translated, strict=True):
                    found[members[member]] = translations
                done += len(batch.members)
                on_progress(done)
            yield from found
            start += len(window)

    def _run(
        self,
        sources: Sequence[Sequence[int]],
        search: SearchConfig,
        program: Callable[..., SearchResult],
        amount: Amount,
    ) -> Iterator[tuple[SourceBatch, SearchResult]]:
        """Each batch with its result; the device has the next batch before the last one's result is turned to text."""
        running: collections.deque[tuple[SourceBatch, SearchResult]] = collections.deque()
        for batch in plan(
            [len(source) for source in sources],
            batch_tokens=search.batch_tokens,
            amount=amount,
            longest=search.max_source_length,
            shares=self._shares,
        ):
            running.append((batch, self._call(program, batch.array(sources))))
            if len(running) > 1:
                yield running.popleft()
        yield from running

    def _score_window(
        self, sources: Sequence[str], targets: Sequence[str], start: int, amount: Amount
    ) -> Iterator[Score]:
        model, search = self.config.model, self.config.search
        source_ids = self._encode(sources, start, search.max_source_length)
        target_ids = self.tokenizer.encode(targets)
        longest = model.max_positions if model.positions == "learned" else None
        for number, ids in enumerate(target_ids, start=start + 1):
            if longest is not None and len(ids) > longest:
                raise UserError(
                    f"target line {number} has {len(ids)} pieces, but the model has {longest} learned positions "
                    "(model.max_positions): split the line"
                )
        program: Callable[..., Any] = make_score(model)
        batches = plan(
            [max(len(source), len(target)) for source, target in zip(source_ids, target_ids, strict=True)],
            batch_tokens=max(1, search.batch_tokens // SCORE_SHARE),
            amount=amount,
            longest=longest,
            shares=self._shares,
        )
        scores: dict[int, Score] = {}
        for batch in batches:
            log_probs = np.asarray(self._call(program, batch.array(source_ids), batch.array(target_ids)))
            for row, member in enumerate(batch.members):
                ids = target_ids[member]
                values = log_probs[row, : len(ids)].tolist()
                scores[member] = Score(sum(values), tuple(zip(piece_names(ids, self.tokenizer), values, strict=True)))
        return (scores[i] for i in range(len(sources)))

    @property
    def _shares(self) -> int:
        return 1 if self._mesh is None else row_shares(self._mesh)

    def _call(self, program: Callable[..., Any], *arrays: np.ndarray) -> Any:
        if self._mesh is None:
            return program(self._params, *arrays)
        return run_shared(program, self._params, arrays, self._mesh)

    def _encode(self, lines: Sequence[str], start: int, longest: int) -> list[list[int]]:
        """Word pieces of lines `start` + 1 and on, EOS last, cut to `longest`."""
        encoded = self.tokenizer.encode(lines)
        for i, ids in enumerate(encoded):
            if len(ids) > longest:
                self._warn(
                    f"line {start + i + 1} has {len(ids)} word pieces and is cut after {longest} "
                    "(search.max_source_length): split it to have all of it translated"
                )
                encoded[i] = [*ids[: longest - 1], EOS]
        return encoded


def _listed(lines: Any) -> Iterator[str]:
    """The lines, as they are asked for; a string is one."""
    if isinstance(lines, bytes) or not isinstance(lines, Iterable):
        raise UserError(f"lines are of the type {type(lines).__name__}, but must be a string, or strings")
    # It is an iterable of strings, too: of its characters.
    for number, line in enumerate([lines] if isinstance(lines, str) else lines, start=1):
        if not isinstance(line, str):
            raise UserError(f"line {number} is of the type {type(line).__name__}, but must be a string")
        yield line
