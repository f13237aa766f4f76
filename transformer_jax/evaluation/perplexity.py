"""Perplexity: per word piece, as Table 3 counts it, and per word and per character.

Perplexities per piece compare only models that have the same pieces; those per word and per character compare any.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from transformer_jax.evaluation.language import language_of

# Written without spaces between words.
_WITHOUT_WORDS = frozenset({"ja", "km", "lo", "my", "th", "zh"})


@dataclass(frozen=True)
class Perplexity:
    """exp(nats / count), nats being -log P(reference | source) summed over all sentences, without label smoothing.

    A sentence's end is predicted too: it counts as one piece, one word and one character.
    """

    per_piece: float
    """As in Table 3."""
    per_word: float | None
    """Words are what white space parts; None in languages written without it."""
    per_character: float
    """Characters are Unicode code points."""
    nats: float
    pieces: int
    words: int | None
    characters: int


def perplexity(nats: float, pieces: int, references: Sequence[str], target_language: str) -> Perplexity:
    """From a sum of nats over `references`, which have so many word pieces, ends counted."""
    words = None
    if language_of(target_language) not in _WITHOUT_WORDS:
        words = sum(len(reference.split()) + 1 for reference in references)
    characters = sum(len(reference) + 1 for reference in references)
    return Perplexity(
        per_piece=_exp(nats / pieces),
        per_word=None if words is None else _exp(nats / words),
        per_character=_exp(nats / characters),
        nats=nats,
        pieces=pieces,
        words=words,
        characters=characters,
    )


def _exp(nats: float) -> float:
    # An untrained model's nats for a word may be beyond what a double's exponential holds.
    return math.exp(min(nats, 700.0))
