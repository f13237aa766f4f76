"""The position-wise feed-forward network (section 3.3)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_jax.ops.dropout import dropout


def feed_forward(
    x: Float[Array, "B T D"],
    w_1: Float[Array, "D F"],
    b_1: Float[Array, "F"],
    w_2: Float[Array, "F D"],
    b_2: Float[Array, "D"],
    *,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
) -> Float[Array, "B T D"]:
    """max(0, x W_1 + b_1) W_2 + b_2 (equation 2), over rows as in `ops.attention.project_heads`."""
    batch, length, d_model = x.shape
    hidden = jax.nn.relu(jnp.einsum("RD,DF->RF", x.reshape(batch * length, d_model), w_1) + b_1)
    if dropout_key is not None:
        # Its mask goes by rows of the batch, axis 0.
        hidden = dropout(hidden.reshape(batch, length, -1), dropout_rate, dropout_key).reshape(batch * length, -1)
    return (jnp.einsum("RF,FD->RD", hidden, w_2) + b_2).reshape(batch, length, d_model)
