"""Matrix products in a compiled program: what they multiply, also inside fusions."""

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from transformer_jax.compile_check.hlo import Computation, Instruction, Module


@dataclass(frozen=True)
class Product:
    """A matrix product, `batch` times [rows contracted] x [contracted columns]."""

    dtype: str
    batch: int
    rows: int
    contracted: int
    columns: int

    @property
    def flops(self) -> int:
        """A multiplication and an addition each."""
        return 2 * self.batch * self.rows * self.contracted * self.columns

    def padded_flops(self, side: int) -> int:
        """As many as a systolic array of side x side spends: it holds whole tiles of one operand, contracted dimension
        and one more filled up, while the other operand streams through."""
        contracted, rows, columns = (-(-n // side) * side for n in (self.contracted, self.rows, self.columns))
        return 2 * self.batch * contracted * min(self.rows * columns, rows * self.columns)


def products(module: Module, computation: Computation, found: Instruction) -> Iterator[Product]:
    """The products that an instruction makes, itself or in the computations that it fuses."""
    if found.opcode == "dot":
        yield _dot(computation, found)
    elif found.opcode == "convolution":
        yield _convolution(computation, found)
    elif found.opcode == "fusion":
        for name in found.called:
            inner = module.computations[name]
            for each in inner.instructions:
                yield from products(module, inner, each)


def _dot(computation: Computation, found: Instruction) -> Product:
    left, right = (computation.by_name[name].arrays[0] for name in found.operands[:2])
    contracted = math.prod(left.dims[i] for i in found.integers("lhs_contracting_dims"))
    batch = math.prod(left.dims[i] for i in found.integers("lhs_batch_dims"))
    return Product(
        left.dtype, batch, left.elements // (batch * contracted), contracted, right.elements // (batch * contracted)
    )


def _convolution(computation: Computation, found: Instruction) -> Product:
    """TPU programs write every product as a convolution, batch dimensions as dilated windows; only positions where the
    window meets an element of the input are multiplied."""
    left, right = (computation.by_name[name].arrays[0] for name in found.operands[:2])
    in_labels, kernel_labels, out_labels = re.split(r"_|->", found.attribute("dim_labels") or "")
    size = dict(zip(kernel_labels, right.dims, strict=True))
    inputs, outputs = (
        dict(zip(labels, dims, strict=True))
        for labels, dims in ((in_labels, left.dims), (out_labels, found.arrays[0].dims))
    )
    window = _window(found)
    positions = 1
    for i, label in enumerate(sorted(label for label in size if label.isdigit())):
        positions *= _meetings(
            inputs[label], size[label], outputs[label],
            window["stride"][i], window["pad"][i][0], window["lhs_dilate"][i], window["rhs_dilate"][i],
        )  # fmt: skip
    groups = int(found.attribute("batch_group_count") or 1)
    # `i` is what one group of features contracts.
    return Product(left.dtype, positions, inputs["b"] // groups, size["i"], size["o"])


def _window(found: Instruction) -> dict[str, list]:
    text = found.attribute("window") or "{}"
    rank = len(re.findall(r"\d", (found.attribute("dim_labels") or "").partition("_")[0]))
    fields = dict(re.findall(r"(\w+)=([\d_x\-]+)", text))
    numbers: dict[str, list] = {
        name: [int(word) for word in fields[name].split("x")] if name in fields else [1] * rank
        for name in ("stride", "lhs_dilate", "rhs_dilate")
    }
    pads = fields["pad"].split("x") if "pad" in fields else ["0_0"] * rank
    return numbers | {"pad": [tuple(int(word) for word in pad.split("_")) for pad in pads]}


@functools.cache
def _meetings(
    inputs: int, kernel: int, outputs: int, stride: int, pad: int, input_dilation: int, kernel_dilation: int
) -> int:
    """Pairs of an output and a kernel position that meet an element of the input, along one dimension."""
    if kernel == 1 and stride == 1 and pad == 0 and input_dilation == 1:
        return outputs
    last = (inputs - 1) * input_dilation
    places = (out * stride + element * kernel_dilation - pad for out in range(outputs) for element in range(kernel))
    return sum(0 <= place <= last and place % input_dilation == 0 for place in places)
