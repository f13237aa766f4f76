"""Checkpoints at gs://, where nothing can be renamed: the record, written last and removed first, makes a step."""

import dataclasses
import pathlib

import numpy as np
import object_store
import pytest
from small_checkpoints import Run, assert_same, make_tiny_state
from small_models import random_params
from small_runs import pairs, run_config

from transformer_jax.checkpointing.checkpoint_files import complete_steps
from transformer_jax.checkpointing.checkpoints import Checkpoints, load_params
from transformer_jax.cli.main import main
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import UserError
from transformer_jax.translation.run_folder import read_run

FOLDER = "gs://bucket/run/checkpoints"


@pytest.fixture(scope="module", autouse=True)
def store():
    with object_store.installed():
        yield


@pytest.fixture(autouse=True)
def empty():
    object_store.empty()


def names():
    """The folders beside each other in that of the checkpoints."""
    return sorted({name.split("/")[3] for name in object_store.OBJECTS})


def test_what_is_kept_there_is_what_would_be_kept_here(tmp_path, monkeypatch):
    """Saves, rotation, best and newest, a restore by name, a later history set aside; no folder `gs:` appears."""
    monkeypatch.chdir(tmp_path)
    scores = {5: 2.0, 10: 1.0}
    run = Run(FOLDER, keep=2).save(5, 10, 15, 20, scores=scores)
    assert names() == ["15", "20", "5"] and run.checkpoints.best_step() == 5
    assert_same(run.restore().state, make_tiny_state(20))
    assert load_params(FOLDER, "best", warn=pytest.fail).step == 5
    assert run.restore(15).extra == {"at": 15}
    run.save(17)
    assert run.checkpoints.steps() == [5, 15, 17] and "superseded-20" in names()
    run.save(17)
    assert_same(Run(FOLDER).restore().state, make_tiny_state(17))
    run.checkpoints.close()
    assert list(tmp_path.iterdir()) == []


def test_a_save_cut_short_at_any_object_leaves_the_step_before_it(tmp_path):
    """C4: a kill before every third of the objects of step 10, and after the last; what it left is removed, loudly."""
    run = Run(FOLDER).save(5)
    seen = object_store.moments(lambda: run.save(10))
    assert len(seen) > 12
    for number, moment in [*[*enumerate(seen)][::3], (len(seen) - 1, seen[-1])]:
        object_store.stand_at(moment)
        there = any("/10/" in name for name in moment)
        whole = number == len(seen) - 1
        assert load_params(FOLDER, warn=lambda message: None).step == (10 if whole else 5)
        again = Run(FOLDER)
        assert again.restore().step == (10 if whole else 5)
        assert names() == (["10", "5"] if whole else ["5"])
        assert ["cut short" in warning for warning in again.warnings] == [True] * (there and not whole)


@pytest.mark.slow
def test_a_rotation_cut_short_at_any_object_leaves_no_step_that_looks_complete():
    run = Run(FOLDER, keep=1).save(5)
    for moment in object_store.moments(lambda: run.save(10))[::3]:
        object_store.stand_at(moment)
        for step in complete_steps(FOLDER):
            assert Run(FOLDER).restore(step).step == step
        assert load_params(FOLDER, warn=lambda message: None).step in (5, 10)


def test_damage_there_is_noticed_too(tmp_path):
    Run(FOLDER).save(5, 10)
    victim = next(name for name, content in object_store.OBJECTS.items() if np.float32(10.5).tobytes() in content)
    object_store.OBJECTS[victim] = object_store.OBJECTS[victim].replace(np.float32(10.5).tobytes(), bytes(4))
    run = Run(FOLDER)
    assert run.restore().step == 5
    assert "10: params/w is not as it was written (now damaged-10)" in run.warnings[0]
    assert names() == ["5", "damaged-10"]


def test_a_store_that_takes_no_more_is_one_sentence():
    run = Run(FOLDER).save(5)

    def refuse(name):
        if "/10/training/" in name:
            raise OSError("quota exceeded")

    object_store.BEFORE_CHANGE.append(refuse)
    run.checkpoints.save(10, make_tiny_state(10), score=None)
    with pytest.raises(UserError, match=r"cannot save step 10 to gs://bucket/.*step 5 is saved and intact"):
        run.checkpoints.wait()
    object_store.BEFORE_CHANGE.clear()
    assert Run(FOLDER).restore().step == 5


def test_a_run_there_is_read_averaged_and_described(tmp_path, capsys):
    """config.json, tokenizer.model and checkpoints under one address."""
    config = run_config(tmp_path / "text")
    lines = [side for pair in pairs(40) for side in pair]
    tokenizer = Tokenizer.train(lines, tmp_path / "tokenizer.model", vocab_size=290)
    object_store.put("bucket/run/config.json", config.to_json().encode())
    object_store.put("bucket/run/tokenizer.model", (tmp_path / "tokenizer.model").read_bytes())
    params = random_params(dataclasses.replace(config.model, vocab_size=tokenizer.size))
    checkpoints = Checkpoints(FOLDER, keep=2, warn=pytest.fail)
    for step in (5, 10):
        checkpoints.save(step, {"params": params}, {"tokenizer": tokenizer.digest}, score=None)
    checkpoints.close()
    run = read_run("gs://bucket/run", None, pytest.fail)
    assert run.step == 10 and run.tokenizer.digest == tokenizer.digest
    for _ in range(2):
        assert main(["average", "gs://bucket/run", "--last", "2"]) == 0
        assert "gs://bucket/run/averaged: mean" in capsys.readouterr().out
        averaged = read_run("gs://bucket/run", None, pytest.fail)
        assert averaged.note == "mean of checkpoints 5, 10"
        assert_same(averaged.params, params)
    assert main(["describe", "gs://bucket/run", "--digest"]) == 0
    assert "step             10" in capsys.readouterr().out
    assert main(["average", "gs://bucket/nothing"]) == 2
    assert "has no checkpoints" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["s3://bucket/run", pathlib.Path("gs://bucket/run")])
def test_an_address_that_would_become_a_local_folder_is_refused(address, tmp_path, monkeypatch):
    """orbax writes s3:// to a folder of that name, and pathlib makes gs:/ of gs://."""
    monkeypatch.chdir(tmp_path)
    for use in (Run, lambda folder: load_params(folder, warn=pytest.fail)):
        with pytest.raises(UserError, match="local folders and at gs:// only"):
            use(address)
    assert list(tmp_path.iterdir()) == []
