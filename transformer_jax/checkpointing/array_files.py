"""The arrays of a checkpoint on disk: the only importer of orbax.

orbax reads a flipped bit as a number like any other, and a missing part of an array as zeros: hence the digests that
`checkpoint_files` keeps in a step's record, and that are compared here with what is read.
"""

import contextlib
import gc
import itertools
import logging
import math
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from transformer_jax.checkpointing.checkpoint_files import DamagedError, read_record, require_whole
from transformer_jax.checkpointing.named_arrays import Entry, PyTree, entry, find_misfits, named_leaves, nest
from transformer_jax.errors import UserError

GROUP_BYTES = 16 * 2**20
"""Arrays read at once: a call of orbax takes some 20 ms, and what it reads must fit beside what is there already. With
64 MiB the base model's mean took 0.4 times its parameters more, which the allocator kept."""

# orbax numbers the operations of a process: two saves at once, in two threads, take each other's folders for their own.
_ONE_AT_A_TIME = threading.Lock()
_BARRIERS = itertools.count()


@contextlib.contextmanager
def one_error_only() -> Iterator[None]:
    """A context in which a write or a read that fails says nothing but the error that it raises.

    orbax logs the traceback of each of its writers when one fails, and those still at work then meet a closed event
    loop, which Python prints, or end with an error that nobody asks for: 800 lines for a small model. The last of them
    may do so long after the context, so that after an error closed loops stay unprinted.
    """
    loggers, print_unraisable = (logging.getLogger("absl"), logging.getLogger("asyncio")), sys.unraisablehook

    def is_told(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname and "never retrieved" not in record.getMessage()

    def print_others(unraisable: "sys.UnraisableHookArgs") -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            print_unraisable(unraisable)

    for logger in loggers:
        logger.addFilter(is_told)
    if getattr(print_unraisable, "__name__", "") != print_others.__name__:  # which an error before has left
        sys.unraisablehook = print_others
    try:
        yield
        sys.unraisablehook = print_unraisable
    except Exception:
        gc.collect()  # those errors are told of when they are collected
        raise
    finally:
        for logger in loggers:
            logger.removeFilter(is_told)


def stored_arrays(
    folder: epath.Path, wanted: Mapping[str, PyTree] | None, *, params_only: bool = False
) -> tuple[dict[str, Any], Iterator[tuple[str, np.ndarray]]]:
    """The verified record of one step, and its arrays by name, each verified before it is given.

    Args:
        folder: the step's.
        wanted: the tree that the arrays must fit, which is known before any is read; None takes what there is.
        params_only: leaves the optimizer's arrays where they are.

    Raises:
        UserError: the checkpoint is of another configuration, or cannot be read.
        DamagedError: with the reason; the arrays raise it too, when they are taken.
    """
    record = read_record(folder)
    stored = stored_params(folder, record) if params_only else record["arrays"]
    misfits = [] if wanted is None else find_misfits(stored, wanted)
    if misfits:
        others = f" (and {len(misfits) - 1} more differ)" if len(misfits) > 1 else ""
        raise UserError(
            f"checkpoint {folder} is of another configuration: {misfits[0]}{others}; "
            "use the config.json that it was trained with, or another folder"
        )
    if not params_only:
        require_whole(folder, record)
    return record, read_arrays(folder, stored)


def stored_params(folder: epath.Path, record: Mapping[str, Any]) -> dict[str, Entry]:
    """The parameters that a step's record tells of; raises DamagedError if one of their files is not whole."""
    require_whole(folder, record, "params/")
    return {name: found for name, found in record["arrays"].items() if _item(name) == "params"}


def read_arrays(folder: epath.Path, stored: Mapping[str, Entry]) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays of one step that its record tells of, each verified before it is given, GROUP_BYTES at a time."""
    for group in grouped(stored):
        arrays = _read(folder, group)
        for name in group:
            array = arrays.pop(name)
            if entry(array) != stored[name]:
                raise DamagedError(f"{name} is not as it was written")
            yield name, array


def grouped(stored: Mapping[str, Entry]) -> Iterator[list[str]]:
    """Names whose arrays have GROUP_BYTES at most together, or that of one array which has more."""
    group: list[str] = []
    size = 0
    for name, found in stored.items():
        octets = math.prod(found["shape"]) * np.dtype(found["dtype"]).itemsize
        if group and size + octets > GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(name)
        size += octets
    if group:
        yield group


def write_arrays(folder: epath.Path, values: Mapping[str, Any]) -> None:
    """Writes arrays by name to a folder that must not exist. Every process must call this."""
    import orbax.checkpoint as ocp

    options = ocp.options.MultiprocessingOptions(active_processes=_processes())
    arguments = {item: ocp.args.PyTreeSave(tree) for item, tree in _items(values).items()}
    with _ONE_AT_A_TIME, _checkpointer(options) as checkpointer:
        checkpointer.save(folder, args=ocp.args.Composite(**arguments))


def wait_for_processes() -> None:
    """Returns when every process has called this; for the thread that saves, beside training's collectives."""
    if jax.process_count() > 1:
        import orbax.checkpoint as ocp

        ocp.multihost.sync_global_processes(f"transformer_jax_saved_{next(_BARRIERS)}", processes=_processes())


def _processes() -> set[int] | None:
    # Naming the processes makes orbax wait at the coordination service; its default is a collective on the devices,
    # which must not run in this thread beside training's.
    return set(range(jax.process_count())) if jax.process_count() > 1 else None


def _item(name: str) -> str:
    return "params" if name.startswith("params/") else "training"


def _items(leaves: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Nested dicts by orbax item."""
    grouped: dict[str, dict[str, Any]] = {}
    for name, leaf in leaves.items():
        grouped.setdefault(_item(name), {})[name.removeprefix("params/")] = leaf
    return {item: nest(group) for item, group in grouped.items()}


def _read(folder: epath.Path, names: list[str]) -> dict[str, np.ndarray]:
    import orbax.checkpoint as ocp

    # Each process reads for itself, whole arrays: they are verified before they are cut up for devices.
    me = jax.process_index()
    options = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
    as_numpy = _items({name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names})
    arguments = {
        item: ocp.args.PyTreeRestore(item=tree, restore_args=tree, partial_restore=True)
        for item, tree in as_numpy.items()
    }
    try:
        with one_error_only(), _ONE_AT_A_TIME, _checkpointer(options) as checkpointer:
            restored = checkpointer.restore(folder, args=ocp.args.Composite(**arguments))
        arrays = named_leaves({"params": restored.get("params", {}), **restored.get("training", {})})
        return {name: arrays[name] for name in names}
    except (MemoryError, PermissionError) as error:
        raise UserError(f"cannot read checkpoint {folder}: {first_line(error)}") from error
    except Exception as error:
        # Whatever a damaged file makes orbax raise: ValueError, KeyError, FileNotFoundError, JSONDecodeError, ...
        raise DamagedError(f"its arrays cannot be read: {first_line(error)}") from error


def _checkpointer(options: Any) -> Any:
    import orbax.checkpoint as ocp

    # Nothing changes these arrays while they are written: the handler's own copy of them all would be for nothing.
    kinds = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)),
        (jax.Array, ocp.type_handlers.ArrayHandler()),
    )
    # Compression is off: float32 weights shrink by a tenth and take a core for seconds.
    arrays = [
        ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=kinds, multiprocessing_options=options)
        for _ in range(2)
    ]
    handler = ocp.CompositeCheckpointHandler(
        params=arrays[0],
        training=arrays[1],
        composite_options=ocp.CompositeOptions(multiprocessing_options=options),
    )
    return ocp.Checkpointer(handler, multiprocessing_options=options)


def first_line(error: Exception) -> str:
    """An error in one line, for a message."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
