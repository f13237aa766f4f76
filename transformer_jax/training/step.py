"""One update, and one batch of validation: the two programs that training runs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from transformer_jax.config import Config
from transformer_jax.data.batches import Batch
from transformer_jax.model.transformer import Transformer
from transformer_jax.ops.loss import loss_sums
from transformer_jax.ops.schedule import learning_rate_schedule
from transformer_jax.parallel.mesh import replicated, rows_sharding
from transformer_jax.training.state import TrainState

Metrics = dict[str, Float[Array, ""]]


def batch_sums(config: Config, params: Any, batch: Batch, dropout_key: Array | None) -> Metrics:
    """`ops.loss.loss_sums` of a batch; a key turns dropout on."""
    logits: Any = Transformer(config.model).apply(
        {"params": params},
        batch.source,
        batch.target,
        train=dropout_key is not None,
        source_segments=batch.source_segments,
        target_segments=batch.target_segments,
        source_positions=batch.source_positions,
        target_positions=batch.target_positions,
        rngs={} if dropout_key is None else {"dropout": dropout_key},
    )
    weights = (batch.target_segments != 0).astype(jnp.float32)
    return loss_sums(logits, jnp.asarray(batch.labels), weights, config.train.label_smoothing)


def make_train_step(
    config: Config, optimizer: optax.GradientTransformation, mesh: Mesh
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """A jitted (state, batch) -> (state, metrics); the state's buffers are reused for the new one.

    Metrics are scalars of this update: `loss` and `nll` for each target piece, `target_tokens`, `gradient_norm`,
    `learning_rate`.
    """
    schedule = learning_rate_schedule(config.optimizer, config.model.d_model, config.train.steps)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(config.train.seed), state.step)

        def loss(params: Any) -> tuple[Array, Metrics]:
            sums = batch_sums(config, params, batch, key)
            return sums["loss"] / jnp.maximum(sums["tokens"], 1.0), sums

        gradients, sums = jax.grad(loss, has_aux=True)(state.params)
        with jax.named_scope("adam"):
            updates, optimizer_state = optimizer.update(gradients, state.optimizer_state, state.params)
            params = optax.apply_updates(state.params, updates)
        tokens = jnp.maximum(sums["tokens"], 1.0)
        metrics = {
            "loss": sums["loss"] / tokens,
            "nll": sums["nll"] / tokens,
            "target_tokens": sums["tokens"],
            "gradient_norm": optax.tree.norm(gradients),
            "learning_rate": schedule(state.step),
        }
        return TrainState(state.step + 1, params, optimizer_state), metrics

    whole, rows = replicated(mesh), rows_sharding(mesh)
    return jax.jit(train_step, donate_argnums=0, in_shardings=(whole, rows), out_shardings=whole)


def make_loss_step(config: Config, mesh: Mesh) -> Callable[[Any, Batch], Metrics]:
    """A jitted (params, batch) -> sums over the batch, dropout off."""
    whole, rows = replicated(mesh), rows_sharding(mesh)
    return jax.jit(
        lambda params, batch: batch_sums(config, params, batch, None), in_shardings=(whole, rows), out_shardings=whole
    )
