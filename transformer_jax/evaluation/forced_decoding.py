"""What a model thinks of the references themselves."""

from collections.abc import Callable, Sequence

from transformer_jax.errors import UserError
from transformer_jax.evaluation.perplexity import Perplexity, perplexity
from transformer_jax.translation.translator import Translator


def reference_perplexity(
    translator: Translator, pairs: Sequence[tuple[str, str]], warn: Callable[[str], None]
) -> Perplexity | None:
    """Perplexity of the second sides given the first, every pair counted, one pass over each.

    None, with a warning, where a reference is longer than the model's learned positions.
    """
    sources, references = [source for source, _ in pairs], [reference for _, reference in pairs]
    try:
        scores = translator.score(sources, references)
    except UserError as error:
        warn(f"no perplexity: {error}")
        return None
    nats = -sum(score.log_prob for score in scores)
    pieces = sum(len(score.tokens) for score in scores)
    return perplexity(nats, pieces, references, translator.config.data.target_language)
