"""How several processes end together: each tells the others why, and goes without waiting for them."""

import atexit
import contextlib
import json
import os
import re
import sys
import time
from typing import NoReturn

import jax

from transformer_jax.errors import Interrupted, UserError
from transformer_jax.parallel import coordination

AGAIN = "run the command again in all processes to go on from the newest checkpoint"

_FAILED = f"{coordination.ROOT}/failed"
_SEEN = f"{coordination.ROOT}/seen"


def leave_if_another_failed() -> None:
    """Ends this process as another has ended which said why; raises JaxRuntimeError where none has."""
    failure = json.loads(coordination.client().key_value_try_get(_FAILED))
    if failure["process"] != jax.process_index():
        _acknowledge()
        leave_now(failure["code"], f"{failure['name']} has ended: {failure['error']}")


def _acknowledge() -> None:
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        coordination.client().key_value_set(f"{_SEEN}/{jax.process_index()}", "")


def fail(error: BaseException) -> None:
    """Tells the other processes, and sees to it that this one does not wait for them when it ends."""
    if isinstance(error, UserError):
        announce(2, str(error))
    elif isinstance(error, Interrupted):
        announce(error.code, str(error))
    else:
        announce(130 if isinstance(error, KeyboardInterrupt) else 1, f"{type(error).__name__}: {_first_line(error)}")


def fail_by_loss(error: BaseException) -> None:
    """As `fail`, where the error is that another process is gone."""
    time.sleep(3 * coordination.LOOK)  # in which the watcher ends this process, if the other one has said why it ended
    print(
        f"error: {coordination.me()} lost another process, which said nothing ({_first_line(error)}); {AGAIN}",
        file=sys.stderr,
    )
    announce(1, f"it lost another process, which said nothing; {AGAIN}")


def is_loss(error: BaseException) -> bool:
    """Whether an error is what a collective raises when another process is gone."""
    return re.search("Gloo|coordination|heartbeat|UNAVAILABLE|Connection (closed|reset)", str(error)) is not None


def announce(code: int, text: str) -> None:
    """Ends the other processes, and in the end this one, with an exit code and a sentence that says why."""
    # Registered last, it is called first: jax's own waits for the others' goodbye.
    atexit.register(leave_now, code, None)
    failure = {"process": jax.process_index(), "name": coordination.me(), "code": code, "error": " ".join(text.split())}
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        coordination.client().key_value_set(_FAILED, json.dumps(failure))
    _acknowledge()
    if jax.process_index():
        return
    # With process 0 the service goes: the others must have read by then.
    deadline = time.monotonic() + 3 * coordination.LOOK
    while time.monotonic() < deadline:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if len(coordination.client().key_value_dir_get(f"{_SEEN}/")) == jax.process_count():
                return
        time.sleep(coordination.LOOK / 10)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def leave_now(code: int, message: str | None) -> NoReturn:
    """Ends this process whatever its threads do, and without a goodbye to the others."""
    if message is not None:
        print(f"error: {message}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
