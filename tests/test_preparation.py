"""From a configuration to a run's folder: what is checked before anything is written, and what is used again."""

import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest
from small_runs import pairs, run_config, write_pairs

from transformer_jax.config import Config
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import UserError
from transformer_jax.training.preparation import prepare, write_whole


def lines(path, *text):
    path.write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
    return str(path)


def refused(config, workdir):
    """The message with which preparation ends."""
    with pytest.raises(UserError) as error:
        prepare(config, workdir, print)
    return str(error.value)


def test_a_run_folder(tmp_path):
    config = run_config(tmp_path / "text")
    said = []
    prepared = prepare(config, tmp_path / "run", said.append)
    stored = Config.from_json((tmp_path / "run" / "config.json").read_text(), "config.json")
    assert stored == prepared.config and stored.model.vocab_size == prepared.tokenizer.size
    assert stored == dataclasses.replace(
        config, model=dataclasses.replace(config.model, vocab_size=stored.model.vocab_size)
    )
    assert Tokenizer.load(tmp_path / "run" / "tokenizer.model").digest == prepared.tokenizer.digest
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["config.json", "data", "tokenizer.model"]
    assert (len(prepared.train), len(prepared.dev)) == (40, 4)
    assert said == [f"tokenizer  {prepared.tokenizer.size} word pieces (bpe) learned from {config.data.train_source}"]


@pytest.mark.parametrize("part", ["train", "dev", "test"])
def test_unequal_files_are_refused_before_any_work(part, tmp_path):
    """T13, E1: 100 lines against 99, in each part; both names and counts, and no folder is left."""
    source = lines(tmp_path / "source.txt", *(f"line {i}" for i in range(100)))
    target = lines(tmp_path / "target.txt", *(f"line {i}" for i in range(100) if i != 40))
    config = run_config(tmp_path / "text", **{f"data__{part}_source": source, f"data__{part}_target": target})
    assert re.search(r"source\.txt has 100 lines but .*target\.txt has 99", refused(config, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_small_text_gives_fewer_pieces_and_the_model_has_as_many_rows(kind, tmp_path):
    """V1: 50 short sentences and 8000 pieces."""
    text = write_pairs(tmp_path / "few.tsv", pairs(50))
    config = run_config(tmp_path / "text", data__train_source=text, data__vocab_size=8000, data__tokenizer_type=kind)
    said = []
    prepared = prepare(config, tmp_path / "run", said.append)
    assert 260 < prepared.tokenizer.size < 8000
    assert prepared.config.model.vocab_size == prepared.tokenizer.size
    assert "the text gives no more: data.vocab_size asked for 8,000" in said[1]


def test_too_few_pieces_are_refused_with_the_least_number(tmp_path):
    """V1: size 10."""
    assert re.search(
        r"needs at least 2\d\d", refused(run_config(tmp_path / "text", data__vocab_size=10), tmp_path / "run")
    )


def test_a_given_tokenizer_is_copied_and_its_size_is_the_models(tmp_path):
    words = [sentence for pair in pairs(30, words=["xyz", "zzy"]) for sentence in pair]
    given = Tokenizer.train(words, tmp_path / "given.model", vocab_size=300)
    config = run_config(tmp_path / "text", data__tokenizer=str(tmp_path / "given.model"))
    prepared = prepare(config, tmp_path / "run", print)
    assert (tmp_path / "run" / "tokenizer.model").read_bytes() == (tmp_path / "given.model").read_bytes()
    assert prepared.config.model.vocab_size == given.size
    assert "none.model" in refused(
        run_config(tmp_path / "text", data__tokenizer=str(tmp_path / "none.model")), tmp_path / "new"
    )
    assert not (tmp_path / "new").exists()


def test_more_rows_than_pieces_are_kept_and_fewer_refused(tmp_path):
    """V1: the embedding may be larger than the tokenizer, as the paper's 37,000 in 40,960."""
    prepared = prepare(run_config(tmp_path / "text", model__vocab_size=320), tmp_path / "run", print)
    assert prepared.config.model.vocab_size == 320
    assert "model.vocab_size is 100, but" in refused(
        run_config(tmp_path / "text", model__vocab_size=100), tmp_path / "new"
    )
    assert not (tmp_path / "new" / "config.json").exists()


def test_dev_pairs_wider_than_any_training_pair_are_part_of_the_loss(tmp_path):
    """E6: batches of the dev text have widths of their own; one beyond data.max_length is left out."""
    rows = [("ab " * 10, "cd"), ("ab", "cd " * 10), ("ab " * 80, "cd")]
    dev = write_pairs(tmp_path / "dev.tsv", rows)
    for packing in (True, False):
        config = run_config(tmp_path / "text", data__dev_source=dev, data__max_length=32, data__packing=packing)
        prepared = prepare(config, tmp_path / str(packing), print)
        assert (prepared.dev.lengths[:2].max(axis=0) > prepared.train.lengths.max(axis=0)).all()
        taken = np.concatenate([batch.examples for batch in prepared.dev_plan.epoch(-1)])
        assert sorted(taken.tolist()) == [0, 1] and prepared.dev_plan.dropped == 1


def test_a_text_without_a_usable_pair_is_refused(tmp_path):
    dev = write_pairs(tmp_path / "dev.tsv", [("ab " * 80, "cd")])
    assert "dev.tsv: none of its 1 pairs" in refused(
        run_config(tmp_path / "text", data__dev_source=dev), tmp_path / "run"
    )


def test_what_a_command_left_that_failed_before_its_first_checkpoint_binds_nobody(tmp_path):
    """Out of memory at the first update: the next command has a smaller batch and learns other pieces."""
    first = prepare(run_config(tmp_path / "text", data__vocab_size=290), tmp_path / "run", print)
    (tmp_path / "run" / "checkpoints").mkdir()
    changed = run_config(tmp_path / "text", data__vocab_size=280, data__batch_tokens=32, model__d_ff=8)
    second = prepare(changed, tmp_path / "run", print)
    assert (first.tokenizer.size, second.tokenizer.size) == (290, 280)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"]["d_ff"] == 8


@pytest.mark.parametrize("left", ["averaged", "results.json"])
def test_results_without_checkpoints_are_not_trained_over(left, tmp_path):
    (tmp_path / "run" / left).mkdir(parents=True)
    assert f"has {left}, the result of a run, but no checkpoint" in refused(
        run_config(tmp_path / "text"), tmp_path / "run"
    )


def test_a_workdir_that_is_a_file_or_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    assert "file is a file: choose another --workdir" in refused(run_config(tmp_path / "text"), tmp_path / "file")
    assert "cannot be written" in refused(run_config(tmp_path / "text"), tmp_path / "file" / "run")


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    write_whole(tmp_path / "a.json", "old\n")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(UserError, match=r"a\.json: cannot be written \(No space left on device\)"):
            write_whole(tmp_path / "a.json", "new\n")
    assert (tmp_path / "a.json").read_text() == "old\n"
    write_whole(tmp_path / "a.json", "new\n")
    assert (tmp_path / "a.json").read_bytes() == b"new\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_tokenized_text_may_lie_elsewhere(tmp_path):
    config = run_config(tmp_path / "text", data__cache_dir=str(tmp_path / "cache"))
    prepared = prepare(config, tmp_path / "run", print)
    assert prepared.train.folder.parent == tmp_path / "cache" and not (tmp_path / "run" / "data").exists()
    assert isinstance(prepared.train.folder, pathlib.Path)


def test_more_parts_than_rows_are_refused(tmp_path):
    """G1: a slip in train.accumulate would fill every batch up with empty rows, and take as many times as long."""
    config = run_config(tmp_path / "text", train__accumulate=5)
    with pytest.raises(UserError, match=r"train\.accumulate is 5, but a batch has 4 rows to share out"):
        prepare(config, tmp_path / "run", print)
    assert not (tmp_path / "run" / "config.json").exists()
    prepare(run_config(tmp_path / "text", train__accumulate=4), tmp_path / "run", print)
