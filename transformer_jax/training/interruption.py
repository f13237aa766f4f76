"""SIGINT and SIGTERM end a run between two updates, after its checkpoint is safe."""

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class Interruption:
    """A context in which the first signal only sets `asked`; leaving it then exits with 128 + the signal's number.

    A second SIGINT ends at once, as Python does.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.asked: int | None = None
        self._say = say
        self._handlers: dict[int, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = number

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._handlers = {n: signal.signal(n, self._handle) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if error is None and self.asked is not None:
            self._say(
                f"stopped by {signal.Signals(self.asked).name}: the checkpoint is safe, run the command again to go on"
            )
            sys.exit(128 + self.asked)
