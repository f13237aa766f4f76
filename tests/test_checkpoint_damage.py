"""Damaged checkpoints: noticed, named, and passed over for the newest sound one."""

import itertools
import os
import random
import shutil
import sys
import types

import jax.numpy as jnp
import pytest
from small_checkpoints import Run, assert_same, data_files, flip, flip_value, make_tiny_state

from transformer_jax.checkpointing.array_files import one_error_only
from transformer_jax.checkpointing.checkpoints import load_params
from transformer_jax.errors import UserError


def test_a_reader_that_outlives_a_failed_read_says_nothing(monkeypatch):
    """It meets a closed loop, in a thread of its own and whenever it gets there; other errors are told of as ever."""
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: told.append(str(unraisable.exc_value)))
    for _ in range(2):
        with pytest.raises(ValueError, match="damaged"), one_error_only():
            raise ValueError("damaged")
        with one_error_only():
            pass
        for message in ("Event loop is closed", "another"):
            sys.unraisablehook(types.SimpleNamespace(exc_value=RuntimeError(message)))
    assert told == ["another", "another"]


def test_a_flipped_bit_in_any_file_is_noticed_or_harmless(tmp_path):
    """Every file of a checkpoint in turn, three places each: the older step is used, loudly, or nothing has changed."""
    Run(tmp_path / "sound").save(5, 10).checkpoints.close()
    randomness = random.Random(0)
    noticed = set()
    for path in data_files(tmp_path / "sound" / "10"):
        name = path.relative_to(tmp_path / "sound")
        for position in {randomness.randrange(max(path.stat().st_size, 1)) for _ in range(3)}:
            folder = tmp_path / "damaged"
            shutil.copytree(tmp_path / "sound", folder)
            if path.stat().st_size:
                flip(folder / name, position)
            run = Run(folder)
            restored = run.restore()
            assert_same(restored.state, make_tiny_state(restored.step))
            assert restored.extra == {"at": restored.step}
            assert (restored.step == 5) == (len(run.warnings) == 1 and str(folder / "10") in run.warnings[0])
            if restored.step == 5:
                noticed.add(name.parts[1])
            shutil.rmtree(folder)
    assert noticed >= {"params", "training", "record"}


def test_a_flipped_bit_in_an_array_names_the_array(tmp_path):
    Run(tmp_path).save(5, 10)
    flip_value(tmp_path / "10", 10.5)
    run = Run(tmp_path)
    assert run.restore().step == 5
    assert len(run.warnings) == 1
    assert "params/w is not as it was written" in run.warnings[0]
    assert "using step 5" in run.warnings[0]


def test_a_truncated_or_missing_file_is_noticed_and_named(tmp_path):
    """Every file of a checkpoint in turn, cut to half, to nothing, and removed."""
    Run(tmp_path / "sound").save(5, 10).checkpoints.close()
    files = data_files(tmp_path / "sound" / "10")
    assert len(files) > 8
    for path, size in itertools.product(files, ("half", "empty", None)):
        folder = tmp_path / "damaged"
        shutil.copytree(tmp_path / "sound", folder)
        victim = folder / path.relative_to(tmp_path / "sound")
        if size is None:
            victim.unlink()
        else:
            os.truncate(victim, path.stat().st_size // 2 if size == "half" else 0)
        run = Run(folder)
        restored = run.restore()
        assert restored.step == 5
        assert_same(restored.state, make_tiny_state(5))
        assert len(run.warnings) == 1 and f"{folder / '10'}: " in run.warnings[0]
        assert str(victim.relative_to(folder / "10")) in run.warnings[0]
        shutil.rmtree(folder)


def test_an_emptied_folder_is_noticed(tmp_path):
    """Every folder of a checkpoint in turn."""
    Run(tmp_path / "sound").save(5, 10).checkpoints.close()
    top = tmp_path / "sound" / "10"
    for path in [top, *(path for path in sorted(top.rglob("*")) if path.is_dir() and any(path.iterdir()))]:
        folder = tmp_path / "damaged"
        shutil.copytree(tmp_path / "sound", folder)
        victim = folder / path.relative_to(tmp_path / "sound")
        shutil.rmtree(victim)
        victim.mkdir()
        run = Run(folder)
        assert run.restore().step == 5
        assert len(run.warnings) == 1 and str(folder / "10") in run.warnings[0]
        shutil.rmtree(folder)


def test_a_folder_that_was_renamed_or_mixed_with_another_is_noticed(tmp_path):
    Run(tmp_path).save(5, 6).checkpoints.close()
    shutil.copytree(tmp_path / "5", tmp_path / "7")
    other = Run(tmp_path / "other").checkpoints
    other.save(8, {"params": {"v": jnp.ones(2)}, "step": jnp.int32(8)}, score=None)
    other.close()
    Run(tmp_path).save(8)
    shutil.rmtree(tmp_path / "8" / "params")
    shutil.copytree(tmp_path / "other" / "8" / "params", tmp_path / "8" / "params")
    run = Run(tmp_path)
    assert run.restore().step == 6
    assert "8: its file params/" in run.warnings[0]
    assert "7: it holds step 5" in run.warnings[1]


def test_after_a_fall_back_the_same_step_is_saved_again(tmp_path):
    Run(tmp_path).save(5, 10)
    flip_value(tmp_path / "10", 10.5)
    run = Run(tmp_path)
    run.restore()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["5", "damaged-10"]
    run.save(10)
    restored = run.restore()
    assert restored.step == 10
    assert_same(restored.state, make_tiny_state(10))
    assert len(run.warnings) == 1


def test_with_no_sound_step_left_training_does_not_start_afresh(tmp_path):
    Run(tmp_path).save(5, 10)
    for step in (5, 10):
        flip_value(tmp_path / str(step), step + 0.5)
    for _ in range(2):  # the refusal moves nothing, so the next start is refused too
        with pytest.raises(UserError, match=r"no sound checkpoint .*step 10: params/w .*step 5: params/w"):
            Run(tmp_path).restore()
    with pytest.raises(UserError, match="step 10: params/w"):
        load_params(tmp_path, 10, warn=pytest.fail)


def test_translation_passes_over_a_damaged_step_and_changes_nothing_on_disk(tmp_path):
    Run(tmp_path).save(5, 10, scores={10: 1.0})
    (tmp_path / "11").mkdir()
    (tmp_path / "12.orbax-checkpoint-tmp").mkdir()
    flip_value(tmp_path / "10", 10.5)
    before = sorted(tmp_path.rglob("*"))
    for wanted in (None, "best"):
        warnings: list[str] = []
        loaded = load_params(tmp_path, wanted, warn=warnings.append)
        assert loaded.step == 5
        assert_same(loaded.params, make_tiny_state(5)["params"])
        assert any("10: params/w" in warning for warning in warnings)
    assert sorted(tmp_path.rglob("*")) == before
