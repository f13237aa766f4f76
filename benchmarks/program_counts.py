"""What a traced program has to do, counted in its jaxpr: floating-point operations, and operations in sequence."""

import math
from collections.abc import Iterator
from typing import Any

# They move or rename values; a compiler does them with no operation of their own.
_FREE = frozenset(
    {"reshape", "broadcast_in_dim", "squeeze", "transpose", "convert_element_type", "copy", "stop_gradient", "slice",
     "split", "concatenate", "pad", "rev", "iota", "name", "pvary"}
)  # fmt: skip


def work(program: Any) -> int:
    """Floating-point operations of matrix products and convolutions, a multiplication and an addition being two."""
    total = 0
    for equation, inner in _equations(program):
        if inner:
            times = equation.params["length"] if equation.primitive.name == "scan" else 1
            total += times * sum(work(part) for part in inner)
        elif equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[i] for i in contracted)
        elif equation.primitive.name == "conv_general_dilated":
            total += 2 * _products(equation)
    return total


def _products(equation: Any) -> int:
    """Multiplications of a convolution over one axis: every output element meets a whole window of every channel."""
    kernel, numbers = equation.invars[1].aval.shape, equation.params["dimension_numbers"]
    channels, *window = (kernel[i] for i in numbers.rhs_spec[1:])
    return math.prod(equation.outvars[0].aval.shape) * channels * math.prod(window)


def sequential_operations(program: Any) -> int:
    """The longest chain of operations each of which needs the result of the one before."""
    depth: dict[Any, int] = {}
    longest = 0
    for equation, inner in _equations(program):
        variables = [v for v in equation.invars if not hasattr(v, "val")]  # a literal is there from the beginning
        before = max((depth.get(v, 0) for v in variables), default=0)
        if inner:
            times = equation.params["length"] if equation.primitive.name == "scan" else 1
            own = times * max(sequential_operations(part) for part in inner)
        else:
            own = 0 if equation.primitive.name in _FREE else 1
        for variable in equation.outvars:
            depth[variable] = before + own
        longest = max(longest, before + own)
    return longest


def _equations(program: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Every equation, and the programs within it."""
    for equation in _open(program).eqns:
        yield equation, [v for v in equation.params.values() if hasattr(v, "eqns") or hasattr(v, "jaxpr")]


def _open(program: Any) -> Any:
    return program.jaxpr if hasattr(program, "jaxpr") else program
