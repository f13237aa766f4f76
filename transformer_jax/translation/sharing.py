"""Translation on a mesh: devices, of any number of processes, share out the rows of a batch.

All processes run one program on the same sentences and get all results, so it is right for parameters that lie whole
on each device and for those that `fsdp` or `tensor` share out. Each share of the rows is searched for itself, and
stops when its own sentences have ended: all that is sent is the result at the end, under `fsdp` each weight once at the
start, and under `tensor` the sums within layers.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from transformer_jax.ops.masks import PAD
from transformer_jax.ops.sharding import ROW_AXES
from transformer_jax.parallel.mesh import replicated, row_shares, rows_sharding
from transformer_jax.parallel.rules import shardings


def on_devices_of(mesh: Mesh, params: Any) -> Any:
    """Parameters laid over the mesh as the rules say; those that lie on it already stay as they are."""

    def lay(leaf: Any, sharding: Any) -> jax.Array:
        if isinstance(leaf, jax.Array) and leaf.sharding.device_set == sharding.device_set:
            return leaf
        whole = np.asarray(leaf)
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return jax.tree.map(lay, params, shardings(params, mesh))


def run_shared(program: Callable[..., Any], params: Any, arrays: tuple[np.ndarray, ...], mesh: Mesh) -> Any:
    """program(params, *arrays), rows shared out over the mesh; the result is whole on every device.

    Arrays are [B ...] with the same B, filled up with PAD to rows that the mesh divides: a row of PAD is no sentence.
    """
    missing = -len(arrays[0]) % row_shares(mesh)
    sharding = rows_sharding(mesh)
    laid = []
    for array in arrays:
        filled = np.pad(array, ((0, missing), (0, 0)), constant_values=PAD)
        laid.append(jax.make_array_from_callback(filled.shape, sharding, filled.__getitem__))
    return shared(program, mesh, len(laid))(params, *laid)


@functools.cache
def shared(program: Callable[..., Any], mesh: Mesh, arrays: int) -> Callable[..., Any]:
    """`program(params, *arrays)`, so many arrays, jitted for parameters and rows that lie over `mesh`.

    The result is whole on every device. Under jit alone XLA would collect the log-probabilities of all rows on every
    device for each `top_k`, which it cannot cut along rows.
    """
    rows = PartitionSpec(ROW_AXES)
    each = jax.shard_map(
        program,
        mesh=mesh,
        in_specs=(PartitionSpec(), *(rows,) * arrays),
        out_specs=rows,
        axis_names=set(ROW_AXES),
        check_vma=False,  # it would want to know of every loop's state on which devices it differs
    )
    return jax.jit(each, out_shardings=replicated(mesh))
