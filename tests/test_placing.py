"""Batches laid out and placed in a thread: the same ones, in the same order; its errors told, nothing left behind."""

import itertools
import threading

import jax
import numpy as np
import pytest
from small_runs import run_config

from transformer_jax.config import MeshConfig
from transformer_jax.data.batches import batches_from
from transformer_jax.parallel.mesh import make_mesh
from transformer_jax.training import placing
from transformer_jax.training.placing import place, placed_ahead
from transformer_jax.training.preparation import prepare


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.fixture
def prepared(tmp_path):
    return prepare(run_config(tmp_path / "text"), tmp_path / "run", print)


def test_they_come_in_their_order_with_their_positions(prepared):
    mesh, plan = make_mesh(MeshConfig()), prepared.plan
    expected = list(itertools.islice(batches_from(plan, 1, 1), 8))
    with placed_ahead(batches_from(plan, 1, 1), prepared.train, mesh, parts=2) as batches:
        found = list(itertools.islice(batches, 8))
    assert threads() == []
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    for each, (_, _, planned) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(each.planned.examples, planned.examples)
        alone = place(planned, prepared.train, mesh, parts=2)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(each.arrays), jax.device_get(alone))
        assert each.arrays.source.sharding == alone.source.sharding


@pytest.mark.parametrize("broken", ["planning", "placing"])
def test_what_either_thread_raises_comes_in_its_turn(broken, prepared, monkeypatch):
    def batches():
        yield from itertools.islice(batches_from(prepared.plan, 0, 0), 2)
        raise OSError("planning failed")

    assemble, numbers = placing.assemble, itertools.count(1)

    def failing(*given, **options):
        if broken == "placing" and next(numbers) == 3:
            raise OSError("placing failed")
        return assemble(*given, **options)

    monkeypatch.setattr(placing, "assemble", failing)
    endless = batches() if broken == "planning" else batches_from(prepared.plan, 0, 0)
    with placed_ahead(endless, prepared.train, make_mesh(MeshConfig())) as found:
        assert [next(found).next_index, next(found).next_index] == [1, 2]
        for _ in range(2):
            with pytest.raises(OSError, match=f"{broken} failed"):
                next(found)
    assert threads() == []
