"""Bytes that the instructions of a compiled program move to and from the device's main memory."""

import re

from transformer_jax.compile_check.collectives import COLLECTIVES
from transformer_jax.compile_check.hlo import Array, Computation, Instruction, Module

# `{2}: (1, {})`: result 2 of a fusion lies where its operand 1 does.
_ALIASED = re.compile(r"\{(\d+)\}: \((\d+), \{\}\)")
_SLICES = {"dynamic-slice", "slice", "gather"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # the operand that holds what is written into operand 0


def hbm_bytes(array: Array) -> int:
    """Bytes of an array that lies in the device's main memory, 0 for one on the chip."""
    return array.bytes if array.space == 0 else 0


def copied_bytes(found: Instruction) -> int:
    """Bytes of a copy or slice in the background: (source or destination, destination or source, token)."""
    if found.opcode == "copy-start":
        return sum(map(hbm_bytes, found.arrays[:2]))
    # slice-start: ((source), destination, token); no more is read than is written.
    destination = found.arrays[-2] if len(found.arrays) > 1 else found.arrays[0]
    return destination.bytes * sum(array.space == 0 for array in (found.arrays[0], destination))


def moved_bytes(module: Module, computation: Computation, found: Instruction) -> int:
    """Bytes read and written: of a slice the slice, of an update in place the update, inside a fusion nothing."""
    return _written(module, computation, found) + sum(
        _read(module, computation, found, i) for i in range(len(found.operands))
    )


def carried_bytes(module: Module, computation: Computation, found: Instruction) -> int:
    """Of a fusion's `moved_bytes` those that it does not move: buffers of an exchange that it carries on, in and out.

    libtpu spreads an exchange over products that run meanwhile, and each of these has its buffers among its operands
    and, in the same place, among its results.
    """
    inner = module.computations[found.called[-1]]
    parts = [inner.by_name[name].opcode for name in inner.root.operands]
    own = [
        (int(result), int(operand))
        for result, operand in _ALIASED.findall(found.attributes)
        if parts[int(result)] in ("parameter", *COLLECTIVES)
    ]
    results, operands = {result for result, _ in own}, {operand for _, operand in own}
    return sum(hbm_bytes(found.arrays[i]) for i in results) + sum(
        _read(module, computation, found, i) for i in operands
    )


def _read(module: Module, computation: Computation, found: Instruction, position: int) -> int:
    """Bytes that an instruction reads of one operand, which may be a slice of it only."""
    operand = computation.by_name.get(found.operands[position])
    if operand is None or len(operand.arrays) != 1:
        return 0 if operand is None else sum(map(hbm_bytes, operand.arrays))
    array = operand.arrays[0]
    if array.space:
        return 0
    return min(array.bytes, _touched(module, found, position, array))


def _touched(module: Module, found: Instruction, position: int, array: Array) -> int:
    if found.opcode in _SLICES and position == 0:
        return sum(result.bytes for result in found.arrays)
    if found.opcode in _UPDATES and position == 0:
        return 0  # written in place
    if found.opcode != "fusion":
        return array.bytes
    return sum(
        _touched_inside(module, module.computations[name], module.computations[name].parameters[position], array)
        for name in found.called
    )


def _touched_inside(module: Module, inner: Computation, value: Instruction, array: Array) -> int:
    total = 0
    for user in inner.users.get(value.name, []):
        if user.opcode in ("bitcast", "reshape"):
            total += _touched_inside(module, inner, user, array)
        else:
            total += sum(_touched(module, user, i, array) for i, name in enumerate(user.operands) if name == value.name)
    return total


def _written(module: Module, computation: Computation, found: Instruction) -> int:
    """Bytes that an instruction writes; of an update in place what it updates."""
    if found.opcode in _UPDATES:
        update = computation.by_name[found.operands[_UPDATES[found.opcode]]].arrays[0]
        return update.bytes if found.arrays[0].space == 0 else 0
    if found.opcode == "fusion" and found.called:
        inner = module.computations[found.called[-1]]
        root = inner.root
        parts = [inner.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
        if len(parts) == len(found.arrays):
            return sum(
                min(array.bytes, _written_inside(module, inner, part, array))
                for array, part in zip(found.arrays, parts, strict=True)
                if array.space == 0
            )
    return sum(map(hbm_bytes, found.arrays))


def _written_inside(module: Module, inner: Computation, part: Instruction, array: Array) -> int:
    while part.opcode in ("bitcast", "reshape"):
        part = inner.by_name[part.operands[0]]
    if part.opcode in _UPDATES:
        return inner.by_name[part.operands[_UPDATES[part.opcode]]].arrays[0].bytes
    if part.opcode == "fusion" and len(part.arrays) == 1:
        nested = module.computations[part.called[-1]]
        return _written_inside(module, nested, nested.root, array)
    return array.bytes
