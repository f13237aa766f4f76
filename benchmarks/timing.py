"""Contenders timed in turn, so that a change of the machine's load meets all of them."""

import contextlib
import multiprocessing
import multiprocessing.connection
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
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


@contextlib.contextmanager
def in_its_own_process(make: Callable[..., Callable[[], Any]], *arguments: Any) -> Iterator[Callable[[], Any]]:
    """A contender that `make(*arguments)` sets up in a fresh process, for those that set something for all of one.

    Each call runs it there once and returns what it returned.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, make, arguments), daemon=True)
    process.start()
    there.close()

    def run() -> Any:
        here.send(True)
        return here.recv()

    try:
        yield run
    finally:
        here.close()
        process.join()


def _serve(
    calls: multiprocessing.connection.Connection, make: Callable[..., Callable[[], Any]], arguments: tuple[Any, ...]
) -> None:
    run = make(*arguments)
    with contextlib.suppress(EOFError):
        while calls.recv():
            calls.send(run())
