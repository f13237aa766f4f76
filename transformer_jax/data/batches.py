"""The batch plan: a pure numpy function of lengths, epoch and seed that says which examples lie in which row.

Packed (the default): a row of a fixed width holds several whole sentence pairs, kept apart by segment masks, so that
one static shape serves all of training. By length: a row holds one pair and a batch has one of a few widths.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from transformer_jax.config import DataConfig
from transformer_jax.errors import UserError

# Examples packed together: fill does not grow beyond this, and rows stay a random mix of the epoch.
POOL = 16_384
# Rows opened for a pool, as a share of those it needs: what is left over gives short pairs that fill up gaps.
TIGHTNESS = 0.95


class Batch(NamedTuple):
    """Arrays of one step, int32. Segments number a row's sentences from 1, 0 is padding; positions restart in each."""

    source: np.ndarray  # [B S]
    source_segments: np.ndarray  # [B S]
    source_positions: np.ndarray  # [B S]
    target: np.ndarray  # [B T] the decoder's input: BOS, then the pieces before each position
    labels: np.ndarray  # [B T] the pieces to predict, EOS last
    target_segments: np.ndarray  # [B T]
    target_positions: np.ndarray  # [B T]


@runtime_checkable
class Examples(Protocol):
    """What a plan draws on: `data.store.TokenStore`."""

    source_ids: np.ndarray
    source_offsets: np.ndarray
    target_ids: np.ndarray
    target_offsets: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """[n 2], pieces of each side, EOS counted."""
        ...


class Shape(NamedTuple):
    """Static shape of a batch."""

    rows: int
    source_width: int
    target_width: int


class PlannedBatch(NamedTuple):
    """`examples[i]` lies in row `row_of[i]`; examples of one row stand in the order in which they lie there."""

    shape: Shape
    examples: np.ndarray
    row_of: np.ndarray


@dataclass(frozen=True)
class BatchPlan:
    """Batches of any epoch; `epoch(e)` is a pure function of e."""

    lengths: np.ndarray
    kept: np.ndarray
    shapes: tuple[Shape, ...]
    packing: bool
    seed: int

    @property
    def dropped(self) -> int:
        """Pairs left out of every epoch: a side without text, or longer than data.max_length."""
        return len(self.lengths) - len(self.kept)

    def epoch(self, epoch: int) -> list[PlannedBatch]:
        """All batches of an epoch in order, every kept example in exactly one of them; not shuffled if negative."""
        order = self.kept
        generator = np.random.default_rng([self.seed, max(epoch, 0)])
        if epoch >= 0:
            order = generator.permutation(order)
        if self.packing:
            batches = _packed(order, self.lengths, self.shapes[0], generator if epoch >= 0 else None)
        else:
            batches = _by_length(order, self.lengths, self.shapes)
        return [batches[i] for i in generator.permutation(len(batches))] if epoch >= 0 else batches

    def fill(self, batches: Sequence[PlannedBatch]) -> float:
        """Real pieces / padded pieces, both sides together."""
        real = sum(int(self.lengths[batch.examples].sum()) for batch in batches)
        padded = sum(batch.shape.rows * (batch.shape.source_width + batch.shape.target_width) for batch in batches)
        return real / max(padded, 1)


def plan_batches(lengths: np.ndarray, config: DataConfig, *, seed: int, row_multiple: int = 1, name: str) -> BatchPlan:
    """A plan for pairs of these lengths ([n 2], EOS counted).

    Rows of a batch are a multiple of `row_multiple`, the devices that share them. Raises UserError when no pair of the
    text `name` can be used.
    """
    usable = (lengths.min(axis=1) > 1) & (lengths.max(axis=1) <= config.max_length)
    kept = np.flatnonzero(usable)
    if not len(kept):
        raise UserError(
            f"{name}: none of its {len(lengths)} pairs has text on both sides and at most data.max_length="
            f"{config.max_length} word pieces; raise data.max_length or check the text"
        )
    longest = lengths[kept].max(axis=0)
    if config.packing:
        shapes: tuple[Shape, ...] = (
            _packed_shape(lengths[kept], longest, config.batch_tokens, config.row_length or config.max_length),
        )
    else:
        shapes = _bucket_shapes(longest, config.batch_tokens, config.max_length)
    shapes = tuple(s._replace(rows=-(-s.rows // row_multiple) * row_multiple) for s in shapes)
    return BatchPlan(lengths, kept, shapes, config.packing, seed)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _packed_shape(lengths: np.ndarray, longest: np.ndarray, batch_tokens: int, width: int) -> Shape:
    """The side with more pieces gets `width`, the other its share of it: both then fill up together."""
    mean = lengths.mean(axis=0)
    widths = np.ceil(width * mean / mean.max() / 4).astype(int) * 4
    source, target = (int(min(width, max(widths[side], longest[side]))) for side in (0, 1))
    return Shape(max(batch_tokens // width, 1), source, target)


def _bucket_shapes(longest: np.ndarray, batch_tokens: int, max_length: int) -> tuple[Shape, ...]:
    """Widths 16, 32, 64 ... up to the longest pair: compile count grows with the logarithm of length only."""
    top = min(_round_up(int(longest.max()), 8), max_length)
    widths = [16 * 2**i for i in range(32) if 16 * 2**i < top] + [top]
    return tuple(Shape(max(batch_tokens // width, 1), width, width) for width in widths)


def _packed(
    order: np.ndarray, lengths: np.ndarray, shape: Shape, generator: np.random.Generator | None
) -> list[PlannedBatch]:
    """Packs pool after pool; what does not fit goes to the head of the next pool, and at the end to rows of its own."""
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
            opened += _round_up(int(row_of.max()) + 1, shape.rows) if len(row_of) else 0
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


def _by_length(order: np.ndarray, lengths: np.ndarray, shapes: tuple[Shape, ...]) -> list[PlannedBatch]:
    longest = lengths[order].max(axis=1)
    bucket = np.searchsorted([shape.target_width for shape in shapes], longest)
    batches = []
    for i, shape in enumerate(shapes):
        members = order[bucket == i]
        for start in range(0, len(members), shape.rows):
            examples = members[start : start + shape.rows]
            batches.append(PlannedBatch(shape, examples, np.arange(len(examples))))
    return batches


def assemble(batch: PlannedBatch, examples: Examples, *, bos_id: int) -> Batch:
    """The arrays of a planned batch; padding is 0 everywhere."""
    shape = batch.shape
    first_of_row = np.searchsorted(batch.row_of, batch.row_of, side="left")
    segment = np.arange(len(batch.row_of)) - first_of_row + 1
    source = _lay(batch, segment, examples.source_ids, examples.source_offsets, shape.source_width)
    target = _lay(batch, segment, examples.target_ids, examples.target_offsets, shape.target_width)
    labels, target_segments, target_positions = target
    shifted = np.roll(labels, 1, axis=1)
    shifted[target_positions == 0] = bos_id
    shifted[target_segments == 0] = 0
    return Batch(*source, shifted, labels, target_segments, target_positions)


def _lay(
    batch: PlannedBatch, segment: np.ndarray, ids: np.ndarray, offsets: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pieces, segments and positions of one side, [B width] each."""
    begin = offsets[batch.examples]
    length = offsets[batch.examples + 1] - begin
    total = np.cumsum(length) - length  # pieces before each example in the whole batch
    row_total = total - total[np.searchsorted(batch.row_of, batch.row_of, side="left")]
    position = np.arange(length.sum()) - np.repeat(total, length)
    place = np.repeat(batch.row_of * width + row_total, length) + position
    out = np.zeros((3, batch.shape.rows * width), np.int32)
    out[0, place] = ids[np.repeat(begin, length) + position]
    out[1, place] = np.repeat(segment, length)
    out[2, place] = position
    pieces, segments, positions = out.reshape(3, batch.shape.rows, width)
    return pieces, segments, positions


def batches_from(plan: BatchPlan, epoch: int, index: int) -> Iterator[tuple[int, int, PlannedBatch]]:
    """(epoch, index of the next batch, batch) without end, from a position on: what a resumed run needs to know."""
    while True:
        planned = plan.epoch(epoch)
        for i in range(index, len(planned)):
            yield epoch, i + 1, planned[i]
        epoch, index = epoch + 1, 0
