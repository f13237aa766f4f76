"""The text of a compiled program (HLO) as computations of instructions."""

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

# Bits of an element; tokens and opaque handles have none.
_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_TILE = re.compile(r"T\(([\d,]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")
_NAME = re.compile(r"%([\w.\-]+)")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")


@dataclass(frozen=True)
class Array:
    """A buffer: element type, dimensions, and how they lie in memory."""

    dtype: str
    dims: tuple[int, ...]
    minor_to_major: tuple[int, ...]
    tile: tuple[int, ...]
    space: int
    """0: the device's main memory (HBM). TPU programs also place buffers on the chip (1: vector memory)."""

    @property
    def elements(self) -> int:
        """Elements without padding."""
        return math.prod(self.dims)

    @property
    def logical_bytes(self) -> int:
        """Bytes without padding."""
        return self.elements * _bits(self.dtype) // 8

    @property
    def bytes(self) -> int:
        """Bytes in memory: the most minor dimensions are filled up to whole tiles (8 x 128 words on a TPU)."""
        if not self.tile or not self.dims:
            return self.logical_bytes
        dims = list(self.dims)
        for size, dim in zip(reversed(self.tile), self.minor_to_major, strict=False):
            dims[dim] = -(-dims[dim] // size) * size
        return math.prod(dims) * _bits(self.dtype) // 8


@dataclass(frozen=True)
class Instruction:
    """One line: `%name = type opcode(operands), attributes`."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    """The result, a tuple's leaves in order."""
    operands: tuple[str, ...]
    literal: str
    """What stands between the parentheses: a constant's value, a parameter's number."""
    attributes: str
    is_root: bool

    def attribute(self, name: str) -> str | None:
        """The text of an attribute up to the comma or the closing brace that ends it; None where there is none."""
        found = re.search(rf"(?:^|, ){name}=(\{{[^}}]*\}}|[^,\s]+)", self.attributes)
        return found.group(1) if found else None

    def integers(self, name: str) -> tuple[int, ...]:
        """An attribute such as `{0,2}`; () where there is none."""
        return tuple(int(word) for word in re.findall(r"\d+", self.attribute(name) or ""))

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it runs: a fusion's, a loop's body, a conditional's branches."""
        found = re.findall(r"(?:calls|body|to_apply|true_computation|false_computation)=%?([\w.\-]+)", self.attributes)
        branches = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        return (*found, *(_NAME.findall(branches.group(1)) if branches else ()))

    @property
    def scope(self) -> str:
        """The name stack of the JAX operation that it came from."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found.group(1) if found else ""


@dataclass(frozen=True)
class Computation:
    """Instructions in the order in which they are scheduled."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """For each name the instructions that take it as an operand."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                found.setdefault(operand, []).append(instruction)
        return found

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Parameters by number."""
        return {int(found.literal): found for found in self.instructions if found.opcode == "parameter"}

    @property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        return next(found for found in reversed(self.instructions) if found.is_root)


@dataclass(frozen=True)
class Module:
    """A program."""

    computations: dict[str, Computation]
    entry: str

    def operand_arrays(self, computation: Computation, instruction: Instruction) -> list[Array]:
        """The arrays that an instruction takes, tuples flattened."""
        return [
            array
            for name in instruction.operands
            if name in computation.by_name
            for array in computation.by_name[name].arrays
        ]


def parse(text: str) -> Module:
    """The computations of `compiled.as_text()`.

    Raises:
        ValueError: the text has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry = ""
    name, lines = "", list[Instruction]()
    for line in text.split("\n"):
        head = _HEAD.match(line)
        if head:
            name, lines = head.group(2), []
            entry = name if head.group(1) else entry
        elif line.startswith("}") and name:
            computations[name] = Computation(name, tuple(lines))
            name = ""
        elif name and (start := _INSTRUCTION.match(line)):
            lines.append(_instruction(line[start.end() :], start.group(2), bool(start.group(1))))
    if not entry:
        raise ValueError("no ENTRY computation: not the text of a compiled program")
    return Module(computations, entry)


def _instruction(text: str, name: str, is_root: bool) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    arrays = tuple(_arrays(text[:end]))
    opcode, _, _ = text[end:].strip().partition("(")
    start = text.index("(", end)
    stop = _closing(text, start)
    inner = text[start + 1 : stop]
    return Instruction(name, opcode, arrays, tuple(_NAME.findall(inner)), inner, text[stop + 1 :], is_root)


def _closing(text: str, start: int) -> int:
    depth = 0
    for found in re.finditer(r"[()]", text[start:]):
        depth += 1 if found.group() == "(" else -1
        if depth == 0:
            return start + found.start()
    raise ValueError(f"unbalanced parentheses: {text[:80]}")


def _arrays(text: str) -> Iterator[Array]:
    for dtype, dims, layout in _ARRAY.findall(text):
        order, _, rest = layout.partition(":")
        tile, space = _TILE.search(rest), _SPACE.search(rest)
        yield Array(
            dtype,
            tuple(int(dim.lstrip("<=")) for dim in dims.split(",") if dim),
            tuple(int(dim) for dim in order.split(",") if dim),
            tuple(map(int, tile.group(1).split(","))) if tile else (),
            int(space.group(1)) if space else 0,
        )


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    width = re.search(r"\d+", dtype)
    return int(width.group()) if width else 0
