"""`describe RUN --digest`: the bits that a run has come to, and only of a checkpoint that is sound."""

import json

import jax.numpy as jnp
import pytest
from small_checkpoints import Run, flip_value, make_state, make_tiny_state

from transformer_jax.checkpointing.checkpoints import Checkpoints, digest_tree
from transformer_jax.cli.main import main


def described(run, capsys):
    assert main(["describe", str(run), "--digest", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def saved(run, state, step=7):
    checkpoints = Checkpoints(run / "checkpoints", keep=3, warn=pytest.fail)
    checkpoints.save(step, state, score=None)
    checkpoints.close()
    return run


def test_the_digests_are_those_of_the_arrays(tmp_path, capsys):
    state = make_state(7)
    found = described(saved(tmp_path / "run", state), capsys)
    assert found == {
        "step": 7,
        "params": digest_tree(state["params"]),
        "optimizer_state": digest_tree(state["optimizer_state"]),
        "state": digest_tree(state),
    }
    assert main(["describe", str(tmp_path / "run"), "--digest"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "7"]
    assert lines[1].split() == ["params", found["params"]]
    assert lines[2].split() == ["optimizer", "state", found["optimizer_state"]]


def test_one_bit_anywhere_changes_its_digest_alone(tmp_path, capsys):
    state = make_state(7)
    before = described(saved(tmp_path / "a", state), capsys)
    moments = state["optimizer_state"][0]
    changed = moments._replace(mu={**moments.mu, "embedding": moments.mu["embedding"].at[0, 0].set(1e-30)})
    after = described(
        saved(tmp_path / "b", {**state, "optimizer_state": (changed, state["optimizer_state"][1])}), capsys
    )
    assert {name for name in before if before[name] != after[name]} == {"optimizer_state", "state"}
    other = described(saved(tmp_path / "c", {**state, "step": jnp.int32(8)}), capsys)
    assert {name for name in before if before[name] != other[name]} == {"state"}


def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path, capsys):
    Run(tmp_path / "checkpoints").save(5, 10)
    flip_value(tmp_path / "checkpoints" / "10", 10.5)
    assert main(["describe", str(tmp_path), "--digest", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["params"] == digest_tree(make_tiny_state(5)["params"])
    assert "10: params/w is not as it was written" in shown.err
    flip_value(tmp_path / "checkpoints" / "5", 5.5)
    assert main(["describe", str(tmp_path), "--digest"]) == 2
    assert "no sound checkpoint" in capsys.readouterr().err


def test_what_is_no_run_is_one_line(tmp_path, capsys):
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    for folder, words in {"none": "has no checkpoints; name the --workdir", "empty": "no checkpoint in"}.items():
        assert main(["describe", str(tmp_path / folder), "--digest"]) == 2
        assert words in capsys.readouterr().err
