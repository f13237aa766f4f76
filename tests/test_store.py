"""The store of token ids: every pair at its place, whole or not at all, never stale, never rebuilt without need."""

import itertools
import logging
import pickle
import threading

import numpy as np
import pytest

from transformer_jax.data import encoding, workplace
from transformer_jax.data import store as store_module
from transformer_jax.data.parallel_text import ParallelText, TwoFiles
from transformer_jax.data.store import TokenStore, build_store
from transformer_jax.data.tokenizer import EOS_ID, Tokenizer
from transformer_jax.errors import UserError

PAIRS = [(f"the file number {i} {'x ' * (i % 9)}", f"die Datei Nummer {i}") for i in range(60)]
PAIRS[4] = ("", "leer")
PAIRS[7] = ("blank target", "  ")


class Listed(ParallelText):
    """Pairs in memory that count how often they are read."""

    def __init__(self, pairs, fail_at=None):
        self.pairs, self.fail_at, self.reads = pairs, fail_at, 0

    @property
    def name(self):
        return "listed"

    def __iter__(self):
        self.reads += 1
        for number, pair in enumerate(self.pairs):
            if number == self.fail_at:
                raise UserError("line is bad")
            yield pair

    def check(self):
        return len(self.pairs)

    def digest(self):
        return str(hash(tuple(self.pairs)))


class Together(Listed):
    """Pairs of which no builder knows the digest before all ask for it."""

    def __init__(self, pairs, gate):
        super().__init__(pairs)
        self.gate, self.asked = gate, False

    def digest(self):
        if not self.asked:
            self.asked = True
            self.gate.wait(timeout=120)
        return super().digest()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    lines = [sentence for pair in PAIRS for sentence in pair]
    return Tokenizer.train(lines, tmp_path_factory.mktemp("tokenizer") / "m", vocab_size=330)


def rows(store):
    return [(store.source(i).tolist(), store.target(i).tolist()) for i in range(len(store))]


def expected(tokenizer, pairs=PAIRS):
    return [tuple(tokenizer.encode(pair)) for pair in pairs]


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(encoding, "CHUNK_PAIRS", 16)


def test_every_pair_is_at_its_place(tokenizer, tmp_path, small_chunks):
    """T1, T13: blank sides are kept, so that example i is line i + 1."""
    progress = []
    store = build_store(Listed(PAIRS), tokenizer, tmp_path, on_progress=progress.append)
    assert len(store) == 60
    assert rows(store) == expected(tokenizer)
    assert store.source(4).tolist() == [EOS_ID] == store.target(7).tolist()
    assert progress == [16, 32, 48, 60]
    assert store.source_ids.dtype == store.target_ids.dtype == np.uint16
    assert store.source_offsets.dtype == np.int64
    assert store.lengths.dtype == np.int32 and store.lengths.shape == (60, 2)
    assert store.lengths.tolist() == [[len(source), len(target)] for source, target in expected(tokenizer)]
    with pytest.raises(IndexError):
        store.source(60)
    with pytest.raises(IndexError):
        store.target(-1)
    with pytest.raises(ValueError, match="read-only"):
        store.source(0)[0] = 1


def test_text_is_tokenized_once(tokenizer, tmp_path):
    text = Listed(PAIRS)
    first = build_store(text, tokenizer, tmp_path)
    second = build_store(text, tokenizer, tmp_path)
    assert text.reads == 1
    assert rows(first) == rows(second)
    assert rows(pickle.loads(pickle.dumps(first))) == rows(first)
    assert rows(TokenStore(first.folder)) == rows(first)


def test_other_text_or_tokenizer_never_meets_old_ids(tokenizer, tmp_path):
    changed = [*PAIRS[:-1], ("another", "andere")]
    other = Tokenizer.train(["the file die Datei Nummer x leer blank target"], tmp_path / "m", vocab_size=300)
    first = build_store(Listed(PAIRS), tokenizer, tmp_path)
    assert rows(build_store(Listed(changed), tokenizer, tmp_path)) == expected(tokenizer, changed)
    assert rows(build_store(Listed(PAIRS), other, tmp_path)) == expected(other)
    assert rows(first) == expected(tokenizer)


def test_a_failed_build_goes_on_where_it_was(tokenizer, tmp_path, small_chunks, monkeypatch):
    """A disk that was not there for a moment costs no hours."""
    monkeypatch.setattr(store_module, "_COMMIT_SECONDS", -1.0)
    monkeypatch.setattr(encoding, "_SERIAL_CHUNKS", 1)
    with pytest.raises(UserError, match="line is bad"):
        build_store(Listed(PAIRS, fail_at=40), tokenizer, tmp_path, processes=1)
    progress = []
    assert rows(build_store(Listed(PAIRS), tokenizer, tmp_path, on_progress=progress.append)) == expected(tokenizer)
    assert progress == [48, 60]


def test_a_lost_process_costs_nothing_that_was_written(tokenizer, tmp_path, small_chunks, monkeypatch):
    """What its message says: that --processes 1 goes on from here."""
    monkeypatch.setattr(store_module, "_COMMIT_SECONDS", -1.0)
    encode = store_module.encode_pairs

    def lose(*arguments):
        yield from itertools.islice(encode(*arguments), 2)
        raise UserError("a process that tokenizes ended before its work was done")

    with monkeypatch.context() as patch, pytest.raises(UserError, match="a process that tokenizes ended"):
        patch.setattr(store_module, "encode_pairs", lose)
        build_store(Listed(PAIRS), tokenizer, tmp_path)
    progress = []
    assert rows(build_store(Listed(PAIRS), tokenizer, tmp_path, on_progress=progress.append)) == expected(tokenizer)
    assert progress == [48, 60]


def test_a_failed_build_of_text_that_changed_leaves_nothing(tokenizer, tmp_path, small_chunks, monkeypatch):
    monkeypatch.setattr(encoding, "_SERIAL_CHUNKS", 1)
    text = Listed(list(PAIRS), fail_at=40)

    def change(done):
        text.pairs.append(("new", "neu"))

    with pytest.raises(UserError, match="line is bad"):
        build_store(text, tokenizer, tmp_path, processes=1, on_progress=change)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["source_ids", "source_offsets", "target_ids", "target_offsets", "header.json"])
@pytest.mark.parametrize("damage", ["cut", "longer", "gone", "empty"])
def test_a_damaged_store_is_rebuilt_with_a_warning(tokenizer, tmp_path, caplog, name, damage):
    folder = build_store(Listed(PAIRS), tokenizer, tmp_path).folder
    path = folder / name
    if damage == "gone":
        path.unlink()
    else:
        data = path.read_bytes()
        path.write_bytes({"cut": data[:-2], "longer": data + b"xx", "empty": b""}[damage])
    with pytest.raises(UserError, match="no sound tokenized text"):
        TokenStore(folder)
    with caplog.at_level(logging.WARNING):
        assert rows(build_store(Listed(PAIRS), tokenizer, tmp_path)) == expected(tokenizer)
    assert "it is rebuilt now" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_of_builders_at_once_one_works_and_the_others_wait(tokenizer, tmp_path):
    """All of them get past the look for a finished store before any of them has finished one."""
    gate = threading.Barrier(4)
    results, errors, texts = [], [], [Together(PAIRS, gate) for _ in range(4)]

    def build(text):
        try:
            results.append(rows(build_store(text, tokenizer, tmp_path)))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=build, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert results == [expected(tokenizer)] * 4
    assert sum(text.reads for text in texts) == 1
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("after", ["made", "locked"])
def test_a_folder_taken_away_while_it_is_entered_is_made_again(tmp_path, monkeypatch, after):
    """By whoever ended just then: before the lock is asked for, and while it is waited for."""
    folder, locked, calls = tmp_path / "a" / "b", workplace._locked, []

    def taken_away_once(path):
        calls.append(path)
        if after == "made" and len(calls) == 1:
            path.rmdir()
        descriptor = locked(path)
        if after == "locked" and len(calls) == 1:
            path.rmdir()
        return descriptor

    monkeypatch.setattr(workplace, "_locked", taken_away_once)
    with workplace.alone_in(folder) as entered:
        assert entered == folder
        assert folder.is_dir()
    assert calls == [folder] * 2
    assert not folder.exists()


def test_who_moved_the_folder_away_leaves_the_next_ones_alone(tmp_path):
    with workplace.alone_in(tmp_path / "a") as folder:
        folder.rename(tmp_path / "done")
        folder.mkdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "done"]


def test_a_file_where_the_folder_should_be_is_an_error_and_stays(tmp_path):
    (tmp_path / "x").write_text("theirs")
    with pytest.raises(NotADirectoryError), workplace.alone_in(tmp_path / "x"):
        pass
    assert (tmp_path / "x").read_text() == "theirs"


def test_where_nothing_can_be_locked_each_builder_has_a_place_of_its_own(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(workplace, "_locked", lambda folder: None)
    assert rows(build_store(Listed(PAIRS), tokenizer, tmp_path)) == expected(tokenizer)
    assert [path.name[:7] for path in tmp_path.iterdir()] == ["tokens-"]


def test_several_processes_give_the_same_store(tokenizer, tmp_path, small_chunks, monkeypatch):
    """More chunks than are encoded in one process, and more than the two processes take at once; in order."""
    monkeypatch.setattr(encoding, "_SERIAL_CHUNKS", 2)
    pairs = PAIRS * 7
    store = build_store(Listed(pairs), tokenizer, tmp_path, processes=2)
    assert rows(store) == expected(tokenizer, pairs)


class Killed(BaseException):
    """Like a signal, it is nobody's error to handle."""


@pytest.mark.parametrize("damage", [None, "short", "garbage"])
def test_a_killed_build_goes_on_where_it_was(tokenizer, tmp_path, small_chunks, monkeypatch, damage):
    """After 32 of 60 pairs were committed and 48 done; what was not committed, or is damaged, is done again."""
    monkeypatch.setattr(store_module, "_COMMIT_SECONDS", -1.0)

    def kill(done):
        if done == 48:
            raise Killed

    with pytest.raises(Killed):
        build_store(Listed(PAIRS), tokenizer, tmp_path, on_progress=kill)
    (unfinished,) = tmp_path.iterdir()
    if damage == "short":
        (unfinished / "target_ids").write_bytes(b"")
    elif damage == "garbage":
        (unfinished / "progress.json").write_text("{")
    progress = []
    store = build_store(Listed(PAIRS), tokenizer, tmp_path, on_progress=progress.append)
    assert rows(store) == expected(tokenizer)
    assert progress == ([48, 60] if damage is None else [16, 32, 48, 60])
    assert [path.name for path in tmp_path.iterdir()] == [store.folder.name]
    assert len(list(store.folder.iterdir())) == 5


def test_text_that_changes_meanwhile_is_refused(tokenizer, tmp_path):
    text = Listed(list(PAIRS))
    with pytest.raises(UserError, match="listed changed while it was tokenized"):
        build_store(text, tokenizer, tmp_path, on_progress=lambda done: text.pairs.append(("new", "neu")))
    assert list(tmp_path.iterdir()) == []


def test_lengths_are_computed_in_blocks(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "_BLOCK", 7)
    store = build_store(Listed(PAIRS), tokenizer, tmp_path)
    assert store.lengths.tolist() == [[len(source), len(target)] for source, target in expected(tokenizer)]


def test_a_store_without_pairs_opens(tokenizer, tmp_path):
    store = build_store(Listed([]), tokenizer, tmp_path)
    assert len(store) == 0
    assert store.lengths.shape == (0, 2)


def test_large_vocabularies_get_wider_ids(tokenizer, tmp_path):
    class Wide(Tokenizer):
        def __init__(self):
            self.size, self.digest = 70_000, "wide"

        def encode(self, lines, *, num_threads=-1):
            return [[69_999, 1] for _ in lines]

    store = build_store(Listed(PAIRS), Wide(), tmp_path)
    assert store.source_ids.dtype == np.int32
    assert store.source(3).tolist() == [69_999, 1]


def test_a_folder_that_cannot_be_written_is_refused(tokenizer, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot be written to .*set data\.cache_dir"):
        build_store(Listed(PAIRS), tokenizer, tmp_path / "file" / "data")


def test_windows_line_ends_and_byte_order_marks_give_the_same_ids(tokenizer, tmp_path):
    """T5: LF, CRLF and BOM + LF, from file to ids."""
    target = tmp_path / "target"
    target.write_bytes("".join(f"{pair[1]}\n" for pair in PAIRS).encode())
    plain = "".join(f"{pair[0]}\n" for pair in PAIRS).encode()
    stores = []
    for name, data in (("lf", plain), ("crlf", plain.replace(b"\n", b"\r\n")), ("bom", b"\xef\xbb\xbf" + plain)):
        (tmp_path / name).write_bytes(data)
        stores.append(build_store(TwoFiles(str(tmp_path / name), str(target)), tokenizer, tmp_path / "data"))
    assert rows(stores[0]) == rows(stores[1]) == rows(stores[2]) == expected(tokenizer)
