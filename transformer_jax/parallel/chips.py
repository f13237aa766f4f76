"""Published figures of the TPU generations, the slices that they come in, and the peaks of some GPUs.

Sources. [c] Google Cloud's pages docs.cloud.google.com/tpu/docs/v3, v4, v5e, v5p, v6e, "key specifications".
[s] "How to Scale Your Model" (jax-ml.github.io/scaling-book/tpus), tables of part 2: bandwidth of a link one way, and
which slices are rings. [c] gives the links of a chip together, both ways: 400 GB/s for v5e is 4 links x 2 x 50 GB/s,
1200 for v5p 6 x 2 x 100, 800 for v6e 4 x 2 x 100; [s] is a tenth lower for each, as measured, and used here.
"""

import math
import re
from dataclasses import dataclass

from transformer_jax.config_fields import nearest
from transformer_jax.errors import UserError


@dataclass(frozen=True)
class Chip:
    """One chip."""

    name: str
    flops: float
    """Peak bfloat16 FLOP/s."""
    hbm_bytes: int
    """Memory."""
    hbm_bandwidth: float
    """Bytes/s."""
    link_bandwidth: float
    """Bytes/s of one link in one direction; a chip has two links along each axis of the slice."""
    vector_rate: float
    """Elementwise operations/s: cores x 8 x 128 lanes x 4 units x clock."""
    matrix_side: int
    """Rows and columns of the systolic array."""
    ring: int
    """Axes of a slice that are a multiple of this are closed to rings."""
    topologies: tuple[str, ...]
    """Slices of up to 256 chips."""
    devices: int = 1
    """Devices that JAX shows for each chip."""


_SQUARE = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBE = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8")
_GB, _GIB, _T = 1e9, 2**30, 1e12

# The clock is [s] part 2, appendix A for v5e (1.5 GHz) and v5p (1.75 GHz); for v3 and v4 it follows from peak = cores x
# arrays x side^2 x 2 x clock (0.94 and 1.05 GHz). v6e's is taken as v5p's: nothing published says it.
CHIPS = {
    # [c] 123 TFLOP/s, 32 GiB, 900 GB/s; [s] 1e11 a link; two cores, each a device of JAX with half of everything.
    "v3": Chip("v3", 123 * _T, 32 * _GIB, 900 * _GB, 100 * _GB, 2 * 4096 * 0.94e9, 128, 32,
               ("2x2", "4x4", "4x8", "8x8", "8x16", "16x16"), devices=2),
    # [c] 275 TFLOP/s, 32 GiB, 1200 GB/s; [s] 4.5e10 a link.
    "v4": Chip("v4", 275 * _T, 32 * _GIB, 1200 * _GB, 45 * _GB, 2 * 4096 * 1.05e9, 128, 4, _CUBE),
    # [c] 197 TFLOP/s, 16 GB, 819 GB/s; [s] 4.5e10 a link.
    "v5e": Chip("v5e", 197 * _T, 16 * _GIB, 819 * _GB, 45 * _GB, 4096 * 1.5e9, 128, 16, _SQUARE),
    # [c] 459 TFLOP/s, 95 GiB, 2765 GB/s; [s] 9e10 a link.
    "v5p": Chip("v5p", 459 * _T, 95 * _GIB, 2765 * _GB, 90 * _GB, 2 * 4096 * 1.75e9, 128, 4, _CUBE),
    # [c] 918 TFLOP/s, 32 GB, 1638 GB/s, arrays of 256 x 256; [s] 9e10 a link.
    "v6e": Chip("v6e", 918 * _T, 32 * _GIB, 1638 * _GB, 90 * _GB, 4096 * 1.75e9, 256, 16, _SQUARE),
}  # fmt: skip

# What JAX calls the devices of each generation.
_TPU_KINDS = {
    "TPU v3": "v3", "TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p",
    "TPU v6 lite": "v6e", "TPU v6e": "v6e",
}  # fmt: skip
# NVIDIA's data sheets of each product: dense bfloat16 FLOP/s, without sparsity. JAX's names, which may go on.
_GPU_PEAKS = {
    "NVIDIA A100": 312 * _T, "NVIDIA H100 80GB HBM3": 989 * _T, "NVIDIA H100 PCIe": 756 * _T, "NVIDIA H200": 989 * _T,
    "NVIDIA L4": 121 * _T, "NVIDIA B200": 2250 * _T,
}  # fmt: skip


def peak_flops(device_kind: str) -> float | None:
    """Peak bfloat16 FLOP/s of what JAX shows as one device (`jax.Device.device_kind`); None where it is not known."""
    if device_kind in _TPU_KINDS:
        chip = CHIPS[_TPU_KINDS[device_kind]]
        return chip.flops / chip.devices
    found = [name for name in _GPU_PEAKS if f"{device_kind} ".startswith((f"{name} ", f"{name}-"))]
    return _GPU_PEAKS[found[0]] if found else None


@dataclass(frozen=True)
class Slice:
    """Chips on a grid."""

    chip: Chip
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """As it is written: v5e:2x4."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def chips(self) -> int:
        """How many."""
        return math.prod(self.shape)

    def closed(self, axis: int) -> bool:
        """Whether the chips along an axis are a ring. On v4 and v5p all axes must be multiples of 4 together."""
        sizes = self.shape if len(self.shape) == 3 else (self.shape[axis],)
        return all(size % self.chip.ring == 0 for size in sizes)


def find_slice(topology: str) -> Slice:
    """The slice `v5e:2x4` names.

    Raises:
        UserError: no such generation or size; the nearest name.
    """
    name, _, size = topology.partition(":")
    if name not in CHIPS:
        raise UserError(f"--topology {topology!r}: there is no TPU {name!r}{nearest(name, CHIPS)}")
    chip = CHIPS[name]
    if size not in chip.topologies:
        known = [f"{name}:{other}" for other in chip.topologies]
        wanted = math.prod(map(int, re.findall(r"\d+", size)[:3]))
        close = sorted(known, key=lambda other: abs(_chips(other) - wanted))[:2]
        hint = f"; did you mean {' or '.join(close)}?" if re.search(r"\d", size) else f"; there are: {', '.join(known)}"
        raise UserError(f"--topology {topology!r} is no slice of {name}{hint}")
    return Slice(chip, tuple(map(int, size.split("x"))))


def _chips(topology: str) -> int:
    return math.prod(map(int, topology.partition(":")[2].split("x")))
