"""The same weights in Hugging Face's Marian (see benchmarks/marian_twin.py) give the same logits."""

import importlib

import jax
import numpy as np
import pytest
from small_models import BOS, PAD, random_params, rows, sentence, small_config

from transformer_jax.model.transformer import Transformer

torch = pytest.importorskip("torch", reason="PyTorch is not installed (pip install '.[parity]')")
transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install '.[parity]')")

twin = importlib.import_module("marian_twin")  # only now: it imports both

CONFIG = small_config(d_model=12, d_ff=20, num_heads=3, norm_epsilon=twin.NORM_EPSILON, decoder_layers=3)


def test_logits_equal_marians():
    """A padded batch with unequal lengths on both sides."""
    params = random_params(CONFIG)
    source, target = rows([sentence(4), sentence(7)], 8), rows([[BOS, *sentence(5)], [BOS, *sentence(2)]], 6)
    ours = jax.jit(Transformer(CONFIG).apply)({"params": params}, source, target)
    source, target = (torch.tensor(np.asarray(ids)).long() for ids in (source, target))
    with torch.no_grad():
        theirs = twin.marian_twin(CONFIG, params, max_positions=16)(
            input_ids=source, attention_mask=source != PAD,
            decoder_input_ids=target, decoder_attention_mask=target != PAD, use_cache=False,
        ).logits.numpy()  # fmt: skip
    real = (target != PAD).numpy()
    np.testing.assert_allclose(np.asarray(ours)[real], theirs[real], atol=2e-5)
