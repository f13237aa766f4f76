"""Programs of the tests that run in a process apart, on devices that are simulated there."""

import json
import os
import pathlib
import subprocess
import sys

TESTS = pathlib.Path(__file__).parent


def run_apart(name, *arguments):
    """What tests/NAME prints last, a JSON object, and under `stderr` what it says there."""
    environment = {
        **os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
    }  # fmt: skip
    command = [sys.executable, str(TESTS / name), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.strip().split("\n")[-1]) | {"stderr": result.stderr}
