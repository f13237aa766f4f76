"""How fast a run goes, between one line of metrics and the next, and where its time and memory went."""

import sys
import time
from collections.abc import Mapping

import jax
import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.data.batches import PlannedBatch
from transformer_jax.model.flops import TRAINING, forward_flops

# Phases of a run, as `training.reporting.Reporter` names them.
DATA, DEVICE, SAVING = "waiting for data", "waiting for the device", "saving a checkpoint"
COMPILING, VALIDATING = "compiling", "validating"


class Throughput:
    """Counts pieces, floating-point operations and seconds; an update that waited for the compiler counts for no rate.

    Args:
        lengths: [n 2], pieces of each side of the training text.
        model: with vocab_size.
        seconds: of each phase so far (`Reporter.seconds`).
        peak: FLOP/s of all devices together, where it is known.
        row_multiple: batches are filled up with empty rows to a multiple of it.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        model: ModelConfig,
        seconds: Mapping[str, float],
        *,
        peak: float | None = None,
        row_multiple: int = 1,
    ) -> None:
        self._lengths, self._model, self._seconds = lengths, model, seconds
        self._peak, self._row_multiple = peak, row_multiple
        self._begin = time.monotonic()
        self.restart()

    def restart(self) -> None:
        """A new interval begins."""
        self._start, self._before = time.monotonic(), dict(self._seconds)
        self._real = self._padded = self._flops = 0

    def count(self, planned: PlannedBatch) -> None:
        """An update is done."""
        pieces = self._lengths[planned.examples].astype(np.int64)
        self._real += int(pieces.sum())
        self._padded += planned.shape.filled_up(self._row_multiple).cells
        if self._peak is not None:
            self._flops += TRAINING * int(forward_flops(self._model, pieces[:, 0], pieces[:, 1]).sum())

    def rates(self) -> dict[str, float]:
        """The interval's numbers; {} if no update counts.

        `tokens_per_second` are source and target pieces without padding, `fill` their share of the batch. The interval
        but for validations and compilation is split into `data_seconds`, `device_seconds` and `checkpoint_seconds`, in
        which Python waited for these, and `host_seconds`, all else. What the device does while Python works shows in
        none of them: data, checkpoints and host work cost nothing as long as `device_seconds` are above 0.
        `model_flops_utilisation` is the products' share of what the devices could do in bfloat16, padding and what
        remat does again not counted; only where the devices' peak is known.
        """
        if not self._padded:
            return {}
        seconds = max(time.monotonic() - self._start - self._spent(COMPILING) - self._spent(VALIDATING), 1e-9)
        split = {
            "data_seconds": self._spent(DATA),
            "device_seconds": self._spent(DEVICE),
            "checkpoint_seconds": self._spent(SAVING),
        }
        rates = {
            "tokens_per_second": self._real / seconds,
            "fill": self._real / self._padded,
            **split,
            "host_seconds": max(seconds - sum(split.values()), 0.0),
        }
        return rates if self._peak is None else rates | {"model_flops_utilisation": self._flops / seconds / self._peak}

    def _spent(self, phase: str) -> float:
        return self._seconds.get(phase, 0.0) - self._before.get(phase, 0.0)

    def total(self) -> float:
        """Seconds since this process began to update."""
        return time.monotonic() - self._begin


def memory() -> dict[str, int]:
    """`host_peak_bytes`, the most that this process had in the machine's memory, and `device_peak_bytes`, the most that
    arrays and programs had on any of its devices, where the devices say (a CPU does not)."""
    found: dict[str, int] = {}
    if sys.platform != "win32":
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        found["host_peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    peaks = [stats["peak_bytes_in_use"] for device in jax.local_devices() if (stats := device.memory_stats())]
    return found | ({"device_peak_bytes": max(peaks)} if peaks else {})
