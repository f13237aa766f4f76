"""Seconds from starting a command to its first result, with an empty and with a filled cache of compiled programs.

    python benchmarks/start_up.py

`train.py` on the demo configuration until its first update is done (tokenizer and tokenized text made the first time,
found the second), and `transformer-jax translate` of one line until the line is there.
"""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parent.parent
COMMAND = [sys.executable, "-c", "import sys; from transformer_jax.cli.main import main; sys.exit(main(sys.argv[1:]))"]
TRAIN = [sys.executable, "train.py", "--config", "configs/demo.py"]


def seconds_to_first_update(workdir: pathlib.Path, environment: dict[str, str]) -> float:
    """Starts training, waits for the line that reports the first update, and stops it with SIGTERM."""
    start = time.monotonic()
    command = [*TRAIN, "--workdir", str(workdir)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("compiled"):
            break
    seconds = time.monotonic() - start
    process.send_signal(signal.SIGTERM)
    process.communicate()
    return seconds


def seconds_to_translate(workdir: pathlib.Path, environment: dict[str, str]) -> float:
    """One line through the command line."""
    command = [*COMMAND, "translate", str(workdir)]
    start = time.monotonic()
    subprocess.run(
        command, cwd=ROOT, env=environment, input="Save the file.\n", capture_output=True, text=True, check=True
    )
    return time.monotonic() - start


def main() -> None:
    """Prints four times."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "XDG_CACHE_HOME": f"{folder}/cache", "PYTHONUNBUFFERED": "1"}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        run = pathlib.Path(folder, "run")
        for state in ("empty", "filled"):
            print(f"first update, {state} cache: {seconds_to_first_update(run, environment):.1f} s", flush=True)
        for state in ("empty", "filled"):
            print(f"first translation, {state} cache: {seconds_to_translate(run, environment):.1f} s", flush=True)


if __name__ == "__main__":
    main()
