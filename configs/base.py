"""The paper's base model on WMT14 (section 5; Table 2).

    python train.py --config configs/base.py --workdir runs/base              English to German, 63.1M parameters
    python train.py --config configs/base.py:fr --workdir runs/base-fr        English to French

Variants: `de` (where none is named) and `fr`; `t2t` and `modern` for the presets of docs/deviations.md in place of the
paper's settings, `fr-t2t` and `fr-modern` for both.

The text is prepared by TensorFlow Datasets (`--data.data-dir` names its folder). The paper trained 12 hours on 8 P100
GPUs and reports 27.3 BLEU (EN-DE) and 38.1 (EN-FR), tokenised and, for EN-DE, compound-split: sacreBLEU lies about a
point lower. It saved every 10 minutes and averaged the last 5 checkpoints; at its 0.4 s a step that is every 1,500
updates.
"""

from dataclasses import replace

from transformer_jax.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from transformer_jax.config_loading import choose_variant
from transformer_jax.presets import with_presets

GERMAN = Config(
    model=ModelConfig(
        encoder_layers=6, decoder_layers=6, d_model=512, d_ff=2048, num_heads=8, dropout=0.1, dtype="bfloat16"
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
        steps=100_000, label_smoothing=0.1, checkpoint_every=1500, keep_checkpoints=5, average_checkpoints=5
    ),
)

FRENCH = replace(
    GERMAN,
    data=replace(GERMAN.data, corpus="tfds:wmt14_translate/fr-en", target_language="fr", vocab_size=32_000),
)


def get_config(variant: str) -> Config:
    """English to German and the paper's settings where no variant is named."""
    return choose_variant(with_presets({"de": GERMAN, "fr": FRENCH}), variant)
