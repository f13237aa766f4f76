"""The state that training carries from update to update: all there is, and all that a checkpoint holds of arrays."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int

from transformer_jax.config import ModelConfig, OptimizerConfig
from transformer_jax.model.transformer import Transformer
from transformer_jax.ops.schedule import learning_rate_schedule

Params = dict[str, Any]


class TrainState(NamedTuple):
    """Random numbers are no part of it: a step's are fold_in(seed, step)."""

    step: Int[Array, ""]
    """Batches worked through so far; the learning rate goes by it, skipped updates counted."""
    params: Params
    optimizer_state: Any
    skipped: Int[Array, ""]
    """Updates that were not made, as their loss or gradient was not finite."""
    skipped_in_row: Int[Array, ""]
    """Those of them since the last that was made."""


class Averaged(NamedTuple):
    """The optimizer's state where `optimizer.ema_decay` is given."""

    optimizer_state: Any
    average: Params
    """The exponential moving average of the parameters."""


def make_optimizer(config: OptimizerConfig, d_model: int, steps: int) -> optax.GradientTransformationExtraArgs:
    """Adam with the schedule of section 5.3, after clipping and before the moving average where these are asked for.

    `update` takes `step`, the number of batches before this one, which the schedule goes by.
    """
    clip = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
    adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon)
    optimizer = optax.chain(clip, adam, _scale_by_rate(config, d_model, steps))
    return optimizer if config.ema_decay is None else _with_average(optimizer, config.ema_decay)


def _scale_by_rate(config: OptimizerConfig, d_model: int, steps: int) -> optax.GradientTransformationExtraArgs:
    # optax's own counts the updates it sees, which a skipped one is not among.
    schedule = learning_rate_schedule(config, d_model, steps)

    def update(updates: Any, state: Any, params: Any = None, *, step: Int[Array, ""], **_: Any) -> tuple[Any, Any]:
        return optax.tree.scale(-schedule(step), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _with_average(
    optimizer: optax.GradientTransformationExtraArgs, decay: float
) -> optax.GradientTransformationExtraArgs:
    """Keeps average <- d * average + (1 - d) * params after each update, d = min(decay, (1 + step) / (10 + step)).

    The smaller decays at the beginning, TensorFlow's, forget the random start: after n updates 1 / C(n + 9, 9) of it is
    left, 1e-5 at n = 10, where a constant decay keeps decay^n. Adam's way, a division by 1 - decay^n, would keep two
    trees apart: the sum, and what is scored.
    """

    def update(
        updates: Any, state: Averaged, params: Any = None, *, step: Int[Array, ""], **_: Any
    ) -> tuple[Any, Averaged]:
        updates, inner = optimizer.update(updates, state.optimizer_state, params, step=step)
        count = step.astype(jnp.float32)
        keep = jnp.minimum(decay, (1.0 + count) / (10.0 + count))
        moved = jax.tree.map(
            lambda old, param, change: keep * old + (1.0 - keep) * (param + change), state.average, params, updates
        )
        return updates, Averaged(inner, moved)

    # A copy, as the state's buffers are donated, each once.
    return optax.GradientTransformationExtraArgs(
        lambda params: Averaged(optimizer.init(params), jax.tree.map(jnp.copy, params)), update
    )


def evaluated_params(state: TrainState) -> Params:
    """The parameters that are validated, scored and translated with: the moving average where there is one."""
    return state.optimizer_state.average if isinstance(state.optimizer_state, Averaged) else state.params


def to_checkpoint(state: TrainState) -> dict[str, Any]:
    """The state as a checkpoint holds it: `params` are `evaluated_params`, so that translation needs nothing else.

    With a moving average those that are trained are beside them, as `trained_params`.
    """
    tree = state._asdict()
    if isinstance(state.optimizer_state, Averaged):
        tree |= state.optimizer_state._asdict()
        tree |= {"trained_params": state.params, "params": tree.pop("average")}
    return tree


def from_checkpoint(tree: Mapping[str, Any]) -> TrainState:
    """The state that `to_checkpoint` was given."""
    fields = dict(tree)
    if "trained_params" in fields:
        fields["optimizer_state"] = Averaged(fields["optimizer_state"], fields["params"])
        fields["params"] = fields.pop("trained_params")
    return TrainState(**fields)


def init_params(config: ModelConfig, seed: int) -> Params:
    """Fresh parameters; they depend on the seed alone."""
    tokens = jnp.ones((1, 2), jnp.int32)
    params: Params = Transformer(config).init(jax.random.key(seed), tokens, tokens)["params"]
    return params


def init_state(config: ModelConfig, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """The state before the first update."""
    params = init_params(config, seed)
    # Three zeros, as the state's buffers are donated, each once.
    step, skipped, skipped_in_row = (jnp.zeros((), jnp.int32) for _ in range(3))
    return TrainState(step, params, optimizer.init(params), skipped, skipped_in_row)


def all_finite(params: Any) -> Bool[Array, ""]:
    """Whether every parameter is a finite number: the last look before a checkpoint."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]).all()
