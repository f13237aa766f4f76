"""What the runs of an ablation have come to, read from their folders."""

import json
import math
import pathlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
        return math.exp(self.nll)


@dataclass(frozen=True)
class RowScores:
    """The finished runs of a row, and how many are wanted."""

    row: Row
    runs: tuple[RunScores, ...]
    wanted: int


def read_scores(run: Run) -> RunScores | None:
    """The scores of a run; None while it has not come to its last update and been scored."""
    try:
        results = json.loads((run.folder / "results.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    steps = run.config.train.steps
    lines = [line for line in read_metrics(run.folder / "metrics.jsonl") if line.get("dev_nll") is not None]
    if results.get("step") != steps or not lines or lines[-1]["step"] != steps:
        return None
    return RunScores(
        seed=run.seed,
        folder=str(pathlib.Path(run.row.name, run.folder.name)),
        steps=steps,
        nll=lines[-1]["dev_nll"],
        bleu=lines[-1]["dev_bleu"],
        test_bleu=results["scores"]["bleu"] if results["split"] == "test" else None,
        signature=lines[-1]["dev_signature"],
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
