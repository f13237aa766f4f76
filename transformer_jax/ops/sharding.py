"""The table of shardings: over which mesh axes a dimension lies, by its letter (the alphabet of `ops.attention`)."""

import math
from collections.abc import Iterable

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array

ROW_AXES = ("data", "fsdp")
"""Mesh axes that share out a batch's rows, `data` the outer one."""

MESH_AXES: dict[str, tuple[str, ...]] = {
    "B": ROW_AXES, "R": ROW_AXES,
    "D": ("fsdp",),
    "H": ("tensor",), "E": ("tensor",), "F": ("tensor",), "W": ("tensor",),
    "K": (), "V": (), "T": (), "S": (), "N": (), "M": (), "P": (),
}  # fmt: skip
"""Axes for each letter; a letter without any is whole on every device. D is shared out in parameters only: the rows of
an activation lie over `fsdp` already."""


def mesh_axes(letters: str, *, parameter: bool) -> list[tuple[str, ...]]:
    """What the table gives for each dimension of an array.

    Raises:
        ValueError: a letter that the table lacks, or two letters that lie over one mesh axis.
    """
    owner: dict[str, str] = {}
    found = []
    for letter in letters:
        if letter not in MESH_AXES:
            raise ValueError(f"{letters}: no mesh axes are given for the letter {letter}")
        axes = MESH_AXES[letter] if parameter or letter != "D" else ()
        for axis in axes:
            if axis in owner:
                raise ValueError(f"{letters}: both {owner[axis]} and {letter} lie over the mesh axis {axis}")
            owner[axis] = letter
        found.append(axes)
    return found


def partition_spec(axes: Iterable[tuple[str, ...]]) -> PartitionSpec:
    """In its plainest spelling: a lone axis by its name, none as None, and nothing after the last axis."""
    entries = [each[0] if len(each) == 1 else each or None for each in axes]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def constrain(x: Array, letters: str) -> Array:
    """`x`, an activation, laid over the mesh of the context as the table says; itself where there is no mesh.

    Axes that are manual (under `jax.shard_map`) are left out: there an array is one device's part of them. So are those
    that do not divide a dimension: XLA would have to make such arrays whole on all devices to lay them out anew.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    axes = []
    for size, wanted in zip(x.shape, mesh_axes(letters, parameter=False), strict=True):
        free = tuple(axis for axis in wanted if axis in mesh.auto_axes)
        axes.append(() if size % math.prod(mesh.shape[axis] for axis in free) else free)
    return jax.lax.with_sharding_constraint(x, partition_spec(axes))
