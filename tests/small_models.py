"""Small models for tests: a configuration and parameters that are random in every leaf, biases and scales too."""

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.model.transformer import Transformer

# For `jax.jit(compiler_options=...)`: compiles in a quarter of the time; what XLA would optimise is small here.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
if jax.__version_info__ < (0, 11):  # later versions have no such option
    QUICK["xla_cpu_use_fusion_emitters"] = False

VOCABULARY = 23
PAD, EOS, BOS = 0, 1, 2


def small_config(**changes):
    """Two layers on each side, d_model 8, 2 heads, no dropout."""
    defaults = {
        "vocab_size": VOCABULARY, "encoder_layers": 2, "decoder_layers": 2, "d_model": 8, "d_ff": 12, "num_heads": 2,
        "dropout": 0.0, "max_positions": 32,
    }  # fmt: skip
    return ModelConfig(**(defaults | changes))


def random_params(config, seed=0):
    """Parameters of that model: norms near 1, all others normal with 0.3. No leaf is zero, so none can be forgotten."""
    token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    shapes = jax.eval_shape(Transformer(config).init, jax.random.key(0), token, token)["params"]
    rng = np.random.default_rng(seed)

    def leaf(path, shape):
        values = rng.normal(size=shape.shape) * 0.3
        return jnp.asarray(values + (path[-1].key == "scale"), jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def sentence(length, seed=0):
    """Random pieces, none of them a control piece."""
    return np.random.default_rng([seed, length]).integers(4, VOCABULARY, length).tolist()


def rows(sentences, width):
    """[B width] int32, filled up with PAD."""
    return jnp.array([list(pieces) + [PAD] * (width - len(pieces)) for pieces in sentences], jnp.int32)
