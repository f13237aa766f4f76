"""Where long work is done: a folder that one process has to itself, and the processors it may use."""

import contextlib
import logging
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator

_log = logging.getLogger(__name__)


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def alone_in(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Makes `folder`, or takes what a killed process has left of it, and keeps other processes out: they wait.

    The end of a process, however it comes, lets the next one in. Where a file system cannot lock, a new folder of its
    own is given in place of `folder`, and removed at the end: safe, but nothing is there to go on from. A folder into
    which nothing was put, or that was emptied, is removed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    while True:
        # Whoever ends may take the folder away between any two of these calls: each of them allows for it.
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
        try:
            descriptor = _locked(folder)
        except FileNotFoundError:
            continue
        if descriptor is None:
            _remove_if_empty(folder)
            with tempfile.TemporaryDirectory(
                prefix=f"{folder.name}-", dir=folder.parent, ignore_cleanup_errors=True
            ) as own:
                private = pathlib.Path(own, "private")
                private.mkdir()
                yield private
            return
        try:
            if _is_at(folder, descriptor):
                yield folder
                if _is_at(folder, descriptor):  # else it was moved away, and what is there now is another's
                    _remove_if_empty(folder)
                return
        finally:
            os.close(descriptor)


def _is_at(folder: pathlib.Path, descriptor: int) -> bool:
    """Whether what was opened is still there: who was waited for may have moved it away, and with it the lock."""
    try:
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    except FileNotFoundError:
        return False


def _remove_if_empty(folder: pathlib.Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _locked(folder: pathlib.Path) -> int | None:
    """An open descriptor that holds the lock; None where nothing can be locked.

    Raises:
        FileNotFoundError: the folder is gone.
    """
    if sys.platform == "win32":  # which has no flock
        return None
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.warning("%s: another process is at the same work; waiting for it", folder.parent)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
