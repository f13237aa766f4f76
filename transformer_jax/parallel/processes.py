"""Several processes as one run: how they find one another, wait for one another, and end together.

Arrays and steps need nothing from here: they are global, and every process runs the same program. What is here lies
beside them: process 0 writes files and the others wait for it, all must have been started alike, and when one ends in
an error the others, which would wait for it in their next collective, end too.
"""

import contextlib
import itertools
import json
import pathlib
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import jax
from jax.sharding import Mesh

from transformer_jax.errors import Interrupted, UserError
from transformer_jax.parallel import coordination
from transformer_jax.parallel.ending import fail, fail_by_loss, is_loss, leave_now
from transformer_jax.parallel.launch import launch_arguments
from transformer_jax.parallel.life_signs import Watch, delay_aborts

START_TIMEOUT = 300
"""Seconds in which all processes must have met."""
PEER_TIMEOUT = 100
"""Seconds without a sign of life after which a process counts as dead, and the others are ended."""
STEP_TIMEOUT = 6 * 3600
"""Seconds that processes wait for process 0 at most, which may learn a tokenizer and tokenize a corpus meanwhile."""

_JAX_LATER = 30  # seconds after `peer_timeout`, when jax itself would end the others, with a stack trace
# Names of meetings are used once: a number makes them so. Every process comes to them in the same order.
_meetings = itertools.count()


@contextlib.contextmanager
def joined(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    start_timeout: int = START_TIMEOUT,
    peer_timeout: int = PEER_TIMEOUT,
) -> Iterator[None]:
    """A context in which this process is one of a run's; to be entered before any device is used.

    Without arguments the environment decides: JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, else
    SLURM, Open MPI or a Cloud TPU slice of several hosts. For a single process nothing is done at all.

    An error that leaves the context ends the other processes within seconds, with its message and exit code. One that
    dies without a word is noticed by its collectives (CPU) or, after `peer_timeout` seconds, by process 0, and ends the
    others with exit code 1; that process 0 is gone itself, the others notice within seconds.

    Args:
        coordinator: HOST:PORT where process 0 listens and which all can reach.
        processes: how many there are.
        process: which of them this one is, from 0.
        start_timeout: seconds in which all must have met.
        peer_timeout: seconds without a sign of life after which a process counts as dead.

    Raises:
        UserError: a faulty or missing argument, or a port that is taken.
        SystemExit: 1, when another process was lost.
    """
    arguments = launch_arguments(coordinator, processes, process)
    if arguments is None:
        yield
        return
    _meet(arguments, start_timeout, peer_timeout)
    watch = Watch(peer_timeout)
    try:
        try:
            yield
        except SystemExit:
            gathered("")  # after a signal, on which all processes agreed
            raise
        gathered("")
    except SystemExit:
        _part(watch)
        raise
    except BaseException as error:
        if not isinstance(error, UserError | KeyboardInterrupt) and is_loss(error):
            fail_by_loss(error)
            raise SystemExit(1) from error
        fail(error)
        raise
    _part(watch)


def leave(error: Interrupted) -> NoReturn:
    """Ends this process, whatever its main thread does, and the others with it."""
    print(error, file=sys.stderr)
    if coordination.client() is not None:
        fail(error)
    leave_now(error.code, None)


def is_first() -> bool:
    """Whether this is the process that writes files and speaks."""
    return jax.process_index() == 0


@contextlib.contextmanager
def first_alone(what: str, timeout: float = STEP_TIMEOUT) -> Iterator[None]:
    """A block that process 0 runs before the others do: they wait until it has left it.

    Raises:
        UserError: process 0 was not done in `timeout` seconds.
    """
    if jax.process_count() == 1:
        yield
        return
    key = f"{coordination.ROOT}/{next(_meetings)}/{what}"
    if is_first():
        yield
        coordination.client().key_value_set(key, "done")
    else:
        coordination.value(key, what, timeout)
        yield


def require_alike(facts: Mapping[str, str], timeout: float = STEP_TIMEOUT) -> None:
    """Raises UserError in a process for which one of the facts is not what process 0 has, naming it."""
    if jax.process_count() == 1:
        return
    key = f"{coordination.ROOT}/{next(_meetings)}/facts"
    if is_first():
        coordination.client().key_value_set(key, json.dumps(dict(facts)))
        return
    theirs = json.loads(coordination.value(key, "comparing what was started", timeout))
    for name, mine in facts.items():
        if theirs[name] != mine:
            raise UserError(
                f"{coordination.me()} has another {name} than process 0: "
                "start all processes with the same command, files and code"
            )


def require_shared(path: pathlib.Path) -> None:
    """Raises UserError where a file that process 0 has written is not seen."""
    deadline = time.monotonic() + 60  # for which NFS may remember that there was no such file
    while not path.exists():
        if time.monotonic() > deadline or jax.process_count() == 1:
            raise UserError(
                f"{coordination.me()} does not see {path}, which process 0 has written: "
                "give a --workdir on a file system that all hosts share"
            )
        time.sleep(coordination.LOOK)


def require_members(mesh: Mesh) -> None:
    """Raises UserError where a process has no device in the mesh, and so no part in what the others compute."""
    without = sorted(set(range(jax.process_count())) - {device.process_index for device in mesh.devices.flat})
    if without:
        raise UserError(
            f"the mesh has {mesh.size} of the {jax.device_count()} devices, none of process "
            f"{', '.join(map(str, without))}: give mesh.data, mesh.fsdp and mesh.tensor so that all are used"
        )


def gathered(text: str, timeout: float = STEP_TIMEOUT) -> list[str]:
    """What each process gave, in their order."""
    if jax.process_count() == 1:
        return [text]
    key, client = f"{coordination.ROOT}/{next(_meetings)}/gathered", coordination.client()
    client.key_value_set(f"{key}/{jax.process_index()}", text)
    return [coordination.value(f"{key}/{i}", "gathering results", timeout) for i in range(jax.process_count())]


def _meet(arguments: Mapping[str, Any], start_timeout: int, peer_timeout: int) -> None:
    # jax's own handler of SIGTERM would swallow it until training has set another.
    jax.config.update("jax_enable_preemption_service", False)
    where = arguments.get("coordinator_address", "the coordinator that the cluster's environment names")
    late = f"not all processes met at {where} within {start_timeout} s: see that each runs and reaches that address"
    # jax would abort with a stack trace, a few seconds later.
    timer = threading.Timer(start_timeout, leave_now, (2, late))
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            **arguments,
            initialization_timeout=start_timeout + 30,
            heartbeat_timeout_seconds=peer_timeout + _JAX_LATER,
            shutdown_timeout_seconds=60,
        )
    except (ValueError, KeyError) as error:
        raise UserError(
            f"the environment names several processes, but not how they meet ({error}): give --coordinator HOST:PORT, "
            "--processes and --process"
        ) from error
    finally:
        timer.cancel()
    if coordination.service().process_id:
        delay_aborts()


def _part(watch: Watch) -> None:
    watch.end()
    jax.distributed.shutdown()
