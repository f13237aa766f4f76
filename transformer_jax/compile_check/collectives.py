"""Exchanges between devices in a compiled program: kind, group and bytes."""

import math
import re
from dataclasses import dataclass

from transformer_jax.compile_check.hlo import Computation, Instruction, Module

# libtpu's algorithms: "StrategyND" goes along all axes, "StrategyRing" and "1DAllGatherNonMajorDim" along one ring.
_ONE_RING = re.compile(r'"(?:emitter|strategy)":"\w*(?:1D|StrategyRing)')

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclass(frozen=True)
class Collective:
    """One exchange between devices."""

    kind: str
    group: tuple[int, ...]
    """Devices of the first group, as positions in the mesh; () means all."""
    operand_bytes: int
    """What each device puts in."""
    result_bytes: int
    """What each device has afterwards."""
    channel: str = ""
    """The number by which parts of one exchange know one another."""
    one_ring: bool = False
    """Whether the compiler says that it goes along one ring through all devices, not along all axes side by side."""

    @property
    def full_bytes(self) -> int:
        """The larger side: the array as it is where it is whole."""
        return max(self.operand_bytes, self.result_bytes)


def find_collective(module: Module, computation: Computation, found: Instruction) -> Collective | None:
    """The exchange that an instruction makes, itself or in the computation that it starts or fuses."""
    kind = found.opcode.removesuffix("-start")
    if kind in COLLECTIVES:
        put = sum(array.logical_bytes for array in module.operand_arrays(computation, found))
        have = sum(array.logical_bytes for array in found.arrays)
        if found.opcode.endswith("-start") and kind in ("all-gather", "collective-permute"):
            have = max(array.logical_bytes for array in found.arrays)  # (operand, result, ...): not both
        one_ring = _ONE_RING.search(found.attributes) is not None
        return Collective(kind, replica_group(found), put, have, found.attribute("channel_id") or "", one_ring)
    if found.opcode in ("async-start", "fusion"):
        for name in found.called:
            inner = module.computations[name]
            for each in inner.instructions:
                nested = find_collective(module, inner, each)
                if nested is not None:
                    return nested
    return None


def replica_group(found: Instruction) -> tuple[int, ...]:
    """The first group of devices that exchange with one another: `{{0,1},{2,3}}`, `[4,2]<=[8]`, or axes of a mesh."""
    text = found.attributes
    pairs = re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", text)
    if pairs:
        return int(pairs.group(1)), int(pairs.group(2))
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", text)
    if listed:
        return tuple(int(word) for word in listed.group(1).split(",") if word)
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota:
        shape, dims = ([int(word) for word in iota.group(i).split(",")] for i in (1, 2))
        order = [int(word) for word in (iota.group(3) or "").split(",") if word]
        return _first(dims, order or list(range(len(dims))), shape[-1])
    mesh = re.search(r"replica_groups=@?mesh\w*\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}", text)
    if mesh:
        sizes = {name: int(size) for name, size in re.findall(r"'([\w:]+)'=(\d+)", mesh.group(1))}
        chosen = re.findall(r"'([\w:]+)'", mesh.group(3))
        names = list(sizes)
        order = [i for i, name in enumerate(names) if name not in chosen] + [names.index(name) for name in chosen]
        places = _first(list(sizes.values()), order, math.prod(sizes[name] for name in chosen))
        laid = re.search(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", mesh.group(2) or "")
        if laid is None:
            return places
        dims = [int(word) for word in laid.group(1).split(",")]
        axes = [int(word) for word in (laid.group(2) or "").split(",") if word] or list(range(len(dims)))
        devices = _first(dims, axes, math.prod(dims))
        return tuple(devices[place] for place in places)
    return ()


def _first(dims: list[int], order: list[int], count: int) -> tuple[int, ...]:
    """The first `count` of the numbers 0, 1, ... laid out as `dims` and read in another `order` of axes."""
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    found = []
    for number in range(count):
        rest, place = number, 0
        for axis in reversed(order):
            rest, digit = divmod(rest, dims[axis])
            place += digit * strides[axis]
        found.append(place)
    return tuple(found)
