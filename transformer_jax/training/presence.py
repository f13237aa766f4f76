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
_GOODBYE = 10.0  # seconds that a store may take to remove the word; it is a courtesy to the next command


@contextlib.contextmanager
def only_trainer(run: epath.Path, say: Callable[[str], None]) -> Iterator[None]:
    """A context that no second command enters for the same run while it goes on there, on whatever machine.

    A word that a killed command left is seen not to change, which takes half a minute. A command that stood still for
    longer, and finds another in its place, ends at once with exit code 2: the run is the other's.

    Raises:
        UserError: another command is training the run, or nothing can be written there.
    """
    mine = Word(run / NAME)
    over = threading.Event()
    thread = threading.Thread(target=_keep_until, args=(over, mine), daemon=True, name="presence")
    try:
        with _blamed_on(run):
            mine.require_alone(say)
            mine.renew()
        thread.start()
        time.sleep(SETTLED)
        with _blamed_on(run):
            taken = mine.taken()
        if taken is not None:
            raise taken
        yield
    finally:
        over.set()
        if thread.is_alive():
            thread.join(_GOODBYE)


@contextlib.contextmanager
def _blamed_on(run: epath.Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # gcsfs has errors of its own, which are no OSError
        raise UserError(
            f"{run}: {NAME} cannot be read or written there ({error}); see that it can, or name another --workdir"
        ) from error


class Word:
    """What this command says of itself in a file that others read."""

    def __init__(self, path: epath.Path) -> None:
        self._path, self._count, self._command = path, 0, uuid.uuid4().hex

    def renew(self) -> None:
        """Writes it, another than before."""
        self._count += 1
        self._path.parent.mkdir(parents=True, exist_ok=True)
        said = {"command": self._command, "host": socket.gethostname(), "process": os.getpid(), "count": self._count}
        self._write(json.dumps(said))

    def _write(self, text: str) -> None:
        self._path.write_text(text)

    def remove(self) -> None:
        """Takes it away."""
        self._path.unlink()

    def taken(self) -> UserError | None:
        """What is wrong, where the word there is another command's."""
        found = self._found()
        # Anything else in its place trains nothing, and is written over.
        if found is None or self._command in found or _said(found) is None:
            return None
        return self._training(found)

    def require_alone(self, say: Callable[[str], None]) -> None:
        """Raises UserError where another command's word changes while one looks."""
        first = self._found()
        if first is None:
            return
        say(f"{self._path} is of {_author(first)}: looking for {WATCHED:.0f} s whether it still trains")
        deadline = time.monotonic() + WATCHED
        while time.monotonic() < deadline:
            time.sleep(WATCHED / 20)
            found = self._found()
            if found is None:
                return
            if found != first:
                raise self._training(found)

    def _training(self, found: str) -> UserError:
        return UserError(
            f"{self._path.parent}: {_author(found)} is training there; wait for its end, or choose another --workdir"
        )

    def _found(self) -> str | None:
        try:
            text: str = self._path.read_bytes().decode(errors="replace")
        except FileNotFoundError:
            return None
        return text


def _said(word: str) -> dict[str, object] | None:
    with contextlib.suppress(ValueError):
        said = json.loads(word)
        if isinstance(said, dict) and {"command", "host", "process"} <= said.keys():
            return said
    return None


def _author(word: str) -> str:
    said = _said(word)
    return f"a command on {said['host']}, process {said['process']}," if said else "an unknown command"


def _keep_until(over: threading.Event, mine: Word) -> None:
    """Renews the word, and in the end takes it away; in a thread, so that a store that hangs keeps nobody waiting."""
    taken = None
    while taken is None and not over.wait(RENEWED):
        # A store that does not answer for a while, in whatever way, is no reason to stop.
        with contextlib.suppress(Exception):
            taken = mine.taken()
            if taken is None:
                mine.renew()
    if taken is None:
        with contextlib.suppress(Exception):
            if mine.taken() is None:
                mine.remove()
        return
    if over.is_set():
        return
    if coordination.client() is not None:
        fail(taken)
    leave_now(2, str(taken))
