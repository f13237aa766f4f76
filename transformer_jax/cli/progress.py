"""How far a command has come: a bar on a terminal, else a line now and then."""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# Seconds between lines of progress where there is no terminal to redraw.
_QUIET = 15.0


@contextlib.contextmanager
def counting(console: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A context whose result is called with the number that is done so far, of `total`."""
    if console.is_terminal:
        columns = (TextColumn(what), MofNCompleteColumn(), BarColumn(bar_width=20), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda done: bar.update(task, completed=done)
        return
    yield counting_up(console, what, f"/{total:,}")


def counting_up(console: Console, what: str, of: str) -> Callable[[int], None]:
    """Called with the number that is done so far, it says it now and then: `translated 2,048 lines`."""
    last = time.monotonic()

    def line(done: int) -> None:
        nonlocal last
        if time.monotonic() - last > _QUIET:
            last = time.monotonic()
            console.print(f"{what} {done:,}{of}", markup=False)

    return line
