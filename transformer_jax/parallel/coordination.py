"""jax's coordination service, which process 0 runs: there processes leave words for one another, beside arrays."""

import socket
import time
from typing import Any

import jax

from transformer_jax.errors import UserError

LOOK = 1.0
"""Seconds between two looks at the others."""
ROOT = "transformer_jax"
"""Begins every key."""


def service() -> Any:
    """What jax knows of its processes: `client` (None in a run of one), `process_id`, `coordinator_address`."""
    # jax has no public door to it; waiting there has a time limit and uses no device.
    from jax._src import distributed

    return distributed.global_state


def client() -> Any:
    """The door to the words: key_value_set, key_value_try_get, ..."""
    return service().client


def value(key: str, what: str, timeout: float) -> str:
    """What another process has set or will set; this one can be interrupted meanwhile.

    Raises:
        UserError: `timeout` seconds have passed; `what` is what it waited for.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            found: str = client().blocking_key_value_get(key, int(1000 * LOOK))
            return found
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        if time.monotonic() > deadline:
            raise UserError(f"{me()} waited {timeout:.0f} s for another ({what}): look at the others' messages")


def me() -> str:
    """This process by its number and host."""
    return f"process {jax.process_index()} ({socket.gethostname()})"
