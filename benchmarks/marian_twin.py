"""Our weights in Hugging Face's Marian: the same function, computed by another implementation.

`MarianMTModel` is post-norm with tied embeddings. Its sinusoids have the paper's frequencies but lie as all sines, then
all cosines; a model does not care in which order the channels of its residual stream lie, so our interleaved model is
Marian's with channels 0, 2, 4 ... 1, 3, 5 ...
"""

from typing import Any

import numpy as np
import torch
import transformers

from transformer_jax.config import ModelConfig
from transformer_jax.ops.masks import BOS, EOS, PAD

# torch.nn.LayerNorm's epsilon, which Marian does not let one choose.
NORM_EPSILON = 1e-5

State = dict[str, np.ndarray]


def marian_twin(config: ModelConfig, params: Any, max_positions: int) -> transformers.MarianMTModel:
    """A MarianMTModel with these parameters; `config` is post-norm, tied, with biases and interleaved sinusoids."""
    theirs = transformers.MarianConfig(
        vocab_size=config.vocab_size, d_model=config.d_model, encoder_layers=config.encoder_layers,
        decoder_layers=config.decoder_layers, encoder_attention_heads=config.num_heads,
        decoder_attention_heads=config.num_heads, encoder_ffn_dim=config.d_ff, decoder_ffn_dim=config.d_ff,
        activation_function="relu", scale_embedding=True, max_position_embeddings=max_positions, pad_token_id=PAD,
        eos_token_id=EOS, forced_eos_token_id=None, decoder_start_token_id=BOS,
    )  # fmt: skip
    model = transformers.MarianMTModel(theirs).eval()
    channels = np.concatenate([np.arange(0, config.d_model, 2), np.arange(1, config.d_model, 2)])
    embeddings = ("model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")
    state = {f"{name}.weight": np.asarray(params["embedding"])[:, channels] for name in embeddings}
    for side in ("encoder", "decoder"):
        for i in range(getattr(config, f"{side}_layers")):
            state |= _layer(f"model.{side}.layers.{i}", params[side], i, channels)
    own = {
        name for name in model.state_dict() if name.endswith("embed_positions.weight") or name == "final_logits_bias"
    }
    missing = model.state_dict().keys() ^ (state.keys() | own)
    if missing:
        raise ValueError(f"parameters without a counterpart: {sorted(missing)}")
    model.load_state_dict({name: torch.tensor(np.asarray(array)) for name, array in state.items()}, strict=False)
    return model


def _layer(name: str, params: Any, i: int, channels: np.ndarray) -> State:
    network = params["feed_forward"]
    state = _attention(f"{name}.self_attn", params["self_attention"], i, channels)
    state |= {
        f"{name}.fc1.weight": network["w_1"][i][channels].T,
        f"{name}.fc1.bias": network["b_1"][i],
        f"{name}.fc2.weight": network["w_2"][i][:, channels].T,
        f"{name}.fc2.bias": network["b_2"][i][channels],
    }
    norms = ["self_attn_layer_norm", "final_layer_norm"]
    if "cross_attention" in params:
        norms.insert(1, "encoder_attn_layer_norm")
        state |= _attention(f"{name}.encoder_attn", params["cross_attention"], i, channels)
    for n, norm in enumerate(norms, 1):
        state[f"{name}.{norm}.weight"] = params[f"residual_{n}"]["norm"]["scale"][i][channels]
        state[f"{name}.{norm}.bias"] = params[f"residual_{n}"]["norm"]["bias"][i][channels]
    return state


def _attention(name: str, params: Any, i: int, channels: np.ndarray) -> State:
    width = len(channels)
    state = {}
    for ours, theirs in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj")):
        state[f"{name}.{theirs}.weight"] = params[f"w_{ours}"][i][channels].reshape(width, -1).T
        state[f"{name}.{theirs}.bias"] = params[f"b_{ours}"][i].reshape(-1)
    state[f"{name}.out_proj.weight"] = params["w_o"][i].reshape(-1, width)[:, channels].T
    state[f"{name}.out_proj.bias"] = params["b_o"][i][channels]
    return state
