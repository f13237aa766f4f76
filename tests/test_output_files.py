"""Files that a command writes: never its input, and not touched before there is something to write."""

import subprocess
import sys

import numpy as np
import pytest

from transformer_jax.checkpointing.checkpoints import Checkpoints
from transformer_jax.cli.main import main
from transformer_jax.cli.text import check_output, write_lines
from transformer_jax.errors import UserError


def test_an_output_that_is_an_input_is_refused(tmp_path):
    (tmp_path / "a").write_text("text\n")
    (tmp_path / "b").write_text("text\n")
    check_output(str(tmp_path / "b"), str(tmp_path / "a"))
    (tmp_path / "c").symlink_to(tmp_path / "a")
    with pytest.raises(UserError, match="is an input, which would be lost"):
        check_output(str(tmp_path / "c"), str(tmp_path / "b"), str(tmp_path / "a"))
    for command in ("score", "evaluate"):
        other = "--target" if command == "score" else "--reference"
        files = ["--source", str(tmp_path / "a"), other, str(tmp_path / "b"), "--output", str(tmp_path / "b")]
        assert main([command, "no-run", *files]) == 2
    assert (tmp_path / "b").read_text() == "text\n"


def test_standard_input_is_an_input_too(tmp_path):
    (tmp_path / "a").write_text("text\n")
    program = "import sys; from transformer_jax.cli.text import check_output; check_output(sys.argv[1], None)"
    with (tmp_path / "a").open() as standard_input:
        command = [sys.executable, "-c", program, str(tmp_path / "a")]
        done = subprocess.run(command, stdin=standard_input, capture_output=True, text=True)
    assert "is an input, which would be lost" in done.stderr


def test_an_output_file_stays_as_it_is_when_nothing_comes(tmp_path):
    def lines():
        raise UserError("line 1 is no text")
        yield ""

    (tmp_path / "out").write_text("earlier\n")
    with pytest.raises(UserError, match="line 1"):
        write_lines(str(tmp_path / "out"), lines())
    assert (tmp_path / "out").read_text() == "earlier\n"
    write_lines(str(tmp_path / "out"), iter(["a", "b"]))
    assert (tmp_path / "out").read_text() == "a\nb\n"
    write_lines(str(tmp_path / "out"), iter([]))
    assert (tmp_path / "out").read_text() == ""


def test_what_is_kept_does_not_depend_on_where_a_run_was_stopped(tmp_path):
    """A checkpoint off the schedule, saved by a signal, stays until the next one and takes nobody's place."""
    checkpoints = Checkpoints(tmp_path / "c", keep=2, warn=print, scheduled=lambda step: step % 10 == 0)
    for step, left in ((10, [10]), (20, [10, 20]), (25, [10, 20, 25]), (30, [20, 30])):
        checkpoints.save(step, {"params": {"w": np.ones(3)}, "step": step}, score=None)
        checkpoints.wait()
        assert checkpoints.steps() == left
    checkpoints.close()


def test_a_full_disk_is_one_line(capsys, monkeypatch):
    def full(argv):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformer_jax.cli.main._dispatch", full)
    assert main([]) == 2
    assert capsys.readouterr().err == "error: output: No space left on device; make room there or name another place\n"
