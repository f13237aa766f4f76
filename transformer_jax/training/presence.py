"""Which command trains a run at gs://, where nothing can be locked: a word there, renewed for as long as it does."""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator

from etils import epath

from transformer_jax.errors import UserError
from transformer_jax.parallel import coordination
from transformer_jax.parallel.ending import fail, leave_now

NAME = "training.json"
"""The word's, in the run's folder."""
RENEWED = 10.0
"""Seconds after which the word of a command that lives is another."""
WATCHED = 30.0
"""Seconds for which a word stays as it is when its command is no more."""
SETTLED = 2.0
"""Seconds in which two commands that began together have both written."""

_TROUBLE = (OSError, ValueError)  # the store does not answer, or there is something else in its place


@contextlib.contextmanager
def only_trainer(run: epath.Path, say: Callable[[str], None]) -> Iterator[None]:
    """A context that no second command enters for the same run while it goes on there, on whatever machine.

    A word that a killed command left is seen not to change, which takes half a minute. A command that stood still for
    longer, and finds another in its place, ends at once with exit code 2: the run is the other's.

    Raises:
        UserError: another command is training the run, or nothing can be written there.
    """
    mine = Word(run / NAME)
    try:
        mine.require_alone(say)
        mine.renew()
        time.sleep(SETTLED)
        taken = mine.taken()
    except _TROUBLE as error:
        raise UserError(f"{run}: cannot be written ({error}); see that it can, or name another --workdir") from error
    if taken is not None:
        raise taken
    over = threading.Event()
    thread = threading.Thread(target=_renew_until, args=(over, mine), daemon=True, name="presence")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        with contextlib.suppress(*_TROUBLE):
            if mine.taken() is None:
                mine.remove()


class Word:
    """What this command says of itself in a file that others read."""

    def __init__(self, path: epath.Path) -> None:
        self._path, self._count = path, 0
        self._author = {"command": uuid.uuid4().hex, "host": socket.gethostname(), "process": os.getpid()}

    def renew(self) -> None:
        """Writes it, another than before."""
        self._count += 1
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._author | {"count": self._count}))

    def remove(self) -> None:
        """Takes it away."""
        self._path.unlink()

    def taken(self) -> UserError | None:
        """What is wrong, where the word there is another command's."""
        found = self._found()
        if found is None or found["command"] == self._author["command"]:
            return None
        return self._training(found)

    def require_alone(self, say: Callable[[str], None]) -> None:
        """Raises UserError where another command's word changes while one looks."""
        first = self._found()
        if first is None:
            return
        say(
            f"{self._path} is of a command on {first['host']}, process {first['process']}: "
            f"looking for {WATCHED:.0f} s whether it still trains"
        )
        deadline = time.monotonic() + WATCHED
        while time.monotonic() < deadline:
            time.sleep(WATCHED / 20)
            found = self._found()
            if found is None:
                return
            if found != first:
                raise self._training(found)

    def _training(self, found: dict[str, object]) -> UserError:
        return UserError(
            f"{self._path.parent}: a command on {found['host']}, process {found['process']}, is training there; "
            "wait for its end, or choose another --workdir"
        )

    def _found(self) -> dict[str, object] | None:
        if not self._path.exists():
            return None
        found: dict[str, object] = json.loads(self._path.read_text())
        return found


def _renew_until(over: threading.Event, mine: Word) -> None:
    while not over.wait(RENEWED):
        # A store that does not answer for a while, in whatever way, is no reason to stop.
        with contextlib.suppress(Exception):
            taken = mine.taken()
            if taken is None:
                mine.renew()
            else:
                break
    else:
        return
    if coordination.client() is not None:
        fail(taken)
    leave_now(2, str(taken))
