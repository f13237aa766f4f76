"""The folders of checkpoints, and the files in each: the only importer of orbax.

A step's folder is named by its number and holds

    params/               a nested dict of arrays, all that translation needs
    training/             everything else of the state (optimizer, step), absent if there is nothing else
    record/record.json    step, score, the caller's extra values, and the shape, dtype and SHA-256 of every array

orbax reads a flipped bit as a number like any other, and a missing part of an array as zeros: hence the digests.
"""

import json
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from transformer_jax.checkpointing.named_arrays import PyTree, entry, find_misfits, json_digest, named_leaves, nest
from transformer_jax.errors import UserError

_STEP = re.compile(r"0|[1-9][0-9]*")
# orbax numbers the operations of a process: two saves at once, in two threads, take each other's folders for their own.
_ONE_AT_A_TIME = threading.Lock()


class DamagedError(Exception):
    """A step that cannot be used; the message is the reason, a clause about 'it'."""


def numbered_steps(folder: Path) -> list[int]:
    """Every folder that is named as a step, whatever it holds, in the order of the numbers."""
    try:
        return sorted(int(path.name) for path in folder.iterdir() if _STEP.fullmatch(path.name) and path.is_dir())
    except OSError as error:
        raise UserError(f"cannot read the checkpoints in {folder}: {error}; name the folder of a run") from error


def complete_steps(folder: Path) -> list[int]:
    """Steps that have a record and parameters; their content is not read."""
    return [
        step
        for step in numbered_steps(folder)
        if (folder / str(step) / "params").is_dir() and (folder / str(step) / "record" / "record.json").is_file()
    ]


def best_step(folder: Path) -> int | None:
    """The step with the highest score, the first of equals; None if no step has a score."""
    scores: dict[int, float] = {}
    for step in complete_steps(folder):
        try:
            score = read_record(folder / str(step))["score"]
        except DamagedError:
            continue
        if score is not None:
            scores[step] = score
    # max takes the first of equals, and the steps are in order.
    return max(scores, key=scores.__getitem__, default=None)


def candidates(folder: Path, step: int | Literal["best"] | None) -> list[int]:
    """Steps in the order in which to try them; those that look incomplete are among them, to be named."""
    steps = numbered_steps(folder)
    if step is None or step == "best":
        best = best_step(folder) if step == "best" else None
        return sorted(steps, key=lambda candidate: (candidate == best, candidate), reverse=True)
    if step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise UserError(f"no checkpoint of step {step} in {folder} (there are: {there}); choose one of these")
    return [step]


def none_sound(folder: Path, reasons: Mapping[int, str]) -> str:
    """The message for a folder where every step that was tried is damaged."""
    listed = ", ".join(f"step {step}: {reason}" for step, reason in reasons.items())
    return f"no sound checkpoint in {folder} ({listed}); choose another step, or remove these to start again"


def read_step(
    folder: Path, wanted: Mapping[str, PyTree] | None, *, params_only: bool = False
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The record and the arrays of one step, both verified; the fit is checked before any array is read."""
    record = read_record(folder)
    stored = {name: found for name, found in record["arrays"].items() if not params_only or _item(name) == "params"}
    misfits = [] if wanted is None else find_misfits(stored, wanted)
    if misfits:
        others = f" (and {len(misfits) - 1} more differ)" if len(misfits) > 1 else ""
        raise UserError(
            f"checkpoint {folder} is of another configuration: {misfits[0]}{others}; "
            "use the config.json that it was trained with, or another folder"
        )
    arrays = _read_arrays(folder, stored)
    for name, found in stored.items():
        if entry(arrays[name]) != found:
            raise DamagedError(f"{name} is not as it was written")
    return record, arrays


def read_record(folder: Path) -> dict[str, Any]:
    """The verified record of one step; raises DamagedError with the reason if it is not as it was written."""
    path = folder / "record" / "record.json"
    try:
        record = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        empty = folder.is_dir() and not any(folder.iterdir())
        raise DamagedError("it is an empty folder" if empty else "it has no record/record.json") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error}; make it readable") from error
    except (ValueError, RecursionError) as error:
        raise DamagedError("record/record.json is not as it was written") from error
    if not isinstance(record, dict) or record.pop("sha256", None) != json_digest(record):
        raise DamagedError("record/record.json is not as it was written")
    if str(record["step"]) != folder.name:
        raise DamagedError(f"it holds step {record['step']}")
    return record


def _item(name: str) -> str:
    return "params" if name.startswith("params/") else "training"


def _items(leaves: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Nested dicts by orbax item."""
    grouped: dict[str, dict[str, Any]] = {}
    for name, leaf in leaves.items():
        grouped.setdefault(_item(name), {})[name.removeprefix("params/")] = leaf
    return {item: nest(group) for item, group in grouped.items()}


def write_step(folder: Path, values: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    """Writes a step to a folder that must not exist; it appears when it is whole. Every process must call this."""
    import orbax.checkpoint as ocp

    # Naming the processes makes orbax wait at the coordination service; its default is a collective on the devices,
    # which must not run in this thread beside training's.
    processes = set(range(jax.process_count())) if jax.process_count() > 1 else None
    options = ocp.options.MultiprocessingOptions(active_processes=processes)
    arguments = {item: ocp.args.PyTreeSave(tree) for item, tree in _items(values).items()}
    with _ONE_AT_A_TIME, _checkpointer(options) as checkpointer:
        checkpointer.save(folder, args=ocp.args.Composite(**arguments, record=ocp.args.JsonSave(record)))


def _read_arrays(folder: Path, stored: Mapping[str, Any]) -> dict[str, np.ndarray]:
    import orbax.checkpoint as ocp

    # Each process reads for itself, whole arrays: they are verified before they are cut up for devices.
    me = jax.process_index()
    options = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
    as_numpy = _items({name: ocp.RestoreArgs(restore_type=np.ndarray) for name in stored})
    arguments = {item: ocp.args.PyTreeRestore(restore_args=tree) for item, tree in as_numpy.items()}
    try:
        with _ONE_AT_A_TIME, _checkpointer(options) as checkpointer:
            restored = checkpointer.restore(folder, args=ocp.args.Composite(**arguments))
        arrays = named_leaves({"params": restored["params"], **restored.get("training", {})})
        return {name: arrays[name] for name in stored}
    except (MemoryError, PermissionError) as error:
        raise UserError(f"cannot read checkpoint {folder}: {first_line(error)}") from error
    except Exception as error:
        # Whatever a damaged file makes orbax raise: ValueError, KeyError, FileNotFoundError, JSONDecodeError, ...
        raise DamagedError(f"its arrays cannot be read: {first_line(error)}") from error


def _checkpointer(options: Any) -> Any:
    import orbax.checkpoint as ocp

    # Compression is off: float32 weights shrink by a tenth and take a core for seconds.
    arrays = [ocp.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=options) for _ in range(2)]
    handler = ocp.CompositeCheckpointHandler(
        params=arrays[0],
        training=arrays[1],
        record=ocp.JsonCheckpointHandler(filename="record.json", multiprocessing_options=options),
        composite_options=ocp.CompositeOptions(multiprocessing_options=options),
    )
    return ocp.Checkpointer(handler, multiprocessing_options=options)


def first_line(error: Exception) -> str:
    """An error in one line, for a message."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
