"""Attention, masks, loss, schedule, positions and normalisation against numbers and the paper in numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference

from transformer_jax.config import ModelConfig, OptimizerConfig
from transformer_jax.errors import UserError
from transformer_jax.ops.attention import attend, attention_weights, merge_heads, project_heads
from transformer_jax.ops.feed_forward import feed_forward
from transformer_jax.ops.loss import loss_sums, smoothed_cross_entropy
from transformer_jax.ops.masks import causal_mask, padding_mask, segment_mask
from transformer_jax.ops.norm import layer_norm
from transformer_jax.ops.positions import sinusoids
from transformer_jax.ops.schedule import learning_rate_schedule


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


# Attention


def queries_keys_values():
    """q [2 5 3 4], k [2 6 3 4], v [2 6 3 2]: every dimension has its own size, so that none can stand for another."""
    return normal(0, 2, 5, 3, 4), normal(1, 2, 6, 3, 4), normal(2, 2, 6, 3, 2)


def test_attention_is_equation_1():
    q, k, v = queries_keys_values()
    mask = np.random.default_rng(3).random((2, 1, 5, 6)) < 0.6
    got = attend(q, k, v, jnp.asarray(mask))
    for b in range(2):
        visible = [np.flatnonzero(row).tolist() for row in mask[b, 0]]
        for h in range(3):
            expected = reference.attention(*(np.asarray(x[b, :, h], np.float64) for x in (q, k, v)), visible)
            np.testing.assert_allclose(got[b, :, h], expected, atol=1e-6)


def test_no_mask_is_a_mask_of_ones():
    q, k, v = queries_keys_values()
    np.testing.assert_allclose(attend(q, k, v, None), attend(q, k, v, jnp.ones((1, 1, 1, 6), bool)), atol=1e-6)


def test_projections_equal_products_per_head():
    x, w, b = normal(0, 2, 5, 7), normal(1, 7, 3, 4), normal(2, 3, 4)
    expected = np.stack([x @ w[:, h] + b[h] for h in range(3)], axis=2)
    np.testing.assert_allclose(project_heads(x, w, b), expected, atol=1e-5)
    heads, w_o, b_o = normal(3, 2, 5, 3, 4), normal(4, 3, 4, 7), normal(5, 7)
    np.testing.assert_allclose(
        merge_heads(heads, w_o, b_o), heads.reshape(2, 5, 12) @ w_o.reshape(12, 7) + b_o, atol=1e-5
    )


def test_feed_forward_is_equation_2():
    x, w_1, b_1, w_2, b_2 = (normal(i, *s) for i, s in enumerate([(2, 3, 4), (4, 6), (6,), (6, 4), (4,)]))
    expected = reference.feed_forward({"w_1": w_1, "b_1": b_1, "w_2": w_2, "b_2": b_2}, np.asarray(x))
    np.testing.assert_allclose(feed_forward(x, w_1, b_1, w_2, b_2), expected, atol=1e-5)


def test_a_query_that_sees_nothing_gives_zeros_and_zero_gradients():
    """M1: neither the output of such a row nor the gradient through it is NaN."""
    q, k, v = queries_keys_values()
    mask = jnp.ones((2, 1, 5, 6), bool).at[0, 0, 1].set(False).at[1].set(False)

    def loss(q, k, v):
        out = attend(q, k, v, mask)
        return (out * normal(3, 2, 5, 3, 2)).sum(), out

    gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    assert all(np.isfinite(x).all() for x in (out, *gradients))
    assert not np.any(out[0, 1])
    assert not np.any(out[1])
    assert not np.any(gradients[0][0, 1])
    for gradient in gradients:
        assert not np.any(gradient[1]), "sentence 1 sees nothing at all"
        assert np.any(gradient[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_on_masked_keys_are_exactly_zero(dtype):
    """M2, N1: whatever the masked keys hold, and however large it is."""
    q, k, _ = queries_keys_values()
    mask = padding_mask(jnp.array([[5, 5, 5, 5, 0, 0], [5, 5, 0, 0, 0, 0]])) & causal_mask(6)[:, :, :5]
    k = jnp.where(mask.any(axis=(1, 2))[:, :, None, None], k, 1e30)
    weights = attention_weights(q.astype(dtype), k.astype(dtype), mask)
    assert weights.dtype == jnp.float32
    assert not np.any(weights[~np.broadcast_to(mask, weights.shape)])
    np.testing.assert_allclose(weights.sum(axis=-1), 1.0, atol=1e-6)


def test_softmax_does_not_overflow():
    q, k, v = queries_keys_values()
    mask = jnp.ones((1, 1, 5, 6), bool)
    out = attend(q * 1e4, k * 1e4, v, mask)
    best = jnp.einsum("BTHK,BSHK->BHTS", q, k).argmax(axis=-1)
    np.testing.assert_allclose(attention_weights(q * 1e4, k * 1e4, mask).argmax(axis=-1), best)
    assert np.isfinite(out).all()


# Masks


def test_masks_are_literally_these():
    np.testing.assert_array_equal(causal_mask(3)[0, 0], [[1, 0, 0], [1, 1, 0], [1, 1, 1]])
    assert isinstance(causal_mask(3), np.ndarray), "a constant of the program"
    np.testing.assert_array_equal(padding_mask(jnp.array([[7, 1, 0]]))[0, 0], [[1, 1, 0]])
    mask = segment_mask(jnp.array([[1, 2, 2, 0]]), jnp.array([[1, 1, 2, 0, 0]]))
    np.testing.assert_array_equal(mask[0, 0], [[1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]])


# Loss


def plain_loss(logits, labels, epsilon):
    """The formula as one would write it down, differentiable by JAX."""
    pieces = logits.shape[-1]
    q = (1 - epsilon) * jax.nn.one_hot(labels, pieces) + epsilon / pieces
    return -(q * jax.nn.log_softmax(logits)).sum(axis=-1)


def test_smoothed_loss_has_the_documented_value():
    """L2: eps / W on every piece gives 0.72444; eps / (W - 1) would give 0.76194."""
    logits = jnp.array([2.0, 1.0, 0.0, -1.0, 0.5])
    label = jnp.array(0)
    assert float(smoothed_cross_entropy(logits, label, 0.1)) == pytest.approx(0.72444, abs=5e-6)
    assert reference.smoothed_loss(logits, 0, 0.1) == pytest.approx(0.72444, abs=5e-6)


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.5])
def test_loss_and_its_own_gradient_equal_autodiff_and_optax(epsilon):
    logits, labels = normal(0, 3, 4, 11) * 3, jnp.asarray(np.random.default_rng(1).integers(0, 11, (3, 4)))
    cotangent = normal(2, 3, 4)
    smooth = optax.smooth_labels(jax.nn.one_hot(labels, 11), epsilon)
    results = [
        jax.jit(jax.value_and_grad(lambda x, loss=loss: (loss(x) * cotangent).sum()))(logits)
        for loss in (
            lambda x: smoothed_cross_entropy(x, labels, epsilon),
            lambda x: plain_loss(x, labels, epsilon),
            lambda x: optax.softmax_cross_entropy(x, smooth),
        )
    ]
    for value, gradient in results[1:]:
        np.testing.assert_allclose(results[0][0], value, rtol=1e-5)
        np.testing.assert_allclose(results[0][1], gradient, atol=1e-6)
    losses = smoothed_cross_entropy(logits, labels, epsilon)
    for b, t in np.ndindex(3, 4):
        expected = reference.smoothed_loss(logits[b, t], int(labels[b, t]), epsilon)
        assert float(losses[b, t]) == pytest.approx(expected, rel=1e-5)


def test_loss_of_bfloat16_logits_is_computed_in_float32():
    """Logits that bfloat16 holds exactly lose nothing; the gradient comes back in their dtype."""
    logits = jnp.round(normal(0, 3, 50) * 4)
    labels = jnp.array([0, 7, 49])
    wide = smoothed_cross_entropy(logits, labels, 0.1)
    narrow = smoothed_cross_entropy(logits.astype(jnp.bfloat16), labels, 0.1)
    assert narrow.dtype == jnp.float32
    np.testing.assert_allclose(narrow, wide, rtol=1e-6)
    gradient = jax.jit(jax.grad(lambda x: smoothed_cross_entropy(x, labels, 0.1).sum()))(logits.astype(jnp.bfloat16))
    assert gradient.dtype == jnp.bfloat16


def test_loss_of_huge_logits_is_finite():
    logits = jnp.array([[1e4, -1e4, 0.0]])
    loss = jax.jit(jax.value_and_grad(lambda x: smoothed_cross_entropy(x, jnp.array([1]), 0.1).sum()))
    value, gradient = loss(logits)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("width", [5, 8, 64])
def test_padding_has_no_part_in_the_loss(width):
    """L1: 3 and 5 target pieces, eps 0.1; the same loss for every width, and no gradient where the label is PAD."""
    real = np.random.default_rng(0).normal(size=(2, 5, 7)).astype(np.float32)
    logits = np.random.default_rng(1).normal(size=(2, width, 7)).astype(np.float32) * 10
    logits[:, :5] = real
    labels = np.zeros((2, width), np.int32)
    labels[0, :3], labels[1, :5] = [4, 5, 1], [6, 4, 4, 5, 1]
    logits[0, 3:] = 50.0

    def loss(logits):
        sums = loss_sums(logits, jnp.asarray(labels), jnp.asarray(labels != 0, jnp.float32), 0.1)
        return sums["loss"] / sums["tokens"], sums

    (value, sums), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(jnp.asarray(logits))
    places = [(b, t) for b, t in np.ndindex(2, 5) if labels[b, t]]
    expected = sum(reference.smoothed_loss(real[b, t], labels[b, t], 0.1) for b, t in places) / 8
    assert float(value) == pytest.approx(expected, abs=1e-6)
    nll = sum(reference.smoothed_loss(real[b, t], labels[b, t], 0.0) for b, t in places)
    assert float(sums["nll"]) == pytest.approx(nll, rel=1e-5)
    assert float(sums["tokens"]) == 8
    assert not np.any(gradient[labels == 0])
    assert np.all(np.any(gradient[labels != 0], axis=-1))


def test_nll_carries_no_gradient():
    """It is a figure to print: the loss alone trains."""
    logits, labels = normal(0, 2, 3, 7), jnp.array([[1, 2, 3], [4, 5, 6]])
    gradient = jax.jit(jax.grad(lambda logits: loss_sums(logits, labels, jnp.ones((2, 3)), 0.1)["nll"]))(logits)
    assert not np.any(gradient)


# Schedule


def rates(counts, **fields):
    rate = learning_rate_schedule(OptimizerConfig(**fields), 512, 100_000)
    return [float(rate(jnp.asarray(count))) for count in counts]


def test_learning_rate_is_equation_3():
    """S1: count 0 is step 1, whose rate is not 0; the peak is at step 4000."""
    steps = [1, 2, 3, 3999, 4000, 4001, 100_000]
    expected = [512**-0.5 * min(step**-0.5, step * 4000**-1.5) for step in steps]
    got = rates([step - 1 for step in steps])
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert got[0] == pytest.approx(1.74693e-7, rel=1e-5)
    assert got[4] == pytest.approx(6.98771e-4, rel=1e-5)
    assert max(got) == got[4]
    big = learning_rate_schedule(OptimizerConfig(), 1024, 300_000)
    assert float(big(jnp.asarray(3999))) == pytest.approx(4.94106e-4, rel=1e-5)


@pytest.mark.parametrize("warmup", [0, 1])
def test_without_warmup_the_first_update_has_the_peak(warmup):
    """S1: no division by zero."""
    got = rates([0, 1, 3], warmup_steps=warmup)
    np.testing.assert_allclose(got, [512**-0.5, 512**-0.5 * 2**-0.5, 512**-0.5 / 2], rtol=1e-5)


def test_a_given_peak_and_factor_are_used():
    assert rates([3999], learning_rate_factor=2.0) == pytest.approx([2 * 6.98771e-4], rel=1e-5)
    assert rates([9, 39], learning_rate=0.5, warmup_steps=10) == pytest.approx([0.5, 0.25], rel=1e-5)


def test_linear_decay_ends_at_the_last_step():
    """Positive at the last update (count 99,999), zero after it, never negative."""
    got = rates([4999, 52_499, 99_999, 100_000, 200_000], learning_rate=1.0, warmup_steps=5000, decay="linear")
    assert got == pytest.approx([1.0, 0.5, 0.0, 0.0, 0.0], abs=1e-4)
    assert got[2] > 0
    assert got[3] == got[4] == 0.0


# Positions


def test_sinusoids_are_the_papers():
    table = sinusoids(64, 16)
    assert table.dtype == np.float32
    np.testing.assert_allclose(table, reference.positions(64, 16), atol=1e-6)
    np.testing.assert_array_equal(table[0], [0, 1] * 8)
    np.testing.assert_allclose(table[1, :2], [0.8414710, 0.5403023], atol=1e-6)
    # Position 10, dimensions 4 and 5: 10 / 10000^(4/16) = 1.
    np.testing.assert_allclose(table[10, 4:6], [0.8414710, 0.5403023], atol=1e-6)


def test_concatenated_sinusoids_are_tensor2tensors():
    table = sinusoids(64, 16, "concatenated")
    np.testing.assert_allclose(table, reference.positions(64, 16, "concatenated"), atol=1e-6)
    np.testing.assert_array_equal(table[0], [0] * 8 + [1] * 8)
    assert table[1, 7] == pytest.approx(math.sin(1e-4), rel=1e-5)


def test_sinusoids_of_far_positions_keep_their_digits():
    """P2: there is no last position; the angle is computed in float64."""
    np.testing.assert_allclose(sinusoids(5001, 8)[5000], reference.positions(5001, 8)[5000], atol=1e-6)


def test_an_odd_width_is_refused_in_words():
    """P1."""
    with pytest.raises(UserError, match="even"):
        ModelConfig(d_model=7, num_heads=1)
    with pytest.raises(UserError, match="divisible"):
        ModelConfig(d_model=6, num_heads=4)
    assert ModelConfig(d_model=7, num_heads=1, positions="learned").key_size == 7


# Normalisation


def test_layer_norm_is_the_formula():
    x, scale, bias = normal(0, 2, 3, 8) * 3 + 1, normal(1, 8), normal(2, 8)
    got = layer_norm(x, scale, bias, 1e-2)
    for b in range(2):
        expected = reference.layer_norm({"scale": scale, "bias": bias}, np.asarray(x[b], np.float64), 1e-2)
        np.testing.assert_allclose(got[b], expected, atol=1e-5)


def test_layer_norm_keeps_its_digits_beside_a_large_mean():
    """The variance is that of centred values: mean of squares minus square of mean would be 0 or negative here."""
    x = normal(0, 1, 1, 64)
    ones, zeros = jnp.ones(64), jnp.zeros(64)
    np.testing.assert_allclose(layer_norm(x + 1e4, ones, zeros, 1e-6), layer_norm(x, ones, zeros, 1e-6), atol=5e-3)


def test_layer_norm_of_bfloat16_has_float32_statistics():
    x = (normal(0, 1, 2, 64) + 100.0).astype(jnp.bfloat16)
    ones, zeros = jnp.ones(64), jnp.zeros(64)
    got = layer_norm(x, ones, zeros, 1e-6)
    assert got.dtype == jnp.bfloat16
    expected = layer_norm(x.astype(jnp.float32), ones, zeros, 1e-6).astype(jnp.bfloat16)
    np.testing.assert_array_equal(got, expected)


def test_layer_norm_of_equal_values_is_the_bias():
    """Variance 0: epsilon keeps the row finite."""
    out = layer_norm(jnp.full((1, 1, 4), 3.0), jnp.ones(4), jnp.arange(4.0), 1e-6)
    np.testing.assert_array_equal(out[0, 0], [0.0, 1.0, 2.0, 3.0])
