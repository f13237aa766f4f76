"""Contenders timed in turn, so that a change of the machine's load meets all of them."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


def seconds_in_turn(contenders: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call; every round calls every contender once. They are expected to be warm."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of each contender's seconds."""
    return {name: statistics.median(values) for name, values in times.items()}
