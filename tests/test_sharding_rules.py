"""Meshes, the table from dimensions to mesh axes, and how every parameter lies by it; none needs its devices here.

The files in tests/golden are written anew by `python tests/test_sharding_rules.py`.
"""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from small_models import small_config

from transformer_jax.cli.main import main
from transformer_jax.cli.shardings import describe_shardings
from transformer_jax.config import MeshConfig, OptimizerConfig
from transformer_jax.config_loading import load_config
from transformer_jax.errors import UserError
from transformer_jax.ops import sharding
from transformer_jax.ops.sharding import constrain, mesh_axes
from transformer_jax.parallel import rules
from transformer_jax.parallel.mesh import AXES, make_mesh, mesh_shape, row_shares
from transformer_jax.training.state import init_state, make_optimizer, to_checkpoint

ROOT = pathlib.Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden"
STRATEGIES = {
    "data": MeshConfig(data=8),
    "fsdp": MeshConfig(data=1, fsdp=8),
    "tensor": MeshConfig(data=1, tensor=8),
    "fsdp+tensor": MeshConfig(data=2, fsdp=2, tensor=2),
}


def abstract_mesh(data, fsdp, tensor):
    return AbstractMesh((data, fsdp, tensor), AXES, axis_types=(AxisType.Auto,) * 3)


def state_of(model, **optimizer):
    made = make_optimizer(OptimizerConfig(**optimizer), model.d_model, 10)
    return jax.eval_shape(lambda: init_state(model, made, 0))


def specs(tree, mesh):
    flat, _ = jax.tree_util.tree_flatten_with_path(rules.shardings(tree, mesh))
    return {rules.path_name(path): leaf.spec for path, leaf in flat}


# Meshes


@pytest.mark.parametrize(
    ("asked", "devices", "shape"),
    [
        ((-1, 1, 1), 8, (8, 1, 1)), ((-1, 2, 2), 8, (2, 2, 2)), ((1, -1, 2), 8, (1, 4, 2)), ((2, 1, -1), 8, (2, 1, 4)),
        ((-1, 8, 1), 8, (1, 8, 1)), ((2, 2, 1), 8, (2, 2, 1)), ((1, 1, 1), 1, (1, 1, 1)),
    ],
)  # fmt: skip
def test_minus_one_takes_what_is_left(asked, devices, shape):
    assert mesh_shape(MeshConfig(*asked), devices) == shape


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ((-1, 3, 1), "mesh.fsdp 3 x mesh.tensor 1 is 3, which does not divide the 8"),
        ((4, -1, 4), "mesh.data 4 x mesh.tensor 4 is 16, which does not divide the 8"),
        ((4, 2, 2), "mesh.data 4 x mesh.fsdp 2 x mesh.tensor 2 is 16 devices, but there are 8"),
    ],
)
def test_a_mesh_that_the_devices_do_not_make_is_refused_in_one_line(asked, words):
    with pytest.raises(UserError, match=words) as caught:
        mesh_shape(MeshConfig(*asked), 8)
    assert "\n" not in str(caught.value)


def test_a_mesh_always_has_all_three_axes():
    mesh = make_mesh(MeshConfig(), devices=jax.devices()[:1])
    assert mesh.axis_names == AXES and set(mesh.axis_types) == {AxisType.Auto}
    assert row_shares(mesh) == 1
    assert row_shares(abstract_mesh(4, 2, 3)) == 8


# The table


def test_an_unknown_letter_and_two_letters_on_one_axis_are_refused():
    with pytest.raises(ValueError, match=r"DX: .* the letter X"):
        mesh_axes("DX", parameter=True)
    with pytest.raises(ValueError, match="FW: both F and W lie over the mesh axis tensor"):
        mesh_axes("FW", parameter=True)
    with pytest.raises(ValueError, match="BD: both B and D lie over the mesh axis fsdp"):
        mesh_axes("BD", parameter=True)
    assert mesh_axes("BTD", parameter=False) == [("data", "fsdp"), (), ()]


def test_activations_are_laid_over_the_mesh_of_the_context():
    x = jax.ShapeDtypeStruct((8, 3, 4), jnp.float32)

    def laid(letters):
        program = jax.make_jaxpr(lambda x: constrain(x, letters))(x)
        return [equation.params["sharding"].spec for equation in program.eqns]

    assert laid("BTD") == []
    with jax.sharding.use_abstract_mesh(abstract_mesh(1, 1, 1)):
        assert laid("BTD") == []
    with jax.sharding.use_abstract_mesh(abstract_mesh(2, 2, 2)):
        assert laid("BTD") == [PartitionSpec(("data", "fsdp"))]
        assert laid("BTW") == [PartitionSpec(("data", "fsdp"), None, "tensor")]
        assert laid("BWT") == [PartitionSpec(("data", "fsdp"))], "3 word pieces on 2 devices"


# Parameters and what is shaped like them


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"tied_embeddings": False}, {"positions": "learned"}, {"norm": "pre"}, {"attention_bias": False},
        {"scan_layers": False}, {"d_k": 3, "d_v": 5},
    ],
    ids=str,
)  # fmt: skip
def test_every_parameter_of_every_model_has_its_letters(changes):
    """So a mesh cuts all matrices, and each as often as it has axes for them."""
    model = small_config(vocab_size=24, **changes)
    found = specs(state_of(model).params, abstract_mesh(2, 2, 2))
    for name, spec in found.items():
        letters = rules.LETTERS[name.split("/")[-1]]
        wanted = set() if letters == "D" else {axis for letter in letters for axis in sharding.MESH_AXES[letter]}
        assert {axis for axis in spec if axis} == wanted, name
        assert not name.startswith(("encoder/", "decoder/")) or spec in ((), PartitionSpec()) or spec[0] is None


@pytest.mark.parametrize("view", [lambda state: state, to_checkpoint], ids=["in training", "in a checkpoint"])
def test_moments_and_average_follow_their_parameters(view):
    state = state_of(small_config(vocab_size=24), ema_decay=0.9)
    mesh = abstract_mesh(1, 2, 2)
    params = specs(state.params, mesh)
    found = specs(view(state), mesh)
    for name, spec in params.items():
        followers = [path for path in found if path.endswith(f"/{name}")]
        assert len(followers) == 4, "itself, mu, nu and the average"
        assert {found[path] for path in followers} == {spec}
    scalars = [path for path in found if not any(path.endswith(name) for name in params)]
    assert scalars and all(found[path] == PartitionSpec() for path in scalars)


@pytest.mark.parametrize(
    "leaf",
    [{"encoder": {"w_new": jnp.ones((2, 3))}}, {"encoder": {"w_q": jnp.ones((2, 3, 4))}}, {"b_new": jnp.ones(3)}],
)
def test_a_parameter_without_letters_is_named(leaf):
    """A new name, or a known one with another number of dimensions."""
    (path, _), *_ = jax.tree_util.tree_flatten_with_path(leaf)[0]
    with pytest.raises(ValueError, match=rf"params/{rules.path_name(path)} .*no letters"):
        rules.shardings({"params": leaf}, abstract_mesh(1, 1, 1))


def test_a_collision_names_the_parameter(monkeypatch):
    monkeypatch.setitem(sharding.MESH_AXES, "F", ("fsdp",))
    with pytest.raises(ValueError, match=r"params/decoder/feed_forward/w_1 .*both D and F .*axis fsdp"):
        rules.shardings(state_of(small_config()), abstract_mesh(1, 1, 1))


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ((1, 1, 4), r"self_attention/b_k has 2 along H, which mesh.tensor 4 does not divide"),
        ((1, 3, 1), r"w_k has 8 along D, which mesh.fsdp 3 does not divide: choose a divisor of 8"),
    ],
)
def test_a_mesh_that_does_not_divide_a_parameter_is_refused(mesh, words):
    model = small_config(vocab_size=24)
    tree = {"self_attention": state_of(model).params["encoder"]["self_attention"]}
    with pytest.raises(UserError, match=words):
        rules.shardings({"encoder": tree}, abstract_mesh(*mesh))


def test_a_vocabulary_of_any_size_works_and_it_is_said():
    """23 word pieces on 2 devices: whole along W, still cut along D."""
    params, mesh = state_of(small_config(vocab_size=23)).params, abstract_mesh(1, 2, 2)
    assert specs(params, mesh)["embedding"] == PartitionSpec(None, "fsdp")
    ((name, reason),) = rules.kept_whole(params, mesh).items()
    assert name == "embedding" and "23 word pieces" in reason and "model.vocab_size 24" in reason
    assert rules.kept_whole(state_of(small_config(vocab_size=24)).params, mesh) == {}


# describe


def base_shardings(strategy):
    config = dataclasses.replace(load_config(str(ROOT / "configs" / "base.py")), mesh=STRATEGIES[strategy])
    return describe_shardings(config, config.data.vocab_size, None)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_base_model_lies_as_the_golden_file_says(strategy):
    assert "\n".join(base_shardings(strategy).lines()) + "\n" == (GOLDEN / f"base.{strategy}.txt").read_text()


def test_bytes_by_hand():
    """63,082,496 parameters of four bytes; matrices in eight parts under fsdp 8, vectors whole."""
    whole, parts = base_shardings("data"), base_shardings("fsdp")
    assert whole.parameter_bytes == 4 * 63_082_496
    assert whole.optimizer_bytes == 2 * whole.parameter_bytes + 4, "mu, nu and a counter"
    vectors = sum(each.bytes_per_device for name, each in whole.parameters.items() if "/b" in name or "norm" in name)
    assert parts.parameter_bytes == (whole.parameter_bytes - vectors) // 8 + vectors


def test_describe_shows_shardings_for_devices_that_are_not_there(capfdbinary):
    argv = ["describe", str(ROOT / "configs" / "base.py"), "--mesh.data=-1", "--mesh.fsdp=4", "--mesh.tensor=2"]
    assert main([*argv, "--devices", "16"]) == 0
    page = capfdbinary.readouterr().out.decode()
    assert "Shardings on 16 device(s): data 2, fsdp 4, tensor 2" in page and "(tensor, fsdp)" in page
    assert main([*argv, "--devices", "16", "--json"]) == 0
    found = json.loads(capfdbinary.readouterr().out)["shardings"]
    assert found["mesh"] == {"data": 2, "fsdp": 4, "tensor": 2}
    assert found["parameters"]["embedding"] == {
        "shape": [37000, 512], "axes": [["tensor"], ["fsdp"]], "bytes_per_device": 37000 * 512 * 4 // 8,
    }  # fmt: skip
    assert main([*argv, "--devices", "12"]) == 2
    assert "does not divide the 12 device(s)" in capfdbinary.readouterr().err.decode()


if __name__ == "__main__":
    for name in STRATEGIES:
        (GOLDEN / f"base.{name}.txt").write_text("\n".join(base_shardings(name).lines()) + "\n")
