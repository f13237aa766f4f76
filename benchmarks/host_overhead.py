"""What the host does for an update: planning, laying out and moving a batch, starting the program, looking at numbers.

    python benchmarks/host_overhead.py                         200 updates at the base configuration's batch shape
    python benchmarks/host_overhead.py --updates 50 --pairs 20000

The loop of `training.loop` runs on made-up text of WMT14's lengths, against a train step that does nothing but hand the
state on, and then sleeps as long as a device would work on the update at a million pieces a second. The aims: under 2
ms an update of the loop's thread, which hides behind the device's work on the update before, and a wait for data under
1 % of an update's time. Processor time counts all threads, those that make batches ahead among them.
"""

import argparse
import contextlib
import dataclasses
import pathlib
import random
import tempfile
import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import transformer_jax as tj
from transformer_jax.config import Config
from transformer_jax.training import loop
from transformer_jax.training.metrics import read_metrics
from transformer_jax.training.state import TrainState

PIECES_PER_SECOND = 1e6
METRICS = ("loss", "nll", "target_tokens", "gradient_norm", "update_norm", "param_norm", "learning_rate")


def main() -> None:
    """Prints what an update takes of time and of processor time, and how long it waits for its batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=60_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(pathlib.Path(folder), given.updates, given.pairs)


def measure(folder: pathlib.Path, updates: int, pairs: int) -> None:
    """As `main`, in an empty folder."""
    config = _config(folder, updates, pairs)
    clocks = time.perf_counter, time.process_time, time.thread_time
    marks: list[list[float]] = []
    next_end = 0.0
    record, work = loop._Run._record, 2 * config.data.batch_tokens / PIECES_PER_SECOND

    def marked(run: Any, *arguments: Any) -> None:
        # The device begins an update when it has the one before behind it; `next_end` is when it has this one.
        nonlocal next_end
        time.sleep(max(next_end - time.perf_counter(), 0.0))
        next_end = time.perf_counter() + work
        record(run, *arguments)
        marks.append([clock() for clock in clocks])

    with contextlib.ExitStack() as patches:
        # A small model stands for the large one, which has no part in what is measured; nothing is scored or saved.
        for name, stand_in in {
            "make_train_step": _nothing, "validate": None, "finish": lambda *_: None, "_Run._validate": lambda *_: None,
            "_Run._save": lambda *_: None, "_Run._record": marked,
        }.items():  # fmt: skip
            patches.enter_context(mock.patch(f"transformer_jax.training.loop.{name}", stand_in))
        loop.train(config, folder / "run")
    # The first update, which waited for the compiler, is left out, and so is the line that it is in.
    wall, processor, thread = ((end - begin) / (updates - 1) for begin, end in zip(marks[0], marks[-1], strict=True))
    lines = [line for line in read_metrics(folder / "run" / "metrics.jsonl") if line["step"] > config.train.log_every]
    counted = updates - config.train.log_every
    wait = sum(line["data_seconds"] for line in lines) / counted
    print(f"an update       {wall * 1e3:8.3f} ms, of which the device works {work * 1e3:.3f}")
    print(f"loop's thread   {thread * 1e3:8.3f} ms of processor time an update (aim: under 2)")
    print(f"all threads     {processor * 1e3:8.3f} ms")
    print(f"wait for data   {wait * 1e3:8.3f} ms, {wait / wall:.2%} of an update (aim: under 1 %)")


def _config(folder: pathlib.Path, updates: int, pairs: int) -> Config:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 7))) for _ in range(2000)]
    texts = {}
    for part, count in {"train": pairs, "dev": 10, "test": 10}.items():
        rows = (
            " ".join(rng.choices(words, k=length)) + "\t" + " ".join(rng.choices(words, k=length))
            for length in (max(1, int(rng.lognormvariate(2.9, 0.6))) for _ in range(count))
        )
        (folder / f"{part}.tsv").write_text("".join(f"{row}\n" for row in rows))
        texts[f"{part}_source"] = str(folder / f"{part}.tsv")
    config = tj.load_config("configs/base.py", ["mesh.data=1"])
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, d_model=16, d_ff=16, num_heads=2, encoder_layers=1, decoder_layers=1),
        data=dataclasses.replace(config.data, corpus="office", vocab_size=2000, **texts),
        train=dataclasses.replace(
            config.train, steps=updates, evaluate_every=updates, checkpoint_every=updates, log_every=10
        ),
    )


def _nothing(config: Config, *_: Any) -> Any:
    """A train step of the same arguments and results."""

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        tokens = (batch.target_segments != 0).sum().astype(jnp.float32)
        metrics = {name: jnp.ones(()) for name in METRICS} | {"target_tokens": tokens}
        skipped = {"skipped": state.skipped, "skipped_in_row": state.skipped_in_row}
        return state._replace(step=state.step + 1), metrics | skipped

    return jax.jit(step, donate_argnums=0)


if __name__ == "__main__":
    main()
