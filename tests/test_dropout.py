"""Dropout: the statistics of its mask, and that forward and backward pass draw the same one."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.ops.attention import attend
from transformer_jax.ops.dropout import dropout, part_of_batch, random_words

KEYS = [jax.random.key(0), jax.random.key(1), jax.random.PRNGKey(2), *jax.random.split(jax.random.key(3), 2)]


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5])
def test_dropout_zeroes_the_rate_and_keeps_the_mean(rate):
    count = 200 * 512
    bound = 5 * math.sqrt(rate * (1 - rate) / count)  # five standard deviations of the share
    for key in KEYS:
        out = np.asarray(dropout(jnp.ones((200, 512)), rate, key))
        assert abs((out == 0).mean() - rate) < bound
        np.testing.assert_allclose(out[out != 0], 1 / (1 - rate), rtol=1e-6)
        assert abs(out.mean() - 1) < bound / (1 - rate)


def test_dropout_of_rate_zero_is_the_identity():
    x = jnp.ones((3, 4))
    assert dropout(x, 0.0, KEYS[0]) is x


def test_dropout_keeps_the_dtype():
    assert dropout(jnp.ones((4, 4), jnp.bfloat16), 0.5, KEYS[0]).dtype == jnp.bfloat16


def test_the_same_key_gives_the_same_mask():
    x = jnp.ones((64, 64))
    np.testing.assert_array_equal(dropout(x, 0.5, KEYS[0]), jax.jit(lambda x: dropout(x, 0.5, KEYS[0]))(x))


def signs(words):
    """+1 or -1 for each element at rate 0.5."""
    return np.where(np.asarray(words) >= 2**31, 1.0, -1.0).ravel()


def test_masks_of_different_keys_are_uncorrelated():
    """Also of consecutive keys, as steps and layers have."""
    shape = (128, 256)
    bound = 5 / math.sqrt(128 * 256)
    keys = [*KEYS, *(jax.random.fold_in(KEYS[0], i) for i in range(4))]
    masks = np.stack([signs(random_words(key, shape)) for key in keys])
    correlation = masks @ masks.T / masks.shape[1]
    assert np.abs(correlation - np.eye(len(keys))).max() < bound


@pytest.mark.parametrize("lag", [1, 2, 3, 64, 255, 256, 257, 512, 4096])
def test_elements_of_a_mask_are_uncorrelated(lag):
    """Neighbours, and the same column of later rows (256 to a row)."""
    for key in KEYS:
        mask = signs(random_words(key, (128, 256)))
        assert abs((mask[lag:] * mask[:-lag]).mean()) < 5 / math.sqrt(len(mask) - lag)


def test_words_are_uniform_in_every_byte():
    """Chi-square with 255 degrees of freedom: mean 255, standard deviation 22.6."""
    for key in KEYS:
        words = np.asarray(random_words(key, (256, 256)))
        for byte in words.reshape(-1, 1).view(np.uint8).T:
            chi_square = ((np.bincount(byte, minlength=256) - 256.0) ** 2 / 256.0).sum()
            assert abs(chi_square - 255) < 6 * 22.6


@pytest.mark.parametrize("axis", [0, 1])
def test_no_row_or_column_is_favoured(axis):
    """Kept elements of each vary as coin tosses do: chi-square with 256 degrees of freedom, standard deviation 22.6."""
    for key in KEYS:
        kept = (np.asarray(random_words(key, (256, 256))) >= 2**31).sum(axis=axis)
        chi_square = ((kept - 128.0) ** 2 / 64.0).sum()
        assert abs(chi_square - 256) < 6 * 22.6


def test_an_elements_word_depends_on_its_index_alone():
    """So a mask does not change with the mesh: a batch cut off after 4 rows has the first 4 rows' words."""
    np.testing.assert_array_equal(random_words(KEYS[0], (8, 5, 3))[:4], random_words(KEYS[0], (4, 5, 3)))
    np.testing.assert_array_equal(random_words(KEYS[0], (8, 5, 3)).ravel(), random_words(KEYS[0], (120,)))


def test_the_gradient_uses_the_mask_of_the_forward_pass():
    x = jnp.ones((16, 16))
    out, pull_back = jax.vjp(lambda x: dropout(x, 0.3, KEYS[0]), x)
    np.testing.assert_array_equal(pull_back(jnp.full_like(x, 2.0))[0], out * 2.0)


@pytest.mark.slow
def test_attention_dropout_acts_on_the_weights():
    """The mean over many keys is the result without dropout, and single results differ."""
    q, k, v = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate([(2, 5, 3, 4), (2, 6, 3, 4), (2, 6, 3, 2)])
    )
    mask = jnp.ones((1, 1, 1, 6), bool)
    drop = jax.jit(jax.vmap(lambda key: attend(q, k, v, mask, dropout_rate=0.3, dropout_key=key)))
    outs = drop(jax.random.split(KEYS[0], 2000))
    plain = attend(q, k, v, mask)
    assert np.abs(outs[0] - plain).max() > 0.1
    # The spread of one result is below 1, so that of the mean of 2000 below 0.022.
    assert np.abs(outs.mean(axis=0) - plain).max() < 0.1


@pytest.mark.parametrize("shape", [(6, 5), (6, 2, 3, 4)])
def test_a_part_of_a_batch_has_the_masks_of_its_rows(shape):
    """G1: row j of part p is row j * parts + p."""
    whole = np.asarray(random_words(KEYS[0], shape))
    for part in range(3):
        with part_of_batch(part, 3):
            np.testing.assert_array_equal(random_words(KEYS[0], (2, *shape[1:])), whole[part::3])
    np.testing.assert_array_equal(random_words(KEYS[0], shape), whole)
