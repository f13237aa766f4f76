"""Items made ahead in a thread: the same ones in the same order, and nothing left behind."""

import itertools
import threading
import time

import pytest

from transformer_jax.data.prefetch import Prefetched


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.mark.parametrize("depth", [1, 3, 100])
def test_the_same_items_in_the_same_order(depth):
    with Prefetched(iter(range(50)), depth) as items:
        assert list(items) == list(range(50))
        assert list(items) == [], "and no more after the last"
    assert threads() == []


def test_no_more_are_made_ahead_than_the_depth_says():
    """The one in the queue, the one that waits to get in, and no other."""
    made = []
    with Prefetched((made.append(i) or i for i in itertools.count()), depth=2) as items:
        assert next(items) == 0
        deadline = time.monotonic() + 20
        while len(made) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)
        assert made == [0, 1, 2, 3]
        assert next(items) == 1
    assert threads() == []


def test_an_error_comes_where_the_item_would_have_and_stays():
    def items():
        yield 1
        yield 2
        raise ValueError("third")

    with Prefetched(items(), 8) as made:
        assert [next(made), next(made)] == [1, 2]
        for _ in range(2):
            with pytest.raises(ValueError, match="third"):
                next(made)
    assert threads() == []


def test_leaving_by_an_error_ends_the_thread_that_waits_for_room():
    with pytest.raises(RuntimeError), Prefetched(itertools.count(), 1) as items:
        next(items)
        raise RuntimeError
    assert threads() == []
    with pytest.raises(StopIteration):
        next(items)
