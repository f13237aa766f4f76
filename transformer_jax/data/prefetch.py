"""What comes next is made ahead in a thread, so that who consumes it never waits for it to be made."""

import queue
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Generic, TypeVar

Item = TypeVar("Item")

_WAIT = 0.1  # seconds between looks at whether the consumer has gone


class Prefetched(Generic[Item]):
    """The items of an iterator in their order, at most `depth` and one more made before they are asked for.

    A context: leaving it ends the thread. What making an item raises is raised where that item would have come.
    Nothing else knows how far ahead the thread is: a position that travels with an item is that of its consumer.
    """

    def __init__(self, items: Iterator[Item], depth: int) -> None:
        self._ready: queue.Queue[tuple[Item] | BaseException] = queue.Queue(depth)
        self._closed = threading.Event()
        self._end: BaseException | None = None
        self._thread = threading.Thread(target=self._make, args=(items,), name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> "Prefetched[Item]":
        return self

    def __next__(self) -> Item:
        if self._end is None:
            made = self._ready.get()
            if isinstance(made, tuple):
                return made[0]
            self._end = made
        raise self._end

    def close(self) -> None:
        """Ends the thread, after the item that it is making; nothing more comes."""
        self._end = self._end or StopIteration()
        self._closed.set()
        self._thread.join()

    def __enter__(self) -> "Prefetched[Item]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make(self, items: Iterator[Item]) -> None:
        made: tuple[Item] | BaseException
        while not self._closed.is_set():
            try:
                made = (next(items),)
            except BaseException as error:  # StopIteration among them; all are the consumer's to see
                made = error
            while not self._closed.is_set():
                try:
                    self._ready.put(made, timeout=_WAIT)
                    break
                except queue.Full:
                    continue
            if not isinstance(made, tuple):
                return
