"""`transformer-jax diagnose RUN/fault-STEP [--json]`: where in the network an update went wrong."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from transformer_jax.cli.options import parse_options
from transformer_jax.cli.text import write_lines

if TYPE_CHECKING:
    from transformer_jax.training.faults import Diagnosis


@dataclass(frozen=True)
class Options:
    """Work through the update again at which a run stopped, its loss or gradient not finite."""

    fault: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN/fault-STEP")]
    """The folder that the run's last message names."""
    json: bool = False
    """One JSON object in place of the page; numbers that are not finite are text in it."""


def run(argv: Sequence[str]) -> None:
    """Parse the options, work through the update and print what is not finite."""
    options = parse_options(Options, argv, "diagnose")
    from transformer_jax.training.faults import diagnose

    found = diagnose(options.fault)
    write_lines(None, [json.dumps(_with_text(dataclasses.asdict(found))) if options.json else _page(found)])


def _with_text(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN."""
    return {
        name: _with_text(value) if isinstance(value, dict) else str(value) if isinstance(value, float) else value
        for name, value in values.items()
    }


def _page(found: "Diagnosis") -> str:
    fault = found.fault
    rows = {
        "update": f"{fault.step:,}, {len(fault.lines):,} pairs, learning rate {fault.learning_rate:.3g}",
        "loss": f"{found.loss:.6g} now, {fault.loss:.6g} in the run",
        "gradient norm": f"{found.gradient_norm:.6g} now, {fault.gradient_norm:.6g} in the run",
        "not finite": "",
        "  parameters": "; ".join(found.parameters) or "none",
        "  first output": found.module or "none",
        "  lines": ", ".join(map(str, found.lines)) or "none",
        "  gradients": "; ".join(found.gradients) or "none",
    }
    return "\n".join(f"{name:16}{text}".rstrip() for name, text in rows.items())
