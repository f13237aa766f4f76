"""Table 1 as a measurement: work, sequential operations and time of one layer against n, by kind of layer.

    python benchmarks/table1.py --output docs/results      writes table1.json, table1.png and table1.md

Self-attention (the product's own functions), a recurrent layer (GRU) and a convolution of width k, all of width d, on n
positions of one sentence; forward, and forward with the gradients of parameters and input. Work and sequential
operations are counted in the traced program: floating-point operations of its matrix products and convolutions, and the
longest chain of operations of which each needs the one before. A scan counts as often as it runs.
"""

import argparse
import json
import os
import pathlib
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from program_counts import sequential_operations, work
from recurrent_layers import gru

from transformer_jax.ops.attention import attend, merge_heads, project_heads

KERNEL, HEADS = 3, 8
LEAST_SECONDS = 0.02  # of calls that are timed together
Params = dict[str, jax.Array]
Layer = Callable[[Params, jax.Array], jax.Array]


def self_attention(params: Params, x: jax.Array) -> jax.Array:
    """Section 3.2.2, all positions visible."""
    q, k, v = (project_heads(x, params[f"w_{name}"], None) for name in "qkv")
    return merge_heads(attend(q, k, v, None), params["w_o"], None)


def recurrent(params: Params, x: jax.Array) -> jax.Array:
    """A GRU."""
    return gru(x, **params)


def convolution(params: Params, x: jax.Array) -> jax.Array:
    """Width k, as many positions out as in."""
    return jax.lax.conv_general_dilated(x, params["w"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


def make_layers(d: int) -> dict[str, tuple[Layer, Params]]:
    """The three layers with random parameters."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) * d**-0.5, jnp.float32)

    heads = (d, HEADS, d // HEADS)
    attention = {"w_q": normal(*heads), "w_k": normal(*heads), "w_v": normal(*heads), "w_o": normal(*heads[1:], d)}
    gates = {"w_x": normal(d, 3 * d), "b_x": normal(3 * d), "w_h": normal(d, 3 * d), "b_h": normal(3 * d)}
    return {
        "self-attention": (self_attention, attention),
        "recurrent": (recurrent, gates),
        f"convolution, k = {KERNEL}": (convolution, {"w": normal(KERNEL, d, d)}),
    }


def measure(layer: Layer, params: Params, n: int, d: int, repeats: int) -> list[dict[str, Any]]:
    """One row for the forward pass and one for forward and backward."""

    def loss(params: Params, x: jax.Array) -> jax.Array:
        return (layer(params, x) ** 2).mean()

    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, n, d)), jnp.float32)
    rows = []
    for passes, function in (("forward", layer), ("forward and backward", jax.grad(loss, argnums=(0, 1)))):
        jaxpr = jax.make_jaxpr(function)(params, x)
        compiled = jax.jit(function).lower(params, x).compile()
        jax.block_until_ready(compiled(params, x))
        start = time.perf_counter()
        jax.block_until_ready(compiled(params, x))
        calls = max(1, round(LEAST_SECONDS / (time.perf_counter() - start)))
        wall, cpu = [], []
        for _ in range(repeats):
            before, start = _cpu_seconds(), time.perf_counter()
            for _ in range(calls):
                jax.block_until_ready(compiled(params, x))
            wall.append((time.perf_counter() - start) / calls)
            cpu.append((_cpu_seconds() - before) / calls)
        rows.append(
            {
                "passes": passes, "n": n, "work": work(jaxpr), "sequential_operations": sequential_operations(jaxpr),
                "seconds": statistics.median(wall), "least_seconds": min(wall), "cpu_seconds": statistics.median(cpu),
            }
        )  # fmt: skip
    return rows


def _cpu_seconds() -> float:
    """User time of all threads."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def measure_all(d: int, lengths: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Rows of every layer and n; the layers take turns at each n, so that a change of load meets all of them."""
    rows = []
    for n in lengths:
        for name, (layer, params) in make_layers(d).items():
            for row in measure(layer, params, n, d, repeats):
                rows.append({"layer": name, **row})
                print(
                    f"n={n:5} {name:18} {row['passes']:20} {row['seconds'] * 1e3:9.2f} ms wall"
                    f" {row['cpu_seconds'] * 1e3:9.2f} ms CPU {row['work']:.2e} FLOP"
                    f" {row['sequential_operations']:6} in sequence", flush=True,
                )  # fmt: skip
    return rows


def slope(rows: Sequence[dict[str, Any]], quantity: str) -> float:
    """The exponent of n between the last two lengths: 2 where twice the n takes four times as much."""
    before, last = rows[-2], rows[-1]
    ratio = last[quantity] / max(before[quantity], 1e-9)
    return float(np.log(max(ratio, 1e-9)) / np.log(last["n"] / before["n"]))


def draw(rows: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    """Four panels against n, both axes logarithmic; time as it passed, and as all threads used it."""
    from matplotlib.figure import Figure

    panels = [
        ("forward and backward", "work", "floating-point operations"),
        ("forward and backward", "sequential_operations", "operations in sequence"),
        ("forward", "cpu_seconds", "CPU seconds, forward (dotted: wall)"),
        ("forward and backward", "cpu_seconds", "CPU seconds, both passes (dotted: wall)"),
    ]
    figure = Figure(figsize=(9, 7), layout="constrained")
    for axes, (passes, quantity, label) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        for name in dict.fromkeys(row["layer"] for row in rows):
            mine = [row for row in rows if row["layer"] == name and row["passes"] == passes]
            n = [row["n"] for row in mine]
            (line,) = axes.plot(n, [row[quantity] for row in mine], marker="o", markersize=3, label=name)
            if quantity == "cpu_seconds":
                axes.plot(n, [row["seconds"] for row in mine], color=line.get_color(), linestyle=":", linewidth=1)
        axes.set(xscale="log", yscale="log", xlabel="positions n", title=label)
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.savefig(path, dpi=120)


def page(rows: Sequence[dict[str, Any]], facts: dict[str, Any]) -> str:
    """The Markdown page: the paper's table with what was found, and times."""
    paper = {"self-attention": ("n^2 d", "1"), "recurrent": ("n d^2", "n")}
    lines = [
        "# Table 1, measured", "",
        f"One layer of width d = {facts['d']} on one sentence of n positions, float32, {facts['device']}; medians of "
        f"{facts['repeats']} runs, load average {facts['load_average']:.1f} on {facts['processors']} processors: where "
        "that is more than the benchmark's own threads, CPU time is what can be compared and wall time is not. "
        "`python benchmarks/table1.py --output docs/results` makes this page. Exponents are of n, between the two "
        "largest: 1 is linear, 2 quadratic. That of self-attention lies between: its work is 4 n^2 d + 8 n d^2 with "
        "the projections, and the part that grows with n^2 is the larger above n = 2 d alone.", "",
        "| layer | work per layer, the paper | exponent of n in the work | operations in sequence, the paper | at the "
        "smallest and largest n, forward |", "|---|---|---|---|---|",
    ]  # fmt: skip
    names = list(dict.fromkeys(row["layer"] for row in rows))
    for name in names:
        forward = [row for row in rows if row["layer"] == name and row["passes"] == "forward"]
        complexity, sequence = paper.get(name, ("k n d^2", "1"))
        lines.append(
            f"| {name} | O({complexity}) | {slope(forward, 'work'):.2f} | O({sequence}) | "
            f"{forward[0]['sequential_operations']:,} and {forward[-1]['sequential_operations']:,} |"
        )
    for passes in ("forward", "forward and backward"):
        lines += ["", f"Milliseconds, {passes}: wall / CPU of all threads", ""]
        lengths = sorted({row["n"] for row in rows})
        lines += ["| layer | " + " | ".join(f"n = {n}" for n in lengths) + " |", "|---" * (len(lengths) + 1) + "|"]
        for name in names:
            mine = [row for row in rows if row["layer"] == name and row["passes"] == passes]
            cells = [f"{row['seconds'] * 1e3:.3g} / {row['cpu_seconds'] * 1e3:.3g}" for row in mine]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "![work, operations in sequence and time against n](table1.png)", ""])


def main() -> None:
    """Measures, and writes what --output asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2**i for i in range(4, 12)])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=pathlib.Path, help="a folder for table1.json, table1.png and table1.md")
    arguments = parser.parse_args()
    rows = measure_all(arguments.width, arguments.lengths, arguments.repeats)
    facts = {
        "d": arguments.width, "repeats": arguments.repeats, "device": jax.devices()[0].device_kind,
        "processors": os.cpu_count(), "load_average": os.getloadavg()[1], "jax": jax.__version__,
    }  # fmt: skip
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**facts, "rows": rows}, indent=1) + "\n"
        (arguments.output / "table1.json").write_text(text, encoding="utf-8")
        (arguments.output / "table1.md").write_text(page(rows, facts), encoding="utf-8")
        draw(rows, arguments.output / "table1.png")


if __name__ == "__main__":
    main()
