"""The variations of Table 3: what each row changes, and nothing else. English to German, scored on newstest2013.

    python train.py --config configs/table3.py:B1 --workdir runs/table3-B1

The embedding has 40,960 rows, as in the authors' own runs: with it every parameter count that the table prints comes
out, big's 213M excepted (docs/deviations.md). The tokenizer has fewer pieces, and the last rows are never used.
The scores are those of the last checkpoint, as the table's are: nothing is averaged.
"""

from dataclasses import replace

from transformer_jax.config import Config, DataConfig, ModelConfig, TrainConfig
from transformer_jax.config_loading import choose_variant

BASE = Config(
    model=ModelConfig(vocab_size=40_960, dtype="bfloat16"),
    data=DataConfig(corpus="tfds:wmt14_translate/de-en", source_language="en", target_language="de"),
    train=TrainConfig(steps=100_000, average_checkpoints=1),
)


def model(**changes: object) -> Config:
    """BASE with these fields of its model changed."""
    return replace(BASE, model=replace(BASE.model, **changes))


def train(**changes: object) -> Config:
    """BASE with these fields of its training changed."""
    return replace(BASE, train=replace(BASE.train, **changes))


VARIANTS = {
    "base": BASE,
    "A1": model(num_heads=1, d_k=512, d_v=512),
    "A2": model(num_heads=4, d_k=128, d_v=128),
    "A3": model(num_heads=16, d_k=32, d_v=32),
    "A4": model(num_heads=32, d_k=16, d_v=16),
    "B1": model(d_k=16),
    "B2": model(d_k=32),
    "C1": model(encoder_layers=2, decoder_layers=2),
    "C2": model(encoder_layers=4, decoder_layers=4),
    "C3": model(encoder_layers=8, decoder_layers=8),
    "C4": model(d_model=256, d_k=32, d_v=32),
    "C5": model(d_model=1024, d_k=128, d_v=128),
    "C6": model(d_ff=1024),
    "C7": model(d_ff=4096),
    "D1": model(dropout=0.0),
    "D2": model(dropout=0.2),
    "D3": train(label_smoothing=0.0),
    "D4": train(label_smoothing=0.2),
    "E": model(positions="learned"),
    "big": replace(model(d_model=1024, d_ff=4096, num_heads=16, dropout=0.3), train=replace(BASE.train, steps=300_000)),
}


def get_config(variant: str) -> Config:
    """A row by the name that it has in `VARIANTS`; rows of the table are numbered within their letter."""
    return choose_variant(VARIANTS, variant)
