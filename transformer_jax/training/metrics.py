"""What a run writes down: metrics.jsonl, TensorBoard events, and the picture of both."""

import json
import math
import os
import pathlib
import threading
from collections.abc import Mapping
from typing import Any

from transformer_jax.errors import UserError
from transformer_jax.training.preparation import write_whole


class MetricsWriter:
    """Appends to a run's metrics.jsonl and TensorBoard events; lines after the step gone on from are dropped first."""

    def __init__(self, workdir: pathlib.Path, step: int) -> None:
        self._path = workdir / "metrics.jsonl"
        lines = read_metrics(self._path)
        self.dropped = max((line["step"] for line in lines if line["step"] > step), default=None)
        """The last update of which a line was dropped."""
        write_whole(self._path, "".join(_as_line(line) for line in lines if line["step"] <= step))
        self._file = self._path.open("a", encoding="utf-8")
        self._events: Any = None
        self._waiting: list[tuple[int, dict[str, float]]] = []
        # Importing tensorboardX takes up to 3 s, which the first steps need not wait for.
        self._opening = threading.Thread(target=self._open_events, args=(workdir, step), daemon=True)
        self._opening.start()

    def _open_events(self, workdir: pathlib.Path, step: int) -> None:
        from tensorboardX import SummaryWriter

        self._events = SummaryWriter(str(workdir), purge_step=step + 1 if step else None)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """One line, on disk at once. Numbers also go to TensorBoard under their names."""
        try:
            self._file.write(_as_line({"step": step, **values}))
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"{self._path}: cannot be written ({error.strerror or error}); free space there, then run again"
            ) from error
        # tensorboardX warns of numbers that are not finite; metrics.jsonl has null for them.
        numbers = {k: v for k, v in values.items() if isinstance(v, int | float) and math.isfinite(v)}
        self._waiting.append((step, numbers))
        if not self._opening.is_alive():
            self._flush()

    def sync(self) -> None:
        """Puts all lines on the disk, before the checkpoint that follows them: a machine may fail, too."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise UserError(f"{self._path}: cannot be written ({error.strerror or error}); free space there") from error

    def _flush(self) -> None:
        for step, numbers in self._waiting:
            for name, value in numbers.items():
                self._events.add_scalar(name, value, step)
        self._waiting.clear()

    def close(self) -> None:
        """Writes out what is left."""
        self._file.close()
        self._opening.join()
        self._flush()
        self._events.close()


def _as_line(values: Mapping[str, Any]) -> str:
    # JSON has no NaN.
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    return json.dumps(finite, ensure_ascii=False) + "\n"


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; none where it is missing. A last line cut short by a kill is left out."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


def draw_curve(workdir: pathlib.Path) -> pathlib.Path | None:
    """curve.png: loss of training and dev text, and BLEU and chrF against updates.

    None where there are no metrics.
    """
    lines = read_metrics(workdir / "metrics.jsonl")
    if not lines:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    losses, scores = figure.subplots(1, 2)
    for axes, series in (
        (losses, {"loss": ("train, smoothed labels", "C0-"), "nll": ("train", "C1-"), "dev_nll": ("dev", "C3o-")}),
        (scores, {"dev_bleu": ("BLEU", "C0o-"), "dev_chrf": ("chrF2", "C2o-")}),
    ):
        for name, (label, style) in series.items():
            points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), style, label=label, markersize=4, linewidth=1.2)
        axes.set_xlabel("updates")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    losses.set_ylabel("nats per target piece")
    scores.set_ylabel("dev set, beam search, percent")
    scores.set_ylim(bottom=0)
    path = workdir / "curve.png"
    figure.savefig(path, dpi=110)
    return path
