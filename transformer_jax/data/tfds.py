"""TensorFlow Datasets as parallel text, read from ArrayRecord files without TensorFlow."""

import hashlib
import html
import importlib.util
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from transformer_jax.data.parallel_text import ParallelText
from transformer_jax.errors import UserError


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
        for example in self._examples():
            yield _sentence(example[self.source_language]), _sentence(example[self.target_language])

    def check(self) -> int:
        """The number of pairs; a dataset keeps both sides together, so nothing else needs a look."""
        return len(self._examples())

    def digest(self) -> str:
        """Digest of the dataset's name, version and size, the split and the languages: a version's content is fixed."""
        info = self.builder.info.splits[self.split]
        parts = (self.name, info.num_examples, info.num_bytes, self.source_language, self.target_language)
        return hashlib.sha256(repr(parts).encode("utf-8")).hexdigest()

    def _examples(self) -> Sequence[Mapping[str, bytes | str]]:
        try:
            return cast(Sequence[Mapping[str, bytes | str]], self.builder.as_data_source(split=self.split))
        except Exception as error:  # anything, from a missing file to a format without random access
            raise UserError(
                f"{self.name}: cannot be read from {self.builder.data_path} ({_first_line(error)}); "
                "remove that folder to have it prepared anew"
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
        UserError: no such dataset or language, or the download failed.
    """
    import tensorflow_datasets as tfds  # 0.7 s, and only who reads such a dataset pays them
    import tensorflow_datasets.translate  # registers the translation datasets, which are 'not found' otherwise

    folder = None if data_dir is None else os.path.expanduser(data_dir)
    try:
        builder = tfds.builder(name, data_dir=folder, file_format="array_record")
    except Exception as error:  # from ValueError to ImportError, by dataset
        raise UserError(
            f"data.corpus is 'tfds:{name}', which TensorFlow Datasets cannot open ({_first_line(error)}); "
            "its catalogue lists names and configurations, say tfds:wmt14_translate/de-en"
        ) from error
    _require_languages(name, builder, source_language, target_language)
    if not builder.is_prepared():
        _let_archives_open_without_tensorflow()
        try:
            builder.download_and_prepare(
                file_format="array_record", download_config=tfds.download.DownloadConfig(try_download_gcs=False)
            )
        except Exception as error:  # network, disk, checksums, manual downloads: each has its own type
            raise UserError(
                f"data.corpus is 'tfds:{name}', but preparing it in {builder.data_path} failed "
                f"({_first_line(error)}); check network and disk, or set data.data_dir to a folder that has it"
            ) from error
    return {split: TfdsSplit(builder, split, source_language, target_language) for split in builder.info.splits}


def _require_languages(name: str, builder: Any, source_language: str, target_language: str) -> None:
    features = builder.info.features
    available = sorted(features.keys()) if hasattr(features, "keys") else []  # a dictionary of texts, or something else
    for field, language in (("source_language", source_language), ("target_language", target_language)):
        if language not in available:
            raise UserError(
                f"data.{field} is {language!r}, but tfds:{name} has {', '.join(available) or 'no named texts'}; "
                "choose a dataset with this language, or set the language to one it has"
            )


def _sentence(value: bytes | str) -> str:
    text = value.decode("utf-8") if isinstance(value, bytes) else value
    return html.unescape(text).replace("\n", " ")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().split("\n")
    return lines[0] or type(error).__name__


def _let_archives_open_without_tensorflow() -> None:
    """Gives the library's archive extractor the two TensorFlow functions it calls; all else of it runs without."""
    if importlib.util.find_spec("tensorflow") is None:
        from tensorflow_datasets.core.download import extractor

        extractor.tf = types.SimpleNamespace(
            compat=types.SimpleNamespace(as_text=os.fsdecode),
            io=types.SimpleNamespace(gfile=types.SimpleNamespace(GFile=open)),
        )
