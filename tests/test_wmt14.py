"""WMT14 through its own builder: download, checksum, extraction and generation run as they are, on small archives.

Only two things stand in for the network: `_open_url` answers from files made here, and the library's list of checksums
holds theirs. Names and layout of the archives are those of statmt.org.
"""

import contextlib
import gzip
import hashlib
import io
import shutil
import tarfile
from types import SimpleNamespace

import pytest

from transformer_jax.config import DataConfig
from transformer_jax.data import tfds
from transformer_jax.data.sources import load_splits
from transformer_jax.data.workplace import alone_in
from transformer_jax.errors import UserError

WMT13, WMT14 = "http://www.statmt.org/wmt13", "http://www.statmt.org/wmt14"
GIGA = "http://www.statmt.org/wmt10/training-giga-fren.tar"
DEV = "http://data.statmt.org/wmt19/translation-task/dev.tgz"


def text(language, corpus, count):
    """Lines of a Moses text file; U+2028 is part of a line, an empty line stands on both sides, an entity is left."""
    lines = [f"{corpus} {language} {i} &amp; more" for i in range(count)]
    lines[1] = f"{corpus} {language} one\u2028line"
    return "\n".join([*lines, "", "last of " + corpus]) + "\n"


def sgml(language, kind, count):
    """A WMT test set: markup, and one segment a line."""
    segments = "\n".join(f'<seg id="{i}">Test {language} {i} &quot;so&quot;</seg>' for i in range(1, count + 1))
    return (
        f'<{kind}set setid="newstest2014" srclang="any" trglang="en">\n<doc docid="1" genre="news" origlang="en">\n'
        f"<p>\n{segments}\n</p>\n</doc>\n</{kind}set>\n"
    )


def archive(mode, **files):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as tar:
        for name, data in files.items():
            data = data.encode() if isinstance(data, str) else data
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def archives(test_sentences=6):
    """Address -> bytes, of all that the German and the French builder fetch."""

    def moses(stem, corpus, languages, count):
        return {
            f"{stem}.{language}-en.{side}": text(side, corpus, count)
            for language in languages
            for side in (language, "en")
        }

    both = ("de", "fr")
    dev = {f"dev/newstest2013.{side}": text(side, "dev", 4) for side in ("de", "fr", "en")}
    for other in both:
        dev[f"dev/newstest2014-{other}en-src.{other}.sgm"] = sgml(other, "src", test_sentences)
        dev[f"dev/newstest2014-{other}en-ref.en.sgm"] = sgml("en", "ref", test_sentences)
    giga = {f"giga-fren.release2.fixed.{s}.gz": gzip.compress(text(s, "giga", 5).encode()) for s in ("fr", "en")}
    return {
        f"{WMT13}/training-parallel-europarl-v7.tgz": archive(
            "w:gz", **moses("training/europarl-v7", "europarl", (*both, "cs"), 8)
        ),
        f"{WMT13}/training-parallel-commoncrawl.tgz": archive(
            "w:gz", **moses("commoncrawl", "crawl", both, 7), **{"commoncrawl.de-en.annotation": "x\n"}
        ),
        f"{WMT13}/training-parallel-un.tgz": archive("w:gz", **moses("un/undoc.2000", "un", ("fr",), 6)),
        f"{WMT14}/training-parallel-nc-v9.tgz": archive(
            "w:gz", **moses("training/news-commentary-v9", "news", both, 9)
        ),
        GIGA: archive("w", **giga),
        DEV: archive("w:gz", **dev),
    }


class Site:
    """What the library sees of the network. `broken` addresses end after half of their bytes."""

    def __init__(self, files):
        self.files, self.fetched, self.broken = files, [], set()

    def infos(self):
        from tensorflow_datasets.core import utils
        from tensorflow_datasets.core.download.checksums import UrlInfo

        return {
            url: UrlInfo(utils.Size(len(data)), hashlib.sha256(data).hexdigest(), url.rsplit("/", 1)[1])
            for url, data in self.files.items()
        }

    @contextlib.contextmanager
    def open(self, url, **options):
        self.fetched.append(url)
        data = self.files[url]
        headers = {"Content-length": str(len(data))}

        def blocks():
            yield data[: len(data) // 2]
            if url in self.broken:
                raise ConnectionError("Connection broken: IncompleteRead")
            yield data[len(data) // 2 :]

        yield SimpleNamespace(url=url, headers=headers), blocks()


@pytest.fixture
def site(monkeypatch):
    from tensorflow_datasets.core.download import checksums, downloader
    from tensorflow_datasets.translate.wmt14 import Wmt14Translate

    site = Site(archives())
    monkeypatch.setattr(Wmt14Translate, "url_infos", None)
    monkeypatch.setattr(downloader, "_open_url", site.open)
    monkeypatch.setattr(checksums, "get_all_url_infos", site.infos)
    return site


def config(folder, other="de", **fields):
    pair = f"{other}-en"
    return DataConfig(
        corpus=f"tfds:wmt14_translate/{pair}", target_language=other, data_dir=str(folder / "tfds"), **fields
    )


def expected(language, corpus, count):
    lines = [f"{corpus} {language} {i} & more" for i in range(count)]
    lines[1] = f"{corpus} {language} one\u2028line"
    return [*lines, f"last of {corpus}"]


def pairs(other, **counts):
    return {
        pair
        for corpus, count in counts.items()
        for pair in zip(expected("en", corpus, count), expected(other, corpus, count), strict=True)
    }


def test_german(site, tmp_path):
    """T3: every sub-corpus, paired line by line past U+2028; empty lines dropped; entities are characters."""
    splits = load_splits(config(tmp_path))
    assert set(splits.train) == pairs("de", europarl=8, crawl=7, news=9)
    assert splits.train.check() == 8 + 7 + 9 + 3
    assert set(splits.dev) == pairs("de", dev=4)
    assert set(splits.test) == {(f'Test en {i} "so"', f'Test de {i} "so"') for i in range(1, 7)}
    assert len(site.fetched) == 4


def test_french(site, tmp_path):
    """The 10^9 corpus and the UN's are part of it; the archives that German had are not fetched again."""
    load_splits(config(tmp_path))
    splits = load_splits(config(tmp_path, "fr"))
    assert set(splits.train) == pairs("fr", europarl=8, crawl=7, news=9, un=6, giga=5)
    assert set(splits.dev) == pairs("fr", dev=4)
    assert set(splits.test) == {(f'Test en {i} "so"', f'Test fr {i} "so"') for i in range(1, 7)}
    assert sorted(site.fetched) == sorted(site.files)


def test_a_test_set_of_another_length_is_said(site, tmp_path):
    short = load_splits(config(tmp_path))
    assert short.notes == (
        f"{short.test.name} has 6 sentences where newstest2014 has 3,003: scores on it cannot be compared with the "
        "paper's",
    )
    site.files = archives(test_sentences=3003)
    assert load_splits(config(tmp_path / "whole")).notes == ()


def test_a_download_that_breaks_off_is_named_and_the_others_are_kept(site, tmp_path):
    broken = f"{WMT14}/training-parallel-nc-v9.tgz"
    site.broken.add(broken)
    with pytest.raises(
        UserError, match=r"IncompleteRead; training-parallel-nc-v9\.tgz did not arrive whole and sound\); .*wget -c"
    ) as caught:
        load_splits(config(tmp_path))
    assert "\n" not in str(caught.value)
    before = list(site.fetched)
    site.broken.clear()
    assert load_splits(config(tmp_path)).train.check() == 27
    assert set(site.fetched[len(before) :]) == {broken, DEV} - (set(before) - {broken})


def test_an_archive_fetched_by_hand_is_taken(site, tmp_path):
    manual = tmp_path / "tfds" / "downloads" / "manual"
    manual.mkdir(parents=True)
    for url, data in site.files.items():
        (manual / url.rsplit("/", 1)[1]).write_bytes(data)
    assert load_splits(config(tmp_path, "fr")).train.check() == 40
    assert site.fetched == []
    (manual / "dev.tgz").write_bytes(b"cut")
    with pytest.raises(UserError, match=r"dev\.tgz, has wrong checksum"):
        load_splits(config(tmp_path))


def test_a_test_set_without_segments_is_named(site, tmp_path):
    with tarfile.open(fileobj=io.BytesIO(site.files[DEV])) as tar:
        dev = {member.name: tar.extractfile(member).read() for member in tar}
    for name in dev:
        if name.endswith("sgm"):
            dev[name] = dev[name].replace(b"<seg", b"<hl")
    site.files[DEV] = archive("w:gz", **dev)
    with pytest.raises(UserError, match=r'/dev/newstest2014-deen-(src|ref)\.(de|en)\.sgm has no line <seg id="1">'):
        load_splits(config(tmp_path))


@pytest.mark.parametrize("where", ["test", "train"])
def test_text_that_is_not_utf_8_is_named_with_its_line(site, tmp_path, where):
    url, name = {
        "test": (DEV, "dev/newstest2014-deen-ref.en.sgm"),
        "train": (f"{WMT14}/training-parallel-nc-v9.tgz", "training/news-commentary-v9.de-en.en"),
    }[where]
    with tarfile.open(fileobj=io.BytesIO(site.files[url])) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}
    files[name] = files[name].replace(b" en 3", b" \x84en\x93 3")
    site.files[url] = archive("w:gz", **files)
    line = files[name].split(b"\x84")[0].count(b"\n") + 1
    with pytest.raises(UserError, match=rf"/{name}, line {line}: byte \d+ \(0x84\) is not UTF-8\); remove the folder"):
        load_splits(config(tmp_path))


def test_sides_of_unequal_length_are_named(site, tmp_path):
    """T13, E1: two segments fewer on one side."""
    with tarfile.open(fileobj=io.BytesIO(site.files[DEV])) as tar:
        dev = {member.name: tar.extractfile(member).read() for member in tar}
    dev["dev/newstest2014-deen-ref.en.sgm"] = sgml("en", "ref", 4)
    site.files[DEV] = archive("w:gz", **dev)
    with pytest.raises(UserError, match=r"Sizes do not match: 6 vs 4 for .*newstest2014-deen-src\.de\.sgm"):
        load_splits(config(tmp_path))


def test_a_folder_of_another_version_is_not_prepared_over(site, tmp_path):
    load_splits(config(tmp_path))
    folder = tmp_path / "tfds" / "wmt14_translate" / "de-en"
    shutil.move(folder / "1.0.0", folder / "0.9.0")
    info = folder / "0.9.0" / "dataset_info.json"
    info.write_text(info.read_text().replace('"1.0.0"', '"0.9.0"'))
    fetched = len(site.fetched)
    with pytest.raises(
        UserError, match=r"holds version 0\.9\.0 of wmt14_translate/de-en, not 1\.0\.0: .*de-en:0\.9\.0"
    ):
        load_splits(config(tmp_path))
    named = DataConfig(corpus="tfds:wmt14_translate/de-en:0.9.0", data_dir=str(tmp_path / "tfds"))
    assert load_splits(named).train.check() == 27
    assert len(site.fetched) == fetched


def test_a_folder_that_lost_a_file_is_refused_in_one_sentence(site, tmp_path):
    load_splits(config(tmp_path))
    (gone,) = (tmp_path / "tfds" / "wmt14_translate" / "de-en" / "1.0.0").glob("*-test.array_record*")
    gone.unlink()
    with pytest.raises(UserError, match=r"cannot be read from .*set data\.data_dir to another folder"):
        load_splits(config(tmp_path))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda info: info.unlink(), r"/1\.0\.0 is there, but no whole dataset is in it: remove it"),
        (lambda info: info.write_text("{"), r"cannot open .*; if .*/de-en was cut short, .* set data\.data_dir"),
        (
            lambda info: info.write_text(info.read_text().replace("array_record", "tfrecord")),
            r"cannot open .*TFRECORD.*takes TensorFlow to read, set data\.data_dir to another folder",
        ),
        (lambda info: info.write_text(info.read_text().replace('"27"', '"30"')), r"train: cannot be read from"),
    ],
)
def test_a_folder_that_was_copied_in_part_is_refused_in_one_sentence(site, tmp_path, damage, message):
    load_splits(config(tmp_path))
    damage(tmp_path / "tfds" / "wmt14_translate" / "de-en" / "1.0.0" / "dataset_info.json")
    with pytest.raises(UserError, match=message) as caught:
        load_splits(config(tmp_path))
    assert "\n" not in str(caught.value)


def test_who_waited_for_another_to_prepare_fetches_nothing(site, tmp_path, monkeypatch):
    @contextlib.contextmanager
    def waits(folder):
        with monkeypatch.context() as patch:
            patch.setattr(tfds, "alone_in", alone_in)
            load_splits(config(tmp_path))
        fetched.extend(site.fetched)
        yield folder

    fetched = []
    monkeypatch.setattr(tfds, "alone_in", waits)
    assert load_splits(config(tmp_path)).train.check() == 27
    assert len(fetched) == 4 and site.fetched == fetched
