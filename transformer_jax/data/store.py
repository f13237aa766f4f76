"""Tokenized text on disk: flat arrays of ids with offsets, memory-mapped, so that 36 million pairs need no memory.

A store is a folder of four arrays and a header. Its name is a digest of the text, the tokenizer and the format, so that
changed text or another tokenizer can never meet old ids, and the same text is tokenized once.
"""

import contextlib
import hashlib
import json
import logging
import operator
import os
import pathlib
import shutil
import time
from collections.abc import Callable
from itertools import islice
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from transformer_jax.data.encoding import Side, encode_pairs, id_type
from transformer_jax.data.parallel_text import ParallelText
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.data.workplace import alone_in, processors
from transformer_jax.errors import UserError

_log = logging.getLogger(__name__)

_FORMAT = 1  # part of the key: raise it when the files or the text rule change
_HEADER = "header.json"
_PROGRESS = "progress.json"
_SIDES = ("source", "target")
# Seconds of work that a kill may cost; each commit waits for the disk.
_COMMIT_SECONDS = 5.0
# Sentences whose lengths are computed at a time, so that nothing else of the text's size is ever in memory.
_BLOCK = 1 << 20


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
            self._lengths = np.empty((len(self), 2), np.int32)
            for side, offsets in enumerate((self.source_offsets, self.target_offsets)):
                for start in range(0, len(self), _BLOCK):
                    block = offsets[start : start + _BLOCK + 1]
                    self._lengths[start : start + _BLOCK, side] = np.diff(block)
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
    processes: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> TokenStore:
    """Tokenizes a text into a sub-folder of `folder`, or opens what an earlier call left there.

    The sub-folder appears whole or not at all, so a killed or failed build leaves nothing that could be mistaken for a
    store; the next call goes on where it was. A process that finds another at work on the same text waits for it. A
    damaged store is rebuilt, with a warning.

    Args:
        text: the pairs; all are kept.
        tokenizer: gives the ids.
        folder: holds the stores of any number of texts; created when missing.
        processes: how many tokenize, where there is work for them. None: one for each processor.
        on_progress: called now and then with the number of pairs done so far.

    Raises:
        UserError: what reading the text raises, the text changed meanwhile, or the folder cannot be written.
    """
    folder = pathlib.Path(folder)
    digest = text.digest()
    key = hashlib.sha256(f"{_FORMAT} {digest} {tokenizer.digest}".encode()).hexdigest()[:24]
    final = folder / f"tokens-{key}"
    with contextlib.suppress(UserError):
        if final.exists():
            return TokenStore(final)
    try:
        with alone_in(folder / f".unfinished-{key}") as workplace:
            if final.exists():
                try:
                    return TokenStore(final)  # made by the process that was waited for
                except UserError as error:
                    _log.warning("%s; it is rebuilt now", str(error).split(";")[0])
                    shutil.rmtree(final, ignore_errors=True)
            try:
                _write(text, tokenizer, workplace, processes or processors(), on_progress)
                if _is_other(text, digest):
                    raise UserError(f"{text.name} changed while it was tokenized; run the command again")
            except UserError:
                if _is_other(text, digest):  # else the next call goes on with what is there
                    shutil.rmtree(workplace, ignore_errors=True)
                raise
            try:
                workplace.rename(final)
            except OSError:
                if not final.exists():  # else another process, where nothing can be locked, was first
                    raise
            return TokenStore(final)
    except OSError as error:
        raise UserError(
            f"tokenized text cannot be written to {folder} ({error.strerror or error}); "
            "make room there, or set data.cache_dir to another folder"
        ) from error


def _is_other(text: ParallelText, digest: str) -> bool:
    try:
        return text.digest() != digest
    except UserError:  # it cannot be read now
        return False


def _write(
    text: ParallelText,
    tokenizer: Tokenizer,
    folder: pathlib.Path,
    processes: int,
    on_progress: Callable[[int], None] | None,
) -> None:
    dtype = id_type(tokenizer)
    begun = _progress(folder, dtype)
    writers = [_SideWriter(folder, side, dtype, begun["pairs"], begun[f"{side}_tokens"]) for side in _SIDES]
    committed = time.monotonic()

    def commit(name: str, **facts: object) -> None:
        for writer in writers:
            writer.flush()
        tokens = {f"{side}_tokens": writer.tokens for side, writer in zip(_SIDES, writers, strict=True)}
        unfinished = folder / f"{name}.new"
        with unfinished.open("w", encoding="utf-8") as file:
            json.dump({**facts, "pairs": writers[0].sentences, **tokens}, file, indent=2, ensure_ascii=False)
            _flush(file)
        unfinished.replace(folder / name)

    try:
        for sides in encode_pairs(islice(text, begun["pairs"], None), tokenizer, processes):
            for writer, side in zip(writers, sides, strict=True):
                writer.add(side)
            if on_progress is not None:
                on_progress(writers[0].sentences)
            if time.monotonic() - committed > _COMMIT_SECONDS:
                commit(_PROGRESS)
                committed = time.monotonic()
        commit(_HEADER, text=text.name, format=_FORMAT, dtype=dtype.name)
    finally:
        for writer in writers:
            writer.close()
    (folder / _PROGRESS).unlink(missing_ok=True)


def _progress(folder: pathlib.Path, dtype: np.dtype[Any]) -> dict[str, int]:
    """Pairs and tokens that an earlier call has safely written; all 0 where there is nothing to go on from."""
    names = ("pairs", *(f"{side}_tokens" for side in _SIDES))
    try:
        found = json.loads((folder / _PROGRESS).read_text(encoding="utf-8"))
        begun = {name: int(found[name]) for name in names}
        for side in _SIDES:
            ids, offsets = ((folder / f"{side}_{kind}").stat().st_size for kind in ("ids", "offsets"))
            if ids < begun[f"{side}_tokens"] * dtype.itemsize or offsets < (begun["pairs"] + 1) * 8:
                raise ValueError("files are shorter than they were")
    except (OSError, ValueError, KeyError, TypeError):
        return dict.fromkeys(names, 0)
    return begun


class _SideWriter:
    """Appends sentences of one side to its two files, after what `sentences` and `tokens` say they hold already."""

    def __init__(self, folder: pathlib.Path, side: str, dtype: np.dtype[Any], sentences: int, tokens: int) -> None:
        self.sentences = sentences
        self.tokens = tokens
        self._ids = _open_at(folder / f"{side}_ids", tokens * dtype.itemsize)
        self._offsets = _open_at(folder / f"{side}_offsets", (sentences + 1) * 8 if sentences else 0)
        if not sentences:
            self._offsets.write(np.zeros(1, np.int64).tobytes())

    def add(self, side: Side) -> None:
        offsets = self.tokens + np.cumsum(side.lengths)
        self._offsets.write(offsets.tobytes())
        self._ids.write(side.ids.tobytes())
        self.sentences += len(offsets)
        self.tokens = int(offsets[-1])

    def flush(self) -> None:
        for file in (self._ids, self._offsets):
            _flush(file)

    def close(self) -> None:
        for file in (self._ids, self._offsets):
            file.close()


def _open_at(path: pathlib.Path, size: int) -> BinaryIO:
    """The file, cut to `size` bytes and positioned there."""
    file = path.open("r+b" if path.exists() else "w+b")
    file.truncate(size)
    file.seek(size)
    return file


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
