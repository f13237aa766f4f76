"""The text rules: what a line is, and which lines count as blank. Every command reads text through here.

One line is what lies between line feeds, and nothing else ends one: not U+2028, not U+0085, not a lone carriage return.
(`str.splitlines` and Python's text mode cut there too, and so shift source against target.) A byte order mark before
the first line and one carriage return at the end of a line (Windows) are not part of the text.
"""

import codecs
import contextlib
import gzip
import io
import os
import unicodedata
import zlib
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from transformer_jax.errors import UserError

_GZIP_MAGIC = b"\x1f\x8b"

# Characters that show nothing although Unicode files them under letters, marks or symbols: combining grapheme joiner,
# Hangul fillers, Khmer inherent vowels, Mongolian and general variation selectors, the empty Braille pattern; and
# U+2581, which SentencePiece uses for the space.
_INVISIBLE = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2581\u2800\u3164\uffa0"
    + "".join(map(chr, range(0xFE00, 0xFE10)))
)


def is_blank(line: str) -> bool:
    """Whether a line shows nothing: empty, or only spaces, control, zero-width and other invisible characters."""
    return all(
        char.isspace() or char in _INVISIBLE or unicodedata.category(char) in ("Cc", "Cf")  # control, format
        for char in line
    )


def split_lines(stream: Iterable[bytes], name: str) -> Iterator[str]:
    """The lines of a binary stream, one at a time, without their ends.

    Args:
        stream: a file opened in binary mode or `sys.stdin.buffer`: its iteration ends lines at line feeds only.
        name: what messages call the stream.

    Raises:
        UserError: a line is not UTF-8; the message has its number.
    """
    for number, raw in enumerate(stream, start=1):
        if number == 1:
            raw = raw.removeprefix(codecs.BOM_UTF8)
            if not raw:  # nothing but the byte order mark: no line
                return
        try:
            line = raw.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{name}, line {number}: byte {error.start + 1} (0x{raw[error.start]:02x}) is not UTF-8; "
                "convert the text to UTF-8, say with iconv"
            ) from None
        yield line


def read_lines(path: str | os.PathLike[str]) -> Iterator[str]:
    """The lines of a text file, plain or gzip (told by its content), one at a time.

    Raises:
        UserError: the file is missing, unreadable, empty, damaged or not UTF-8.
    """
    name = os.fspath(path)
    empty = True
    try:
        with _open(name) as stream:
            for line in split_lines(stream, name):
                empty = False
                yield line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{name}: damaged gzip file ({error}); fetch or compress it again") from error
    except OSError as error:
        raise UserError(f"{name}: cannot be read ({error.strerror or error}); check the path") from error
    if empty:
        raise UserError(f"{name}: holds no text; check that it was written completely")


@contextlib.contextmanager
def _open(name: str) -> Iterator[BinaryIO]:
    with open(name, "rb") as raw:
        if raw.peek(2)[:2] == _GZIP_MAGIC:
            with gzip.GzipFile(fileobj=raw) as unpacked, io.BufferedReader(unpacked) as buffered:
                yield buffered
        else:
            yield raw
