"""The figure of an ablation: how far each row lies from the first, here and in the paper."""

import pathlib
from collections.abc import Sequence
from typing import Any

from transformer_jax.ablation.comparison import BLEU, NATS, Measure, difference, paper_difference, spread
from transformer_jax.ablation.scores import RowScores


def draw(table: Sequence[RowScores], path: pathlib.Path) -> None:
    """Writes a PNG: differences of dev loss (worse is up) and dev BLEU (better is up) to the first row.

    Dots with bars are means here ± the standard deviation over seeds, faint dots the seeds, diamonds the paper's.
    """
    from matplotlib.figure import Figure

    names = [scores.row.name for scores in table]
    figure = Figure(figsize=(max(6.0, 0.5 * len(table) + 1.5), 6.5), layout="constrained")
    losses, bleus = figure.subplots(2, 1, sharex=True)
    _panel(losses, table, NATS, "dev loss, nats for each piece\n(up is worse)")
    _panel(bleus, table, BLEU, "dev BLEU\n(up is better)")
    bleus.set_xticks(range(len(table)), names, rotation=0 if max(map(len, names)) < 5 else 30)
    handles, labels = losses.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=2, frameon=False)
    figure.suptitle(f"difference to {names[0]}", x=0.01, ha="left", fontsize="medium")
    figure.savefig(path, dpi=110)


def _panel(axes: Any, table: Sequence[RowScores], measure: Measure, label: str) -> None:
    first = table[0]
    axes.axhline(0.0, color="0.6", linewidth=0.8)
    for at, scores in enumerate(table):
        if at and scores.row.name[0] != table[at - 1].row.name[0]:  # Table 3 names its groups by letters
            axes.axvline(at - 0.5, color="0.9", linewidth=0.8, zorder=0)
    paper = [(x, paper_difference(scores.row, first.row, measure)) for x, scores in enumerate(table)]
    printed = [(x + 0.15, value) for x, value in paper if value is not None]
    if printed:
        axes.plot(*zip(*printed, strict=True), "D", color="C1", fillstyle="none", label="the paper")
    means = [(x - 0.1, scores, difference(scores, first, measure)) for x, scores in enumerate(table)]
    here = [(x, mean, _values(scores, measure)) for x, scores, mean in means if mean is not None]
    for x, mean, values in here:
        offset = mean - spread(values).mean
        axes.plot([x] * len(values), [value + offset for value in values], "o", color="C0", alpha=0.3, markersize=3)
    axes.errorbar(
        [x for x, _, _ in here],
        [mean for _, mean, _ in here],
        [spread(values).deviation or 0.0 for _, _, values in here],
        fmt="o", color="C0", markersize=5, capsize=2, label="here, mean ± standard deviation",
    )  # fmt: skip
    axes.set_ylabel(label)
    axes.grid(axis="y", alpha=0.3)


def _values(scores: RowScores, measure: Measure) -> list[float]:
    return [measure.of_run(run) for run in scores.runs]
