"""What a run says: to the terminal with live lines, and to log.txt; and what it is doing when it says nothing."""

import collections
import contextlib
import io
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from transformer_jax.errors import UserError

# Seconds between lines of progress where there is no terminal to redraw.
_QUIET = 15.0


class Reporter:
    """Messages and progress, as a context. log.txt begins with `attach`: a command that is refused leaves no folder.

    A run may be silent for long: compiling, or waiting for a disk, for other processes, for ever. After `heartbeat`
    seconds without a word a line says which phase is going on, and for how long, and again as often.
    """

    def __init__(self, *, quiet: float = _QUIET, heartbeat: float = 60.0) -> None:
        # What could not be shown on this terminal's encoding must not end a run of hours.
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")
        self.console = Console(highlight=False, soft_wrap=True)
        self.seconds: collections.defaultdict[str, float] = collections.defaultdict(float)
        """Seconds spent in each phase so far, those in it included in both; see `during`."""
        self._log: io.TextIOBase = io.StringIO()
        self._writing = threading.RLock()
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._quiet, self._heartbeat = quiet, heartbeat
        self._shown = time.monotonic()
        self._phase = ("starting", self._shown)
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

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
        self._print(message)
        self._write(message)

    def warn(self, message: str) -> None:
        """As `say`, marked as a warning."""
        self.say(f"warning: {message}")

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """What is going on now, as a heartbeat names it: "compiling"."""
        before, start = self._phase, time.monotonic()
        self._phase = (phase, start)
        try:
            yield
        finally:
            self._phase = before
            self.seconds[phase] += time.monotonic() - start

    @contextlib.contextmanager
    def counting(self, phase: str, total: int) -> Iterator[Callable[[int], None]]:
        """`during`, with the progress that the context's function is told: how many of `total` sentences are done."""
        with self.during(phase):
            if not self.console.is_terminal:
                yield lambda done: self._now_and_then(f"{phase} {done:,}/{total:,} sentences")
                return
            ours = self._progress is None
            progress = self._live()
            task = progress.add_task("", total=total, of=f"{phase}, sentence")
            try:
                yield lambda done: self._redraw(task, done, "")
            finally:
                progress.remove_task(task)
                if ours:
                    self.stop()

    def start(self, step: int, steps: int) -> None:
        """Shows the live line, where there is a terminal."""
        if self.console.is_terminal:
            self._task = self._live().add_task("", total=steps, completed=step, of="update")
        self._shown = time.monotonic()

    def progress(self, step: int, steps: int, values: Mapping[str, float]) -> None:
        """The newest numbers; rates may be absent."""
        text = f"loss {values['loss']:.3f}  lr {values['learning_rate']:.2e}"
        if "tokens_per_second" in values:
            text += f"  {values['tokens_per_second']:,.0f} tokens/s  fill {values['fill']:.0%}"
        if "model_flops_utilisation" in values:
            text += f"  MFU {values['model_flops_utilisation']:.1%}"
        if self._task is not None:
            self._redraw(self._task, step, text)
        else:
            self._now_and_then(f"update {step:,}/{steps:,}  {text}")

    def stop(self) -> None:
        """Takes the live lines away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = self._task = None

    def _live(self) -> Progress:
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.fields[of]}"),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self._progress.start()
        return self._progress

    def _redraw(self, task: TaskID, done: int, text: str) -> None:
        if self._progress is not None:
            self._progress.update(task, completed=done, description=text)
            self._shown = time.monotonic()

    def _now_and_then(self, line: str) -> None:
        if time.monotonic() - self._shown > self._quiet:
            self._print(line)

    def _print(self, line: str) -> None:
        self._shown = time.monotonic()
        self.console.print(line, markup=False)

    def _beat(self) -> None:
        wait = self._heartbeat
        # A terminal that has gone away is the main thread's to notice.
        with contextlib.suppress(OSError, ValueError):
            while not self._closed.wait(wait):
                now = time.monotonic()
                if now - self._shown >= self._heartbeat and not self.console.quiet:
                    phase, since = self._phase
                    self.say(f"still {phase}, for {now - since:,.0f} s")
                wait = max(self._shown + self._heartbeat - time.monotonic(), self._heartbeat / 10)

    def __enter__(self) -> "Reporter":
        self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._watch.join()
        self.stop()
        if error is not None and not isinstance(error, SystemExit):  # of which a line has said why
            self._write(f"stopped by {kind and kind.__name__}: {error}")
        with contextlib.suppress(OSError):
            self._log.close()

    def _write(self, message: str) -> None:
        # A full disk ends a run where a checkpoint or a line of metrics is lost, not for a line of the log.
        with contextlib.suppress(OSError), self._writing:
            for line in filter(None, message.split("\n")):
                self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
