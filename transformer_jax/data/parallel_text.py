"""Pairs of source and target sentences: streamed from where they lie, as often as wanted, never held in memory."""

import abc
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, zip_longest

from transformer_jax.data.readings import Readings
from transformer_jax.data.text import is_blank, read_lines
from transformer_jax.errors import UserError

# Without validation text the first full pair of every 50 lines (2 %) is held out, of more lines where that would give
# over 1000 pairs.
_HOLD_OUT_EVERY = 50
_HOLD_OUT_MOST = 1000


class ParallelText(abc.ABC):
    """Sentence pairs, iterated as `(source, target)`; each iteration starts anew and gives the same pairs."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """What messages call this text."""

    @abc.abstractmethod
    def __iter__(self) -> Iterator[tuple[str, str]]:
        """The pairs in order, blank ones included."""

    @abc.abstractmethod
    def check(self) -> int:
        """Reads all of the text once and returns the number of pairs.

        Raises:
            UserError: unequal line counts, a row without exactly two columns, a line that is not UTF-8.
        """

    @abc.abstractmethod
    def digest(self) -> str:
        """A hexadecimal digest that changes with the content (not with the name or the place)."""

    def sentences(self, limit: int | None = None) -> Iterator[str]:
        """Both sides of every pair, one sentence after the other: what a shared tokenizer learns from.

        Args:
            limit: at most so many sentences, those of every k-th pair, always the same. None: all.
        """
        every = 1 if limit is None else max(-(-self.check() // max(limit // 2, 1)), 1)
        for pair in islice(self, 0, None, every):
            yield from pair


@dataclass(frozen=True)
class TwoFiles(ParallelText):
    """Line i of one file translates line i of the other. Plain text or gzip."""

    source: str
    target: str
    readings: Readings = field(default_factory=Readings, repr=False, compare=False)

    @property
    def name(self) -> str:
        """Both file names."""
        return f"{self.source} and {self.target}"

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """The pairs in order; unequal counts raise here too, where one file ends."""
        for source, target in zip_longest(read_lines(self.source), read_lines(self.target)):
            if source is None or target is None:
                raise self._unequal(*self._counts())
            yield source, target

    def check(self) -> int:
        """Counts the lines of both files; see `ParallelText.check`."""
        sources, targets = self._counts()
        if sources != targets:
            raise self._unequal(sources, targets)
        return sources

    def digest(self) -> str:
        """Digest of both files' bytes."""
        return _digest("two files", self.readings.digest(self.source), self.readings.digest(self.target))

    def _counts(self) -> tuple[int, int]:
        return self._lines(self.source), self._lines(self.target)

    def _lines(self, path: str) -> int:
        return int(self.readings.of_file("lines", path, lambda: sum(1 for _ in read_lines(path))))

    def _unequal(self, sources: int, targets: int) -> UserError:
        return UserError(
            f"{self.source} has {sources} lines but {self.target} has {targets}: line i of one must translate line i "
            "of the other, so mend the files until the counts agree"
        )


@dataclass(frozen=True)
class TsvFile(ParallelText):
    """A file of `source<TAB>target` rows, plain or gzip."""

    path: str
    swap: bool = False
    """Whether the rows hold the target first."""
    readings: Readings = field(default_factory=Readings, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """The rows in order."""
        for number, row in enumerate(read_lines(self.path), start=1):
            columns = row.split("\t")
            if len(columns) != 2:
                raise UserError(
                    f"{self.path}, row {number}: {len(columns)} column{'s' * (len(columns) != 1)} where there must be "
                    "two, source<TAB>target; mend the row"
                )
            first, second = columns
            yield (second, first) if self.swap else (first, second)

    def check(self) -> int:
        """Reads every row; see `ParallelText.check`."""
        return int(self.readings.of_file("rows", self.path, lambda: sum(1 for _ in self)))

    def digest(self) -> str:
        """Digest of the file's bytes and of the direction."""
        return _digest("tsv", self.readings.digest(self.path), str(self.swap))


@dataclass(frozen=True)
class Joined(ParallelText):
    """Several texts, one after the other."""

    texts: tuple[ParallelText, ...]

    @property
    def name(self) -> str:
        """The first one's name, and how many follow."""
        return f"{self.texts[0].name} and {len(self.texts) - 1} more"

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """All pairs."""
        for text in self.texts:
            yield from text

    def check(self) -> int:
        """All pairs; see `ParallelText.check`."""
        return sum(text.check() for text in self.texts)

    def digest(self) -> str:
        """Digest of all, in their order."""
        return _digest("joined", *(text.digest() for text in self.texts))


@dataclass(frozen=True)
class _HeldOut(ParallelText):
    text: ParallelText
    pairs: tuple[tuple[str, str], ...] = field(repr=False)

    @property
    def name(self) -> str:
        return f"{len(self.pairs)} pairs held out of {self.text.name}"

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self.pairs)

    def check(self) -> int:
        return len(self.pairs)

    def digest(self) -> str:
        return _digest("held out", *(sentence for pair in self.pairs for sentence in pair))


@dataclass(frozen=True)
class _Remainder(ParallelText):
    """A text without the pairs that share their source with a held-out pair."""

    text: ParallelText
    held_out: _HeldOut
    sources: frozenset[str] = field(repr=False)

    @property
    def name(self) -> str:
        return self.text.name

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return (pair for pair in self.text if pair[0] not in self.sources)

    def check(self) -> int:
        return sum(1 for _ in self)

    def digest(self) -> str:
        return _digest("remainder", self.text.digest(), self.held_out.digest())


def hold_out(text: ParallelText, readings: Readings | None = None) -> tuple[ParallelText, ParallelText, str]:
    """Splits a text that comes without validation pairs, always in the same way.

    About 2 % of the pairs, at least 1 and at most 1000, spread evenly, neither side blank. Pairs that repeat a held-out
    source stay out of the training part too, or validation would measure memory.

    Returns:
        The training part, the validation part, and a sentence that says what was done.

    Raises:
        UserError: what `ParallelText.check` raises, or one of the parts would be empty.
    """
    count = text.check()
    every = max(_HOLD_OUT_EVERY, -(-count // _HOLD_OUT_MOST))
    found = (readings or Readings()).of_content(f"held out of {text.digest()}", lambda: _spread(text, every))
    pairs = [(source, target) for source, target in found]
    held_out = _HeldOut(text, tuple(pairs))
    remainder = _Remainder(text, held_out, frozenset(source for source, _ in pairs))
    if not pairs or not any(not is_blank(source) and not is_blank(target) for source, target in remainder):
        raise UserError(
            f"{text.name}: too few different pairs to hold some out for validation; "
            "set data.dev_source and data.dev_target"
        )
    note = (
        f"{len(pairs)} of {count} pairs of {text.name} are held out for validation (one of every {every}; other pairs "
        "with the same source are left out of training too): set data.dev_source and data.dev_target to use your own"
    )
    return remainder, held_out, note


def _spread(text: ParallelText, every: int) -> list[tuple[str, str]]:
    """The first pair with text on both sides of every block of `every` pairs."""
    pairs = []
    next_block = 0
    for index, (source, target) in enumerate(text):
        if index // every >= next_block and not is_blank(source) and not is_blank(target):
            pairs.append((source, target))
            next_block = index // every + 1
    return pairs


def _digest(*parts: str) -> str:
    whole = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8")
        whole.update(len(data).to_bytes(8, "little") + data)  # lengths keep ("ab", "c") apart from ("a", "bc")
    return whole.hexdigest()
