"""An update of the demo with freed memory kept in the process, as train.py has it, and as the C library does by itself.

    python benchmarks/kept_memory.py [--rounds 30]

Two processes train on one batch of made-up pieces, an update each in turn. Besides seconds, of the processor too, the
pages that the system handed out and cleared during an update (of 4 KiB where it gives no larger ones).
"""

import argparse
import contextlib
import dataclasses
import resource
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
from timing import in_its_own_process

import transformer_jax as tj
from transformer_jax.data.batches import Batch
from transformer_jax.heap import keep_freed_blocks
from transformer_jax.parallel.mesh import make_mesh
from transformer_jax.training.state import init_state, make_optimizer
from transformer_jax.training.step import make_train_step

Taken = tuple[float, float, float]
"""Seconds, seconds of the processor, pages."""


def demo_step(keep: bool) -> Callable[[], Taken]:
    """An update and what it took."""
    if keep:
        keep_freed_blocks()
    config = tj.load_config("configs/demo.py")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=config.data.vocab_size))
    optimizer = make_optimizer(config.optimizer, config.model.d_model, config.train.steps)
    step_function = make_train_step(config, optimizer, make_mesh(config.mesh))
    shape = config.data.batch_tokens // config.data.row_length, config.data.row_length
    generator = np.random.default_rng(0)
    source, target, labels = (generator.integers(4, config.data.vocab_size, shape).astype(np.int32) for _ in range(3))
    segments = np.ones(shape, np.int32)
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    batch = Batch(source, segments, positions, target, labels, segments, positions)
    state = [init_state(config.model, optimizer, 0)]

    def step() -> Taken:
        pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        start, processor = time.perf_counter(), time.process_time()
        state[0], metrics = step_function(state[0], batch)
        jax.block_until_ready((state[0], metrics))
        taken = time.perf_counter() - start, time.process_time() - processor
        return *taken, float(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - pages)

    return step


def main() -> None:
    """Prints medians and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    names = {"kept": True, "given back": False}
    taken: dict[str, list[Taken]] = {name: [] for name in names}
    with contextlib.ExitStack() as processes:
        steps = {name: processes.enter_context(in_its_own_process(demo_step, keep)) for name, keep in names.items()}
        for _ in range(3):
            for step in steps.values():
                step()
        for _ in range(rounds):
            for name, step in steps.items():
                taken[name].append(step())
    found = {name: [statistics.median(values) for values in zip(*of, strict=True)] for name, of in taken.items()}
    for name, (seconds, processor, pages) in found.items():
        print(f"{name:11} {seconds * 1e3:6.0f} ms, {processor * 1e3:6.0f} of the processor, {pages:7,.0f} pages")
    kept, back = found["kept"], found["given back"]
    print(f"kept is {back[0] / kept[0]:.2f} times as fast, and takes {kept[1] / back[1]:.0%} of the processor time")


if __name__ == "__main__":
    main()
