"""The same update on one device and on eight: simulated, in a process of its own."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).parent

# 13 rows become 16 on eight devices; sentences of 1 to 12 words, so that devices have unequal numbers of pieces.
PROGRAM = """
import json, pathlib, sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
sys.path[:0] = [sys.argv[1], str(pathlib.Path(sys.argv[1]).parent)]
from small_models import QUICK
from small_runs import pairs, run_config, write_pairs
from transformer_jax.config import MeshConfig
from transformer_jax.data.batches import assemble
from transformer_jax.ops.masks import BOS
from transformer_jax.parallel.mesh import make_mesh, replicated, rows_sharding
from transformer_jax.training.preparation import prepare
from transformer_jax.training.state import init_state, make_optimizer
from transformer_jax.training.step import make_train_step

folder = pathlib.Path(sys.argv[2])
text = write_pairs(folder / "train.tsv", pairs(60, longest=12))
config = run_config(folder / "text", data__train_source=text, data__batch_tokens=13 * 16, data__packing=False)
prepared = prepare(config, folder / "run", 8, lambda line: None)
config = prepared.config
planned = max(prepared.plan.epoch(0), key=lambda batch: len(batch.examples))
batch = assemble(planned, prepared.train, bos_id=BOS)
found = []
for devices in (1, 8):
    mesh = make_mesh(MeshConfig(data=devices))
    optimizer = make_optimizer(config.optimizer, config.model.d_model, 1)
    state = jax.jit(lambda: init_state(config.model, optimizer, 0), out_shardings=replicated(mesh))()
    placed = jax.device_put(batch, rows_sharding(mesh))
    step = make_train_step(config, optimizer, mesh).lower(state, placed).compile(compiler_options=QUICK)
    state, metrics = step(state, placed)
    pieces = [int((part.data != 0).sum()) for part in placed.labels.addressable_shards]
    found.append({name: float(value) for name, value in metrics.items()} | {
        "pieces": pieces, "rows": batch.source.shape[0], "step": int(state.step),
        "copies": len(state.params["embedding"].addressable_shards),
    })
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("devices")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(TESTS), str(folder)], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.strip().split("\n")[-1])


def test_rows_are_filled_up_to_a_multiple_of_the_devices(found):
    """J4: 13 rows on 8 devices."""
    assert [each["rows"] for each in found] == [16, 16]
    assert [len(each["pieces"]) for each in found] == [1, 8] and found[1]["copies"] == 8
    # Devices differ in their numbers of pieces: a mean of their means would be another number.
    assert len(set(found[1]["pieces"])) > 2 and sum(found[1]["pieces"]) == found[0]["pieces"][0]


def test_an_update_on_eight_devices_is_that_on_one(found):
    """J4: the loss is a mean over pieces of the whole batch, whatever part of it a device has; dropout included."""
    for name, tolerance in {"loss": 1e-6, "nll": 1e-6, "gradient_norm": 1e-5, "learning_rate": 0}.items():
        assert found[1][name] == pytest.approx(found[0][name], rel=tolerance, abs=0), name
    assert found[0]["target_tokens"] == found[1]["target_tokens"] == sum(found[1]["pieces"])
    assert found[0]["step"] == found[1]["step"] == 1
