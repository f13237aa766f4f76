"""What a profiler sees of some updates, and how often programs were compiled."""

import contextlib
import pathlib
import threading
from collections.abc import Callable, Iterator
from types import TracebackType

import jax

from transformer_jax.errors import UserError

# Recorded by jax for each program, also where the compilation cache has it; tests hold it for each version.
_COMPILED = "/jax/core/compile/backend_compile_duration"


def parse_steps(text: str, last: int) -> range:
    """The updates that `a:b` names, both included, in a run of `last` updates.

    Raises:
        UserError: no two whole numbers 1 <= a <= b <= last.
    """
    first, _, end = text.partition(":")
    if not (first.isdecimal() and end.isdecimal() and 1 <= int(first) <= int(end) <= last):
        raise UserError(
            f"--profile-steps is {text!r}, but must be a:b, the first and the last update to record, "
            f"with 1 <= a <= b <= train.steps ({last})"
        )
    return range(int(first), int(end) + 1)


def still_ahead(steps: range | None, done: int, warn: Callable[[str], None]) -> range | None:
    """The updates to record, of a run that has made `done`; None, with a warning, where the last of them is made."""
    if not steps or steps[-1] > done:
        return steps
    warn(
        f"--profile-steps: there is no trace, as updates {steps[0]:,} to {steps[-1]:,} are made: this run has reached "
        f"update {done:,}; name later ones"
    )
    return None


class Profile:
    """A context that writes a trace of some updates into a folder; of a run that ends among them, what there was.

    The trace has a step for each update and XLA's operations, whose names carry the scopes of the model: encoder,
    decoder, self_attention, cross_attention, feed_forward, embed, logits, loss, adam.

    Args:
        steps: the updates to record; None: none.
        folder: where TensorBoard's profiler, xprof and Perfetto find it: below it in plugins/profile/TIME.
        say: takes a line for people.

    Raises:
        UserError: on entering, the folder cannot be made.
    """

    def __init__(self, steps: range | None, folder: pathlib.Path, say: Callable[[str], None]) -> None:
        self._steps = steps or range(0)
        self._folder, self._say = folder, say
        self._first: int | None = None
        self._last = 0

    def bounds(self, step: int) -> bool:
        """Whether a trace begins or ends after this update: no other is to be under way then."""
        return bool(self._steps) and step in (self._steps[0] - 1, self._steps[-1])

    @contextlib.contextmanager
    def update(self, step: int) -> Iterator[None]:
        """Around the start of an update."""
        if self._first is None and step in self._steps:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # its millions of calls slow the host down, and hide what it waits for
            jax.profiler.start_trace(self._folder, profiler_options=options)
            self._first = step
        self._last = step
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield

    def after(self, step: int) -> None:
        """An update is done; the trace is written after the last."""
        if self._first is not None and step == self._steps[-1]:
            self._stop()

    def _stop(self) -> None:
        try:
            jax.profiler.stop_trace()
            self._say(f"profile    updates {self._first:,} to {self._last:,} are in {self._folder}")
        except (RuntimeError, OSError) as error:  # a full disk: a trace is not worth a run
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            self._say(f"warning: the trace of updates {self._first:,} to {self._last:,} could not be written: {reason}")
        self._first, self._steps = None, range(0)

    def __enter__(self) -> "Profile":
        if self._steps:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(
                    f"{self._folder}: cannot be a folder for the trace ({error.strerror or error}); make room for it, "
                    "or leave --profile-steps out"
                ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._first is not None:
            self._stop()
        elif self._steps and error is None:
            self._say(
                f"profile    nothing is recorded: updates {self._steps[0]:,} to {self._steps[-1]:,} were not made by "
                "this command"
            )


class Compilations:
    """A context that counts the programs which its thread compiles, or takes from the compilation cache."""

    def __init__(self) -> None:
        self.count = 0
        self._thread = 0

    def _heard(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILED and threading.get_ident() == self._thread:
            self.count += 1

    def __enter__(self) -> "Compilations":
        self._thread = threading.get_ident()
        jax.monitoring.register_event_duration_secs_listener(self._heard)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        jax.monitoring.unregister_event_duration_listener(self._heard)
