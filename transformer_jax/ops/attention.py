"""Scaled dot-product and multi-head attention (section 3.2) as einsums.

The alphabet of the whole package: in einsum strings, in annotations and in the table of shardings a capital letter is
one dimension.

    B batch   T target or query positions   S source or key positions   R rows: positions of all sentences, B * T
    D d_model   H heads   K d_k   V d_v   E all heads, H * K or H * V   F d_ff   W vocabulary (word pieces)
    N layers   M beams   P learned positions
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from transformer_jax.ops.dropout import dropout


def project_heads(x: Float[Array, "B T D"], w: Float[Array, "D H K"], b: Float[Array, "H K"] | None) -> Array:
    """x W_i for all heads at once, [B T D] -> [B T H K].

    One product of rows with a matrix. With batch and length kept apart XLA lays out the weight's gradient so that a
    train step on a CPU takes 1.3 times as long; with heads kept apart it copies every gradient into another order,
    which costs up to a tenth of the step at d_model 512.
    """
    batch, length, d_model = x.shape
    rows = x.reshape(batch * length, d_model)
    heads = jnp.einsum("RD,DE->RE", rows, w.reshape(d_model, -1))
    if b is not None:
        heads = heads + b.reshape(-1)
    return heads.reshape(batch, length, *w.shape[1:])


def merge_heads(x: Float[Array, "B T H V"], w: Float[Array, "H V D"], b: Float[Array, "D"] | None) -> Array:
    """Concat(head_1, ..., head_h) W_o, [B T H V] -> [B T D]."""
    batch, length, heads, d_v = x.shape
    rows = x.reshape(batch * length, heads * d_v)
    out = jnp.einsum("RE,ED->RD", rows, w.reshape(heads * d_v, -1))
    if b is not None:
        out = out + b
    return out.reshape(batch, length, -1)


def attention_weights(
    q: Float[Array, "B T H K"], k: Float[Array, "B S H K"], mask: Bool[Array, "#B #H #T S"] | None
) -> Float[Array, "B H T S"]:
    """softmax(Q K^T / sqrt(d_k)) in float32 (equation 1); a query that may see no key gets weights of zero.

    The mask is True where a query may look. Masked weights are exactly zero in every dtype, also in rows that are all
    masked, and their gradients are finite.
    """
    logits = jnp.einsum("BTHK,BSHK->BHTS", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    return masked_softmax(logits, mask)


def masked_softmax(logits: Float[Array, "B H T S"], mask: Bool[Array, "#B #H #T S"] | None) -> Float[Array, "B H T S"]:
    """softmax over the keys that the mask shows; zeros, with zero gradients, where it shows none."""
    if mask is None:
        return jax.nn.softmax(logits, axis=-1)
    # The row maximum carries no gradient (it cancels). Where nothing is visible the sum of
    # no exponentials, 0, becomes 1, so that the row is zeros, with zero gradients.
    highest = jax.lax.stop_gradient(
        jnp.max(logits, axis=-1, keepdims=True, where=mask, initial=jnp.finfo(jnp.float32).min)
    )
    exponentials = jnp.where(mask, jnp.exp(jnp.where(mask, logits - highest, 0.0)), 0.0)
    total = exponentials.sum(axis=-1, keepdims=True)
    return exponentials / jnp.where(total == 0.0, 1.0, total)


def attend(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H V"],
    mask: Bool[Array, "#B #H #T S"] | None,
    *,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
) -> Float[Array, "B T H V"]:
    """Attention(Q, K, V), equation 1, for every head; computes in the dtype of v, the softmax in float32."""
    with jax.named_scope("attention_weights"):
        weights = attention_weights(q, k, mask)
        if dropout_key is not None:
            weights = dropout(weights, dropout_rate, dropout_key)
    with jax.named_scope("weighted_values"):
        return jnp.einsum("BHTS,BSHV->BTHV", weights.astype(v.dtype), v)


def attend_cached(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B H K S"],
    v: Float[Array, "B H V S"],
    mask: Bool[Array, "#B #H #T S"] | None,
) -> Float[Array, "B T H V"]:
    """`attend` for keys and values that many steps read: positions last, the order in which the products take them.

    In the order of writing, [B S H K], a CPU copies all of both into this one at every step, a third of its time.
    """
    with jax.named_scope("attention_weights"):
        logits = jnp.einsum("BTHK,BHKS->BHTS", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
        weights = masked_softmax(logits, mask)
    with jax.named_scope("weighted_values"):
        return jnp.einsum("BHTS,BHVS->BTHV", weights.astype(v.dtype), v)


def fused_attend(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H K"],
    mask: Bool[Array, "#B #H #T S"] | None,
) -> Float[Array, "B T H K"]:
    """What `attend` computes, by `jax.nn.dot_product_attention`; d_v is d_k, and there is no dropout.

    On a GPU that is cuDNN's flash attention, which never has the weights [B H T S] in memory, where cuDNN can do it: in
    bfloat16, with d_k a multiple of 8 up to 128 and T and S even (it differentiates no other lengths under a mask). In
    all other cases, and on CPU and TPU, it is einsums and a softmax that XLA compiles, as `attend` is: then only the
    logits differ, which are float32 from the product on.
    """
    length, keys, d_k = q.shape[1], k.shape[1], q.shape[-1]
    cudnn = q.dtype == jnp.bfloat16 and d_k % 8 == 0 and d_k <= 128 and length % 2 == 0 and keys % 2 == 0
    implementation: Literal["cudnn", "xla"] = "cudnn" if cudnn and jax.default_backend() == "gpu" else "xla"
    with jax.named_scope("fused_attention"):
        if mask is None:
            return jax.nn.dot_product_attention(q, k, v, implementation=implementation)
        whole = jnp.broadcast_to(mask, (*mask.shape[:2], length, keys))  # cuDNN wants T and S written out
        heads = jax.nn.dot_product_attention(q, k, v, mask=whole, implementation=implementation)
        # A row that sees nothing comes out as the mean of all values.
        return jnp.where(mask.any(axis=-1).swapaxes(1, 2)[..., None], heads, jnp.zeros((), heads.dtype))
