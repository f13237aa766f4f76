"""make_translate: from a configuration to the jitted function that translates arrays of word pieces."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from transformer_jax.config import ModelConfig, SearchConfig
from transformer_jax.errors import UserError
from transformer_jax.model.cache import decode_step, decoder_layers, encode_source, reorder_beams, start_cache
from transformer_jax.model.transformer import Transformer
from transformer_jax.ops.loss import smoothed_cross_entropy
from transformer_jax.ops.masks import BOS, EOS, PAD, UNK
from transformer_jax.search.beam import SearchResult, beam_search
from transformer_jax.search.sampling import greedy_search

Params = dict[str, Any]


@functools.cache
def make_translate(model: ModelConfig, search: SearchConfig) -> Callable[[Params, Int[Array, "B S"]], SearchResult]:
    """A jitted function (params, source [B S]) -> SearchResult, tokens [B M T] with M = n_best.

    Rows of `source` end with EOS and are filled up with PAD; a row of PAD alone is no sentence and gives empty slots.
    It compiles once for each shape [B S]; T = S + max_extra_length, while each sentence's own limit, its pieces (EOS
    counted) + max_extra_length, does not depend on the padding. The same configurations give the same function, so that
    nothing is compiled twice in a process. A beam of 1 is greedy search. PAD, BOS and UNK are never written; what
    probability the model gives them is lost, so that scores are those of forced decoding.
    """
    if model.positions == "learned" and search.max_source_length + search.max_extra_length > model.max_positions:
        raise UserError(
            f"search.max_source_length ({search.max_source_length}) + search.max_extra_length "
            f"({search.max_extra_length}) is more than model.max_positions ({model.max_positions}), the rows of the "
            f"learned positions: lower search.max_source_length"
        )

    never_written = np.isin(np.arange(model.embedding_rows), (PAD, BOS, UNK))

    @jax.jit
    def translate(params: Params, source: Int[Array, "B S"]) -> SearchResult:
        source_lengths = (source != PAD).sum(axis=1)
        max_length = source.shape[1] + search.max_extra_length
        layers = decoder_layers(model, params)
        encoded = encode_source(model, params, source)

        def step(cache: Any, tokens: Array) -> tuple[Array, Any]:
            logits, cache = decode_step(model, params, layers, encoded, cache, tokens)
            log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
            return jnp.where(never_written, -jnp.inf, log_probs), cache

        shared: dict[str, Any] = {
            "first_tokens": jnp.full(source.shape[0], BOS, jnp.int32),
            "max_lengths": jnp.where(source_lengths > 0, source_lengths + search.max_extra_length, 0),
            "max_length": max_length,
            "length_penalty": search.length_penalty,
            "eos_id": EOS,
            "pad_id": PAD,
        }
        cache = start_cache(model, source.shape[0], search.beam_size, max_length)
        if search.beam_size == 1:
            return greedy_search(step, cache, **shared)
        return beam_search(
            step, cache, beam_size=search.beam_size, n_best=search.n_best, reorder=reorder_beams, **shared
        )

    return translate


@functools.cache
def make_score(model: ModelConfig) -> Callable[[Params, Int[Array, "B S"], Int[Array, "B T"]], Float[Array, "B T"]]:
    """A jitted function (params, source [B S], target [B T]) -> log P of each target piece given those before it.

    Forced decoding in one pass: `target` is pieces to predict (EOS last, then PAD, whose entries are 0).
    """

    @jax.jit
    def score(params: Params, source: Int[Array, "B S"], target: Int[Array, "B T"]) -> Float[Array, "B T"]:
        inputs = jnp.concatenate([jnp.full_like(target[:, :1], BOS), target[:, :-1]], axis=1)
        logits = Transformer(model).apply({"params": params}, source, jnp.where(target == PAD, PAD, inputs))
        return jnp.where(target == PAD, 0.0, -smoothed_cross_entropy(logits, target, 0.0))

    return score
