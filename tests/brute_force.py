"""Oracles of search, in plain Python and float64: all hypotheses, and a beam search that never stops early."""

import math
from collections.abc import Callable
from typing import NamedTuple

NextLogProbs = Callable[[tuple[int, ...]], list[float]]
"""log P of each word piece after the given pieces (without BOS)."""


class Hypothesis(NamedTuple):
    """A sequence that ended with EOS, or was cut at the maximal length."""

    score: float
    log_prob: float
    tokens: tuple[int, ...]
    finished: bool


def score(log_prob: float, length: int, alpha: float) -> float:
    """The documented score; `length` counts EOS."""
    return log_prob / ((5 + length) / 6) ** alpha


def all_hypotheses(
    next_log_probs: NextLogProbs, max_length: int, alpha: float, eos: int, prefix: tuple[int, ...] = ()
) -> list[Hypothesis]:
    """Every hypothesis of non-zero probability that begins with `prefix`, the best first."""
    found: list[Hypothesis] = []

    def visit(tokens: tuple[int, ...], log_prob: float) -> None:
        finished = tokens[-1:] == (eos,)
        if finished or len(tokens) == max_length:
            found.append(Hypothesis(score(log_prob, len(tokens), alpha), log_prob, tokens, finished))
            return
        for token, token_log_prob in enumerate(next_log_probs(tokens)):
            is_forced_away = len(tokens) < len(prefix) and token != prefix[len(tokens)]
            if not is_forced_away and token_log_prob > -math.inf:
                visit((*tokens, token), log_prob + token_log_prob)

    visit((), 0.0)
    return sorted(found, reverse=True)


def full_length_beam_search(
    next_log_probs: NextLogProbs, max_length: int, alpha: float, eos: int, beam_size: int
) -> list[Hypothesis]:
    """Beam search by its definition, 2 * beam_size candidates a step, run to `max_length` whatever has ended."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ended: list[Hypothesis] = []
    for length in range(1, max_length + 1):
        extensions = [
            (log_prob + token_log_prob, (*tokens, token))
            for log_prob, tokens in live
            for token, token_log_prob in enumerate(next_log_probs(tokens))
        ]
        candidates = sorted(extensions, reverse=True)[: 2 * beam_size]
        live = []
        for log_prob, tokens in candidates:
            if tokens[-1] == eos or length == max_length:
                ended.append(Hypothesis(score(log_prob, length, alpha), log_prob, tokens, tokens[-1] == eos))
            elif len(live) < beam_size:
                live.append((log_prob, tokens))
    return sorted(ended, reverse=True)[:beam_size]
