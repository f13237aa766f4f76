"""`transformer-jax prepare`: all that comes before training, once, and on from where it was stopped."""

import dataclasses

import pytest
from small_runs import pairs, run_config, write_pairs

from transformer_jax.cli.main import main
from transformer_jax.data import encoding, store, vocabulary
from transformer_jax.data.parallel_text import TsvFile
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.data.vocabulary import learn_vocabulary
from transformer_jax.training.preparation import prepare


def config_file(folder, config):
    """The configuration as a file that the command reads."""
    path = folder / "config.json"
    path.write_text(config.to_json(), encoding="utf-8")
    return str(path)


@pytest.fixture
def config(tmp_path):
    """Some pairs are blank, too long or unequal."""
    config = run_config(tmp_path / "text", data__max_length_ratio=2.0)
    with open(config.data.train_source, "a", encoding="utf-8") as file:
        file.write("\tab\nab ab\t\n" + " ab" * 40 + "\tab\nab\t" + "ab cd " * 3 + "\n")
    return config


@pytest.fixture
def work(monkeypatch):
    """How often word pieces were learned, and how many pairs were tokenized."""
    done = []
    train, encode = Tokenizer.train, encoding._encode

    def learned(*args, **options):
        done.append("learned")
        return train(*args, **options)

    def encoded(chunk, *rest):
        done.append(len(chunk))
        return encode(chunk, *rest)

    monkeypatch.setattr(Tokenizer, "train", learned)
    monkeypatch.setattr(encoding, "_encode", encoded)
    return done


@pytest.mark.parametrize("shared", [True, False])
def test_training_finds_all_done(tmp_path, config, work, capsys, shared):
    run = tmp_path / "run"
    where = ["--data.cache-dir", str(tmp_path / "cache")] if shared else ["--workdir", str(run)]
    assert main(["prepare", config_file(tmp_path, config), *where]) == 0
    out = capsys.readouterr().out
    assert "dropped are 2 blank, 1 too long, 1 of too unequal length" in out
    assert f"{where[0]} {where[1]}" in out.splitlines()[-1]
    assert work == ["learned", 44, 4]
    assert sorted(path.name for path in run.iterdir()) == ["data"] if not shared else not run.exists()
    work.clear()
    if shared:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, cache_dir=str(tmp_path / "cache")))
    prepared = prepare(config, run, print)
    assert work == []
    assert len(prepared.plan.kept) == 40 and prepared.tokenizer.size == prepared.config.model.vocab_size
    assert main(["prepare", config_file(tmp_path, config), *where]) == 0
    assert work == []


def test_another_vocabulary_is_learned_beside_the_first(tmp_path, config, work):
    for size in (290, 280, 290):
        argv = ["--data.cache-dir", str(tmp_path / "cache"), f"data.vocab_size={size}"]
        assert main(["prepare", config_file(tmp_path, config), *argv]) == 0
    assert [what for what in work if what == "learned"] == ["learned"] * 2


class Killed(BaseException):
    """Like a signal, it is nobody's error to handle."""


def test_a_command_that_was_killed_goes_on(tmp_path, config, work, monkeypatch, capsys):
    """While it learns, then in the middle of the text, then in the dev text: nothing that was done is done again."""
    monkeypatch.setattr(encoding, "CHUNK_PAIRS", 10)
    monkeypatch.setattr(store, "_COMMIT_SECONDS", -1.0)
    argv = ["prepare", config_file(tmp_path, config), "--workdir", str(tmp_path / "run")]

    def die(*args, **options):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Tokenizer, "save", die)
        main(argv)
    encode, count = encoding._encode, 0

    def die_later(*args):
        nonlocal count
        count += 1
        if count in (3, 7):
            raise Killed
        return encode(*args)

    monkeypatch.setattr(encoding, "_encode", die_later)
    for _ in range(2):
        with pytest.raises(Killed):
            main(argv)
    assert main(argv) == 0
    assert work == ["learned", "learned", 10, 10, 10, 10, 4, 4]
    whole = [*argv[:-1], str(tmp_path / "other")]
    assert main(whole) == 0
    contents = [
        {
            path.relative_to(tmp_path / run): path.read_bytes()
            for path in (tmp_path / run).rglob("*")
            if path.is_file() and path.name != "files.json"
        }
        for run in ("run", "other")
    ]
    assert contents[0] == contents[1]


def test_a_damaged_vocabulary_is_learned_anew(tmp_path, config, caplog):
    text, said = TsvFile(config.data.train_source), []
    first = learn_vocabulary(text, config.data, tmp_path / "cache", said.append)
    (path,) = (tmp_path / "cache").iterdir()
    path.write_bytes(b"cut")
    assert learn_vocabulary(text, config.data, tmp_path / "cache", said.append).digest == first.digest
    assert "not a SentencePiece model" in caplog.text
    learn_vocabulary(text, config.data, tmp_path / "cache", said.append)
    assert "learned before" in said[-1]


def test_the_sample_that_pieces_are_learned_from_is_limited(tmp_path, config, monkeypatch):
    seen = []
    train = Tokenizer.train
    monkeypatch.setattr(
        vocabulary.Tokenizer, "train", lambda lines, *a, **o: train(seen.extend(lines) or seen, *a, **o)
    )
    few = dataclasses.replace(config.data, vocabulary_sentences=1000)
    text = TsvFile(write_pairs(tmp_path / "many.tsv", pairs(1300)))
    learn_vocabulary(text, few, tmp_path / "cache", print)
    assert 800 < len(seen) <= 1000


def test_dev_text_that_training_would_refuse_is_refused_here(tmp_path, config, capsys):
    dev = write_pairs(tmp_path / "blank.tsv", [("", "ab"), ("ab " * 40, "ab")])
    argv = ["--workdir", str(tmp_path / "run"), "--data.dev-source", dev]
    assert main(["prepare", config_file(tmp_path, config), *argv]) == 2
    captured = capsys.readouterr()
    assert "blank.tsv: none of its 2 pairs has text on both sides" in captured.err and "ready" not in captured.out


def test_a_place_that_cannot_be_written_is_refused_before_pieces_are_learned(tmp_path, config, work, capsys):
    (tmp_path / "file").write_text("no folder")
    assert main(["prepare", config_file(tmp_path, config), "--workdir", str(tmp_path / "file")]) == 2
    assert "cannot be written to (Not a directory); choose another folder" in capsys.readouterr().err
    assert work == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--workdir or --data.cache-dir must be given"),
        (["--workdir", "w", "--processes", "0"], "--processes is 0, but must be at least 1"),
        (["--workdir", "w", "--data.max-length-ratio", "0.5"], "data.max_length_ratio is 0.5, but must be from 1"),
        (["--workdir", "w", "--data.train-source", "nowhere"], "data.train_source is nowhere, which does not exist"),
        (["--workdir", "w", "--data.train-source", ",b"], "data.train_source is ',b', which has an empty name"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, config, capsys, argv, message):
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", config_file(tmp_path, config), *argv]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1
    assert not (tmp_path / "w").exists()
