"""Cross-entropy with label smoothing (section 5.4) in closed form: no one-hot, sums and counts."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def smoothed_cross_entropy(
    logits: Float[Array, "*R W"], labels: Int[Array, "*R"], label_smoothing: float
) -> Float[Array, "*R"]:
    """-sum_w q(w) log p(w) at each position, q = (1 - eps) on the label + eps / W on every piece, the label among them.

    This is optax's convention; tensor2tensor shares eps over the W - 1 others and subtracts the entropy of q. Its own
    gradient, p - q, is one fused pass over the logits: the transpose of the label's gather would be a scatter into an
    array of the logits' size.
    """
    return _forward(logits, labels, label_smoothing)[0]


def _forward(
    logits: Float[Array, "*R W"], labels: Int[Array, "*R"], label_smoothing: float
) -> tuple[Array, tuple[Array, Array, Array]]:
    wide = logits.astype(jnp.float32)
    log_z = jax.nn.logsumexp(wide, axis=-1)
    label_logit = jnp.take_along_axis(wide, labels[..., None], axis=-1)[..., 0]
    loss = log_z - (1.0 - label_smoothing) * label_logit
    if label_smoothing:
        loss = loss - label_smoothing * wide.mean(axis=-1)
    return loss, (logits, labels, log_z)


def _backward(
    label_smoothing: float, residuals: tuple[Array, Array, Array], cotangent: Float[Array, "*R"]
) -> tuple[Array, None]:
    logits, labels, log_z = residuals
    pieces = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    target = jnp.where(pieces == labels[..., None], 1.0 - label_smoothing, 0.0) + label_smoothing / logits.shape[-1]
    probabilities = jnp.exp(logits.astype(jnp.float32) - log_z[..., None])
    return ((probabilities - target) * cotangent[..., None]).astype(logits.dtype), None


smoothed_cross_entropy.defvjp(_forward, _backward)


def loss_sums(
    logits: Float[Array, "*R W"], labels: Int[Array, "*R"], weights: Float[Array, "*R"], label_smoothing: float
) -> dict[str, Float[Array, ""]]:
    """Sums over real positions: `loss` (smoothed), `nll` (not smoothed, for perplexity), `tokens`.

    Divide by `tokens` last, whatever way a batch was split: parts then add up to the same number. Positions of weight 0
    have no part in any sum and a zero gradient.
    """
    with jax.named_scope("loss"):
        loss = smoothed_cross_entropy(logits, labels, label_smoothing)
        nll = smoothed_cross_entropy(jax.lax.stop_gradient(logits), labels, 0.0)
        return {"loss": (loss * weights).sum(), "nll": (nll * weights).sum(), "tokens": weights.sum()}
