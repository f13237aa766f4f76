"""The text rules: where lines end, what is left off them, which of them are blank, and how bad files are refused."""

import gzip
import io

import pytest

from transformer_jax.data.text import is_blank, read_lines, split_lines
from transformer_jax.errors import UserError


def write(path, data):
    path.write_bytes(data)
    return path


def test_blank_lines_and_a_last_line_without_line_feed_are_lines(tmp_path):
    """T1: five lines stay five, empty ones and the unfinished last one too."""
    path = write(tmp_path / "in.txt", b"one\n\n   \nfour\n\nlast")
    assert list(read_lines(path)) == ["one", "", "   ", "four", "", "last"]


def test_an_empty_stream_has_no_lines():
    """T1: a 0-byte input gives a 0-line output."""
    assert list(split_lines(io.BytesIO(b""), "standard input")) == []
    assert list(split_lines(io.BytesIO(b"\xef\xbb\xbf"), "standard input")) == []


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\r"])
def test_only_a_line_feed_ends_a_line(tmp_path, separator):
    """T3: `str.splitlines` and text mode cut at each of these."""
    path = write(tmp_path / "in.txt", f"a{separator}b\nc\n".encode())
    assert list(read_lines(path)) == [f"a{separator}b", "c"]


def test_byte_order_mark_and_carriage_returns_of_windows_are_no_text(tmp_path):
    """T5: the same corpus as LF, CRLF and BOM + LF gives the same lines."""
    plain = "Straße\tx\n\nzwei\n".encode()
    variants = [plain, plain.replace(b"\n", b"\r\n"), b"\xef\xbb\xbf" + plain]
    lines = [list(read_lines(write(tmp_path / "in.txt", data))) for data in variants]
    assert lines[0] == ["Straße\tx", "", "zwei"]
    assert lines[1] == lines[0]
    assert lines[2] == lines[0]


def test_gzip_is_told_by_content_not_by_name(tmp_path):
    text = b"one\r\ntwo\n"
    assert list(read_lines(write(tmp_path / "in.txt.gz", gzip.compress(text)))) == ["one", "two"]
    assert list(read_lines(write(tmp_path / "named_plain.txt", gzip.compress(text)))) == ["one", "two"]
    assert list(read_lines(write(tmp_path / "unpacked.gz", text))) == ["one", "two"]


def test_reading_streams():
    """A line is there before the next one is asked for."""

    def stream():
        yield b"first\n"
        raise AssertionError("read ahead")

    assert next(split_lines(stream(), "stream")) == "first"


def test_invalid_utf8_is_refused_with_file_and_line(tmp_path):
    path = write(tmp_path / "latin1.txt", "gut\nStra\xdfe\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin1\.txt, line 2: byte 5 \(0xdf\) is not UTF-8"):
        list(read_lines(path))


def test_missing_empty_and_damaged_files_are_refused_by_name(tmp_path):
    packed = gzip.compress(b"one\ntwo\n" * 1000)
    with pytest.raises(UserError, match=r"none\.txt: cannot be read \(No such file"):
        list(read_lines(tmp_path / "none.txt"))
    with pytest.raises(UserError, match="cannot be read"):
        list(read_lines(tmp_path))
    with pytest.raises(UserError, match=r"empty\.txt: holds no text"):
        list(read_lines(write(tmp_path / "empty.txt", b"")))
    with pytest.raises(UserError, match=r"cut\.gz: damaged gzip"):
        list(read_lines(write(tmp_path / "cut.gz", packed[:-12])))
    with pytest.raises(UserError, match=r"flipped\.gz: damaged gzip"):
        list(read_lines(write(tmp_path / "flipped.gz", packed[:-6] + b"\xff" + packed[-5:])))


@pytest.mark.parametrize("line", ["", "   ", "\t\u00a0\u3000", "\u200b\u200d\u2060", "\0\x01\x7f", "\ufeff", "\ufe0f"])
def test_lines_that_show_nothing_are_blank(line):
    """T1: an invisible line in is a blank line out."""
    assert is_blank(line)


@pytest.mark.parametrize("line", ["a", " . ", "\u200b字", "\0-", "😀", "\ufffd"])
def test_lines_that_show_something_are_not_blank(line):
    assert not is_blank(line)
