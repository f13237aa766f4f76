"""What the search's arrays mean to people: text, scores, word pieces."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from transformer_jax.data.tokenizer import UNK_ID, Tokenizer
from transformer_jax.search.beam import SearchResult


@dataclass(frozen=True)
class Translation:
    """One translation of a line."""

    text: str
    """Plain text; nothing in it ends a line."""
    score: float
    """sum(token_scores) / ((5 + n) / 6)^length_penalty, where n = len(token_scores) counts EOS."""
    tokens: tuple[str, ...]
    """Its word pieces, EOS not among them; '▁' is a space."""
    token_scores: tuple[float, ...]
    """log P (natural) of each piece given those before it and, last, of EOS where the translation is finished."""
    finished: bool
    """Whether it ends with EOS; False if it was cut at its maximal length, source pieces + max_extra_length."""


@dataclass(frozen=True)
class Score:
    """What a model gives to a translation that is there already."""

    log_prob: float
    """log P(target | source), natural: the sum over all pieces, EOS included."""
    tokens: tuple[tuple[str, float], ...]
    """Each word piece of the target and its log P given those before it; EOS, '</s>', is the last."""


BLANK = Translation("", 0.0, (), (), True)
"""The translation of a blank line; no model is asked."""


def translations_of(result: SearchResult, sentences: int, tokenizer: Tokenizer) -> list[list[Translation]]:
    """The hypotheses of the first `sentences` rows of a result of numpy arrays, the best first."""
    hypotheses = [
        (row, beam)
        for row in range(sentences)
        for beam in np.flatnonzero(result.lengths[row])  # a slot of length 0 holds no hypothesis
    ]
    ids = [
        result.tokens[row, beam, : result.lengths[row, beam] - result.finished[row, beam]].tolist()
        for row, beam in hypotheses
    ]
    found: list[list[Translation]] = [[] for _ in range(sentences)]
    for (row, beam), pieces, text in zip(hypotheses, ids, tokenizer.decode(ids), strict=True):
        found[row].append(
            Translation(
                text=text,
                score=float(result.scores[row, beam]),
                tokens=tuple(piece_names(pieces, tokenizer)),
                token_scores=tuple(result.token_log_probs[row, beam, : result.lengths[row, beam]].tolist()),
                finished=bool(result.finished[row, beam]),
            )
        )
    return found


def piece_names(ids: Iterable[int], tokenizer: Tokenizer) -> list[str]:
    """Word pieces by name; those of an embedding's spare rows by that of the unknown piece."""
    return tokenizer.pieces([i if i < tokenizer.size else UNK_ID for i in ids])
