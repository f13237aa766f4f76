"""What a compiled program does: products, elementwise work, bytes moved and bytes sent, loops multiplied out.

The compiler's own analysis counts the body of a loop once, and a scanned stack is a loop.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from transformer_jax.compile_check.collectives import Collective, find_collective
from transformer_jax.compile_check.hlo import Computation, Instruction, Module
from transformer_jax.compile_check.products import Product, products
from transformer_jax.compile_check.traffic import carried_bytes, copied_bytes, moved_bytes

# They name, rename or promise buffers, and move nothing.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "optimization-barrier", "add-dependency", "domain", "get-dimension-size", "opt-barrier", "iota",
}  # fmt: skip
_FREE_CUSTOM_CALLS = ("ConcatBitcast", "AllocateBuffer", "AssumeGatherIndicesInBound", "Sharding")
# Moved without arithmetic: what an elementwise unit does not work on.
_MOVES = {
    "copy", "transpose", "reshape", "broadcast", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "pad",
    "gather", "scatter", "reverse", "convert", "fusion", "call", "while", "conditional", "convolution", "dot",
    "custom-call", "rng-bit-generator",
}  # fmt: skip


_NUMBER = re.compile(r"-?\d+")


@dataclass(frozen=True)
class Operation:
    """A scheduled instruction and what it costs each time it runs."""

    name: str
    opcode: str
    scope: str
    times: int
    """How often it runs in one call of the program."""
    loop: str
    """The computation that it stands in: operations with the same one follow one another."""
    products: tuple[Product, ...] = ()
    vector_elements: int = 0
    """Results of elementwise operations and reductions."""
    hbm_bytes: int = 0
    collective: Collective | None = None
    starts: str = ""
    """Of an asynchronous operation's first half: its own name."""
    waits_for: str = ""
    """Of its second half: the name of the first."""


@dataclass(frozen=True)
class Program:
    """All that a call runs, in the order of the schedule."""

    operations: tuple[Operation, ...]
    open_loops: tuple[str, ...]
    """Loops whose number of turns is not known before they run, by name stack; counted as `open_trips` turns."""


def program_costs(module: Module, open_trips: int = 1) -> Program:
    """The operations of a program; a loop that runs until a condition holds is taken to turn `open_trips` times."""
    walk = _Walk(module, open_trips)
    operations = tuple(walk.operations(module.computations[module.entry], 1))
    return Program(operations, tuple(dict.fromkeys(walk.open_loops)))


class _Walk:
    """Goes through the schedule, into loops, calls and the dearest branch of each conditional."""

    def __init__(self, module: Module, open_trips: int) -> None:
        self.module = module
        self.open_trips = open_trips
        self.open_loops: list[str] = []
        self.spread: set[str] = set()  # channels of exchanges that run behind products

    def operations(self, computation: Computation, times: int) -> Iterator[Operation]:
        for found in computation.instructions:
            if found.opcode == "while":
                trips = trip_count(self.module, computation, found)
                if trips is None:
                    self.open_loops.append(found.scope or found.name)
                turns = self.open_trips if trips is None else trips
                for part in ("condition", "body"):  # a condition may exchange: has every device's part ended?
                    name = (found.attribute(part) or "").lstrip("%")
                    yield from self.operations(self.module.computations[name], times * turns)
            elif found.opcode == "conditional":
                branches = [list(self.operations(self.module.computations[name], times)) for name in found.called]
                yield from max(branches, key=_weight, default=[])
            elif found.opcode == "call":
                for name in found.called:
                    yield from self.operations(self.module.computations[name], times)
            elif found.opcode not in _FREE and not _is_free_custom_call(found):
                yield self._operation(computation, found, times)

    def _operation(self, computation: Computation, found: Instruction, times: int) -> Operation:
        plain = Operation(found.name, found.opcode, found.scope, times, computation.name)
        if found.opcode.endswith("-done"):
            return replace(plain, waits_for=found.operands[0])
        starts = found.name if found.opcode.endswith("-start") else ""
        collective, carried = find_collective(self.module, computation, found), 0
        if collective is not None and found.opcode == "fusion":
            # An exchange spread over fusions: a start, products that carry it on while they run, and a done.
            if found.name.startswith("async-collective-start"):
                self.spread.add(collective.channel)
                moved = collective.operand_bytes + collective.result_bytes
                return replace(plain, collective=collective, hbm_bytes=moved, starts=collective.channel)
            if found.name.startswith("async-collective-done"):
                return replace(plain, waits_for=collective.channel)
            if collective.channel in self.spread:
                collective, carried = None, carried_bytes(self.module, computation, found)
            elif found.called[0].startswith("all-reduce-scatter"):  # TPU's: each device keeps its part of the sum
                part = sum(array.logical_bytes for array in found.arrays)
                collective = replace(collective, kind="reduce-scatter", result_bytes=part)
        if collective is not None:
            moved = collective.operand_bytes + collective.result_bytes
            return replace(plain, collective=collective, hbm_bytes=moved, starts=starts)
        if starts:
            return replace(plain, hbm_bytes=copied_bytes(found), starts=starts)
        return replace(
            plain,
            products=tuple(products(self.module, computation, found)),
            vector_elements=_vector_elements(self.module, found),
            hbm_bytes=moved_bytes(self.module, computation, found) - carried,
        )


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Turns of a `while` that counts from a constant to a constant; None where a condition ends it.

    XLA writes `known_trip_count` on some backends; on TPU the condition `counter < constant` says it.
    """
    known = re.search(r'"known_trip_count":\s*\{"n":\s*"?(\d+)', loop.attributes)
    if known:
        return int(known.group(1))
    condition = module.computations[(loop.attribute("condition") or "").lstrip("%")]
    root = condition.root
    while root.opcode in ("fusion", "call") and root.called:
        # The comparison may be fused; its operands are then the fusion's, in order.
        inner = module.computations[root.called[0]]
        if inner.root.opcode != "compare":
            return None
        order = [inner.by_name[name] for name in inner.root.operands]
        operands = tuple(root.operands[int(each.literal)] for each in order if each.opcode == "parameter")
        root = replace(inner.root, operands=operands)
    if root.opcode != "compare" or root.attribute("direction") != "LT" or len(root.operands) != 2:
        return None
    counter, limit = (condition.by_name[name] for name in root.operands)
    if counter.opcode != "get-tuple-element" or limit.opcode != "constant":
        return None
    if not _NUMBER.fullmatch(limit.literal):
        return None
    index = int(counter.attribute("index") or 0)
    body = module.computations[(loop.attribute("body") or "").lstrip("%")]
    turns = -(-(int(limit.literal) - _initial(computation, loop, index)) // _step(body, index))
    return max(turns, 0)


def _initial(computation: Computation, loop: Instruction, index: int) -> int:
    """The counter's first value; 0, where every scan starts, if it cannot be seen."""
    state = _source(computation, loop.operands[0])
    if state is None or state.opcode != "tuple":
        return 0
    first = _source(computation, state.operands[index])
    return int(first.literal) if first is not None and _NUMBER.fullmatch(first.literal) else 0


def _step(body: Computation, index: int) -> int:
    """What a turn adds to the counter; 1, as every scan does, if it cannot be seen. Where XLA runs a product and the
    exchange of its operand side by side, it writes loops of two parts a turn."""
    counter = _source(body, body.root.operands[index]) if body.root.opcode == "tuple" else None
    if counter is None or counter.opcode != "add":
        return 1
    added = [_source(body, name) for name in counter.operands]
    steps = [int(each.literal) for each in added if each is not None and each.opcode == "constant"]
    return steps[0] if steps else 1


def _source(computation: Computation, name: str) -> Instruction | None:
    """The instruction of that name, or the one that it copies."""
    found = computation.by_name.get(name)
    while found is not None and found.opcode in ("copy", "bitcast"):
        found = computation.by_name.get(found.operands[0])
    return found


def _weight(operations: list[Operation]) -> int:
    return sum(each.times * (each.hbm_bytes + sum(p.flops for p in each.products)) for each in operations)


def _is_free_custom_call(found: Instruction) -> bool:
    return found.opcode == "custom-call" and (found.attribute("custom_call_target") or "").strip('"') in (
        _FREE_CUSTOM_CALLS
    )


def _vector_elements(module: Module, found: Instruction) -> int:
    if found.opcode == "fusion":
        return sum(
            _vector_elements(module, each) for name in found.called for each in module.computations[name].instructions
        )
    if found.opcode in _MOVES or found.opcode in _FREE or found.opcode.endswith(("-start", "-done")):
        return 0
    return sum(array.elements for array in found.arrays)
