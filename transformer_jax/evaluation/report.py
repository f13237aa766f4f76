"""Scores as a page for people and as an object for programs; both say what was measured, on what, and how."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from transformer_jax.evaluation.bleu import Scores
from transformer_jax.evaluation.perplexity import Perplexity

# newstest2014 has two sizes; the paper's numbers are of the whole.
_FILTERED, _WHOLE = 2737, 3003


@dataclass(frozen=True)
class Evaluation:
    """What one system scores on one test set."""

    system: str
    test_set: str
    direction: str
    """Languages: `en-de`; the target alone where the source is not known."""
    scores: Scores
    perplexity: Perplexity | None = None
    """Of the references; None where no model was asked."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the scores' own fields at the top, `perplexity` an object or null."""
        named = {"system": self.system, "test_set": self.test_set, "direction": self.direction}
        perplexity = None if self.perplexity is None else dataclasses.asdict(self.perplexity)
        return {**named, **dataclasses.asdict(self.scores), "perplexity": perplexity}

    def table(self) -> str:
        """A table whose every row names the metric, the test set and the signature: a row may be quoted alone."""
        scores, on = self.scores, f"{self.test_set} {self.direction}, {self.scores.sentences:,} lines"
        rows = [
            ("BLEU, the paper's", scores.paper_bleu, scores.paper_bleu_signature),
            ("sacreBLEU", scores.bleu, scores.bleu_signature),
            ("sacreBLEU, lower-cased", scores.bleu_lowercase, scores.bleu_lowercase_signature),
            ("chrF2", scores.chrf, scores.chrf_signature),
        ]
        lines = [
            f"  {name:24}  {'-' if value is None else f'{value:.2f}':>8}  {on}; {signature or 'not a Moses language'}"
            for name, value, signature in rows
        ]
        return "\n".join([self.system, *lines, *self._perplexities(on), *self._notes()])

    def _perplexities(self, on: str) -> list[str]:
        if self.perplexity is None:
            return []
        counts = ("piece", "pieces"), ("word", "words"), ("character", "characters")
        return [
            f"  {f'perplexity per {one}':24}  {value:8,.3f}  {on}; references, {amount:,} {many}"
            for one, many in counts
            if (value := getattr(self.perplexity, f"per_{one}")) is not None
            for amount in (getattr(self.perplexity, many),)
        ]

    def _notes(self) -> list[str]:
        scores = self.scores
        notes = [
            f"  brevity penalty of sacreBLEU {scores.brevity_penalty:.3f}: {scores.hypothesis_length:,} tokens for "
            f"{scores.reference_length:,} in the references"
        ]
        if scores.sentences == _FILTERED:
            notes.append(
                f"  {_FILTERED:,} lines: newstest2014 filtered has so many; the paper's numbers are of all {_WHOLE:,}"
            )
        return notes
