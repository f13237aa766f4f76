"""Our weights in PyTorch's own Transformer layers: the same function, forward, backward and trained, by other code.

`torch.nn.TransformerEncoder` and `TransformerDecoder` stand between one tied embedding and its transpose; rows may hold
several sentences, as in our batches.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from transformer_jax.config import Config, ModelConfig
from transformer_jax.data.batches import Batch
from transformer_jax.ops.masks import PAD
from transformer_jax.ops.positions import sinusoids

State = dict[str, Tensor]


class TorchTwin(nn.Module):
    """The model of figure 1; `config` is tied, with biases, sinusoids and d_k = d_v = d_model / h, without dropout."""

    def __init__(self, config: ModelConfig, longest: int) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.zeros(config.embedding_rows, config.d_model))
        table = torch.tensor(sinusoids(longest, config.d_model, config.sinusoids))
        self.register_buffer("positions", table, persistent=False)
        self.encoder = _stack(config, "encoder")
        self.decoder = _stack(config, "decoder")

    def forward(self, batch: Batch) -> Tensor:
        """Logits [B T W] of a batch of tensors."""
        seen = [sees(batch.source_segments, batch.source_segments), sees(batch.target_segments, batch.target_segments)]
        across = sees(batch.target_segments, batch.source_segments)
        # A padding position looks at everything: torch's softmax over nothing is NaN. Nothing looks at it.
        padding = (batch.target_segments == 0)[:, :, None]
        length = batch.target.shape[1]
        seen[1] &= torch.ones(length, length, dtype=torch.bool).tril() | padding
        heads = self.config.num_heads
        source_mask, target_mask, cross_mask = (~m.repeat_interleave(heads, dim=0) for m in (*seen, across))
        memory = self.encoder(self.embed(batch.source, batch.source_positions), mask=source_mask)
        target = self.embed(batch.target, batch.target_positions)
        out = self.decoder(target, memory, tgt_mask=target_mask, memory_mask=cross_mask)
        return out @ self.embedding.T

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Scaled embedding + position, [B T D]."""
        return self.embedding[tokens] * math.sqrt(self.config.d_model) + self.positions[positions]


def sees(queries: Tensor, keys: Tensor) -> Tensor:
    """[B T S]: same sentence; padding queries see all."""
    same = queries[:, :, None] == keys[:, None, :]
    return same & (keys != 0)[:, None, :] | (queries == 0)[:, :, None]


def _stack(config: ModelConfig, side: str) -> nn.Module:
    kind, layers = side.capitalize(), getattr(config, f"{side}_layers")
    layer = getattr(nn, f"Transformer{kind}Layer")(
        config.d_model, config.num_heads, config.d_ff, dropout=0.0, activation="relu",
        layer_norm_eps=config.norm_epsilon, batch_first=True, norm_first=config.norm == "pre",
    )  # fmt: skip
    norm = nn.LayerNorm(config.d_model, eps=config.norm_epsilon) if config.norm == "pre" else None
    extra = {"enable_nested_tensor": False} if side == "encoder" else {}
    stack: nn.Module = getattr(nn, f"Transformer{kind}")(layer, layers, norm=norm, **extra)
    return stack


def twin_state(config: ModelConfig, leaves: Mapping[str, Any]) -> State:
    """The twin's state dict from our parameter tree as tensors [N ...]: differentiable views of them."""
    state = {"embedding": leaves["embedding"]}
    for side in ("encoder", "decoder"):
        layers = _stack_state(leaves[side], getattr(config, f"{side}_layers"))
        state |= {f"{side}.{name}": tensor for name, tensor in layers.items()}
        if config.norm == "pre":
            norm = leaves[f"{side}_norm"]
            state |= {f"{side}.norm.weight": norm["scale"], f"{side}.norm.bias": norm["bias"]}
    return state


def _stack_state(stack: Mapping[str, Any], layers: int) -> State:
    state: State = {}
    attentions = {"self_attn": "self_attention", "multihead_attn": "cross_attention"}
    for i in range(layers):
        prefix = f"layers.{i}"
        for theirs, ours in attentions.items():
            if ours in stack:
                state |= _attention_state(f"{prefix}.{theirs}", stack[ours], i)
        for n in (1, 2):
            state[f"{prefix}.linear{n}.weight"] = stack["feed_forward"][f"w_{n}"][i].T
            state[f"{prefix}.linear{n}.bias"] = stack["feed_forward"][f"b_{n}"][i]
        for n in (1, 2, 3):
            if f"residual_{n}" in stack:
                norm = stack[f"residual_{n}"]["norm"]
                state[f"{prefix}.norm{n}.weight"], state[f"{prefix}.norm{n}.bias"] = norm["scale"][i], norm["bias"][i]
    return state


def _attention_state(name: str, leaves: Mapping[str, Tensor], i: int) -> State:
    """w_q w_k w_v [D H K] as one in_proj [3D D], w_o [H V D] as out_proj [D D]."""
    d_model = leaves["w_q"].shape[1]
    return {
        f"{name}.in_proj_weight": torch.cat([leaves[w][i].reshape(d_model, -1).T for w in ("w_q", "w_k", "w_v")]),
        f"{name}.in_proj_bias": torch.cat([leaves[b][i].reshape(-1) for b in ("b_q", "b_k", "b_v")]),
        f"{name}.out_proj.weight": leaves["w_o"][i].reshape(-1, d_model).T,
        f"{name}.out_proj.bias": leaves["b_o"][i],
    }


def torch_train_step(config: Config, model: TorchTwin) -> Callable[[Batch], dict[str, float]]:
    """An update of `model` by torch.optim.Adam under the paper's schedule as a LambdaLR; returns its numbers."""
    optimizer = torch.optim.Adam(
        model.parameters(), 1.0, betas=(config.optimizer.beta1, config.optimizer.beta2), eps=config.optimizer.epsilon
    )
    warmup, scale = config.optimizer.warmup_steps, config.optimizer.learning_rate_factor * config.model.d_model**-0.5
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda count: scale * min((count + 1) ** -0.5, (count + 1) * warmup**-1.5)
    )

    def step(batch: Batch) -> dict[str, float]:
        optimizer.zero_grad(set_to_none=True)
        loss = smoothed_loss(model(batch), batch.labels, config.train.label_smoothing)
        loss.backward()
        gradients = torch.stack(
            [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
        )
        rate = schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
        return {"loss": loss.item(), "gradient_norm": gradients.norm().item(), "learning_rate": rate}

    return step


def smoothed_loss(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """The mean over real pieces; PyTorch shares label smoothing over all W pieces, as we do."""
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=PAD, label_smoothing=smoothing
    )
