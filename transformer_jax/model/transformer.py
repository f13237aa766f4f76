"""The Transformer (section 3, figure 1): two stacks of layers, one embedding."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.config import ModelConfig
from transformer_jax.model.layers import FeedForward, LayerNorm, MultiHeadAttention, Residual
from transformer_jax.ops.dropout import dropout
from transformer_jax.ops.masks import causal_mask, padding_mask, segment_mask
from transformer_jax.ops.positions import sinusoids
from transformer_jax.ops.sharding import constrain


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward."""

    config: ModelConfig

    def setup(self) -> None:
        """Declares the parts."""
        self.self_attention = MultiHeadAttention(self.config)
        self.feed_forward = FeedForward(self.config)
        self.residual_1 = Residual(self.config)
        self.residual_2 = Residual(self.config)

    def __call__(self, x: Float[Array, "B S D"], mask: Bool[Array, "..."], train: bool) -> tuple[Array, None]:
        """One layer; the second result is what a scan wants."""
        y = self.residual_1.before(x)
        x = self.residual_1.after(x, self.self_attention(y, y, mask, train=train), train=train)
        y = self.residual_2.before(x)
        return self.residual_2.after(x, self.feed_forward(y, train=train), train=train), None


class LayerCache(NamedTuple):
    """What a decoder layer remembers between steps: L positions of M beams of B sentences. The cache itself is never
    moved: which beam's keys belong to a hypothesis is said by the mask (see `model.cache`).
    """

    keys: Float[Array, "B H K LM"]
    values: Float[Array, "B H V LM"]


class DecoderLayer(nn.Module):
    """Masked self-attention, attention over the source, then feed-forward."""

    config: ModelConfig

    def setup(self) -> None:
        """Declares the parts: a full pass and a cached step use the same."""
        self.self_attention = MultiHeadAttention(self.config)
        self.cross_attention = MultiHeadAttention(self.config)
        self.feed_forward = FeedForward(self.config)
        self.residual_1 = Residual(self.config)
        self.residual_2 = Residual(self.config)
        self.residual_3 = Residual(self.config)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S D"],
        self_mask: Bool[Array, "..."],
        cross_mask: Bool[Array, "..."],
        train: bool,
    ) -> tuple[Array, None]:
        """One layer over all target positions at once; the second result is what a scan wants."""
        y = self.residual_1.before(x)
        x = self.residual_1.after(x, self.self_attention(y, y, self_mask, train=train), train=train)
        y = self.residual_2.before(x)
        x = self.residual_2.after(x, self.cross_attention(y, memory, cross_mask, train=train), train=train)
        y = self.residual_3.before(x)
        return self.residual_3.after(x, self.feed_forward(y, train=train), train=train), None

    def step(
        self,
        x: Float[Array, "B M D"],
        source_keys: Float[Array, "B H K S"],
        source_values: Float[Array, "B H V S"],
        cross_mask: Bool[Array, "..."],
        cache: LayerCache,
        self_mask: Bool[Array, "B 1 M LM"],
        position: Int[Array, ""],
    ) -> tuple[Float[Array, "B M D"], LayerCache]:
        """One layer at one target position of M hypotheses, which stand where a full pass has positions."""
        y = self.residual_1.before(x)
        keys, values = (_positions_last(new) for new in self.self_attention.keys_values(y))  # -> [B H K M]
        start = position * x.shape[1]
        keys = jax.lax.dynamic_update_slice_in_dim(cache.keys, keys, start, axis=3)
        values = jax.lax.dynamic_update_slice_in_dim(cache.values, values, start, axis=3)
        out = self.self_attention.attend_cached(y, keys, values, self_mask)
        x = self.residual_1.after(x, out, train=False)
        y = self.residual_2.before(x)
        out = self.cross_attention.attend_cached(y, source_keys, source_values, cross_mask)
        x = self.residual_2.after(x, out, train=False)
        y = self.residual_3.before(x)
        x = self.residual_3.after(x, self.feed_forward(y, train=False), train=False)
        return x, LayerCache(keys, values)

    def source_keys_values(self, memory: Float[Array, "B S D"]) -> tuple[Array, Array]:
        """Keys [B H K S] and values [B H V S] of the source, the same at every step."""
        keys, values = self.cross_attention.keys_values(memory)
        return _positions_last(keys), _positions_last(values)


def _positions_last(x: Float[Array, "B S H K"]) -> Float[Array, "B H K S"]:
    return x.transpose(0, 2, 3, 1)


def _stack(layer: type[nn.Module], config: ModelConfig, layers: int, inputs: int, name: str) -> Any:
    """`layers` copies of a layer, their parameters stacked on a leading axis N, applied one after the other.

    Unrolled layers have the same parameter tree; XLA then fuses across layers and compiles for longer.
    """
    if config.remat != "none":
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if config.remat == "dots" else None
        layer = nn.remat(layer, policy=policy, prevent_cse=not config.scan_layers, static_argnums=(inputs + 2,))
    scanned = nn.scan(
        layer,
        variable_axes={"params": 0, "intermediates": 0},  # the second is empty unless `apply` is to capture it
        split_rngs={"params": True, "dropout": True},
        in_axes=(nn.broadcast,) * (inputs + 1),
        length=layers,
        unroll=1 if config.scan_layers else layers,
    )
    return scanned(config, name=name)


class Transformer(nn.Module):
    """The encoder-decoder: `init` and `apply` are pure, parameters a plain nested dict of float32 arrays.

    The target that goes in is the decoder's input: BOS, then the pieces before each position.
    """

    config: ModelConfig

    def setup(self) -> None:
        """Declares embeddings, positions and stacks."""
        config = self.config
        shape = (config.embedding_rows, config.d_model)
        # An embedded piece, scaled by sqrt(d_model), has unit variance; before the softmax the matrix is used as it is.
        init = nn.initializers.normal(config.d_model**-0.5)
        names = (
            ("embedding",) if config.tied_embeddings else ("source_embedding", "target_embedding", "output_embedding")
        )
        matrices = [self.param(name, init, shape) for name in names]
        self.source_matrix, self.target_matrix, self.output_matrix = (
            matrices * 3 if config.tied_embeddings else matrices
        )
        if config.positions == "learned":
            positions = (config.max_positions, config.d_model)
            self.source_positions = self.param("source_positions", init, positions)
            self.target_positions = self.param("target_positions", init, positions)
        self.encoder = _stack(EncoderLayer, config, config.encoder_layers, 1, "encoder")
        self.decoder = _stack(DecoderLayer, config, config.decoder_layers, 3, "decoder")
        if config.norm == "pre":
            self.encoder_norm = LayerNorm(config)
            self.decoder_norm = LayerNorm(config)

    def __call__(
        self,
        source: Int[Array, "B S"],
        target: Int[Array, "B T"],
        *,
        train: bool = False,
        source_segments: Int[Array, "B S"] | None = None,
        target_segments: Int[Array, "B T"] | None = None,
        source_positions: Int[Array, "B S"] | None = None,
        target_positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T W"]:
        """Logits of the piece that follows each target position.

        Rows may hold several sentences: segments number them from 1 (0 is padding) and positions start again in each.
        """
        memory = self.encode(source, train=train, segments=source_segments, positions=source_positions)
        cross_mask = None
        if source_segments is not None and target_segments is not None:
            cross_mask = segment_mask(target_segments, source_segments)
        return self.decode(
            target,
            memory,
            padding_mask(source) if cross_mask is None else cross_mask,
            train=train,
            segments=target_segments,
            positions=target_positions,
        )

    def encode(
        self,
        source: Int[Array, "B S"],
        *,
        train: bool = False,
        segments: Int[Array, "B S"] | None = None,
        positions: Int[Array, "B S"] | None = None,
    ) -> Float[Array, "B S D"]:
        """The encoder's output, once for each sentence."""
        mask = padding_mask(source) if segments is None else segment_mask(segments, segments)
        table = self.source_positions if self.config.positions == "learned" else None
        x = self._embed(self.source_matrix, table, source, positions, source.shape[1], train=train)
        x, _ = self.encoder(x, mask, train)
        return self.encoder_norm(x) if self.config.norm == "pre" else x

    def decode(
        self,
        target: Int[Array, "B T"],
        memory: Float[Array, "B S D"],
        cross_mask: Bool[Array, "..."],
        *,
        train: bool = False,
        segments: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T W"]:
        """Logits at every target position in one pass."""
        visible = padding_mask(target) if segments is None else segment_mask(segments, segments)
        mask = visible & causal_mask(target.shape[1])
        x = self.embed_target(target, positions, train=train)
        x, _ = self.decoder(x, memory, mask, cross_mask, train)
        return self.logits(x)

    def embed_target(
        self,
        target: Int[Array, "B T"],
        positions: Int[Array, "..."] | None,
        *,
        length: int | None = None,
        train: bool = False,
    ) -> Float[Array, "B T D"]:
        """Scaled embedding + position, with dropout; positions are below `length`, which is T unless given."""
        table = self.target_positions if self.config.positions == "learned" else None
        return self._embed(self.target_matrix, table, target, positions, length or target.shape[1], train=train)

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T W"]:
        """The final norm of pre-norm models, then the product with the output embedding, in the compute dtype."""
        if self.config.norm == "pre":
            x = self.decoder_norm(x)
        batch, length, d_model = x.shape
        with jax.named_scope("logits"):
            matrix = self.output_matrix.astype(self.config.dtype)
            logits = jnp.einsum("RD,WD->RW", x.reshape(batch * length, d_model), matrix)
        return constrain(logits.reshape(batch, length, -1), "BTW")

    def _embed(
        self,
        matrix: Float[Array, "W D"],
        table: Float[Array, "P D"] | None,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "..."] | None,
        length: int,
        *,
        train: bool,
    ) -> Float[Array, "B T D"]:
        config = self.config
        if table is None:
            table = jnp.asarray(sinusoids(length, config.d_model, config.sinusoids))
        elif positions is None and length > table.shape[0]:
            raise ValueError(f"{length} positions, but model.max_positions is {table.shape[0]}")
        else:
            table = constrain(table, "PD")
        with jax.named_scope("embed"):
            # Looked up in whole rows: in a matrix that is cut along both axes XLA finds no good way.
            x = constrain(matrix, "WD")[tokens].astype(jnp.float32) * config.d_model**0.5
            x = x + (table[None, :length] if positions is None else table[positions])
            # What follows keeps to that; left to itself XLA cuts the stream along D under `fsdp`.
            x = constrain(x.astype(config.dtype), "BTD")
        if train and config.dropout:
            x = dropout(x, config.dropout, self.make_rng("dropout"))
        return x
