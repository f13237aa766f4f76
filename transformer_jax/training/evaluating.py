"""Validation in the loop, and the scores at a run's end: real beam search, never teacher-forced."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from transformer_jax.evaluation.bleu import Scores, corpus_scores
from transformer_jax.training.placing import place
from transformer_jax.training.preparation import Prepared
from transformer_jax.training.reporting import Reporter
from transformer_jax.training.throughput import VALIDATING
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

    def as_metrics(self) -> dict[str, Any]:
        """For a line of metrics.jsonl."""
        return {
            "dev_nll": self.nll,
            "dev_perplexity": self.perplexity,
            "dev_bleu": self.scores.bleu,
            "dev_chrf": self.scores.chrf,
            "dev_sentences": self.scores.sentences,
            "dev_signature": self.scores.bleu_signature,
        }


class _GivenUp(Exception):
    """A validation is not worth going on with."""


def validate(
    prepared: Prepared,
    params: Any,
    mesh: Mesh,
    loss_step: Callable[..., Any],
    report: Reporter,
    to_stop: Callable[[], bool],
) -> Validation | None:
    """Loss over the dev set, BLEU and chrF of its first train.evaluate_sentences sentences.

    Every process calls this; devices share out the rows, and each process gets all sums and all translations. None: the
    run is to stop, as `to_stop` has said in all of them. It is asked after each batch.
    """
    config = prepared.config
    pairs = list(itertools.islice(prepared.splits.dev, config.train.evaluate_sentences))

    def after_batch(done: int) -> None:
        if to_stop():
            raise _GivenUp
        on_progress(done)

    try:
        with report.counting(VALIDATING, len(pairs)) as on_progress:
            nll = _dev_nll(prepared, params, mesh, loss_step, lambda: after_batch(0))
            translator = Translator(config, params, prepared.tokenizer, warn=report.warn, mesh=mesh)
            _, scores = score_pairs(translator, pairs, config.data.target_language, after_batch)
    except _GivenUp:
        return None
    return Validation(nll, scores)


def _dev_nll(
    prepared: Prepared, params: Any, mesh: Mesh, loss_step: Callable[..., Any], after_batch: Callable[[], None]
) -> float:
    sums: list[Any] = []
    for planned in prepared.dev_plan.epoch(-1):
        sums.append(loss_step(params, place(planned, prepared.dev, mesh)))
        # One batch stays in flight: were all, a run could not stop before they are done.
        jax.block_until_ready(sums[-2:-1])
        after_batch()
    nll, tokens = (sum(float(part[name]) for part in jax.device_get(sums)) for name in ("nll", "tokens"))
    return nll / tokens


def score_pairs(
    translator: Translator,
    pairs: Sequence[tuple[str, str]],
    target_language: str,
    on_progress: Callable[[int], None],
) -> tuple[list[str], Scores]:
    """Translations of the first sides, and their scores against the second; `on_progress` as for `Translator`."""
    found = translator.translate([source for source, _ in pairs], on_progress=on_progress)
    hypotheses = [translations[0].text for translations in found]
    return hypotheses, corpus_scores(hypotheses, [target for _, target in pairs], target_language)
