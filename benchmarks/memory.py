"""Resident memory over 10 epochs of training and over 10,000 translated lines: it should not grow.

    python benchmarks/memory.py

A small model, so that what Python, the data and the metrics hold is not lost beside the parameters. Freed memory is
kept in the process, as train.py has it.
"""

import contextlib
import io
import pathlib
import tempfile
from unittest import mock

import psutil

import transformer_jax as tj
from transformer_jax.heap import keep_freed_blocks
from transformer_jax.training.loop import train
from transformer_jax.training.metrics import MetricsWriter

SMALL = [
    "model.d_model=32", "model.d_ff=64", "model.encoder_layers=1", "model.decoder_layers=1", "model.dropout=0",
    "data.vocab_size=1000", "train.evaluate_sentences=20", "train.average_checkpoints=1",
]  # fmt: skip
EPOCHS, LINES = 10, 10_000


def resident() -> float:
    """Megabytes."""
    return psutil.Process().memory_info().rss / 1e6


def main() -> None:
    """Prints two series."""
    keep_freed_blocks()
    seen: list[tuple[int, float]] = []
    write = MetricsWriter.write

    def watched(self: MetricsWriter, step: int, values: dict[str, object]) -> None:
        write(self, step, values)
        if "dev_nll" in values:
            seen.append((step, resident()))

    with tempfile.TemporaryDirectory() as folder:
        epoch = 170  # batches of an epoch, about
        overrides = [*SMALL, f"train.steps={EPOCHS * epoch}", f"train.evaluate_every={epoch}"]
        run = pathlib.Path(folder, "run")
        with contextlib.redirect_stdout(io.StringIO()), mock.patch.object(MetricsWriter, "write", watched):
            train(tj.load_config("configs/demo.py", overrides), run)
        for step, megabytes in seen:
            print(f"update {step:5}: {megabytes:7.1f} MB")
        print(f"growth from the second validation to the last: {seen[-1][1] - seen[1][1]:.1f} MB")
        translator = tj.Translator.load(run)
        lines = [f"Select field {i} of the table." for i in range(LINES)]
        translator(lines[:2500])
        before = resident()
        translator(lines)
        print(f"growth over {LINES:,} translated lines after the first 2,500: {resident() - before:.1f} MB")


if __name__ == "__main__":
    main()
