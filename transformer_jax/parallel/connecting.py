"""The first exchange between the devices of several processes, made while all of them are at one place."""

import itertools

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_jax.parallel.processes import gathered


def connect(mesh: Mesh) -> None:
    """Opens the ways between all devices of the mesh that will exchange numbers; every process calls this.

    On CPUs a program's first exchange does it, and fails where one process comes 30 s after another: as when it has to
    compile the program and the other finds it in the compilation cache.
    """
    if jax.process_count() == 1:
        return
    axes = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    groups = [group for count in range(1, len(axes) + 1) for group in itertools.combinations(axes, count)]
    each = PartitionSpec(mesh.axis_names)
    ones = jax.make_array_from_callback((mesh.size,), NamedSharding(mesh, each), lambda index: np.ones(1, np.float32))
    sums = jax.shard_map(lambda x: [jax.lax.psum(x, g) for g in groups], mesh=mesh, in_specs=each, out_specs=each)
    gathered("")  # all are here
    jax.block_until_ready(jax.jit(sums)(ones))
