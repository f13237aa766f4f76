"""`transformer-jax compile-check CONFIG --topology v5e:2x4 [--SECTION.FIELD VALUE ...]`: a configuration's programs
compiled for TPUs that this machine does not have, and what they would need there."""

import contextlib
import dataclasses
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from transformer_jax.cli.options import ConfigFields, parse_options, split_overrides
from transformer_jax.cli.text import write_lines
from transformer_jax.config import Config
from transformer_jax.config_fields import field_types
from transformer_jax.config_loading import load_config

if TYPE_CHECKING:
    from transformer_jax.compile_check.programs import Report


@dataclass(frozen=True)
class Options:
    """Memory, work, exchanges and time of a configuration's programs on a slice of TPUs, without a TPU."""

    config: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CONFIG|RUN")]
    """A configuration file, with a variant or without (configs/table3.py:B1), or a run's folder."""
    topology: str
    """The slice: its generation (v3, v4, v5e, v5p, v6e) and its chips, such as v5e:2x4."""
    program: Literal["both", "train", "translate"] = "both"
    """The train step, the translate function, or both."""
    json: bool = False
    """One JSON object for each program, a line each, in place of the page."""
    settings: ConfigFields = field(default_factory=Config)
    """For the help page; `load_config` applies these options to what the file gives."""


def run(argv: Sequence[str]) -> None:
    """Parse the options, compile and print."""
    rest, overrides = split_overrides(argv)
    options = parse_options(Options, rest, "compile-check", field_types(Config))
    config = load_config(options.config, overrides)

    from transformer_jax.parallel.chips import find_slice

    where = find_slice(options.topology)

    from transformer_jax.compile_check.programs import check_train_step, check_translate, devices_of

    devices = devices_of(where)
    for name, check in (("train", check_train_step), ("translate", check_translate)):
        if options.program in ("both", name):
            with _said_after(5.0, f"compiling {name} for {options.topology}, which takes one to some minutes"):
                report = check(config, where, devices)
            write_lines(None, [json.dumps(dataclasses.asdict(report)) if options.json else page(report)])


@contextlib.contextmanager
def _said_after(seconds: float, line: str) -> Iterator[None]:
    """A context that says a line on standard error if it lasts for longer."""
    timer = threading.Timer(seconds, lambda: print(line, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def page(report: "Report") -> str:
    """The report for people."""
    found, memory = report.estimate, report.memory
    mesh = ", ".join(f"{axis} {size}" for axis, size in report.mesh.items())
    pieces = "positions" if report.program == "train" else "pieces written"
    lines = [
        f"{report.program} on {report.topology} ({mesh}): {report.rows} rows of {report.source_width} + "
        f"{report.target_width} pieces",
        f"  memory     {_gib(memory.peak)} of {_gib(memory.capacity)} GiB on each device: arguments "
        f"{_gib(memory.arguments)}, results {_gib(memory.results)}, temporaries {_gib(memory.temporaries)}, code "
        f"{_gib(memory.code)}",
        f"  work       {found.flops / 1e12:.3f} TFLOP on each device ({found.padded_flops / 1e12:.3f} in whole tiles), "
        f"{found.hbm_bytes / 1e9:.2f} GB of memory traffic",
    ]
    for each in found.exchanges:
        lines.append(
            f"  {each.kind:<10} {each.count} of {each.bytes / 1e6:.2f} MB together, {each.seconds * 1e3:.2f} ms, of "
            f"which {each.overlapped_seconds * 1e3:.2f} ms behind other work"
        )
    lines += [
        f"  time       {found.seconds * 1e3:.2f} ms, mostly {found.bound}: matrix {found.matrix_seconds * 1e3:.2f}, "
        f"vector {found.vector_seconds * 1e3:.2f}, memory {found.memory_seconds * 1e3:.2f}, network "
        f"{found.network_seconds * 1e3:.2f} ms ({found.exposed_seconds * 1e3:.2f} exposed)",
        f"  speed      {report.tokens_per_second:,.0f} {pieces}/s, {report.mfu:.1%} of peak FLOP/s; at best: nothing "
        "reaches all of a peak",
    ]
    lines += [f"  loop       {name}: taken to turn {report.source_width} times" for name in report.open_loops]
    return "\n".join(lines)


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f}"
