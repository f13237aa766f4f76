"""The same numbers on every mesh, and what the devices send one another: eight simulated ones, in a process apart."""

import math

import pytest
from device_programs import run_apart
from eight_devices import MESHES, UPDATES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_apart("eight_devices.py", "float32", tmp_path_factory.mktemp("devices"))


def test_rows_are_filled_up_to_a_multiple_of_the_devices(found):
    """J4: 13 rows are 16 on eight devices; the devices of a tensor axis hold the same rows."""
    rows = {name: each["rows"] for name, each in found["runs"].items()}
    assert rows == {
        "(1, 1, 1)": 13, "(2, 1, 1)": 14, "(4, 1, 1)": 16, "(8, 1, 1)": 16, "(1, 8, 1)": 16, "(1, 1, 4)": 13,
        "(2, 2, 2)": 16,
    }  # fmt: skip
    # Devices differ in their numbers of pieces: a mean of their means would be another number.
    pieces = found["runs"]["(8, 1, 1)"]["pieces"]
    assert len(set(pieces)) > 2 and sum(pieces) == found["runs"]["(1, 1, 1)"]["pieces"][0]


@pytest.mark.parametrize("mesh", [str(shape) for shape in MESHES["float32"][1:]])
def test_the_first_update_is_that_of_one_device(found, mesh):
    """J4: the loss is a mean over pieces of the whole batch, whatever part of it a device has; three kinds of dropout
    are on.
    """
    (one,), (other,) = (found["runs"][name]["metrics"] for name in ("(1, 1, 1)", mesh))
    tolerances = {"loss": 1e-6, "nll": 1e-6, "gradient_norm": 1e-5, "learning_rate": 0, "target_tokens": 0}
    for name, tolerance in tolerances.items():
        assert other[name] == pytest.approx(one[name], rel=tolerance, abs=0), name
    assert other["skipped"] == 0


def test_a_device_holds_its_part_of_the_parameters(found):
    """An eighth under fsdp 8, a fourth under tensor 4, vectors apart."""
    matrices = [i for i, shape in enumerate(found["shapes"]) if math.prod(shape) > 64]
    for mesh, part in {"(8, 1, 1)": 1, "(1, 8, 1)": 8, "(1, 1, 4)": 4, "(2, 2, 2)": 4}.items():
        held, whole = (found["runs"][name]["held"] for name in (mesh, "(1, 1, 1)"))
        assert [whole[i] // held[i] for i in matrices] == [part] * len(matrices)


def test_fresh_parameters_do_not_depend_on_the_mesh(found):
    assert found["same start"]


def test_devices_that_share_out_rows_send_one_message(found):
    """All gradients and sums in one all-reduce, outside of the scanned layers."""
    ((kind, shapes, in_loop),) = found["runs"]["(8, 1, 1)"]["collectives"]
    assert (kind, in_loop) == ("all-reduce", False)
    assert len(shapes) == len(found["shapes"]) + 3
    assert found["runs"]["(1, 1, 1)"]["collectives"] == []


def test_under_fsdp_weights_are_gathered_and_gradients_added_up_but_no_activation_moves(found):
    """Each weight where it is used, a layer's gradients in one message (an all-reduce, as XLA for CPUs knows no
    reduce-scatter).
    """
    messages = found["runs"]["(1, 8, 1)"]["collectives"]
    assert {kind for kind, _, _ in messages} == {"all-gather", "all-reduce"}
    gathered = {shape for kind, shapes, _ in messages for shape in shapes if kind == "all-gather"}
    assert gathered == {"16,16", "16,32", "32,16", "300,16"}
    added = [shapes for kind, shapes, in_loop in messages if kind == "all-reduce" and in_loop]
    assert [len(shapes) > 10 for shapes in added] == [True, True], "one for each stack's backward pass"


def test_under_tensor_devices_add_up_what_heads_and_pieces_give(found):
    messages = found["runs"]["(1, 1, 4)"]["collectives"]
    assert {kind for kind, _, _ in messages} == {"all-reduce"}


def test_xla_finds_a_way_for_every_array(found):
    """It warns where it has to make an array whole on all devices to lay it out anew."""
    assert "rematerialization" not in found["stderr"]


def test_the_dev_loss_is_the_same_and_counts_each_piece_once(found):
    """J4: its batches are not full, and their rows no multiple of the devices."""
    one, *others = found["dev"]
    assert one["tokens"] == found["dev pieces"]
    for other in others:
        assert other == pytest.approx(one, rel=1e-6)


def test_translations_do_not_depend_on_the_mesh(found):
    one, *others = found["texts"]
    assert len(one) == 12 and one[-1] == "" and any(one)
    assert others == [one] * len(others)


def test_a_search_sends_nothing_but_its_result(found):
    """No message for a written piece: nor log-probabilities to be sorted, nor whether all have ended."""
    for mesh, messages in found["search"].items():
        assert {kind for kind, _, _ in messages} == {"all-gather"}
        assert not any(in_loop for _, _, in_loop in messages), mesh


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    return run_apart("eight_devices.py", "float64", tmp_path_factory.mktemp("exact"))


@pytest.mark.parametrize("mesh", [str(shape) for shape in MESHES["float64"][1:]])
def test_several_updates_are_those_of_one_device(exact, mesh):
    """J4, J7: parameters, moments and moving average; no axis divides the 301 word pieces."""
    run = exact["runs"][mesh]
    assert len(run["metrics"]) == UPDATES
    assert run["metrics"][-1]["loss"] < run["metrics"][0]["loss"]
    assert run["apart"] < 1e-9
    assert "rematerialization" not in exact["stderr"]
