"""The model against the paper in numpy, and the properties that masks, scans and dropout must have."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from small_models import BOS, PAD, QUICK, random_params, rows, sentence, small_config

from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Transformer
from transformer_jax.ops.loss import loss_sums


@functools.cache
def compiled(config, *, train=False):
    """The jitted forward pass of a configuration."""
    return jax.jit(functools.partial(Transformer(config).apply, train=train), compiler_options=QUICK)


@functools.cache
def compiled_loss(config, *, train=False):
    """(params, source, target, rng) -> (loss, logits), gradients; PAD in the target has no part in the loss."""

    def loss(params, source, target, rng):
        logits = Transformer(config).apply({"params": params}, source, target, train=train, rngs={"dropout": rng})
        labels = jnp.concatenate([target[:, 1:], jnp.full_like(target[:, :1], PAD)], axis=1)
        sums = loss_sums(logits, labels, (labels != PAD).astype(jnp.float32), 0.1)
        return sums["loss"] / sums["tokens"], logits

    return jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)


def logits_of(config, params, *args, **kwargs):
    return np.asarray(compiled(config)({"params": params}, *args, **kwargs), np.float32)


def assert_trees_close(a, b, **tolerance):
    jax.tree_util.tree_map_with_path(
        lambda path, x, y: np.testing.assert_allclose(x, y, err_msg=jax.tree_util.keystr(path), **tolerance), a, b
    )


SOURCES = [sentence(4), sentence(7), sentence(1)]
TARGETS = [[BOS, *sentence(5, seed=1)], [BOS, *sentence(2, seed=1)], [BOS]]


# The whole model against the reference


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm": "pre", "tied_embeddings": False},
        {"attention_bias": False, "d_k": 3, "d_v": 5},
        {"norm": "pre", "positions": "learned", "encoder_layers": 1, "decoder_layers": 3},
        {"sinusoids": "concatenated", "num_heads": 1, "norm_epsilon": 1e-2},
        {"positions": "learned", "d_model": 7, "num_heads": 1, "tied_embeddings": False},
    ],
    ids=lambda changes: " ".join(changes) or "paper",
)
def test_logits_equal_the_papers(changes):
    """A padded batch against one sentence after the other in float64."""
    config = small_config(**changes)
    params = random_params(config)
    logits = logits_of(config, params, rows(SOURCES, 8), rows(TARGETS, 6))
    for got, source, target in zip(logits, SOURCES, TARGETS, strict=True):
        expected = reference.transformer(config, params, source, target)
        np.testing.assert_allclose(got[: len(target)], expected, atol=3e-5)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_sentences_packed_in_a_row_do_not_see_each_other(positions):
    """Logits of two pairs in one row, with segments and positions, equal those of each pair alone."""
    config = small_config(positions=positions)
    params = random_params(config)

    def packed(sentences, width):
        """Ids, segments and positions of all sentences in one row."""
        fill = [0] * (width - sum(map(len, sentences)))
        segments = [i + 1 for i, pieces in enumerate(sentences) for _ in pieces]
        places = [t for pieces in sentences for t in range(len(pieces))]
        ids = [piece for pieces in sentences for piece in pieces]
        return [jnp.array([row + fill], jnp.int32) for row in (ids, segments, places)]

    source, source_segments, source_positions = packed(SOURCES, 14)
    target, target_segments, target_positions = packed(TARGETS, 11)
    got = logits_of(
        config, params, source, target,
        source_segments=source_segments, target_segments=target_segments,
        source_positions=source_positions, target_positions=target_positions,
    )[0]  # fmt: skip
    start = 0
    for pieces, target_pieces in zip(SOURCES, TARGETS, strict=True):
        expected = reference.transformer(config, params, pieces, target_pieces)
        np.testing.assert_allclose(got[start : start + len(target_pieces)], expected, atol=3e-5)
        start += len(target_pieces)


# What may be seen


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_logits_do_not_depend_on_later_target_pieces(norm):
    """The gradient of position t's logits with respect to an embedding is exactly zero for pieces that come after t."""
    config = small_config(norm=norm, tied_embeddings=False)
    params = random_params(config)
    source, target = rows([sentence(4)], 4), jnp.array([[BOS, 4, 5, 6, 7, 8]], jnp.int32)  # all pieces distinct

    @functools.partial(jax.jit, compiler_options=QUICK)
    def gradients(params):
        def logits(matrix):
            return Transformer(config).apply({"params": params | {"target_embedding": matrix}}, source, target)[0]

        weights = jax.random.normal(jax.random.key(0), (6, config.vocab_size))
        _, pull_back = jax.vjp(logits, params["target_embedding"])
        one_position = jnp.eye(6)[:, :, None] * weights
        return jax.vmap(lambda cotangent: pull_back(cotangent)[0])(one_position)  # -> [T W D]

    influence = np.abs(gradients(params)).sum(axis=-1)[:, target[0]]  # -> [T, piece at each position]
    np.testing.assert_array_equal(influence > 0, np.tril(np.ones((6, 6), bool)))


def test_padding_content_reaches_nothing():
    """M2: alone or padded, on both sides, with PAD's embedding at 1000."""
    config = small_config()
    params = random_params(config)
    source, target = sentence(4), [BOS, *sentence(3, seed=1)]
    alone = logits_of(config, params, rows([source], 4), rows([target], 4))
    poisoned = params | {"embedding": params["embedding"].at[PAD].set(1000.0)}
    padded = logits_of(config, poisoned, rows([source], 9), rows([target], 9))
    pieces = np.arange(config.vocab_size) != PAD  # the logit of PAD itself is that of the poisoned row
    np.testing.assert_allclose(padded[0, :4, pieces], alone[0, :, pieces], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_row_of_padding_alone_harms_nothing(norm):
    """M1: everything is finite; the other row's logits are right, and loss and gradients are those of that row alone
    (of that row twice, which has the same mean).
    """
    config = small_config(norm=norm)
    params = random_params(config)
    source, target, rng = sentence(3), [BOS, *sentence(2, seed=1)], jax.random.key(0)
    loss = compiled_loss(config)
    (value, logits), gradients = loss(params, rows([source, []], 3), rows([target, []], 3), rng)
    (twice_value, _), twice_gradients = loss(params, rows([source, source], 3), rows([target, target], 3), rng)
    for array in (value, logits, *jax.tree.leaves(gradients)):
        assert np.isfinite(array).all()
    np.testing.assert_allclose(logits[0], reference.transformer(config, params, source, target), atol=3e-5)
    np.testing.assert_allclose(value, twice_value, rtol=1e-5)
    assert_trees_close(gradients, twice_gradients, atol=1e-5)


def test_a_sentence_does_not_depend_on_its_batch():
    """M3: the same logits alone and among others, in any order."""
    config = small_config()
    params = random_params(config)
    batch = logits_of(config, params, rows(SOURCES, 8), rows(TARGETS, 6))
    turned = logits_of(config, params, rows(SOURCES[::-1], 8), rows(TARGETS[::-1], 6))
    np.testing.assert_allclose(turned[::-1], batch, atol=1e-5)


def test_bfloat16_is_close_to_float32():
    """N1: target lengths 2 and 10, so that some cells are masked twice; within 5% of the logits' size."""
    wide, narrow = small_config(d_model=16), small_config(d_model=16, dtype="bfloat16")
    params = random_params(wide)
    source, target = rows([sentence(4), sentence(7)], 8), rows([[BOS, 5], [BOS, *sentence(9)]], 10)
    expected, got = logits_of(wide, params, source, target), logits_of(narrow, params, source, target)
    assert compiled(narrow)({"params": params}, source, target).dtype == jnp.bfloat16
    assert np.isfinite(got).all()
    for b, t in [(0, 2), (1, 10)]:
        assert np.linalg.norm(got[b, :t] - expected[b, :t]) < 0.05 * np.linalg.norm(expected[b, :t])


# Scans, rematerialisation, dropout

DROPOUT = {"dropout": 0.2, "attention_dropout": 0.1, "relu_dropout": 0.1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"scan_layers": False}, {"remat": "dots"}, {"remat": "full"}],
    ids=lambda changes: "{}={}".format(*next(iter(changes.items()))),
)
def test_scan_and_remat_change_no_number(changes):
    """Same parameters, loss and gradients, with dropout on: the backward pass draws the forward pass's masks again."""
    params = random_params(small_config())
    args = (params, rows(SOURCES, 8), rows(TARGETS, 6), jax.random.key(1))
    (value, logits), gradients = compiled_loss(small_config(**DROPOUT), train=True)(*args)
    config = small_config(**DROPOUT, **changes)
    assert jax.tree.structure(random_params(config)) == jax.tree.structure(params)
    (other_value, other_logits), other_gradients = compiled_loss(config, train=True)(*args)
    np.testing.assert_allclose(other_value, value, rtol=1e-5)
    np.testing.assert_allclose(other_logits, logits, atol=1e-5)
    assert_trees_close(other_gradients, gradients, atol=1e-5)


def test_remat_saves_less():
    """What the backward pass keeps: all, matrix products only, next to nothing."""
    params = random_params(small_config())
    source, target = rows(SOURCES, 8), rows(TARGETS, 6)

    def saved(remat):
        config = small_config(remat=remat)
        _, pull_back = jax.eval_shape(
            lambda params: jax.vjp(lambda p: Transformer(config).apply({"params": p}, source, target), params), params
        )
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(pull_back))

    assert saved("none") > saved("dots") > saved("full")


def test_without_train_there_is_no_dropout():
    config = small_config(**DROPOUT)
    params = random_params(config)
    args = ({"params": params}, rows(SOURCES, 8), rows(TARGETS, 6))
    plain = compiled(config)(*args)
    np.testing.assert_array_equal(plain, compiled(config)(*args, rngs={"dropout": jax.random.key(0)}))
    np.testing.assert_allclose(plain, compiled(small_config())(*args), atol=1e-6)


@pytest.mark.parametrize("name", DROPOUT)
def test_each_dropout_acts_in_training_and_follows_its_key(name):
    config = small_config(**{name: 0.3})
    params = random_params(config)
    args = ({"params": params}, rows(SOURCES, 8), rows(TARGETS, 6))
    one, again, other = (compiled(config, train=True)(*args, rngs={"dropout": jax.random.key(i)}) for i in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert not np.allclose(one, other)
    assert not np.allclose(one, compiled(config)(*args))


def test_every_layer_and_place_draws_its_own_dropout_key(monkeypatch):
    """Two embeddings, then 2 + 3 residuals, 1 + 2 attentions and 1 + 1 feed-forwards in each pair of layers."""
    keys = []

    def recording(x, rate, key):
        def record(words):
            keys.append(tuple(words.tolist()))
            return np.zeros((), x.dtype)

        return x + jax.pure_callback(record, jax.ShapeDtypeStruct((), x.dtype), jax.random.key_data(key))

    for module in ("ops.attention", "ops.feed_forward", "model.layers", "model.transformer"):
        monkeypatch.setattr(f"transformer_jax.{module}.dropout", recording)
    config = small_config(**DROPOUT)
    variables, rngs = {"params": random_params(config)}, {"dropout": jax.random.key(0)}
    forward = jax.jit(functools.partial(Transformer(config).apply, train=True), compiler_options=QUICK)
    jax.block_until_ready(forward(variables, rows(SOURCES, 8), rows(TARGETS, 6), rngs=rngs))
    assert len(keys) == 2 + 2 * (5 + 3 + 2)
    assert len(set(keys)) == len(keys)


# Refusals


def test_more_positions_than_learned_rows_are_refused():
    """P2: indexing in JAX would repeat the last row without a word."""
    config = small_config(positions="learned", max_positions=4)
    params = random_params(config)
    assert np.isfinite(logits_of(config, params, rows([sentence(4)], 4), rows([[BOS]], 4))).all()
    with pytest.raises(ValueError, match=r"5 positions, but model\.max_positions is 4"):
        logits_of(config, params, rows([sentence(5)], 5), rows([[BOS]], 4))
    with pytest.raises(ValueError, match=r"5 positions, but model\.max_positions is 4"):
        logits_of(config, params, rows([sentence(4)], 4), rows([[BOS]], 5))


def test_sinusoids_have_no_last_position():
    """P2: 40 pieces where max_positions is 4."""
    config = small_config(max_positions=4, encoder_layers=1, decoder_layers=1)
    params = random_params(config)
    source, target = sentence(40), [BOS, *sentence(39, seed=1)]
    got = logits_of(config, params, rows([source], 40), rows([target], 40))[0]
    np.testing.assert_allclose(got, reference.transformer(config, params, source, target), atol=3e-5)


def test_a_model_without_vocabulary_size_is_refused():
    with pytest.raises(UserError, match=r"model\.vocab_size is None"):
        Transformer(small_config(vocab_size=None)).init(jax.random.key(0), rows([[4]], 1), rows([[4]], 1))
