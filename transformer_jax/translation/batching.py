"""Few static shapes: which sentences are translated together, in arrays of which size.

A shape costs seconds to compile and, on a CPU, a padded row a few milliseconds. So widths are powers of two, and a call
uses one number of rows for each width: 1 for a lone sentence, 8 for a few, a full batch for many. Sentences go from the
longest to the shortest, each batch taking the next ones whatever their width: only the last batch has empty rows, and
that one is narrow. Where few batches do, all have one width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from transformer_jax.ops.masks import PAD

NARROWEST = 16
"""Pieces in the narrowest batch."""
FEW_ROWS = 8
"""Rows of a batch where there are few sentences."""
MOST_ROWS = 64
"""Rows of a batch at most, and the number of sentences up to which there are few of them."""
SAME_WIDTH = 8
"""Batches up to which all get the first one's width: what narrower ones would save does not pay for compiling them."""

Amount = Literal["one", "few", "many"]


@dataclass(frozen=True)
class SourceBatch:
    """Sentences of one array."""

    rows: int
    width: int
    members: np.ndarray
    """Which sentences [n], n at most `rows`: indices into the lengths that were planned."""

    def array(self, sentences: Sequence[Sequence[int]]) -> np.ndarray:
        """[rows width] int32 of word pieces, filled up with PAD; rows without a sentence are PAD alone."""
        array = np.full((self.rows, self.width), PAD, np.int32)
        for row, member in enumerate(self.members):
            array[row, : len(sentences[member])] = sentences[member]
        return array


def amount_of(sentences: int) -> Amount:
    """How many sentences there are, as far as the shape of their batches goes."""
    if sentences > 1:
        return "few" if sentences <= MOST_ROWS else "many"
    return "one"


def width_for(length: int, longest: int | None = None) -> int:
    """The narrowest width for a sentence of `length` pieces: 16, 32, 64, ..., at most `longest`."""
    width = NARROWEST
    while width < length:
        width *= 2
    return width if longest is None else max(length, min(width, longest))


def rows_for(width: int, batch_tokens: int, amount: Amount, shares: int = 1) -> int:
    """Rows of a batch of that width: as many as `batch_tokens` padded pieces allow, at least one.

    Where there are many sentences, so many for each of the `shares` of a mesh.
    """
    most = {"one": 1, "few": FEW_ROWS, "many": MOST_ROWS}[amount]
    return max(1, min(most, batch_tokens // width)) * (shares if amount == "many" else 1)


def plan(
    lengths: Sequence[int], *, batch_tokens: int, amount: Amount, longest: int | None = None, shares: int = 1
) -> Iterator[SourceBatch]:
    """Every sentence once, in batches of equal or falling width.

    Args:
        lengths: pieces of each sentence, EOS counted.
        batch_tokens: padded pieces of a batch at most, unless one sentence alone has more.
        amount: sets the number of rows; `amount_of` all that are to come, not of this part alone.
        longest: no sentence has more pieces; the widest width.
        shares: into how many parts a mesh cuts the rows.
    """
    # Stable, so that the plan does not depend on how numpy sorts equal lengths.
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    start = 0
    narrowest = NARROWEST
    # Not for a few: they come in calls of their own, one after the other, which soon have compiled every width.
    if amount == "many" and len(order):
        widest = width_for(lengths[order[0]], longest)
        if len(order) <= SAME_WIDTH * rows_for(widest, batch_tokens, amount, shares):
            narrowest = widest
    while start < len(order):
        width = max(narrowest, width_for(lengths[order[start]], longest))
        rows = rows_for(width, batch_tokens, amount, shares)
        yield SourceBatch(rows, width, order[start : start + rows])
        start += rows
