"""Greedy search and sampling, with scorers that are tables of the next piece by the previous one."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.errors import UserError
from transformer_jax.search import greedy_search, sample

PAD, EOS, BOS = 0, 1, 2
LENGTH = 8
ARGUMENTS = {"max_length": LENGTH, "length_penalty": 0.6, "eos_id": EOS, "pad_id": PAD}


def random_table(seed: int) -> np.ndarray:
    """[W W] log-probabilities for 7 pieces; neither PAD nor BOS comes up."""
    probabilities = np.random.default_rng(seed).dirichlet(np.ones(7), size=7)
    probabilities[:, [PAD, BOS]] = 0
    with np.errstate(divide="ignore"):
        return np.log(probabilities / probabilities.sum(axis=1, keepdims=True)).astype(np.float32)


@functools.cache
def all_keys() -> np.ndarray:
    """The raw keys of sentences 0 to 3999, [4000 2]."""
    return np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), 4000)))


def step_of(table):
    """A step function without a cache."""
    return lambda cache, tokens: (jnp.asarray(table)[tokens], cache)


@jax.jit
def _greedy(table, max_lengths, prefix):
    first = jnp.full(max_lengths.shape, BOS)
    return greedy_search(step_of(table), (), first_tokens=first, max_lengths=max_lengths, prefix=prefix, **ARGUMENTS)


@functools.partial(jax.jit, static_argnames="top_k")
def _sample(table, keys, max_lengths, prefix, temperature, top_k):
    first = jnp.full(max_lengths.shape, BOS)
    options = {"temperature": temperature, "top_k": top_k, "prefix": prefix, **ARGUMENTS}
    return sample(step_of(table), (), keys, first_tokens=first, max_lengths=max_lengths, **options)


def run_greedy(table, max_lengths, prefix=None):
    """Greedy search of a batch whose sentences differ in maximal length and prefix only, as numpy arrays."""
    return jax.tree.map(np.asarray, _greedy(table, np.array(max_lengths), prefix))


def run_sample(table, keys, max_lengths, prefix=None, temperature=1.0, top_k=0):
    """Samples for a batch whose sentences differ in key, maximal length and prefix only, as numpy arrays."""
    return jax.tree.map(np.asarray, _sample(table, keys, np.array(max_lengths), prefix, temperature, top_k=top_k))


def check_against_table(table: np.ndarray, result, max_lengths) -> None:
    """B4: every piece's log-probability, the sum, the score (EOS counted), the length and the flag are the table's."""
    for sentence, max_length in enumerate(max_lengths):
        length = int(result.lengths[sentence, 0])
        tokens = result.tokens[sentence, 0]
        assert (tokens[length:] == PAD).all() and (result.token_log_probs[sentence, 0, length:] == 0).all()
        forced = [table[before, piece] for before, piece in zip([BOS, *tokens], tokens[:length], strict=False)]
        np.testing.assert_array_equal(result.token_log_probs[sentence, 0, :length], forced)
        assert float(result.log_probs[sentence, 0]) == pytest.approx(math.fsum(forced), abs=1e-4)
        expected = math.fsum(forced) / ((5 + length) / 6) ** 0.6
        assert float(result.scores[sentence, 0]) == pytest.approx(expected, abs=1e-4)
        assert bool(result.finished[sentence, 0]) == (tokens[length - 1] == EOS)
        assert EOS not in tokens[: length - 1] and (length == max_length or result.finished[sentence, 0])


@pytest.mark.parametrize("seed", range(6))
def test_greedy_takes_the_likeliest_piece(seed):
    """B7: against a plain loop, for maximal lengths 8, 1 and 3 in one batch; 20 means the batch's 8."""
    table = random_table(seed)
    result = run_greedy(table, [20, 1, 3])
    max_lengths = [8, 1, 3]
    check_against_table(table, result, max_lengths)
    for sentence, max_length in enumerate(max_lengths):
        expected = [BOS]
        while expected[-1] != EOS and len(expected) <= max_length:
            expected.append(int(table[expected[-1]].argmax()))
        assert result.tokens[sentence, 0, : len(expected) - 1].tolist() == expected[1:]
        assert result.lengths[sentence, 0] == len(expected) - 1


def test_greedy_stops_when_all_sentences_are_done():
    """B1: the step function runs as often as the longest sentence needs; the done one's tokens stay PAD."""
    calls = []
    probabilities = np.full((7, 7), 0.01)
    probabilities[[BOS, 3], [3, EOS]] = 0.94
    table = np.log(probabilities).astype(np.float32)

    def step(cache, tokens):
        jax.debug.callback(lambda: calls.append(1))
        return jnp.asarray(table)[tokens], cache

    first, lengths = jnp.array([BOS, 3]), jnp.array([8, 8])
    result = jax.jit(lambda: greedy_search(step, (), first_tokens=first, max_lengths=lengths, **ARGUMENTS))()
    jax.effects_barrier()
    assert result.tokens[:, 0, :3].tolist() == [[3, EOS, PAD], [EOS, PAD, PAD]]
    assert len(calls) == 2


def test_rows_of_padding_and_impossible_sentences_come_back_empty():
    """A maximal length of 0, or log-probabilities of -inf only: score -inf, length 0, no NaN."""
    for table, max_lengths, empty in [
        (random_table(0), [8, 0, 3], [False, True, False]),
        (np.full((7, 7), -np.inf, np.float32), [8, 8, 1], [True, True, True]),
    ]:
        result = run_greedy(table, max_lengths)
        assert (result.scores[:, 0] == -jnp.inf).tolist() == empty
        assert (result.lengths[:, 0] == 0).tolist() == empty
        assert (result.tokens[:, 0] == PAD).all(axis=1).tolist() == empty
        assert not any(np.isnan(leaf).any() for leaf in result)


def test_prefix_is_forced_and_scored():
    """Forced pieces count; PAD leaves a position free."""
    table = random_table(1)
    prefix = np.array([[3, 4, 5], [6, PAD, PAD], [PAD, PAD, PAD]])
    free = run_greedy(table, [8, 8, 8])
    for result in [
        run_greedy(table, [8, 8, 8], prefix),
        run_sample(table, all_keys()[[0, 1, 2]], [8, 8, 8], prefix),
    ]:
        check_against_table(table, result, [8, 8, 8])
        assert result.tokens[0, 0, :3].tolist() == [3, 4, 5] and result.tokens[1, 0, 0] == 6
    assert run_greedy(table, [8, 8, 8], prefix).tokens[2].tolist() == free.tokens[2].tolist()


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.5, 0), (1.0, 3), (2.0, 3)])
def test_pieces_are_drawn_from_the_documented_distribution(temperature, top_k):
    """First pieces of 4000 sentences, within 4 standard deviations of each expected count."""
    table = random_table(2)
    count = 4000
    result = run_sample(table, all_keys(), [LENGTH] * count, temperature=temperature, top_k=top_k)
    check_against_table(table, jax.tree.map(lambda leaf: leaf[:20], result), [LENGTH] * 20)
    log_probs = table[BOS] / temperature
    if top_k:
        log_probs = np.where(log_probs >= np.sort(log_probs)[-top_k], log_probs, -np.inf)
    expected = np.exp(log_probs) / np.exp(log_probs).sum()
    observed = np.bincount(result.tokens[:, 0, 0], minlength=7) / count
    assert (np.abs(observed - expected) <= 4 * np.sqrt(expected * (1 - expected) / count)).all()


def test_positions_are_drawn_independently():
    """With uniform pieces, one sentence's draws are not the same at every position."""
    table = np.log(np.full((7, 7), 1 / 7)).astype(np.float32)
    table[:, EOS] = -np.inf
    tokens = run_sample(table, all_keys(), [LENGTH] * 4000).tokens[:, 0]
    same = (tokens[:, 1:] == tokens[:, :-1]).mean()
    assert 1 / 6 - 0.01 < same < 1 / 6 + 0.01


def test_sample_depends_on_the_sentences_own_key_alone():
    """M3: same sample alone (with a typed key), in a batch, and in another order."""
    table = random_table(3)
    batch = run_sample(table, all_keys()[[5, 6, 7]], [8, 8, 8])
    turned = run_sample(table, all_keys()[[7, 6, 5]], [8, 8, 8])
    alone = run_sample(table, jax.random.wrap_key_data(all_keys()[[6]]), [8])
    jax.tree.map(lambda one, other: np.testing.assert_array_equal(one[::-1], other), batch, turned)
    jax.tree.map(lambda one, other: np.testing.assert_array_equal(one[1:2], other), batch, alone)
    assert len({tuple(row) for row in batch.tokens[:, 0].tolist()}) > 1


def test_top_k_of_one_is_greedy():
    """Whatever the key and temperature; top_k above the vocabulary draws among all."""
    table = random_table(4)
    lengths = [8, 1, 3]
    greedy = run_greedy(table, lengths)
    sampled = run_sample(table, all_keys()[[0, 1, 2]], lengths, temperature=3.0, top_k=1)
    jax.tree.map(np.testing.assert_array_equal, greedy, sampled)
    check_against_table(table, run_sample(table, all_keys()[[0, 1, 2]], lengths, top_k=100), [8, 1, 3])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"length_penalty": -1.0}, "length_penalty is -1.0"),
        ({"max_length": 0}, "max_length is 0"),
    ],
)
def test_options_out_of_range_are_refused(options, words):
    """One sentence names the option, its value and what it must be."""
    with pytest.raises(UserError, match=words):
        sample(
            step_of(random_table(0)),
            (),
            jnp.asarray(all_keys()[[0]]),
            first_tokens=jnp.array([BOS]),
            max_lengths=jnp.array([8]),
            **{**ARGUMENTS, **options},
        )
