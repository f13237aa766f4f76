"""What a run says: to the terminal with a live line, and to log.txt."""

import contextlib
import io
import pathlib
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from transformer_jax.errors import UserError

# Seconds between lines of progress where there is no terminal to redraw.
_QUIET = 15.0


class Reporter:
    """Messages and progress, as a context. log.txt begins with `attach`: a command that is refused leaves no folder."""

    def __init__(self) -> None:
        # What could not be shown on this terminal's encoding must not end a run of hours.
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")
        self.console = Console(highlight=False, soft_wrap=True)
        self._log: io.TextIOBase = io.StringIO()
        self._progress: Progress | None = None
        self._task: Any = None
        self._last = 0.0

    def attach(self, workdir: pathlib.Path) -> None:
        """Opens log.txt and writes what was said so far.

        Raises:
            UserError: it cannot be opened.
        """
        path = workdir / "log.txt"
        said = self._log.getvalue() if isinstance(self._log, io.StringIO) else ""
        try:
            self._log = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror or error}); make it writable") from error
        self._log.write(said)

    def say(self, message: str) -> None:
        """A line for the person who watches, and for log.txt with the time."""
        self.console.print(message, markup=False)
        self._write(message)

    def warn(self, message: str) -> None:
        """As `say`, marked as a warning."""
        self.say(f"warning: {message}")

    def start(self, step: int, steps: int) -> None:
        """Shows the live line, where there is a terminal."""
        if self.console.is_terminal:
            self._progress = Progress(
                TextColumn("update"),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self._task = self._progress.add_task("", total=steps, completed=step)
            self._progress.start()
        self._last = time.monotonic()

    def progress(self, step: int, steps: int, values: Mapping[str, float]) -> None:
        """The newest numbers; rates may be absent."""
        text = f"loss {values['loss']:.3f}  lr {values['learning_rate']:.2e}"
        if "tokens_per_second" in values:
            text += f"  {values['tokens_per_second']:,.0f} tokens/s  fill {values['fill']:.0%}"
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description=text)
        elif time.monotonic() - self._last > _QUIET:
            self._last = time.monotonic()
            self.console.print(f"update {step:,}/{steps:,}  {text}", markup=False)

    def stop(self) -> None:
        """Takes the live line away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if error is not None:
            self._write(f"stopped by {kind and kind.__name__}: {error}")
        with contextlib.suppress(OSError):
            self._log.close()

    def _write(self, message: str) -> None:
        # A full disk ends a run where a checkpoint or a line of metrics is lost, not for a line of the log.
        with contextlib.suppress(OSError):
            self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")
