"""Programs of the tests that run in several processes, which find one another at a port of this machine."""

import os
import pathlib
import socket
import subprocess
import sys

TESTS = pathlib.Path(__file__).parent

CONFIG = """
import pathlib, sys
sys.path.insert(0, {tests!r})
from small_runs import run_config

def get_config(variant):
    return run_config(
        pathlib.Path({text!r}), train__steps=8, train__evaluate_every=8, train__checkpoint_every=2,
        data__max_length=24, data__batch_tokens=112,
    )
"""


def write_config(folder):
    """A configuration file of eight updates, its text beside it."""
    (folder / "config.py").write_text(CONFIG.format(tests=str(TESTS), text=str(folder / "text")))


def free_port():
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def run_together(folder, program, arguments, devices=1, limit=900):
    """Runs a Python program in as many processes as there are lists of arguments; exit code and output of each."""
    environment = {
        **os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"), "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
    }  # fmt: skip
    outputs = [folder / f"output-{i}" for i in range(len(arguments))]
    started = []
    try:
        for each, output in zip(arguments, outputs, strict=True):
            with output.open("w") as file:
                command = [sys.executable, "-c", program, *map(str, each)]
                started.append(subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT))
        codes = [process.wait(timeout=limit) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return codes, [output.read_text() for output in outputs]
