"""Pairs to arrays of ids, in this process or in several, in the order of the text either way."""

import collections
import concurrent.futures
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import UserError

CHUNK_PAIRS = 5_000
"""Pairs encoded at a time: some megabytes, and a tenth of a second or more of work."""
# A text of fewer chunks is encoded before the first process would have started.
_SERIAL_CHUNKS = 10


class Side(NamedTuple):
    """Sentences of one side: their ids one after the other, and how many each has, EOS counted."""

    ids: NDArray[Any]
    lengths: NDArray[np.int64]


def id_type(tokenizer: Tokenizer) -> np.dtype[Any]:
    """The smallest type that holds the ids: uint16, int32 above 65,536 pieces."""
    return np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.int32)


def encode_pairs(pairs: Iterable[tuple[str, str]], tokenizer: Tokenizer, processes: int) -> Iterator[tuple[Side, Side]]:
    """Source and target side of chunk after chunk, in order.

    Args:
        pairs: read no further ahead than the processes need.
        tokenizer: gives the ids.
        processes: how many share the work where there is enough of it; 1 is this one, with a thread a processor.

    Raises:
        UserError: a process ended before its work was done.
        Exception: whatever iterating over `pairs` raises.
    """
    chunks = _chunks(pairs)
    first = list(itertools.islice(chunks, _SERIAL_CHUNKS))
    if processes == 1 or len(first) < _SERIAL_CHUNKS:
        for chunk in itertools.chain(first, chunks):
            yield _encode(chunk, tokenizer, -1)
        return
    # Not forked: JAX has threads running by now. The model's bytes go to each process once.
    pool = concurrent.futures.ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin, (tokenizer,))
    waiting: collections.deque[concurrent.futures.Future[tuple[Side, Side]]] = collections.deque()
    try:
        for chunk in itertools.chain(first, chunks):
            waiting.append(pool.submit(_encode_in_process, chunk))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            "a process that tokenizes ended before its work was done (out of memory, or started by a script without "
            "`if __name__ == '__main__'`): run `transformer-jax prepare` with --processes 1, which goes on from here"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _chunks(pairs: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    remaining = iter(pairs)
    while chunk := list(itertools.islice(remaining, CHUNK_PAIRS)):
        yield chunk


def _encode(pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer, num_threads: int) -> tuple[Side, Side]:
    def side(sentences: Sequence[str]) -> Side:
        rows = tokenizer.encode(sentences, num_threads=num_threads)
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return Side(np.fromiter(itertools.chain.from_iterable(rows), id_type(tokenizer), lengths.sum()), lengths)

    return side([source for source, _ in pairs]), side([target for _, target in pairs])


# In a process of the pool

_own: Tokenizer | None = None


def _begin(tokenizer: Tokenizer) -> None:
    global _own
    _own = tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; who began this one ends it
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A pool's processes wait for ever for work from one that was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_in_process(pairs: Sequence[tuple[str, str]]) -> tuple[Side, Side]:
    if _own is None:
        raise RuntimeError("_begin has not run in this process")
    return _encode(pairs, _own, 1)
