"""How a table of the paper's size is shrunk to what two CPU cores train in minutes a row, each row keeping its meaning.

A row of Table 3 means a ratio to the base model: half the key size, a third of the layers, twice the width. The demo's
scale divides all of a kind by one number, so that every ratio stays exact and no two rows fall together:

| field | rule | base | rows of Table 3 |
|---|---|---|---|
| d_model, d_ff, d_k, d_v | / 4 | 128, 512, 16, 16 | A: from 1 x 128 to 32 x 4; B: d_k 4, 8; C: d_model 64, 256 |
| layers (N) | / 2 | 3 | C: 1, 2, 4 |
| heads, rates of dropout, label smoothing, positions, norm | as they are | 8; 0.1; 0.1 | A: 1, 4, 16, 32 |
| updates | / 250 | 400 | big: 1,200 |
| warm-up | / 40 | 100 | |
| peak of the learning rate | x 2.5 | 1.8e-3 | falls with d_model^-0.5, as the paper's |
| text | the embedded office corpus, 3,000 word pieces, 2,048 padded pieces a side in a batch | | |
| search | alpha 1.0, else as it is | beam 4 | |

The warm-up is a longer part of the run than the paper's, a quarter for 4 %: post-norm does not train well without it.
The norm and the form of the schedule stay the row's own.
"""

import dataclasses
from typing import Literal

from transformer_jax.config import Config, ModelConfig, OptimizerConfig
from transformer_jax.errors import UserError

Scale = Literal["demo", "full"]

WIDTHS, LAYERS, UPDATES, WARMUP = 4, 2, 250, 40
# With these the paper's peak, factor (d_model warmup)^-0.5, grows 12.6 times by itself: more than post-norm bears.
RATE_FACTOR = 0.2
PEAK_RATE = RATE_FACTOR * (WIDTHS * WARMUP) ** 0.5


def scaled(config: Config, scale: Scale) -> Config:
    """`config` at a scale: `full` is as it stands, `demo` the mapping above.

    Raises:
        UserError: a size that its divisor does not divide, so that the row would lose its meaning.
    """
    return _demo(config) if scale == "demo" else config


def _demo(config: Config) -> Config:
    steps = max(1, round(config.train.steps / UPDATES))
    return dataclasses.replace(
        config,
        model=_demo_model(config.model),
        optimizer=_demo_optimizer(config.optimizer),
        data=dataclasses.replace(
            config.data, corpus="office", vocab_size=3000, max_length=64, row_length=64, batch_tokens=2048
        ),
        # Sentences here are short: the paper's 0.6 writes too little (docs/results/demo.md).
        search=dataclasses.replace(config.search, length_penalty=1.0, max_source_length=256, batch_tokens=2048),
        train=dataclasses.replace(
            config.train,
            steps=steps,
            evaluate_every=10**6,  # at the end alone
            evaluate_sentences=500,  # the whole dev set
            checkpoint_every=100,
            keep_checkpoints=config.train.average_checkpoints,
            keep_every=None,
        ),
    )


def _demo_model(model: ModelConfig) -> ModelConfig:
    def divided(name: str, by: int) -> int:
        value: int = getattr(model, name)
        if value % by:
            raise UserError(f"model.{name} is {value}, but must be divisible by {by} for the demo's scale")
        return value // by

    return dataclasses.replace(
        model,
        vocab_size=None,
        d_model=divided("d_model", WIDTHS),
        d_ff=divided("d_ff", WIDTHS),
        d_k=None if model.d_k is None else divided("d_k", WIDTHS),
        d_v=None if model.d_v is None else divided("d_v", WIDTHS),
        encoder_layers=divided("encoder_layers", LAYERS),
        decoder_layers=divided("decoder_layers", LAYERS),
        dtype="float32",
        scan_layers=False,  # few layers: they compile in seconds and run a tenth faster than scanned ones
        attention_impl="einsum",
        remat="none",
    )


def _demo_optimizer(optimizer: OptimizerConfig) -> OptimizerConfig:
    rate = optimizer.learning_rate
    return dataclasses.replace(
        optimizer,
        warmup_steps=round(optimizer.warmup_steps / WARMUP),
        learning_rate_factor=optimizer.learning_rate_factor * RATE_FACTOR,
        learning_rate=None if rate is None else rate * PEAK_RATE,
    )
