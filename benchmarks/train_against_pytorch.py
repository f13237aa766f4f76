"""Training throughput beside PyTorch: the same model, batch and dropout, in turn, on this machine's CPU.

    python benchmarks/train_against_pytorch.py [--widths 128 256 512] [--rounds 5] [--compile]

PyTorch is given its own best layers: torch.nn.Transformer (its fused qkv projection, scaled_dot_product_attention,
flattened linears), one tied embedding, cross_entropy with label smoothing, fused Adam. Ratios are of the median times
of the rounds; each round times every contender once, so that a change of the machine's load meets all of them. Each has
a process of its own, as ours runs with the settings for memory that train.py makes (`transformer_jax.heap`), and
PyTorch once as a script has it, once with the same settings.
"""

import argparse
import contextlib
from collections.abc import Callable

import jax
import numpy as np
import torch
from timing import in_its_own_process, medians, seconds_in_turn
from torch import nn

from transformer_jax.config import Config, DataConfig, ModelConfig, TrainConfig
from transformer_jax.data.batches import Batch
from transformer_jax.heap import keep_freed_blocks
from transformer_jax.parallel.mesh import make_mesh
from transformer_jax.training.state import init_state, make_optimizer
from transformer_jax.training.step import make_train_step

LAYERS, VOCABULARY, ROWS, LENGTH, DROPOUT = 3, 8000, 64, 32, 0.1
THREADS = 2


class TorchModel(nn.Module):
    """nn.Transformer between a tied embedding and its transpose; dropout as in the paper's base model."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(VOCABULARY, d_model) * d_model**-0.5)
        self.register_buffer("positions", torch.randn(LENGTH, d_model))
        self.dropout = nn.Dropout(DROPOUT)
        self.transformer = nn.Transformer(
            d_model, heads, LAYERS, LAYERS, 4 * d_model, DROPOUT, batch_first=True, norm_first=False
        )
        # nn.Transformer adds a norm after each stack, and drops attention weights and hidden units: the paper does not.
        self.transformer.encoder.norm = self.transformer.decoder.norm = None
        for module in self.transformer.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
            if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                module.dropout.p = 0.0
        self.register_buffer("causal", torch.triu(torch.full((LENGTH, LENGTH), float("-inf")), 1))

    def forward(self, source: torch.Tensor, target: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss."""
        scale = self.embedding.shape[1] ** 0.5
        x, y = (self.dropout(self.embedding[t] * scale + self.positions) for t in (source, target))
        out = self.transformer(x, y, tgt_mask=self.causal, tgt_is_causal=True)
        logits = out.flatten(0, 1) @ self.embedding.T
        return nn.functional.cross_entropy(logits, labels.flatten(), label_smoothing=0.1)


def torch_step(d_model: int, tokens: list[np.ndarray], compiled: bool, keep: bool) -> Callable[[], float]:
    """One update by PyTorch; returns the loss."""
    if keep:
        keep_freed_blocks()
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    model = TorchModel(d_model, heads_of(d_model))
    optimizer = torch.optim.Adam(model.parameters(), 1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True)
    forward = torch.compile(model) if compiled else model
    source, target, labels = (torch.from_numpy(t.astype(np.int64)) for t in tokens)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = forward(source, target, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def jax_step(d_model: int, tokens: list[np.ndarray]) -> Callable[[], float]:
    """One update of ours: the very function that train.py runs, segment masks and metrics included."""
    keep_freed_blocks()
    config = Config(
        model=ModelConfig(
            vocab_size=VOCABULARY, encoder_layers=LAYERS, decoder_layers=LAYERS, d_model=d_model, d_ff=4 * d_model,
            num_heads=heads_of(d_model), dropout=DROPOUT, scan_layers=False,
        ),
        data=DataConfig(batch_tokens=ROWS * LENGTH, max_length=LENGTH),
        train=TrainConfig(),
    )  # fmt: skip
    optimizer = make_optimizer(config.optimizer, d_model, config.train.steps)
    state = [init_state(config.model, optimizer, 0)]
    step_function = make_train_step(config, optimizer, make_mesh(config.mesh))
    source, target, labels = tokens
    segments = np.ones_like(source)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), source.shape)
    batch = Batch(source, segments, positions, target, labels, segments, positions)

    def step() -> float:
        state[0], metrics = step_function(state[0], batch)
        return float(metrics["loss"])

    return step


def heads_of(d_model: int) -> int:
    """Heads of 64, and at least 4."""
    return max(4, d_model // 64)


def main() -> None:
    """Prints a table of ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compile", action="store_true", help="torch.compile as well (needs a C++ compiler)")
    arguments = parser.parse_args()
    generator = np.random.default_rng(0)
    print(f"{LAYERS}+{LAYERS} layers, {VOCABULARY} pieces, {ROWS} x {LENGTH} pieces a side, dropout {DROPOUT}")
    print(f"jax {jax.__version__}, torch {torch.__version__}, {THREADS} threads")
    for d_model in arguments.widths:
        tokens = [generator.integers(4, VOCABULARY, (ROWS, LENGTH)).astype(np.int32) for _ in range(3)]
        made = {
            "ours": (jax_step, d_model, tokens),
            "torch eager": (torch_step, d_model, tokens, False, False),
            "torch, same memory": (torch_step, d_model, tokens, False, True),
        }
        if arguments.compile:
            made["torch.compile"] = (torch_step, d_model, tokens, True, False)
        with contextlib.ExitStack() as processes:
            steps = {name: processes.enter_context(in_its_own_process(*how)) for name, how in made.items()}
            for step in steps.values():
                for _ in range(3):
                    step()
            times = seconds_in_turn(steps, arguments.rounds)
        found = medians(times)
        for name, median in found.items():
            rate = 2 * ROWS * LENGTH / median
            print(
                f"d={d_model:4} {name:18} {median * 1e3:8.0f} ms (best {min(times[name]) * 1e3:.0f})"
                f"  {rate:8,.0f} tokens/s   ours is {median / found['ours']:.2f} times as fast", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
