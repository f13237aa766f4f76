"""The same weights in PyTorch's own Transformer layers: logits, loss and every gradient."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import BOS, PAD, random_params, rows, sentence, small_config

from transformer_jax.model.transformer import Transformer
from transformer_jax.ops.loss import loss_sums
from transformer_jax.ops.positions import sinusoids

torch = pytest.importorskip("torch", reason="PyTorch is not installed (pip install '.[parity]')")

SOURCE = rows([sentence(4), sentence(7)], 8)
TARGET = rows([[BOS, *sentence(5, seed=1)], [BOS, *sentence(2, seed=1)]], 6)
LABELS = rows([[*sentence(5, seed=1), 1], [*sentence(2, seed=1), 1]], 6)
SMOOTHING = 0.1


def attention_state(name, leaves, i):
    """Our w_q w_k w_v [D H K] as one in_proj [3D D], w_o [H V D] as out_proj [D D]: differentiable views."""
    d_model = leaves["w_q"].shape[1]
    return {
        f"{name}.in_proj_weight": torch.cat([leaves[w][i].reshape(d_model, -1).T for w in ("w_q", "w_k", "w_v")]),
        f"{name}.in_proj_bias": torch.cat([leaves[b][i].reshape(-1) for b in ("b_q", "b_k", "b_v")]),
        f"{name}.out_proj.weight": leaves["w_o"][i].reshape(-1, d_model).T,
        f"{name}.out_proj.bias": leaves["b_o"][i],
    }


def stack_state(stack, layers):
    """The state dict of a TransformerEncoder or TransformerDecoder from our stack of leaves [N ...]."""
    state = {}
    attentions = {"self_attn": "self_attention", "multihead_attn": "cross_attention"}
    for i in range(layers):
        prefix = f"layers.{i}"
        for theirs, ours in attentions.items():
            if ours in stack:
                state |= attention_state(f"{prefix}.{theirs}", stack[ours], i)
        for n in (1, 2):
            state[f"{prefix}.linear{n}.weight"] = stack["feed_forward"][f"w_{n}"][i].T
            state[f"{prefix}.linear{n}.bias"] = stack["feed_forward"][f"b_{n}"][i]
        for n in (1, 2, 3):
            if f"residual_{n}" in stack:
                norm = stack[f"residual_{n}"]["norm"]
                state[f"{prefix}.norm{n}.weight"], state[f"{prefix}.norm{n}.bias"] = norm["scale"][i], norm["bias"][i]
    return state


def run_stack(config, side, leaves, *inputs, **masks):
    """torch.nn's stack with our leaves in place of its parameters."""
    kind = side.capitalize()
    layer = getattr(torch.nn, f"Transformer{kind}Layer")(
        config.d_model, config.num_heads, config.d_ff, dropout=0.0, activation="relu",
        layer_norm_eps=config.norm_epsilon, batch_first=True, norm_first=config.norm == "pre",
    )  # fmt: skip
    state = stack_state(leaves[side], getattr(config, f"{side}_layers"))
    norm = None
    if config.norm == "pre":
        norm = torch.nn.LayerNorm(config.d_model, eps=config.norm_epsilon)
        state |= {
            f"norm.{theirs}": leaves[f"{side}_norm"][ours] for theirs, ours in (("weight", "scale"), ("bias",) * 2)
        }
    extra = {"enable_nested_tensor": False} if side == "encoder" else {}
    stack = getattr(torch.nn, f"Transformer{kind}")(layer, getattr(config, f"{side}_layers"), norm=norm, **extra)
    assert state.keys() == stack.state_dict().keys()
    return torch.func.functional_call(stack, state, inputs, masks)


def torch_forward(config, leaves, source, target):
    """Logits of the model of figure 1 around torch.nn's stacks."""
    source, target = torch.tensor(np.asarray(source)).long(), torch.tensor(np.asarray(target)).long()
    table = torch.tensor(sinusoids(16, config.d_model, config.sinusoids))
    embedding = leaves["embedding"]
    x, y = (embedding[ids] * math.sqrt(config.d_model) + table[: ids.shape[1]] for ids in (source, target))
    memory = run_stack(config, "encoder", leaves, x, src_key_padding_mask=source == PAD)
    later = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
    out = run_stack(
        config, "decoder", leaves, y, memory,
        tgt_mask=later, tgt_key_padding_mask=target == PAD, memory_key_padding_mask=source == PAD,
    )  # fmt: skip
    return out @ embedding.T


def our_loss(config, params):
    logits = Transformer(config).apply({"params": params}, SOURCE, TARGET)
    sums = loss_sums(logits, LABELS, (LABELS != PAD).astype(jnp.float32), SMOOTHING)
    return sums["loss"] / sums["tokens"], logits


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_logits_loss_and_gradients_equal_torchs(norm):
    """Every leaf of the parameter tree; torch shares label smoothing over all W pieces, as we do."""
    config = small_config(d_model=12, num_heads=3, norm=norm)
    params = random_params(config)
    gradient = jax.jit(jax.value_and_grad(functools.partial(our_loss, config), has_aux=True))
    (loss, logits), gradients = gradient(params)

    leaves = jax.tree.map(lambda leaf: torch.tensor(np.asarray(leaf), requires_grad=True), params)
    torch_logits = torch_forward(config, leaves, SOURCE, TARGET)
    labels = torch.tensor(np.asarray(LABELS)).long()
    torch_loss = torch.nn.functional.cross_entropy(
        torch_logits.flatten(0, 1), labels.flatten(), ignore_index=PAD, label_smoothing=SMOOTHING
    )
    torch_loss.backward()

    real = np.asarray(TARGET != PAD)
    np.testing.assert_allclose(logits[real], torch_logits.detach().numpy()[real], atol=2e-5)
    assert float(loss) == pytest.approx(torch_loss.item(), rel=1e-5)
    jax.tree_util.tree_map_with_path(
        lambda path, ours, theirs: np.testing.assert_allclose(
            ours, theirs.grad.numpy(), atol=1e-5, err_msg=jax.tree_util.keystr(path)
        ),
        gradients, leaves,
    )  # fmt: skip
