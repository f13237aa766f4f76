"""A program for tests/test_weight_update_sharding.py: updates shared out and not, on eight simulated devices.

python tests/weight_update_devices.py float32|float64 FOLDER       prints one JSON object
"""

import dataclasses
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
from eight_devices import beginning, collectives, prepared_run
from small_models import QUICK

from transformer_jax.checkpointing.checkpoints import Checkpoints, digest_tree, load_params
from transformer_jax.checkpointing.named_arrays import named_leaves
from transformer_jax.config import MeshConfig
from transformer_jax.parallel.mesh import make_mesh
from transformer_jax.parallel.rules import placed_shapes, shardings
from transformer_jax.training.placing import place
from transformer_jax.training.state import from_checkpoint, make_optimizer, to_checkpoint
from transformer_jax.training.step import make_train_step

WHOLE = (1, 1, 1)
MESHES = {
    "float32": [(2, 1, 1), (8, 1, 1)],
    "float64": [(8, 1, 1), (2, 1, 4), (2, 2, 2)],
}
ACCUMULATED = (4, 2, 1)
UPDATES = 4


class Run:
    """Updates on one mesh: `state` is the last."""

    def __init__(self, prepared, shape, shard, start, *, accumulate=1):
        mesh_config = MeshConfig(*shape, shard_weight_update=shard)
        self.mesh = make_mesh(mesh_config)
        train = dataclasses.replace(prepared.config.train, accumulate=accumulate)
        config = dataclasses.replace(prepared.config, mesh=mesh_config, train=train)
        optimizer = make_optimizer(config.optimizer, config.model.d_model, 10)
        planned = max(prepared.plan.epoch(0), key=lambda batch: len(batch.examples))
        self.batch = place(planned, prepared.train, self.mesh, parts=accumulate)
        self.laid = shardings(start, self.mesh, over_data=shard)
        self.state = jax.device_put(start, self.laid)
        step = make_train_step(config, optimizer, self.mesh)
        self.step = step.lower(self.state, self.batch).compile(compiler_options=QUICK)
        self.metrics = []

    def update(self, count):
        for _ in range(count):
            self.state, values = self.step(self.state, self.batch)
            self.metrics.append({name: float(value) for name, value in values.items()})
        return self

    def facts(self):
        held = {name: leaf.addressable_shards[0].data.nbytes for name, leaf in named_leaves(self.state).items()}
        laid = jax.tree.map(lambda leaf, sharding: leaf.sharding == sharding, self.state, self.laid)
        return {"metrics": [*self.metrics], "held": held, "laid": all(jax.tree.leaves(laid))}

    def apart(self, other):
        """The largest difference of any array, as a part of that array's largest element."""
        mine, theirs = (named_leaves(jax.device_get(run.state)) for run in (self, other))
        # A constant added to all keys of a head changes no weight: the gradient of b_k is rounding and nothing else.
        pairs = [(leaf, theirs[name]) for name, leaf in mine.items() if not name.endswith("b_k")]
        return max(float(abs(a - b).max() / (abs(b).max() + 1e-30)) for a, b in pairs)


def skipped(run, start):
    """Whether an update that is not finite leaves every array as it was, on its device."""
    bias = start.params["encoder"]["feed_forward"]["b_1"]
    start.params["encoder"]["feed_forward"]["b_1"] = bias * jnp.inf
    run.state = jax.device_put(start, run.laid)
    before = digest_tree({"params": start.params, "rest": start.optimizer_state})
    run.update(1)
    after = digest_tree({"params": run.state.params, "rest": run.state.optimizer_state})
    return {"same": before == after, "counted": int(run.state.skipped), "update_norm": run.metrics[-1]["update_norm"]}


def saved_and_restored(run, others, folder):
    """A checkpoint of `run`, restored as each of `others` wants it: digests, and whether it lies as it should."""
    checkpoints = Checkpoints(folder, keep=1, warn=print)
    tree = to_checkpoint(run.state)
    checkpoints.save(1, tree, score=None)
    checkpoints.wait()
    found = {"digest": digest_tree(tree)}
    for name, other in others.items():
        restored = checkpoints.restore(to_checkpoint(placed_shapes(run.state, other.laid))).state
        state = from_checkpoint(restored)
        laid = jax.tree.map(lambda leaf, sharding: leaf.sharding == sharding, state, other.laid)
        params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree["params"])
        wanted = placed_shapes(params, shardings(params, other.mesh))
        alone = load_params(folder, abstract=wanted, warn=print).params
        found[name] = {
            "digest": digest_tree(restored),
            "laid": all(jax.tree.leaves(laid)),
            "params": digest_tree(alone) == digest_tree(tree["params"]),
        }
    checkpoints.close()
    return found


def main(precision, folder):
    prepared = prepared_run(folder, precision)
    _, _, start = beginning(prepared, precision)
    count = 1 if precision == "float32" else UPDATES
    one = Run(prepared, WHOLE, False, start).update(count)
    runs = {str(shape): Run(prepared, shape, True, start).update(count) for shape in MESHES[precision]}
    if precision == "float64":
        runs["accumulated"] = Run(prepared, ACCUMULATED, True, start, accumulate=2).update(count)
    found = {"one": one.facts(), "runs": {name: run.facts() | {"apart": run.apart(one)} for name, run in runs.items()}}
    if precision == "float32":
        plain = Run(prepared, (8, 1, 1), False, start).update(1)
        parted = runs["(8, 1, 1)"]
        found["collectives"] = {
            "plain": collectives(plain.step.as_text()),
            "parted": collectives(parted.step.as_text()),
        }
        found["saved parted"] = saved_and_restored(
            parted, {"plain": plain, "parted": parted, "one": one, "two": runs["(2, 1, 1)"]}, folder / "parted"
        )
        found["saved plain"] = saved_and_restored(plain, {"parted": parted}, folder / "plain")
        found["skipped"] = skipped(parted, start)
    print(json.dumps(found))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main(sys.argv[1], pathlib.Path(sys.argv[2]))
