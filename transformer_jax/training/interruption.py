"""What may come between: SIGINT and SIGTERM end a run between two updates, and one process trains in a folder."""

import contextlib
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from transformer_jax.errors import UserError


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


@contextlib.contextmanager
def only_process(workdir: pathlib.Path) -> Iterator[None]:
    """A context that no second process enters for the same folder; the end of a process, however it comes, leaves it.

    The folder is made, and taken away again where nothing was put into it.

    A scheduler may start a run again while the first is still at its last checkpoint, which the second would take for
    the leftover of a killed save. Where a file system cannot lock, nothing is held.

    Raises:
        UserError: another process is in it.
    """
    if sys.platform == "win32":  # which has no flock
        yield
        return
    import fcntl

    try:
        workdir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(workdir, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{workdir}: cannot be a run's folder ({error.strerror}); choose another --workdir") from error
    try:
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"{workdir}: another process is training there; wait for its end, or choose another --workdir"
                ) from None
        yield
    finally:
        with contextlib.suppress(OSError):
            workdir.rmdir()  # which takes empty folders only
        os.close(descriptor)
