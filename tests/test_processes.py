"""A run of several processes: local ones, on CPU devices that talk over gloo, as hosts do over a network."""

import json
import shutil
import signal
import socket

import numpy as np
import pytest
from several_processes import free_port, run_together, write_config
from small_runs import metrics, programs_kept_in, run_config, saved

from transformer_jax.checkpointing.checkpoint_files import complete_steps
from transformer_jax.config_loading import load_config
from transformer_jax.data.batches import PlannedBatch, Shape
from transformer_jax.errors import UserError
from transformer_jax.parallel import processes
from transformer_jax.parallel.life_signs import Silence, is_refused
from transformer_jax.training import loop
from transformer_jax.training.loop import train
from transformer_jax.training.placing import rows_of
from transformer_jax.training.preparation import prepare

# `train.py`, but a process may send itself a signal before one of its updates.
PROGRAM = """
import os, sys
from transformer_jax.cli.main import main
from transformer_jax.training import loop

number, update = int(sys.argv[1]), int(sys.argv[2])
make_train_step, updates = loop.make_train_step, []

def make_counting(*given):
    step = make_train_step(*given)

    def counting(state, batch):
        updates.append(None)
        if len(updates) == update:
            os.kill(os.getpid(), number)
        return step(state, batch)

    return counting

loop.make_train_step = make_counting
sys.exit(main(["train", *sys.argv[3:]]))
"""


def train_together(folder, run, count, *options, devices=1, signals=None):
    """Trains in `count` processes; `signals` says which process gets which signal before which of its updates."""
    port = free_port()
    arguments = []
    for i in range(count):
        number, update = (signals or {}).get(i, (0, 0))
        arguments.append([
            number, update, "--config", folder / "config.py", "--workdir", run, "--coordinator", f"127.0.0.1:{port}",
            "--processes", count, "--process", i, "--peer-timeout", 20, *options,
        ])  # fmt: skip
    return run_together(folder, PROGRAM, arguments, devices)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    write_config(folder)
    with programs_kept_in(folder / "programs"):
        yield folder


@pytest.fixture(scope="module")
def alone(folder):
    """The run in one process, without a stop."""
    train(load_config(str(folder / "config.py")), folder / "alone")
    return folder / "alone"


@pytest.mark.slow
def test_a_run_on_four_then_two_then_one_then_two_processes_is_that_of_one(folder, alone, monkeypatch):
    """C1, C2, J4: killed, stopped by a signal at one process, stopped, finished; each time on other processes."""
    run = folder / "run"

    def steps():
        return complete_steps(run / "checkpoints")

    codes, outputs = train_together(folder, run, 4, signals={2: (signal.SIGKILL, 6)})
    assert codes.pop(2) == -signal.SIGKILL and set(codes) <= {1, -signal.SIGABRT}, outputs
    assert any("lost another process" in output or "no sign of life" in output for output in outputs), outputs
    # Before its sixth update; the save after the fourth may have been under way.
    assert steps() in ([2], [2, 4])

    begin = steps()[-1]
    codes, outputs = train_together(folder, run, 2, devices=2, signals={1: (signal.SIGTERM, 1)})
    assert codes == [143, 143], outputs
    assert f"going on from update {begin}" in outputs[0] and "stopped by SIGTERM: the checkpoint is safe" in outputs[0]
    assert "update" not in outputs[1]  # one process speaks
    # The signal came at the first update, of which all knew at the second.
    assert steps()[-1] == begin + 2

    monkeypatch.setattr(loop.Agreement, "reached", lambda self: signal.raise_signal(signal.SIGINT) or True)
    with pytest.raises(SystemExit) as stop:
        train(load_config(str(folder / "config.py")), run)
    monkeypatch.undo()
    assert stop.value.code == 130 and steps()[-1] == begin + 3

    codes, outputs = train_together(folder, run, 2)
    assert codes == [0, 0], outputs
    assert outputs[0].count("translate with:") == 1 and "translate with:" not in outputs[1]
    assert_same_run(run, alone)


def assert_same_run(run, other):
    """To rounding: losses, scores, texts; exactly: which batches, which checkpoints."""
    found, expected = saved(run), saved(other)
    assert found.keys() == expected.keys()
    for name in ("epoch", "index", "text", "tokenizer"):
        assert [each[name] for each in found.values()] == [each[name] for each in expected.values()]
    assert metrics(run, "step") == metrics(other, "step")
    for name in ("loss", "dev_nll", "gradient_norm"):
        assert metrics(run, name) == pytest.approx(np.array(metrics(other, name)), rel=1e-5), name
    results = [json.loads((each / "results.json").read_text()) for each in (run, other)]
    for name in ("scores", "averaged_steps", "step"):
        assert results[0][name] == results[1][name]
    texts = [[line for line in each["page"] if line.startswith("translation")] for each in results]
    assert texts[0] == texts[1] and len(texts[0]) == 3


# What lies beside training, without its seconds of compilation.
BESIDE = """
import os, sys, time
import jax
from transformer_jax.errors import UserError
from transformer_jax.parallel import processes

def run(index, what):
    with processes.first_alone("something"):
        print("with", processes.gathered(str(10 * index)) if what == "nothing" else what)
    if what == "unlike":
        processes.require_alike({"text": "the same", "configuration": str(index)})
    if what == "refused" and index == 1:
        raise UserError("b.txt, line 3: not UTF-8")
    if what == "fault" and index == 0:
        raise ZeroDivisionError("by nothing")
    if what != "nothing":
        time.sleep(600)  # as in a collective

try:
    with processes.joined(sys.argv[1], 2, int(sys.argv[2]), start_timeout=int(sys.argv[4])):
        run(jax.process_index(), sys.argv[3])
except UserError as error:
    print("error:", error)
    sys.exit(2)
"""


@pytest.mark.parametrize(
    ("what", "code", "own", "message"),
    [
        ("unlike", 2, 1, "has another configuration than process 0"),
        ("refused", 2, 1, "b.txt, line 3: not UTF-8"),
        ("fault", 1, 0, "ZeroDivisionError: by nothing"),
    ],
)
def test_the_error_of_one_process_ends_the_others(what, code, own, message, tmp_path):
    """With its message, where they would wait for it for ever."""
    address = f"127.0.0.1:{free_port()}"
    codes, outputs = run_together(tmp_path, BESIDE, [(address, i, what, 60) for i in range(2)])
    assert codes == [code, code], outputs
    assert message in outputs[own] and message in outputs[1 - own]
    assert f"error: process {own} (" in outputs[1 - own] and "has ended" in outputs[1 - own]
    assert "Traceback" not in outputs[1 - own] and "*** Check failure" not in "".join(outputs)


def test_processes_that_never_meet_say_so(tmp_path):
    """Whether the coordinator is not there or another process is missing."""
    codes, outputs = run_together(tmp_path, BESIDE, [(f"127.0.0.1:{free_port()}", i, "x", 3) for i in range(2)])
    assert codes == [2, 2]
    for output in outputs:
        assert "not all processes met at 127.0.0.1:" in output and "within 3 s" in output and len(output) < 400


def test_a_process_is_dead_when_it_is_silent_for_long_while_others_look():
    """J4: by a clock of the test's; a process that stood still itself has not seen that the others were silent."""
    now = [0.0]
    silence = Silence(lambda: now[0])

    def look(after, *signs):
        now[0] += after
        return silence.longest(dict(enumerate(signs, start=1)))

    assert look(1.0, "", "") == (1, 1.0)  # neither has said anything yet
    assert look(1.0, "1", "") == (2, 2.0)
    assert look(1.0, "2", "5") == (1, 0.0)
    assert look(1.5, "2", "6") == (1, 1.5)
    assert look(600.0, "2", "6") == (1, 3.5) and look(1.0, "2", "6") == (1, 4.5)
    assert look(1.0, "3", "6") == (2, 4.0)


def test_a_port_where_nobody_listens_is_told_from_one_that_is_slow():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        listener.listen()
        assert not is_refused(address)
    assert is_refused(address)


# One process kills itself while both wait for what never comes.
SILENT = """
import os, signal, sys, time
from transformer_jax.parallel import processes

address, index, dying = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with processes.joined(address, 2, index, start_timeout=250, peer_timeout=6):
    processes.gathered("")
    if index == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dying", "words"),
    [
        (0, "process 1 lost process 0, which said nothing; run the command again in all processes"),
        (1, "(--peer-timeout); run the command again in all processes"),
    ],
)
def test_a_process_that_is_killed_ends_the_others_with_a_sentence(dying, words, tmp_path):
    """J4: before jax does, whose last line is a stack trace and whose exit code is that of an abort."""
    address = f"127.0.0.1:{free_port()}"
    codes, outputs = run_together(tmp_path, SILENT, [(address, i, dying) for i in range(2)])
    assert codes[dying] == -signal.SIGKILL and codes[1 - dying] == 1, outputs
    assert words in outputs[1 - dying].splitlines()[-1] and "Traceback" not in outputs[1 - dying]


def test_a_process_has_the_examples_of_its_rows():
    """Each in one process, whatever rows those are; rows beyond the batch are empty."""
    planned = PlannedBatch(Shape(5, 8, 8), np.array([7, 3, 9, 4, 1]), np.array([0, 0, 2, 3, 4]))
    parts = [rows_of(planned, np.array(rows)) for rows in ([0, 3], [1, 2, 6], [4, 5])]
    assert [part.examples.tolist() for part in parts] == [[7, 3, 4], [9], [1]]
    assert [part.row_of.tolist() for part in parts] == [[0, 0, 1], [1], [0]]
    assert [part.shape.rows for part in parts] == [2, 3, 2]
    nothing = rows_of(planned, np.array([1]))
    assert not len(nothing.examples) and nothing.shape == Shape(1, 8, 8)


def test_a_folder_that_others_do_not_see_is_named(tmp_path):
    with pytest.raises(UserError, match=r"does not see .*gone, which process 0 has written"):
        processes.require_shared(tmp_path / "gone")


def test_one_process_is_alone_and_alike(tmp_path):
    config = run_config(tmp_path / "text")
    processes.require_alike({"configuration": config.to_json()})
    assert processes.gathered("all") == ["all"] and processes.is_first()
    with processes.first_alone("text"), processes.joined():
        pass


# What comes before the first update.
PREPARING = """
import pathlib, sys
from small_runs import pairs, run_config, write_pairs
from transformer_jax.errors import UserError
from transformer_jax.parallel import processes
from transformer_jax.training.preparation import prepare

address, index, what, text, run = sys.argv[1], int(sys.argv[2]), sys.argv[3], *map(pathlib.Path, sys.argv[4:])
config = run_config(text)
if index == 1 and what in ("dev", "test"):
    write_pairs(text / f"{what}.tsv", pairs(20, seed=9))
try:
    with processes.joined(address, 2, index, start_timeout=250):
        with processes.first_alone("preparing text"):
            prepared = prepare(config, run, print)
        processes.require_alike(prepared.common)
        processes.gathered("")
except UserError as error:
    print("error:", error)
    sys.exit(2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["dev text", "test text", "folder behind --workdir"])
def test_processes_that_would_wait_for_one_another_for_ever_are_told_before(what, tmp_path):
    """J4: each host with a copy of its own of text or run: one more dev batch in one of them and the others wait; parts
    of a checkpoint in two folders are none."""
    prepare(run_config(tmp_path / "text-0"), tmp_path / "run-0", print)
    shutil.copytree(tmp_path / "run-0", tmp_path / "run-1")
    address, word = f"127.0.0.1:{free_port()}", what.split(" ")[0]
    runs = [tmp_path / f"run-{i if word == 'folder' else 0}" for i in range(2)]
    arguments = [(address, i, word, tmp_path / f"text-{i}", runs[i]) for i in range(2)]
    codes, outputs = run_together(tmp_path, PREPARING, arguments)
    assert codes == [2, 2], outputs
    assert f"has another {what}" in outputs[1] and "than process 0: start all processes" in outputs[1]
    assert "Traceback" not in "".join(outputs)


LATE = """
import sys, time
import jax, jax.numpy as jnp, numpy as np
from transformer_jax.config import MeshConfig
from transformer_jax.parallel import connecting, mesh, processes

address, index = sys.argv[1], int(sys.argv[2])
with processes.joined(address, 2, index, start_timeout=250):
    devices = mesh.make_mesh(MeshConfig(data=2, fsdp=2))
    connecting.connect(devices)
    ones = jax.make_array_from_callback((4,), mesh.rows_sharding(devices), lambda where: np.ones(1, np.float32))
    if index == 1:
        time.sleep(33)  # compiling what the other had in its cache
    print("sum", float(jax.jit(jnp.sum, out_shardings=mesh.replicated(devices))(ones)))
"""


@pytest.mark.slow
def test_a_process_may_come_late_to_the_first_exchange(tmp_path):
    """J4: without `connect` gloo waits for 30 s, and a run that was stopped could not go on where compiling takes
    longer."""
    address = f"127.0.0.1:{free_port()}"
    codes, outputs = run_together(tmp_path, LATE, [(address, i) for i in range(2)], devices=2)
    assert codes == [0, 0] and all("sum 4.0" in output for output in outputs), outputs
