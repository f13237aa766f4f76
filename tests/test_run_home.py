"""A run kept at gs://: worked on in a local folder, gone on with on a machine that knows nothing of it."""

import dataclasses
import json
import pathlib
import signal
import sys
import types

import object_store
import pytest
from etils import epath
from several_processes import free_port, run_together, write_config
from small_runs import act_after_writing, metrics, programs_kept_in, saved, straight_run

from transformer_jax.cli.main import main
from transformer_jax.errors import UserError
from transformer_jax.training import presence
from transformer_jax.training.loop import train
from transformer_jax.training.presence import only_trainer
from transformer_jax.training.run_home import RunHome
from transformer_jax.translation.translator import Translator

pytestmark = pytest.mark.slow

ADDRESS = "gs://bucket/run"
RUN = epath.Path(ADDRESS)


@pytest.fixture(scope="module", autouse=True)
def store(tmp_path_factory):
    with (
        object_store.installed(),
        programs_kept_in(tmp_path_factory.mktemp("programs")),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(presence, "WATCHED", 0.2)
        patch.setattr(presence, "SETTLED", 0.0)
        yield


@pytest.fixture(autouse=True)
def empty():
    object_store.empty()


@pytest.fixture
def new_machine(tmp_path, monkeypatch):
    """Called, it gives the user an empty cache."""
    monkeypatch.chdir(tmp_path)  # where a folder `gs:` would appear

    def move():
        folder = tmp_path / f"machine-{len(list(tmp_path.glob('machine-*')))}"
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        return folder

    move()
    return move


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Six updates of a run in a local folder, and their configuration."""
    return straight_run(tmp_path_factory.mktemp("here"))


@pytest.fixture(scope="module")
def moments(here, tmp_path_factory):
    """What the store holds before each change that the same run makes at the address, and after the last."""
    object_store.empty()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("moments")))
        return object_store.moments(lambda: train(here[1], ADDRESS))


@pytest.fixture
def finished(moments, empty):
    """The address has the finished run."""
    object_store.stand_at(moments[-1])


def small_files():
    names = {name.removeprefix("bucket/run/") for name in object_store.OBJECTS}
    return sorted(name for name in names if not name.startswith(("checkpoints/", "averaged/", "events.")))


def test_a_run_goes_on_on_another_machine(here, new_machine, monkeypatch, tmp_path):
    """C1: stopped by a signal, gone on with where nothing is known of it; the end is that of a run in a folder."""
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        act_after_writing(patch, 3, lambda: signal.raise_signal(signal.SIGTERM))
        train(here[1], ADDRESS)
    assert stop.value.code == 143 and list(saved(RUN)) == [2, 3]
    assert small_files() == ["config.json", "log.txt", "metrics.jsonl", "tokenizer.model"]
    assert any(name.startswith("bucket/run/events.out") for name in object_store.OBJECTS)
    new_machine()
    train(here[1], ADDRESS)
    assert saved(RUN) == saved(here[0])
    assert small_files()[:2] == ["config.json", "curve.png"] and "results.json" in small_files()
    fetched = tmp_path / "fetched"
    fetched.mkdir()
    (fetched / "metrics.jsonl").write_text((RUN / "metrics.jsonl").read_text())
    assert metrics(fetched) == metrics(here[0])
    log = (RUN / "log.txt").read_text()
    assert "stopped by SIGTERM" in log and "going on from update 3" in log and f"translate {ADDRESS} <" in log
    results = [json.loads((run / "results.json").read_text()) for run in (RUN, here[0])]
    assert results[0]["scores"] == results[1]["scores"]
    assert Translator.load(ADDRESS)("ab cd") == Translator.load(here[0])("ab cd")
    new_machine()
    before = dict(object_store.OBJECTS)
    train(here[1], ADDRESS)  # finished: it prints its scores, and trains nothing
    assert saved(RUN) == saved(here[0])
    assert {name for name in before if object_store.OBJECTS[name] != before[name]} <= {
        "bucket/run/log.txt", "bucket/run/curve.png",
    }  # fmt: skip
    assert not (tmp_path / "gs:").exists()


def test_a_machine_lost_at_any_object_costs_what_came_after_the_checkpoint(moments, here, new_machine):
    """C4: two moments of the run, one of them amid its first checkpoint."""
    for moment in (moments[13], moments[-9]):
        object_store.stand_at(moment)
        new_machine()
        train(here[1], ADDRESS)
        assert saved(RUN) == saved(here[0])


def test_metrics_are_there_before_the_checkpoint_that_follows_them(here, new_machine):
    def refuse(name):
        if name == "bucket/run/metrics.jsonl":
            raise OSError("quota exceeded")

    object_store.BEFORE_CHANGE.append(refuse)
    with pytest.raises(
        UserError, match=r"cannot save step 2 to gs://bucket/run/checkpoints: .*metrics.jsonl cannot be"
    ):
        train(here[1], ADDRESS)
    assert saved(RUN) == {}


def test_an_error_of_gcsfs_own_is_one_in_a_sentence(finished, new_machine, monkeypatch):
    """Which is no OSError: 429, 503 and the like, when it has tried often enough."""
    own = types.ModuleType("gcsfs.retry")
    own.HttpError = type("HttpError", (Exception,), {})
    for name in ("gcsfs", "gcsfs.retry"):
        monkeypatch.setitem(sys.modules, name, own)

    def fail(name):
        raise own.HttpError("Backend Error, 503")

    home = RunHome.at(ADDRESS)
    home.fetch()
    (home.local / "log.txt").write_text("more")
    object_store.BEFORE_CHANGE.append(fail)
    with pytest.raises(UserError, match=r"log.txt cannot be copied there \(Backend Error, 503\)"):
        home.keep()
    monkeypatch.setattr(object_store, "get", fail)
    for read in (home.fetch, lambda: Translator.load(ADDRESS)):
        with pytest.raises(UserError, match=r"Backend Error, 503"):
            read()


def test_another_configuration_is_refused_and_changes_nothing(finished, here, new_machine):
    before = dict(object_store.OBJECTS)
    other = dataclasses.replace(here[1], model=dataclasses.replace(here[1].model, d_ff=32))
    with pytest.raises(UserError, match=r"gs://bucket/run holds a run with model\.d_ff 16, and this command says 32"):
        train(other, ADDRESS)
    assert before == object_store.OBJECTS


def test_two_commands_do_not_train_one_run(finished, here, new_machine, monkeypatch):
    """Started again elsewhere while the first, which says so, still trains; and what that leaves does not stay."""
    before = dict(object_store.OBJECTS)
    with monkeypatch.context() as patch:
        patch.setattr(presence, "RENEWED", 0.02)
        with only_trainer(RUN, print), pytest.raises(UserError, match="is training there; wait for its end"):
            train(here[1], ADDRESS)
    assert before == object_store.OBJECTS


def test_what_is_left_here_of_a_run_that_is_gone_there_is_not_gone_on_with(finished, new_machine):
    home = RunHome.at(ADDRESS)
    home.fetch()
    assert (home.local / "results.json").exists()
    (home.local / "data").mkdir()
    object_store.OBJECTS.clear()
    home.fetch()
    assert sorted(path.name for path in home.local.iterdir()) == ["data"]


def test_text_is_prepared_ahead_with_the_pieces_of_a_run_that_has_begun(finished, here, new_machine, capsys):
    machine = new_machine()
    assert main(["prepare", str(here[0] / "config.json"), "--workdir", ADDRESS]) == 0
    assert f"ready      train with the same configuration and --workdir {ADDRESS}" in capsys.readouterr().out
    (home,) = (machine / "transformer_jax" / "runs").iterdir()
    stores = [sorted(path.name for path in folder.glob("tokens-*")) for folder in (home / "data", here[0] / "data")]
    assert stores[0] == stores[1] and len(stores[0]) == 2


def test_a_table_of_experiments_is_refused_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    table = pathlib.Path(__file__).parent.parent / "configs" / "table3.py"
    assert main(["ablate", str(table), "--scale", "demo", "--workdir", "gs://bucket/table"]) == 2
    assert "go into a local or mounted folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# Two hosts without a common disk: each process has a cache of its own.
PROGRAM = """
import os, sys
import object_store

os.environ["XDG_CACHE_HOME"] = sys.argv[1]
object_store.connect()
from transformer_jax.cli.main import main

sys.exit(main(["train", *sys.argv[2:]]))
"""


def test_two_hosts_that_share_no_disk(new_machine, tmp_path):
    """The text is tokenized on each; one writes the run, parts of arrays come from both; one host alone goes on."""
    write_config(tmp_path)
    (tmp_path / "text").mkdir()

    def train_on(count, steps):
        port = free_port()
        return run_together(tmp_path, PROGRAM, [
            [
                tmp_path / f"{count}-{i}", "--config", tmp_path / "config.py", "--workdir", ADDRESS, "--coordinator",
                f"127.0.0.1:{port}", "--processes", count, "--process", i, "--peer-timeout", 60,
                "--mesh.data", "1", "--mesh.fsdp", count, "--train.steps", steps,
            ]
            for i in range(count)
        ])  # fmt: skip

    codes, outputs = train_on(2, 4)
    assert codes == [0, 0], outputs
    assert list(saved(RUN)) == [2, 4]
    for i in range(2):
        (home,) = (tmp_path / f"2-{i}" / "transformer_jax" / "runs").iterdir()
        assert (home / "tokenizer.model").exists() and list((home / "data").glob("tokens-*"))
    codes, outputs = train_on(1, 8)
    assert codes == [0], outputs
    assert "going on from update 4" in outputs[0]
    assert list(saved(RUN)) == [2, 4, 6, 8]
