"""Preparation and the data pipeline at the paper's scale: rates by processor time, and memory.

    python benchmarks/preparation.py --folder DIR --pairs 5000000 --processes 2

Writes about 2.5 GB for 5 million pairs into `--folder`, and removes it at the end. The text is recombined from the
embedded corpus: sentences of log-normal length, 25 words on the mean, real words but fewer different ones than WMT14
has. The figures for 36 million pairs are measured on a store whose offsets are real and whose ids are holes in a file.
"""

import argparse
import json
import pathlib
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from transformer_jax.config import DataConfig
from transformer_jax.data.batches import SECTION, assemble, batches_from, plan_batches
from transformer_jax.data.parallel_text import TwoFiles
from transformer_jax.data.prefetch import Prefetched
from transformer_jax.data.readings import Readings
from transformer_jax.data.sources import load_splits
from transformer_jax.data.store import TokenStore, build_store
from transformer_jax.data.vocabulary import learn_vocabulary

PAPER = 36_000_000
BATCHES = 300  # assembled for one figure
BOS = 2


def cpu() -> float:
    """Processor seconds of this process and of those it has waited for."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def memory() -> str:
    """Resident now and at most, MB; pages of mapped files count, which the system takes back when it needs them."""
    lines = pathlib.Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    kept = {line.split(":")[0]: int(line.split()[1]) / 1000 for line in lines if line.startswith(("VmHWM", "Rss"))}
    return f"anonymous {kept['RssAnon']:,.0f} MB, of files {kept['RssFile']:,.0f} MB, at most {kept['VmHWM']:,.0f} MB"


def timed(what: str, work: Callable[[], Any], count: float = 0, unit: str = "pairs") -> Any:
    """Does the work and prints its seconds, and a rate by processor time where a count is given."""
    wall, used = time.perf_counter(), cpu()
    result = work()
    wall, used = time.perf_counter() - wall, cpu() - used
    rate = f"; {count / used:,.0f} {unit} a processor second" if count else ""
    print(f"{what:38} {used:8.2f} s processor, {wall:8.2f} s wall{rate}", flush=True)
    return result


def write_text(folder: pathlib.Path, pairs: int) -> tuple[str, str]:
    """Two files of recombined sentences."""
    corpus = list(load_splits(DataConfig(corpus="office_long")).train)
    words = [len(source.split()) for source, _ in corpus]
    generator = np.random.default_rng(0)
    paths = str(folder / "text.en"), str(folder / "text.de")
    with open(paths[0], "w", encoding="utf-8") as sources, open(paths[1], "w", encoding="utf-8") as targets:
        for start in range(0, pairs, 100_000):
            count = min(100_000, pairs - start)
            lengths = np.exp(generator.normal(3.05, 0.6, count))
            drawn: Iterator[int] = iter(generator.integers(len(corpus), size=40 * count).tolist())
            for length in lengths:
                parts, total = [], 0
                while not parts or (total < length - 4 and len(parts) < 40):
                    parts.append(corpus[i := next(drawn)])
                    total += words[i]
                sources.write(" ".join(part[0] for part in parts) + "\n")
                targets.write(" ".join(part[1] for part in parts) + "\n")
    return paths


def measure_text(folder: pathlib.Path, pairs: int, processes: int) -> TokenStore:
    """From text files to a store."""
    files = timed("generating the text", lambda: write_text(folder, pairs))
    time.sleep(2.5)  # younger files are not believed to stay as they are
    known = Readings(folder / "files.json")
    text = TwoFiles(*files, known)
    timed("checking it (lines, UTF-8)", text.check, pairs)
    timed("digesting it", text.digest, pairs)
    timed("both again, at the next start", lambda: (text.check(), text.digest()))
    timed("reading", lambda: sum(1 for _ in text), pairs)
    tokenizer = timed("learning 37,000 word pieces", lambda: learn_vocabulary(text, DataConfig(), folder, print))
    print(f"{'':38} {memory()}")

    def build() -> TokenStore:
        return build_store(text, tokenizer, folder, processes=processes)

    store: TokenStore = timed(f"tokenizing, {processes} processes", build, pairs)
    timed("opening it", build)
    print(f"{'':38} {memory()}", flush=True)
    return store


def measure_pipeline(store: TokenStore) -> None:
    """From a store to batches, at the paper's 25,000 tokens."""
    pairs = len(store)
    lengths = timed(f"lengths of {pairs:,} pairs", lambda: store.lengths)
    plan = timed("the plan", lambda: plan_batches(lengths, DataConfig(max_length_ratio=9.0), seed=0, name="text"))
    print(f"{'':38} {len(plan.kept):,} pairs; dropped {plan.reasons}; {plan.shapes}; mean length {lengths.mean(0)}")
    outlook = plan.outlook
    sides = [sum(int(lengths[b.examples, side].sum()) for b in outlook.planned) for side in (0, 1)]
    cells = [sum(b.shape.rows * b.shape[side + 1] for b in outlook.planned) for side in (0, 1)]
    print(
        f"{'':38} {outlook.batches:,} batches, fill {plan.fill(outlook.planned):.1%}: "
        f"source {sides[0] / cells[0]:.1%}, target {sides[1] / cells[1]:.1%}"
    )
    timed("first batch of an epoch (reshuffle)", lambda: next(plan.batches(1)))
    middle = len(plan.kept) // 2 // SECTION * SECTION + 1
    timed("first batch after a stop in its middle", lambda: next(plan.batches(1, middle)))
    timed("a whole epoch, section by section", lambda: sum(1 for _ in plan.batches(1)), len(plan.kept))
    print(f"{'':38} {memory()}", flush=True)
    with Prefetched(batches_from(plan, 0, 0), 64) as batches:
        planned = [next(batches)[2] for _ in range(BATCHES)]
    tokens = sum(int(lengths[batch.examples].sum()) for batch in planned)
    timed(
        f"assembling {BATCHES} batches", lambda: [assemble(b, store, bos_id=BOS) for b in planned][:0], tokens, "tokens"
    )
    print(f"{'':38} {memory()}", flush=True)


def synthetic_store(folder: pathlib.Path, pairs: int) -> TokenStore:
    """A store of `pairs` pairs of random lengths; its ids take no room on the disk."""
    generator = np.random.default_rng(0)
    source = np.clip(np.exp(generator.normal(3.2, 0.65, pairs)), 1, 400).astype(np.int64) + 1
    target = np.clip(source * np.exp(generator.normal(0.1, 0.25, pairs)), 2, 400).astype(np.int64)
    header = {"pairs": pairs, "dtype": "uint16"}
    for side, lengths in (("source", source), ("target", target)):
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        offsets.tofile(folder / f"{side}_offsets")
        header[f"{side}_tokens"] = int(offsets[-1])
        with open(folder / f"{side}_ids", "wb") as file:
            file.truncate(2 * int(offsets[-1]))
    (folder / "header.json").write_text(json.dumps(header), encoding="utf-8")
    return TokenStore(folder)


def main() -> None:
    """Prints one figure a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--pairs", type=int, default=5_000_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--store", type=pathlib.Path, help="measure only the pipeline behind this store")
    options = parser.parse_args()
    if options.store is not None:
        measure_pipeline(TokenStore(options.store))
        return
    folder = options.folder / "preparation"
    folder.mkdir(parents=True)
    try:
        stores = [measure_text(folder, options.pairs, options.processes).folder]
        stores.append(folder / "synthetic")
        stores[-1].mkdir()
        synthetic_store(stores[-1], PAPER)
        for store in stores:  # each in a process of its own, whose memory is that of nothing else
            print(f"\n{store.name}", flush=True)
            command = [sys.executable, __file__, "--folder", str(options.folder), "--store", str(store)]
            subprocess.run(command, check=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
