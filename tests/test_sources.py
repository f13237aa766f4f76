"""Parallel text: own files, embedded corpora and TensorFlow Datasets, and what is refused before any work."""

import dataclasses
import gzip
import os
import time
import zipfile

import pytest

from transformer_jax.config import DataConfig
from transformer_jax.data import readings
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


def test_several_files_are_one_text(tmp_path):
    """The paper's text is several corpora: by name, in the order given, or by a pattern, in the order of names."""
    one, two = two_files(tmp_path, 3, "b"), two_files(tmp_path, 2, "a")
    dev = {"dev_source": one[0], "dev_target": one[1]}
    named = load_splits(own(f"{one[0]},{two[0]}", f"{one[1]}, {two[1]}", **dev)).train
    assert list(named) == [*TwoFiles(*one), *TwoFiles(*two)]
    assert named.check() == 5 and named.name == f"{one[0]} and {one[1]} and 1 more"
    matched = load_splits(own(f"{tmp_path}/?.en", f"{tmp_path}/*.de", **dev)).train
    assert list(matched) == [*TwoFiles(*two), *TwoFiles(*one)]
    assert len({named.digest(), matched.digest(), TwoFiles(*one).digest()}) == 3
    for name in ("c", "d"):
        write_lines(tmp_path / f"{name}.tsv", [f"{name}\t{name}"])
    assert list(load_splits(own(f"{tmp_path}/*.tsv", **dev)).train) == [("c", "c"), ("d", "d")]


def test_several_files_that_make_no_text_are_refused(tmp_path):
    """T13: counts are compared file by file, so that one line too many in the first is not made good by the second."""
    one, two = two_files(tmp_path, 3, "a"), two_files(tmp_path, 2, "b")
    for fields, message in [
        ((f"{one[0]},{two[0]}", one[1]), r"data\.train_source names 2 files but data\.train_target 1"),
        ((f"{one[0]},{two[0]}", f"{two[1]},{one[1]}"), r"a\.en has 3 lines but .*b\.de has 2"),
        ((f"{tmp_path}/*.xx", one[1]), r"the pattern .*xx, which matches no file"),
        ((f"{one[0]},nowhere", f"{one[1]},{two[1]}"), r"data\.train_source is nowhere, which does not exist"),
    ]:
        with pytest.raises(UserError, match=message):
            load_splits(own(*fields, dev_source=one[0], dev_target=one[1]))


def test_a_file_may_have_a_comma_or_a_star_in_its_name(tmp_path):
    source, target = two_files(tmp_path, 60, "a,b*")
    assert load_splits(own(source, target, dev_source=source, dev_target=target)).train == TwoFiles(source, target)


def test_a_sample_of_the_sentences_is_spread_over_the_text(tmp_path):
    text = TwoFiles(*two_files(tmp_path, 10))
    assert list(text.sentences(7)) == [f"{side} {i}" for i in (0, 4, 8) for side in ("source", "target")]
    assert list(text.sentences(20)) == list(text.sentences())


# What is known of files


def age(*paths):
    """Ten seconds old by the clock of modification; the change time cannot be set."""
    for path in paths:
        os.utime(path, ns=(time.time_ns() - 10**10,) * 2)


def counting(monkeypatch):
    """The files that were digested."""
    read = []
    digest = readings._file_digest
    monkeypatch.setattr(readings, "_file_digest", lambda path: read.append(path) or digest(path))
    return read


def test_files_are_read_once_and_again_when_they_have_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(readings, "_YOUNG", -1000.0)
    read = counting(monkeypatch)
    source, target = two_files(tmp_path, 60)
    facts = tmp_path / "cache" / "files.json"

    def digests():
        known = readings.Readings(facts)
        splits = load_splits(own(source, target), known)
        found = (splits.train.digest(), splits.dev.digest(), splits.train.check())
        known.save()
        return found

    first = digests()
    assert sorted(read) == sorted([source, target])
    read.clear()
    monkeypatch.setattr("transformer_jax.data.parallel_text.read_lines", lambda path: pytest.fail("read again"))
    assert readings.Readings(facts).digest(source) == readings.Readings().digest(source)
    read.clear()
    known = readings.Readings(facts)
    assert TwoFiles(source, target, known).check() == 60 and read == []
    monkeypatch.undo()
    monkeypatch.setattr(readings, "_YOUNG", -1000.0)
    assert digests() == first
    with open(source, "r+b") as file:  # the same size, and the old modification time put back
        times = os.stat(source)
        file.write(b"S")
    os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert digests()[0] != first[0]


def test_a_file_that_was_just_written_is_not_believed(tmp_path):
    """Two writes within one tick of the file system's clock cannot be told apart later."""
    path = write_lines(tmp_path / "a", ["one"])
    known = readings.Readings()
    age(path)
    before = known.digest(path)
    with open(path, "r+b") as file:
        file.write(b"two")
    assert known.digest(path) != before
    assert known._found == {}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 1}'])
def test_damaged_findings_count_as_none(tmp_path, content):
    (tmp_path / "files.json").write_text(content)
    path = write_lines(tmp_path / "a", ["one"])
    assert readings.Readings(tmp_path / "files.json").digest(path) == readings.Readings().digest(path)


@pytest.mark.parametrize("other", ["de", "fr", "zh"])
def test_embedded_corpora_in_both_directions(other):
    """Counts are those of the corpora's notice; office_long takes dev and test from office."""
    pairs = {"de": (15_673, 38_256), "fr": (15_591, 37_570), "zh": (11_849, 28_713)}[other]
    for corpus, count in zip(("office", "office_long"), pairs, strict=True):
        there = load_splits(DataConfig(corpus=corpus, target_language=other))
        back = load_splits(DataConfig(corpus=corpus, source_language=other, target_language="en"))
        assert (there.train.check(), there.dev.check(), there.test.check()) == (count, 500, 1000)
        assert there.notes == ()
        # As users know them, wherever the package is installed.
        assert [text.name for text in (there.train, back.test)] == [
            f"{corpus}.en-{other}.train", f"office.en-{other}.test"
        ]  # fmt: skip
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
