"""A small model on the embedded corpus of office texts: the whole way from text to BLEU on two CPU cores in minutes.

    make demo      or      python train.py --config configs/demo.py --workdir runs/demo

Variants: `de`, `fr` and `zh` from English (`de` where none is named), `de-en`, `fr-en` and `zh-en` into it. What was
tried to choose these numbers is in docs/results/demo.md.
"""

from dataclasses import replace

from transformer_jax.config import Config, DataConfig, ModelConfig, OptimizerConfig, SearchConfig, TrainConfig
from transformer_jax.config_loading import choose_variant

GERMAN = Config(
    # Two layers unrolled: they compile in 4 s and run a tenth faster than scanned ones.
    model=ModelConfig(
        encoder_layers=2, decoder_layers=2, d_model=128, d_ff=512, num_heads=4, dropout=0.05, norm="pre",
        attention_bias=False, scan_layers=False,
    ),
    optimizer=OptimizerConfig(learning_rate=7e-3, warmup_steps=100, decay="linear"),
    data=DataConfig(
        corpus="office", source_language="en", target_language="de", vocab_size=3000, max_length=64, row_length=64,
        batch_tokens=2048,
    ),
    # Sentences here are short: the paper's 0.6 writes too little.
    search=SearchConfig(beam_size=4, length_penalty=1.2, max_source_length=256, batch_tokens=2048),
    train=TrainConfig(
        steps=850, evaluate_every=250, evaluate_sentences=100, checkpoint_every=50, keep_checkpoints=3,
        average_checkpoints=3, log_every=10,
    ),
)  # fmt: skip


def get_config(variant: str) -> Config:
    """English to German where no variant is named."""
    variants = {"": GERMAN}
    for language in ("de", "fr", "zh"):
        variants[language] = replace(GERMAN, data=replace(GERMAN.data, target_language=language))
        variants[f"{language}-en"] = replace(
            GERMAN, data=replace(GERMAN.data, source_language=language, target_language="en")
        )
    return choose_variant(variants, variant)
