"""The paper's settings in two later forms: `T2T` and `MODERN`, as changed fields by dotted name.

The paper's own are the defaults of `config`. Each difference and its reason is a row of docs/deviations.md.
"""

from collections.abc import Mapping

from transformer_jax.config import Config
from transformer_jax.config_fields import replace

T2T: Mapping[str, object] = {
    "model.norm": "pre",
    "model.attention_dropout": 0.1,
    "model.relu_dropout": 0.1,
    "model.attention_bias": False,
    "model.sinusoids": "concatenated",
    "optimizer.beta2": 0.997,
    "optimizer.warmup_steps": 8000,
    "optimizer.learning_rate_factor": 2.0,
    "search.max_extra_length": 100,
}
"""What the authors' tensor2tensor came to (transformer_base_v3)."""

T2T_BIG_FRENCH: Mapping[str, object] = {"model.d_ff": 8192, "model.tied_embeddings": False}
"""And, beside `T2T`, for the big model from English to French (transformer_big_enfr)."""

MODERN: Mapping[str, object] = {
    "model.norm": "pre",
    "model.attention_bias": False,
    "optimizer.learning_rate_factor": 2.0,
    "optimizer.decay": "linear",
    "optimizer.clip_norm": 1.0,
    "train.average_checkpoints": 1,
}
"""What one would choose today for the same parameters and the same text."""


def with_presets(languages: Mapping[str, Config]) -> dict[str, Config]:
    """Variants of a configuration file from the paper's, by language: `de`, `de-t2t`, `de-modern`, and so on.

    The first language needs no name: `""` is the paper's, `t2t` and `modern` are the presets.
    """
    variants = {}
    for number, (language, config) in enumerate(languages.items()):
        forms = {"": config, "t2t": replace(config, T2T), "modern": replace(config, MODERN)}
        for preset, form in forms.items():
            variants["-".join(filter(None, (language, preset)))] = form
            if number == 0:
                variants[preset] = form
    return variants
