"""The device mesh: one axis, `data`, that shares out a batch's rows."""

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from transformer_jax.config import MeshConfig
from transformer_jax.errors import UserError


def make_mesh(config: MeshConfig) -> Mesh:
    """A mesh over this machine's devices; raises UserError when there are fewer than asked for."""
    available = len(jax.devices())
    size = available if config.data == -1 else config.data
    if size > available:
        raise UserError(
            f"mesh.data is {size}, but there are {available} devices: give at most that many, or -1 for all"
        )
    # Auto axes: under Explicit ones, flax's modules need a sharding for each intermediate.
    return jax.make_mesh((size,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """Axis 0, a batch's rows, shared out over `data`."""
    return NamedSharding(mesh, PartitionSpec("data"))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())
