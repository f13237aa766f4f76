"""What may come between: SIGINT and SIGTERM end a run, between updates with a checkpoint, and one command trains in a
folder."""

import contextlib
import os
import pathlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_jax.errors import Interrupted, UserError
from transformer_jax.parallel.mesh import replicated
from transformer_jax.parallel.processes import gathered, leave


class Interruption:
    """A context in which the first signal only sets `asked`; leaving it then exits with 128 + the signal's number.

    A second SIGINT ends at once, as Python does. With several processes, a signal at one of them counts for all.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.asked: int | None = None
        self._say = say
        self._handlers: dict[int, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = number

    def agreed(self) -> bool:
        """Whether a signal has come to any process; all wait for one another and get one answer."""
        self.asked = max(int(asked) for asked in gathered(str(self.asked or 0))) or None
        return self.asked is not None

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._handlers = {n: signal.signal(n, self._handle) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if error is not None:
            return
        if self.agreed():  # one may have come after the last update
            assert self.asked is not None
            self._say(
                f"stopped by {signal.Signals(self.asked).name}: the checkpoint is safe, run the command again to go on"
            )
            sys.exit(128 + self.asked)


class Interruptible:
    """A context in which SIGINT and SIGTERM raise `Interrupted`, but where an `Interruption` has them.

    What learns a vocabulary or compiles a program may run no Python for minutes, in which nothing can be raised. If the
    context has not ended after `patience` seconds, the process does: whatever was under way can be killed.
    """

    def __init__(self, patience: float = 10.0, leave: Callable[[Interrupted], object] = leave) -> None:
        self._patience, self._leave = patience, leave
        self._handlers: dict[int, Any] = {}
        self._asked = False
        self._left = threading.Event()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first, self._asked = not self._asked, True
        # What the first sets off may take a moment: another SIGTERM would only disturb it, a person may insist.
        if first or number == signal.SIGINT:
            raise Interrupted(number)

    def _watch(self) -> None:
        """Python's own handler in C writes the number of each signal at once, whatever the main thread does."""
        while number := self._reading.recv(1):
            # Those for which the loop has another handler get here too.
            if signal.getsignal(number[0]) == self._handle and not self._left.wait(self._patience):
                self._leave(Interrupted(number[0]))

    def __enter__(self) -> "Interruptible":
        if threading.current_thread() is threading.main_thread():
            self._reading, self._writing = socket.socketpair()
            self._writing.setblocking(False)
            self._before = signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
            self._handlers = {n: signal.signal(n, self._handle) for n in (signal.SIGINT, signal.SIGTERM)}
            self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._handlers:
            return
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._before)
        self._left.set()
        self._writing.close()
        self._thread.join()
        self._reading.close()


class Agreement:
    """Lets all processes of a run know of a signal at the same update, though it reaches them at different ones.

    Each update, and each batch of a validation, every process passes its own signal's number in, and reads the greatest
    of the one before, which the devices have found meanwhile: one integer in an all-reduce, and nobody waits for it.
    """

    def __init__(self, mesh: Mesh, interruption: Interruption) -> None:
        self._interruption = interruption
        self._devices = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._count = mesh.size
        self._greatest = jax.jit(lambda numbers: numbers.max(), out_shardings=replicated(mesh))
        self._before: jax.Array | None = None

    def reached(self) -> bool:
        """Whether the run is to stop after this update or batch; every process calls this after each: one answer."""
        if jax.process_count() == 1:
            return self._interruption.asked is not None
        mine = np.array([self._interruption.asked or 0], np.int32)
        numbers = jax.make_array_from_callback((self._count,), self._devices, lambda index: mine)
        before, self._before = self._before, self._greatest(numbers)
        return before is not None and int(before) != 0


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
