"""Checkpoints: what is saved comes back bit for bit, the newest and the best are kept, and another's are refused."""

import json
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from small_checkpoints import Run, abstract, assert_same, flip_value, make_state, make_tiny_state, numbered

from transformer_jax.checkpointing.checkpoints import Checkpoints, digest_tree, load_params
from transformer_jax.errors import UserError


def test_same_bytes_and_same_tree_come_back(tmp_path):
    """C1: parameters, Adam's moments and count (NamedTuples), the step, and the extra values."""
    state = make_state(7)
    checkpoints = Checkpoints(tmp_path, keep=1, warn=pytest.fail)
    checkpoints.save(7, state, {"best_score": 12.5, "patience": 2, "position": [3, 4]}, score=1.0)
    restored = checkpoints.restore(abstract(state))
    checkpoints.close()
    assert_same(restored.state, state)
    assert (restored.step, restored.score) == (7, 1.0)
    assert restored.extra == {"best_score": 12.5, "patience": 2, "position": [3, 4]}


def test_every_kind_of_leaf_comes_back_as_it_was(tmp_path):
    state = {
        "params": {
            "bfloat16": jnp.array([1.5, -0.0, jnp.inf, 3e-39], jnp.bfloat16),
            "numpy": np.arange(6, dtype=np.int64).reshape(2, 3)[:, ::-1],
            "zero": jnp.float32(0.1),
            "empty": (),
        },
        "words": jnp.array([2**32 - 1, 0], jnp.uint32),
        "nested": [None, (jnp.array([True, False]), optax.EmptyState())],
        "counts": {"whole": 3, "fraction": 0.1, "flag": True},
    }
    checkpoints = Checkpoints(tmp_path, keep=1, warn=pytest.fail)
    checkpoints.save(0, state, score=None)
    restored = checkpoints.restore(state).state
    checkpoints.close()
    assert_same(restored, state)
    assert [type(value) for value in restored["counts"].values()] == [bool, float, int]
    assert type(restored["params"]["numpy"]) is np.ndarray
    assert isinstance(restored["words"], jax.Array)


def test_a_save_is_of_the_moment_it_was_called(tmp_path, monkeypatch):
    """Training donates its state to the next step at once, and goes on changing host values: the save copies first."""
    changed = threading.Event()
    monkeypatch.setattr(
        "transformer_jax.checkpointing.checkpoints.to_host", lambda leaf: changed.wait(10) and np.asarray(leaf)
    )
    counts = np.zeros(3)
    extra = {"seen": [1]}
    state = {"params": {"w": jnp.ones((256, 256))}, "counts": counts}
    like, before = abstract(state), digest_tree(state)
    checkpoints = Checkpoints(tmp_path, keep=1, warn=pytest.fail)
    checkpoints.save(1, state, extra, score=None)
    jax.jit(lambda w: w * 2, donate_argnums=0)(state["params"]["w"])
    counts += 1
    extra["seen"].append(2)
    changed.set()
    restored = checkpoints.restore({**like, "counts": counts})
    checkpoints.close()
    assert digest_tree(restored.state) == before
    assert restored.extra == {"seen": [1]}


def test_newest_is_the_highest_number_that_is_whole(tmp_path):
    """C4: 9 does not come after 10, and an empty folder or a leftover of a killed save is not a checkpoint."""
    Run(tmp_path, keep=2).save(8, 9, 10, 11).checkpoints.close()
    assert numbered(tmp_path) == ["10", "11"]
    (tmp_path / "12").mkdir()
    leftover = tmp_path / "13.orbax-checkpoint-tmp-1700000000"
    shutil.copytree(tmp_path / "11", leftover)
    run = Run(tmp_path, keep=2)
    assert run.checkpoints.steps() == [10, 11]
    restored = run.restore()
    assert restored.step == 11
    assert_same(restored.state, make_tiny_state(11))
    assert len(run.warnings) == 2
    assert "13.orbax-checkpoint-tmp-1700000000" in run.warnings[0]
    assert str(tmp_path / "12") in run.warnings[1] and "empty" in run.warnings[1]
    assert numbered(tmp_path) == ["10", "11"]
    run.save(12)
    assert numbered(tmp_path) == ["11", "12"]


def test_step_0_is_a_step(tmp_path):
    """C9: step 0 is saved, resumed from, and loaded by name while step 5 exists."""
    run = Run(tmp_path).save(0)
    assert run.restore().step == 0
    run.save(5, scores={5: 0.0})
    assert run.restore().step == 5
    assert run.restore(0).extra == {"at": 0}
    assert load_params(tmp_path, 0, warn=pytest.fail).step == 0
    assert load_params(tmp_path, warn=pytest.fail).step == 5
    run.save(0, scores={0: 1.0})
    assert run.checkpoints.best_step() == 0


def test_nothing_saved_is_none_for_a_run_and_an_error_for_translation(tmp_path):
    assert Run(tmp_path / "new").restore() is None
    with pytest.raises(UserError, match=r"no checkpoint in .*new"):
        load_params(tmp_path / "new", warn=pytest.fail)
    with pytest.raises(UserError, match="cannot read"):
        load_params(tmp_path / "absent", warn=pytest.fail)


def test_a_step_that_is_not_there_is_named_with_those_that_are(tmp_path):
    run = Run(tmp_path).save(3, 20)
    with pytest.raises(UserError, match=r"step 4 .*3, 20"):
        run.restore(4)


def test_best_stays_beside_the_newest(tmp_path):
    """The first of equals is best; N3: a score that is not a number never is."""
    scores = {1: 5.0, 2: 9.0, 3: 9.0, 4: float("nan"), 5: 1.0, 6: float("inf")}
    run = Run(tmp_path, keep=2).save(1, 2, 3, 4, 5, 6, scores=scores)
    assert run.checkpoints.best_step() == 2
    assert run.checkpoints.steps() == [2, 5, 6]
    best = load_params(tmp_path, "best", warn=pytest.fail)
    assert (best.step, best.score, best.extra) == (2, 9.0, {"at": 2})
    assert_same(best.params, make_tiny_state(2)["params"])
    run.save(7, scores={7: 10.0})
    assert run.checkpoints.steps() == [6, 7]
    assert not list(tmp_path.glob("*tmp*"))


def scheduled(step):
    return step % 5 == 0


@pytest.mark.parametrize("stops", [[], [7], [7, 8, 22], [29]])
def test_what_stays_does_not_depend_on_where_a_run_was_stopped(tmp_path, stops):
    """The newest 2, every 10th, and the best; saves at a stop come and go."""
    for step in sorted([5, 10, 15, 20, 25, 30, *stops]):
        run = Run(tmp_path, keep=2, keep_every=10, scheduled=scheduled)
        run.save(step, scores={15: 3.0, 20: 1.0})
        assert step in run.checkpoints.steps()
        run.checkpoints.close()
    assert run.checkpoints.steps() == [10, 15, 20, 25, 30]


def test_a_kill_between_a_save_and_its_rotation_leaves_nothing_behind(tmp_path, monkeypatch):
    """The next start removes what that rotation would have, once it has read a sound step; not before."""
    run = Run(tmp_path, keep=1, scheduled=scheduled).save(5, 7)
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_rotate", lambda self: None)
        run.save(10, 15)
    assert run.checkpoints.steps() == [5, 7, 10, 15]
    flip_value(tmp_path / "15", 15.5)
    again = Run(tmp_path, keep=1, scheduled=scheduled)
    assert again.restore(7).step == 7 and again.checkpoints.steps() == [5, 7, 10, 15]
    assert again.restore().step == 10
    assert numbered(tmp_path) == ["10"]


def test_best_without_any_score_is_the_newest(tmp_path):
    assert Run(tmp_path).save(9, 10).checkpoints.best_step() is None
    assert load_params(tmp_path, "best", warn=pytest.fail).step == 10


@pytest.mark.parametrize(
    ("layers", "pieces", "words"),
    [
        (3, 100, ["encoder/w_q", "float32[2, 4, 4]", "float32[3, 4, 4]"]),
        (2, 120, ["embedding", "float32[100, 4]", "float32[120, 4]"]),
    ],
)
def test_another_shape_is_refused_with_name_and_both_shapes(tmp_path, layers, pieces, words):
    """C7: a 2-layer, 100-piece checkpoint in a 3-layer, then a 120-piece one; nothing is moved or warned of."""
    checkpoints = Checkpoints(tmp_path, keep=1, warn=pytest.fail)
    checkpoints.save(1, make_state(1), score=None)
    other = abstract(make_state(1, layers, pieces))
    with pytest.raises(UserError) as error:
        checkpoints.restore(other)
    with pytest.raises(UserError) as params_error:
        load_params(tmp_path, abstract=other["params"], warn=pytest.fail)
    for word in words:
        assert word in str(error.value)
        assert word in str(params_error.value)
    assert checkpoints.steps() == [1]


def test_missing_extra_and_retyped_parameters_are_refused(tmp_path):
    """C7: never a part of the weights."""
    run = Run(tmp_path).save(1)
    state = abstract(make_tiny_state())
    wrong = {
        r"params/b is absent in the checkpoint but float32\[2\] in the config": {**state["params"], "b": jnp.ones(2)},
        r"params/w is float32\[16, 20\] in the checkpoint but absent in the configuration": {"x": state["params"]["w"]},
        r"params/w is float32\[16, 20\] .* but bfloat16\[16, 20\] in": {"w": jnp.ones((16, 20), jnp.bfloat16)},
    }
    for message, params in wrong.items():
        with pytest.raises(UserError, match=message):
            run.checkpoints.restore({**state, "params": params})
    with pytest.raises(UserError, match="step is int32"):
        run.checkpoints.restore({"params": state["params"]})
    assert run.restore().step == 1


def test_params_are_loaded_without_the_rest(tmp_path):
    """With the optimizer's files gone, translation has all that it needs; a resume has not."""
    state = make_state(3)
    checkpoints = Checkpoints(tmp_path, keep=1, warn=pytest.fail)
    checkpoints.save(3, state, score=None)
    checkpoints.close()
    shutil.rmtree(tmp_path / "3" / "training")
    loaded = load_params(tmp_path, warn=pytest.fail)
    assert loaded.step == 3
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(loaded.state))
    assert_same(loaded.state, {"params": state["params"]})
    placed = load_params(tmp_path, abstract=abstract(state["params"]), warn=pytest.fail).params
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(placed))
    with pytest.raises(UserError, match="no sound checkpoint"):
        checkpoints.restore(abstract(state))


def test_params_alone_can_be_saved(tmp_path):
    params = {"w": np.arange(3.0)}
    checkpoints = Checkpoints(tmp_path, keep=1, warn=pytest.fail)
    checkpoints.save(0, {"params": params}, score=None)
    checkpoints.close()
    assert_same(load_params(tmp_path, warn=pytest.fail).params, params)


def test_a_save_after_going_back_makes_that_history_the_newest(tmp_path):
    """Step 6 saved when step 10 exists is neither skipped nor shadowed by 10."""
    run = Run(tmp_path).save(5, 10)
    assert run.restore(5).step == 5
    run.save(6)
    assert run.restore().step == 6
    assert run.checkpoints.steps() == [5, 6]
    assert len(run.warnings) == 1 and "superseded-10" in run.warnings[0]
    assert (tmp_path / "superseded-10" / "record").is_dir()


def test_a_step_saved_twice_is_the_later_one(tmp_path):
    run = Run(tmp_path).save(5)
    run.checkpoints.save(5, make_tiny_state(6), {"at": "second"}, score=2.0)
    restored = run.restore()
    assert restored.extra == {"at": "second"}
    assert_same(restored.state, make_tiny_state(6))
    assert run.warnings == []
    assert [path.name for path in tmp_path.iterdir()] == ["5"]


def test_two_runs_in_one_process_save_at_the_same_time(tmp_path):
    runs = [Run(tmp_path / name) for name in "ab"]
    for step in range(4):
        for run in runs:
            run.checkpoints.save(step, make_tiny_state(step), score=None)
    for run in runs:
        assert run.restore().step == 3
        run.checkpoints.close()


def test_a_checkpoint_is_placed_as_the_abstract_tree_says(tmp_path):
    """Saved with one sharding, restored with another; the values are those saved."""
    mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    run = Run(tmp_path).save(4)
    rows = NamedSharding(mesh, PartitionSpec("data", "tensor"))
    like = {
        "params": {"w": jax.ShapeDtypeStruct((16, 20), jnp.float32, sharding=rows)},
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec())),
    }
    restored = run.checkpoints.restore(like).state
    assert restored["params"]["w"].sharding == rows
    assert_same(restored, make_tiny_state(4))


def test_digest_sees_paths_types_shapes_and_bytes_but_not_the_order_of_keys():
    tree = {"a": np.arange(6, dtype=np.int32), "b": {"c": jnp.ones(2, jnp.bfloat16)}}
    assert digest_tree(tree) == digest_tree({"b": tree["b"], "a": jnp.arange(6, dtype=jnp.int32)})
    others = [
        {"a": tree["a"], "b": {"d": tree["b"]["c"]}},
        {"a": tree["a"].astype(np.uint32), "b": tree["b"]},
        {"a": tree["a"].reshape(2, 3), "b": tree["b"]},
        {"a": tree["a"][::-1], "b": tree["b"]},
    ]
    assert len({digest_tree(other) for other in [tree, *others]}) == 5


def test_the_record_is_plain_json(tmp_path):
    """Other programs find step, score, and every array's shape, dtype and digest."""
    Run(tmp_path).save(2, scores={2: 0.5})
    record = json.loads((tmp_path / "2" / "record" / "record.json").read_text())
    assert (record["step"], record["score"], record["extra"]) == (2, 0.5, {"at": 2})
    assert record["arrays"]["params/w"]["shape"] == [16, 20]
