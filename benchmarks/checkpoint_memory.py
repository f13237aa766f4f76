"""Peak memory of reading checkpoints of the base model: averaging 20 of them, and parameters alone against all.

    python benchmarks/checkpoint_memory.py                     needs 1.6 GB of disk and 3 GB of memory; Linux

Averaging 20 must take less than three times the memory of one checkpoint's parameters. Of the 20, two are distinct and
the others links to their files, which costs the reader as much and the disk a tenth. Each figure is of a process of its
own: the most that it held beyond what it had before, when all was imported.
"""

import importlib
import os
import pathlib
import subprocess
import sys
import tempfile

import jax
import numpy as np

import transformer_jax as tj
from transformer_jax.checkpointing.checkpoint_files import as_folder, read_record, write_record
from transformer_jax.checkpointing.checkpoints import Checkpoints, load_params
from transformer_jax.training.averaging import average_run
from transformer_jax.training.state import init_state, make_optimizer, to_checkpoint

COUNT = 20


def state_shapes() -> dict[str, object]:
    """The base model's state, as shapes."""
    config = tj.load_config("configs/base.py", ["model.vocab_size=37000"])
    optimizer = make_optimizer(config.optimizer, config.model.d_model, config.train.steps)
    return to_checkpoint(jax.eval_shape(lambda: init_state(config.model, optimizer, 0)))


def average(run: pathlib.Path) -> None:
    """The 20, as the command does it."""
    average_run(run, COUNT)


def restore_all(run: pathlib.Path) -> None:
    """As a run that goes on does it."""
    Checkpoints(run / "checkpoints", keep=100, warn=print).restore(state_shapes())


def restore_params(run: pathlib.Path) -> None:
    """As translation does it."""
    load_params(run / "checkpoints", abstract=state_shapes()["params"], warn=print)


JOBS = {job.__name__: job for job in (average, restore_all, restore_params)}


def make_run(run: pathlib.Path) -> float:
    """A run with 20 checkpoints; returns the megabytes of one's parameters."""
    run.mkdir()
    for name in ("config.json", "tokenizer.model"):
        (run / name).write_text("{}")
    checkpoints = Checkpoints(run / "checkpoints", keep=100, warn=print)
    rng = np.random.default_rng(0)
    for step in (1, 2):
        state = jax.tree.map(lambda leaf: rng.random(leaf.shape, np.float32).astype(leaf.dtype), state_shapes())
        checkpoints.save(step, state, {"seconds": 600.0 * step}, score=None)
    checkpoints.close()
    for step in range(3, COUNT + 1):
        link(run / "checkpoints", 2 - step % 2, step)
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state["params"])) / 1e6


def link(folder: pathlib.Path, of: int, step: int) -> None:
    """A checkpoint of another step, with the same files."""
    for path in (folder / str(of)).rglob("*"):
        target = folder / str(step) / path.relative_to(folder / str(of))
        if path.is_file() and path.name != "record.json":
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, target)
    body = {**read_record(folder / str(of)), "step": step}
    write_record(as_folder(folder / str(step)), body)


def held(field: str) -> float:
    """Megabytes, by a field of /proc/self/status."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith(f"{field}:"))


def main() -> None:
    """Prints a line for each job."""
    if len(sys.argv) == 3:
        importlib.import_module("orbax.checkpoint")  # its 100 MB are no part of what a job needs
        jax.block_until_ready(jax.numpy.zeros(()))
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = held("VmRSS")
        JOBS[sys.argv[1]](pathlib.Path(sys.argv[2]))
        print(held("VmHWM") - before)
        return
    with tempfile.TemporaryDirectory() as folder:
        run = pathlib.Path(folder, "run")
        one = make_run(run)
        print(f"parameters of one checkpoint  {one:7.0f} MB")
        for name in JOBS:
            peak = float(subprocess.check_output([sys.executable, __file__, name, str(run)]))
            print(f"{name:28}  {peak:7.0f} MB, {peak / one:.2f} times that")


if __name__ == "__main__":
    main()
