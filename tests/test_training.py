"""Training from text to scores: what a run learns, writes and prints, and what stops it."""

import dataclasses
import itertools
import json
import math
import shutil
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import QUICK
from small_runs import metrics, pairs, programs_kept_in, run_config, saved, straight_run, write_pairs
from tensorboardX.proto.event_pb2 import Event

from transformer_jax.checkpointing.checkpoints import Checkpoints
from transformer_jax.data.batches import Batch, assemble, batches_from
from transformer_jax.errors import UserError
from transformer_jax.ops.masks import BOS
from transformer_jax.parallel.mesh import make_mesh
from transformer_jax.training.interruption import only_process
from transformer_jax.training.loop import train
from transformer_jax.training.metrics import read_metrics
from transformer_jax.training.preparation import prepare
from transformer_jax.training.state import init_params, init_state, make_optimizer
from transformer_jax.training.step import make_loss_step, make_train_step
from transformer_jax.translation.translator import Translator


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory):
    with programs_kept_in(tmp_path_factory.mktemp("programs")):
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of six updates, and its configuration."""
    return straight_run(tmp_path_factory.mktemp("run"))


def events(run):
    """(name, step, value) of every scalar in the TensorBoard files: records of length, checksum, data, checksum."""
    found = []
    for path in sorted(run.glob("events.out.tfevents.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            at += 12 + length + 4
    return found


@pytest.mark.slow
def test_a_run_learns_to_reverse_sentences(tmp_path):
    """The whole way: text to pieces, batches, updates, validation, the mean of checkpoints, translation from the run's
    folder."""
    config = run_config(
        tmp_path / "text",
        model__d_model=32, model__d_ff=64, model__num_heads=4, model__dropout=0.0,
        optimizer__learning_rate=5e-3, optimizer__warmup_steps=50,
        data__train_source=write_pairs(tmp_path / "many.tsv", short_pairs(1500)),
        data__dev_source=write_pairs(tmp_path / "dev.tsv", short_pairs(20, seed=1)),
        data__test_source=write_pairs(tmp_path / "test.tsv", short_pairs(20, seed=2)),
        data__batch_tokens=512, train__steps=350, train__evaluate_every=350, train__checkpoint_every=25,
        train__label_smoothing=0.0, train__average_checkpoints=3, train__log_every=50,
    )  # fmt: skip
    train(config, tmp_path / "run")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["scores"]["bleu"] > 90 and results["scores"]["sentences"] == 20
    assert results["averaged_steps"] == [300, 325, 350]
    assert metrics(tmp_path / "run", "nll")[-1][0] < 0.1
    assert Translator.load(tmp_path / "run")("kl ab gh") == "gh ab kl"


def short_pairs(count, seed=0):
    return pairs(count, seed, words=["ab", "cd", "gh", "kl"], longest=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"model__scan_layers": False},
        {"model__dtype": "bfloat16", "model__remat": "dots", "optimizer__decay": "linear"},
        {"model__norm": "pre", "model__positions": "learned", "model__tied_embeddings": False},
    ],
    ids=["unrolled", "bfloat16", "pre-norm"],
)
def test_every_kind_of_model_learns(changes, tmp_path):
    """Updates alone, on the batches that the loop would take."""
    config = run_config(tmp_path / "text", **changes, train__steps=30)
    prepared = prepare(config, tmp_path / "run", print)
    config, mesh = prepared.config, make_mesh(config.mesh)
    optimizer = make_optimizer(config.optimizer, config.model.d_model, 30)
    state = init_state(config.model, optimizer, 0)
    step = None
    losses = []
    for _, _, planned in itertools.islice(batches_from(prepared.plan, 0, 0), 30):
        batch = jax.device_put(assemble(planned, prepared.train, bos_id=BOS))
        step = step or make_train_step(config, optimizer, mesh).lower(state, batch).compile(compiler_options=QUICK)
        state, found = step(state, batch)
        losses.append(float(found["loss"]))
    assert all(map(math.isfinite, losses)) and sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert all(leaf.dtype == jax.numpy.float32 for leaf in jax.tree.leaves(state.params))


@pytest.mark.slow
def test_a_run_of_unpacked_batches(tmp_path):
    """Two widths, each compiled once, each update's first of a width left out of the speed."""
    long = write_pairs(tmp_path / "long.tsv", pairs(40, longest=18))
    config = run_config(tmp_path / "text", data__train_source=long, data__packing=False, data__max_length=32)
    train(config, tmp_path / "run")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "2 static shape(s), rows x (source + target): 4 x (16 + 16), 2 x (32 + 32)" in log
    assert log.count("compiled   ") == 2
    losses = [loss for (loss,) in metrics(tmp_path / "run", "loss")]
    assert len(losses) == 6 and all(map(math.isfinite, losses))


@pytest.mark.slow
def test_packed_and_unpacked_batches_give_the_same_loss(tmp_path):
    """Several static shapes, each pair alone or among others in a row: the mean over pieces is one number."""
    means = []
    long = write_pairs(tmp_path / "long.tsv", pairs(40, longest=18))
    for packing in (True, False):
        config = run_config(
            tmp_path / "text", data__train_source=long, data__packing=packing, data__max_length=40, model__dropout=0.0
        )
        prepared = prepare(config, tmp_path / str(packing), print)
        params = init_params(prepared.config.model, seed=1)
        batches = prepared.plan.epoch(0)
        assert len({batch.shape for batch in batches}) == (1 if packing else 2)
        loss_step = make_loss_step(prepared.config, make_mesh(config.mesh))
        sums = [loss_step(params, assemble(batch, prepared.train, bos_id=BOS)) for batch in batches]
        loss, tokens = (sum(float(part[name]) for part in sums) for name in ("loss", "tokens"))
        assert tokens == prepared.train.lengths[:, 1].sum()
        means.append(loss / tokens)
    assert means[0] == pytest.approx(means[1], rel=1e-6)


def test_lines_of_metrics(run):
    folder, config = run
    lines = read_metrics(folder / "metrics.jsonl")
    updates = [line for line in lines if "loss" in line]
    assert [line["step"] for line in updates] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "dev_bleu" in line] == [2, 4, 6]
    names = {"step", "loss", "nll", "target_tokens", "gradient_norm", "update_norm", "param_norm", "learning_rate",
             "skipped", "skipped_in_row", "host_peak_bytes", "compilations"}  # fmt: skip
    rates = {"tokens_per_second", "fill", "data_seconds", "device_seconds", "checkpoint_seconds", "host_seconds"}
    # The first update waits for the compiler, so it says nothing about speed.
    assert updates[0].keys() == names and updates[2].keys() == names | rates
    assert all(0 < line["fill"] <= 1 and 0 < line["tokens_per_second"] < 1e8 for line in updates[2::2])
    assert all(math.log(line["dev_perplexity"]) == pytest.approx(line["dev_nll"]) for line in lines[2::3])
    assert lines[2]["dev_signature"].startswith("nrefs:1|")
    assert config.data.max_length == 16


def test_the_learning_rate_of_each_update_is_the_schedules(run):
    """S1: warm-up over 4 updates to 0.01, the first one not 0; then as step^-0.5."""
    expected = [0.0025, 0.005, 0.0075, 0.01, 0.01 * (4 / 5) ** 0.5, 0.01 * (4 / 6) ** 0.5]
    assert [rate for (rate,) in metrics(run[0], "learning_rate")] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_tensorboard_has_the_same_numbers(run):
    found = {(name, step): value for name, step, value in events(run[0])}
    for line in read_metrics(run[0] / "metrics.jsonl"):
        for name, value in line.items():
            if name not in ("step", "dev_signature"):
                assert found.pop((name, line["step"])) == pytest.approx(value, rel=1e-6)
    assert found == {}


def test_results_and_the_curve(run):
    folder, _ = run
    results = json.loads((folder / "results.json").read_text())
    assert results["step"] == 6 and results["split"] == "test" and results["averaged_steps"] == [4, 6]
    assert results["scores"]["sentences"] == 3 and results["training_seconds"] > 0
    assert results["direction"] == "en-xx" and results["perplexity"]["pieces"] > 3
    assert sum("translation " in line for line in results["page"]) == 3
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    log = (folder / "log.txt").read_text()
    assert "averaged" not in log and "mean of checkpoints 4, 6" in log and "BLEU" in log
    assert sum(line.split(" ", 2)[2].startswith("compiled") for line in log.split("\n") if line.count(" ") > 2) == 1


def test_a_finished_run_run_again_prints_its_scores_and_changes_nothing(run, capsys):
    folder, config = run
    kept = ("results.json", "metrics.jsonl", "config.json", "averaged/config.json")
    before = saved(folder), [(folder / name).read_bytes() for name in kept]
    train(config, folder)
    assert (saved(folder), [(folder / name).read_bytes() for name in kept]) == before
    out = capsys.readouterr().out
    assert "chrF2" in out and "scoring" not in out and "compiled" not in out


@pytest.mark.parametrize("changes", [{"search__beam_size": 3}, {"train__average_checkpoints": 1}, {"text": "test"}])
def test_scores_of_another_search_mean_or_text_are_not_those_that_are_there(changes, run, tmp_path, capsys):
    """None of these changes an update, so the run takes them: the scores that it then prints must be by them."""
    folder, config = tmp_path / "run", run[1]
    shutil.copytree(run[0], folder)
    if "text" in changes:
        other = write_pairs(tmp_path / "test.tsv", pairs(2, seed=8))
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, test_source=other))
    for section, name in (key.split("__") for key in changes if "__" in key):
        part = dataclasses.replace(getattr(config, section), **{name: changes[f"{section}__{name}"]})
        config = dataclasses.replace(config, **{section: part})
    train(config, folder)
    results = json.loads((folder / "results.json").read_text())
    assert "scoring" in capsys.readouterr().out
    assert results["averaged_steps"] == ([6] if "train__average_checkpoints" in changes else [4, 6])
    assert results["scores"]["sentences"] == (2 if "text" in changes else 3)


def test_a_damaged_mean_is_passed_over_loudly(run, tmp_path):
    """The run's own checkpoints are sound: they translate."""
    folder = tmp_path / "run"
    shutil.copytree(run[0], folder)
    (record,) = (folder / "averaged" / "checkpoints").glob("*/record/record.json")
    record.write_text("{}")
    warnings = []
    translator = Translator.load(folder, warn=warnings.append)
    assert "averaged is passed over" in warnings[0] and "transformer-jax average" in warnings[0]
    assert translator.step in saved(run[0]) and "checkpoint" in translator.note


def test_parameters_that_are_not_finite_are_not_saved(tmp_path, monkeypatch):
    """N3: an update may spoil them while the loss before it was finite."""
    monkeypatch.setattr("transformer_jax.training.loop.all_finite", lambda params: jnp.array(False))
    with pytest.raises(UserError, match=r"parameters are not finite after it; nothing was saved"):
        train(run_config(tmp_path), tmp_path / "run")
    assert saved(tmp_path / "run") == {}


def test_a_second_training_in_a_folder_changes_nothing_there(tmp_path):
    """The lock comes before anything is written."""
    folder = tmp_path / "run"
    with only_process(folder), pytest.raises(UserError, match="another process is training there"):
        train(run_config(tmp_path / "text"), folder)
    assert not folder.exists()


@pytest.mark.slow
def test_the_same_seed_repeats_a_run_and_another_does_not(run, tmp_path):
    """J7."""
    folder, config = run
    train(config, tmp_path / "same")
    assert saved(tmp_path / "same") == saved(folder)
    assert metrics(tmp_path / "same") == metrics(folder)
    other = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=1, steps=1))
    train(other, tmp_path / "other")
    assert metrics(tmp_path / "other", "loss")[0] != metrics(folder, "loss")[0]


def test_translations_have_no_part_in_chance(run):
    """J7: dropout is off, whatever the configuration's seed and however often."""
    translator = Translator.load(run[0])
    config = translator.config
    seeded = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=99))
    other = Translator(seeded, translator._params, translator.tokenizer)
    found = [each.translate(["ab cd", "ef gh ij"]) for each in (translator, translator, other)]
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_validation_scores_every_sentence(tmp_path):
    """E6: 11 sentences in batches of few, one too long for a training batch and for the search."""
    rows = [(f"ab cd {'ef ' * i}", "gh") for i in range(10)] + [("kl " * 40, "mn")]
    config = run_config(
        tmp_path / "text",
        data__dev_source=write_pairs(tmp_path / "dev.tsv", rows), data__test_source=None,
        data__max_length=32, train__steps=1,
    )  # fmt: skip
    train(config, tmp_path / "run")
    assert metrics(tmp_path / "run", "dev_sentences") == [(11,)]
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["split"] == "dev" and results["scores"]["sentences"] == 11
    assert sum("dev.tsv, dev (no test text was given) en-xx" in line for line in results["page"]) > 3
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "line 11 has" in log and "is cut after 16" in log
    assert "no test text was given: at its end the run is scored on the dev text" in log
    # Wider than any training pair, yet within data.max_length: part of the loss.
    assert "loss over 10 pairs of 11, the first 11 translated" in log


@pytest.mark.slow
def test_updates_that_are_not_finite_end_the_run(tmp_path, monkeypatch):
    """N3: a learning rate of 1e4 after a good checkpoint; no checkpoint is saved that is not finite."""
    config = run_config(tmp_path / "text", train__steps=5, train__checkpoint_every=5)
    train(config, tmp_path / "run")
    good = saved(tmp_path / "run")[5]
    wild = run_config(
        tmp_path / "text", train__steps=40, train__checkpoint_every=1, train__keep_checkpoints=50,
        train__evaluate_every=50, train__skip_limit=3, optimizer__learning_rate=1e4,
    )  # fmt: skip
    # Another learning rate is refused otherwise.
    monkeypatch.setattr("transformer_jax.training.preparation._binding", lambda config: {})
    with pytest.raises(
        UserError,
        match=r"last of 3 skipped in a row .* the (loss|gradient norm) is (nan|inf) .*checkpoint \d+ is sound",
    ):
        train(wild, tmp_path / "run")
    after = saved(tmp_path / "run")
    assert after[5] == good
    for step in after:
        translator = Translator.load(tmp_path / "run", step=step)
        assert all(map(lambda leaf: bool(jax.numpy.isfinite(leaf).all()), jax.tree.leaves(translator._params)))


def test_a_dev_loss_that_is_not_finite_stops_the_run_before_its_checkpoint(tmp_path, monkeypatch):
    """N3: the update itself was finite, what it made is not."""
    nan = {"nll": math.nan, "tokens": 1.0}
    monkeypatch.setattr("transformer_jax.training.loop.make_loss_step", lambda config, mesh: lambda *_: nan)
    with pytest.raises(UserError, match=r"update 2: the loss of the dev text is nan .* nothing was saved before"):
        train(run_config(tmp_path / "text"), tmp_path / "run")
    assert saved(tmp_path / "run") == {}
    assert "stopped by UserError: update 2" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.slow
def test_memory_is_flat(tmp_path, monkeypatch):
    """Arrays alive before each checkpoint: updates, validations and checkpoints leave none behind.

    How many batches lie ready depends on the threads: two ahead, one on its way there, and those in use are few.
    """
    alive, batches = [], []
    save = Checkpoints.save

    def counting(self, *arguments, **options):
        self.wait()
        arrays = jax.live_arrays()
        batches.append(sum(array.ndim == 2 and array.dtype == np.int32 for array in arrays))
        alive.append(len(arrays) - batches[-1])
        save(self, *arguments, **options)

    monkeypatch.setattr(Checkpoints, "save", counting)
    train(run_config(tmp_path / "text", train__steps=12, train__checkpoint_every=1), tmp_path / "run")
    assert len(alive) == 13 and len(set(alive[2:12])) == 1, alive
    assert max(batches) <= 6 * len(Batch._fields)
