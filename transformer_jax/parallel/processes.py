"""Several processes as one run: how they find one another, wait for one another, and end together.

Arrays and steps need nothing from here: they are global, and every process runs the same program. What is here lies
beside them: process 0 writes files and the others wait for it, all must have been started alike, and when one ends in
an error the others, which would wait for it in their next collective, end too.
"""

import atexit
import contextlib
import itertools
import json
import os
import pathlib
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import jax
from jax.sharding import Mesh

from transformer_jax.errors import Interrupted, UserError
from transformer_jax.parallel.launch import launch_arguments
from transformer_jax.parallel.life_signs import LOOK, Silence, delay_aborts, is_refused

START_TIMEOUT = 300
"""Seconds in which all processes must have met."""
PEER_TIMEOUT = 100
"""Seconds without a sign of life after which a process counts as dead, and the others are ended."""
STEP_TIMEOUT = 6 * 3600
"""Seconds that processes wait for process 0 at most, which may learn a tokenizer and tokenize a corpus meanwhile."""

_POLL = LOOK  # seconds between looks at whether another process has failed
_JAX_LATER = 30  # seconds after `peer_timeout`, when jax itself would end the others, with a stack trace
_ROOT = "transformer_jax"
_FAILED = f"{_ROOT}/failed"
_ALIVE = f"{_ROOT}/alive"
_AGAIN = "run the command again in all processes to go on from the newest checkpoint"
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
    watch = _Watch(peer_timeout)
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
        if not isinstance(error, UserError | KeyboardInterrupt) and _is_loss(error):
            _fail_by_loss(error)
            raise SystemExit(1) from error
        _fail(error)
        raise
    _part(watch)


def leave(error: Interrupted) -> NoReturn:
    """Ends this process, whatever its main thread does, and the others with it."""
    print(error, file=sys.stderr)
    if _client() is not None:
        _fail(error)
    _leave(error.code, None)


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
    key = f"{_ROOT}/{next(_meetings)}/{what}"
    if is_first():
        yield
        _client().key_value_set(key, "done")
    else:
        _value(key, what, timeout)
        yield


def require_alike(facts: Mapping[str, str], timeout: float = STEP_TIMEOUT) -> None:
    """Raises UserError in a process for which one of the facts is not what process 0 has, naming it."""
    if jax.process_count() == 1:
        return
    key = f"{_ROOT}/{next(_meetings)}/facts"
    if is_first():
        _client().key_value_set(key, json.dumps(dict(facts)))
        return
    theirs = json.loads(_value(key, "comparing what was started", timeout))
    for name, mine in facts.items():
        if theirs[name] != mine:
            raise UserError(
                f"{_me()} has another {name} than process 0: start all processes with the same command, files and code"
            )


def require_shared(path: pathlib.Path) -> None:
    """Raises UserError where a file that process 0 has written is not seen."""
    deadline = time.monotonic() + 60  # for which NFS may remember that there was no such file
    while not path.exists():
        if time.monotonic() > deadline or jax.process_count() == 1:
            raise UserError(
                f"{_me()} does not see {path}, which process 0 has written: "
                "give a --workdir on a file system that all hosts share"
            )
        time.sleep(_POLL)


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
    key, client = f"{_ROOT}/{next(_meetings)}/gathered", _client()
    client.key_value_set(f"{key}/{jax.process_index()}", text)
    return [_value(f"{key}/{i}", "gathering results", timeout) for i in range(jax.process_count())]


def _meet(arguments: Mapping[str, Any], start_timeout: int, peer_timeout: int) -> None:
    # jax's own handler of SIGTERM would swallow it until training has set another.
    jax.config.update("jax_enable_preemption_service", False)
    where = arguments.get("coordinator_address", "the coordinator that the cluster's environment names")
    late = f"not all processes met at {where} within {start_timeout} s: see that each runs and reaches that address"
    # jax would abort with a stack trace, a few seconds later.
    timer = threading.Timer(start_timeout, _leave, (2, late))
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
    if _distributed().process_id:
        delay_aborts()


def _distributed() -> Any:
    # jax has no public door to its coordination service, where waiting has a time limit and uses no device.
    from jax._src import distributed

    return distributed.global_state


def _client() -> Any:
    return _distributed().client


def _value(key: str, what: str, timeout: float) -> str:
    """What another process has set or will set; this one can be interrupted meanwhile."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            value: str = _client().blocking_key_value_get(key, int(1000 * _POLL))
            return value
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        if time.monotonic() > deadline:
            raise UserError(f"{_me()} waited {timeout:.0f} s for another ({what}): look at the others' messages")


def _me() -> str:
    return f"process {jax.process_index()} ({socket.gethostname()})"


class _Watch:
    """Ends this process when another has failed or is dead: the main thread may be waiting for it in a collective.

    Process 0 looks at the signs of life of all others; these look at whether it answers, in a thread that asks nothing
    of it and so cannot be kept waiting.
    """

    def __init__(self, peer_timeout: float) -> None:
        self._timeout = peer_timeout
        # jax.process_index would wait for the devices of all processes.
        self._process: int = _distributed().process_id
        self._over = threading.Event()
        self._answers = 0
        looks = [self._talk] if self._process == 0 else [self._talk, self._listen]
        self._threads = [threading.Thread(target=look, daemon=True, name="other processes") for look in looks]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Before this process takes its leave."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _talk(self) -> None:
        silence = Silence()
        while not self._over.wait(_POLL):
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                _leave_if_another_failed()
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                if self._process == 0:
                    self._leave_if_silent(silence, _signs_of_life())
                else:
                    count = self._answers + 1
                    _client().key_value_set(f"{_ALIVE}/{self._process}", str(count), allow_overwrite=True)
                    self._answers = count

    def _listen(self) -> None:
        silence, before = Silence(), 0
        while not self._over.wait(_POLL):
            self._leave_if_silent(silence, {0: str(self._answers)})
            if self._answers == before and is_refused(_distributed().coordinator_address):
                _leave(1, f"process {self._process} lost process 0, which said nothing; {_AGAIN}")
            before = self._answers

    def _leave_if_silent(self, silence: Silence, signs: Mapping[int, str]) -> None:
        process, seconds = silence.longest(signs)
        if seconds < self._timeout:
            return
        message = f"process {process} gave no sign of life for {seconds:.0f} s (--peer-timeout); {_AGAIN}"
        if self._process == 0:
            _announce(1, message)
        _leave(1, message)


def _signs_of_life() -> dict[int, str]:
    """What each process but the first has counted up to."""
    found = {int(key.rpartition("/")[2]): count for key, count in _client().key_value_dir_get(f"{_ALIVE}/")}
    return {process: found.get(process, "") for process in range(1, _distributed().num_processes)}


def _leave_if_another_failed() -> None:
    failure = json.loads(_client().key_value_try_get(_FAILED))
    if failure["process"] != jax.process_index():
        _acknowledge()
        _leave(failure["code"], f"{failure['name']} has ended: {failure['error']}")


def _acknowledge() -> None:
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        _client().key_value_set(f"{_ROOT}/seen/{jax.process_index()}", "")


def _fail(error: BaseException) -> None:
    """Tells the other processes, and sees to it that this one does not wait for them when it ends."""
    if isinstance(error, UserError):
        _announce(2, str(error))
    elif isinstance(error, Interrupted):
        _announce(error.code, str(error))
    else:
        _announce(130 if isinstance(error, KeyboardInterrupt) else 1, f"{type(error).__name__}: {_first_line(error)}")


def _fail_by_loss(error: BaseException) -> None:
    time.sleep(3 * _POLL)  # in which the watcher ends this process, if the other one has said why it ended
    print(f"error: {_me()} lost another process, which said nothing ({_first_line(error)}); {_AGAIN}", file=sys.stderr)
    _announce(1, f"it lost another process, which said nothing; {_AGAIN}")


def _is_loss(error: BaseException) -> bool:
    return re.search("Gloo|coordination|heartbeat|UNAVAILABLE|Connection (closed|reset)", str(error)) is not None


def _part(watch: "_Watch") -> None:
    watch.end()
    jax.distributed.shutdown()


def _announce(code: int, text: str) -> None:
    # Registered last, it is called first: jax's own waits for the others' goodbye.
    atexit.register(_leave, code, None)
    failure = {"process": jax.process_index(), "name": _me(), "code": code, "error": " ".join(text.split())}
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        _client().key_value_set(_FAILED, json.dumps(failure))
    _acknowledge()
    if not is_first():
        return
    # With process 0 the service goes: the others must have read by then.
    deadline = time.monotonic() + 3 * _POLL
    while time.monotonic() < deadline:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if len(_client().key_value_dir_get(f"{_ROOT}/seen/")) == jax.process_count():
                return
        time.sleep(_POLL / 10)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _leave(code: int, message: str | None) -> NoReturn:
    if message is not None:
        print(f"error: {message}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
