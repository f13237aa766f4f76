"""A planned batch on the devices: each process reads and lays out only the rows that its own devices hold."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from transformer_jax.data.batches import Batch, Examples, PlannedBatch, assemble
from transformer_jax.data.prefetch import Prefetched
from transformer_jax.ops.masks import BOS
from transformer_jax.parallel.mesh import row_shares, rows_sharding

# Batches planned ahead: two seconds of a fast accelerator, which is what a new epoch of 36 million pairs takes.
_PLANNED = 64
# Batches ahead on the devices, where they take memory: one would do if laying one out always took the same time.
_PLACED = 2


class PlacedBatch(NamedTuple):
    """A batch whose turn it is, and where a run goes on that has used it."""

    epoch: int
    next_index: int
    planned: PlannedBatch
    arrays: Batch


@contextlib.contextmanager
def placed_ahead(
    batches: Iterator[tuple[int, int, PlannedBatch]], examples: Examples, mesh: Mesh, *, parts: int = 1
) -> Iterator[Iterator[PlacedBatch]]:
    """The batches of `data.batches.batches_from`, planned in one thread and placed in another before their turn.

    Neither thread runs a program or waits for another process: collectives stay in the caller's. Arguments are those
    of `place`.
    """
    with (
        Prefetched(batches, _PLANNED) as planned,
        Prefetched(
            (PlacedBatch(*each, place(each[-1], examples, mesh, parts=parts)) for each in planned), _PLACED
        ) as placed,
    ):
        yield placed


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
