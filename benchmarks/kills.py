"""A run killed again and again beside one that is never stopped: both must end with the same bits.

    python benchmarks/kills.py                                    20 kills, demo configuration, SIGKILL, then SIGTERM
    python benchmarks/kills.py --kills 3 --signals TERM --folder runs/kills configs/demo.py train.steps=200

Some kills come while a checkpoint is being written, some while the program starts, one after the last update, the rest
at any moment. After each SIGKILL the newest sound checkpoint must be that of the run never stopped; SIGTERM must end
with exit code 143. In the end parameters, optimizer, kept steps, best score, averaged model, metrics and scores are
compared. The same command again goes on where it stopped. Exit code 1 if anything differs.
"""

import argparse
import json
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import transformer_jax as tj
from transformer_jax.checkpointing.checkpoint_files import best_step, complete_steps, read_record
from transformer_jax.checkpointing.loading import newest_digests
from transformer_jax.checkpointing.named_arrays import json_digest
from transformer_jax.training.metrics import read_metrics

TRAIN = pathlib.Path(__file__).parent.parent / "train.py"
SAVING = 0.2
"""Seconds within which a kill comes once a save is seen; one of the demo configuration takes about as long."""
STARTING = 12.0
"""Seconds within which a kill comes that is to meet imports, restoring or compiling."""
# What two equal runs have in common; the other numbers are the clock's.
SAME = ("loss", "nll", "target_tokens", "gradient_norm", "learning_rate", "dev_nll", "dev_bleu", "dev_chrf")


def plan(kills: int, steps: int, seed: int) -> list[tuple[str, int, float]]:
    """When to kill: (moment, updates to wait for, share of that moment's seconds), by ascending updates."""
    rng = random.Random(seed)
    updates = sorted(rng.randrange(1, steps) for _ in range(kills))
    moments = rng.choices(["save", "start", "any"], weights=[5, 1, 4], k=kills)
    moments[-1:] = ["end"]
    return [
        (moment, steps if moment == "end" else at, rng.random()) for moment, at in zip(moments, updates, strict=True)
    ]


def wait_until(process: subprocess.Popen[bytes], happened: Callable[[], bool]) -> bool:
    """False if the process ended first."""
    while not happened():
        if process.poll() is not None:
            return False
        time.sleep(0.002)
    return True


def wait_for(process: subprocess.Popen[bytes], run: pathlib.Path, moment: str, update: int, share: float) -> bool:
    """Returns at the moment to kill; False if the process ended first."""
    if moment == "start":
        time.sleep(STARTING * share)
        return process.poll() is None
    began = time.time()

    def reached() -> bool:
        path = run / "metrics.jsonl"
        lines = read_metrics(path) if path.exists() and path.stat().st_mtime > began else []
        return any("loss" in line and line["step"] >= update for line in lines)

    while not reached():
        if process.poll() is not None:
            return False
        time.sleep(0.05)
    checkpoints = run / "checkpoints"
    if moment == "save" and not wait_until(process, lambda: any(checkpoints.glob("*.tmp*"))):
        return False
    time.sleep({"save": SAVING, "end": 1.0, "any": 4.0}[moment] * share)
    return process.poll() is None


def train(command: Sequence[str], run: pathlib.Path) -> subprocess.Popen[bytes]:
    """Starts training; what it says is in its log.txt, and its errors in errors.txt beside the run."""
    run.mkdir(parents=True, exist_ok=True)
    with run.with_suffix(".errors.txt").open("ab") as errors:
        return subprocess.Popen([*command, "--workdir", str(run)], stdout=subprocess.DEVNULL, stderr=errors)


def verdict(run: pathlib.Path, whole: pathlib.Path, number: int, code: int) -> str:
    """What a kill has left: "" if it is as it should be."""
    if number == signal.SIGTERM:
        return "" if code in (128 + signal.SIGTERM, -signal.SIGTERM) else f"exit code {code}"
    checkpoints = run / "checkpoints"
    if not checkpoints.is_dir() or not complete_steps(checkpoints):
        return ""  # before the first save
    digests = newest_digests(checkpoints, warn=lambda message: None)
    expected = json_digest(read_record(whole / "checkpoints" / str(digests.step))["arrays"])
    return "" if digests.state == expected else f"checkpoint {digests.step} differs"


def outcome(run: pathlib.Path) -> dict[str, Any]:
    """All that two equal runs have in common at their end."""
    checkpoints = run / "checkpoints"
    found = {
        name: json.loads(
            subprocess.check_output(
                [sys.executable, "-m", "transformer_jax.cli.main", "describe", str(folder), "--digest", "--json"]
            )
        )
        for name, folder in {"end": run, "averaged": run / "averaged"}.items()
    }
    best = best_step(checkpoints)
    results = json.loads((run / "results.json").read_text())
    metrics = [{name: line.get(name) for name in ("step", *SAME)} for line in read_metrics(run / "metrics.jsonl")]
    records = {step: read_record(checkpoints / str(step)) for step in complete_steps(checkpoints)}
    return {
        **found,
        "kept": list(records),
        "checkpoints": {step: record["arrays"] for step, record in records.items()},
        "positions": {step: (record["extra"]["epoch"], record["extra"]["index"]) for step, record in records.items()},
        "best": None if best is None else (best, records[best]["score"]),
        "metrics": metrics,
        "scores": results["scores"],
        "averaged steps": results["averaged_steps"],
    }


def kill_again_and_again(
    command: Sequence[str], folder: pathlib.Path, number: signal.Signals, planned: list[tuple[str, int, float]]
) -> tuple[int, int]:
    """Kills and resumes a run, then lets it end; returns the kills that left what they should, and all that met it."""
    run, whole = folder / number.name, folder / "whole"
    journal = run.with_suffix(".jsonl")
    done = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    for index, (moment, update, share) in enumerate(planned[len(done) :], len(done) + 1):
        process = train(command, run)
        killed = wait_for(process, run, moment, update, share)
        process.send_signal(number)
        code = process.wait()
        fault = verdict(run, whole, number, code) if killed else f"came too late: it had ended with {code}"
        done.append({"moment": moment, "update": update, "fault": fault, "killed": killed, "exit": code})
        with journal.open("a") as file:
            file.write(json.dumps(done[-1]) + "\n")
        print(
            f"{number.name} {index:2}/{len(planned)}  {moment:5} after update {update:5}  {fault or 'sound'}",
            flush=True,
        )
    code = train(command, run).wait()
    if code != 0:
        sys.exit(f"the last run ended with {code}; see {run.with_suffix('.errors.txt')}")
    return sum(not each["fault"] for each in done), sum(each["killed"] for each in done)


def main() -> None:
    """Prints a line a kill, and for each signal how many left what they should and whether the ends are equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default="configs/demo.py")
    parser.add_argument("overrides", nargs="*", help="train.steps=200")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--signals", nargs="+", choices=["KILL", "TERM"], default=["KILL", "TERM"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/kills"))
    given = parser.parse_intermixed_args()
    config = tj.load_config(given.config, given.overrides)
    # Every checkpoint stays in the run never stopped, to be compared with what each kill leaves.
    command = [sys.executable, str(TRAIN), "--config", given.config, *given.overrides]
    keep = f"train.keep_every={config.train.checkpoint_every}"
    code = train([*command, keep], given.folder / "whole").wait()
    if code != 0:
        sys.exit(f"the run never stopped ended with {code}; see {given.folder / 'whole.errors.txt'}")
    expected = outcome(given.folder / "whole")
    failed = False
    for name in given.signals:
        number = signal.Signals[f"SIG{name}"]
        planned = plan(given.kills, config.train.steps, given.seed)
        sound, met = kill_again_and_again([*command, keep], given.folder, number, planned)
        found = outcome(given.folder / number.name)
        differ = [part for part in expected if found[part] != expected[part]]
        print(f"{number.name}: {sound} of {met} kills left what they should; ", end="")
        print(f"the ends differ in {', '.join(differ)}" if differ else f"the ends are the same: {found['end']}")
        failed |= bool(differ) or sound < met
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
