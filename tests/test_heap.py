"""The C library's memory: kept for the next update, and given back where checkpoints are averaged."""

import os
import pathlib
import subprocess
import sys

import pytest

from transformer_jax.cli import main as program

MEASURE = """
import resource, threading
from transformer_jax import heap

BLOCK = 100 << 20  # more than the 32 MiB up to which glibc keeps blocks by itself

def pages_touched():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    b"x" * BLOCK
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def in_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(pages_touched()))
    thread.start()
    thread.join()
    return found[0]
"""


def measured(code: str, **environment: str) -> list[int]:
    """The numbers that a fresh process prints."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE + code], env=clean | environment, capture_output=True, text=True, check=True
    )
    return [int(word) for word in done.stdout.split()]


HUGE_PAGES = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")

glibc = pytest.mark.skipif(
    sys.platform != "linux"
    or len(os.sched_getaffinity(0)) > 16
    or (HUGE_PAGES.exists() and "[always]" in HUGE_PAGES.read_text(encoding="ascii")),
    reason="glibc's settings, made up to 16 processors, and seen by pages of 4 KiB",
)


@glibc
def test_a_kept_block_is_handed_out_again_without_new_pages_whichever_thread_asks():
    first, again, in_thread = measured(
        "heap.keep_freed_blocks(); print(pages_touched(), pages_touched(), in_a_thread())"
    )
    assert first > 20_000  # of 4 KiB: the measurement sees them
    assert again < 500
    assert in_thread < 500


@glibc
def test_without_it_every_block_of_this_size_is_mapped_anew():
    assert min(measured("print(pages_touched(), pages_touched(), in_a_thread())")) > 20_000


@glibc
def test_settings_of_the_user_stand():
    found = measured("heap.keep_freed_blocks(); print(pages_touched(), pages_touched())", MALLOC_ARENA_MAX="2")
    assert min(found) > 20_000


@glibc
def test_averaging_gives_blocks_back_and_afterwards_they_are_kept_again():
    code = """
heap.keep_freed_blocks()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
before = resident()
with heap.freed_blocks_given_back():
    pages_touched()
    print(resident() - before)
pages_touched()
print(pages_touched())
"""
    left, again = measured(code)
    assert left < 20 << 20
    assert again < 500


@pytest.mark.parametrize(("command", "keeps"), [("train", True), ("ablate", True), ("translate", False)])
def test_a_program_that_trains_keeps_blocks_and_the_function_leaves_the_process_alone(
    command, keeps, monkeypatch, capsys
):
    kept = []
    monkeypatch.setattr(program, "keep_freed_blocks", lambda: kept.append(True))
    monkeypatch.setattr(program, "_dispatch", lambda argv: None)
    assert program.main([command]) == 0
    assert not kept
    with pytest.raises(SystemExit):
        program.run_and_exit([command])
    assert bool(kept) is keeps
