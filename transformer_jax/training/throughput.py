"""How fast a run goes, between one line of metrics and the next."""

import time

import numpy as np

from transformer_jax.data.batches import PlannedBatch, Shape


class Throughput:
    """Counts pieces and seconds; an update that waited for the compiler counts for no rate.

    Args:
        lengths: [n 2], pieces of each side of the training text.
    """

    def __init__(self, lengths: np.ndarray) -> None:
        self._lengths = lengths
        self._shapes: set[Shape] = set()
        self._begin = time.monotonic()
        self.restart()

    def restart(self) -> None:
        """A new interval begins."""
        self._start = time.monotonic()
        self._real = self._padded = 0

    def count(self, planned: PlannedBatch) -> bool:
        """An update is done; True for the first of a static shape, after which a new interval begins."""
        if planned.shape not in self._shapes:
            self._shapes.add(planned.shape)
            self.restart()
            return True
        self._real += int(self._lengths[planned.examples].sum())
        self._padded += planned.shape.rows * (planned.shape.source_width + planned.shape.target_width)
        return False

    def rates(self) -> dict[str, float]:
        """Source and target pieces a second without padding, and their share of the batch; {} if nothing counts."""
        if not self._padded:
            return {}
        seconds = max(time.monotonic() - self._start, 1e-9)
        return {"tokens_per_second": self._real / seconds, "fill": self._real / self._padded}

    def total(self) -> float:
        """Seconds since this process began to update."""
        return time.monotonic() - self._begin
