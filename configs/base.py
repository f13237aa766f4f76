"""The paper's base model on WMT14 (section 5; Table 2).

    python train.py --config configs/base.py --workdir runs/base              English to German, 65.1M parameters
    python train.py --config configs/base.py:en-fr --workdir runs/base-fr     English to French

The text is prepared by TensorFlow Datasets (`--data.data-dir` names its folder). The paper trained 12 hours on 8 P100
GPUs and reports 27.3 BLEU (EN-DE) and 38.1 (EN-FR), tokenised and, for EN-DE, compound-split: sacreBLEU lies about a
point lower. It saved every 10 minutes and averaged the last 5 checkpoints; at its 0.4 s a step that is every 1,500
updates.
"""

from dataclasses import replace

from transformer_jax.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from transformer_jax.config_loading import choose_variant

EN_DE = Config(
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

EN_FR = replace(
    EN_DE,
    data=replace(EN_DE.data, corpus="tfds:wmt14_translate/fr-en", target_language="fr", vocab_size=32_000),
)


def get_config(variant: str) -> Config:
    """English to German where no variant is named."""
    return choose_variant({"": EN_DE, "en-de": EN_DE, "en-fr": EN_FR}, variant)
