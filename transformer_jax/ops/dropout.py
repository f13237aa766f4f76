"""Dropout whose mask is a counter hash: nothing is stored, and the mask does not depend on mesh or backend."""

import contextlib
import contextvars
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from transformer_jax.ops.sharding import ROW_AXES

# A part of a batch and the number of parts: masks are made for the whole batch.
_PART: contextvars.ContextVar[tuple[Int[Array, ""] | int, int]] = contextvars.ContextVar("part", default=(0, 1))


@contextlib.contextmanager
def part_of_batch(part: Int[Array, ""] | int, parts: int) -> Iterator[None]:
    """While tracing in this context, row j (axis 0) of an array is row `j * parts + part` of a batch.

    A batch that is worked through in parts then has the masks of the whole.
    """
    token = _PART.set((part, parts))
    try:
        yield
    finally:
        _PART.reset(token)


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A bijection of 32-bit words with near-ideal avalanche: "lowbias32" of C. Wellons, Hash Prospector, 2018."""
    x = x ^ (x >> 16)
    x = x * jnp.uint32(0x7FEB352D)
    x = x ^ (x >> 15)
    x = x * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def random_words(key: Array, shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """One 32-bit word for each element: a hash of the element's index, keyed twice by the key's two words.

    Under `jax.shard_map` over axes of rows, axis 0 is one device's share of them, and in `part_of_batch` a part: its
    words are those that the whole array has there.

    threefry's price is that of cryptography: a mask of 2M elements takes it 19 to 37 ms on one CPU core, this 1 ms,
    fused into the multiplication that uses it, so that the backward pass computes it anew and stores nothing.
    """
    words = jax.random.key_data(key).astype(jnp.uint32).reshape(-1)
    index = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        place = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        if axis == 0:
            place = _rows(place)
        index = index + place * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    return _mix(_mix(index + words[0]) ^ words[-1])


def _rows(place: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """From places on axis 0 to rows of the whole array."""
    shares = tuple(axis for axis in ROW_AXES if axis in jax.sharding.get_abstract_mesh().manual_axes)
    if shares:
        place = place + jax.lax.axis_index(shares).astype(jnp.uint32) * jnp.uint32(place.shape[0])
    part, parts = _PART.get()
    if parts > 1:
        place = place * jnp.uint32(parts) + jnp.asarray(part, jnp.uint32)
    return place


def dropout(x: Float[Array, "..."], rate: float, key: Array) -> Float[Array, "..."]:
    """Zeroes each element with probability `rate` and divides the others by 1 - rate (section 5.4)."""
    if rate == 0.0:
        return x
    keep = random_words(key, x.shape) >= jnp.uint32(round(rate * 2**32))
    return jnp.where(keep, x * (1.0 / (1.0 - rate)), jnp.zeros((), x.dtype)).astype(x.dtype)
