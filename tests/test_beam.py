"""Beam search against exhaustive search on small vocabularies, with scorers that are tables."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brute_force import Hypothesis, all_hypotheses, full_length_beam_search, score

from transformer_jax.errors import UserError
from transformer_jax.search import beam_search, gather_beams, greedy_search, length_penalties
from transformer_jax.search.beam import best_pieces

PAD, EOS, BOS = 0, 1, 2
HISTORIES = 11


def table_step(tables, cache, tokens):
    """The step of `HistoryTables`."""
    history = (cache["history"] * 5 + tokens + 1) % HISTORIES
    log_probs = jnp.asarray(tables)[cache["sentence"], cache["position"], history]
    return log_probs, {"sentence": cache["sentence"], "history": history, "position": cache["position"] + 1}


class HistoryTables:
    """A scorer whose next piece depends on the sentence, the position and all that was fed before.

    The history is folded into one of 11 numbers that lives in the cache, so a cache that is re-ordered wrongly shows.
    `tables` is [B T 11 W], log-probabilities.
    """

    def __init__(self, tables: np.ndarray) -> None:
        """Keep the tables in float32."""
        self.tables = tables.astype(np.float32)

    def cache(self, sentences: list[int], beam_size: int) -> dict[str, np.ndarray]:
        """A fresh cache of B*M rows for the sentences named."""
        rows = np.repeat(np.array(sentences, np.int32), beam_size)
        return {"sentence": rows, "history": np.zeros_like(rows), "position": np.int32(0)}

    def next_log_probs(self, sentence: int):
        """The same scorer for the oracle."""

        def of(tokens):
            history = functools.reduce(lambda seen, token: (seen * 5 + token + 1) % HISTORIES, (BOS, *tokens), 0)
            return self.tables[sentence, len(tokens), history].astype(float).tolist()

        return of


def log(probabilities: np.ndarray) -> np.ndarray:
    """Natural logarithm, -inf for 0."""
    with np.errstate(divide="ignore"):
        return np.log(probabilities)


def random_tables(
    seed: int, *, sentences: int = 3, max_length: int = 12, vocabulary: int = 8, sharpness: float = 1.5
) -> HistoryTables:
    """Tables of random distributions."""
    logits = np.random.default_rng(seed).normal(scale=sharpness, size=(sentences, max_length, HISTORIES, vocabulary))
    return HistoryTables(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))


@functools.partial(jax.jit, static_argnames=("max_length", "beam_size", "n_best"))
def run_tables(tables, cache, max_lengths, prefix, length_penalty, *, max_length, beam_size, n_best):
    """One compilation for each shape of table and each of the static sizes, shared by the tests."""
    return beam_search(
        functools.partial(table_step, tables),
        cache,
        first_tokens=jnp.full(max_lengths.shape, BOS, jnp.int32),
        max_lengths=max_lengths,
        max_length=max_length,
        beam_size=beam_size,
        length_penalty=length_penalty,
        eos_id=EOS,
        pad_id=PAD,
        n_best=n_best,
        prefix=prefix,
    )


def search(
    scorer: HistoryTables,
    sentences: list[int],
    max_lengths: list[int],
    *,
    beam_size: int = 4,
    length_penalty: float = 0.6,
    max_length: int | None = None,
    n_best: int | None = None,
    prefix: np.ndarray | None = None,
):
    """Beam search of the sentences named, as numpy arrays."""
    result = run_tables(
        scorer.tables,
        scorer.cache(sentences, beam_size),
        np.array(max_lengths, np.int32),
        prefix,
        length_penalty,
        max_length=max_length or scorer.tables.shape[1],
        beam_size=beam_size,
        n_best=n_best,
    )
    return jax.tree.map(np.asarray, result)


def hypotheses(result, sentence: int) -> list[Hypothesis]:
    """The filled slots of a sentence, after a check that each slot is consistent with itself."""
    row = jax.tree.map(lambda leaf: np.asarray(leaf)[sentence], result)
    found = []
    for slot in range(len(row.scores)):
        length = row.lengths[slot]
        assert (row.tokens[slot, length:] == PAD).all()
        assert (row.token_log_probs[slot, length:] == 0).all()
        if row.scores[slot] == -np.inf:
            assert length == 0 and row.log_probs[slot] == -np.inf and not row.finished[slot]
            continue
        tokens = tuple(row.tokens[slot, :length].tolist())
        np.testing.assert_allclose(row.token_log_probs[slot].sum(), row.log_probs[slot], rtol=1e-5)
        found.append(Hypothesis(float(row.scores[slot]), float(row.log_probs[slot]), tokens, bool(row.finished[slot])))
    assert all(row.scores[:-1] >= row.scores[1:])
    assert len({hypothesis.tokens for hypothesis in found}) == len(found)
    return found


def assert_same(found: list[Hypothesis], expected: list[Hypothesis]) -> None:
    """Same hypotheses in the same order, numbers to rounding."""
    assert [(h.tokens, h.finished) for h in found] == [(h.tokens, h.finished) for h in expected]
    np.testing.assert_allclose([h[:2] for h in found], [h[:2] for h in expected], rtol=1e-5, atol=1e-6)


def markov_table(rows: dict[int, list[float]]) -> np.ndarray:
    """[W W] log-probabilities of the next piece by the previous one, for pieces PAD, EOS, BOS, a, b, c."""
    probabilities = np.zeros((6, 6))
    for previous, row in rows.items():
        probabilities[previous, [EOS, *range(3, 2 + len(row))]] = row
    return log(probabilities).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("beam_size", "greedy"))
def run_markov(table, max_lengths, length_penalty, *, beam_size, greedy):
    """At most 30 pieces, all of the maximal length in `max_lengths` [1]."""
    decoder = greedy_search if greedy else functools.partial(beam_search, beam_size=beam_size)
    return decoder(
        lambda cache, tokens: (table[tokens], cache),
        (),
        first_tokens=jnp.array([BOS]),
        max_lengths=max_lengths,
        max_length=30,
        length_penalty=length_penalty,
        eos_id=EOS,
        pad_id=PAD,
    )


def search_markov(
    table: np.ndarray, max_length: int, *, beam_size: int = 1, length_penalty: float = 0.6, greedy: bool = False
) -> list[Hypothesis]:
    """The hypotheses for one sentence whose next piece depends on the previous one alone."""
    lengths = np.array([max_length], np.int32)
    return hypotheses(run_markov(table, lengths, length_penalty, beam_size=beam_size, greedy=greedy), 0)


A, B_, C = 3, 4, 5
TABLE_1 = markov_table(
    {
        BOS: [0.20, 0.45, 0.35, 0],
        A: [0.40, 0.05, 0.25, 0.30],
        B_: [0.05, 0.05, 0.05, 0.85],
        C: [0.90, 0.04, 0.03, 0.03],
    }
)
TABLE_2 = markov_table(
    {
        BOS: [0.30, 0.65, 0.05, 0],
        A: [0.45, 0, 0.45, 0.10],
        B_: [0.90, 0, 0.10, 0],
        C: [0.50, 0.20, 0.10, 0.20],
    }
)


@pytest.mark.parametrize("beam_size", [2, 3])
@pytest.mark.parametrize(
    ("table", "max_length", "alpha", "tokens", "expected"),
    [
        (TABLE_1, 6, 0.0, (B_, C, EOS), -1.3177),
        (TABLE_1, 6, 0.6, (B_, C, EOS), -1.1088),
        (TABLE_1, 6, 1.0, (B_, C, EOS), -1.3177 / (8 / 6)),
        (TABLE_2, 5, 0.0, (EOS,), -1.2040),
        (TABLE_2, 5, 1.0, (A, B_, EOS), -1.0010),
    ],
)
def test_search_goes_on_until_nothing_better_can_come(table, max_length, alpha, tokens, expected, beam_size):
    """B2: a stop at the first or at k ended hypotheses would return shorter ones."""
    best = search_markov(table, max_length, beam_size=beam_size, length_penalty=alpha)[0]
    assert best.tokens == tokens and best.finished
    assert best.score == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_wide_beam_equals_exhaustive_search(alpha):
    """B2, B4, B5: the whole n-best list, for several maximal lengths in one batch, ended and cut hypotheses."""
    max_lengths = [9, 2, 3]  # 9 means the batch's 4
    for seed in range(4):
        scorer = random_tables(seed, max_length=4, vocabulary=4)
        result = search(scorer, [0, 1, 2], max_lengths, beam_size=27, length_penalty=alpha)  # 3^3 can be alive
        for sentence, length in enumerate(max_lengths):
            expected = all_hypotheses(scorer.next_log_probs(sentence), min(length, 4), alpha, EOS)
            assert not all(hypothesis.finished for hypothesis in expected[:27])
            assert_same(hypotheses(result, sentence), expected[:27])


@pytest.mark.parametrize("beam_size", [1, 4])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 2.0])
def test_narrow_beam_equals_search_that_never_stops_early(alpha, beam_size):
    """B2, B7 and their kind: the early stop and the pruning change no entry of the n-best list."""
    max_lengths = [12, 3, 7]
    for seed in range(3):
        scorer = random_tables(100 + seed, sharpness=2.5)
        result = search(scorer, [0, 1, 2], max_lengths, beam_size=beam_size, length_penalty=alpha)
        for sentence, length in enumerate(max_lengths):
            expected = full_length_beam_search(scorer.next_log_probs(sentence), length, alpha, EOS, beam_size)
            assert_same(hypotheses(result, sentence), expected)


def test_scores_are_the_scorers_own_by_the_documented_length_rule():
    """B4: every hypothesis, ended or cut, force-decoded: log-probability by piece, sum, and score with EOS counted."""
    scorer = random_tables(7)
    result = search(scorer, [0, 1, 2], [12, 5, 2])
    seen = set()
    for sentence in range(3):
        next_log_probs = scorer.next_log_probs(sentence)
        for slot, hypothesis in enumerate(hypotheses(result, sentence)):
            tokens = hypothesis.tokens
            forced = [next_log_probs(tokens[:position])[token] for position, token in enumerate(tokens)]
            np.testing.assert_allclose(result.token_log_probs[sentence, slot, : len(tokens)], forced, rtol=1e-6)
            assert hypothesis.log_prob == pytest.approx(sum(forced), abs=1e-4)
            assert hypothesis.score == pytest.approx(score(sum(forced), len(tokens), 0.6), abs=1e-4)
            assert hypothesis.finished == (tokens[-1] == EOS)
            seen.add(hypothesis.finished)
    assert seen == {True, False}


def test_finished_sentence_is_frozen_while_others_go_on():
    """B1: A likes EOS at step 2, B at step 12, both hardly ever else; A's list is the same alone, before B, after B."""
    rng = np.random.default_rng(0)
    probabilities = np.zeros((3, 12, HISTORIES, 8))
    for sentence, step in enumerate([2, 12, 12]):
        probabilities[sentence, ..., EOS] = np.where(np.arange(12) + 1 == step, 0.9, 0.01)[:, None]
        probabilities[sentence, ..., 3:] = rng.dirichlet(np.ones(5), size=(12, HISTORIES))
        probabilities[sentence, ..., 3:] *= 1 - probabilities[sentence, ..., EOS, None]
    scorer = HistoryTables(log(probabilities))
    alone, before, after = (search(scorer, order, [12] * len(order)) for order in ([0], [0, 1], [1, 0]))
    assert hypotheses(alone, 0)[0].tokens[-1] == EOS and len(hypotheses(alone, 0)[0].tokens) == 2
    assert len(hypotheses(before, 1)[0].tokens) == 12
    for batch, row in [(before, 0), (after, 1)]:
        jax.tree.map(lambda one, other, row=row: np.testing.assert_array_equal(one[0], other[row]), alone, batch)


def test_result_does_not_depend_on_the_batch():
    """M3: neighbours, order, rows of padding and the batch's T leave a sentence's list as it is, to the bit."""
    scorer = random_tables(3)
    lengths = [4, 12, 7]
    alone = [search(scorer, [sentence], [lengths[sentence]]) for sentence in range(3)]
    for order, padding, max_length in [([0, 1, 2], 0, 12), ([2, 0, 1], 0, 12), ([1, 0], 0, 12), ([0, 2], 1, 9)]:
        max_lengths = [*(lengths[sentence] for sentence in order), *[0] * padding]
        batch = search(scorer, [*order, *[0] * padding], max_lengths, max_length=max_length)
        for row, sentence in enumerate(order):
            for one, other in zip(alone[sentence], batch, strict=True):
                width = max_length if one.ndim == 3 else None
                np.testing.assert_array_equal(one[0, ..., :width], other[row])
        assert all(hypotheses(batch, len(order) + row) == [] for row in range(padding))


def test_shorter_n_best_list_begins_the_longer_one():
    """B5: n distinct hypotheses, scores never increasing, and entry 1 is the answer of n_best=1."""
    scorer = random_tables(11)
    full = search(scorer, [0, 1, 2], [12] * 3)
    for n_best in (1, 3):
        part = search(scorer, [0, 1, 2], [12] * 3, n_best=n_best)
        assert part.tokens.shape == (3, n_best, 12)
        for sentence in range(3):
            assert hypotheses(part, sentence) == hypotheses(full, sentence)[:n_best]
            assert len(hypotheses(full, sentence)) == 4


@pytest.mark.parametrize(("possible", "count"), [(2, 3), (3, 7)])
def test_fewer_hypotheses_than_beams_leave_empty_slots(possible, count):
    """B5: a space of few sequences is returned whole, each once, and the rest of the slots is empty."""
    scorer = random_tables(5, sentences=1, max_length=2, vocabulary=3)
    scorer.tables[..., possible:] = -np.inf
    result = search(scorer, [0], [2], beam_size=8)
    expected = all_hypotheses(scorer.next_log_probs(0), 2, 0.6, EOS)
    assert len(expected) == count
    assert_same(hypotheses(result, 0), expected)


@pytest.mark.parametrize("eos_log_prob", [-1e9, -np.inf])
def test_sentences_that_never_end_are_cut(eos_log_prob):
    """B6: 3 sentences, unfinished outputs of 5 pieces each, all numbers finite."""
    scorer = random_tables(1)
    scorer.tables[..., EOS] = eos_log_prob
    result = search(scorer, [0, 1, 2], [5, 5, 5], n_best=3)
    for sentence in range(3):
        found = hypotheses(result, sentence)
        assert [len(h.tokens) for h in found] == [5, 5, 5]
        assert not any(h.finished or EOS in h.tokens or not math.isfinite(h.score) for h in found)


@pytest.mark.parametrize("greedy", [False, True])
def test_impossible_pieces_give_empty_slots_not_nan(greedy):
    """B6 and its kind: where every continuation has probability 0 there is no hypothesis, and no NaN."""
    assert search_markov(np.full((6, 6), -np.inf, np.float32), 5, greedy=greedy) == []


def test_beam_of_one_also_keeps_the_second_candidate():
    """B7: greedy returns `a` (log .18); a beam of one also keeps the candidate EOS, and returns empty (log .30)."""
    table = markov_table({BOS: [0.30, 0.45, 0.25], A: [0.40, 0.20, 0.20, 0.20], B_: [0.40, 0.20, 0.20, 0.20]})
    expected_greedy = Hypothesis(math.log(0.18), math.log(0.18), (A, EOS), True)
    expected_beam = Hypothesis(math.log(0.30), math.log(0.30), (EOS,), True)
    assert_same(search_markov(table, 5, length_penalty=0.0, greedy=True), [expected_greedy])
    assert_same(search_markov(table, 5, length_penalty=0.0), [expected_beam])


def test_beam_of_one_equals_greedy_or_is_strictly_better():
    """B7: 40 random Markov scorers, never worse than greedy."""
    same = 0
    for seed in range(40):
        table = log(np.random.default_rng(seed).dirichlet(np.full(6, 0.7), size=6)).astype(np.float32)
        alpha = [0.0, 0.6][seed % 2]
        (beam,) = search_markov(table, 8, length_penalty=alpha)
        (greedy,) = search_markov(table, 8, length_penalty=alpha, greedy=True)
        same += beam == greedy
        assert beam == greedy or beam.score > greedy.score
    assert 0 < same < 40


def steps_taken(table: np.ndarray, n_best: int) -> tuple[int, list[Hypothesis]]:
    """How often the step function ran, of 50 times at most, and what was found."""
    calls = []

    def step(cache, tokens):
        jax.debug.callback(lambda: calls.append(1))
        return jnp.asarray(table)[tokens], cache

    @jax.jit
    def run():
        return beam_search(
            step,
            (),
            first_tokens=jnp.array([BOS]),
            max_lengths=jnp.array([50]),
            max_length=50,
            beam_size=3,
            length_penalty=0.6,
            eos_id=EOS,
            pad_id=PAD,
            n_best=n_best,
        )

    found = hypotheses(run(), 0)
    jax.effects_barrier()
    return len(calls), found


def test_search_stops_as_soon_as_nothing_better_can_come():
    """A near-certain EOS ends the loop long before the maximal length; a sufficient n_best ends it sooner still."""
    words = [0.001 / 3] * 3
    after_word = [0.999, *words]
    table = markov_table({BOS: [0.001, *[0.333] * 3], A: after_word, B_: after_word, C: after_word})
    best, found_best = steps_taken(table, n_best=1)
    whole, found_whole = steps_taken(table, n_best=3)
    assert best == 2
    assert best <= whole <= 4
    assert found_best == found_whole[:1] and len(found_whole) == 3


def test_bound_is_that_of_the_maximal_length():
    """The stop is tight: with alpha, a cut hypothesis may win at the very last position, by the largest divisor."""
    # EOS first: log .5 = -.693. Cut after 30 pieces: log .5 + 29 log .9999 = -.696, divided by (35/6)^1 = -.119.
    table = markov_table({BOS: [0.5, 0.5], A: [0.0001, 0.9999]})
    (best,) = search_markov(table, 30, length_penalty=1.0)
    assert best.tokens == (A,) * 30 and not best.finished
    assert search_markov(table, 30, length_penalty=0.0)[0].tokens == (EOS,)


def test_equal_scores_are_ordered_by_length_and_id():
    """Ties: the hypothesis that ended earlier comes first, then the lower id."""
    found = search_markov(np.full((6, 6), math.log(1 / 6), np.float32), 1, beam_size=3)
    assert [h.tokens for h in found] == [(0,), (1,), (2,)]
    # EOS after a, and cut after b: 1/2 each at alpha 0, one piece later.
    table = markov_table({BOS: [0.5, 0, 0.5], B_: [1.0]})
    assert [h.tokens for h in search_markov(table, 5, beam_size=3, length_penalty=0.0)] == [(EOS,), (B_, EOS)]


def test_prefix_begins_every_hypothesis_and_counts():
    """Forced pieces, PAD leaves a position free: equal to exhaustive search among what begins so."""
    scorer = random_tables(9, max_length=4, vocabulary=4)
    prefixes = np.array([[3, 2, 0, 0, 0], [3, 2, 3, 2, 3], [0, 0, 0, 0, 0]], np.int32)  # the second is longer than T
    result = search(scorer, [0, 1, 2], [4, 3, 4], beam_size=27, prefix=prefixes)
    for sentence, (length, prefix) in enumerate([(4, (3, 2)), (3, (3, 2, 3)), (4, ())]):
        expected = all_hypotheses(scorer.next_log_probs(sentence), length, 0.6, EOS, prefix)
        assert_same(hypotheses(result, sentence), expected[:27])


def test_reorder_replaces_the_gathering_of_the_cache():
    """A cache of another layout brings its own reorder; here a column for each row, as in [N B*M ...]."""
    scorer = random_tables(13)

    def step(cache, tokens):
        log_probs, new = table_step(scorer.tables, {**cache, "history": cache["history"][0]}, tokens)
        return log_probs, {**new, "history": new["history"][None]}

    @jax.jit
    def run(cache):
        return beam_search(
            step,
            cache,
            first_tokens=jnp.full(3, BOS),
            max_lengths=jnp.full(3, 12),
            max_length=12,
            beam_size=4,
            length_penalty=0.6,
            eos_id=EOS,
            pad_id=PAD,
            reorder=lambda cache, parents: {**cache, "history": cache["history"][:, parents]},
        )

    cache = scorer.cache([0, 1, 2], 4)
    result = run({**cache, "history": cache["history"][None]})
    expected = search(scorer, [0, 1, 2], [12] * 3)
    for sentence in range(3):
        assert_same(hypotheses(result, sentence), hypotheses(expected, sentence))


@pytest.mark.parametrize("pieces", [5, 1000, 3000, 3001, 8000])
def test_the_best_of_many_pieces_are_those_of_a_sort(pieces):
    """In groups or, where no size divides or there are few pieces, at once; most pieces forbidden in the last rows."""
    rng = np.random.default_rng(pieces)
    rows = rng.standard_normal((6, pieces)).astype(np.float32)
    rows[3] = np.sort(rows[3])
    rows[4, rng.permutation(pieces)[3:]] = -np.inf
    rows[5] = rng.integers(0, 9, pieces)  # many are equal
    best, tokens = jax.tree.map(np.asarray, best_pieces(jnp.asarray(rows), 5))
    order = np.argsort(-rows, axis=1, kind="stable")[:, :5]
    np.testing.assert_array_equal(best, np.take_along_axis(rows, order, axis=1))
    np.testing.assert_array_equal(tokens[:4], order[:4])
    np.testing.assert_array_equal(best, np.take_along_axis(rows, tokens, axis=1))
    assert all(len(set(row)) == 5 for row in tokens.tolist())


def test_gather_beams_takes_rows_and_leaves_scalars():
    """The default reorder."""
    cache = {"keys": jnp.arange(6).reshape(3, 2), "position": jnp.int32(4)}
    gathered = gather_beams(cache, jnp.array([2, 0, 0]))
    assert gathered["keys"].tolist() == [[4, 5], [0, 1], [0, 1]] and gathered["position"] == 4


def test_length_penalties_follow_the_formula():
    """((5 + n) / 6)^alpha; 1 for a lone EOS."""
    assert length_penalties(3, 1.0).tolist() == pytest.approx([5 / 6, 1, 7 / 6, 8 / 6])
    assert length_penalties(3, 0.0).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"beam_size": 0}, ["beam_size is 0", "at least 1"]),
        ({"beam_size": 4, "n_best": 8}, ["n_best is 8", "beam_size (4)"]),
        ({"n_best": 0}, ["n_best is 0"]),
        ({"length_penalty": -0.1}, ["length_penalty is -0.1", "at least 0"]),
        ({"max_length": 0}, ["max_length is 0", "at least 1"]),
    ],
)
def test_options_out_of_range_are_refused(options, words):
    """B5: both numbers are named where n_best exceeds the beam."""
    arguments = {"max_length": 3, "beam_size": 2, "length_penalty": 0.6, **options}
    with pytest.raises(UserError) as error:
        beam_search(
            lambda cache, tokens: (jnp.zeros((2, 4)), cache),
            (),
            first_tokens=jnp.array([BOS]),
            max_lengths=jnp.array([3]),
            eos_id=EOS,
            pad_id=PAD,
            **arguments,
        )
    assert all(word in str(error.value) for word in words)
