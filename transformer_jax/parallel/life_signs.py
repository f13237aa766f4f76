"""How a process finds that another is dead which could say nothing: killed, out of memory, its host gone."""

import contextlib
import ctypes
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping

import jax

from transformer_jax.parallel import coordination
from transformer_jax.parallel.coordination import LOOK
from transformer_jax.parallel.ending import AGAIN, announce, leave_if_another_failed, leave_now

_ALIVE = f"{coordination.ROOT}/alive"


class Silence:
    """How long each of the others has given no sign of life, by looks at what each counts up while it lives.

    A time without looks counts as that of two: who stood still, or swapped, knows nothing of the others meanwhile.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._looked = clock, clock()
        self._signs: dict[int, str] = {}
        self._seconds: dict[int, float] = {}

    def longest(self, signs: Mapping[int, str]) -> tuple[int, float]:
        """Of a look at the signs of all others: the process that is silent for longest, and for how many seconds."""
        now = self._clock()
        passed, self._looked = min(now - self._looked, 2 * LOOK), now
        for process, sign in signs.items():
            silent = self._signs.get(process, sign) == sign
            self._seconds[process] = self._seconds.get(process, 0.0) + passed if silent else 0.0
        self._signs = dict(signs)
        process = max(self._seconds, key=lambda each: self._seconds[each])
        return process, self._seconds[process]


class Watch:
    """Ends this process when another has failed or is dead: the main thread may be waiting for it in a collective.

    Process 0 looks at the signs of life of all others; these look at whether it answers, in a thread that asks nothing
    of it and so cannot be kept waiting.
    """

    def __init__(self, peer_timeout: float) -> None:
        self._timeout = peer_timeout
        # jax.process_index would wait for the devices of all processes.
        self._process: int = coordination.service().process_id
        self._over = threading.Event()
        self._answers = 0
        looks = [self._talk] if self._process == 0 else [self._talk, self._listen]
        self._threads = [threading.Thread(target=look, daemon=True, name="other processes") for look in looks]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Before this process takes its leave."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _talk(self) -> None:
        silence = Silence()
        while not self._over.wait(LOOK):
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                leave_if_another_failed()
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                if self._process == 0:
                    self._leave_if_silent(silence, _signs_of_life())
                else:
                    count = self._answers + 1
                    coordination.client().key_value_set(f"{_ALIVE}/{self._process}", str(count), allow_overwrite=True)
                    self._answers = count

    def _listen(self) -> None:
        silence, before = Silence(), 0
        while not self._over.wait(LOOK):
            self._leave_if_silent(silence, {0: str(self._answers)})
            if self._answers == before and is_refused(coordination.service().coordinator_address):
                leave_now(1, f"process {self._process} lost process 0, which said nothing; {AGAIN}")
            before = self._answers

    def _leave_if_silent(self, silence: Silence, signs: Mapping[int, str]) -> None:
        process, seconds = silence.longest(signs)
        if seconds < self._timeout:
            return
        message = f"process {process} gave no sign of life for {seconds:.0f} s (--peer-timeout); {AGAIN}"
        if self._process == 0:
            announce(1, message)
        leave_now(1, message)


def _signs_of_life() -> dict[int, str]:
    """What each process but the first has counted up to."""
    found = {int(key.rpartition("/")[2]): count for key, count in coordination.client().key_value_dir_get(f"{_ALIVE}/")}
    return {process: found.get(process, "") for process in range(1, coordination.service().num_processes)}


def is_refused(address: str) -> bool:
    """Whether nothing listens at HOST:PORT any more, though its host answers; a process that stands still listens."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=LOOK).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def delay_aborts() -> None:
    """Gives this process six seconds between a call of C's abort and its end.

    jax aborts at once when the connection to process 0 breaks, from a thread of its own that runs no Python; so there
    would be nobody to say in a sentence what has happened. Other aborts end as ever, so much later.
    """
    if sys.platform == "win32":
        return
    library = ctypes.CDLL(None)
    library.signal.argtypes, library.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    # A handler is called with the signal's number, which is 6, and sleep takes seconds: no Python, and no lock.
    library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))
