"""A run that can be written but not locked is trained by one command at a time."""

import contextlib
import json
import subprocess
import sys
import threading
import time

import pytest
from etils import epath

from transformer_jax.errors import UserError
from transformer_jax.training import presence
from transformer_jax.training.presence import NAME, Word, only_trainer


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """Short times, and writes that are whole or not at all, as an object store's are."""

    def write(self, text):
        unfinished = self._path.with_name(f"{threading.get_ident()}")
        unfinished.write_text(text)
        unfinished.replace(self._path)

    monkeypatch.setattr(Word, "_write", write)
    # It would end the tests, and no test would have failed.
    monkeypatch.setattr(presence, "leave_now", lambda code, message: None)
    for name, seconds in {"RENEWED": 0.05, "WATCHED": 0.5, "SETTLED": 0.1}.items():
        monkeypatch.setattr(presence, name, seconds)


@pytest.fixture
def run(tmp_path):
    return epath.Path(tmp_path) / "run"


def test_a_second_command_is_refused_while_the_first_trains_and_not_after(run):
    said = []
    with only_trainer(run, said.append):
        with pytest.raises(UserError, match="is training there; wait for its end"), only_trainer(run, said.append):
            pass
        time.sleep(4 * presence.RENEWED)  # what was refused took nothing away
        assert (run / NAME).exists()
    assert not (run / NAME).exists()
    assert len(said) == 1 and "looking for" in said[0]
    with only_trainer(run, said.append):
        pass
    assert len(said) == 1


def test_an_error_takes_the_word_away_too(run):
    with pytest.raises(ZeroDivisionError), only_trainer(run, print):
        raise ZeroDivisionError
    assert not (run / NAME).exists()


def test_what_a_killed_command_left_is_taken_over(run):
    Word(run / NAME).renew()
    said = []
    with only_trainer(run, said.append):
        assert json.loads((run / NAME).read_text())["count"] >= 1
    assert len(said) == 1


def test_of_two_that_begin_together_one_trains(run, monkeypatch):
    monkeypatch.setattr(presence, "RENEWED", 5.0)  # or the other's thread would end this process before it is refused
    monkeypatch.setattr(presence, "SETTLED", 1.0)
    both_have_looked, look = threading.Barrier(2), Word.require_alone
    monkeypatch.setattr(Word, "require_alone", lambda self, say: (look(self, say), both_have_looked.wait()))
    entered, refused = [], []

    def begin(name):
        with contextlib.suppress(UserError):
            try:
                with only_trainer(run, lambda line: None):
                    entered.append(name)
                    time.sleep(1)
            except UserError:
                refused.append(name)

    threads = [threading.Thread(target=begin, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(entered) == len(refused) == 1


PROGRAM = """
import sys, time
from etils import epath
from transformer_jax.training import presence
presence.RENEWED, presence.SETTLED = 0.1, 0.0
with presence.only_trainer(epath.Path(sys.argv[1]), print):
    print("entered", flush=True)
    time.sleep(60)
"""


def test_a_command_that_finds_another_in_its_place_ends(run):
    command = [sys.executable, "-c", PROGRAM, str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "entered\n"
        other = Word(run / NAME)
        while process.poll() is None:  # until its own word does not happen to come after this one
            other.renew()
            time.sleep(0.3)
        assert process.returncode == 2
        assert "is training there" in process.stderr.read()
    assert other.taken() is None


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    at = epath.Path(tmp_path) / "file"
    with (
        pytest.raises(UserError, match=r"cannot be read or written there .*name another --workdir"),
        only_trainer(at, print),
    ):
        pass


@pytest.mark.parametrize("left", ["", "not json", "{}", "[]", "3", "null", '{"host": 1}', "\ud800"])
def test_what_is_no_word_is_taken_over_as_a_killed_commands(run, left):
    run.mkdir()
    (run / NAME).write_bytes(left.encode(errors="surrogatepass"))
    said = []
    with only_trainer(run, said.append):
        assert json.loads((run / NAME).read_text())["count"] >= 1
    assert len(said) == 1 and "an unknown command" in said[0]
    assert not (run / NAME).exists()


def test_a_signal_while_the_word_settles_takes_it_away(run, monkeypatch):
    def interrupted(seconds):
        assert (run / NAME).exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(presence.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt), only_trainer(run, print):
        pass
    assert not (run / NAME).exists()


class StoreError(Exception):
    """As gcsfs has them: no OSError."""


def test_a_store_that_fails_at_the_end_or_meanwhile_spoils_nothing(run, monkeypatch):
    with only_trainer(run, print):
        monkeypatch.setattr(Word, "_found", lambda self: (_ for _ in ()).throw(StoreError("503")))
        time.sleep(4 * presence.RENEWED)
    monkeypatch.undo()
    assert (run / NAME).exists()


def test_a_store_that_fails_at_the_beginning_is_an_error_in_a_sentence(run, monkeypatch):
    monkeypatch.setattr(Word, "renew", lambda self: (_ for _ in ()).throw(StoreError("503")))
    message = r"training.json cannot be read or written there \(503\)"
    with pytest.raises(UserError, match=message), only_trainer(run, print):
        pass


def test_a_store_that_hangs_does_not_keep_a_command_from_its_end(run, monkeypatch):
    monkeypatch.setattr(presence, "_GOODBYE", 0.2)
    answered = threading.Event()
    with only_trainer(run, print):
        monkeypatch.setattr(Word, "taken", lambda self: answered.wait())
        began = time.monotonic()
    assert time.monotonic() - began < 10
    answered.set()
