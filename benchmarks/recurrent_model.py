"""The attention RNN of before the Transformer, small: GRU encoder and decoder with Luong attention.

A bidirectional GRU and a second one over it read the source. A GRU reads the target, its states look at the source by
multiplicative attention (Luong et al., 2015, "general"), and a second GRU reads state and context together, as in GNMT:
nothing that attention gives goes back into the first, so that in training attention is one product for all positions.
Embeddings and output share one matrix, as in the product's model.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from recurrent_layers import gru, gru_step

from transformer_jax.ops.masks import BOS, EOS, PAD


class GRU(nn.Module):
    """Owns the weights of one layer."""

    width: int

    @nn.compact
    def __call__(
        self, x: jax.Array, mask: jax.Array, state: jax.Array | None = None, reverse: bool = False
    ) -> jax.Array:
        """States [B T H]; with a `state` [B H], that after the one position of x."""
        size = 3 * self.width
        w_x = self.param("w_x", nn.initializers.xavier_uniform(), (x.shape[-1], size))
        w_h = self.param("w_h", nn.initializers.orthogonal(), (self.width, size))
        b_x, b_h = (self.param(name, nn.initializers.zeros, (size,)) for name in ("b_x", "b_h"))
        if state is not None:
            return gru_step(state, x[:, 0] @ w_x + b_x, w_h, b_h)[:, None]
        return gru(x, w_x, b_x, w_h, b_h, mask=mask, reverse=reverse)


class Memory(NamedTuple):
    """The source, read."""

    states: jax.Array  # [B S H]
    mask: jax.Array  # [B S]


class RecurrentTranslator(nn.Module):
    """Encoder, decoder and attention; `width` is that of embeddings and states."""

    vocabulary: int
    width: int
    dropout: float = 0.1

    def setup(self) -> None:
        """Declares the layers."""
        self.embedding = self.param(
            "embedding", nn.initializers.normal(self.width**-0.5), (self.vocabulary, self.width)
        )
        self.forwards, self.backwards = GRU(self.width), GRU(self.width)
        self.join = nn.Dense(self.width)
        self.upper_encoder = GRU(self.width)
        self.lower_decoder, self.upper_decoder = GRU(self.width), GRU(self.width)
        self.query = nn.Dense(self.width, use_bias=False)
        self.readout = nn.Dense(self.width)
        self.drop = nn.Dropout(self.dropout)

    def __call__(self, source: jax.Array, target: jax.Array, *, train: bool = False) -> jax.Array:
        """Logits [B T W] of the piece after each target position."""
        logits, _ = self.decode(target, self.encode(source, train=train), train=train)
        return logits

    def encode(self, source: jax.Array, *, train: bool = False) -> Memory:
        """Reads the source [B S]."""
        mask = source != PAD
        x = self._embed(source, train)
        both = jnp.concatenate([self.forwards(x, mask), self.backwards(x, mask, reverse=True)], axis=-1)
        states = self.drop(nn.tanh(self.join(both)), deterministic=not train)
        states = states + self.drop(self.upper_encoder(states, mask), deterministic=not train)
        return Memory(states, mask)

    def decode(
        self,
        target: jax.Array,
        memory: Memory,
        states: tuple[jax.Array, jax.Array] | None = None,
        *,
        train: bool = False,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Logits and the states of both layers; with `states` given, `target` is one position [B 1]."""
        below, above = (None, None) if states is None else states
        mask = jnp.ones_like(target, bool)
        lower = self.lower_decoder(self._embed(target, train), mask, below)
        scores = jnp.einsum("BTH,BSH->BTS", self.query(lower), memory.states)
        weights = jax.nn.softmax(jnp.where(memory.mask[:, None, :], scores, -1e9))
        seen = jnp.concatenate([lower, jnp.einsum("BTS,BSH->BTH", weights, memory.states)], axis=-1)
        seen = self.drop(seen, deterministic=not train)
        upper = self.upper_decoder(seen, mask, above)
        out = nn.tanh(self.readout(jnp.concatenate([seen, upper], axis=-1)))
        logits = jnp.einsum("BTH,WH->BTW", self.drop(out, deterministic=not train), self.embedding)
        return logits, (lower[:, -1], upper[:, -1])

    def greedy(self, source: jax.Array, length: int) -> jax.Array:
        """The most probable piece at each of `length` steps, [B length]; what follows EOS is PAD."""
        memory = self.encode(source)
        zeros = jnp.zeros((source.shape[0], self.width))

        def step(module: "RecurrentTranslator", carry: tuple, _: None) -> tuple[tuple, jax.Array]:
            piece, states, ended = carry
            logits, states = module.decode(piece[:, None], memory, states)
            piece = jnp.where(ended, PAD, jnp.argmax(logits[:, 0].at[:, jnp.array([PAD, BOS])].set(-jnp.inf), axis=-1))
            return (piece, states, ended | (piece == EOS)), piece

        start = (jnp.full(source.shape[0], BOS), (zeros, zeros), jnp.zeros(source.shape[0], bool))
        scan = nn.scan(step, variable_broadcast="params", split_rngs={"params": False}, length=length)
        return scan(self, start, None)[1].T

    def _embed(self, tokens: jax.Array, train: bool) -> jax.Array:
        return self.drop(self.embedding[tokens] * self.width**0.5, deterministic=not train)
