"""English to German on the larger embedded corpus: sentences of 3 to 50 words, an hour or so on two CPU cores.

    python train.py --config configs/office.py --workdir runs/office

What it comes to is in docs/results/office.md.
"""

from transformer_jax.config import Config, DataConfig, ModelConfig, OptimizerConfig, SearchConfig, TrainConfig
from transformer_jax.config_loading import choose_variant

GERMAN = Config(
    model=ModelConfig(
        encoder_layers=3, decoder_layers=3, d_model=192, d_ff=768, num_heads=6, norm="pre", scan_layers=False,
    ),
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=200, decay="linear"),
    data=DataConfig(
        corpus="office_long", source_language="en", target_language="de", vocab_size=5000, max_length=96, row_length=96,
        batch_tokens=2048,
    ),
    search=SearchConfig(beam_size=4, length_penalty=1.0, max_source_length=256, batch_tokens=2048),
    train=TrainConfig(
        steps=4000, evaluate_every=500, evaluate_sentences=100, checkpoint_every=100, keep_checkpoints=5,
        average_checkpoints=5, log_every=20,
    ),
)  # fmt: skip


def get_config(variant: str) -> Config:
    """English to German, the only variant."""
    return choose_variant({"": GERMAN}, variant)
