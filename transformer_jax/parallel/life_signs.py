"""How a process finds that another is dead which could say nothing: killed, out of memory, its host gone."""

import ctypes
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping

LOOK = 1.0
"""Seconds between two looks at the others."""


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
