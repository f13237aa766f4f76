"""Examples into rows and rows into batches: a section of an epoch at a time, in numpy."""

import itertools
from typing import NamedTuple

import numpy as np

# Examples packed together: fill does not grow beyond this, and rows stay a random mix of the epoch.
POOL = 16_384
# Rows opened for a pool, as a share of those it needs: what is left over gives short pairs that fill up gaps.
TIGHTNESS = 0.95


class Shape(NamedTuple):
    """Static shape of a batch."""

    rows: int
    source_width: int
    target_width: int

    def filled_up(self, multiple: int) -> "Shape":
        """With empty rows more, up to a multiple: what devices share out evenly."""
        return self._replace(rows=round_up(self.rows, multiple))

    @property
    def cells(self) -> int:
        """Places for pieces, both sides together."""
        return self.rows * (self.source_width + self.target_width)


class PlannedBatch(NamedTuple):
    """`examples[i]` lies in row `row_of[i]`; examples of one row stand in the order in which they lie there."""

    shape: Shape
    examples: np.ndarray
    row_of: np.ndarray


def round_up(n: int, multiple: int) -> int:
    """The next multiple."""
    return -(-n // multiple) * multiple


def packed(
    order: np.ndarray, lengths: np.ndarray, shape: Shape, generator: np.random.Generator | None
) -> list[PlannedBatch]:
    """Several pairs a row: pool after pool, what does not fit goes to the head of the next, at the end to own rows.

    With a generator, rows are shuffled before they are cut into batches.
    """
    width = np.array([shape.source_width, shape.target_width])
    rows: list[np.ndarray] = []
    row_ids: list[np.ndarray] = []
    opened = 0
    waiting = order[:0]
    starts = range(0, len(order), POOL)
    for start in starts:
        pool = np.concatenate([waiting, order[start : start + POOL]])
        while True:
            examples, row_of, waiting = _pack_pool(pool, lengths, width, shape.rows)
            rows.append(examples)
            row_ids.append(row_of + opened)
            opened += round_up(int(row_of.max()) + 1, shape.rows) if len(row_of) else 0
            if start != starts[-1] or not len(waiting):
                break
            pool = waiting
    examples, row_of = np.concatenate(rows), np.concatenate(row_ids)
    used = np.bincount(row_of) > 0
    row_of = (np.cumsum(used) - 1)[row_of]
    if generator is not None:
        # Rows of a pool lie by length of their longest pair: cut as they are, batches would differ in kind, and
        # nearly the same pairs would meet in every epoch.
        row_of = generator.permutation(np.count_nonzero(used))[row_of]
    return _cut(examples, row_of, shape)


def _pack_pool(
    pool: np.ndarray, lengths: np.ndarray, width: np.ndarray, multiple: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Longest first into the row with most room, a round of one example for each row at a time, all in numpy.

    Returns the examples placed, their rows, and those left over. The number of rows, a multiple of a batch's, is what
    the pool needs if full to the brim, rounded down: leftovers then wait instead of padding.
    """
    size = lengths[pool]
    need = (size.sum(axis=0) / width).max()
    count = max(int(need * TIGHTNESS) // multiple, 1) * multiple
    order = np.argsort(-(size / width).max(axis=1), kind="stable")
    room = np.tile(width, (count, 1))
    left: list[np.ndarray] = []
    placed: list[np.ndarray] = []
    row_of: list[np.ndarray] = []
    for start in range(0, len(order), count):
        chunk = order[start : start + count]
        roomiest = np.argsort(-(room / width).min(axis=1), kind="stable")[: len(chunk)]
        fits = (size[chunk] <= room[roomiest]).all(axis=1)
        room[roomiest[fits]] -= size[chunk[fits]]
        placed.append(pool[chunk[fits]])
        row_of.append(roomiest[fits])
        left.append(chunk[~fits])
    waiting = np.concatenate(left) if left else order[:0]
    return np.concatenate(placed), np.concatenate(row_of), pool[np.sort(waiting)]


def _cut(examples: np.ndarray, row_of: np.ndarray, shape: Shape) -> list[PlannedBatch]:
    order = np.argsort(row_of, kind="stable")
    examples, row_of = examples[order], row_of[order]
    batches = int(row_of[-1]) // shape.rows + 1
    bounds = np.searchsorted(row_of, np.arange(batches + 1) * shape.rows)
    return [
        PlannedBatch(shape, examples[lo:hi], row_of[lo:hi] - i * shape.rows)
        for i, (lo, hi) in enumerate(itertools.pairwise(bounds))
        if hi > lo
    ]


def by_length(order: np.ndarray, lengths: np.ndarray, shapes: tuple[Shape, ...]) -> list[PlannedBatch]:
    """A pair a row, in the narrowest shape that takes it; the last batch of each shape may have empty rows."""
    longest = lengths[order].max(axis=1)
    bucket = np.searchsorted([shape.target_width for shape in shapes], longest)
    batches = []
    for i, shape in enumerate(shapes):
        members = order[bucket == i]
        for start in range(0, len(members), shape.rows):
            examples = members[start : start + shape.rows]
            batches.append(PlannedBatch(shape, examples, np.arange(len(examples))))
    return batches
