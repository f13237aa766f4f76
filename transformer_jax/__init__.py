"""The Transformer of "Attention Is All You Need" (Vaswani et al., 2017) in JAX and Flax.

The public names. Those that need JAX are imported when they are first used: configurations and `--help` do without.
"""

import importlib
from typing import TYPE_CHECKING, Any

from transformer_jax.config import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    SearchConfig,
    TrainConfig,
)
from transformer_jax.config_loading import load_config
from transformer_jax.errors import UserError

if TYPE_CHECKING:
    from transformer_jax.data.tokenizer import Tokenizer
    from transformer_jax.model.transformer import Transformer
    from transformer_jax.search.beam import SearchResult, beam_search
    from transformer_jax.translation.results import Score, Translation
    from transformer_jax.translation.translate import make_score, make_translate
    from transformer_jax.translation.translator import Translator

__all__ = [
    "Config",
    "DataConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Score",
    "SearchConfig",
    "SearchResult",
    "Tokenizer",
    "TrainConfig",
    "Transformer",
    "Translation",
    "Translator",
    "UserError",
    "beam_search",
    "load_config",
    "make_score",
    "make_translate",
]

_WHERE = {
    "Score": "translation.results",
    "SearchResult": "search.beam",
    "Tokenizer": "data.tokenizer",
    "Transformer": "model.transformer",
    "Translation": "translation.results",
    "Translator": "translation.translator",
    "beam_search": "search.beam",
    "make_score": "translation.translate",
    "make_translate": "translation.translate",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
