"""Text in and out of the commands: one line is what lies between newlines, UTF-8 whatever the locale."""

import itertools
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator

from transformer_jax.data.text import read_lines, split_lines
from transformer_jax.errors import UserError


def read_input(path: str | None) -> Iterator[str]:
    """The lines of a file, or of standard input where `path` is None, one at a time; none at all where it is empty.

    Raises:
        UserError: the file cannot be read (at the call), or a line is not UTF-8 (when it is reached).
    """
    if path is not None:
        # `read_lines` refuses an empty file, since training needs text; to translate nothing is no mistake.
        file = pathlib.Path(path)
        if file.is_file() and file.stat().st_size == 0:
            return iter(())
        lines = read_lines(path)
        return itertools.chain([next(lines)], lines)
    if sys.stdin is None:
        raise UserError("standard input is closed; give --input FILE")
    if sys.stdin.isatty():
        print("reading sentences from the terminal; end with Ctrl-D on a line of its own", file=sys.stderr)
    return split_lines(sys.stdin.buffer, "standard input")


def read_pairs(source: str, target: str) -> tuple[list[str], list[str]]:
    """Two files line by line.

    Raises:
        UserError: they differ in their number of lines (names both files and both counts), or cannot be read.
    """
    sources, targets = list(read_lines(source)), list(read_lines(target))
    if len(sources) != len(targets):
        raise UserError(f"{source} has {len(sources)} lines but {target} has {len(targets)}; they must go line by line")
    return sources, targets


def check_output(path: str | None, *inputs: str | None) -> None:
    """Refuse an output file that cannot be written, or that is an input, before the work is done, not after it.

    An input of None is standard input.
    """
    if path is None:
        if sys.stdout is None:
            raise UserError("standard output is closed; give --output FILE")
        return
    if pathlib.Path(path).exists() and any(_same_file(path, name) for name in inputs):
        raise UserError(f"--output {path} is an input, which would be lost; name another file")
    if pathlib.Path(path).is_dir():
        raise UserError(f"--output {path} is a folder; name a file")
    if not pathlib.Path(path).parent.is_dir():
        raise UserError(f"--output {path}: there is no folder {str(pathlib.Path(path).parent)!r}; create it first")


def _same_file(path: str, input_path: str | None) -> bool:
    try:
        status = os.stat(input_path) if input_path is not None else os.fstat(0)
    except OSError:  # no such input: whoever reads it says so
        return False
    return os.path.samestat(os.stat(path), status)


def write_lines(path: str | None, lines: Iterable[str]) -> None:
    """Write each line and a newline as UTF-8 bytes, to a file or to standard output where `path` is None.

    Each line is handed over as it comes, so that a reader need not wait and an end by force loses none of them. A file
    that is there already is not touched before the first line is.
    """
    lines = iter(lines)
    lines = itertools.chain([first for first in itertools.islice(lines, 1)], lines)
    if path is None:
        sys.stdout.flush()
        for line in lines:
            sys.stdout.buffer.write(line.encode() + b"\n")
            sys.stdout.buffer.flush()
        return
    try:
        with open(path, "wb", buffering=0) as file:
            for line in lines:
                file.write(line.encode() + b"\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
