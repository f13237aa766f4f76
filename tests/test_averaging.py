"""The mean of checkpoints: exact, of the newest ones, and a folder that is always whole."""

import itertools
import json
import pathlib
import threading

import ml_dtypes
import numpy as np
import pytest
from small_checkpoints import flip_value

from transformer_jax.checkpointing.checkpoints import Checkpoints, digest_tree, load_params
from transformer_jax.cli.main import main
from transformer_jax.config import Config, TrainConfig
from transformer_jax.errors import UserError
from transformer_jax.training.averaging import average_checkpoints, average_run


def fail(message):
    raise AssertionError(message)


def make_run(run, weights, keep=1000, minutes=None, **extra):
    """A run's folder with a checkpoint for each step: {step: parameters}; a number is a constant weight.

    `minutes` are those trained until each step; what else is given is in the records.
    """
    run.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.model"):
        (run / name).write_text(name)
    checkpoints = Checkpoints(run / "checkpoints", keep=keep, warn=fail)
    for step, value in weights.items():
        trained = {} if minutes is None else {"seconds": 60.0 * minutes[step]}
        params = value if isinstance(value, dict) else {"layer": {"w": np.full((2, 3), value, np.float32)}}
        state = {"step": step, "params": params, "optimizer_state": {"count": np.int32(step)}}
        checkpoints.save(step, state, {"tokenizer": "T", "text": "U"} | trained | extra, score=None)
    checkpoints.close()
    return run


def mean(run):
    return load_params(run / "averaged" / "checkpoints", warn=fail)


@pytest.mark.parametrize("order", list(itertools.permutations([1.0, 2.0, 6.0])))
def test_the_mean_is_exact_in_every_order(order, tmp_path):
    """C8: 1, 2 and 6 make 3; the update counts are no part of it."""
    run = make_run(tmp_path / "run", dict(zip([1, 2, 3], order, strict=True)))
    path, steps = average_run(run, 3)
    assert path == run / "averaged" and steps == [1, 2, 3]
    found = mean(run)
    assert found.params["layer"]["w"].tolist() == [[3.0] * 3] * 2
    assert found.params["layer"]["w"].dtype == np.float32
    assert found.step == 3 and list(found.state) == ["params"]
    assert found.extra == {"tokenizer": "T", "text": "U", "averaged_steps": [1, 2, 3]}
    assert [(path / name).read_text() for name in ("config.json", "tokenizer.model")] == [
        "config.json", "tokenizer.model",
    ]  # fmt: skip


def test_a_run_may_be_named_from_the_folder_that_holds_it(tmp_path, monkeypatch):
    """As `--workdir runs/demo` does: orbax reads absolute paths only."""
    make_run(tmp_path / "run", {1: 1.0, 2: 3.0})
    monkeypatch.chdir(tmp_path)
    average_run(pathlib.Path("run"), 2)
    assert mean(tmp_path / "run").params["layer"]["w"].tolist() == [[2.0] * 3] * 2


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("copies", [1, 7])
def test_the_mean_of_copies_is_the_copy(dtype, copies, tmp_path):
    """C8: to the last bit, and twice the same."""
    params = {"w": np.random.default_rng(0).normal(size=500).astype(dtype)}
    run = make_run(tmp_path / "run", dict.fromkeys(range(1, copies + 1), params))
    for _ in range(2):
        average_run(run, copies)
        assert digest_tree(mean(run).params) == digest_tree(params)


def test_many_small_numbers_lose_no_digits(tmp_path, monkeypatch):
    """C8: a sum in bfloat16 would stop at 256, one in float32 at 2^24; the arrays are counted without a disk."""
    value = np.asarray([1.0, 2.0**24 + 2], np.float32)
    stored = {"params/w": {"shape": [2], "dtype": "float32"}}
    for name, stand_in in {
        "read_record": lambda folder: {},
        "stored_params": lambda folder, record: stored,
        "read_arrays": lambda folder, stored: iter([("params/w", value)]),
    }.items():
        monkeypatch.setattr(f"transformer_jax.training.averaging.{name}", stand_in)
    params, steps = average_checkpoints(tmp_path, list(range(1000)), fail)
    assert params["w"].tolist() == value.tolist() and len(steps) == 1000


def test_the_last_are_those_with_the_greatest_numbers(tmp_path):
    """C8, C9: 100 comes after 9; step 0 is a step like any other."""
    run = make_run(tmp_path / "run", {0: 5.0, 9: 1.0, 10: 2.0, 100: 6.0})
    assert average_run(run, 2)[1] == [10, 100]
    assert mean(run).params["layer"]["w"][0, 0] == 4.0
    assert average_run(run, 4)[1] == [0, 9, 10, 100]
    assert mean(run).params["layer"]["w"][0, 0] == 3.5
    assert average_run(make_run(tmp_path / "first", {0: 5.0}), 1)[1] == [0]


@pytest.mark.parametrize(
    ("last", "apart", "steps"),
    [
        (1, 10.0, [7]),
        (3, 10.0, [3, 4, 7]),  # 6 is 4 minutes before 7, and 5 is 9
        (3, 9.0, [3, 5, 7]),
        (2, 0.5, [6, 7]),
        (4, 10.0, [1, 3, 4, 7]),  # 2 is 9.9 minutes before 3
    ],
)
def test_the_last_that_lie_so_many_minutes_apart(last, apart, steps, tmp_path):
    """Section 6.1: checkpoints written at 10-minute intervals, the newest among them; whole minutes are enough."""
    minutes = {1: 1.0, 2: 10.1, 3: 20.0, 4: 30.0, 5: 36.0, 6: 41.0, 7: 45.0}
    run = make_run(tmp_path / "run", {step: float(step) for step in minutes}, minutes=minutes)
    assert average_run(run, last, minutes_apart=apart)[1] == steps
    assert mean(run).params["layer"]["w"][0, 0] == np.float32(np.mean(steps))


def test_minutes_that_leave_too_few_or_are_not_known(tmp_path):
    run = make_run(tmp_path / "run", {1: 1.0, 2: 2.0}, minutes={1: 0.0, 2: 5.0})
    with pytest.raises(UserError, match=r"has 1 checkpoints that lie 10 minutes of training apart, fewer than the 2"):
        average_run(run, 2, minutes_apart=10.0)
    assert average_run(run, 2, minutes_apart=5.0)[1] == [1, 2]
    (run / "checkpoints" / "1" / "record" / "record.json").write_bytes(b"{")
    warnings = []
    with pytest.raises(UserError, match="has 1 checkpoints"):
        average_run(run, 2, minutes_apart=5.0, warn=warnings.append)
    assert len(warnings) == 1 and "checkpoints/1 is left out" in warnings[0]
    with pytest.raises(UserError, match="does not say how long"):
        average_run(make_run(tmp_path / "old", {1: 1.0, 2: 2.0}), 2, minutes_apart=1.0)


def test_arrays_in_many_groups_and_a_damaged_one_in_the_last(tmp_path, monkeypatch):
    """A checkpoint whose first arrays are in the sum by the time that a later one proves damaged leaves no trace."""
    monkeypatch.setattr("transformer_jax.checkpointing.array_files.GROUP_BYTES", 4000)
    weights = {
        step: {name: np.full(1000, step + 0.5 + place, np.float32) for place, name in enumerate("abc")}
        for step in (1, 2, 3)
    }
    run = make_run(tmp_path / "run", weights)
    flip_value(run / "checkpoints" / "2", 4.5)
    warnings = []
    assert average_run(run, 3, warn=warnings.append)[1] == [1, 3]
    assert len(warnings) == 1 and "checkpoints/2 is left out of the mean: params/c" in warnings[0]
    assert {name: set(array.tolist()) for name, array in mean(run).params.items()} == {
        "a": {2.5},
        "b": {3.5},
        "c": {4.5},
    }


def test_more_than_there_are_is_refused(tmp_path):
    run = make_run(tmp_path / "run", {1: 1.0, 2: 2.0})
    with pytest.raises(UserError, match="has 2 checkpoints, fewer than the 3 to average"):
        average_run(run, 3)
    assert not (run / "averaged").exists()


def test_other_shapes_are_refused(tmp_path):
    run = make_run(tmp_path / "run", {1: {"w": np.zeros(3)}, 2: {"w": np.zeros(4)}})
    with pytest.raises(UserError, match=r"checkpoint .*2 has parameters of other names or shapes than checkpoint 1"):
        average_run(run, 2)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    """Of equal shapes, so that a mean there would be, of numbers that have nothing to do with one another."""
    run = make_run(tmp_path / "run", {1: 1.0})
    make_run(tmp_path / "run", {2: 2.0}, tokenizer="another")
    with pytest.raises(UserError, match=r"checkpoint .*2 is of another run than checkpoint 1, by its tokenizer"):
        average_run(run, 2)
    assert not (run / "averaged").exists()


def test_configurations_are_compared_in_the_fields_that_both_checkpoints_have(tmp_path):
    """C8: a run may have gone on with a version of the package that writes down more, or less."""
    run = make_run(tmp_path / "run", {1: 1.0}, configuration='{"model.d_ff": 16, "model.remat": "none"}')
    make_run(tmp_path / "run", {2: 3.0}, configuration='{"model.d_ff": 16}')
    assert average_run(run, 2)[1] == [1, 2]
    make_run(tmp_path / "run", {3: 5.0}, configuration='{"model.d_ff": 24}')
    with pytest.raises(UserError, match="of another run than checkpoint 1, by its configuration"):
        average_run(run, 3)


def test_two_at_once_take_turns(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", {1: 1.0, 2: 3.0})
    save, working, errors = Checkpoints.save, [], []

    def alone(*arguments, **options):
        working.append(None)
        assert len(working) == 1
        save(*arguments, **options)
        working.pop()

    def average():
        try:
            average_run(run, 2)
        except BaseException as error:
            errors.append(error)

    monkeypatch.setattr(Checkpoints, "save", alone)
    threads = [threading.Thread(target=average) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert mean(run).params["layer"]["w"][0, 0] == 2.0
    assert sorted(path.name for path in run.iterdir()) == ["averaged", "checkpoints", "config.json", "tokenizer.model"]


def test_a_run_without_a_checkpoint_has_no_mean(tmp_path):
    with pytest.raises(UserError, match="has no whole checkpoint to average: train the run first"):
        average_run(make_run(tmp_path / "run", {}), 1)


def test_a_damaged_checkpoint_is_left_out_loudly(tmp_path):
    run = make_run(tmp_path / "run", {1: 1.0, 2: 2.0, 3: 6.0})
    record = run / "checkpoints" / "2" / "record" / "record.json"
    kept = record.read_bytes()
    record.write_bytes(kept.replace(b'"step"', b'"stop"'))
    warnings = []
    assert average_run(run, 3, warn=warnings.append)[1] == [1, 3]
    assert mean(run).params["layer"]["w"][0, 0] == 3.5
    assert len(warnings) == 1 and "checkpoints/2 is left out of the mean" in warnings[0]
    with pytest.raises(UserError, match="none of the checkpoints 3 in"):
        (run / "checkpoints" / "3" / "record" / "record.json").write_bytes(b"{")
        average_run(run, 1, warn=warnings.append)


def test_an_earlier_mean_stays_until_the_new_one_is_whole(tmp_path, monkeypatch):
    """A kill in the middle leaves the old folder as it was; what it left half-done is gone after the next call."""
    run = make_run(tmp_path / "run", {1: 1.0, 2: 3.0})
    average_run(run, 1)

    def killed(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            average_run(run, 2)
    assert mean(run).extra["averaged_steps"] == [2]
    average_run(run, 2)
    assert mean(run).extra["averaged_steps"] == [1, 2]
    assert sorted(path.name for path in run.iterdir()) == ["averaged", "checkpoints", "config.json", "tokenizer.model"]


def test_a_run_that_lacks_its_tokenizer_is_named(tmp_path):
    run = make_run(tmp_path / "run", {1: 1.0})
    (run / "tokenizer.model").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.model: No such file"):
        average_run(run, 1)


def test_the_command(tmp_path, capsys):
    run = make_run(tmp_path / "run", {step: float(step) for step in (1, 2, 3)})
    assert main(["average", str(run), "--last", "2"]) == 0
    assert capsys.readouterr().out == (
        f"{run / 'averaged'}: mean of the checkpoints of updates 2, 3; "
        f"translate, evaluate and score take it for {run} from now on\n"
    )
    (run / "config.json").write_text(Config(train=TrainConfig(average_checkpoints=3)).to_json())
    assert main(["average", str(run)]) == 0
    assert "updates 1, 2, 3;" in capsys.readouterr().out
    (run / "config.json").write_text(Config().to_json())
    for argv, words in (
        ([str(run)], "has 3 checkpoints, fewer than the 5"),
        ([str(run), "--last", "0"], "--last is 0"),
        ([str(run), "--minutes-apart", "-1"], "--minutes-apart is -1"),
        ([str(run), "--last", "2", "--minutes-apart", "10"], "does not say how long"),
        ([str(tmp_path / "none")], "has no checkpoints; name the --workdir of a run"),
    ):
        assert main(["average", *argv]) == 2
        assert words in capsys.readouterr().err
    assert json.loads((run / "checkpoints" / "3" / "record" / "record.json").read_text())["step"] == 3
