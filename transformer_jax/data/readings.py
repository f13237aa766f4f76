"""What earlier commands found in files: gigabytes of own text are read to check and digest them once, not each time.

A finding is kept by the file's real path and believed while size, modification time, change time and inode are those
that it had before and after it was read. Times younger than two seconds are not believed: a file system's clock may not
tell a change in the same instant (git calls such an entry racy). The change time cannot be set back by ordinary means.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

from transformer_jax.errors import UserError

_YOUNG = 2.0  # seconds


class Readings:
    """Findings in memory, and in a file where `save` is called.

    Args:
        path: the file of findings; it need not exist, and a damaged one counts as none.
    """

    def __init__(self, path: pathlib.Path | None = None) -> None:
        self._path = path
        self._changed = False
        self._found: dict[str, dict[str, Any]] = {}
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(path.read_text(encoding="utf-8")) if path is not None else {}
            if isinstance(found, dict) and all(isinstance(entry, dict) for entry in found.values()):
                self._found = found

    def of_file(self, kind: str, path: str, find: Callable[[], Any]) -> Any:
        """What `find` gives for a file, a JSON value; `kind` tells different questions about one file apart.

        Raises:
            UserError: the file cannot be read; and what `find` raises.
        """
        key = os.path.realpath(path)
        begin, now = _state(path), time.time()
        entry = self._found.get(key, {})
        if entry.get("state") == begin and kind in entry:
            return entry[kind]
        value = find()
        if _state(path) == begin and max(begin[1:3]) / 1e9 < now - _YOUNG:
            if entry.get("state") != begin:
                entry = self._found[key] = {"state": begin}
            entry[kind] = value
            self._changed = True
        return value

    def of_content(self, key: str, find: Callable[[], Any]) -> Any:
        """What `find` gives, a JSON value; `key` must change whenever that could change."""
        entry = self._found.setdefault("content", {})
        if key not in entry:
            entry[key] = find()
            self._changed = True
        return entry[key]

    def digest(self, path: str) -> str:
        """SHA-256 of a file's bytes, hexadecimal.

        Raises:
            UserError: it cannot be read.
        """
        return str(self.of_file("sha256", path, lambda: _file_digest(path)))

    def save(self) -> None:
        """Writes the file if there is anything new; a folder that cannot be written only means reading again."""
        if self._path is None or not self._changed:
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            unfinished.write_text(json.dumps(self._found), encoding="utf-8")
            unfinished.replace(self._path)
            self._changed = False


def _state(path: str) -> list[int]:
    try:
        stat = os.stat(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _file_digest(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be read ({error.strerror or error}); check the path")
