"""A state tree as arrays by name: what a checkpoint stores, digests, compares with a configuration and places again."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

PyTree = Any
Entry = dict[str, Any]
"""What is recorded of an array: its dtype, shape and sha256."""


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Leaves by path, as `params/encoder/w_q` or `optimizer_state/0/mu/embedding`; empty nodes have none."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts from `named_leaves`; every kind of node becomes a dict with text keys."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def digest_tree(tree: PyTree) -> str:
    """SHA-256 (hex) over paths, dtypes, shapes and bytes of all leaves; the order of dict keys does not matter."""
    return json_digest({name: entry(to_host(leaf)) for name, leaf in named_leaves(tree).items()})


def json_digest(value: Any) -> str:
    """SHA-256 (hex) of a JSON value; the order of its keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def entry(value: np.ndarray) -> Entry:
    """The record of an array on the host."""
    # A view as bytes: bfloat16 has no buffer protocol of its own.
    octets = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    return {"dtype": str(value.dtype), "shape": list(value.shape), "sha256": hashlib.sha256(octets).hexdigest()}


def is_spread(leaf: Any) -> bool:
    """Whether no process alone holds the whole of the array."""
    return isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated)


def gathered_entry(leaf: jax.Array) -> Entry:
    """The record of an array that is spread over processes; every process must call this, in the same order."""
    return entry(np.asarray(multihost_utils.process_allgather(leaf, tiled=True)))


def snapshot(leaf: Any) -> Any:
    """A copy that a donated or changed original leaves alone; an array on devices is copied there, without waiting.

    Of an array that each device holds whole, one device makes the copy.
    """
    if isinstance(leaf, jax.Array):
        if leaf.is_fully_replicated:
            leaf = leaf.addressable_data(0)
        return jax.device_put(leaf, leaf.sharding, may_alias=False)
    # A numpy array that owns its memory and is read-only stays as it is without a copy.
    kept = isinstance(leaf, np.ndarray) and leaf.base is None and not leaf.flags.writeable
    return leaf if kept else np.array(leaf)


def to_host(leaf: Any) -> Any:
    """The leaf as a numpy array; one that is spread over processes stays what it is."""
    return leaf if is_spread(leaf) else np.asarray(jax.device_get(leaf))


def find_misfits(stored: Mapping[str, Entry], tree: PyTree) -> list[str]:
    """Every difference in names, shapes and dtypes, as a phrase that gives both sides."""
    wanted = {name: (tuple(np.shape(leaf)), str(_dtype(leaf))) for name, leaf in named_leaves(tree).items()}
    found = {name: (tuple(entry["shape"]), entry["dtype"]) for name, entry in stored.items()}

    def describe(side: dict[str, tuple[tuple[int, ...], str]], name: str) -> str:
        return "absent" if name not in side else f"{side[name][1]}{list(side[name][0])}"

    return [
        f"{name} is {describe(found, name)} in the checkpoint but {describe(wanted, name)} in the configuration"
        for name in sorted(wanted.keys() | found.keys())
        if wanted.get(name) != found.get(name)
    ]


def rebuild(tree: PyTree, arrays: Iterable[tuple[str, np.ndarray]]) -> PyTree:
    """`tree` with each leaf from `arrays`: placed as the leaf's sharding says, numpy and Python numbers as such.

    Each array is placed as it comes, so that those on the host need not all be there at once.
    """
    leaves = named_leaves(tree)
    placed = {name: _place(array, leaves[name]) for name, array in arrays}
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(tree), [placed[name] for name in leaves])


def _place(value: np.ndarray, like: Any) -> Any:
    if isinstance(like, jax.ShapeDtypeStruct | jax.Array):
        committed = not isinstance(like, jax.Array) or like.committed
        if like.sharding is None or not committed:
            return jax.device_put(value)
        return jax.make_array_from_callback(value.shape, like.sharding, lambda index: value[index])
    return value.item() if isinstance(like, bool | int | float) else value


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
