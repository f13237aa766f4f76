"""Parameters: their tree, how they start, and how many they are."""

import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import QUICK, small_config

from transformer_jax.ablation.table import load_rows
from transformer_jax.config_loading import load_config
from transformer_jax.model.layers import MultiHeadAttention
from transformer_jax.model.transformer import Transformer

TABLE_3 = pathlib.Path(__file__).parent.parent / "configs" / "table3.py"


@pytest.fixture(scope="module")
def initialised():
    """The base model's widths with two layers on each side."""
    config = small_config(vocab_size=1000, d_model=512, d_ff=2048, num_heads=8, tied_embeddings=False)
    token = jnp.ones((1, 1), jnp.int32)
    return jax.jit(Transformer(config).init, compiler_options=QUICK)(jax.random.key(0), token, token)["params"]


def test_parameters_are_a_plain_nested_dict_of_float32(initialised):
    assert type(initialised) is dict
    assert type(initialised["encoder"]["self_attention"]) is dict
    assert all(isinstance(leaf, jax.Array) and leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(initialised))


def test_matrices_are_xavier_uniform(initialised):
    """Limit sqrt(6 / (fan_in + fan_out)), heads counted: sqrt(6 / 1024) for (512, 8, 64)."""
    attention = initialised["decoder"]["cross_attention"]
    feed_forward = initialised["encoder"]["feed_forward"]
    matrices = [(attention[name], 512 + 512) for name in ("w_q", "w_k", "w_v", "w_o")]
    matrices += [(feed_forward[name], 512 + 2048) for name in ("w_1", "w_2")]
    for matrix, fans in matrices:
        limit = math.sqrt(6 / fans)
        for layer in np.asarray(matrix):
            assert 0.999 * limit < np.abs(layer).max() <= limit
            assert layer.std() == pytest.approx(limit / math.sqrt(3), rel=0.01)


def test_embeddings_have_variance_one_over_d_model(initialised):
    for name in ("source_embedding", "target_embedding", "output_embedding"):
        assert np.std(initialised[name]) == pytest.approx(512**-0.5, rel=0.01)


def test_layers_and_matrices_start_differently(initialised):
    layers = initialised["encoder"]["self_attention"]["w_q"]
    assert not np.allclose(layers[0], layers[1])
    assert not np.allclose(layers, initialised["encoder"]["self_attention"]["w_k"])
    assert not np.allclose(initialised["source_embedding"], initialised["target_embedding"])


def test_norms_start_at_one_and_biases_at_zero(initialised):
    for path, leaf in jax.tree_util.tree_leaves_with_path(initialised):
        name = path[-1].key
        if name == "scale":
            assert np.all(leaf == 1), jax.tree_util.keystr(path)
        if name.startswith("b"):
            assert np.all(leaf == 0), jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    ("variant", "millions"),
    [
        ("base", 65.1), ("A1", 65.1), ("A2", 65.1), ("A3", 65.1), ("A4", 65.1), ("B1", 58.0), ("B2", 60.4),
        ("C1", 35.7), ("C2", 50.4), ("C3", 79.8), ("C4", 27.8), ("C5", 167.9), ("C6", 52.5), ("C7", 90.3),
        ("D1", 65.1), ("D2", 65.1), ("D3", 65.1), ("D4", 65.1),
        # Two tables of 1,024 learned positions.
        ("E", 66.2),
        # Table 3 prints 213; no reading of the text gives it (docs/deviations.md).
        ("big", 218.3),
    ],
)  # fmt: skip
def test_parameter_counts_are_those_of_table_3(variant, millions):
    """A, D and E have no count in the table: heads and rates alone change nothing."""
    config = load_config(f"{TABLE_3}:{variant}").model
    token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    shapes = jax.eval_shape(Transformer(config).init, jax.random.key(0), token, token)
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    assert round(count / 1e6, 1) == pytest.approx(millions)
    printed = {row.name: row.printed.millions for row in load_rows(TABLE_3)}[variant]
    assert printed is None or variant == "big" or round(count / 1e6) == printed


def test_multi_head_attention_has_the_documented_shapes():
    """w_q, w_k [D H K], w_v [D H V], w_o [H V D]."""
    module = MultiHeadAttention(small_config(d_k=3, d_v=5))
    x = jax.ShapeDtypeStruct((1, 2, 8), jnp.float32)
    params = jax.eval_shape(lambda x: module.init(jax.random.key(0), x, x, None, train=False), x)["params"]
    shapes = {name: leaf.shape for name, leaf in params.items()}
    assert shapes == {
        "w_q": (8, 2, 3), "w_k": (8, 2, 3), "w_v": (8, 2, 5), "w_o": (2, 5, 8),
        "b_q": (2, 3), "b_k": (2, 3), "b_v": (2, 5), "b_o": (8,),
    }  # fmt: skip
