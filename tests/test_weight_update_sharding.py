"""The weight update shared out over `data`: the same update, a part of the state on each device, the same checkpoints.

What devices do runs in processes apart, on eight simulated ones.
"""

import dataclasses

import jax
import pytest
from device_programs import run_apart
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from small_models import small_config
from weight_update_devices import MESHES, UPDATES

from transformer_jax.cli.shardings import describe_shardings
from transformer_jax.config import Config, MeshConfig, OptimizerConfig
from transformer_jax.parallel import rules
from transformer_jax.parallel.mesh import AXES
from transformer_jax.training.state import init_state, make_optimizer

# Where the axis goes


def state_of(**changes):
    model = small_config(**({"vocab_size": 24} | changes))
    optimizer = make_optimizer(OptimizerConfig(ema_decay=0.9), model.d_model, 10)
    return jax.eval_shape(lambda: init_state(model, optimizer, 0))


def specs(state, *shape):
    mesh = AbstractMesh(shape, AXES, axis_types=(AxisType.Auto,) * 3)
    flat, _ = jax.tree_util.tree_flatten_with_path(rules.shardings(state, mesh, over_data=True))
    return {rules.path_name(path): leaf.spec for path, leaf in flat}


@pytest.mark.parametrize(
    ("mesh", "wanted"),
    [
        ((2, 1, 1), {"embedding": "data", "w_q": "data", "w_o": "data", "w_2": "data"}),
        ((4, 1, 1), {"embedding": "data", "w_q": "- data", "w_o": "- - data", "w_2": "- data"}),
        ((4, 2, 1), {"embedding": "data fsdp", "w_q": "- fsdp - data", "w_o": "- - data fsdp", "w_2": "- data fsdp"}),
        ((4, 1, 2), {"embedding": "tensor data", "w_q": "- data tensor", "w_o": "- tensor data"}),
        ((5, 1, 1), {"embedding": "", "w_q": "", "w_o": "", "w_2": ""}),
    ],
)  # fmt: skip
def test_data_cuts_the_first_dimension_that_it_divides_and_that_no_axis_cuts(mesh, wanted):
    """[W D], [N D H K], [N H V D] and [N F D] of 24, 2, 8, 2, 4 and 12; moments and average as their parameter."""
    found = specs(state_of(), *mesh)
    for name, text in wanted.items():
        spec = PartitionSpec(*(None if word == "-" else word for word in text.split()))
        paths = [
            path for path in found if path.split("/")[-1] == name and "cross" not in path and "decoder" not in path
        ]
        assert len(paths) == 4 and {_plain(found[path], mesh) for path in paths} == {_plain(spec, mesh)}, name


def _plain(spec, mesh):
    """Without axes of one device, and without what they leave at the end."""
    entries = [entry if entry and mesh[AXES.index(entry)] > 1 else None for entry in spec]
    return tuple(entries[: max((i + 1 for i, entry in enumerate(entries) if entry), default=0)])


def test_vectors_and_scalars_stay_as_they_are():
    state = state_of()
    for mesh in ((2, 1, 1), (4, 2, 1), (2, 2, 2)):
        plain = rules.shardings(state, AbstractMesh(mesh, AXES, axis_types=(AxisType.Auto,) * 3))
        flat, _ = jax.tree_util.tree_flatten_with_path(plain)
        for path, sharding in flat:
            last = rules.path_name(path).split("/")[-1]
            if last.startswith(("b_", "scale", "bias", "step", "count", "skipped")):
                assert specs(state, *mesh)[rules.path_name(path)] == sharding.spec


def test_describe_counts_the_parts_and_names_what_stays_whole():
    config = dataclasses.replace(Config(), mesh=MeshConfig(8, 1, 1))
    plain = describe_shardings(config, 37000, None)
    parted = describe_shardings(dataclasses.replace(config, mesh=MeshConfig(8, 1, 1, True)), 37000, None)
    vectors = sum(each.bytes_per_device for name, each in plain.parameters.items() if "/b" in name or "norm" in name)
    assert parted.parameter_bytes == (plain.parameter_bytes - vectors) // 8 + vectors
    assert parted.optimizer_bytes == 2 * parted.parameter_bytes + 4
    assert parted.parameters["embedding"].axes == [["data"], []] and not parted.notes
    odd = describe_shardings(dataclasses.replace(config, mesh=MeshConfig(3, 8, 1, True)), 37001, None)
    assert odd.notes == {
        "embedding": "mesh.data 3 divides no dimension that no other axis cuts: its update is not shared out"
    }
    alone = describe_shardings(dataclasses.replace(config, mesh=MeshConfig(1, 8, 1, True)), 37000, None)
    assert "mesh.data is 1" in alone.notes["mesh.shard_weight_update"] and len(alone.notes) == 1


# What eight devices do


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_apart("weight_update_devices.py", "float32", tmp_path_factory.mktemp("parted"))


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    return run_apart("weight_update_devices.py", "float64", tmp_path_factory.mktemp("exact"))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [str(shape) for shape in MESHES["float32"]])
def test_the_first_update_is_that_of_one_device(found, mesh):
    (one,), (other,) = found["one"]["metrics"], found["runs"][mesh]["metrics"]
    for name, tolerance in {"loss": 1e-6, "nll": 1e-6, "gradient_norm": 1e-5, "param_norm": 1e-5}.items():
        assert other[name] == pytest.approx(one[name], rel=tolerance, abs=0), name


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [*map(str, MESHES["float64"]), "accumulated"])
def test_several_updates_are_those_of_one_device(exact, mesh):
    """J4, J7: parameters, moments and moving average, clipped; no axis divides the 301 word pieces."""
    run = exact["runs"][mesh]
    assert len(run["metrics"]) == UPDATES and run["metrics"][-1]["loss"] < run["metrics"][0]["loss"]
    assert run["apart"] < 1e-9 and run["laid"]
    assert "rematerialization" not in exact["stderr"]


@pytest.mark.slow
def test_a_device_holds_its_part_of_matrices_moments_and_average(found):
    for mesh, devices in {"(2, 1, 1)": 2, "(8, 1, 1)": 8}.items():
        held, whole = found["runs"][mesh]["held"], found["one"]["held"]
        for name, octets in whole.items():
            # 300 word pieces: by 8 their vectors of 16 are cut instead.
            matrix = name.split("/")[-1].startswith(("w_", "embedding"))
            assert octets == held[name] * (devices if matrix else 1), name
        assert found["runs"][mesh]["laid"]


@pytest.mark.slow
def test_gradients_are_reduce_scattered_and_parameters_gathered_once(found):
    """Each matrix, none of them in a loop; vectors and the loss's sums together in one all-reduce."""
    matrices = [name for name in found["one"]["held"] if name.startswith("params/") and _is_matrix(name)]
    kinds = [kind for kind, _, _ in found["collectives"]["parted"]]
    assert kinds.count("reduce-scatter") == kinds.count("all-gather") == len(matrices)
    assert not any(in_loop for _, _, in_loop in found["collectives"]["parted"])
    added = [shapes for kind, shapes, _ in found["collectives"]["parted"] if kind == "all-reduce"]
    assert all(len(shape.split(",")) < 4 and "300" not in shape for shapes in added for shape in shapes)
    assert [kind for kind, _, _ in found["collectives"]["plain"]] == ["all-reduce"]
    assert "rematerialization" not in found["stderr"]


def _is_matrix(name):
    return name.split("/")[-1].startswith(("w_", "embedding"))


@pytest.mark.slow
def test_an_update_that_is_not_finite_is_skipped_on_all_devices(found):
    assert found["skipped"] == {"same": True, "counted": 1, "update_norm": 0.0}


@pytest.mark.slow
def test_a_checkpoint_is_the_same_and_restores_with_the_option_and_without(found):
    for name in ("saved parted", "saved plain"):
        digest = found[name].pop("digest")
        assert found[name]
        for other in found[name].values():
            assert other == {"digest": digest, "laid": True, "params": True}
