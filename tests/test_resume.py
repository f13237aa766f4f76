"""A run that is stopped, killed or damaged goes on as if it had never stopped, or says why it does not."""

import dataclasses
import itertools
import json
import pathlib
import shutil
import signal
import threading

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from small_runs import (
    act_after_writing,
    metrics,
    pairs,
    programs_kept_in,
    run_config,
    saved,
    straight_run,
    watch_updates,
    write_pairs,
)

from transformer_jax.data.batches import batches_from
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import UserError
from transformer_jax.parallel.mesh import AXES, make_mesh
from transformer_jax.training import loop, placing
from transformer_jax.training.loop import train
from transformer_jax.training.placing import place
from transformer_jax.training.preparation import prepare
from transformer_jax.training.profiling import still_ahead


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory):
    with programs_kept_in(tmp_path_factory.mktemp("programs")):
        yield


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Six updates without a stop, and their configuration."""
    return straight_run(tmp_path_factory.mktemp("straight"))


@pytest.fixture(scope="module")
def stopped_once(straight, tmp_path_factory):
    """The same run, ended by SIGTERM at its third update."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        act_after_writing(patch, 3, lambda: signal.raise_signal(signal.SIGTERM))
        train(straight[1], run)
    assert stop.value.code == 128 + signal.SIGTERM
    return run


@pytest.fixture
def stopped(stopped_once, straight, tmp_path):
    """A copy of that run, and its configuration."""
    shutil.copytree(stopped_once, tmp_path / "run")
    return tmp_path / "run", straight[1]


def damage(step_folder):
    """Overwrites the middle of the largest file of a checkpoint."""
    path = max((path for path in step_folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    octets = bytearray(path.read_bytes())
    third = len(octets) // 3
    octets[third : 2 * third] = bytes(third)
    path.write_bytes(octets)


def test_three_updates_and_three_more_are_six(straight, stopped):
    """C1: parameters, moments, update count, losses, scores and data position, all to the last bit, with dropout."""
    folder, config = stopped
    assert list(saved(folder)) == [2, 3] and metrics(folder, "step", "loss")[-1][0] == 3
    train(config, folder)
    assert list(saved(folder)) == [2, 3, 4, 6]
    assert saved(folder) == saved(straight[0])
    assert metrics(folder) == metrics(straight[0])
    results = [json.loads((run / "results.json").read_text()) for run in (folder, straight[0])]
    assert results[0]["scores"] == results[1]["scores"]


@pytest.mark.slow
def test_more_steps_than_at_first_go_on(straight, tmp_path):
    """C1: train.steps may grow; the end is that of a run that knew from the start."""
    config = straight[1]
    shorter = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=4))
    train(shorter, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "results.json").read_text())["step"] == 4
    train(config, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "results.json").read_text())["averaged_steps"] == [4, 6]
    assert saved(tmp_path / "run")[6] == saved(straight[0])[6]
    train(shorter, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "results.json").read_text())["step"] == 6


@pytest.mark.parametrize("packing", [True, False])
def test_every_pair_is_taken_in_its_turn_across_a_stop_and_an_epochs_end(packing, tmp_path):
    """C2: the pairs of eight batches, of which three make an epoch, with and without a stop after any of them."""
    config = run_config(tmp_path / "text", data__packing=packing, data__max_length=24, data__batch_tokens=112)
    plan = prepare(config, tmp_path / "run", print).plan

    def taken(epoch, index, count):
        batches = list(itertools.islice(batches_from(plan, epoch, index), count))
        return [batch.examples.tolist() for _, _, batch in batches], batches[-1][:2]

    whole, _ = taken(0, 0, 8)
    epoch = len(plan.epoch(0))
    assert sorted(itertools.chain(*whole[:epoch])) == list(range(40)) and epoch < 8
    for stop in range(1, 8):
        first, position = taken(0, 0, stop)
        assert first + taken(*position, 8 - stop)[0] == whole


@pytest.mark.slow
def test_the_loop_takes_the_batches_that_follow_its_checkpoint(stopped, straight, monkeypatch):
    """C2: in the loop itself, through the end of an epoch; the checkpoint is not of what was made ahead."""
    consumed = []
    watch_updates(monkeypatch, lambda batch: consumed.append(jax.device_get(batch)))
    folder, config = stopped
    train(config, folder)
    prepared = prepare(config, folder, print)
    planned = [batch for _, _, batch in itertools.islice(batches_from(prepared.plan, 0, 0), 6)][3:]
    expected = [place(batch, prepared.train, make_mesh(config.mesh)) for batch in planned]
    jax.tree.map(np.testing.assert_array_equal, consumed, jax.device_get(expected))
    assert len(prepared.plan.epoch(0)) < 6


@pytest.mark.slow
def test_a_run_whose_text_cannot_be_read_any_more_ends_with_that_error(straight, tmp_path, monkeypatch):
    """C2: the updates before that batch are made and kept, and the thread that met the error keeps nothing waiting."""
    assemble, numbers = placing.assemble, itertools.count(1)

    def failing(*given, **options):
        if threading.current_thread().name == "prefetch" and next(numbers) == 5:
            raise OSError("the disk is gone")
        return assemble(*given, **options)

    monkeypatch.setattr(placing, "assemble", failing)
    with pytest.raises(OSError, match="the disk is gone"):
        train(straight[1], tmp_path / "run")
    assert max(saved(tmp_path / "run")) == 4
    assert [thread for thread in threading.enumerate() if thread.name == "prefetch"] == []
    monkeypatch.undo()
    train(straight[1], tmp_path / "run")
    assert saved(tmp_path / "run") == saved(straight[0]) and metrics(tmp_path / "run") == metrics(straight[0])


@pytest.mark.slow
def test_an_end_between_validation_and_save_leaves_no_second_line(straight, tmp_path, monkeypatch):
    """C1: the lines of update 4 are written, its checkpoint is not; the run goes on from update 3."""
    save = loop.Checkpoints.save

    def save_or_die(self, step, *given, **options):
        if step == 4:
            raise MemoryError
        save(self, step, *given, **options)

    monkeypatch.setattr(loop.Checkpoints, "save", save_or_die)
    with pytest.raises(MemoryError):
        train(straight[1], tmp_path / "run")
    assert list(saved(tmp_path / "run")) == [2, 3] and "dev_bleu" in metrics(tmp_path / "run")[-1]
    monkeypatch.undo()
    train(straight[1], tmp_path / "run")
    assert saved(tmp_path / "run") == saved(straight[0]) and metrics(tmp_path / "run") == metrics(straight[0])


@pytest.mark.slow
def test_metrics_after_the_checkpoint_are_dropped_and_a_cut_line_too(stopped, straight):
    """Killed after update 4 was written down, in the middle of the next line."""
    folder, config = stopped
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 99.0}\n{"step": 5, "lo')
    train(config, folder)
    assert "what came after it, up to update 4 or later, is made again" in (folder / "log.txt").read_text()
    assert metrics(folder) == metrics(straight[0])
    lines = (folder / "metrics.jsonl").read_text().removesuffix("\n").split("\n")
    steps = [line["step"] for line in map(json.loads, lines) if "loss" in line]
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_passed_over_loudly(stopped, straight, capsys):
    folder, config = stopped
    damage(folder / "checkpoints" / "3")
    (folder / "checkpoints" / "7").mkdir()
    train(config, folder)
    out = capsys.readouterr().out
    assert "warning: skipped checkpoint" in out and "going on from update 2" in out
    assert (folder / "checkpoints" / "damaged-3").is_dir()
    assert saved(folder) == saved(straight[0]) and metrics(folder) == metrics(straight[0])


def test_a_folder_of_damaged_checkpoints_is_not_trained_over(stopped):
    folder, config = stopped
    for step in (2, 3):
        damage(folder / "checkpoints" / str(step))
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"no sound checkpoint .*step 3.*step 2"):
        train(config, folder)
    assert (folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__d_ff": 24}, "model.d_ff 16, and this command says 24"),
        ({"model__vocab_size": 400}, "model.vocab_size"),
        ({"optimizer__learning_rate": 0.02}, "optimizer.learning_rate 0.01"),
        ({"data__batch_tokens": 128}, "data.batch_tokens"),
        ({"train__seed": 1}, "train.seed"),
        ({"train__label_smoothing": 0.0}, "train.label_smoothing"),
    ],
)
def test_a_run_does_not_go_on_under_another_configuration(changes, words, straight):
    """C7: every difference that would change an update is refused, with both values, and nothing is written."""
    folder, config = straight
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    text = pathlib.Path(config.data.train_source).parent
    with pytest.raises(UserError, match=words):
        train(run_config(text, **changes), folder)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.slow
def test_a_run_goes_on_with_another_way_to_work_out_an_update(stopped, straight, capsys):
    """C7: what saves memory or compilation may change in the middle of a run, as the mesh may; it says so."""
    folder, config = stopped
    unrolled = dataclasses.replace(config.model, scan_layers=False, remat="full", attention_impl="fused")
    train(dataclasses.replace(config, model=unrolled), folder)
    said = [line for line in capsys.readouterr().out.splitlines() if "to rounding only" in line]
    assert len(said) == 1 and "model.remat is 'full' from here on and was 'none'" in said[0]
    assert "model.scan_layers is False" in said[0] and "model.attention_impl is 'fused'" in said[0]
    for name in ("loss", "dev_nll", "gradient_norm"):
        assert metrics(folder, name) == pytest.approx(np.array(metrics(straight[0], name)), rel=1e-5), name
    results = [json.loads((run / "results.json").read_text()) for run in (folder, straight[0])]
    assert results[0]["averaged_steps"] == results[1]["averaged_steps"] == [4, 6]


def test_a_mesh_that_does_not_divide_the_model_is_refused_before_the_text_is_prepared(tmp_path, monkeypatch):
    mesh = AbstractMesh((1, 1, 3), AXES, axis_types=(AxisType.Auto,) * 3)
    monkeypatch.setattr(loop, "make_mesh", lambda config: mesh)
    monkeypatch.setattr(loop, "prepare", lambda *given: pytest.fail("that may take hours"))
    with pytest.raises(
        UserError, match=r"has 16 along F, which mesh\.tensor 3 does not divide: choose a divisor of 16"
    ):
        train(run_config(tmp_path / "text", model__num_heads=3, model__d_k=8, model__d_v=8), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_why_there_is_no_trace_is_said(straight, capsys):
    train(straight[1], straight[0], profile=range(2, 4))
    assert (
        "warning: --profile-steps: there is no trace, as updates 2 to 3 are made: this run" in capsys.readouterr().out
    )
    assert not (straight[0] / "profile").exists()
    assert still_ahead(range(6, 8), 6, pytest.fail) == range(6, 8) and still_ahead(None, 6, pytest.fail) is None


def test_steps_are_fixed_where_the_schedule_depends_on_them(tmp_path):
    linear = run_config(tmp_path / "text", optimizer__decay="linear", train__steps=1)
    (tmp_path / "run" / "checkpoints" / "1").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text(linear.to_json())
    with pytest.raises(UserError, match=r"train\.steps 1, and this command says 9"):
        train(dataclasses.replace(linear, train=dataclasses.replace(linear.train, steps=9)), tmp_path / "run")


def test_another_tokenizer_or_text_is_refused(straight, tmp_path):
    """C7: of the same size too; config.json stays as it was."""
    folder = tmp_path / "run"
    shutil.copytree(straight[0], folder)
    config, before = straight[1], (folder / "config.json").read_bytes()
    other = [sentence for pair in pairs(40, seed=9, words=["abc", "abd", "xyz"]) for sentence in pair]
    Tokenizer.train(other, folder / "tokenizer.model", vocab_size=290)
    with pytest.raises(UserError, match="trained with another tokenizer than there is now"):
        train(config, folder)
    shutil.copyfile(straight[0] / "tokenizer.model", folder / "tokenizer.model")
    kept = pathlib.Path(config.data.train_source).read_bytes()
    try:
        write_pairs(pathlib.Path(config.data.train_source), pairs(40, seed=9))
        with pytest.raises(UserError, match="trained with another text than there is now"):
            train(config, folder)
    finally:
        pathlib.Path(config.data.train_source).write_bytes(kept)
    assert (folder / "config.json").read_bytes() == before
    given = Tokenizer.train(other, tmp_path / "other.model", vocab_size=290)
    mine = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=str(tmp_path / "other.model")))
    assert given.size > 0
    with pytest.raises(UserError, match=r"is not the tokenizer of data.tokenizer"):
        train(mine, folder)


def test_checkpoints_of_another_run_are_refused(straight, tmp_path):
    """C7: of the same text, tokenizer and sizes, so that nothing but what they were trained with tells them apart."""
    folder = tmp_path / "run"
    shutil.copytree(straight[0], folder)
    config = dataclasses.replace(straight[1], train=dataclasses.replace(straight[1].train, seed=1))
    (folder / "config.json").write_text(config.to_json())
    before = saved(folder)
    with pytest.raises(
        UserError, match=r"checkpoints is of another run: it was trained with train\.seed 0, and .* has 1"
    ):
        train(config, folder)
    assert saved(folder) == before


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "has checkpoints but no config.json"),
        (b"{", "config.json, line 1: not JSON"),
        (b"\xff\xfe", "config.json: cannot be read"),
        (b'{"model": {"heads": 2}}', "config.json: there is no field 'model.heads'"),
    ],
)
def test_a_damaged_config_json_is_named(content, words, tmp_path):
    (tmp_path / "run" / "checkpoints" / "3").mkdir(parents=True)
    if content is not None:
        (tmp_path / "run" / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=words):
        train(run_config(tmp_path / "text"), tmp_path / "run")
