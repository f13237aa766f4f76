"""Rows beside one another and beside the paper's: differences to the first row, the noise, and the verdict."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from transformer_jax.ablation.scores import RowScores, RunScores
from transformer_jax.ablation.table import Printed, Row


@dataclass(frozen=True)
class Measure:
    """Something that both we and the paper measure, in one unit."""

    of_run: Callable[[RunScores], float]
    of_paper: Callable[[Printed], float]
    least: float
    """Differences up to this are none, in the paper, which gives no spread, and here."""
    digits: int
    """Decimals shown of a difference."""


# Differences of it are ratios of perplexities, whatever their size.
NATS = Measure(lambda run: run.nll, lambda printed: math.log(printed.perplexity), least=0.01, digits=3)
BLEU = Measure(lambda run: run.bleu, lambda printed: printed.bleu, least=0.2, digits=2)

Verdict = Literal["yes", "no", "not seen"]


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation; one value has none."""

    mean: float
    deviation: float | None


def spread(values: Iterable[float]) -> Spread:
    """Of at least one value."""
    found = list(values)
    return Spread(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None)


def difference(scores: RowScores, first: RowScores, measure: Measure) -> float | None:
    """Mean of a row less that of the first; None where one of them has no run."""
    if not scores.runs or not first.runs:
        return None
    return statistics.fmean(map(measure.of_run, scores.runs)) - statistics.fmean(map(measure.of_run, first.runs))


def paper_difference(row: Row, first: Row, measure: Measure) -> float | None:
    """The paper's own difference of a row to the first; None where it prints none."""
    if row.printed is None or first.printed is None:
        return None
    return measure.of_paper(row.printed) - measure.of_paper(first.printed)


def noise(table: Sequence[RowScores], measure: Measure) -> float | None:
    """The standard deviation of a run about its row's mean, pooled over the table; None without repeated runs."""
    repeated = [list(map(measure.of_run, scores.runs)) for scores in table if len(scores.runs) > 1]
    freedom = sum(len(values) - 1 for values in repeated)
    squares = sum((len(values) - 1) * statistics.variance(values) for values in repeated)
    return math.sqrt(squares / freedom) if freedom else None


def verdict(scores: RowScores, table: Sequence[RowScores], measure: Measure) -> Verdict | None:
    """Whether a row differs from the first in the direction that the paper prints.

    `yes`: both go the same way, or neither goes anywhere; `not seen`: only the paper's does; `no`: they go apart, or
    only ours does. What is measured here counts from two standard errors on. None where the paper prints nothing, or
    no row has two runs, whose spread tells noise.
    """
    first, deviation = table[0], noise(table, measure)
    here, paper = difference(scores, first, measure), paper_difference(scores.row, first.row, measure)
    if scores is first or here is None or paper is None or deviation is None:
        return None
    resolution = 2 * deviation * math.sqrt(1 / len(scores.runs) + 1 / len(first.runs))
    # The paper prints two or one decimals: 25.8 - 25.6 must not come to more than 0.2 by rounding in binary.
    expected, found = _sign(paper, measure.least + 1e-9), _sign(here, max(measure.least, resolution))
    if found == expected:
        return "yes"
    return "not seen" if found == 0 else "no"


def _sign(value: float, limit: float) -> int:
    return (value > limit) - (value < -limit)
