"""What the C library does with freed memory: settings of this process, for glibc (elsewhere nothing is done)."""

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator

# Of malloc.h. They can be set, not read.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8
_MMAP_MAX_DEFAULT = 65536

# One arena is one lock: with many threads they would wait for it. Measured with two processors.
_MOST_PROCESSORS = 16

_kept = False


def keep_freed_blocks() -> None:
    """Keeps every block that is freed in the process, to be handed out again. Call it before there are threads.

    XLA takes all that a program needs for intermediate results as one block, at each call. From 32 MiB on glibc gets
    such a block from the system and gives it back, and in between the system clears each page at its first touch: of
    the demo's update that is a fifth to a quarter of the processor time (`benchmarks/kept_memory.py`). Translation,
    whose blocks are smaller, is no faster for it. Blocks are kept in the first arena only (those of others are small),
    hence one for all threads. Whoever sets MALLOC_... or GLIBC_TUNABLES has decided otherwise.
    """
    decided = "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ)
    if sys.platform != "linux" or decided or len(os.sched_getaffinity(0)) > _MOST_PROCESSORS:
        return
    global _kept
    _kept = True
    _set_option(_ARENA_MAX, 1)
    _keep()


@contextlib.contextmanager
def freed_blocks_given_back() -> Iterator[None]:
    """A context in which blocks of 1 MiB and more go back to the system as they are freed.

    glibc by itself takes each block of up to 32 MiB that is freed for a sign to keep such blocks, and after 20
    checkpoints of the base model it keeps 1.5 times the parameters. On leaving the limits are those of
    `keep_freed_blocks` where it was called, or those that glibc's own rule ends at, as training, which asks for the
    same blocks in each update, is faster with blocks that are kept.
    """
    _set_option(_MMAP_MAX, _MMAP_MAX_DEFAULT)
    _set_option(_MMAP_THRESHOLD, 2**20)
    _set_option(_TRIM_THRESHOLD, 2**20)
    try:
        yield
    finally:
        _set_option(_MMAP_THRESHOLD, 32 * 2**20)
        _set_option(_TRIM_THRESHOLD, 64 * 2**20)
        if _kept:
            _keep()


def _keep() -> None:
    _set_option(_MMAP_MAX, 0)
    _set_option(_TRIM_THRESHOLD, -1)  # never


def _set_option(option: int, value: int) -> None:
    mallopt: Callable[[int, int], int] | None = (
        getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    )
    if mallopt is not None:
        mallopt(option, value)
