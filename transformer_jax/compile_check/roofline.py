"""How long a program would take on a slice: each operation at the pace of the resource that it needs longest.

Operations run one after the other, as the schedule has them. Each takes the longest of: its products at peak, its
elementwise work at the vector unit's pace, its bytes at HBM's bandwidth. Copies in the background take no time of
their own, unless HBM cannot serve all bytes of a step in the step's time. An exchange between chips adds its time,
less that of the operations between its start and its end where it has both. All of it is a lower bound: nothing
published says what part of a peak an operation reaches.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from transformer_jax.compile_check.collectives import Collective
from transformer_jax.compile_check.costs import Operation, Program
from transformer_jax.parallel.chips import Slice

HOP_SECONDS = 1e-6
"""From a chip to its neighbour; "about a microsecond", scaling book, part 3."""

Coordinates = tuple[int, ...]


@dataclass(frozen=True)
class Exchanges:
    """All collectives of one kind."""

    kind: str
    count: int
    bytes: int
    """The whole arrays, each as often as it is sent."""
    seconds: float
    overlapped_seconds: float
    """Of these, hidden behind operations that run meanwhile."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of one call on each chip, and what they are made of."""

    seconds: float
    matrix_seconds: float
    """Products at peak, whole tiles of the systolic array counted."""
    vector_seconds: float
    memory_seconds: float
    network_seconds: float
    exposed_seconds: float
    """Exchanges that nothing hides."""
    bound: str
    """The resource that most of the time goes to: matrix, vector, memory or network."""
    flops: int
    padded_flops: int
    hbm_bytes: int
    exchanges: tuple[Exchanges, ...]


def estimate(program: Program, where: Slice, places: Sequence[Coordinates]) -> Estimate:
    """The estimate for a program on a slice.

    Args:
        program: its operations.
        where: the slice.
        places: coordinates of the chip of each device, in the mesh's order.
    """
    chip = where.chip
    share = 1 / chip.devices
    parts = {"matrix": 0.0, "vector": 0.0, "memory": 0.0, "network": 0.0}
    totals = dict.fromkeys(("matrix", "vector"), 0.0)
    flops = padded = moved = 0
    running: dict[tuple[str, str], tuple[Operation, float, float]] = {}
    clock = 0.0
    spent: list[tuple[Collective, int, float, float]] = []
    for each in program.operations:
        moved += each.times * each.hbm_bytes
        if each.waits_for:
            begun = running.pop((each.loop, each.waits_for), None)
            if begun is not None:
                first, seconds, since = begun
                hidden = min(seconds, (clock - since) / first.times)
                parts["network"] += first.times * (seconds - hidden)
                assert first.collective is not None
                spent.append((first.collective, first.times, seconds, hidden))
            continue
        if each.collective is not None:
            seconds = exchange_seconds(each.collective, where, places)
            if each.starts:
                running[each.loop, each.starts] = each, seconds, clock
            else:
                parts["network"] += each.times * seconds
                spent.append((each.collective, each.times, seconds, 0.0))
            continue
        if each.starts:
            continue
        own = sum(product.flops for product in each.products)
        filled = sum(product.padded_flops(chip.matrix_side) for product in each.products)
        needs = {
            "matrix": filled / (chip.flops * share),
            "vector": each.vector_elements / (chip.vector_rate * share),
            "memory": each.hbm_bytes / (chip.hbm_bandwidth * share),
        }
        flops, padded = flops + each.times * own, padded + each.times * filled
        totals = {name: total + each.times * needs[name] for name, total in totals.items()}
        longest = max(needs, key=needs.__getitem__)
        parts[longest] += each.times * needs[longest]
        clock += each.times * needs[longest]
    memory = moved / (chip.hbm_bandwidth * share)
    # Background copies share HBM with everything else: where all bytes take longer, the rest is memory's.
    parts["memory"] += max(0.0, memory - (sum(parts.values()) - parts["network"]))
    exchanges = _summed(spent)
    return Estimate(
        seconds=sum(parts.values()),
        matrix_seconds=totals["matrix"],
        vector_seconds=totals["vector"],
        memory_seconds=memory,
        network_seconds=sum((each.seconds for each in exchanges), 0.0),
        exposed_seconds=parts["network"],
        bound=max(parts, key=parts.__getitem__),
        flops=flops,
        padded_flops=padded,
        hbm_bytes=moved,
        exchanges=exchanges,
    )


def _summed(spent: Sequence[tuple[Collective, int, float, float]]) -> tuple[Exchanges, ...]:
    found: dict[str, Exchanges] = {}
    for collective, times, seconds, hidden in spent:
        old = found.get(collective.kind, Exchanges(collective.kind, 0, 0, 0.0, 0.0))
        found[collective.kind] = Exchanges(
            collective.kind,
            old.count + times,
            old.bytes + times * collective.full_bytes,
            old.seconds + times * seconds,
            old.overlapped_seconds + times * hidden,
        )
    return tuple(found.values())


def exchange_seconds(collective: Collective, where: Slice, places: Sequence[Coordinates]) -> float:
    """Time of one collective with all links of the axes that its group spans in use, both ways.

    A ring of n chips passes (n - 1) / n of an array over two links, a line over one; axes work side by side, each on
    its part of the array, unless the exchange goes along one ring. An all-reduce is a reduce-scatter and an all-gather.
    """
    group = [places[i] for i in collective.group] if collective.group else list(places)
    chips = list(dict.fromkeys(group))
    if len(chips) == 1:
        return 0.0
    bandwidth, hops = _links(chips, where)
    if collective.one_ring:
        bandwidth, hops = min(bandwidth, 2 * where.chip.link_bandwidth), len(chips) // 2
    part = (len(chips) - 1) / len(chips)
    if collective.kind == "all-reduce":
        return 2 * (collective.full_bytes * part / bandwidth + hops * HOP_SECONDS)
    if collective.kind == "all-to-all":
        # A byte travels a quarter of the ring on average.
        return collective.operand_bytes * len(chips) / 4 / bandwidth + hops * HOP_SECONDS
    if collective.kind == "collective-permute":
        return collective.operand_bytes / where.chip.link_bandwidth + HOP_SECONDS
    return collective.full_bytes * part / bandwidth + hops * HOP_SECONDS


def _links(chips: Sequence[Coordinates], where: Slice) -> tuple[float, int]:
    """Bytes/s into each chip of a group, and the hops across it.

    Chips that lie `stride` apart share the links between them with as many other groups. A group that is no grid is
    taken as a chain.
    """
    link = where.chip.link_bandwidth
    axes = [sorted({place[axis] for place in chips}) for axis in range(len(where.shape))]
    if math.prod(map(len, axes)) != len(chips):
        return link, len(chips) - 1
    bandwidth, hops = 0.0, 0
    for axis, found in enumerate(axes):
        if len(found) == 1:
            continue
        steps = {after - before for before, after in itertools.pairwise(found)}
        stride = max(steps)
        ring = where.closed(axis) and len(steps) == 1 and stride * len(found) == where.shape[axis]
        bandwidth += (2 if ring else 1) * link / stride
        hops += stride * (len(found) // 2 if ring else len(found) - 1)
    return bandwidth, hops
