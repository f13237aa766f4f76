"""Training when the disk is full: exit code 2, one line, the last step intact, and the same end once there is room."""

import contextlib
import dataclasses
import resource

import pytest
from small_runs import metrics, programs_kept_in, run_config, saved

from transformer_jax.cli.main import main
from transformer_jax.training.loop import train


@contextlib.contextmanager
def files_of_at_most(octets):
    """The system refuses to let a file grow, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (octets, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.slow
def test_a_full_disk_ends_a_run_in_one_line_and_room_lets_it_go_on(tmp_path, capsys):
    """C1: the end is that of a run that never met it."""
    with programs_kept_in(tmp_path / "programs"):
        config = run_config(tmp_path / "text", train__checkpoint_every=2)
        train(config, tmp_path / "whole")
        shorter = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=2))
        (tmp_path / "config.json").write_text(config.to_json())
        train(shorter, tmp_path / "run")
        capsys.readouterr()
        command = ["train", "--config", str(tmp_path / "config.json"), "--workdir", str(tmp_path / "run")]
        largest = max(path.stat().st_size for path in (tmp_path / "run" / "checkpoints").rglob("*") if path.is_file())
        with files_of_at_most(largest // 2):
            assert main(command) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and error.startswith("error: cannot save step 4 ")
        assert "step 2 is saved and intact" in error
        assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["2"]
        assert main(command) == 0
        assert saved(tmp_path / "run")[6] == saved(tmp_path / "whole")[6]
        assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
