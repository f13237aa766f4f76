"""TensorFlow Datasets as parallel text, read from ArrayRecord files without TensorFlow."""

import contextlib
import hashlib
import html
import importlib.util
import itertools
import logging
import os
import pathlib
import re
import time
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformer_jax.data.parallel_text import ParallelText
from transformer_jax.data.wmt14 import fault_in_files
from transformer_jax.data.workplace import alone_in
from transformer_jax.errors import UserError

_BLOCK = 4000


@dataclass(frozen=True)
class TfdsSplit(ParallelText):
    """One split of a translation dataset.

    HTML entities become the characters they stand for (newstest2014 writes `&quot;` and `&amp;`), and a line feed
    inside a sentence becomes a space, so that one sentence is one line.
    """

    builder: Any
    split: str
    source_language: str
    target_language: str

    @property
    def name(self) -> str:
        """The dataset's full name and the split."""
        return f"tfds:{self.builder.info.full_name} {self.split}"

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """The pairs in the order of the files, which preparation shuffled once and for all."""
        from tensorflow_datasets.proto import tf_example_pb2

        for record in itertools.chain.from_iterable(self._blocks(range(self._count))):
            features = tf_example_pb2.Example.FromString(record).features.feature
            source, target = (features[side].bytes_list for side in (self.source_language, self.target_language))
            yield _sentence(source.value[0]), _sentence(target.value[0])

    def check(self) -> int:
        """The number of pairs; the first and the last are read, as a file may be missing, or cut."""
        for _ in self._blocks(range(0, self._count, max(self._count - 1, 1))):
            pass
        return self._count

    def digest(self) -> str:
        """Digest of the dataset's name, version and size, the split and the languages: a version's content is fixed."""
        info = self.builder.info.splits[self.split]
        parts = (self.name, info.num_examples, info.num_bytes, self.source_language, self.target_language)
        return hashlib.sha256(repr(parts).encode("utf-8")).hexdigest()

    @property
    def _count(self) -> int:
        return int(self.builder.info.splits[self.split].num_examples)

    def _blocks(self, indices: range) -> Iterator[Sequence[bytes]]:
        """Serialized examples, many at a time: one by one, the reader gives a thousand a second."""
        import tensorflow_datasets as tfds

        try:
            examples = self.builder.as_data_source(
                split=self.split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES
            )
            for start in range(0, len(indices), _BLOCK):
                yield examples.__getitems__(indices[start : start + _BLOCK])
        except Exception as error:  # anything, from a missing file to a format without random access
            raise UserError(
                f"{self.name}: cannot be read from {self.builder.data_path} ({_first_line(error)}); "
                "to have it prepared anew, set data.data_dir to another folder or remove that one"
            ) from error


def open_dataset(
    name: str, source_language: str, target_language: str, data_dir: str | None
) -> dict[str, ParallelText]:
    """The splits of a dataset, downloaded and prepared when `data_dir` does not hold it yet.

    Args:
        name: the dataset and its configuration, say `wmt14_translate/de-en`.
        source_language: the feature that is translated.
        target_language: the feature that it is translated into.
        data_dir: the folder of prepared datasets; None is the library's default, `~/tensorflow_datasets`.

    Raises:
        UserError: no such dataset or language, a folder with another version of it, or the download failed.
    """
    builder = _builder(name, data_dir)
    _require_languages(name, builder, source_language, target_language)
    if not builder.is_prepared():
        _refuse_other_version(name, builder)
        with _alone_with(builder):
            builder = _builder(name, data_dir)  # another process may have prepared it meanwhile
            if not builder.is_prepared():
                _prepare(name, builder)
    if not builder.info.splits:
        raise UserError(
            f"{builder.data_path} is there, but no whole dataset is in it: remove it to have it prepared anew, or set "
            "data.data_dir to another folder"
        )
    return {split: TfdsSplit(builder, split, source_language, target_language) for split in builder.info.splits}


def _builder(name: str, data_dir: str | None) -> Any:
    import tensorflow_datasets as tfds  # 0.7 s, and only who reads such a dataset pays them
    import tensorflow_datasets.translate  # registers the translation datasets, which are 'not found' otherwise

    root = None if data_dir is None else os.path.expanduser(data_dir)
    try:
        return tfds.builder(name, data_dir=root, file_format="array_record")
    except Exception as error:  # from ValueError to ImportError, by dataset
        mend = "its catalogue lists names and configurations, say tfds:wmt14_translate/de-en"
        folder = pathlib.Path(root or tfds.core.constants.DATA_DIR, name.partition(":")[0])
        if re.match(r"\w", name) and folder.is_dir():
            mend += (
                f"; if {folder} was cut short, or written in a format that takes TensorFlow to read, set data.data_dir "
                "to another folder to have it prepared there"
            )
        raise UserError(
            f"data.corpus is 'tfds:{name}', which TensorFlow Datasets cannot open ({_first_line(error)}); {mend}"
        ) from error


@contextlib.contextmanager
def _alone_with(builder: Any) -> Iterator[None]:
    """Others wait: each would fetch gigabytes, and all but the first would then find the folder taken."""
    root = os.fspath(builder.data_dir_root)
    if "://" in root:
        yield
        return
    try:
        with alone_in(pathlib.Path(root, f".preparing-{builder.info.full_name.replace('/', '-')}")):
            yield
    except OSError as error:
        raise UserError(
            f"{root}: {error.strerror or error}; set data.data_dir to another folder, or make that one writable"
        ) from error


def _refuse_other_version(name: str, builder: Any) -> None:
    """Gigabytes are not fetched again beside a version that is there and may be what is wanted."""
    folder = pathlib.Path(builder.data_path).parent
    others = [path.parent.name for path in sorted(folder.glob("*/dataset_info.json"))]
    others = [version for version in others if re.fullmatch(r"\d+\.\d+\.\d+", version)]
    if others:
        base = name.split(":")[0]
        raise UserError(
            f"{folder} holds version {' and '.join(others)} of {base}, not {builder.version}: set data.corpus to "
            f"'tfds:{base}:{others[-1]}' to use it, or data.data_dir to another folder to have {builder.version} "
            "prepared there"
        )


def _prepare(name: str, builder: Any) -> None:
    """Downloads, extracts and converts; files that arrived whole are kept by the library and not fetched again."""
    import tensorflow_datasets as tfds

    _let_archives_open_without_tensorflow()
    downloads = pathlib.Path(builder.data_dir_root) / "downloads"
    begin = time.time()
    # It warns of each of its many tries; what they came to is said below.
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
    try:
        builder.download_and_prepare(
            file_format="array_record", download_config=tfds.download.DownloadConfig(try_download_gcs=False)
        )
    except Exception as error:  # network, disk, checksums, manual downloads: each has its own type
        detail = _first_line(error)
        mend = (
            "check network and disk, remove an archive that is damaged, and what came out of it, from "
            f"{downloads}, or set data.data_dir to a folder that has the dataset"
        )
        if partial := [path for path in downloads.glob("**/*.tmp.*/*") if path.stat().st_mtime >= begin - 1]:
            detail += f"; {' and '.join(path.name for path in partial)} did not arrive whole and sound"
            mend = (
                "what did is kept: call again, or fetch it yourself (wget -c goes on with a part) "
                f"into {downloads / 'manual'}"
            )
        elif fault := fault_in_files(builder, downloads / "extracted"):
            detail = fault
            mend = "remove the folder that it was extracted to, and put a sound archive in its place"
        raise UserError(
            f"data.corpus is 'tfds:{name}', but preparing it in {builder.data_path} failed ({detail}); {mend}"
        ) from error


def _require_languages(name: str, builder: Any, source_language: str, target_language: str) -> None:
    features = builder.info.features
    available = sorted(features.keys()) if hasattr(features, "keys") else []  # a dictionary of texts, or something else
    for field, language in (("source_language", source_language), ("target_language", target_language)):
        if language not in available:
            raise UserError(
                f"data.{field} is {language!r}, but tfds:{name} has {', '.join(available) or 'no named texts'}; "
                "choose a dataset with this language, or set the language to one it has"
            )


def _sentence(value: bytes) -> str:
    return html.unescape(value.decode("utf-8")).replace("\n", " ")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().split("\n")
    return lines[0].rstrip(":") or type(error).__name__


def _let_archives_open_without_tensorflow() -> None:
    """Gives the library's archive extractor the two TensorFlow functions it calls; all else of it runs without."""
    if importlib.util.find_spec("tensorflow") is None:
        from tensorflow_datasets.core.download import extractor

        extractor.tf = types.SimpleNamespace(
            compat=types.SimpleNamespace(as_text=os.fsdecode),
            io=types.SimpleNamespace(gfile=types.SimpleNamespace(GFile=open)),
        )
