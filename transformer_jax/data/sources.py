"""Where text comes from: embedded corpora, your own files, or TensorFlow Datasets; as training, dev and test text."""

import os
import pathlib
from dataclasses import dataclass

from transformer_jax.config import DataConfig
from transformer_jax.data.parallel_text import ParallelText, TsvFile, TwoFiles, hold_out
from transformer_jax.data.text import is_blank, read_lines, split_lines
from transformer_jax.data.tfds import open_dataset
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


def load_splits(config: DataConfig) -> Splits:
    """Finds and checks the texts that a configuration names; own files are read once, to the end, before any work.

    Own dev and test files replace those of an embedded corpus or a dataset. Training text without dev text has some of
    its lines held out (see `Splits.notes`).

    Raises:
        UserError: unknown corpus or language, file arguments that make no sense together, or a faulty file.
    """
    texts = {part: _own_text(config, part) for part in _PARTS}
    for text in texts.values():
        if text is not None and not (text is texts["train"] and texts["dev"] is None):  # hold_out checks that one
            text.check()
    train, dev, test = texts["train"], texts["dev"], texts["test"]
    if train is None:
        corpus = _corpus_texts(config)
        train, dev, test = corpus["train"], dev or corpus.get("dev"), test or corpus.get("test")
    notes = _overlap_notes(config)
    if dev is None:
        train, dev, note = hold_out(train)
        notes = (note, *notes)
    return Splits(train, dev, test, notes)


def _own_text(config: DataConfig, part: str) -> ParallelText | None:
    source: str | None = getattr(config, f"{part}_source")
    target: str | None = getattr(config, f"{part}_target")
    if source is None:
        if target is not None:
            raise UserError(f"data.{part}_target is given without data.{part}_source; give both")
        return None
    source = os.path.expanduser(source)
    _require_file(f"data.{part}_source", source)
    if source.endswith((".tsv", ".tsv.gz")):
        if target is not None:
            raise UserError(
                f"data.{part}_source is {source}, a .tsv, which holds both sides; leave data.{part}_target out, "
                "or rename the file if it holds one side only"
            )
        return TsvFile(source)
    if target is None:
        raise UserError(
            f"data.{part}_source is given without data.{part}_target; give both, or one .tsv of source<TAB>target"
        )
    target = os.path.expanduser(target)
    _require_file(f"data.{part}_target", target)
    if os.path.samefile(source, target):
        raise UserError(
            f"data.{part}_source and data.{part}_target are the same file, {source}; give one for each side"
        )
    return TwoFiles(source, target)


def _require_file(field: str, path: str) -> None:
    if not os.path.isfile(path):
        # Text is read several times, which a pipe (`<(zcat ...)`) does not allow.
        kind = "is not a regular file" if os.path.exists(path) else "does not exist"
        raise UserError(f"{field} is {path}, which {kind}; give the path of a text file (.gz is read too)")


def _corpus_texts(config: DataConfig) -> dict[str, ParallelText]:
    if config.corpus.startswith("tfds:"):
        name = config.corpus.removeprefix("tfds:")
        splits = open_dataset(name, config.source_language, config.target_language, config.data_dir)
        if "train" not in splits:
            raise UserError(
                f"data.corpus is {config.corpus!r}, which has no split train, only "
                f"{', '.join(sorted(splits)) or 'none at all'}; choose a dataset with training text"
            )
        parts = {"train": "train", "dev": "validation", "test": "test"}
        return {part: splits[split] for part, split in parts.items() if split in splits}
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
    return {part: _embedded_text(config.corpus, part, source, target) for part in _PARTS}


def _embedded_text(corpus: str, part: str, source: str, target: str) -> ParallelText:
    other = target if source == "en" else source
    corpus = corpus if part == "train" else "office"  # office_long shares the dev and test text of office
    return TsvFile(str(_CORPORA / f"{corpus}.en-{other}.{part}.tsv.gz"), swap=target == "en")


def _overlap_notes(config: DataConfig) -> tuple[str, ...]:
    if config.train_source is None:
        return ()
    train = os.path.realpath(os.path.expanduser(config.train_source))
    return tuple(
        f"data.{part}_source is the training text: its scores say nothing about unseen text"
        for part, path in (("dev", config.dev_source), ("test", config.test_source))
        if path is not None and os.path.realpath(os.path.expanduser(path)) == train
    )
