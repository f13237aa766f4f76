"""Folders of checkpoints, and the record in each: which steps there are, and which are complete.

A step's folder is named by its number and holds

    params/               a nested dict of arrays, all that translation needs
    training/             everything else of the state (optimizer, step), absent if there is nothing else
    record/record.json    step, score, the caller's extra values, the shape, dtype and SHA-256 of every array, and the
                          bytes of every other file

`array_files` reads and writes the arrays. The record is written last: a step is complete when it has one.

On a local file system a step is written under another name and then renamed, which is one moment: no numbered folder is
ever incomplete. On an object store (gs://) there are no folders and a rename is a copy of every object, so a step is
written under its own number there, and the record, one object, makes it complete; it is also the first to be removed.
"""

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from etils import epath

from transformer_jax.checkpointing.named_arrays import json_digest
from transformer_jax.errors import UserError

AnyPath = str | os.PathLike[str]

_STEP = re.compile(r"0|[1-9][0-9]*")
_LEFTOVER = re.compile(r"[0-9]+\..*tmp.*")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+:/")


class DamagedError(Exception):
    """A step that cannot be used; the message is the reason, a clause about 'it'."""


def as_folder(path: AnyPath) -> epath.Path:
    """A local folder, absolute as orbax wants it, or one at gs://, which must come as text: pathlib merges its slashes.

    Raises:
        UserError: another kind of remote address; orbax would take it for a local folder of that name.
    """
    text = os.fspath(path)
    if text.startswith("gs://"):
        _look_each_time()
        return epath.Path(text)
    if _SCHEME.match(text):
        raise UserError(f"{text}: runs can be kept in local folders and at gs:// only; choose another place")
    return epath.Path(os.path.abspath(text))


def _look_each_time() -> None:
    """gcsfs answers from listings that it has made before, for ever: what tensorstore or another host has written since
    would not be there. It is told to look each time, before its first use.
    """
    with contextlib.suppress(ImportError):  # which is told of where the address is used
        from fsspec.config import conf

        conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)


def storage_errors() -> tuple[type[Exception], ...]:
    """What reading and writing there raise when they fail: OSError, and for gs:// what gcsfs has beside it."""
    with contextlib.suppress(ImportError):
        from gcsfs.retry import HttpError

        return OSError, HttpError
    return (OSError,)


def is_remote(folder: epath.Path) -> bool:
    """Whether it is on an object store."""
    return str(folder).startswith("gs://")


def numbered_steps(folder: epath.Path) -> list[int]:
    """Every folder that is named as a step, whatever it holds, in the order of the numbers."""
    try:
        return sorted(int(path.name) for path in _entries(folder) if _STEP.fullmatch(path.name) and path.is_dir())
    except storage_errors() as error:
        raise UserError(f"cannot read the checkpoints in {folder}: {error}; name the folder of a run") from error


def _entries(folder: epath.Path) -> list[epath.Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        if is_remote(folder):  # where a folder is there only once it holds something
            return []
        raise


def complete_steps(folder: AnyPath) -> list[int]:
    """Steps that have a record and parameters; their content is not read."""
    root = as_folder(folder)
    return [step for step in numbered_steps(root) if _is_complete(root / str(step))]


def _is_complete(folder: epath.Path) -> bool:
    return (folder / "record" / "record.json").exists() and (folder / "params").is_dir()


def best_step(folder: AnyPath) -> int | None:
    """The step with the highest score, the first of equals; None if no step has a score."""
    root = as_folder(folder)
    scores: dict[int, float] = {}
    for step in complete_steps(root):
        try:
            score = read_record(root / str(step))["score"]
        except DamagedError:
            continue
        if score is not None:
            scores[step] = score
    # max takes the first of equals, and the steps are in order.
    return max(scores, key=scores.__getitem__, default=None)


def candidates(folder: epath.Path, step: int | Literal["best"] | None) -> list[int]:
    """Steps in the order in which to try them; those that look incomplete are among them, to be named."""
    steps = numbered_steps(folder)
    if step is None or step == "best":
        best = best_step(folder) if step == "best" else None
        return sorted(steps, key=lambda candidate: (candidate == best, candidate), reverse=True)
    if step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise UserError(f"no checkpoint of step {step} in {folder} (there are: {there}); choose one of these")
    return [step]


def none_sound(folder: epath.Path, reasons: Mapping[int, str]) -> str:
    """The message for a folder where every step that was tried is damaged."""
    listed = ", ".join(f"step {step}: {reason}" for step, reason in reasons.items())
    return f"no sound checkpoint in {folder} ({listed}); choose another step, or remove these to start again"


def read_record(folder: AnyPath) -> dict[str, Any]:
    """The verified record of one step; raises DamagedError with the reason if it is not as it was written."""
    place = as_folder(folder)
    path = place / "record" / "record.json"
    try:
        record = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        empty = place.is_dir() and not any(place.iterdir())
        raise DamagedError("it is an empty folder" if empty else "it has no record/record.json") from error
    except storage_errors() as error:
        raise UserError(f"cannot read {path}: {error}; make it readable") from error
    except (ValueError, RecursionError) as error:
        raise DamagedError("record/record.json is not as it was written") from error
    if not isinstance(record, dict) or record.pop("sha256", None) != json_digest(record):
        raise DamagedError("record/record.json is not as it was written")
    if str(record["step"]) != place.name:
        raise DamagedError(f"it holds step {record['step']}")
    return record


def write_record(folder: epath.Path, body: Mapping[str, Any]) -> None:
    """Writes the record of one step, with a digest of its own; nothing may be written to the step after it.

    On a local disk all of the step is there when this returns, should the machine lose its power in the next moment.
    """
    body = {**body, "files": {_relative(path, folder): _size(path) for path in _files(folder)}}
    (folder / "record").mkdir(parents=True, exist_ok=True)
    (folder / "record" / "record.json").write_text(json.dumps({"sha256": json_digest(body), **body}))
    if not is_remote(folder):
        for path, _, names in os.walk(folder, topdown=False):
            for name in (*names, ""):
                _to_disk(os.path.join(path, name))


def require_whole(folder: epath.Path, record: Mapping[str, Any], under: str = "") -> None:
    """Compares the sizes of a step's files, or of those under one name, with its record.

    Raises:
        DamagedError: one is absent or of another size.
    """
    for name, size in record.get("files", {}).items():
        if name.startswith(under):
            try:
                found = _size(folder / name)
            except OSError as error:
                raise DamagedError(f"its file {name} is missing") from error
            except storage_errors() as error:
                raise UserError(f"cannot read {folder / name}: {error}; try again") from error
            if found != size:
                raise DamagedError(f"its file {name} has {found} bytes, where {size} were written")


def _to_disk(path: AnyPath) -> None:
    is_folder = os.path.isdir(path)  # of which the names in it are meant
    try:
        descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        if not is_folder:  # not every system does it for folders
            raise


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    for path in folder.iterdir():
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


def _relative(path: epath.Path, folder: epath.Path) -> str:
    return path.relative_to(folder).as_posix()


def _size(path: epath.Path) -> int:
    # epath's stat looks up the owner's name, which a container's user may lack.
    return path.stat().length if is_remote(path) else os.path.getsize(path)


def staging(folder: epath.Path, step: int, *, make_room: bool) -> epath.Path:
    """Where a step is written; what is there already is removed by the process that makes room."""
    place = folder / (str(step) if is_remote(folder) else f"{step}.tmp")
    if make_room:
        remove(place)
    return place


def publish(folder: epath.Path, step: int, body: Mapping[str, Any]) -> None:
    """Makes the step whose arrays are in `staging` complete; one of that number is replaced."""
    place, target = folder / f"{step}.tmp", folder / str(step)
    if is_remote(folder):
        write_record(target, body)
        return
    write_record(place, body)
    replaced = folder / f"{step}.replaced.tmp"
    if target.exists():
        target.rename(replaced)
    place.rename(target)
    _to_disk(folder)
    remove(replaced)


def remove_step(folder: epath.Path, step: int) -> None:
    """Removes a step; killed half-way, it leaves none that lacks some of its files and looks complete."""
    place = folder / str(step)
    if not is_remote(folder):
        place = place.rename(folder / f"{step}.old.tmp")
    remove(place)


def remove(place: epath.Path) -> None:
    """Removes a folder with all that is in it, so far as it is there and can be removed; its record first.

    Of a link only itself.
    """
    if is_remote(place):
        (place / "record" / "record.json").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            place.rmtree(missing_ok=True)
    elif os.path.isdir(place) and not os.path.islink(place):
        shutil.rmtree(place, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            place.unlink()


def remove_unfinished(folder: epath.Path, step: int) -> None:
    """Removes what a save that failed has written."""
    if is_remote(folder):
        if not _is_complete(folder / str(step)):
            remove(folder / str(step))
        return
    # More than once: when one of orbax's writers fails, the others may still be at work for a moment.
    for _ in range(20):
        for path in folder.glob(f"{step}.tmp*"):
            remove(path)
        time.sleep(0.1)
        if not any(folder.glob(f"{step}.tmp*")):
            break


def put_back(folder: epath.Path) -> None:
    """Gives a step its name back that was being replaced when the process was killed, before the new one had it."""
    for path in [] if is_remote(folder) else list(folder.glob("*.replaced.tmp")):
        step = folder / path.name.partition(".")[0]
        if not step.exists():
            path.rename(step)


def leftovers(folder: epath.Path) -> list[epath.Path]:
    """What saves that were cut short have left."""
    if is_remote(folder):
        return [folder / str(step) for step in numbered_steps(folder) if not _is_complete(folder / str(step))]
    return [path for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name)]


def name_aside(folder: epath.Path, step: int, word: str) -> epath.Path:
    """A name that is free, for a step to be renamed to."""
    names = (f"{word}-{step}" + (f"-{count}" if count > 1 else "") for count in range(1, 1_000_000))
    return next(path for name in names if not (path := folder / name).exists())
