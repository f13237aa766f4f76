"""Updates that are not finite: skipped, counted, survived by a stop; and what is left of a run that they end."""

import contextlib
import dataclasses
import itertools
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import metrics, programs_kept_in, run_config, saved

from transformer_jax.checkpointing.checkpoints import Checkpoints, load_params
from transformer_jax.cli.main import main
from transformer_jax.data.batches import assemble, batches_from
from transformer_jax.errors import UserError
from transformer_jax.ops.masks import BOS
from transformer_jax.training import step as step_module
from transformer_jax.training.faults import Fault, diagnose, write_fault
from transformer_jax.training.loop import train
from transformer_jax.training.preparation import prepare
from transformer_jax.training.state import init_params

batch_sums = step_module.batch_sums


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory):
    with programs_kept_in(tmp_path_factory.mktemp("programs")):
        yield


def first_batches(config, folder, count):
    prepared = prepare(config, folder, print)
    planned = [batch for _, _, batch in itertools.islice(batches_from(prepared.plan, 0, 0), count)]
    return prepared, planned


def poison(monkeypatch, config, folder, updates):
    """The training loss of these updates' batches is NaN; returns their lines of the training text."""
    prepared, planned = first_batches(config, folder, max(updates))
    bad = [planned[update - 1] for update in updates]
    sums = jnp.array([int((assemble(batch, prepared.train, bos_id=BOS).source ** 2).sum()) for batch in bad])

    def poisoned(config, params, batch, key):
        found = batch_sums(config, params, batch, key)
        hit = (key is not None) & jnp.isin((batch.source**2).sum(), sums)
        return found | {"loss": found["loss"] * jnp.where(hit, jnp.nan, 1.0)}

    monkeypatch.setattr(step_module, "batch_sums", poisoned)
    return [(batch.examples + 1).tolist() for batch in bad]


def with_steps(config, steps):
    return dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))


@pytest.mark.slow
def test_a_bad_batch_in_a_run(tmp_path, monkeypatch):
    """N3: the run goes on, says which lines they were and counts; stopped and gone on with, it ends the same."""
    config = run_config(tmp_path / "text", optimizer__ema_decay=0.5)
    (lines,) = poison(monkeypatch, config, tmp_path / "probe", [2])
    train(config, tmp_path / "run")
    found = metrics(tmp_path / "run", "step", "skipped", "skipped_in_row", "update_norm")
    assert [line[:3] for line in found] == [(1, 0, 0), (2, 1, 1), (3, 1, 0), (4, 1, 0), (5, 1, 0), (6, 1, 0)]
    assert [line[3] > 0 for line in found] == [True, False, True, True, True, True]
    assert [loss is None for (loss,) in metrics(tmp_path / "run", "loss")] == [False, True, False, False, False, False]
    said = f"update 2 is skipped: the loss is nan at learning rate 0.005, on lines {', '.join(map(str, lines[:5]))}"
    assert said in (tmp_path / "run" / "log.txt").read_text()
    assert not list((tmp_path / "run").glob("fault-*"))
    for steps in (3, 6):
        train(with_steps(config, steps), tmp_path / "stopped")
    assert saved(tmp_path / "stopped")[6] == saved(tmp_path / "run")[6]


@pytest.mark.slow
def test_too_many_in_a_row_end_the_run_with_a_dump(tmp_path, monkeypatch, capsys):
    """N3: one sentence names update, lines and the folder, which holds the parameters that the update failed with,
    though a good update was under way when the host looked."""
    config = run_config(tmp_path / "text", train__skip_limit=2, train__checkpoint_every=2, optimizer__ema_decay=0.5)
    lines = poison(monkeypatch, config, tmp_path / "probe", [3, 4])
    run = tmp_path / "run"
    with pytest.raises(UserError, match=r"update 4, the last of 2 skipped in a row .* checkpoint 2 is sound") as stop:
        train(config, run)
    assert f"on lines {', '.join(map(str, lines[1][:5]))}" in str(stop.value)
    assert f"transformer-jax diagnose {run / 'fault-4'}" in str(stop.value)
    assert list(saved(run)) == [2] and metrics(run, "step")[-1] == (3,)
    dumped = load_params(run / "fault-4" / "checkpoints", warn=print)
    trained = saved(run)[2]["arrays"]
    assert dumped.step == 3
    names = [name for name in trained if name.startswith("trained_params/")]
    kept = saved(run / "fault-4")[3]["arrays"]
    assert {name.replace("trained_params/", "params/"): trained[name] for name in names} == kept
    found = diagnose(run / "fault-4")
    assert found.fault.lines == lines[1] and np.isnan(found.loss) and np.isnan(found.fault.loss)
    # Here the loss alone was tampered with.
    assert found.module is None and found.lines == [] and len(found.gradients) == len(names) and not found.parameters
    with pytest.raises(UserError, match="update 4, the last of 2"):
        train(config, run)
    train(dataclasses.replace(config, train=dataclasses.replace(config.train, skip_limit=3)), run)
    assert metrics(run, "step", "skipped")[-1] == (6, 2)
    assert main(["diagnose", str(run / "fault-4"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.strip().split("\n")[-1])["loss"] == "nan"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A model of two layers, its parameters and the first batch, and a folder."""
    folder = tmp_path_factory.mktemp("small")
    changes = {"model__encoder_layers": 2, "model__decoder_layers": 2, "model__tied_embeddings": False}
    prepared, (planned,) = first_batches(run_config(folder / "text", **changes), folder / "run", 1)
    return prepared, planned, init_params(prepared.config.model, 0), folder


def diagnosis(small, params, name):
    prepared, planned, _, folder = small
    fault = Fault.of(1, planned, {"loss": np.nan, "gradient_norm": np.nan, "learning_rate": 0.1})
    write_fault(folder / name, fault, prepared.config, planned, prepared.train, params)
    return diagnose(folder / name)


def changed(params, path, index, value):
    """A copy with one part of one parameter set."""
    name, *rest = path.split("/")
    new = changed(params[name], "/".join(rest), index, value) if rest else params[name].at[index].set(value)
    return params | {name: new}


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", ["encoder/feed_forward/w_1", "decoder/cross_attention/w_o", "decoder/self_attention/w_q"]
)
def test_a_diagnosis_names_the_first_module_that_overflows(small, path):
    found = diagnosis(small, changed(small[2], path, 1, 3e38), path.replace("/", "-"))
    assert found.module.startswith(path.rsplit("/", 1)[0]) and found.module.endswith(", layer 2")
    assert found.parameters == [] and found.lines == found.fault.lines and not np.isfinite(found.loss)


def test_a_diagnosis_names_a_bad_parameter_and_the_lines_that_meet_it(small):
    prepared, planned, params, _ = small
    batch = assemble(planned, prepared.train, bos_id=BOS)
    rows = {row: set(batch.source[row]) for row in range(len(batch.source))}
    piece, hit = next((p, r) for p in range(4, 290) if 0 < len(r := [i for i in rows if p in rows[i]]) < len(rows))
    found = diagnosis(small, changed(params, "source_embedding", piece, np.nan), "embedding")
    assert found.parameters == ["source_embedding"] and found.module == "embeddings"
    expected = [line for line, row in zip(found.fault.lines, found.fault.rows, strict=True) if row in hit]
    assert found.lines == expected and 0 < len(expected) < len(found.fault.lines)


@pytest.mark.slow
def test_a_sound_update_gives_a_diagnosis_without_findings(small, capsys):
    found = diagnosis(small, small[2], "sound")
    assert np.isfinite(found.loss) and np.isfinite(found.gradient_norm)
    assert (found.parameters, found.module, found.lines, found.gradients) == ([], None, [], [])
    assert main(["diagnose", str(small[3] / "sound")]) == 0
    assert "first output  none" in capsys.readouterr().out


def test_no_folder_of_a_fault(tmp_path, capsys):
    assert main(["diagnose", str(tmp_path)]) == 2
    assert "name RUN/fault-STEP" in capsys.readouterr().err


def rewrite(name, change):
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def flip(octets):
    third = len(octets) // 3
    return octets[:third] + bytes([octets[third] ^ 16]) + octets[third + 1 :]


def other_parameters(folder):
    """Those of a model of another size, as one has whose folders were mixed up."""
    shutil.rmtree(folder / "checkpoints")
    with contextlib.closing(Checkpoints(folder / "checkpoints", keep=1, warn=print)) as checkpoints:
        checkpoints.save(0, {"params": {"w": jnp.ones(3)}}, score=None)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        *[
            (rewrite(name, change), words)
            for name in ("batch.npz", "config.json")
            for change, words in (
                (flip, f"{name} is not as it was written"),
                (lambda octets: octets[: len(octets) // 2], f"{name} is not as it was written"),
                (lambda octets: b"", f"{name} is not as it was written"),
            )
        ],
        (rewrite("config.json", lambda octets: octets.replace(b'"d_ff": 16', b'"d_ff": 24')), "config.json is not"),
        (rewrite("fault.json", lambda octets: octets.replace(b'"rows": [', b'"rows": [1, ')), "fault.json is not"),
        (rewrite("fault.json", flip), "cannot be read as an update that failed"),
        (rewrite("fault.json", lambda octets: b"[]"), "cannot be read as an update that failed"),
        (rewrite("fault.json", lambda octets: b"{}"), "it has no 'sha256'"),
        (lambda folder: (folder / "batch.npz").unlink(), "No such file"),
        (lambda folder: shutil.rmtree(folder / "checkpoints" / "0"), "no checkpoint of step 0"),
        (other_parameters, "is of another configuration: params/decoder"),
    ],
)
def test_a_damaged_fault_is_one_sentence(damage, words, small, tmp_path, capsys):
    """Every file has a digest: no wrong diagnosis of what is no longer the update that failed, and no traceback."""
    prepared, planned, params, _ = small
    fault = Fault.of(1, planned, {"loss": np.nan, "gradient_norm": np.nan, "learning_rate": 0.1})
    write_fault(tmp_path / "fault-1", fault, prepared.config, planned, prepared.train, params)
    damage(tmp_path / "fault-1")
    assert main(["diagnose", str(tmp_path / "fault-1")]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1, error
