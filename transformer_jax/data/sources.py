"""Where text comes from: embedded corpora, your own files, or TensorFlow Datasets; as training, dev and test text."""

import glob
import os
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass

from transformer_jax.config import DataConfig
from transformer_jax.data.parallel_text import Joined, ParallelText, TsvFile, TwoFiles, hold_out
from transformer_jax.data.readings import Readings
from transformer_jax.data.text import is_blank, read_lines, split_lines
from transformer_jax.data.tfds import open_dataset
from transformer_jax.data.wmt14 import test_set_notes
from transformer_jax.errors import UserError

__all__ = ["ParallelText", "Splits", "is_blank", "load_splits", "read_lines", "split_lines"]

_CORPORA = pathlib.Path(__file__).parent / "corpora"
_EMBEDDED = ("office", "office_long")
_EMBEDDED_PAIRS = tuple(pair for other in ("de", "fr", "zh") for pair in (("en", other), (other, "en")))
_PARTS = ("train", "dev", "test")


@dataclass(frozen=True)
class Splits:
    """The three texts of an experiment."""

    train: ParallelText
    dev: ParallelText
    test: ParallelText | None
    """None: own training text, and no test text given."""
    notes: tuple[str, ...] = ()
    """Sentences for the user to read: what was decided about the text without being asked."""


def load_splits(config: DataConfig, readings: Readings | None = None) -> Splits:
    """Finds and checks the texts that a configuration names; own files are read once, to the end, before any work.

    Own dev and test files replace those of an embedded corpus or a dataset. Training text without dev text has some of
    its lines held out (see `Splits.notes`).

    Args:
        config: names the texts.
        readings: what earlier commands found in own files, which are then not read again.

    Raises:
        UserError: unknown corpus or language, file arguments that make no sense together, or a faulty file.
    """
    readings = readings or Readings()
    texts = {part: _own_text(config, part, readings) for part in _PARTS}
    for text in texts.values():
        if text is not None and not (text is texts["train"] and texts["dev"] is None):  # hold_out checks that one
            text.check()
    train, dev, test = texts["train"], texts["dev"], texts["test"]
    notes = _overlap_notes(config)
    if train is None:
        corpus, corpus_notes = _corpus_texts(config)
        train, dev, test = corpus["train"], dev or corpus.get("dev"), test or corpus.get("test")
        notes += corpus_notes
    if dev is None:
        train, dev, note = hold_out(train, readings)
        notes = (note, *notes)
    return Splits(train, dev, test, notes)


def _own_text(config: DataConfig, part: str, readings: Readings) -> ParallelText | None:
    source: str | None = getattr(config, f"{part}_source")
    target: str | None = getattr(config, f"{part}_target")
    if source is None:
        if target is not None:
            raise UserError(f"data.{part}_target is given without data.{part}_source; give both")
        return None
    sources = _files(f"data.{part}_source", source)
    if all(path.endswith((".tsv", ".tsv.gz")) for path in sources):
        if target is not None:
            raise UserError(
                f"data.{part}_source is {source}, a .tsv, which holds both sides; leave data.{part}_target out, "
                "or rename the file if it holds one side only"
            )
        return _joined([TsvFile(path, readings=readings) for path in sources])
    if target is None:
        raise UserError(
            f"data.{part}_source is given without data.{part}_target; give both, or one .tsv of source<TAB>target"
        )
    targets = _files(f"data.{part}_target", target)
    if len(sources) != len(targets):
        raise UserError(
            f"data.{part}_source names {len(sources)} files but data.{part}_target {len(targets)}: "
            "file i of one must translate file i of the other, so name as many of each"
        )
    for one, other in zip(sources, targets, strict=True):
        if os.path.samefile(one, other):
            raise UserError(
                f"data.{part}_source and data.{part}_target are the same file, {one}; give one for each side"
            )
    return _joined([TwoFiles(*pair, readings) for pair in zip(sources, targets, strict=True)])


def _joined(texts: Sequence[ParallelText]) -> ParallelText:
    return texts[0] if len(texts) == 1 else Joined(tuple(texts))


def _files(field: str, value: str) -> list[str]:
    """The files that a field names: one, or several with commas between; a pattern with * stands for all it matches.

    A file with a comma or a star in its name is that file.
    """
    whole = os.path.expanduser(value)
    if os.path.exists(whole) or not any(sign in value for sign in ",*?["):
        return [_require_file(field, whole)]
    paths: list[str] = []
    for word in (os.path.expanduser(word.strip()) for word in value.split(",")):
        if not word:
            raise UserError(f"{field} is {value!r}, which has an empty name between commas; take that comma out")
        found = sorted(glob.glob(word)) if not os.path.exists(word) and glob.has_magic(word) else [word]
        if not found:
            raise UserError(f"{field} has the pattern {word}, which matches no file; check the path")
        paths += [_require_file(field, path) for path in found]
    return paths


def _require_file(field: str, path: str) -> str:
    if not os.path.isfile(path):
        # Text is read several times, which a pipe (`<(zcat ...)`) does not allow.
        kind = "is not a regular file" if os.path.exists(path) else "does not exist"
        raise UserError(f"{field} is {path}, which {kind}; give the path of a text file (.gz is read too)")
    return path


def _corpus_texts(config: DataConfig) -> tuple[dict[str, ParallelText], tuple[str, ...]]:
    """The texts by part, and sentences for the user to read."""
    if config.corpus.startswith("tfds:"):
        name = config.corpus.removeprefix("tfds:")
        splits = open_dataset(name, config.source_language, config.target_language, config.data_dir)
        if "train" not in splits:
            raise UserError(
                f"data.corpus is {config.corpus!r}, which has no split train, only "
                f"{', '.join(sorted(splits)) or 'none at all'}; choose a dataset with training text"
            )
        parts = {"train": "train", "dev": "validation", "test": "test"}
        texts = {part: splits[split] for part, split in parts.items() if split in splits}
        for text in texts.values():
            text.check()
        return texts, test_set_notes(name, splits, {config.source_language, config.target_language})
    if config.corpus not in _EMBEDDED:
        raise UserError(
            f"data.corpus is {config.corpus!r}, but must be {' or '.join(_EMBEDDED)}, or tfds:NAME/CONFIG, "
            "say tfds:wmt14_translate/de-en; for your own files set data.train_source"
        )
    source, target = config.source_language, config.target_language
    if (source, target) not in _EMBEDDED_PAIRS:
        pairs = ", ".join("-".join(pair) for pair in _EMBEDDED_PAIRS)
        raise UserError(
            f"corpus {config.corpus} has no pair {source}-{target} but {pairs}; "
            "change data.source_language or data.target_language"
        )
    return {part: _embedded_text(config.corpus, part, source, target) for part in _PARTS}, ()


def _embedded_text(corpus: str, part: str, source: str, target: str) -> ParallelText:
    other = target if source == "en" else source
    corpus = corpus if part == "train" else "office"  # office_long shares the dev and test text of office
    return _Embedded(str(_CORPORA / f"{corpus}.en-{other}.{part}.tsv.gz"), swap=target == "en")


@dataclass(frozen=True)
class _Embedded(TsvFile):
    @property
    def name(self) -> str:
        """Corpus, languages and part, say office.en-de.test: where it was installed says nothing."""
        return os.path.basename(self.path).removesuffix(".tsv.gz")


def _overlap_notes(config: DataConfig) -> tuple[str, ...]:
    if config.train_source is None:
        return ()
    train = {os.path.realpath(path) for path in _files("data.train_source", config.train_source)}
    return tuple(
        f"data.{part}_source is the training text: its scores say nothing about unseen text"
        for part, value in (("dev", config.dev_source), ("test", config.test_source))
        if value is not None and train & {os.path.realpath(path) for path in _files(f"data.{part}_source", value)}
    )
