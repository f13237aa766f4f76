"""The presets beside the paper's settings, and each choice of `modern` alone: what docs/deviations.md says of them.

    transformer-jax ablate configs/presets.py --scale demo --seeds 3 --workdir runs/presets

The model is the base model; nothing is averaged, so that the last checkpoint is what each row is scored by.
"""

from transformer_jax.ablation.table import Row, row_config
from transformer_jax.config import Config, DataConfig, ModelConfig, TrainConfig
from transformer_jax.presets import MODERN, T2T

BASE = Config(
    model=ModelConfig(dtype="bfloat16"),
    data=DataConfig(corpus="tfds:wmt14_translate/de-en", source_language="en", target_language="de"),
    train=TrainConfig(steps=100_000, average_checkpoints=1, evaluate_sentences=3000),
)

ROWS = (
    Row("paper", {}),
    Row("t2t", T2T),
    Row("modern", MODERN),
    Row("pre-norm", {"model.norm": "pre"}),
    Row("pre-norm-rate", {"model.norm": "pre", "optimizer.learning_rate_factor": 2.0}),
    Row("no-bias", {"model.attention_bias": False}),
    Row("linear", {"optimizer.decay": "linear"}),
    Row("clip", {"optimizer.clip_norm": 1.0}),
)


def get_config(variant: str) -> Config:
    """A row by its name."""
    return row_config(BASE, ROWS, variant)
