"""The batch plan: which examples lie in which row, and the arrays that come of it."""

import collections
import dataclasses
import gzip
import importlib.resources
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from transformer_jax.config import DataConfig
from transformer_jax.data import batches, packing
from transformer_jax.data.batches import BatchPlan, PlannedBatch, Shape, assemble, batches_from, plan_batches
from transformer_jax.errors import UserError

BOS = 2
# Few rows in a batch, so that a small corpus makes many.
SMALL = DataConfig(max_length=64, batch_tokens=512)
BY_LENGTH = DataConfig(max_length=64, batch_tokens=512, packing=False)
both_ways = pytest.mark.parametrize("config", [SMALL, BY_LENGTH], ids=["packed", "by length"])


def random_lengths(count, seed=0):
    """[n 2]: like sentences, correlated sides, some blank (1, EOS alone) and some longer than 64."""
    rng = np.random.default_rng(seed)
    source = np.exp(rng.normal(2.6, 0.8, count)).astype(int) + 1
    target = np.maximum((source * rng.uniform(0.8, 1.5, count)).astype(int), 1)
    return np.stack([source, target], axis=1)


def plan(config=SMALL, lengths=None, seed=0):
    lengths = random_lengths(1000) if lengths is None else np.asarray(lengths)
    return plan_batches(lengths, config, seed=seed, name="corpus")


def same(a, b):
    return len(a) == len(b) and all(
        x.shape == y.shape and np.array_equal(x.examples, y.examples) and np.array_equal(x.row_of, y.row_of)
        for x, y in zip(a, b, strict=True)
    )


def order(planned):
    return np.concatenate([batch.examples for batch in planned]).tolist()


# Which examples


@both_ways
@pytest.mark.parametrize("epoch", [-1, 0, 3])
def test_every_kept_example_is_in_an_epoch_exactly_once(config, epoch):
    it = plan(config)
    lengths = it.lengths
    usable = np.flatnonzero((lengths.min(axis=1) > 1) & (lengths.max(axis=1) <= 64))
    assert 0 < len(usable) < len(lengths)
    assert sorted(order(it.epoch(epoch))) == usable.tolist()
    assert it.dropped == len(lengths) - len(usable)


def test_blank_and_over_long_pairs_are_left_out_and_counted():
    """A side of EOS alone has no text; 64 pieces are the most that max_length 64 takes."""
    it = plan(lengths=[(5, 5), (1, 5), (5, 1), (64, 2), (65, 2), (2, 65), (2, 2)])
    assert it.kept.tolist() == [0, 3, 6]
    assert it.dropped == 4


@pytest.mark.parametrize("lengths", [[(1, 5), (70, 5)], np.zeros((0, 2), int)], ids=["unusable", "empty"])
def test_a_text_without_a_usable_pair_is_refused(lengths):
    if not len(lengths):
        lengths = np.zeros((0, 2), int)
    with pytest.raises(UserError, match=rf"corpus: none of its {len(lengths)} pairs .* data\.max_length=64"):
        plan(lengths=lengths)


@pytest.mark.parametrize("count", [1, 2, 7])
@both_ways
def test_fewer_pairs_than_rows_make_one_batch(config, count):
    planned = plan(config, [(5, 6)] * count).epoch(0)
    assert len(planned) == 1
    assert sorted(planned[0].examples) == list(range(count))


def test_pairs_left_over_by_a_pool_come_in_later_batches(monkeypatch):
    """Pools of 50 in place of 16,384: what does not fit waits for the next pool, and none is lost at the end."""
    monkeypatch.setattr(packing, "POOL", 50)
    for count in (49, 50, 51, 333):
        it = plan(lengths=random_lengths(count, seed=count))
        assert sorted(order(it.epoch(0))) == it.kept.tolist()


def test_pairs_that_fill_a_row_alone_are_placed_too():
    """Nothing fits beside them."""
    it = plan(lengths=[(64, 64)] * 21)
    planned = it.epoch(0)
    assert sorted(order(planned)) == list(range(21))
    assert len(planned) == 3


@pytest.mark.parametrize(("ratio", "kept"), [(None, [0, 1, 2, 3]), (2.0, [0, 1, 3]), (1.5, [0, 3]), (1.0, [0])])
def test_pairs_of_unequal_sides_are_left_out_and_counted(ratio, kept):
    """EOS does not count: 2:1, 5:2 and 3:2 words. Each pair is counted once, for its first fault."""
    lengths = [(5, 5), (3, 2), (3, 6), (4, 3), (1, 90), (2, 90)]
    it = plan(dataclasses.replace(SMALL, max_length_ratio=ratio), lengths)
    assert it.kept.tolist() == kept
    assert it.reasons == (1, 1, 4 - len(kept))
    assert str(it.reasons) == f"1 blank, 1 too long, {4 - len(kept)} of too unequal length"


def test_arrays_of_the_size_of_a_text_are_small():
    assert plan().kept.dtype == np.int32
    assert {(b.examples.dtype, b.row_of.dtype.kind) for b in plan().epoch(0)} == {(np.dtype(np.int32), "i")}


# Sections


@pytest.fixture
def sections(monkeypatch):
    """Seven of them, the last one short."""
    monkeypatch.setattr(batches, "SECTION", 150)


@both_ways
def test_an_epoch_of_sections_has_every_example_once_and_any_place_is_reached_at_once(config, sections, monkeypatch):
    """C2: from any index on, the batches are those of the whole epoch, and no earlier section is planned for them."""
    it = plan(config)
    whole = list(it.batches(2))
    assert sorted(order([batch for _, batch in whole])) == it.kept.tolist()
    indices = [index for index, _ in whole]
    assert indices == sorted(set(indices)) and {index // 150 for index in indices[:-1]} == set(range(7))
    planned = []
    section = BatchPlan._section
    monkeypatch.setattr(BatchPlan, "_section", lambda self, *given: planned.append(given[2]) or section(self, *given))
    for stop, (index, _) in enumerate(whole, start=1):
        planned.clear()
        assert same([batch for _, batch in it.batches(2, index)], [batch for _, batch in whole[stop:]])
        assert min(planned, default=7) == index // 150


@both_ways
def test_sections_of_an_epoch_are_shuffled_over_the_whole_text(config, sections):
    it = plan(config)
    first = order([batch for index, batch in it.batches(0) if index <= 150])
    assert min(first) < 100 and max(first) > 900


def test_the_outlook_is_the_epoch_or_a_sample_of_it(monkeypatch):
    it = plan()
    assert it.outlook.exact and it.outlook.batches == len(it.epoch(0)) and same(it.outlook.planned, it.epoch(0))
    monkeypatch.setattr(batches, "SECTION", 400)
    sampled = plan()
    assert not sampled.outlook.exact
    assert sampled.outlook.batches == pytest.approx(len(sampled.epoch(0)), rel=0.2)
    assert sampled.fill(sampled.outlook.planned) == pytest.approx(sampled.fill(sampled.epoch(0)), abs=0.1)


# Rows and shapes


def rows_of(it, planned):
    """Pieces of each side in each row of a batch, [B 2]."""
    used = np.zeros((planned.shape.rows, 2), int)
    np.add.at(used, planned.row_of, it.lengths[planned.examples])
    return used


@both_ways
def test_rows_are_never_overfull(config):
    it = plan(config)
    for planned in it.epoch(1):
        assert planned.row_of.max() < planned.shape.rows
        assert (rows_of(it, planned) <= [planned.shape.source_width, planned.shape.target_width]).all()


def test_a_packed_plan_has_one_shape():
    it = plan()
    assert {planned.shape for epoch in (0, 1) for planned in it.epoch(epoch)} == set(it.shapes)
    (shape,) = it.shapes
    assert shape.rows * max(shape.source_width, shape.target_width) == SMALL.batch_tokens
    assert any((np.bincount(planned.row_of) > 1).any() for planned in it.epoch(0)), "several pairs in a row"


def test_the_side_with_more_pieces_gets_the_full_width():
    """Target twice as long as the source: 64 and 32, in multiples of 4; never less than the longest pair."""
    assert plan(lengths=[(10, 20)] * 30).shapes == (Shape(8, 32, 64),)
    assert plan(lengths=[(20, 10)] * 30).shapes == (Shape(8, 64, 32),)
    assert plan(lengths=[(10, 20)] * 30 + [(50, 20)]).shapes == (Shape(8, 50, 64),)


def test_row_length_is_the_width_of_a_packed_row():
    wide = DataConfig(max_length=64, row_length=128, batch_tokens=512)
    assert plan(wide, [(20, 20)] * 30).shapes == (Shape(4, 128, 128),)


def test_batches_by_length_have_few_widths():
    """16, 32, 64, and one pair a row."""
    it = plan(BY_LENGTH)
    assert it.shapes == (Shape(32, 16, 16), Shape(16, 32, 32), Shape(8, 64, 64))
    for planned in it.epoch(0):
        assert len(set(planned.row_of)) == len(planned.row_of)
        longest = it.lengths[planned.examples].max()
        assert planned.shape.target_width // 2 < longest or planned.shape.target_width == 16, "no wider than it must be"


def test_widths_by_length_end_at_the_longest_pair():
    assert [shape.target_width for shape in plan(BY_LENGTH, [(5, 5), (33, 9)]).shapes] == [16, 32, 40]
    assert [shape.target_width for shape in plan(BY_LENGTH, [(5, 5)]).shapes] == [8]
    odd = DataConfig(max_length=50, batch_tokens=512, packing=False)
    assert [shape.target_width for shape in plan(odd, [(50, 5)]).shapes] == [16, 32, 50]


def test_empty_rows_fill_a_batch_up_to_a_multiple_and_count_in_the_fill():
    """J4: 8 rows on 6 devices are 12; the plan itself, and so the order of the data, knows no devices."""
    it = plan(lengths=[(64, 64)] * 16)
    assert it.shapes == (Shape(8, 64, 64),)
    assert [it.shapes[0].filled_up(multiple) for multiple in (1, 6, 16)] == [
        Shape(rows, 64, 64) for rows in (8, 12, 16)
    ]
    fills = [it.fill(it.epoch(0), row_multiple=multiple) for multiple in (1, 6, 16)]
    assert fills == pytest.approx([1.0, 8 / 12, 8 / 16])


def office_lengths():
    """The embedded corpus in words, and EOS."""
    file = importlib.resources.files("transformer_jax.data") / "corpora" / "office.en-de.train.tsv.gz"
    lines = gzip.decompress(file.read_bytes()).decode("utf-8").splitlines()
    return np.array([[len(side.split()) + 1 for side in line.split("\t")] for line in lines])


def test_packing_fills_batches_with_text():
    """Above 0.9 of all cells on the embedded corpus; by length alone it is much less."""
    config = DataConfig(max_length=128, batch_tokens=2048)
    packed = plan(config, office_lengths())
    fill = packed.fill(packed.epoch(0))
    assert fill > 0.9
    planned = packed.epoch(0)
    real = sum(rows_of(packed, batch).sum() for batch in planned)
    cells = sum(batch.shape.rows * (batch.shape.source_width + batch.shape.target_width) for batch in planned)
    assert fill == pytest.approx(real / cells)


# Order


@both_ways
def test_a_plan_is_a_pure_function_of_seed_and_epoch(config):
    it = plan(config, seed=5)
    assert same(it.epoch(2), it.epoch(2))
    assert same(it.epoch(2), plan(config, seed=5).epoch(2))
    assert order(it.epoch(2)) != order(it.epoch(3))
    assert order(it.epoch(2)) != order(plan(config, seed=6).epoch(2))


@both_ways
def test_epochs_mix_examples_anew(config):
    """Not the same batches in another order: hardly two examples stay together from one epoch to the next."""
    it = plan(config)

    def together(epoch):
        return {
            pair for batch in it.epoch(epoch) for pair in itertools.combinations(sorted(batch.examples.tolist()), 2)
        }

    first, second = together(0), together(1)
    assert len(first & second) < 0.2 * len(first)


@both_ways
def test_the_unshuffled_epoch_does_not_depend_on_the_seed(config):
    assert same(plan(config, seed=1).epoch(-1), plan(config, seed=2).epoch(-1))


def test_batches_by_length_are_not_sorted_by_length():
    """A run of short batches, then of long ones, would be another task each."""
    widths = [batch.shape.target_width for batch in plan(BY_LENGTH).epoch(0)]
    assert widths != sorted(widths)
    assert widths != sorted(widths, reverse=True)


@both_ways
def test_a_resumed_run_sees_what_the_uninterrupted_one_sees(config):
    """C2: from every position, through the next epoch's boundary: nothing twice, nothing left out."""
    it = plan(config, random_lengths(60))
    per_epoch = len(it.epoch(1))
    whole = list(itertools.islice(batches_from(it, 1, 0), 3 * per_epoch))
    assert whole[per_epoch - 1][:2] == (1, per_epoch)
    seen = collections.Counter(np.concatenate([batch.examples for _, _, batch in whole]).tolist())
    assert seen == dict.fromkeys(it.kept.tolist(), 3)
    for stop in range(1, 2 * per_epoch):
        epoch, index, _ = whole[stop - 1]
        resumed = list(itertools.islice(batches_from(it, epoch, index), 3 * per_epoch - stop))
        assert [place[:2] for place in resumed] == [place[:2] for place in whole[stop:]]
        assert same([batch for _, _, batch in resumed], [batch for _, _, batch in whole[stop:]])


# Arrays


def examples(*pairs):
    """A token store of these pairs of id lists."""
    store = SimpleNamespace()
    for side, name in enumerate(("source", "target")):
        lists = [pair[side] for pair in pairs]
        setattr(store, f"{name}_ids", np.array([piece for pieces in lists for piece in pieces], np.uint16))
        setattr(store, f"{name}_offsets", np.cumsum([0, *map(len, lists)]))
    store.lengths = np.array([[len(source), len(target)] for source, target in pairs])
    return store


PAIRS = examples(([11, 12, 1], [21, 1]), ([13, 1], [22, 23, 24, 1]), ([14, 15, 16, 1], [25, 26, 1]))


def test_arrays_of_a_packed_batch_are_literally_these():
    """Row 0 is empty, row 1 holds pairs 2 and 0 in this order, row 2 pair 1."""
    planned = PlannedBatch(Shape(3, 8, 6), np.array([2, 0, 1]), np.array([1, 1, 2]))
    batch = assemble(planned, PAIRS, bos_id=BOS)
    expected = {
        "source": [[14, 15, 16, 1, 11, 12, 1, 0], [13, 1, 0, 0, 0, 0, 0, 0]],
        "source_segments": [[1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 0, 0, 0, 0, 0, 0]],
        "source_positions": [[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 0, 0, 0, 0, 0, 0]],
        "target": [[BOS, 25, 26, BOS, 21, 0], [BOS, 22, 23, 24, 0, 0]],
        "labels": [[25, 26, 1, 21, 1, 0], [22, 23, 24, 1, 0, 0]],
        "target_segments": [[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 0, 0]],
        "target_positions": [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 0]],
    }
    assert batch._fields == tuple(expected)
    for name, rows in expected.items():
        array = getattr(batch, name)
        assert array.dtype == np.int32, name
        np.testing.assert_array_equal(array, [[0] * len(rows[0]), *rows], err_msg=name)


def test_a_row_that_is_full_to_the_brim_keeps_its_last_piece():
    batch = assemble(PlannedBatch(Shape(1, 5, 6), np.array([0, 1]), np.array([0, 0])), PAIRS, bos_id=BOS)
    np.testing.assert_array_equal(batch.source, [[11, 12, 1, 13, 1]])
    np.testing.assert_array_equal(batch.target, [[BOS, 21, BOS, 22, 23, 24]])
    np.testing.assert_array_equal(batch.labels, [[21, 1, 22, 23, 24, 1]])


@both_ways
def test_every_pair_is_found_again_in_the_arrays(config):
    """All batches of an epoch, read back by segment: every pair's pieces as they were, and PAD everywhere else."""
    rng = np.random.default_rng(0)
    store = examples(
        *(([*rng.integers(4, 99, s - 1), 1], [*rng.integers(4, 99, t - 1), 1]) for s, t in random_lengths(80))
    )
    it = plan(config, store.lengths)
    found = []
    for planned in it.epoch(0):
        batch = assemble(planned, store, bos_id=BOS)
        assert batch.source.shape == planned.shape[:2]
        assert batch.labels.shape == (planned.shape.rows, planned.shape.target_width)
        for array, segments in ((batch.source, batch.source_segments), (batch.labels, batch.target_segments)):
            np.testing.assert_array_equal(array == 0, segments == 0)
        for row in range(planned.shape.rows):
            for segment in range(1, batch.source_segments[row].max() + 1):
                source, target = (batch.source_segments[row] == segment), (batch.target_segments[row] == segment)
                np.testing.assert_array_equal(batch.source_positions[row][source], np.arange(source.sum()))
                np.testing.assert_array_equal(batch.target_positions[row][target], np.arange(target.sum()))
                labels = batch.labels[row][target]
                np.testing.assert_array_equal(batch.target[row][target], [BOS, *labels[:-1]])
                found.append((tuple(batch.source[row][source].tolist()), tuple(labels.tolist())))

    def pieces(ids, offsets, i):
        return tuple(ids[offsets[i] : offsets[i + 1]].tolist())

    expected = [
        (pieces(store.source_ids, store.source_offsets, i), pieces(store.target_ids, store.target_offsets, i))
        for i in it.kept
    ]
    assert sorted(found) == sorted(expected)
