"""A small model on the embedded corpus of office texts: the whole way from text to BLEU on a laptop's CPU.

    make demo      or      python train.py --config configs/demo.py --workdir runs/demo

Variants: `de` (where none is named), `fr`, `zh`: English into that language.
"""

from dataclasses import replace

from transformer_jax.config import Config, DataConfig, ModelConfig, OptimizerConfig, SearchConfig, TrainConfig
from transformer_jax.config_loading import choose_variant

GERMAN = Config(
    model=ModelConfig(encoder_layers=3, decoder_layers=3, d_model=256, d_ff=1024, num_heads=4, dropout=0.1),
    # The paper's schedule at d_model 256 and 4,000 steps of warm-up peaks at 0.001; a short run warms up in 400.
    optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=400),
    data=DataConfig(corpus="office", source_language="en", target_language="de", vocab_size=8000, batch_tokens=2048),
    search=SearchConfig(batch_tokens=1024),
    train=TrainConfig(
        steps=1500,
        evaluate_every=500,
        evaluate_sentences=100,
        checkpoint_every=100,
        keep_checkpoints=5,
        average_checkpoints=5,
        log_every=10,
    ),
)


def get_config(variant: str) -> Config:
    """English to German where no variant is named."""
    variants = {"": GERMAN, "de": GERMAN}
    for language in ("fr", "zh"):
        variants[language] = replace(GERMAN, data=replace(GERMAN.data, target_language=language))
    return choose_variant(variants, variant)
