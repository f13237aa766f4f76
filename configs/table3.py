"""The variations of Table 3: what each row changes, and nothing else. English to German, scored on newstest2013.

    python train.py --config configs/table3.py:B1 --workdir runs/table3-B1              one row, as the paper ran it
    transformer-jax ablate configs/table3.py --workdir runs/table3                      all of them, on an accelerator
    transformer-jax ablate configs/table3.py --scale demo --seeds 3 --workdir runs/ablation      shrunk, on two cores

The embedding has 40,960 rows, as in the authors' own runs: with it every parameter count that the table prints comes
out, big's 213M excepted (docs/deviations.md). The tokenizer has fewer pieces, and the last rows are never used.
The scores are those of the last checkpoint, as the table's are: nothing is averaged.
"""

from transformer_jax.ablation.table import Printed, Row, row_config
from transformer_jax.config import Config, DataConfig, ModelConfig, TrainConfig

BASE = Config(
    model=ModelConfig(vocab_size=40_960, dtype="bfloat16"),
    data=DataConfig(corpus="tfds:wmt14_translate/de-en", source_language="en", target_language="de"),
    # newstest2013 has 3,000 sentences.
    train=TrainConfig(steps=100_000, average_checkpoints=1, evaluate_sentences=3000),
)


def heads(number: int, width: int) -> dict[str, int]:
    """As many heads, of this d_k and d_v."""
    return {"model.num_heads": number, "model.d_k": width, "model.d_v": width}


def layers(number: int) -> dict[str, int]:
    """N in both stacks."""
    return {"model.encoder_layers": number, "model.decoder_layers": number}


BIG = {
    "model.d_model": 1024, "model.d_ff": 4096, "model.num_heads": 16, "model.dropout": 0.3, "train.steps": 300_000,
}  # fmt: skip

ROWS = (
    Row("base", {}, Printed(4.92, 25.8, 65)),
    Row("A1", heads(1, 512), Printed(5.29, 24.9)),
    Row("A2", heads(4, 128), Printed(5.00, 25.5)),
    Row("A3", heads(16, 32), Printed(4.91, 25.8)),
    Row("A4", heads(32, 16), Printed(5.01, 25.4)),
    Row("B1", {"model.d_k": 16}, Printed(5.16, 25.1, 58)),
    Row("B2", {"model.d_k": 32}, Printed(5.01, 25.4, 60)),
    Row("C1", layers(2), Printed(6.11, 23.7, 36)),
    Row("C2", layers(4), Printed(5.19, 25.3, 50)),
    Row("C3", layers(8), Printed(4.88, 25.5, 80)),
    Row("C4", {"model.d_model": 256, "model.d_k": 32, "model.d_v": 32}, Printed(5.75, 24.5, 28)),
    Row("C5", {"model.d_model": 1024, "model.d_k": 128, "model.d_v": 128}, Printed(4.66, 26.0, 168)),
    Row("C6", {"model.d_ff": 1024}, Printed(5.12, 25.4, 53)),
    Row("C7", {"model.d_ff": 4096}, Printed(4.75, 26.2, 90)),
    Row("D1", {"model.dropout": 0.0}, Printed(5.77, 24.6)),
    Row("D2", {"model.dropout": 0.2}, Printed(4.95, 25.5)),
    Row("D3", {"train.label_smoothing": 0.0}, Printed(4.67, 25.3)),
    Row("D4", {"train.label_smoothing": 0.2}, Printed(5.47, 25.7)),
    Row("E", {"model.positions": "learned"}, Printed(4.92, 25.7)),
    Row("big", BIG, Printed(4.33, 26.4, 213)),
)


def get_config(variant: str) -> Config:
    """A row by its name; rows of the table are numbered within their letter."""
    return row_config(BASE, ROWS, variant)
