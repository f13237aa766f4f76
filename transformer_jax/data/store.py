"""Tokenized text on disk: flat arrays of ids with offsets, memory-mapped, so that 36 million pairs need no memory.

A store is a folder of four arrays and a header. Its name is a digest of the text, the tokenizer and the format, so that
changed text or another tokenizer can never meet old ids, and the same text is tokenized once.
"""

import hashlib
import json
import logging
import operator
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transformer_jax.data.parallel_text import ParallelText
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import UserError

_log = logging.getLogger(__name__)

_FORMAT = 1  # part of the key: raise it when the files or the text rule change
_HEADER = "header.json"
_SIDES = ("source", "target")
# Pairs tokenized at a time: some 10 MB, and enough to keep every processor busy.
_CHUNK_PAIRS = 10_000


class TokenStore:
    """The ids of a parallel text, in its order: example i is pair i of the text, blank or over-long ones included.

    Arrays are read-only views of the files; opening takes milliseconds at any size. Pickling sends the folder's name.

    Attributes:
        folder: where the files lie.
        source_ids: all source ids in one array, each sentence ending with EOS; uint16, int32 above 65,536 pieces.
        source_offsets: [n + 1] int64, sentence i is `source_ids[source_offsets[i]:source_offsets[i + 1]]`.
        target_ids: as source_ids.
        target_offsets: as source_offsets.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Opens a store that `build_store` wrote.

        Raises:
            UserError: no store there, or a file whose size is not what the header says.
        """
        self.folder = pathlib.Path(folder)
        try:
            header = json.loads((self.folder / _HEADER).read_text(encoding="utf-8"))
            pairs = header["pairs"]
            self.source_ids = _map(self.folder / "source_ids", header["dtype"], header["source_tokens"])
            self.source_offsets = _map(self.folder / "source_offsets", "int64", pairs + 1)
            self.target_ids = _map(self.folder / "target_ids", header["dtype"], header["target_tokens"])
            self.target_offsets = _map(self.folder / "target_offsets", "int64", pairs + 1)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{folder}: no sound tokenized text ({error}); remove the folder to have it rebuilt"
            ) from error
        self._lengths: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        """The number of pairs."""
        return len(self.source_offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int32]:
        """[n, 2], pieces of source and target, EOS counted."""
        if self._lengths is None:
            sides = [np.diff(self.source_offsets), np.diff(self.target_offsets)]
            self._lengths = np.stack(sides, axis=1).astype(np.int32)
        return self._lengths

    def source(self, index: int) -> NDArray[Any]:
        """Source ids of example `index`, 1-D, EOS last."""
        return _row(self.source_ids, self.source_offsets, index)

    def target(self, index: int) -> NDArray[Any]:
        """Target ids of example `index`, 1-D, EOS last."""
        return _row(self.target_ids, self.target_offsets, index)

    def __reduce__(self) -> tuple[type["TokenStore"], tuple[pathlib.Path]]:
        """Pickles as the folder's name."""
        return TokenStore, (self.folder,)


def build_store(
    text: ParallelText,
    tokenizer: Tokenizer,
    folder: str | os.PathLike[str],
    *,
    on_progress: Callable[[int], None] | None = None,
) -> TokenStore:
    """Tokenizes a text into a sub-folder of `folder`, or opens what an earlier call left there.

    The sub-folder appears whole or not at all, so a killed build leaves nothing that could be mistaken for a store, and
    processes that build the same text at once do not disturb one another. A damaged store is rebuilt, with a warning.

    Args:
        text: the pairs; all are kept.
        tokenizer: gives the ids.
        folder: holds the stores of any number of texts; created when missing.
        on_progress: called now and then with the number of pairs done so far.

    Raises:
        UserError: what reading the text raises, or the folder cannot be written.
    """
    folder = pathlib.Path(folder)
    final = folder / f"tokens-{_key(text, tokenizer)[:24]}"
    if final.exists():
        try:
            return TokenStore(final)
        except UserError as error:
            _log.warning("%s; it is rebuilt now", str(error).split(";")[0])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder, ignore_cleanup_errors=True) as workplace:
            built = pathlib.Path(workplace, "store")
            built.mkdir()
            _write(text, tokenizer, built, on_progress)
            return _install(built, final)
    except OSError as error:
        raise UserError(
            f"tokenized text cannot be written to {folder} ({error.strerror or error}); "
            "make room there, or set data.cache_dir to another folder"
        ) from error


def _key(text: ParallelText, tokenizer: Tokenizer) -> str:
    return hashlib.sha256(f"{_FORMAT} {text.digest()} {tokenizer.digest}".encode()).hexdigest()


def _write(
    text: ParallelText, tokenizer: Tokenizer, folder: pathlib.Path, on_progress: Callable[[int], None] | None
) -> None:
    dtype = np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.int32)
    writers = [_SideWriter(folder, side, dtype) for side in _SIDES]
    try:
        for chunk in _chunks(text):
            for writer, sentences in zip(writers, zip(*chunk, strict=True), strict=True):
                writer.add(tokenizer.encode(sentences))
            if on_progress is not None:
                on_progress(writers[0].sentences)
    finally:
        for writer in writers:
            writer.close()
    header = {
        "text": text.name,
        "format": _FORMAT,
        "pairs": writers[0].sentences,
        "dtype": dtype.name,
        "source_tokens": writers[0].tokens,
        "target_tokens": writers[1].tokens,
    }
    with (folder / _HEADER).open("w", encoding="utf-8") as file:
        json.dump(header, file, indent=2, ensure_ascii=False)
        _flush(file)


class _SideWriter:
    """Appends sentences of one side to its two files."""

    def __init__(self, folder: pathlib.Path, side: str, dtype: np.dtype[Any]) -> None:
        self.sentences = 0
        self.tokens = 0
        self._dtype = dtype
        self._ids = (folder / f"{side}_ids").open("wb")
        self._offsets = (folder / f"{side}_offsets").open("wb")
        self._offsets.write(np.zeros(1, np.int64).tobytes())

    def add(self, sentences: Sequence[Sequence[int]]) -> None:
        lengths = np.fromiter(map(len, sentences), np.int64, len(sentences))
        offsets = self.tokens + np.cumsum(lengths)
        self._offsets.write(offsets.tobytes())
        self._ids.write(np.fromiter(chain.from_iterable(sentences), self._dtype, lengths.sum()).tobytes())
        self.sentences += len(sentences)
        self.tokens = int(offsets[-1])

    def close(self) -> None:
        for file in (self._ids, self._offsets):
            _flush(file)
            file.close()


def _install(built: pathlib.Path, final: pathlib.Path) -> TokenStore:
    """Moves a finished store to its place, unless another process was first with a sound one."""
    for attempt in range(2):
        try:
            built.rename(final)  # fails where `final` is a folder with content
        except OSError:
            if attempt == 1:
                raise
            try:
                return TokenStore(final)
            except UserError:
                # Damaged, or another process is moving it aside just now; then there is nothing left to move.
                shutil.rmtree(final, ignore_errors=True)
        else:
            return TokenStore(final)
    raise AssertionError("unreachable: the second attempt returns or raises")


def _chunks(text: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    pairs = iter(text)
    while chunk := list(islice(pairs, _CHUNK_PAIRS)):
        yield chunk


def _map(path: pathlib.Path, dtype: str, count: int) -> NDArray[Any]:
    expected = count * np.dtype(dtype).itemsize
    size = path.stat().st_size
    if size != expected:
        raise ValueError(f"{path.name} has {size} bytes where {expected} were written")
    if count == 0:  # nothing to map
        return np.zeros(0, dtype)
    # A plain ndarray over the mapping: slicing numpy.memmap itself is several times slower.
    return np.memmap(path, dtype, mode="r", shape=(count,)).view(np.ndarray)


def _row(ids: NDArray[Any], offsets: NDArray[np.int64], index: int) -> NDArray[Any]:
    index = operator.index(index)
    if not 0 <= index < len(offsets) - 1:
        raise IndexError(f"example {index} of {len(offsets) - 1}")
    return ids[offsets[index] : offsets[index + 1]]


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
