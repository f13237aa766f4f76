"""A checkpoint saved on one mesh and restored on others: the same bits, where the other mesh wants them."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).parent

# Eight simulated devices; parameters, Adam's moments and the step, saved as each strategy lays them out.
PROGRAM = """
import itertools, json, pathlib, sys
import jax
import numpy as np
jax.config.update("jax_num_cpu_devices", 8)
sys.path[:0] = [sys.argv[1]]
from small_models import small_config
from transformer_jax.checkpointing.checkpoints import Checkpoints, digest_tree, load_params
from transformer_jax.config import MeshConfig, OptimizerConfig
from transformer_jax.parallel.mesh import make_mesh
from transformer_jax.parallel.rules import shardings
from transformer_jax.training.state import init_state, make_optimizer, to_checkpoint

model = small_config(d_model=16, num_heads=8, d_ff=16, vocab_size=24)
shapes = to_checkpoint(jax.eval_shape(lambda: init_state(model, make_optimizer(OptimizerConfig(), 16, 10), 0)))
rng = np.random.default_rng(0)
whole = jax.tree.map(lambda leaf: (rng.normal(size=leaf.shape) * 100).astype(leaf.dtype), shapes)
meshes = {
    str(shape): make_mesh(MeshConfig(*shape))
    for shape in [(1, 1, 1), (2, 1, 1), (4, 1, 1), (8, 1, 1), (1, 8, 1), (1, 1, 4), (2, 2, 2)]
}

def on(mesh):
    place = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return jax.tree.map(place, shapes, shardings(shapes, mesh))

found = []
for saved in ["(8, 1, 1)", "(1, 8, 1)", "(1, 1, 4)", "(2, 2, 2)"]:
    folder = pathlib.Path(sys.argv[2], saved)
    checkpoints = Checkpoints(folder, keep=1, warn=print)
    state = jax.device_put(whole, shardings(whole, meshes[saved]))
    parts = {len({str(s.index) for s in leaf.addressable_shards}) for leaf in jax.tree.leaves(state)}
    checkpoints.save(1, state, score=None)
    for name, mesh in meshes.items():
        wanted = on(mesh)
        restored = checkpoints.restore(wanted).state
        params = load_params(folder, abstract=wanted["params"], warn=print).params
        laid = jax.tree.leaves(jax.tree.map(lambda leaf, like: leaf.sharding == like.sharding, restored, wanted))
        found.append({
            "saved": saved, "restored": name, "most parts": max(parts), "laid": all(laid),
            "same": digest_tree(restored) == digest_tree(whole),
            "same params": digest_tree(params) == digest_tree(whole["params"]),
        })
    checkpoints.close()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(TESTS.parent)}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(TESTS), str(tmp_path_factory.mktemp("meshes"))],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.strip().split("\n")[-1])


def test_the_strategies_differ(found):
    """Whole on each device; in eight parts; in four; in four, by two axes."""
    assert {each["saved"]: each["most parts"] for each in found} == {
        "(8, 1, 1)": 1, "(1, 8, 1)": 8, "(1, 1, 4)": 4, "(2, 2, 2)": 4,
    }  # fmt: skip


def test_every_mesh_restores_what_every_other_saved_to_the_last_bit(found):
    assert len(found) == 4 * 7
    wrong = [each for each in found if not (each["same"] and each["same params"] and each["laid"])]
    assert wrong == []
