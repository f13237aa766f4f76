"""The recurrent layer of Table 1: a GRU (Cho et al., 2014) as a scan over positions."""

import jax
import jax.numpy as jnp


def gru_step(state: jax.Array, inputs: jax.Array, w_h: jax.Array, b_h: jax.Array) -> jax.Array:
    """The state [B H] after one position, whose `inputs` [B 3H] are x W_x + b_x for the gates r, z and n."""
    x_r, x_z, x_n = jnp.split(inputs, 3, axis=-1)
    h_r, h_z, h_n = jnp.split(state @ w_h + b_h, 3, axis=-1)
    reset, keep = jax.nn.sigmoid(x_r + h_r), jax.nn.sigmoid(x_z + h_z)
    return (1.0 - keep) * jnp.tanh(x_n + reset * h_n) + keep * state


def gru(
    x: jax.Array,
    w_x: jax.Array,
    b_x: jax.Array,
    w_h: jax.Array,
    b_h: jax.Array,
    *,
    mask: jax.Array | None = None,
    reverse: bool = False,
) -> jax.Array:
    """States [B T H] at all positions of x [B T D], from a state of zeros; where `mask` [B T] is False it stays.

    The inputs' product is one for all positions, outside the scan, as in every library that is fast at it: what is left
    within is n products that wait for one another.
    """
    inputs = x @ w_x + b_x
    visible = jnp.ones(x.shape[:2], bool) if mask is None else mask

    def step(state: jax.Array, here: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        entering, real = here
        state = jnp.where(real[:, None], gru_step(state, entering, w_h, b_h), state)
        return state, state

    start = jnp.zeros((x.shape[0], w_h.shape[0]), x.dtype)
    _, states = jax.lax.scan(step, start, (inputs.swapaxes(0, 1), visible.T), reverse=reverse)
    return states.swapaxes(0, 1)
