"""The same weights in Hugging Face's Marian (`MarianMTModel`: post-norm, ReLU, tied embeddings) give the same logits.

Marian's sinusoids have the paper's frequencies, but lie as all sines, then all cosines: neither of our layouts. A model
does not care in which order the channels of its residual stream lie, so our interleaved model is Marian's with channels
0, 2, 4 ... 1, 3, 5 ...
"""

import jax
import numpy as np
import pytest
from small_models import BOS, EOS, PAD, VOCABULARY, random_params, rows, sentence, small_config

from transformer_jax.model.transformer import Transformer

torch = pytest.importorskip("torch", reason="PyTorch is not installed (pip install '.[parity]')")
transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install '.[parity]')")

D_MODEL, D_FF, HEADS = 12, 20, 3
# torch.nn.LayerNorm's epsilon, which Marian does not let one choose.
CONFIG = small_config(d_model=D_MODEL, d_ff=D_FF, num_heads=HEADS, norm_epsilon=1e-5, decoder_layers=3)
CHANNELS = np.concatenate([np.arange(0, D_MODEL, 2), np.arange(1, D_MODEL, 2)])


def attention_state(name, params, i):
    state = {}
    for ours, theirs in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj")):
        state[f"{name}.{theirs}.weight"] = params[f"w_{ours}"][i][CHANNELS].reshape(D_MODEL, -1).T
        state[f"{name}.{theirs}.bias"] = params[f"b_{ours}"][i].reshape(-1)
    state[f"{name}.out_proj.weight"] = params["w_o"][i].reshape(-1, D_MODEL)[:, CHANNELS].T
    state[f"{name}.out_proj.bias"] = params["b_o"][i][CHANNELS]
    return state


def layer_state(name, params, i):
    """One layer of a stack under Marian's names."""
    side = name.split(".")[1]
    feed_forward = params["feed_forward"]
    state = attention_state(f"{name}.self_attn", params["self_attention"], i)
    state |= {
        f"{name}.fc1.weight": feed_forward["w_1"][i][CHANNELS].T,
        f"{name}.fc1.bias": feed_forward["b_1"][i],
        f"{name}.fc2.weight": feed_forward["w_2"][i][:, CHANNELS].T,
        f"{name}.fc2.bias": feed_forward["b_2"][i][CHANNELS],
    }
    norms = ["self_attn_layer_norm", "final_layer_norm"]
    if side == "decoder":
        norms.insert(1, "encoder_attn_layer_norm")
        state |= attention_state(f"{name}.encoder_attn", params["cross_attention"], i)
    for n, norm in enumerate(norms, 1):
        state[f"{name}.{norm}.weight"] = params[f"residual_{n}"]["norm"]["scale"][i][CHANNELS]
        state[f"{name}.{norm}.bias"] = params[f"residual_{n}"]["norm"]["bias"][i][CHANNELS]
    return state


def marian(params):
    """A MarianMTModel of CONFIG's shape with our weights."""
    model = transformers.MarianMTModel(
        transformers.MarianConfig(
            vocab_size=VOCABULARY, d_model=D_MODEL, encoder_layers=CONFIG.encoder_layers,
            decoder_layers=CONFIG.decoder_layers, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS,
            encoder_ffn_dim=D_FF, decoder_ffn_dim=D_FF, activation_function="relu", scale_embedding=True,
            max_position_embeddings=16, pad_token_id=PAD, eos_token_id=EOS, forced_eos_token_id=None,
            decoder_start_token_id=BOS,
        )
    ).eval()  # fmt: skip
    params = jax.tree.map(np.asarray, params)
    shared = params["embedding"][:, CHANNELS]
    embeddings = ("model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")
    state = {f"{name}.weight": shared for name in embeddings}
    for side in ("encoder", "decoder"):
        for i in range(getattr(CONFIG, f"{side}_layers")):
            state |= layer_state(f"model.{side}.layers.{i}", params[side], i)
    own = {
        name for name in model.state_dict() if name.endswith("embed_positions.weight") or name == "final_logits_bias"
    }
    assert state.keys() | own == model.state_dict().keys()
    model.load_state_dict({name: torch.tensor(array) for name, array in state.items()}, strict=False)
    return model


def test_logits_equal_marians():
    """A padded batch with unequal lengths on both sides."""
    params = random_params(CONFIG)
    source, target = rows([sentence(4), sentence(7)], 8), rows([[BOS, *sentence(5)], [BOS, *sentence(2)]], 6)
    ours = jax.jit(Transformer(CONFIG).apply)({"params": params}, source, target)
    source, target = (torch.tensor(np.asarray(ids)).long() for ids in (source, target))
    with torch.no_grad():
        theirs = marian(params)(
            input_ids=source, attention_mask=source != PAD,
            decoder_input_ids=target, decoder_attention_mask=target != PAD, use_cache=False,
        ).logits.numpy()  # fmt: skip
    real = (target != PAD).numpy()
    np.testing.assert_allclose(np.asarray(ours)[real], theirs[real], atol=2e-5)
