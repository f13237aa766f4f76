"""The batch plan: a pure numpy function of lengths, epoch and seed that says which examples lie in which row.

Packed (the default): a row of a fixed width holds several whole sentence pairs, kept apart by segment masks, so that
one static shape serves all of training. By length: a row holds one pair and a batch has one of a few widths.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from transformer_jax.config import DataConfig
from transformer_jax.data.packing import PlannedBatch, Shape, by_length, packed, round_up
from transformer_jax.errors import UserError

__all__ = [
    "Batch",
    "BatchPlan",
    "Dropped",
    "Examples",
    "Outlook",
    "PlannedBatch",
    "Shape",
    "assemble",
    "batches_from",
    "plan_batches",
]

# Pairs planned at once: some hundred batches of the paper's size, and a tenth to half a second of work. Each section
# ends with a batch that is not full, which costs a fifth of a per cent of the fill.
SECTION = 1 << 18


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


class Dropped(NamedTuple):
    """Pairs left out of every epoch, each counted for the first reason that holds."""

    blank: int
    """A side without text."""
    too_long: int
    """A side longer than data.max_length."""
    unequal: int
    """Sides further apart in length than data.max_length_ratio."""

    def __str__(self) -> str:
        return f"{self.blank:,} blank, {self.too_long:,} too long, {self.unequal:,} of too unequal length"


class Outlook(NamedTuple):
    """What an epoch will be."""

    batches: int
    planned: list[PlannedBatch]
    """All its batches, or those of a sample where an epoch has more than SECTION pairs."""
    exact: bool
    """Whether `planned` is epoch 0 itself."""


@dataclass(frozen=True)
class BatchPlan:
    """Batches of any epoch, a pure function of its number and of the place in it.

    An epoch's order is cut into sections of SECTION pairs, which are planned one by one when they are reached: the
    first batch is there in a fraction of a second whatever the size of the text, and a place in the middle as soon.
    """

    lengths: np.ndarray
    kept: np.ndarray
    """int32, rising: the examples that are used."""
    reasons: Dropped
    shapes: tuple[Shape, ...]
    packing: bool
    seed: int

    @property
    def dropped(self) -> int:
        """Pairs left out of every epoch."""
        return len(self.lengths) - len(self.kept)

    def epoch(self, epoch: int) -> list[PlannedBatch]:
        """All batches of an epoch in order, every kept example in exactly one of them; not shuffled if negative."""
        return [batch for _, batch in self.batches(epoch)]

    def batches(self, epoch: int, index: int = 0) -> Iterator[tuple[int, PlannedBatch]]:
        """(index of what follows, batch) from an index on, as `epoch` has them.

        An index is the section's number times SECTION, and the batch's number in the section: 0, 1, 2 ... in an epoch
        of one section.
        """
        order = self.kept
        if epoch >= 0:
            order = np.random.default_rng([self.seed, epoch]).permutation(order)
        first, skipped = divmod(index, SECTION)
        for section in range(first, -(-len(order) // SECTION)):
            planned = self._section(order[section * SECTION : (section + 1) * SECTION], epoch, section)
            for number in range(skipped, len(planned)):
                yield section * SECTION + number + 1, planned[number]
            skipped = 0

    def _section(self, order: np.ndarray, epoch: int, section: int) -> list[PlannedBatch]:
        generator = np.random.default_rng([self.seed, epoch, section + 1]) if epoch >= 0 else None
        if self.packing:
            batches = packed(order, self.lengths, self.shapes[0], generator)
        else:
            batches = by_length(order, self.lengths, self.shapes)
        return batches if generator is None else [batches[i] for i in generator.permutation(len(batches))]

    @functools.cached_property
    def outlook(self) -> Outlook:
        """What an epoch will be, from one section of it."""
        every = -(-len(self.kept) // SECTION)
        planned = self.epoch(0) if every == 1 else self._section(self.kept[::every], 0, 0)
        return Outlook(len(planned) * len(self.kept) // len(self.kept[::every]), planned, every == 1)

    def fill(self, batches: Sequence[PlannedBatch], row_multiple: int = 1) -> float:
        """Real pieces / padded pieces, both sides together, where batches are filled up to a multiple of rows."""
        real = sum(int(self.lengths[batch.examples].sum()) for batch in batches)
        return real / max(sum(batch.shape.filled_up(row_multiple).cells for batch in batches), 1)


def plan_batches(lengths: np.ndarray, config: DataConfig, *, seed: int, name: str) -> BatchPlan:
    """A plan for pairs of these lengths ([n 2], EOS counted), the same whatever devices will share out the rows.

    Raises UserError when no pair of the text `name` can be used.
    """
    kept, reasons = _sift(lengths, config)
    if not len(kept):
        raise UserError(
            f"{name}: none of its {len(lengths)} pairs has text on both sides and at most data.max_length="
            f"{config.max_length} word pieces ({reasons}); raise data.max_length or data.max_length_ratio, or check "
            "the text"
        )
    longest, mean = np.zeros(2, int), np.zeros(2)
    for start in range(0, len(kept), SECTION):
        # By side: a reduction over rows of two numbers is three times slower.
        sides = lengths[kept[start : start + SECTION]].T
        longest = np.maximum(longest, [side.max() for side in sides])
        mean += [side.sum() / len(kept) for side in sides]
    if config.packing:
        shapes: tuple[Shape, ...] = (
            _packed_shape(mean, longest, config.batch_tokens, config.row_length or config.max_length),
        )
    else:
        shapes = _bucket_shapes(longest, config.batch_tokens, config.max_length)
    return BatchPlan(lengths, kept, reasons, shapes, config.packing, seed)


def _sift(lengths: np.ndarray, config: DataConfig) -> tuple[np.ndarray, Dropped]:
    """The examples that are used, int32, and how many are not, by reason."""
    kept = np.empty(len(lengths), np.int32)
    count = 0
    dropped = np.zeros(3, int)
    ratio = config.max_length_ratio or config.max_length  # which is none
    for start in range(0, len(lengths), SECTION):
        source, target = lengths[start : start + SECTION].T
        shorter, longer = np.minimum(source, target), np.maximum(source, target)
        blank = shorter <= 1  # EOS alone
        too_long = ~blank & (longer > config.max_length)
        unequal = ~blank & ~too_long & (longer - 1 > ratio * (shorter - 1))
        dropped += [np.count_nonzero(reason) for reason in (blank, too_long, unequal)]
        usable = np.flatnonzero(~(blank | too_long | unequal)) + start
        kept[count : count + len(usable)] = usable
        count += len(usable)
    # A copy, so that the rest is given back.
    return kept[:count].copy(), Dropped(*dropped.tolist())


def _packed_shape(mean: np.ndarray, longest: np.ndarray, batch_tokens: int, width: int) -> Shape:
    """The side with more pieces gets `width`, the other its share of it: both then fill up together."""
    widths = np.ceil(width * mean / mean.max() / 4).astype(int) * 4
    source, target = (int(min(width, max(widths[side], longest[side]))) for side in (0, 1))
    return Shape(max(batch_tokens // width, 1), source, target)


def _bucket_shapes(longest: np.ndarray, batch_tokens: int, max_length: int) -> tuple[Shape, ...]:
    """Widths 16, 32, 64 ... up to the longest pair: compile count grows with the logarithm of length only."""
    top = min(round_up(int(longest.max()), 8), max_length)
    widths = [16 * 2**i for i in range(32) if 16 * 2**i < top] + [top]
    return tuple(Shape(max(batch_tokens // width, 1), width, width) for width in widths)


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
    """(epoch, index of what follows, batch) without end, from a position on: what a resumed run needs to know."""
    while True:
        for following, batch in plan.batches(epoch, index):
            yield epoch, following, batch
        epoch, index = epoch + 1, 0
