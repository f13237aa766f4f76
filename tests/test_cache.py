"""Decoding one piece at a time equals the full pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import BOS, QUICK, VOCABULARY, random_params, rows, sentence, small_config

from transformer_jax.model.cache import decode_step, decoder_layers, encode_source, reorder_beams, start_cache
from transformer_jax.model.transformer import Transformer

STEPS = 12
SOURCES = [sentence(9), sentence(2), sentence(5)]
VARIANTS = [
    {},
    {"norm": "pre", "tied_embeddings": False},
    {"positions": "learned", "d_k": 3, "d_v": 5, "attention_bias": False},
    {"norm": "pre", "positions": "learned"},
]


def variants(function):
    return pytest.mark.parametrize("changes", VARIANTS, ids=lambda changes: " ".join(changes) or "paper")(function)


def three_layers(changes):
    config = small_config(encoder_layers=1, decoder_layers=3, **changes)
    return config, random_params(config)


def stepper(config, params, source):
    """A jitted (cache, tokens, parents) -> logits, cache; beams are reordered first, as a search does."""
    layers = decoder_layers(config, params)
    encoded = jax.jit(functools.partial(encode_source, config), compiler_options=QUICK)(params, source)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def step(cache, tokens, parents):
        return decode_step(config, params, layers, encoded, reorder_beams(cache, parents), tokens)

    return step


@functools.cache
def full_pass(config):
    return jax.jit(Transformer(config).apply, compiler_options=QUICK)


@variants
def test_cached_steps_equal_one_full_pass(changes):
    """K1: three layers, 12 forced pieces, unequal source lengths."""
    config, params = three_layers(changes)
    source = rows(SOURCES, 9)
    target = np.array([[BOS, *sentence(STEPS - 1, seed=i)] for i in range(3)], np.int32)
    expected = full_pass(config)({"params": params}, source, jnp.asarray(target))
    step, cache = stepper(config, params, source), start_cache(config, 3, 1, STEPS)
    for t in range(STEPS):
        logits, cache = step(cache, target[:, t], np.arange(3))
        np.testing.assert_allclose(logits, expected[:, t], atol=1e-4, err_msg=f"step {t}")


@variants
def test_reordered_beams_equal_full_passes_of_their_hypotheses(changes):
    """B4: four beams that swap, die and multiply at every step; each hypothesis against a full pass over its pieces."""
    beams = 4
    config, params = three_layers(changes)
    source = rows(SOURCES, 9)
    step, cache = stepper(config, params, source), start_cache(config, 3, beams, STEPS)
    rng = np.random.default_rng(0)
    hypotheses = [[] for _ in range(3 * beams)]
    got, histories = [], []
    for _ in range(STEPS):
        parents = np.concatenate([b * beams + rng.integers(0, beams, beams) for b in range(3)])
        tokens = rng.integers(4, VOCABULARY, 3 * beams).astype(np.int32)
        hypotheses = [[*hypotheses[parent], int(token)] for parent, token in zip(parents, tokens, strict=True)]
        logits, cache = step(cache, tokens, parents)
        got.append(logits)
        histories.append(hypotheses)
    for t in (0, 1, 4, STEPS - 1):
        expected = full_pass(config)({"params": params}, source.repeat(beams, axis=0), rows(histories[t], STEPS))
        np.testing.assert_allclose(got[t], expected[:, t], atol=1e-4, err_msg=f"step {t}")


def test_reordering_leaves_the_cache_where_it_lies():
    """Keys and values are the very same arrays afterwards: only the table of ancestors changes."""
    cache = start_cache(small_config(), 1, 2, 4)
    moved = reorder_beams(cache._replace(ancestry=jnp.array([[[0, 0, 0, 0], [1, 1, 0, 0]]])), jnp.array([1, 1]))
    assert all(a is b for a, b in zip(jax.tree.leaves(moved.layers), jax.tree.leaves(cache.layers), strict=True))
    np.testing.assert_array_equal(moved.ancestry, [[[1, 1, 0, 0], [1, 1, 0, 0]]])


def test_the_cache_has_the_compute_dtype():
    """bfloat16 halves its memory."""
    config = small_config(dtype="bfloat16")
    params = random_params(config)
    cache = start_cache(config, 3, 2, 4)
    assert {leaf.dtype for leaf in jax.tree.leaves(cache.layers)} == {jnp.dtype(jnp.bfloat16)}
    logits, after = stepper(config, params, rows(SOURCES, 9))(cache, np.full(6, BOS, np.int32), np.arange(6))
    assert np.isfinite(np.asarray(logits, np.float32)).all()
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), cache)
