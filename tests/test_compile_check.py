"""compile-check: the roofline's arithmetic, mistakes, and the command itself where libtpu is installed."""

import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
from small_programs import LOOP, ROW_BYTES

from transformer_jax.cli.compile_check import page
from transformer_jax.cli.main import main
from transformer_jax.compile_check import programs
from transformer_jax.compile_check.collectives import Collective
from transformer_jax.compile_check.costs import Operation, Program, program_costs
from transformer_jax.compile_check.hlo import parse
from transformer_jax.compile_check.products import Product
from transformer_jax.compile_check.roofline import HOP_SECONDS, estimate, exchange_seconds
from transformer_jax.errors import UserError
from transformer_jax.parallel.chips import CHIPS, Slice, find_slice

ROOT = pathlib.Path(__file__).parent.parent
BASE = str(ROOT / "configs" / "base.py")
V5E = find_slice("v5e:2x4")
PLACES = [(x, y) for x in range(2) for y in range(4)]


def test_an_exchange_is_hidden_by_the_work_between_its_start_and_its_end():
    whole = estimate(program_costs(parse(LOOP)), V5E, PLACES)
    [exchange] = whole.exchanges
    assert (exchange.kind, exchange.count, exchange.bytes) == ("all-reduce", 4, 4 * ROW_BYTES)
    hidden = 2 * ROW_BYTES / 819e9  # the negation's bytes
    assert exchange.overlapped_seconds == pytest.approx(4 * hidden)
    assert whole.exposed_seconds == pytest.approx(exchange.seconds - 4 * hidden)
    at_once = estimate(program_costs(parse(LOOP.replace("all-reduce-start", "all-reduce"))), V5E, PLACES)
    assert at_once.exchanges[0].overlapped_seconds == 0 and at_once.seconds > whole.seconds


# The roofline -------------------------------------------------------------------------------------------------------


def all_reduce(group, size=9_000_000):
    return Collective("all-reduce", tuple(group), size, size)


def test_an_all_reduce_uses_the_links_of_the_axes_it_spans():
    """v5e's link: 45 GB/s one way. A line has one link inwards, a ring two, and axes work side by side."""
    line = exchange_seconds(all_reduce(range(4)), V5E, PLACES)  # the 4 chips of one row
    assert line == pytest.approx(2 * (9e6 * 3 / 4 / 45e9 + 3 * HOP_SECONDS))
    both = exchange_seconds(all_reduce(range(8)), V5E, PLACES)
    assert both == pytest.approx(2 * (9e6 * 7 / 8 / 90e9 + 4 * HOP_SECONDS))
    pod = find_slice("v5e:16x16")
    places = [(x, y) for x in range(16) for y in range(16)]
    ring = exchange_seconds(all_reduce(range(16)), pod, places)
    assert ring == pytest.approx(2 * (9e6 * 15 / 16 / 90e9 + 8 * HOP_SECONDS))
    every = exchange_seconds(all_reduce(range(256)), pod, places)
    assert every == pytest.approx(2 * (9e6 * 255 / 256 / 180e9 + 16 * HOP_SECONDS))
    # Every fourth chip of a row: a ring over links that it shares with three other groups.
    spread = exchange_seconds(all_reduce(range(0, 16, 4)), pod, places)
    assert spread == pytest.approx(2 * (9e6 * 3 / 4 / (90e9 / 4) + 8 * HOP_SECONDS))
    gather = exchange_seconds(Collective("all-gather", tuple(range(8)), 1, 9_000_000), V5E, PLACES)
    assert gather == pytest.approx(both / 2)


def test_a_group_within_one_chip_exchanges_nothing_over_links():
    v3 = find_slice("v3:2x2")
    places = [(x, y) for x in range(2) for y in range(2) for _ in range(2)]
    assert exchange_seconds(all_reduce((0, 1)), v3, places) == 0
    assert exchange_seconds(all_reduce(range(8)), v3, places) > 0


def test_each_operation_takes_what_its_slowest_resource_takes():
    chip = V5E.chip
    product = Operation("p", "fusion", "", 3, "main", products=(Product("bf16", 1, 1024, 1024, 1024),), hbm_bytes=1)
    copy = Operation("c", "copy", "", 2, "main", hbm_bytes=819_000_000)
    found = estimate(Program((product, copy), ()), V5E, PLACES)
    assert found.matrix_seconds == pytest.approx(3 * 2 * 1024**3 / chip.flops)
    assert found.seconds == pytest.approx(found.matrix_seconds + 2e-3)
    assert found.bound == "memory" and found.flops == 3 * 2 * 1024**3
    # A copy in the background is free until HBM cannot serve it as well.
    behind = dataclasses.replace(copy, opcode="copy-start", starts="c")
    assert estimate(Program((product, behind), ()), V5E, PLACES).seconds == pytest.approx(2e-3, rel=1e-6)


def test_published_figures_of_the_chips():
    """Peak bf16 TFLOP/s, HBM GB/s and the chip's links one way, as Google's pages and the scaling book print them."""
    printed = {name: (chip.flops / 1e12, chip.hbm_bandwidth / 1e9, chip.link_bandwidth / 1e9)
               for name, chip in CHIPS.items()}  # fmt: skip
    assert printed == {
        "v3": (123, 900, 100), "v4": (275, 1200, 45), "v5e": (197, 819, 45), "v5p": (459, 2765, 90),
        "v6e": (918, 1638, 90),
    }  # fmt: skip
    assert all(Slice(chip, tuple(map(int, size.split("x")))).chips <= 256
               for chip in CHIPS.values() for size in chip.topologies)  # fmt: skip


def test_rings_close_where_the_slice_lets_them():
    assert [find_slice("v5e:8x16").closed(axis) for axis in (0, 1)] == [False, True]
    assert find_slice("v5p:4x4x8").closed(0) and not find_slice("v4:2x2x4").closed(2)


# Mistakes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("v5:2x4", "did you mean 'v5"),
        ("v5e:2x5", "v5e:2x4"),
        ("v5p:4x4", "v5p:2x2x4"),
        ("v5e", "there are: v5e:1x1"),
        ("h100:8", "there are: v3, v4, v5e, v5p, v6e"),
    ],
)
def test_an_unknown_topology_names_the_nearest(topology, message, capsys):
    assert main(["compile-check", BASE, "--topology", topology]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_without_libtpu_one_line_tells_the_extra(monkeypatch, capsys):
    monkeypatch.setattr(programs.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    assert main(["compile-check", BASE, "--topology", "v5e:2x4"]) == 2
    assert capsys.readouterr().err == (
        "error: compile-check needs libtpu: in the project's folder, pip install -e '.[tpu-check]'\n"
    )


def test_a_mesh_that_does_not_divide_the_slice_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(programs, "devices_of", lambda where: [object()] * where.chips)
    assert main(["compile-check", BASE, "--topology", "v5e:2x4", "--mesh.tensor", "3"]) == 2
    error = capsys.readouterr().err
    assert "mesh.tensor 3" in error and error.count("\n") == 1


def test_a_program_that_does_not_fit_says_how_much_it_needs():
    def lower():
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 20.51G "
            "of 15.75G hbm. Exceeded hbm capacity by 4.76G."
        )

    with pytest.raises(UserError, match=r"does not fit v5e:2x4: it needs 20\.51G of 15\.75G"):
        programs._compile(lower, V5E)


def test_full_rows_are_a_multiple_of_the_devices_that_share_them():
    config = programs.Config()
    assert programs.training_shape(config, 1) == (97, 256)
    assert programs.training_shape(config, 8) == (104, 256)
    assert programs.training_shape(config, 256) == (256, 256)


# The whole command ---------------------------------------------------------------------------------------------------


def test_the_page_says_what_the_report_holds():
    found = estimate(program_costs(parse(LOOP)), V5E, PLACES)
    memory = programs.Memory(2**30, 0, 2**31, 0, 2**34)
    report = programs.Report(
        "train", "v5e:2x4", {"data": 8, "fsdp": 1, "tensor": 1}, 104, 256, 256, memory, found, 10**12, 1e6, 0.25,
        ("search",), 1.0,
    )  # fmt: skip
    text = page(report)
    assert "train on v5e:2x4 (data 8, fsdp 1, tensor 1): 104 rows" in text
    assert "3.00 of 16.00 GiB" in text and "4 of 0.13 MB together" in text and "25.0% of peak" in text


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (extra tpu-check)")
def test_the_real_train_step_and_translate_function_compile_for_a_tpu(tmp_path):
    """In a process of its own: libtpu stays loaded."""
    changes = (
        "--model.d-model 128 --model.d-ff 256 --model.num-heads 2 --model.encoder-layers 3 --model.decoder-layers 3 "
        "--model.vocab-size 512 --data.batch-tokens 1024 --data.max-length 128 --search.batch-tokens 64"
    )
    result = subprocess.run(
        [sys.executable, "-m", "transformer_jax.cli.main", "compile-check", BASE, "--topology", "v5e:2x2", "--json",
         *changes.split()],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    train, translate = (SimpleNamespace(**json.loads(line)) for line in result.stdout.strip().split("\n"))
    assert train.program == "train" and translate.program == "translate"
    # Four devices, no recomputation: the program's products are the model's, and no more.
    assert train.estimate["flops"] * 4 == pytest.approx(train.model_flops, rel=0.02)
    assert train.compiler_flops < train.estimate["flops"] < train.estimate["padded_flops"]
    assert {each["kind"] for each in train.estimate["exchanges"]} == {"all-reduce"}
    # Beside the parameters there are Adam's two moments; batches are small.
    assert train.memory["arguments"] == pytest.approx(3 * translate.memory["arguments"], rel=0.01)
    assert translate.open_loops and not train.open_loops
    # Each device searches for itself: what is sent is the result, not something in each of the 32 steps.
    assert 0 < sum(each["count"] for each in translate.estimate["exchanges"]) < 10
