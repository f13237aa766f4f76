"""Modules that own parameters; the mathematics they apply is `ops`.

Every module takes `train: bool`: whether dropout is on (it draws from the rng stream "dropout").
"""

from collections.abc import Callable

import flax.linen as nn
import jax
from jaxtyping import Array, Bool, Float

from transformer_jax.config import ModelConfig
from transformer_jax.ops.attention import attend, attend_cached, fused_attend, merge_heads, project_heads
from transformer_jax.ops.dropout import dropout
from transformer_jax.ops.feed_forward import feed_forward
from transformer_jax.ops.norm import layer_norm

Initializer = Callable[..., Array]


def _xavier(in_axis: int | tuple[int, ...], out_axis: int | tuple[int, ...]) -> Initializer:
    """Xavier uniform; the axes must be told: the default takes a (D, H, K) weight for H * D inputs."""
    return jax.nn.initializers.xavier_uniform(in_axis=in_axis, out_axis=out_axis)


class LayerNorm(nn.Module):
    """Owns `scale` and `bias`, [D]."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Normalises the last axis."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        return layer_norm(x, scale, bias, self.config.norm_epsilon)


class MultiHeadAttention(nn.Module):
    """Owns w_q w_k [D H K], w_v [D H V], w_o [H V D] and their biases (section 3.2.2)."""

    config: ModelConfig

    def setup(self) -> None:
        """Declares the parameters: here, not in a call, as keys and values may be asked for alone."""
        config = self.config
        shapes = {
            "q": (config.d_model, config.num_heads, config.key_size),
            "k": (config.d_model, config.num_heads, config.key_size),
            "v": (config.d_model, config.num_heads, config.value_size),
            "o": (config.num_heads, config.value_size, config.d_model),
        }
        self.weights = {
            name: self.param(f"w_{name}", _xavier((0, 1), 2) if name == "o" else _xavier(0, (1, 2)), shape)
            for name, shape in shapes.items()
        }
        self.biases = {
            name: self.param(f"b_{name}", nn.initializers.zeros, shape[2:] if name == "o" else shape[1:])
            if config.attention_bias
            else None
            for name, shape in shapes.items()
        }

    def _parameters(self, name: str) -> tuple[Array, Array | None]:
        dtype = self.config.dtype
        bias = self.biases[name]
        return self.weights[name].astype(dtype), None if bias is None else bias.astype(dtype)

    def queries(self, x: Float[Array, "B T D"]) -> Float[Array, "B T H K"]:
        """x W^Q."""
        return project_heads(x, *self._parameters("q"))

    def keys_values(self, x: Float[Array, "B S D"]) -> tuple[Float[Array, "B S H K"], Float[Array, "B S H V"]]:
        """x W^K and x W^V."""
        return project_heads(x, *self._parameters("k")), project_heads(x, *self._parameters("v"))

    def attend(
        self,
        x: Float[Array, "B T D"],
        keys: Float[Array, "B S H K"],
        values: Float[Array, "B S H V"],
        mask: Bool[Array, "..."] | None,
        *,
        train: bool,
    ) -> Float[Array, "B T D"]:
        """MultiHead(x, keys, values) for keys and values that are projected already."""
        if self.config.attention_impl == "fused":
            heads = fused_attend(self.queries(x), keys, values, mask)
        else:
            rate = self.config.attention_dropout
            key = self.make_rng("dropout") if train and rate else None
            heads = attend(self.queries(x), keys, values, mask, dropout_rate=rate, dropout_key=key)
        return merge_heads(heads, *self._parameters("o"))

    def attend_cached(
        self,
        x: Float[Array, "B T D"],
        keys: Float[Array, "B H K S"],
        values: Float[Array, "B H V S"],
        mask: Bool[Array, "..."],
    ) -> Float[Array, "B T D"]:
        """As `attend` without dropout, for keys and values in a cache's order."""
        return merge_heads(attend_cached(self.queries(x), keys, values, mask), *self._parameters("o"))

    def __call__(
        self, x: Float[Array, "B T D"], y: Float[Array, "B S D"], mask: Bool[Array, "..."] | None, *, train: bool
    ) -> Float[Array, "B T D"]:
        """MultiHead(x, y, y): queries from x, keys and values from y."""
        return self.attend(x, *self.keys_values(y), mask, train=train)


class FeedForward(nn.Module):
    """Owns w_1 [D F], b_1, w_2 [F D], b_2 (section 3.3)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], *, train: bool) -> Float[Array, "B T D"]:
        """FFN(x)."""
        config = self.config
        w_1 = self.param("w_1", _xavier(0, 1), (config.d_model, config.d_ff))
        b_1 = self.param("b_1", nn.initializers.zeros, (config.d_ff,))
        w_2 = self.param("w_2", _xavier(0, 1), (config.d_ff, config.d_model))
        b_2 = self.param("b_2", nn.initializers.zeros, (config.d_model,))
        key = self.make_rng("dropout") if train and config.relu_dropout else None
        arrays = (array.astype(config.dtype) for array in (w_1, b_1, w_2, b_2))
        return feed_forward(x, *arrays, dropout_rate=config.relu_dropout, dropout_key=key)


class Residual(nn.Module):
    """LayerNorm(x + Dropout(Sublayer(x))), or x + Dropout(Sublayer(LayerNorm(x))) for pre-norm; owns the norm.

    The sub-layer runs between the two calls: `x = residual.after(x, sublayer(residual.before(x)))`.
    """

    config: ModelConfig

    def setup(self) -> None:
        """Declares the norm."""
        self.norm = LayerNorm(self.config)

    def before(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """What the sub-layer sees."""
        return self.norm(x) if self.config.norm == "pre" else x

    def after(self, x: Float[Array, "B T D"], out: Float[Array, "B T D"], *, train: bool) -> Float[Array, "B T D"]:
        """x and the sub-layer's result put together."""
        if train and self.config.dropout:
            out = dropout(out, self.config.dropout, self.make_rng("dropout"))
        return x + out if self.config.norm == "pre" else self.norm(x + out)
