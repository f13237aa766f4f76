"""The learning rate (section 5.3, equation 3)."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer_jax.config import OptimizerConfig


def learning_rate_schedule(
    config: OptimizerConfig, d_model: int, steps: int
) -> Callable[[Int[Array, ""]], Float[Array, ""]]:
    """Rate of an update as a function of the updates made before it (optax's count): count 0 is the paper's step 1.

    factor * d_model^-0.5 * min(step^-0.5, step * warmup^-1.5); with decay "linear" the second branch falls to 0 at
    `steps`. Never 0 at the first update; warmup_steps 0 and 1 both put the peak there.
    """
    warmup = max(config.warmup_steps, 1)
    peak = config.learning_rate
    if peak is None:
        peak = config.learning_rate_factor * d_model**-0.5 * warmup**-0.5

    def rate(count: Int[Array, ""]) -> Float[Array, ""]:
        step = jnp.asarray(count, jnp.float32) + 1.0
        if config.decay == "inverse_sqrt":
            after = jnp.sqrt(warmup / step)
        else:
            after = jnp.maximum((steps + 1.0 - step) / max(steps + 1.0 - warmup, 1.0), 0.0)
        return peak * jnp.minimum(step / warmup, after)

    return rate
