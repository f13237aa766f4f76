"""Decoding one piece at a time: an explicit cache, an argument and a result.

Beam search keeps M hypotheses of a sentence that share beginnings. Their keys and values stay where they were written;
`ancestry[b, m, l]` says whose entry at position l belongs to hypothesis m. So a reordering of beams moves a table of
small integers and not the cache, and all M queries of a sentence meet its L * M keys in one matrix product.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.config import ModelConfig
from transformer_jax.model.transformer import DecoderLayer, LayerCache, Transformer
from transformer_jax.ops.masks import padding_mask

Params = dict[str, Any]


class SourceCache(NamedTuple):
    """What does not change while a sentence is decoded: keys and values of the source for each decoder layer."""

    keys: tuple[Float[Array, "B H K S"], ...]
    values: tuple[Float[Array, "B H V S"], ...]
    mask: Bool[Array, "B 1 1 S"]


class DecodeCache(NamedTuple):
    """What a step changes."""

    layers: tuple[LayerCache, ...]
    ancestry: Int[Array, "B M L"]
    position: Int[Array, ""]


def decoder_layers(config: ModelConfig, params: Params) -> list[Params]:
    """Parameters of each decoder layer: sliced once, outside the loop over positions."""
    return [jax.tree.map(lambda leaf, i=i: leaf[i], params["decoder"]) for i in range(config.decoder_layers)]


def encode_source(config: ModelConfig, params: Params, source: Int[Array, "B S"]) -> SourceCache:
    """Runs the encoder and projects its output to every decoder layer's keys and values."""
    memory: Any = Transformer(config).apply({"params": params}, source, method="encode")
    layer = DecoderLayer(config)
    pairs: list[Any] = [
        layer.apply({"params": layer_params}, memory, method="source_keys_values")
        for layer_params in decoder_layers(config, params)
    ]
    return SourceCache(tuple(keys for keys, _ in pairs), tuple(values for _, values in pairs), padding_mask(source))


def start_cache(config: ModelConfig, batch: int, beams: int, max_length: int) -> DecodeCache:
    """A cache before the first step, for outputs of at most max_length pieces (L)."""
    keys, values = (
        jnp.zeros((batch, config.num_heads, size, max_length * beams), config.dtype)
        for size in (config.key_size, config.value_size)
    )
    ancestry = jnp.zeros((batch, beams, max_length), jnp.int32)
    return DecodeCache((LayerCache(keys, values),) * config.decoder_layers, ancestry, jnp.zeros((), jnp.int32))


def decode_step(
    config: ModelConfig,
    params: Params,
    layers: list[Params],
    source: SourceCache,
    cache: DecodeCache,
    tokens: Int[Array, "BM"],
) -> tuple[Float[Array, "BM W"], DecodeCache]:
    """Logits of the pieces that follow `tokens`, the hypotheses' last pieces, and the cache with them in it.

    `layers` is `decoder_layers(config, params)`. Equal to the last position of a full pass.
    """
    batch, beams, max_length = cache.ancestry.shape
    model = Transformer(config)
    own = jnp.arange(beams, dtype=jnp.int32)
    ancestry = jax.lax.dynamic_update_slice_in_dim(
        cache.ancestry, jnp.broadcast_to(own[None, :, None], (batch, beams, 1)), cache.position, axis=2
    )
    past = jnp.arange(max_length) <= cache.position
    visible = (ancestry[..., None] == own) & past[:, None]  # -> [B M L M]
    self_mask = visible.reshape(batch, 1, beams, max_length * beams)
    position = cache.position[None, None]
    x: Any = model.apply(
        {"params": params}, tokens.reshape(batch, beams), position, length=max_length, method="embed_target"
    )  # -> [B M D]
    new_layers: list[LayerCache] = []
    for i, layer_params in enumerate(layers):
        stepped: Any = DecoderLayer(config).apply(
            {"params": layer_params},
            x, source.keys[i], source.values[i], source.mask, cache.layers[i], self_mask, cache.position,
            method="step",
        )  # fmt: skip
        x, layer_cache = stepped
        new_layers.append(layer_cache)
    logits: Any = model.apply({"params": params}, x, method="logits")
    return logits.reshape(batch * beams, -1), DecodeCache(tuple(new_layers), ancestry, cache.position + 1)


def reorder_beams(cache: DecodeCache, parents: Int[Array, "BM"]) -> DecodeCache:
    """The cache after hypothesis i has become a continuation of hypothesis parents[i] (indices into B * M)."""
    batch, beams, _ = cache.ancestry.shape
    # By sentence: a gather from all rows would be exchanged between devices at every step.
    own = parents.reshape(batch, beams) - beams * jnp.arange(batch)[:, None]
    return cache._replace(ancestry=jnp.take_along_axis(cache.ancestry, own[..., None], axis=1))
