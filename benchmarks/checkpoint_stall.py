"""What saving checkpoints costs training: the demo configuration, saving every 50 updates against never.

    python benchmarks/checkpoint_stall.py                      four rounds of 100 updates each way
    python benchmarks/checkpoint_stall.py --rounds 1 --updates 50

Both ways train one state on one batch, in turn, so that a change of the machine's load meets both. The aim is under 3 %
of training time, and a call of `save` that returns within one update's time. Processor time counts all threads: what
the saving thread takes is in it, though it runs beside training where a core is free.
"""

import argparse
import pathlib
import statistics
import tempfile
import time

import jax

import transformer_jax as tj
from transformer_jax.checkpointing.checkpoints import Checkpoints
from transformer_jax.data.batches import batches_from
from transformer_jax.parallel.mesh import make_mesh
from transformer_jax.training.placing import place
from transformer_jax.training.preparation import prepare
from transformer_jax.training.state import all_finite, init_state, make_optimizer, to_checkpoint
from transformer_jax.training.step import make_train_step

EVERY = 50


def main() -> None:
    """Prints seconds of both ways, their ratio, and how long a save holds training up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--updates", type=int, default=100)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(pathlib.Path(folder), given.rounds, given.updates)


def measure(folder: pathlib.Path, rounds: int, updates: int) -> None:
    """As `main`, in an empty folder."""
    config = tj.load_config("configs/demo.py", ["mesh.data=1"])
    prepared = prepare(config, folder / "run", lambda line: None)
    config = prepared.config
    mesh = make_mesh(config.mesh)
    optimizer = make_optimizer(config.optimizer, config.model.d_model, config.train.steps)
    step = make_train_step(config, optimizer, mesh)
    finite = jax.jit(all_finite)
    checkpoints = Checkpoints(folder / "checkpoints", keep=config.train.keep_checkpoints, warn=print)
    state = init_state(config.model, optimizer, 0)
    _, _, planned = next(batches_from(prepared.plan, 0, 0))
    batch = place(planned, prepared.train, mesh)
    held: list[float] = []
    taken: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for _ in range(2):  # the second compiles for a state that lies as the step leaves it
        state, _ = step(state, batch)
    assert finite(state.params)
    checkpoints.save(0, to_checkpoint(state), {}, score=None)
    checkpoints.wait()
    for _ in range(rounds):
        for saving in (False, True):
            start, processor = time.perf_counter(), time.process_time()
            for update in range(1, updates + 1):
                state, metrics = step(state, batch)
                jax.block_until_ready(metrics)
                if saving and update % EVERY == 0:
                    before = time.perf_counter()
                    assert finite(state.params)
                    checkpoints.save(int(state.step), to_checkpoint(state), {}, score=None)
                    held.append(time.perf_counter() - before)
            # The last save's end is waited for: its cost is in the round that made it.
            checkpoints.wait()
            taken[saving].append((time.perf_counter() - start, time.process_time() - processor))
    checkpoints.close()
    (never, never_cpu), (every, every_cpu) = (
        tuple(statistics.median(each) for each in zip(*taken[saving], strict=True)) for saving in (False, True)
    )
    print(f"never saving          {never:7.2f} s for {updates} updates, {never_cpu:7.2f} s of processor time")
    print(f"saving every {EVERY:<8} {every:7.2f} s for {updates} updates, {every_cpu:7.2f} s of processor time")
    print(
        f"ratio                 {every / never:7.4f}, of processor time {every_cpu / never_cpu:.4f} (aim: under 1.03)"
    )
    print(
        f"a save holds training up for {statistics.median(held) * 1e3:.1f} ms (most: {max(held) * 1e3:.1f}), ", end=""
    )
    print(f"an update takes {never / updates * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
