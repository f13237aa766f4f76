"""The paper's big model on WMT14 (section 5; Table 2).

    python train.py --config configs/big.py --workdir runs/big              English to German, dropout 0.3
    python train.py --config configs/big.py:fr --workdir runs/big-fr        English to French, dropout 0.1

Variants: `de` (where none is named) and `fr`; `t2t` and `modern` for the presets of docs/deviations.md in place of the
paper's settings, `fr-t2t` and `fr-modern` for both.

The paper trained 3.5 days on 8 P100 GPUs and reports 28.4 BLEU (EN-DE) and 41.8 (EN-FR), tokenised and, for EN-DE,
compound-split. It saved every 10 minutes and averaged the last 20 checkpoints; at its 1.0 s a step that is every 600
updates.
"""

from dataclasses import replace

from transformer_jax.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from transformer_jax.config_fields import replace as with_changes
from transformer_jax.config_loading import choose_variant
from transformer_jax.presets import T2T_BIG_FRENCH, with_presets

GERMAN = Config(
    model=ModelConfig(
        encoder_layers=6, decoder_layers=6, d_model=1024, d_ff=4096, num_heads=16, dropout=0.3, dtype="bfloat16"
    ),
    optimizer=OptimizerConfig(beta1=0.9, beta2=0.98, epsilon=1e-9, warmup_steps=4000),
    data=DataConfig(
        corpus="tfds:wmt14_translate/de-en",
        source_language="en",
        target_language="de",
        vocab_size=37_000,
        batch_tokens=25_000,
    ),
    train=TrainConfig(
        steps=300_000, label_smoothing=0.1, checkpoint_every=600, keep_checkpoints=20, average_checkpoints=20
    ),
)

FRENCH = replace(
    GERMAN,
    model=replace(GERMAN.model, dropout=0.1),
    data=replace(GERMAN.data, corpus="tfds:wmt14_translate/fr-en", target_language="fr", vocab_size=32_000),
)


VARIANTS = with_presets({"de": GERMAN, "fr": FRENCH})
VARIANTS["fr-t2t"] = with_changes(VARIANTS["fr-t2t"], T2T_BIG_FRENCH)


def get_config(variant: str) -> Config:
    """English to German and the paper's settings where no variant is named."""
    return choose_variant(VARIANTS, variant)
