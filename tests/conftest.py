"""What all tests run with: JAX on the CPU, nothing compiled by an earlier run, and annotations that are checked."""

import collections
import os
import time

# Before JAX is imported: the tests compare numbers, which other backends compute with fewer digits. A compilation cache
# named in the environment would hide what the tests count, and serve programs of another machine.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)

import jaxtyping
import pytest

# Every annotated argument and result in the package is checked: dtypes, and that the dimension of a letter is the same
# wherever the letter stands in one signature.
jaxtyping.install_import_hook("transformer_jax", "beartype.beartype")


def pytest_runtest_setup(item):
    """With SLOW_TESTS_UNTIL, seconds since 1970, slow tests not begun by then are skipped: `.ci/run` has 30 minutes."""
    until = float(os.environ.get("SLOW_TESTS_UNTIL", "inf"))
    if time.time() > until and item.get_closest_marker("slow"):
        pytest.skip("a slow test, left out as this machine has no time left for it (SLOW_TESTS_UNTIL)")


def pytest_collection_modifyitems(items):
    """Files with most slow tests come first: where processes take whole files, one at the end is waited for alone."""
    slow = collections.Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])
