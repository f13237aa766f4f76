"""model.attention_impl "fused": the same numbers and gradients as einsum, and which kernel each backend gets."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from small_models import BOS, PAD, QUICK, random_params, rows, sentence, small_config

from transformer_jax.config import SearchConfig
from transformer_jax.model.transformer import Transformer
from transformer_jax.ops.attention import attend, fused_attend
from transformer_jax.ops.masks import causal_mask, padding_mask, segment_mask
from transformer_jax.translation.translate import make_translate

SEGMENTS = jnp.array([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1], [0] * 6])
MASKS = {
    "none": None,
    "padding": padding_mask(jnp.array([[4, 5, 6, PAD, PAD, PAD], [7, 8, 9, 4, 5, 6], [PAD] * 6])),
    "causal": jnp.asarray(causal_mask(6)),
    "segments": segment_mask(SEGMENTS, SEGMENTS) & causal_mask(6),
}


def heads(dtype, length=6, d_k=8):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(3, length, 2, d_k)), dtype) for _ in range(4)]


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def outcome(function, q, k, v, cotangent, mask):
    """The result and the gradients of q, k and v."""
    out, pull_back = jax.vjp(lambda *arrays: function(*arrays, mask), q, k, v)
    return out, *pull_back(cotangent)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mask", MASKS)
def test_fused_is_einsum_forward_and_backward(mask, dtype):
    """Rows that may see nothing, of "padding" and "segments", are zeros in both, with gradients that are finite."""
    arrays = heads(dtype)
    fused, plain = (outcome(function, *arrays, MASKS[mask]) for function in (fused_attend, attend))
    tolerance = 1e-5 if dtype == "float32" else 0.03
    for one, other in zip(fused, plain, strict=True):
        assert one.dtype == other.dtype == jnp.dtype(dtype)
        np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), atol=tolerance, rtol=tolerance)
    if mask in ("padding", "segments"):
        assert not np.any(fused[0][2]) and np.all(np.isfinite(fused[1].astype(jnp.float32)))
        assert not any(np.any(gradient[2]) for gradient in fused[1:])


def test_a_model_with_it_gives_the_same_logits_and_gradients():
    params = random_params(small_config())
    source = rows([sentence(4), sentence(7), []], 8)
    target = rows([[BOS, *sentence(3)], [BOS, *sentence(5)], [BOS]], 6)

    def found(config):
        def total(params):
            logits = Transformer(config).apply({"params": params}, source, target)
            return (logits * jnp.sin(jnp.arange(logits.size)).reshape(logits.shape)).sum(), logits

        return jax.jit(jax.grad(total, has_aux=True), compiler_options=QUICK)(params)

    plain, fused = (found(small_config(attention_impl=impl)) for impl in ("einsum", "fused"))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5, rtol=1e-4), fused, plain)


@pytest.mark.slow
def test_beam_search_with_it_finds_the_same():
    """Cached steps, where beams stand for positions."""
    params = random_params(small_config())
    source = rows([sentence(4), sentence(6)], 6)
    search = SearchConfig(beam_size=3, max_extra_length=3)
    plain, fused = (
        make_translate(small_config(attention_impl=impl), search)(params, source) for impl in ("einsum", "fused")
    )
    np.testing.assert_array_equal(plain.tokens, fused.tokens)
    np.testing.assert_allclose(plain.scores, fused.scores, rtol=1e-5)


def kernels(monkeypatch, dtype, length, d_k, mask):
    """cuDNN's kernels in the program for a GPU, lowered without one: only the version of cuDNN is made up."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    arrays = [jax.ShapeDtypeStruct((3, length, 2, d_k), jnp.dtype(dtype))] * 3
    gradients = jax.jit(
        jax.grad(lambda q, k, v: fused_attend(q, k, v, mask).astype(jnp.float32).sum(), argnums=(0, 1, 2))
    )
    text = gradients.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    return set(re.findall(r"@(__cudnn\S+?)\(", text))


BOTH = {"__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"}


@pytest.mark.parametrize("mask", ["padding", "causal", "segments"])
def test_a_gpu_gets_cudnns_kernels(monkeypatch, mask):
    assert kernels(monkeypatch, "bfloat16", 6, 64, MASKS[mask]) == BOTH


@pytest.mark.parametrize(
    ("dtype", "length", "d_k"), [("float32", 6, 64), ("bfloat16", 7, 64), ("bfloat16", 6, 20), ("bfloat16", 6, 136)]
)
def test_what_cudnn_cannot_do_is_left_to_xla(monkeypatch, dtype, length, d_k):
    mask = jnp.asarray(causal_mask(length))
    assert kernels(monkeypatch, dtype, length, d_k, mask) == set()


def test_other_backends_never_ask_for_cudnn():
    """It would raise: there is none here."""
    q, k, v, _ = heads("bfloat16")
    assert jax.default_backend() != "cpu" or fused_attend(q, k, v, MASKS["causal"]).shape == q.shape
