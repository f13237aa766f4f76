"""The table of docs/scaling.md: train steps compiled for slices of TPUs that are not there, and what they would take.

    python benchmarks/scaling.py            compile what docs/results/scaling lacks, then print the table
    python benchmarks/scaling.py table      print the table of what there is

Needs the extra `tpu-check`. A cell is a file; one that was interrupted has none and is compiled the next time. Minutes
each on two cores.
"""

import itertools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from transformer_jax.compile_check.collectives import Collective
from transformer_jax.compile_check.roofline import exchange_seconds
from transformer_jax.parallel.chips import CHIPS, find_slice

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "results" / "scaling"
SMALLEST = 8
"""Chips of the smallest slice that a result is moved to."""
ROWS_PER_CHIP = 13
"""Of 256 + 256 pieces: the paper's batch of 25,000 on 8 chips, and as many on each further chip."""


class Cell(NamedTuple):
    """A train step on a slice."""

    config: str
    topology: str
    batch: str
    """growing: ROWS_PER_CHIP rows for each chip. fixed: the paper's 25,000 pieces, at least a row for each chip."""
    mesh: str = ""
    """Overrides, such as "fsdp=8" or "shard_weight_update=True"."""

    @property
    def file(self) -> pathlib.Path:
        """Its result."""
        name = f"{self.config}_{self.topology.replace(':', '-')}_{self.batch}_{self.mesh_name.replace('=', '')}"
        return FOLDER / f"{name}.json"

    @property
    def mesh_name(self) -> str:
        """As the table shows it."""
        return self.mesh.removesuffix("=True") or "data"

    @property
    def command(self) -> list[str]:
        """The command whose output it is."""
        pieces = ROWS_PER_CHIP * 256 * find_slice(self.topology).chips if self.batch == "growing" else 25_000
        mesh = [f"--mesh.{axis}" for axis in self.mesh.split(",") if axis]
        return [
            sys.executable, "-m", "transformer_jax.cli.main", "compile-check", f"configs/{self.config}.py",
            "--topology", self.topology, "--program", "train", "--json", "--data.batch-tokens", str(pieces), *mesh,
        ]  # fmt: skip


# The dearest questions first, so that an interrupted run has answered them.
CELLS = [
    Cell("big", "v5e:2x4", "growing"),
    Cell("big", "v5e:16x16", "growing"),
    Cell("base", "v5e:2x4", "growing"),
    Cell("big", "v5e:16x16", "fixed"),
    Cell("big", "v5e:2x4", "growing", "fsdp=8"),
    Cell("big", "v5e:16x16", "growing", "fsdp=8"),
    Cell("big", "v5e:16x16", "growing", "fsdp=16"),
    Cell("big", "v5e:2x4", "growing", "shard_weight_update=True"),
    Cell("big", "v5e:16x16", "growing", "shard_weight_update=True"),
    Cell("big", "v6e:16x16", "growing"),
    Cell("big", "v5p:4x8x8", "growing"),
    Cell("big", "v4:2x2x4", "growing"),
    Cell("base", "v5e:16x16", "fixed"),
    Cell("big", "v5e:1x1", "growing"),
    Cell("base", "v4:2x2x4", "growing"),
    Cell("base", "v5p:4x8x8", "growing"),
    Cell("base", "v6e:16x16", "growing"),
]


def compile_cell(cell: Cell) -> None:
    """Runs the command and keeps its one line of JSON, or its one line of error where the program does not fit."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(cell.command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if result.returncode == 0:
        text = result.stdout.strip().split("\n")[-1]
    elif "does not fit" in result.stderr:
        text = json.dumps({"error": result.stderr.strip()})
    else:
        raise SystemExit(result.stderr)
    unfinished = cell.file.with_suffix(".unfinished")
    unfinished.write_text(text + "\n", encoding="utf-8")
    unfinished.replace(cell.file)


def moved_to(found: dict[str, Any], topology: str) -> dict[str, Any]:
    """A data-parallel step with as many rows a chip on another slice of the same generation.

    What a chip does is the same program; only the groups of its exchanges change, and their time is worked out anew.
    """
    where = find_slice(topology)
    places = list(itertools.product(*map(range, where.shape)))
    estimate = found["estimate"]
    busy = estimate["seconds"] - estimate["exposed_seconds"]
    exposed = 0.0
    for each in estimate["exchanges"]:
        one = Collective(each["kind"], (), each["bytes"] // each["count"], each["bytes"] // each["count"])
        exposed += each["count"] * exchange_seconds(one, where, places)
    growth = where.chips / find_slice(found["topology"]).chips
    scaled = growth * estimate["seconds"] / (busy + exposed)
    return found | {
        "topology": topology,
        "rows": round(found["rows"] * growth),
        "tokens_per_second": found["tokens_per_second"] * scaled,
        "mfu": found["mfu"] * scaled / growth,
        "estimate": estimate | {"seconds": busy + exposed, "exposed_seconds": exposed},
    }


def line_of(cell: Cell, found: dict[str, Any], note: str = "") -> str:
    """A line of the table."""
    where = find_slice(cell.topology)
    head = f"| {cell.config} | {cell.topology}{note} | {where.chips} | {cell.batch} | {cell.mesh_name} |"
    if "error" in found:
        return f"{head} does not fit: {found['error'].partition('it needs ')[2].partition(' on each')[0]} |"
    estimate, memory = found["estimate"], found["memory"]
    peak = sum(memory[part] for part in ("arguments", "results", "temporaries", "code"))
    busy = estimate["seconds"] - estimate["exposed_seconds"]
    hidden = sum(each["overlapped_seconds"] for each in estimate["exchanges"])
    return (
        f"{head} {found['rows'] * 256:,} | {found['tokens_per_second'] / 1e6:.2f} | {estimate['seconds'] * 1e3:.1f} | "
        f"{busy * 1e3:.1f} | {estimate['exposed_seconds'] * 1e3:.1f} | {hidden * 1e3:.1f} | "
        f"{busy / estimate['seconds']:.0%} | {found['mfu']:.0%} | "
        f"{peak / 2**30:.1f} of {memory['capacity'] / 2**30:.0f} |"
    )


def table() -> Iterator[str]:
    """Lines of all cells that are there, and of slices in between that the data-parallel ones are moved to (~)."""
    yield HEADER
    there = [cell for cell in CELLS if cell.file.exists()]
    results = {cell: json.loads(cell.file.read_text(encoding="utf-8")) for cell in there}
    lines = []
    for cell, found in results.items():
        lines.append((cell, line_of(cell, found)))
        if cell.batch == "growing" and not cell.mesh and "error" not in found:
            generation = find_slice(cell.topology).chip
            for size in generation.topologies:
                other = cell._replace(topology=f"{generation.name}:{size}")
                if (
                    other not in results
                    and other not in [known for known, _ in lines]
                    and find_slice(other.topology).chips >= SMALLEST
                ):
                    lines.append((other, line_of(other, moved_to(found, other.topology), " ~")))
    order = list(CHIPS)

    def key(line: tuple[Cell, str]) -> tuple[Any, ...]:
        where = find_slice(line[0].topology)
        return line[0].config, order.index(where.chip.name), line[0].batch, line[0].mesh, where.chips

    yield from (text for _, text in sorted(lines, key=key))


HEADER = """\
| model | slice | chips | batch | mesh | pieces a side | M positions/s | step ms | on chip ms | exposed network ms \
| hidden network ms | efficiency | MFU | GiB a device |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"""


def main() -> None:
    """Compiles what is missing, unless only the table is asked for, and prints the table."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    if sys.argv[1:] != ["table"]:
        for number, cell in enumerate(CELLS, 1):
            if not cell.file.exists():
                print(f"{number} of {len(CELLS)}: {' '.join(cell.command[3:])}", file=sys.stderr, flush=True)
                compile_cell(cell)
    print("\n".join(table()))


if __name__ == "__main__":
    main()
