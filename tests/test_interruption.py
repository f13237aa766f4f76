"""What may come between: a signal, in an update, in a validation or where nothing is to be saved; a kill; and a second
process in a run's folder."""

import itertools
import os
import pathlib
import queue
import signal
import subprocess
import sys
import time

import pytest
from small_runs import metrics, programs_kept_in, saved, straight_run, watch_updates

from transformer_jax.cli.main import main
from transformer_jax.config_loading import load_config
from transformer_jax.errors import Interrupted, UserError
from transformer_jax.training import evaluating, loop
from transformer_jax.training.interruption import Interruptible, Interruption, only_process
from transformer_jax.training.loop import train
from transformer_jax.training.metrics import read_metrics
from transformer_jax.translation.translator import Translator

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    with programs_kept_in(folder):
        yield folder


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Six updates without a stop, and their configuration."""
    return straight_run(tmp_path_factory.mktemp("straight"))


@pytest.mark.slow
def test_a_run_that_is_to_stop_leaves_the_validation_to_the_next_command(straight, tmp_path, monkeypatch):
    """C1: a validation may take longer than the time between SIGTERM and SIGKILL; lines and scores are the same."""
    updates = itertools.count(1)
    watch_updates(monkeypatch, lambda _: next(updates) == 4 and signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as stop:
        train(straight[1], tmp_path / "run")
    assert stop.value.code == 143 and saved(tmp_path / "run")[4]["score"] is None
    assert metrics(tmp_path / "run")[-1]["step"] == 4 and "dev_bleu" not in metrics(tmp_path / "run")[-1]
    train(straight[1], tmp_path / "run")
    assert saved(tmp_path / "run") == saved(straight[0]) and metrics(tmp_path / "run") == metrics(straight[0])


def test_a_validation_is_given_up_at_its_next_batch(straight, tmp_path, monkeypatch):
    """C1: by a signal in the loss of the dev text, then by one in its translation, which the next command began with;
    the third command ends as a run never stopped. SIGKILL follows SIGTERM in seconds, a validation takes minutes."""
    translate, place_batch = Translator.translate, evaluating.place

    def signalled(function):
        def signalling(*given, **options):
            signal.raise_signal(signal.SIGTERM)
            return function(*given, **options)

        return signalling

    monkeypatch.setattr(evaluating, "place", signalled(place_batch))
    monkeypatch.setattr(Translator, "translate", lambda *given, **options: pytest.fail("there was no time for it"))
    with pytest.raises(SystemExit) as stop:
        train(straight[1], tmp_path / "run")
    assert stop.value.code == 143 and saved(tmp_path / "run")[2]["score"] is None
    monkeypatch.setattr(evaluating, "place", place_batch)
    monkeypatch.setattr(Translator, "translate", signalled(translate))
    with pytest.raises(SystemExit) as stop:
        train(straight[1], tmp_path / "run")
    assert stop.value.code == 143 and saved(tmp_path / "run")[2]["score"] is None
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2]
    monkeypatch.undo()
    train(straight[1], tmp_path / "run")
    assert saved(tmp_path / "run") == saved(straight[0]) and metrics(tmp_path / "run") == metrics(straight[0])


def test_two_processes_do_not_train_in_one_folder(straight):
    with only_process(straight[0]), pytest.raises(UserError, match="another process is training there"):
        train(straight[1], straight[0])
    train(straight[1], straight[0])


def test_a_signal_where_nothing_is_to_be_saved_ends_the_run_at_once(capsys, monkeypatch):
    """C1: while text is prepared or scores are made; a second SIGTERM disturbs nothing, a person may insist."""

    def interrupted(config, workdir, profile):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(loop, "train", interrupted)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert main(["train", "--config", str(ROOT / "configs" / "demo.py"), "--workdir", "x"]) == 143
    assert capsys.readouterr().err == "interrupted by SIGTERM: run the command again to go on\n"
    with pytest.raises(Interrupted) as second, Interruptible():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGINT)
    assert second.value.code == 130
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_signal_is_not_forgotten_where_no_python_runs():
    """C1: a vocabulary is learned for minutes in one call; here the context does not end, and the process would."""
    left = queue.SimpleQueue()
    with Interruptible(patience=0.0, leave=left.put):
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGTERM)
        assert left.get(timeout=60).code == 143
    with pytest.raises(SystemExit) as stop, Interruptible(leave=pytest.fail), Interruption(print) as interruption:
        signal.raise_signal(signal.SIGTERM)
        assert interruption.asked == signal.SIGTERM
    assert stop.value.code == 143


CONFIG = """
import dataclasses, pathlib, sys
sys.path.insert(0, {tests!r})
from small_runs import run_config

def get_config(variant):
    return run_config(
        pathlib.Path({text!r}), train__steps=300, train__evaluate_every=150, train__checkpoint_every=40,
        optimizer__learning_rate=0.001,
    )
"""


class Command:
    """`python train.py` as a process of its own."""

    def __init__(self, folder, programs, run):
        text = CONFIG.format(tests=str(ROOT / "tests"), text=str(folder / "text"))
        (folder / "config.py").write_text(text)
        self.run = run
        environment = {
            **os.environ, "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(programs),
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "train.py", "--config", str(folder / "config.py"), "--workdir", str(run)],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def send(self, number, updates):
        """Sends a signal once so many more updates are written down; returns the exit code."""
        path = self.run / "metrics.jsonl"

        def lines():
            return path.read_bytes().count(b"\n") if path.exists() else 0

        started = lines()
        # The lines after the checkpoint are dropped as the run begins again: only what grows is an update.
        while (now := lines()) < started + updates and self.process.poll() is None:
            started = min(started, now)
            time.sleep(0.005)
        self.process.send_signal(number)
        return self.finish()

    def finish(self):
        self.out, self.err = self.process.communicate(timeout=900)
        return self.process.returncode


@pytest.mark.slow
def test_kills_and_signals_at_any_moment_change_nothing_in_the_end(tmp_path, programs):
    """C1: kill -9, SIGTERM and SIGINT, then the run again each time, beside a run without a stop."""
    run = tmp_path / "run"
    assert Command(tmp_path, programs, run).send(signal.SIGKILL, 60) == -signal.SIGKILL
    for number in (signal.SIGTERM, signal.SIGINT):
        stopped = Command(tmp_path, programs, run)
        assert stopped.send(number, 30) == 128 + number, stopped.err
        assert "the checkpoint is safe" in stopped.out and stopped.err == ""
        # Of the very update that was the last.
        assert max(saved(run)) == max(line["step"] for line in read_metrics(run / "metrics.jsonl")) < 300
    last = Command(tmp_path, programs, run)
    assert last.finish() == 0, last.err
    train(load_config(str(tmp_path / "config.py")), tmp_path / "whole")
    assert saved(run)[300] == saved(tmp_path / "whole")[300]
    assert metrics(run) == metrics(tmp_path / "whole")
