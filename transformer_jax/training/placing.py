"""A planned batch on the devices: each process reads and lays out only the rows that its own devices hold."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from transformer_jax.data.batches import Batch, Examples, PlannedBatch, assemble
from transformer_jax.ops.masks import BOS
from transformer_jax.parallel.mesh import row_shares, rows_sharding


def place(planned: PlannedBatch, examples: Examples, mesh: Mesh, *, parts: int = 1) -> Batch:
    """The arrays of a planned batch, rows shared out over `mesh`; every process must call this.

    Rows are filled up with empty ones to a multiple of the mesh's shares in each of `parts`, which a step works through
    one after the other.
    """
    sharding = rows_sharding(mesh)
    multiple = row_shares(mesh) * parts
    count = -(-planned.shape.rows // multiple) * multiple
    slices = sharding.addressable_devices_indices_map((count,)).values()
    held = np.unique(np.concatenate([np.arange(count)[index] for index in slices if index is not None]))
    batch = assemble(rows_of(planned, held), examples, bos_id=BOS)
    if jax.process_count() == 1:
        return jax.device_put(batch, sharding)

    def on_devices(mine: np.ndarray) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            return mine[np.searchsorted(held, np.arange(count)[index[0]])]

        return jax.make_array_from_callback((count, *mine.shape[1:]), sharding, part)

    return Batch._make(map(on_devices, batch))


def rows_of(planned: PlannedBatch, rows: np.ndarray) -> PlannedBatch:
    """Some rows of a planned batch, in rising order; those it does not have are empty."""
    position = np.searchsorted(rows, planned.row_of)
    found = np.append(rows, -1)[position] == planned.row_of
    return PlannedBatch(planned.shape._replace(rows=len(rows)), planned.examples[found], position[found])
