"""Parallel text: own files, embedded corpora and TensorFlow Datasets, and what is refused before any work."""

import dataclasses
import gzip
import os
import zipfile

import pytest

from transformer_jax.config import DataConfig
from transformer_jax.data.parallel_text import TsvFile, TwoFiles, hold_out
from transformer_jax.data.sources import load_splits
from transformer_jax.errors import UserError


def write_lines(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
    return str(path)


def two_files(folder, count, stem="train"):
    source = write_lines(folder / f"{stem}.en", [f"source {i}" for i in range(count)])
    target = write_lines(folder / f"{stem}.de", [f"target {i}" for i in range(count)])
    return source, target


def own(source, target=None, **fields):
    return DataConfig(train_source=source, train_target=target, **fields)


def test_pairs_stay_aligned_past_odd_line_separators(tmp_path):
    """T3: U+2028 in source 1 and a lone carriage return in target 2 shift nothing."""
    source = write_lines(tmp_path / "a", ["one\u2028more", "two", "three"])
    target = write_lines(tmp_path / "b", ["eins", "zw\rei", "drei"])
    text = TwoFiles(source, target)
    expected = [("one\u2028more", "eins"), ("two", "zw\rei"), ("three", "drei")]
    assert list(text) == expected
    assert list(text) == expected, "a second iteration starts anew"
    assert text.check() == 3
    assert list(text.sentences())[:3] == ["one\u2028more", "eins", "two"]


@pytest.mark.parametrize("shorter", ["source", "target"])
@pytest.mark.parametrize("part", ["train", "dev", "test"])
def test_unequal_line_counts_are_refused_with_both_counts_and_names(tmp_path, shorter, part):
    """T13: 100 lines against 99 never become pairs, whichever text and side it is."""
    good = two_files(tmp_path, 100)
    lines = [f"line {i}" for i in range(100)]
    names = {side: write_lines(tmp_path / f"bad.{side}", lines) for side in ("source", "target")}
    write_lines(tmp_path / f"bad.{shorter}", lines[:39] + lines[40:])
    fields = {"train_source": good[0], "train_target": good[1]}
    fields |= {f"{part}_source": names["source"], f"{part}_target": names["target"]}
    counts = (99, 100) if shorter == "source" else (100, 99)
    message = rf"bad\.source has {counts[0]} lines but .*bad\.target has {counts[1]}"
    with pytest.raises(UserError, match=message):
        load_splits(DataConfig(**fields))
    with pytest.raises(UserError, match=message):
        list(TwoFiles(names["source"], names["target"]))


def test_a_tsv_holds_both_sides_and_swaps_on_request(tmp_path):
    path = tmp_path / "pairs.tsv.gz"
    path.write_bytes(gzip.compress(b"one\teins\r\ntwo\tzwei\r\n"))
    assert list(TsvFile(str(path))) == [("one", "eins"), ("two", "zwei")]
    assert list(TsvFile(str(path), swap=True)) == [("eins", "one"), ("zwei", "two")]
    assert TsvFile(str(path)).digest() != TsvFile(str(path), swap=True).digest()


@pytest.mark.parametrize(("row", "columns"), [("three", "1 column "), ("three\tdrei\tx", "3 columns ")])
def test_a_tsv_row_without_two_columns_is_refused_with_its_number(tmp_path, row, columns):
    """T5: a missing or a stray tab is never papered over."""
    path = write_lines(tmp_path / "pairs.tsv", ["one\teins", "two\tzwei", row, "four\tvier"])
    with pytest.raises(UserError, match=rf"pairs\.tsv, row 3: {columns}"):
        load_splits(own(path))


def test_held_out_lines_never_appear_in_training(tmp_path):
    """One pair of every 50, the same in every run; repeats of a held-out source are not trained on either."""
    pairs = [(f"source {i % 150}", f"target {i}") for i in range(200)]
    path = write_lines(tmp_path / "train.tsv", ["\t".join(pair) for pair in pairs])
    splits = load_splits(own(path))
    dev, train = list(splits.dev), list(splits.train)
    assert [pairs.index(pair) for pair in dev] == [0, 50, 100, 150]
    assert not {source for source, _ in dev} & {source for source, _ in train}
    # Pair 150 repeats source 0; nothing else is lost.
    assert train == [pair for pair in pairs if pair[0] not in ("source 0", "source 50", "source 100")]
    assert splits.test is None
    assert "4 of 200 pairs" in splits.notes[0] and "data.dev_source" in splits.notes[0]
    again = load_splits(own(path))
    assert (list(again.dev), list(again.train)) == (dev, train)
    assert splits.train.digest() == again.train.digest() != splits.dev.digest()


def test_held_out_lines_have_text_on_both_sides(tmp_path):
    path = write_lines(tmp_path / "train.tsv", ["\t", "one\t", " \tzwei", "three\tdrei", "four\tvier"])
    splits = load_splits(own(path))
    assert list(splits.dev) == [("three", "drei")]
    assert splits.train.check() == 4


def test_at_most_a_thousand_lines_are_held_out(tmp_path):
    train, dev, _ = hold_out(TwoFiles(*two_files(tmp_path, 60_001)))
    assert (train.check(), dev.check()) == (60_001 - 984, 984)  # one of every 61


@pytest.mark.parametrize("pairs", [["one\teins"], ["one\teins"] * 100, ["\teins", "one\t"]])
def test_text_too_poor_to_hold_lines_out_is_refused(tmp_path, pairs):
    path = write_lines(tmp_path / "train.tsv", pairs)
    with pytest.raises(UserError, match=r"too few different pairs .* set data\.dev_source"):
        load_splits(own(path))


def test_own_dev_and_test_text_is_used_and_nothing_held_out(tmp_path):
    train, dev, test = (two_files(tmp_path, n, stem) for n, stem in ((60, "train"), (7, "dev"), (9, "test")))
    splits = load_splits(
        own(*train, dev_source=dev[0], dev_target=dev[1], test_source=test[0], test_target=test[1]),
    )
    assert [text.check() for text in (splits.train, splits.dev, splits.test)] == [60, 7, 9]
    assert splits.notes == ()
    replaced = load_splits(DataConfig(test_source=test[0], test_target=test[1]))
    assert [text.check() for text in (replaced.train, replaced.dev, replaced.test)] == [15_673, 500, 9]


def test_validating_on_the_training_text_is_said(tmp_path):
    train = two_files(tmp_path, 60)
    splits = load_splits(own(*train, dev_source=train[0], dev_target=train[1]))
    assert splits.notes == ("data.dev_source is the training text: its scores say nothing about unseen text",)


def test_the_digest_follows_the_content(tmp_path):
    source, target = two_files(tmp_path, 5)
    before = TwoFiles(source, target).digest()
    os.rename(source, tmp_path / "moved")
    assert TwoFiles(str(tmp_path / "moved"), target).digest() == before
    write_lines(tmp_path / "moved", [*(f"source {i}" for i in range(4)), "Source 4"])
    assert TwoFiles(str(tmp_path / "moved"), target).digest() != before


def test_file_arguments_that_make_no_sense_are_refused(tmp_path):
    source, target = two_files(tmp_path, 3)
    tsv = write_lines(tmp_path / "pairs.tsv", ["one\teins"])
    link = tmp_path / "link"
    link.symlink_to(source)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for fields, message in [
        ({"train_target": target}, r"data\.train_target is given without data\.train_source"),
        ({"dev_target": target}, r"data\.dev_target is given without data\.dev_source"),
        ({"train_source": source}, r"data\.train_source is given without data\.train_target"),
        ({"test_source": source}, r"data\.test_source is given without data\.test_target"),
        ({"train_source": source, "train_target": source}, "are the same file"),
        ({"train_source": source, "train_target": str(link)}, "are the same file"),
        ({"train_source": tsv, "train_target": target}, "which holds both sides"),
        ({"train_source": source, "train_target": "nowhere"}, r"data\.train_target is nowhere, which does not exist"),
        ({"train_source": str(pipe), "train_target": target}, "not a regular file"),
        ({"train_source": str(tmp_path), "train_target": target}, "not a regular file"),
    ]:
        with pytest.raises(UserError, match=message):
            load_splits(DataConfig(**fields))


@pytest.mark.parametrize("other", ["de", "fr", "zh"])
def test_embedded_corpora_in_both_directions(other):
    """Counts are those of the corpora's notice; office_long takes dev and test from office."""
    pairs = {"de": (15_673, 38_256), "fr": (15_591, 37_570), "zh": (11_849, 28_713)}[other]
    for corpus, count in zip(("office", "office_long"), pairs, strict=True):
        there = load_splits(DataConfig(corpus=corpus, target_language=other))
        back = load_splits(DataConfig(corpus=corpus, source_language=other, target_language="en"))
        assert (there.train.check(), there.dev.check(), there.test.check()) == (count, 500, 1000)
        assert there.notes == ()
        for one, two in ((there.train, back.train), (there.dev, back.dev), (there.test, back.test)):
            source, target = next(iter(one))
            assert next(iter(two)) == (target, source)
            assert source.isascii() and (source != target)
        assert not set(there.test) & set(there.train)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"corpus": "offices"}, r"data\.corpus is 'offices', but must be office or office_long, or tfds:NAME/CONFIG"),
        ({"source_language": "de", "target_language": "fr"}, "no pair de-fr but en-de, de-en, en-fr"),
        ({"target_language": "en"}, "no pair en-en"),
    ],
)
def test_unknown_corpora_and_languages_are_refused_with_the_known_ones(fields, message):
    with pytest.raises(UserError, match=message):
        load_splits(DataConfig(**fields))


@pytest.fixture(scope="module")
def tiny_translate():
    """A translation dataset as the library's own are written: it extracts an archive, and its text has entities."""
    tfds = pytest.importorskip("tensorflow_datasets")

    class TinyTranslate(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")
        archive = None

        def _info(self):
            features = tfds.features.Translation(languages=["de", "en"])
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            folder = dl_manager.extract(self.archive)
            return {
                split: self._generate_examples(folder / f"{split}.tsv") for split in ("train", "validation", "test")
            }

        def _generate_examples(self, path):
            for key, row in enumerate(path.read_text(encoding="utf-8").splitlines()):
                english, german = row.replace("|", "\n").split("\t")
                yield key, {"en": english, "de": german}

    return TinyTranslate


@pytest.fixture
def tiny_config(tiny_translate, tmp_path):
    archive = tmp_path / "tiny.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for split, count in (("train", 5), ("validation", 2), ("test", 3)):
            rows = [f"The {split} &quot;{i}&quot; &amp; more\tDie|Größe {i}\n" for i in range(count)]
            packed.writestr(f"{split}.tsv", "".join(rows))
    tiny_translate.archive = archive
    return DataConfig(corpus="tfds:tiny_translate", data_dir=str(tmp_path / "datasets"))


def test_tensorflow_datasets_are_prepared_and_read_without_tensorflow(tiny_config):
    """The dataset's own splits; bytes become text, HTML entities characters, line feeds spaces."""
    splits = load_splits(tiny_config)
    assert [text.check() for text in (splits.train, splits.dev, splits.test)] == [5, 2, 3]
    assert sorted(splits.dev) == [(f'The validation "{i}" & more', f"Die Größe {i}") for i in range(2)]
    assert list(splits.train) == list(splits.train)
    back = load_splits(dataclasses.replace(tiny_config, source_language="de", target_language="en"))
    assert [(b, a) for a, b in splits.test] == list(back.test)
    assert len({splits.train.digest(), splits.dev.digest(), back.train.digest()}) == 3


def test_faulty_datasets_are_refused_in_one_sentence(tiny_config, tiny_translate, tmp_path):
    for fields, message in [
        ({"target_language": "fr"}, r"data\.target_language is 'fr', but tfds:tiny_translate has de, en"),
        ({"corpus": "tfds:no_such_dataset/de-en"}, r"cannot open \(Dataset no_such_dataset not found\.\)"),
        ({"corpus": "tfds:"}, "cannot open"),
    ]:
        with pytest.raises(UserError, match=message) as caught:
            load_splits(dataclasses.replace(tiny_config, **fields))
        assert "\n" not in str(caught.value)
    tiny_translate.archive = tmp_path / "missing.zip"
    with pytest.raises(UserError, match=r"preparing it in .* failed"):
        load_splits(tiny_config)
    load_splits(dataclasses.replace(tiny_config, corpus="office"))
