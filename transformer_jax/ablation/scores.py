"""What the runs of an ablation have come to, read from their folders."""

import json
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformer_jax.ablation.experiment import Run
from transformer_jax.ablation.table import Row
from transformer_jax.training.metrics import read_metrics


@dataclass(frozen=True)
class RunScores:
    """A finished run."""

    seed: int
    folder: str
    steps: int
    nll: float
    """Nats for each piece of the dev set, EOS counted, without label smoothing."""
    bleu: float
    """sacreBLEU of the dev set, percent."""
    test_bleu: float | None
    """sacreBLEU of the test set; None where the corpus has none."""
    signature: str
    """sacreBLEU's."""
    parameters: int
    seconds: float
    """Of training, compilation counted."""
    device: str

    @property
    def perplexity(self) -> float:
        """Per word piece, as Table 3 counts it."""
        return math.exp(min(self.nll, 700.0))  # of a row that diverged


@dataclass(frozen=True)
class RowScores:
    """The finished runs of a row, and how many are wanted."""

    row: Row
    runs: tuple[RunScores, ...]
    wanted: int


def read_scores(run: Run) -> RunScores | None:
    """The scores of a run; None while it has not come to its last update and been scored, or its files are damaged."""
    steps = run.config.train.steps
    lines = [line for line in read_metrics(run.folder / "metrics.jsonl") if line.get("dev_nll") is not None]
    if not lines or lines[-1]["step"] != steps:
        return None
    try:
        results = json.loads((run.folder / "results.json").read_text(encoding="utf-8"))
        return _scores(run, steps, lines[-1], results) if results["step"] == steps else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _scores(run: Run, steps: int, validation: Mapping[str, Any], results: Mapping[str, Any]) -> RunScores:
    return RunScores(
        seed=run.seed,
        folder=str(pathlib.Path(run.row.name, run.folder.name)),
        steps=steps,
        nll=float(validation["dev_nll"]),
        bleu=float(validation["dev_bleu"]),
        test_bleu=results["scores"]["bleu"] if results["split"] == "test" else None,
        signature=validation["dev_signature"],
        parameters=results["parameters"],
        seconds=results["training_seconds"],
        device=results["device"],
    )


def collect(rows: Sequence[Row], runs: Iterable[Run]) -> list[RowScores]:
    """Every row, with the runs that are finished."""
    planned = list(runs)
    found = []
    for row in rows:
        own = [run for run in planned if run.row is row]
        scores = [score for run in own if (score := read_scores(run)) is not None]
        found.append(RowScores(row, tuple(scores), len(own)))
    return found
