"""What a run says of itself while it goes on: where its time goes, what it waits for, and a trace of some updates."""

import io
import re
import threading

import jax
import numpy as np
import pytest
from jax.profiler import ProfileData
from rich.console import Console
from small_models import small_config
from small_runs import programs_kept_in, run_config

import transformer_jax.training.loop as loop
from transformer_jax.data.batches import PlannedBatch, Shape
from transformer_jax.errors import UserError
from transformer_jax.model.flops import TRAINING, forward_flops
from transformer_jax.parallel.chips import peak_flops
from transformer_jax.training.loop import train
from transformer_jax.training.metrics import read_metrics
from transformer_jax.training.profiling import Profile
from transformer_jax.training.reporting import Reporter
from transformer_jax.training.throughput import Throughput

SCOPES = (
    "encoder", "decoder", "self_attention", "cross_attention", "feed_forward", "embed", "logits", "loss", "adam",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory):
    with programs_kept_in(tmp_path_factory.mktemp("programs")):
        yield


def without_evaluation(folder, **changes):
    return run_config(
        folder, train__evaluate_every=50, train__steps=7, train__checkpoint_every=3, train__evaluate_sentences=1,
        train__log_every=2, **changes,
    )  # fmt: skip


# Python 3.13 warns of a type of jaxlib's as it is made, where an error would end the process.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:builtin type event_stats has no __module__ attribute:DeprecationWarning")
def test_a_trace_of_some_updates_names_the_papers_parts(tmp_path, monkeypatch):
    """Updates 3 to 4 and no others are in it. J1: update 5 compiles the train step again, and says so."""
    make = loop.make_train_step

    def two_programs(*arguments):
        steps, calls = [make(*arguments), make(*arguments)], []

        def call(state, batch):
            calls.append(batch)
            return steps[len(calls) > 4](state, batch)

        return call

    monkeypatch.setattr(loop, "make_train_step", two_programs)
    jax.clear_caches()  # or what other tests have compiled is not counted here
    run = tmp_path / "run"
    train(without_evaluation(tmp_path / "text"), run, profile=range(3, 5))
    (file,) = (run / "profile").rglob("*.xplane.pb")
    trace = ProfileData.from_file(str(file))  # what lies in it lives no longer than it does
    events = [
        (event.name, dict(event.stats)) for plane in trace.planes for line in plane.lines for event in line.events
    ]
    assert [stats["step_num"] for name, stats in events if name == "train"] == [3, 4]
    of_step = [stats for _, stats in events if stats.get("hlo_module") == "jit_train_step"]
    assert len({stats["run_id"] for stats in of_step}) == 2
    # An operation's scopes are in the program, which the trace has, too.
    names = set(re.findall(rb"jit\(train_step\)/[\w/().\-]*", file.read_bytes()))
    for scope in SCOPES:
        assert any(scope.encode() in re.split(rb"[/()]", name) for name in names), scope
    log = (run / "log.txt").read_text()
    assert f"updates 3 to 4 are in {run / 'profile'}" in log
    (warning,) = re.findall(r"warning: (.*)", log)
    assert re.fullmatch(
        r"update 5: the train step was compiled again for batches of \d+ x \(16 \+ 16\), which .*", warning
    )
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == [2, 4, 6, 7]
    # The train step; what looks at the parameters before a checkpoint; the train step again.
    assert [line["compilations"] for line in lines[:3]] == [1, 2, 3]
    assert all(1e6 < line["host_peak_bytes"] < 1e11 for line in lines)
    # The checkpoint after update 3 belongs to the line after update 4.
    assert [line["checkpoint_seconds"] > 0 for line in lines[:2]] == [False, True]


@pytest.mark.slow
def test_a_run_that_ends_among_the_updates_to_record_keeps_what_there_was(tmp_path, monkeypatch):
    """Killed, and gone on with after them: the same command again records nothing, and is no mistake."""
    config, run = without_evaluation(tmp_path / "text"), tmp_path / "run"
    save = loop.Checkpoints.save

    def stop(self, step, *arguments, **options):
        save(self, step, *arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop.Checkpoints, "save", stop)
        train(config, run, profile=range(2, 10))
    assert "updates 2 to 3 are in" in (run / "log.txt").read_text()
    train(config, run, profile=range(2, 4))
    assert len(list((run / "profile").rglob("*.xplane.pb"))) == 1


def test_a_trace_that_cannot_be_written_is_told_before_or_costs_no_run(tmp_path, monkeypatch):
    """A file in the folder's place is refused at the start; a disk that is full at the end is a warning."""
    (tmp_path / "profile").write_text("")
    with pytest.raises(UserError, match=r"profile: cannot be a folder for the trace \(File exists\); make room"):
        Profile(range(1, 3), tmp_path / "profile", print).__enter__()

    def full():
        raise RuntimeError("RESOURCE_EXHAUSTED: no space left\nand more")

    said = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, **options: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", full)
    with Profile(range(1, 3), tmp_path / "trace", said.append) as recorder:
        for step in (1, 2, 3):
            with recorder.update(step):
                pass
            recorder.after(step)
    assert said == ["warning: the trace of updates 1 to 2 could not be written: RESOURCE_EXHAUSTED: no space left"]


def test_updates_to_record_that_were_made_before_are_told(tmp_path):
    """As where a run is gone on with by the same command."""
    said = []
    with Profile(range(3, 5), tmp_path / "profile", said.append) as recorder, recorder.update(6):
        pass
    assert said == ["profile    nothing is recorded: updates 3 to 4 were not made by this command"]


def test_seconds_are_split_and_add_up(monkeypatch):
    """An interval of 10 s, of which 2 were a validation: pieces, operations and shares by hand."""
    now, seconds = [100.0], {"validating": 5.0}
    monkeypatch.setattr("transformer_jax.training.throughput.time.monotonic", lambda: now[0])
    model = small_config()
    lengths = np.array([[3, 4], [5, 2]], np.int32)
    clock = Throughput(lengths, model, seconds, peak=1e6)
    assert clock.rates() == {}
    clock.count(PlannedBatch(Shape(2, 8, 8), np.array([0, 1]), np.array([0, 1])))
    now[0] += 10
    seconds |= {"validating": 7.0, "waiting for data": 1.0, "waiting for the device": 4.0, "saving a checkpoint": 0.5}
    found = clock.rates()
    assert found == pytest.approx(
        {
            "tokens_per_second": 14 / 8, "fill": 14 / 32, "data_seconds": 1.0, "device_seconds": 4.0,
            "checkpoint_seconds": 0.5, "host_seconds": 2.5,
            "model_flops_utilisation": TRAINING * (forward_flops(model, 3, 4) + forward_flops(model, 5, 2)) / 8 / 1e6,
        }
    )  # fmt: skip
    clock.restart()
    assert clock.rates() == {}


@pytest.mark.parametrize(
    ("kind", "peak"),
    [("TPU v5 lite", 197e12), ("TPU v3", 61.5e12), ("NVIDIA H200", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12),
     ("NVIDIA L40S", None), ("cpu", None)],
)  # fmt: skip
def test_the_peak_of_a_device_by_jaxs_name(kind, peak):
    assert peak_flops(kind) == peak


class Clock:
    """Time that passes only while the heartbeat's thread waits; a line is said every 30 s after the first 310."""

    def __init__(self, report):
        self.report, self.now, self.ended = report, 0.0, threading.Event()

    def wait(self, seconds):
        until = self.now + seconds
        for said in range(310, 600, 30):
            if self.now < said <= until:
                self.now = said
                self.report.say("a line")
        self.now = until
        if until < 600:
            return False
        self.ended.set()
        return True

    def set(self):
        assert self.ended.is_set()


def test_a_heartbeat_names_the_phase_when_nothing_is_printed(tmp_path, capsys, monkeypatch):
    """A run that hangs says in what, on its terminal and in log.txt; one that prints needs no heartbeat."""
    monkeypatch.setattr("transformer_jax.training.reporting.time.monotonic", lambda: clock.now)
    clock = Clock(None)
    clock.report = report = Reporter(heartbeat=60.0)
    report._closed = clock
    report.attach(tmp_path)
    with report.during("validating"), report.during("compiling"), report:
        assert clock.ended.wait(60)
    beats = [f"still compiling, for {seconds} s" for seconds in (60, 120, 180, 240, 300)]
    assert re.findall("still .*", capsys.readouterr().out) == beats
    assert re.findall("still .*", (tmp_path / "log.txt").read_text()) == beats
    assert report.seconds["validating"] == report.seconds["compiling"] == clock.now


def test_progress_of_a_validation(capsys):
    """A line now and then, or a live one of its own above that of the updates where there is a terminal."""
    with Reporter(quiet=0.0) as report, report.counting("validating", 20) as done:
        done(7)
    assert "validating 7/20 sentences" in capsys.readouterr().out
    with Reporter() as report, report.counting("validating", 20) as done:
        done(7)
    assert capsys.readouterr().out == ""
    screen = io.StringIO()
    with Reporter() as report:
        report.console = Console(file=screen, force_terminal=True, width=80)
        report.start(3, 10)
        with report.counting("validating", 20) as done:
            done(7)
            report._progress.refresh()
        report.progress(4, 10, {"loss": 1.0, "learning_rate": 0.1})
        assert [task.completed for task in report._progress.tasks] == [4]
    assert re.search(r"validating, sentence.* 7/20", screen.getvalue())
