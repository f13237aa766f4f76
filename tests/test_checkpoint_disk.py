"""Disks that are full or cannot be written, and kills in the middle of a save: the last good step stays."""

import contextlib
import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import jax.numpy as jnp
import pytest
from small_checkpoints import Run, abstract, make_tiny_state, numbered

from transformer_jax.checkpointing.checkpoint_files import as_folder, publish, staging
from transformer_jax.errors import UserError


def test_a_full_disk_is_one_sentence_and_the_last_step_is_intact(tmp_path):
    """A limit on file size makes the system refuse to write, as a full disk does."""
    run = Run(tmp_path).save(5)
    big = {"params": {"w": jnp.ones((512, 512))}, "step": jnp.int32(6)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        run.checkpoints.save(6, big, score=None)
        with pytest.raises(UserError, match=r"cannot save step 6 to .*step 5 is saved and intact") as error:
            run.checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["5"]
    assert run.restore().step == 5
    run.checkpoints.save(6, big, score=None)
    assert run.checkpoints.restore(abstract(big)).step == 6


IN_A_DISK_OF_ITS_OWN = """
import json, pathlib, subprocess, sys
import jax.numpy as jnp
sys.path[:0] = [sys.argv[1]]
from small_checkpoints import Run, make_tiny_state, numbered
from transformer_jax.errors import UserError
disk = pathlib.Path(sys.argv[2])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", disk], check=True)
run = Run(disk / "run").save(5)
(disk / "other").write_bytes(bytes(300_000))
run.checkpoints.save(6, {"params": {"w": jnp.ones((250, 300))}, "step": jnp.int32(6)}, score=None)
try:
    run.checkpoints.wait()
except UserError as error:
    print(json.dumps({"error": str(error), "left": sorted(path.name for path in (disk / "run").iterdir())}))
(disk / "other").unlink()
again = Run(disk / "run")
print(json.dumps({"resumed": again.restore().step, "warnings": again.warnings}))
again.save(6)
print(json.dumps(again.checkpoints.steps()))
"""


def test_a_disk_that_is_really_full(tmp_path):
    """A file system of 600 kB, which another file has half filled."""
    apart = ["unshare", "--mount", "--map-root-user"]
    probe = [*apart, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True).returncode != 0:
        pytest.skip("this system does not let us mount a small disk")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    tests = os.path.dirname(__file__)
    result = subprocess.run(
        [*apart, sys.executable, "-c", IN_A_DISK_OF_ITS_OWN, tests, str(tmp_path)],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    full, resumed, steps = map(json.loads, result.stdout.strip().split("\n"))
    assert re.search("cannot save step 6 to .*step 5 is saved and intact: free space there", full["error"])
    assert "\n" not in full["error"] and full["left"] == ["5"]
    assert resumed == {"resumed": 5, "warnings": []} and steps == [5, 6]


@contextlib.contextmanager
def without_privileges():
    """A superuser's test takes the rights of another user, since permissions do not bind a superuser."""
    privileged = os.geteuid() == 0
    if privileged:
        os.seteuid(65534)
    try:
        yield
    finally:
        if privileged:
            os.seteuid(0)


def test_a_read_only_folder_is_one_sentence_and_the_last_step_is_intact():
    # Not in tmp_path, into which no other user may look.
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place, "run")
        run = Run(folder).save(5)
        os.chmod(place, 0o755)
        os.chmod(folder, 0o555)
        with without_privileges():
            run.checkpoints.save(6, make_tiny_state(6), score=None)
            with pytest.raises(UserError, match=r"cannot save step 6 .*step 5 is saved and intact.* make it writable"):
                run.checkpoints.close()
            assert numbered(folder) == ["5"]
            assert Run(folder).restore().step == 5
        os.chmod(folder, 0o755)


def test_a_folder_that_cannot_be_made_or_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot use .*file/checkpoints"):
        Run(tmp_path / "file" / "checkpoints")
    run = Run(tmp_path / "run").save(5)
    shutil.move(tmp_path / "run", tmp_path / "moved")
    (tmp_path / "run").write_text("")
    run.checkpoints.save(6, make_tiny_state(6), score=None)
    with pytest.raises(UserError, match="step 6"):
        run.checkpoints.close()


KILLED = """
import sys, jax.numpy as jnp
from pathlib import Path
from transformer_jax.checkpointing.checkpoints import Checkpoints
checkpoints = Checkpoints(Path(sys.argv[1]), keep=2, warn=print)
for step in range(10_000):
    state = {"params": {"w": jnp.full((300, 500), step + 0.5)}, "step": jnp.int32(step)}
    checkpoints.save(step, state, {"at": step}, score=-float(abs(step - 3)))
    checkpoints.wait()
    print(step, flush=True)
"""


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_run_killed_while_saving_resumes_from_its_last_step(tmp_path, seed):
    """kill -9 at a random moment: the step announced last is there, or the one after it, and nothing half-written."""
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    assert process.stdout is not None
    for _ in range(3):
        process.stdout.readline()
    time.sleep(random.Random(seed).uniform(0.0, 0.4))
    process.send_signal(signal.SIGKILL)
    announced = max(int(line) for line in ["2", *process.stdout.read().split()])
    process.stdout.close()
    process.wait()
    like = {"params": {"w": jnp.ones((300, 500))}, "step": jnp.int32(0)}
    run = Run(tmp_path)
    restored = run.checkpoints.restore(like)
    assert restored.step in (announced, announced + 1)
    assert restored.extra == {"at": restored.step}
    assert float(restored.state["params"]["w"].min()) == restored.step + 0.5
    assert int(restored.state["step"]) == restored.step
    assert all("cut short" in warning for warning in run.warnings)
    assert sorted(path.name for path in tmp_path.iterdir()) == numbered(tmp_path)


def test_a_step_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """A machine that loses its power keeps renames and loses what was written before them: fsync comes first."""
    opened, fsync, paths, done = os.open, os.fsync, {}, []

    def named(path, *arguments, **options):
        descriptor = opened(path, *arguments, **options)
        paths[descriptor] = os.path.normpath(path)
        return descriptor

    def noted(descriptor):
        fsync(descriptor)
        done.append(paths[descriptor])

    folder = as_folder(tmp_path.resolve())
    staged = staging(folder, 3, make_room=True)
    (staged / "params" / "d").mkdir(parents=True)
    for name in ("params/array", "params/d/0", "_METADATA"):
        (staged / name).write_text(name)
    monkeypatch.setattr(os, "open", named)
    monkeypatch.setattr(os, "fsync", noted)
    publish(folder, 3, {"step": 3, "score": None, "extra": {}, "arrays": {}})
    written = {"params/array", "params/d/0", "_METADATA", "record/record.json", "params", "params/d", "record", "."}
    assert set(done[:-1]) == {os.path.normpath(tmp_path.resolve() / "3.tmp" / name) for name in written}
    assert done[-1] == str(tmp_path.resolve())


def test_a_kill_while_a_step_is_replaced_loses_neither(tmp_path):
    """C4: between the two renames neither has the step's name; the old one gets it back."""
    run = Run(tmp_path).save(2, 3)
    (tmp_path / "3").rename(tmp_path / "3.replaced.tmp")
    (tmp_path / "3.tmp").mkdir()
    run = Run(tmp_path)
    assert run.restore().step == 3 and numbered(tmp_path) == ["2", "3"]
    assert [path.name for path in tmp_path.iterdir() if "tmp" in path.name] == []


@pytest.mark.parametrize("make", ["file", "link"])
def test_a_file_or_a_link_in_a_steps_place_does_not_stay_in_the_way(make, tmp_path):
    """A link is taken away, what it leads to is not."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("x")
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for name in ("5.tmp", "4.orbax-checkpoint-tmp"):
        (folder / name).write_text("x") if make == "file" else (folder / name).symlink_to(elsewhere)
    run = Run(folder).save(5)
    assert [path.name for path in folder.iterdir()] == ["5"] and run.restore(5).step == 5
    assert (elsewhere / "kept").exists()
