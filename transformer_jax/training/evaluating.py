"""Validation in the loop, and the scores at a run's end: real beam search, never teacher-forced."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from transformer_jax.data.batches import assemble
from transformer_jax.evaluation.bleu import Scores, corpus_scores
from transformer_jax.ops.masks import BOS
from transformer_jax.training.preparation import Prepared
from transformer_jax.translation.translator import Translator


@dataclass(frozen=True)
class Validation:
    """One validation on the dev set."""

    nll: float
    """Nats for each target piece, EOS counted, no smoothing; over the dev pairs of at most data.max_length pieces."""
    scores: Scores

    @property
    def perplexity(self) -> float:
        """exp(nll): per word piece, as in Table 3."""
        return math.exp(min(self.nll, 700.0))


def validate(prepared: Prepared, params: Any, loss_step: Callable[..., Any], warn: Callable[[str], None]) -> Validation:
    """Loss over the dev set, BLEU and chrF of its first train.evaluate_sentences sentences."""
    sums = [loss_step(params, assemble(planned, prepared.dev, bos_id=BOS)) for planned in prepared.dev_plan.epoch(-1)]
    nll, tokens = (sum(float(part[name]) for part in jax.device_get(sums)) for name in ("nll", "tokens"))
    config = prepared.config
    pairs = list(itertools.islice(prepared.splits.dev, config.train.evaluate_sentences))
    translator = Translator(config, params, prepared.tokenizer, warn=warn)
    _, scores = score_pairs(translator, pairs, config.data.target_language)
    return Validation(nll / tokens, scores)


def score_pairs(
    translator: Translator, pairs: Sequence[tuple[str, str]], target_language: str
) -> tuple[list[str], Scores]:
    """Translations of the first sides, and their scores against the second."""
    hypotheses = translator([source for source, _ in pairs])
    return hypotheses, corpus_scores(hypotheses, [target for _, target in pairs], target_language)
