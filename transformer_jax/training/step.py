"""One update, and one batch of validation: the two programs that training runs."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from transformer_jax.config import Config, ModelConfig
from transformer_jax.data.batches import Batch
from transformer_jax.model.transformer import Transformer
from transformer_jax.ops.dropout import part_of_batch
from transformer_jax.ops.loss import loss_sums
from transformer_jax.ops.schedule import learning_rate_schedule
from transformer_jax.parallel.mesh import on_mesh, replicated, rows_sharding, sum_over_data
from transformer_jax.parallel.rules import shardings
from transformer_jax.training.state import Params, TrainState, init_params, init_state

Metrics = dict[str, Float[Array, ""]]


def apply_model(config: ModelConfig, params: Any, batch: Batch, dropout_key: Array | None, **options: Any) -> Any:
    """Logits [B T W] of a batch, and what else flax's `options` ask for; a key turns dropout on."""
    return Transformer(config).apply(
        {"params": params},
        batch.source,
        batch.target,
        train=dropout_key is not None,
        source_segments=batch.source_segments,
        target_segments=batch.target_segments,
        source_positions=batch.source_positions,
        target_positions=batch.target_positions,
        rngs={} if dropout_key is None else {"dropout": dropout_key},
        **options,
    )


def batch_sums(config: Config, params: Any, batch: Batch, dropout_key: Array | None) -> Metrics:
    """`ops.loss.loss_sums` of a batch; a key turns dropout on."""
    logits = apply_model(config.model, params, batch, dropout_key)
    weights = (batch.target_segments != 0).astype(jnp.float32)
    return loss_sums(logits, jnp.asarray(batch.labels), weights, config.train.label_smoothing)


def gradient_sums(config: Config, params: Params, batch: Batch, dropout_key: Array) -> tuple[Params, Metrics]:
    """Gradients of the summed loss, float32 as the parameters are, and `batch_sums`; divide both by `tokens`.

    With train.accumulate (a divisor of the rows) the parts of the batch are worked through one after the other, which
    takes a part's memory for activations and one more set of gradients. The sums, and so the update, are those of the
    whole batch up to rounding, dropout included: part p has rows p, p + parts, p + 2 parts, ..., each with the mask
    that it has in the whole.
    """

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        sums = batch_sums(config, params, batch, dropout_key)
        return sums["loss"], sums

    gradients = jax.grad(loss, has_aux=True)
    parts = config.train.accumulate
    if parts == 1:
        return gradients(params, batch)
    # Every parts-th row, as rows that follow one another lie on one device and would all have to move.
    split = jax.tree.map(lambda x: jnp.asarray(x).reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)

    def add(total: Any, numbered: tuple[Array, Batch]) -> tuple[Any, None]:
        part, rows = numbered
        with part_of_batch(part, parts):
            return jax.tree.map(jnp.add, total, gradients(params, rows)), None

    shapes = jax.eval_shape(gradients, params, jax.tree.map(lambda x: x[0], split))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return jax.lax.scan(add, zeros, (jnp.arange(parts), split))[0]


def dropout_key_of(seed: int, step: Array | int) -> Array:
    """The key of the update after `step` batches: all that chance has to do with it."""
    return jax.random.fold_in(jax.random.key(seed), step)


def make_train_step(
    config: Config, optimizer: optax.GradientTransformationExtraArgs, mesh: Mesh
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """A jitted (state, batch) -> (state, metrics); the state's buffers are reused for the new one.

    An update whose loss or gradient is not finite is skipped: all of the state stays but `step` and the counts of
    skipped updates. After train.skip_limit in a row no further update is made, whatever its numbers: the host, which
    looks at an update when the next is under way, then finds the parameters that it failed with.

    Metrics are scalars of this update: `loss` and `nll` for each target piece, `target_tokens`, `learning_rate`, the
    global norms `gradient_norm` (before clipping), `update_norm` and `param_norm`, and `skipped` and `skipped_in_row`
    as the new state has them.
    """
    schedule = learning_rate_schedule(config.optimizer, config.model.d_model, config.train.steps)
    shapes = jax.eval_shape(lambda: init_state(config.model, optimizer, 0))
    placed = shardings(shapes, mesh, over_data=config.mesh.shard_weight_update)
    summed = sum_over_data(
        lambda whole, batch: gradient_sums(config, whole[0], batch, whole[1]), mesh, (placed.params, replicated(mesh))
    )

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        params = state.params
        if config.mesh.shard_weight_update:
            params = _gathered(params, shardings(params, mesh), config.model)
        gradients, sums = summed((params, dropout_key_of(config.train.seed, state.step)), batch)
        if config.mesh.shard_weight_update:
            gradients = jax.lax.with_sharding_constraint(gradients, placed.params)
        tokens = jnp.maximum(sums["tokens"], 1.0)
        gradients = jax.tree.map(lambda gradient: gradient / tokens, gradients)
        loss, gradient_norm = sums["loss"] / tokens, optax.tree.norm(gradients)
        with jax.named_scope("adam"):
            updates, optimizer_state = optimizer.update(gradients, state.optimizer_state, state.params, step=state.step)
            params = optax.apply_updates(state.params, updates)
        finite = jnp.isfinite(loss) & jnp.isfinite(gradient_norm)
        state, made = _keep_if(finite, state, params, optimizer_state, config.train.skip_limit)
        metrics = {
            "loss": loss,
            "nll": sums["nll"] / tokens,
            "target_tokens": sums["tokens"],
            "gradient_norm": gradient_norm,
            "update_norm": jnp.where(made, optax.tree.norm(updates), 0.0),
            "param_norm": optax.tree.norm(state.params),
            "learning_rate": schedule(state.step - 1),
            "skipped": state.skipped,
            "skipped_in_row": state.skipped_in_row,
        }
        return state, metrics

    return jax.jit(
        on_mesh(train_step, mesh),
        donate_argnums=0,
        in_shardings=(placed, rows_sharding(mesh)),
        out_shardings=(placed, replicated(mesh)),
    )


def _gathered(params: Params, laid: Any, config: ModelConfig) -> Params:
    """Parameters without the axis `data`. The model takes a matrix w_... in its compute dtype: it is sent in it."""

    def gather(path: tuple[Any, ...], part: Array, sharding: Any) -> Array:
        sent = part.astype(config.dtype) if path[-1].key.startswith("w_") else part
        return jax.lax.with_sharding_constraint(sent, sharding).astype(part.dtype)

    return cast(Params, jax.tree_util.tree_map_with_path(gather, params, laid))


def _keep_if(
    finite: Array, state: TrainState, params: Params, optimizer_state: Any, limit: int
) -> tuple[TrainState, Array]:
    """The state with the update or without, and whether it was made."""
    # A run stopped here may go on with another limit, hence not >=.
    stopped = state.skipped_in_row == limit
    made = finite & ~stopped
    new, old = (params, optimizer_state), (state.params, state.optimizer_state)
    # A select, which XLA fuses into the update; a branch would copy the whole state.
    params, optimizer_state = jax.tree.map(lambda x, y: jnp.where(made, x, y), new, old)
    in_row = jnp.where(stopped, limit, jnp.where(finite, 0, state.skipped_in_row + 1))
    return TrainState(state.step + 1, params, optimizer_state, state.skipped + ~made, in_row), made


def make_loss_step(config: Config, mesh: Mesh) -> Callable[[Any, Batch], Metrics]:
    """A jitted (params, batch) -> sums over the batch, dropout off."""
    placed = shardings(jax.eval_shape(lambda: init_params(config.model, 0)), mesh)
    return jax.jit(
        on_mesh(lambda params, batch: batch_sums(config, params, batch, None), mesh),
        in_shardings=(placed, rows_sharding(mesh)),
        out_shardings=replicated(mesh),
    )
