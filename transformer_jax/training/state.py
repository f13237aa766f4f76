"""The state that training carries from update to update: all there is, and all that a checkpoint holds of arrays."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int

from transformer_jax.config import ModelConfig, OptimizerConfig
from transformer_jax.model.transformer import Transformer
from transformer_jax.ops.schedule import learning_rate_schedule


class TrainState(NamedTuple):
    """Random numbers are no part of it: a step's are fold_in(seed, step)."""

    step: Int[Array, ""]
    """Updates made so far."""
    params: dict[str, Any]
    optimizer_state: Any


def make_optimizer(config: OptimizerConfig, d_model: int, steps: int) -> optax.GradientTransformation:
    """Adam with the schedule of section 5.3."""
    return optax.chain(
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon),
        optax.scale_by_learning_rate(learning_rate_schedule(config, d_model, steps)),
    )


def init_params(config: ModelConfig, seed: int) -> dict[str, Any]:
    """Fresh parameters; they depend on the seed alone."""
    tokens = jnp.ones((1, 2), jnp.int32)
    params: dict[str, Any] = Transformer(config).init(jax.random.key(seed), tokens, tokens)["params"]
    return params


def init_state(config: ModelConfig, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """The state before the first update."""
    params = init_params(config, seed)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def all_finite(params: dict[str, Any]) -> Bool[Array, ""]:
    """Whether every parameter is a finite number: the last look before a checkpoint."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]).all()
