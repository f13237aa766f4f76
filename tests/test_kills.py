"""A small version of benchmarks/kills.py: a run killed three times ends as one that is never stopped."""

import os
import pathlib
import subprocess
import sys

import kills
import pytest

ROOT = pathlib.Path(__file__).parent.parent

CONFIG = """
import pathlib, sys
sys.path.insert(0, {tests!r})
from small_runs import run_config

def get_config(variant):
    return run_config(
        pathlib.Path({text!r}), train__steps=60, train__evaluate_every=30, train__checkpoint_every=5,
        train__keep_checkpoints=3, optimizer__learning_rate=0.001,
    )
"""


def test_kills_are_planned_alike_each_time_and_meet_saves_and_the_end():
    planned = kills.plan(20, 1000, seed=0)
    assert planned == kills.plan(20, 1000, seed=0) != kills.plan(20, 1000, seed=1)
    moments = [moment for moment, _, _ in planned]
    assert moments.count("save") > 5 and {"start", "any"} < set(moments) and moments[-1] == "end"
    updates = [update for _, update, _ in planned]
    assert updates == sorted(updates) and updates[-1] == 1000


@pytest.mark.slow
def test_a_run_killed_twice_ends_as_one_never_stopped(tmp_path):
    """C1: parameters, optimizer, kept steps, best score, averaged model, metrics and scores."""
    (tmp_path / "config.py").write_text(CONFIG.format(tests=str(ROOT / "tests"), text=str(tmp_path / "text")))
    environment = {
        **os.environ, "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    result = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "kills.py", tmp_path / "config.py", "--kills", "2", "--signals", "KILL",
         "--folder", tmp_path / "kills"],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "SIGKILL: 2 of 2 kills left what they should; the ends are the same" in result.stdout
