"""`transformer-jax ablate`: what is trained, in which order, what stops it, and what the report says."""

import dataclasses
import json
import math
import pathlib

import pytest
from small_runs import act_after_writing, programs_kept_in, run_config

from transformer_jax.ablation import runs as ablation_runs
from transformer_jax.ablation.comparison import BLEU, NATS, difference, noise, verdict
from transformer_jax.ablation.experiment import Settings, flat, plan
from transformer_jax.ablation.report import write_report
from transformer_jax.ablation.runs import train_all
from transformer_jax.ablation.scale import scaled
from transformer_jax.ablation.scores import RowScores, RunScores
from transformer_jax.ablation.table import Printed, Row, load_rows
from transformer_jax.cli.main import main
from transformer_jax.config import Config
from transformer_jax.config_loading import load_config
from transformer_jax.data.parallel_text import TsvFile
from transformer_jax.errors import UserError

ROOT = pathlib.Path(__file__).parent.parent
TABLE_3 = str(ROOT / "configs" / "table3.py")
PRESETS = str(ROOT / "configs" / "presets.py")
SIGNATURE = "nrefs:1|tok:13a"

TABLE = """
from transformer_jax.ablation.table import Printed, Row, row_config
from transformer_jax.config import Config

BASE = Config.from_json({json!r}, "the base")
ROWS = (
    Row("base", {{}}, Printed(5.0, 20.0, 65)),
    Row("wide", {{"model.d_ff": 32}}, Printed(4.5, 21.0)),
    Row("broken", {{"model.num_heads": 3}}, Printed(4.8, 20.0)),
)


def get_config(variant):
    return row_config(BASE, ROWS, variant)
"""


class KilledError(BaseException):
    """Ends a run where it stands, as SIGKILL does: nothing is saved, nothing is caught."""


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory):
    with programs_kept_in(tmp_path_factory.mktemp("programs")):
        yield


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A table of three rows, of which one cannot be built; four updates each, a checkpoint after two."""
    folder = tmp_path_factory.mktemp("table")
    config = run_config(
        folder / "text",
        train__steps=4,
        train__evaluate_every=4,
        train__checkpoint_every=2,
        train__average_checkpoints=1,
    )
    (folder / "table.py").write_text(TABLE.format(json=config.to_json()), encoding="utf-8")
    return folder / "table.py"


@pytest.fixture
def in_folder(table, tmp_path):
    """The settings of an ablation of that table in a fresh folder; two seeds where nothing else is said."""
    return lambda **changes: Settings(str(table), tmp_path / "ablation", **{"rows": "wide", "seeds": 2, **changes})


@pytest.fixture(scope="module")
def straight(table, tmp_path_factory):
    """The folder of an ablation of two rows, trained without a stop."""
    settings = Settings(str(table), tmp_path_factory.mktemp("straight") / "ablation", rows="wide")
    train_all(plan(settings), print)
    return settings.workdir


def numbers(workdir):
    """What report.json says of each run, without the clock's numbers."""
    rows = json.loads((workdir / "report.json").read_text())["rows"]
    return {
        row["name"]: [{key: value for key, value in run.items() if key != "seconds"} for run in row["runs"]]
        for row in rows
    }


def pretend(run, nll, bleu, test_bleu=10.0, seconds=60.0):
    """The files of a finished run."""
    run.folder.mkdir(parents=True)
    line = {"step": run.config.train.steps, "dev_nll": nll, "dev_bleu": bleu, "dev_signature": SIGNATURE}
    (run.folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    results = {
        "step": run.config.train.steps, "parameters": 1234, "training_seconds": seconds, "split": "test",
        "scores": {"bleu": test_bleu}, "device": "1 x cpu",
    }  # fmt: skip
    (run.folder / "results.json").write_text(json.dumps(results))


def scores_of(row, *values):
    """A row with runs of these (nats, BLEU)."""
    run = RunScores(0, "", 4, 0.0, 0.0, None, SIGNATURE, 1, 1.0, "cpu")
    found = [dataclasses.replace(run, nll=nll, bleu=bleu) for nll, bleu in values]
    return RowScores(row, tuple(found), len(found))


def refused(arguments, capsys):
    """The one line that the command ends with."""
    assert main(["ablate", *map(str, arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_every_seed_of_every_row_is_a_run_and_seeds_come_breadth_first(in_folder, monkeypatch):
    trained, said = [], []

    def fake(config, folder):
        trained.append((folder.relative_to(settings.workdir).as_posix(), config.model.d_ff, config.train.seed))

    settings = in_folder(overrides=("train.seed=5",))
    monkeypatch.setattr(ablation_runs, "train", fake)
    train_all(plan(settings), said.append)
    assert trained == [("base/seed5", 16, 5), ("wide/seed5", 32, 5), ("base/seed6", 16, 6), ("wide/seed6", 32, 6)]
    assert "run 2 of 4: wide, seed 5" in [line.strip() for line in said]


@pytest.mark.slow
def test_runs_share_one_tokenizer_and_one_tokenized_text(straight):
    assert len(list((straight / "text").glob("tokenizer-*.model"))) == 1
    assert len({path.read_bytes() for path in straight.glob("**/*.model")}) == 1
    assert list((straight / "text").glob("tokens-*")) and not list(straight.glob("*/*/data"))


@pytest.mark.slow
def test_scores_are_those_of_the_runs_themselves(straight):
    (run,) = numbers(straight)["wide"]
    folder = straight / run["folder"]
    results = json.loads((folder / "results.json").read_text())
    line = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()][-1]
    assert (run["nll"], run["bleu"]) == (line["dev_nll"], line["dev_bleu"])
    assert run["perplexity"] == pytest.approx(line["dev_perplexity"])
    assert (run["test_bleu"], run["parameters"]) == (results["scores"]["bleu"], results["parameters"])
    assert load_config(str(folder)).model.d_ff == 32


@pytest.mark.slow
def test_a_killed_ablation_goes_on_and_ends_as_if_it_had_not_been(straight, in_folder, monkeypatch):
    """C1: in its second run, before the first checkpoint and again after it."""
    settings = in_folder(seeds=1)

    def killed_at(update):
        def die_in_the_second_run():
            if (settings.workdir / "base" / "seed0" / "results.json").exists():
                raise KilledError

        said = []
        with monkeypatch.context() as patch, pytest.raises(KilledError):
            act_after_writing(patch, update, die_in_the_second_run)
            train_all(plan(settings), said.append)
        assert {name: len(runs) for name, runs in numbers(settings.workdir).items()} == {"base": 1, "wide": 0}
        return sum(line.startswith("\nrun ") for line in said)

    assert (killed_at(1), killed_at(3)) == (2, 1)
    train_all(plan(settings), print)
    assert numbers(settings.workdir) == numbers(straight)


def test_what_is_finished_is_not_trained_again_and_more_seeds_are_added(in_folder, monkeypatch):
    trained = []
    monkeypatch.setattr(
        ablation_runs, "train", lambda config, folder: trained.append((folder.parent.name, folder.name))
    )
    experiment = plan(in_folder())
    for run in experiment.runs():
        pretend(run, 2.0, 5.0)
    train_all(experiment, print)
    assert trained == []
    train_all(plan(in_folder(seeds=3)), print)
    assert trained == [("base", "seed2"), ("wide", "seed2")]


def test_a_row_that_cannot_be_built_stops_no_other_and_is_named(in_folder, table, capsys, monkeypatch):
    settings = in_folder(rows=None, seeds=1)
    monkeypatch.setattr(ablation_runs, "train", lambda config, folder: pretend(by_folder[folder], 2.0, 5.0))
    by_folder = {run.folder: run for run in plan(settings).runs()}
    line = refused([table, "--workdir", settings.workdir], capsys)
    assert "1 of 3 rows failed: broken" in line
    assert "model.d_model is 16, but must be divisible by num_heads 3" in line
    report = (settings.workdir / "report.md").read_text()
    assert "- broken failed: " in report and "divisible by num_heads 3" in report
    assert "2 of 2 runs are finished" in report
    rows = json.loads((settings.workdir / "report.json").read_text())["rows"]
    assert [(row["name"], len(row["runs"]), row["failure"] is None) for row in rows] == [
        ("base", 1, True), ("wide", 1, True), ("broken", 0, False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (UserError("update 3: the loss is nan"), "update 3: the loss is nan"),
        (RuntimeError("RESOURCE_EXHAUSTED: 1 TB"), "not enough memory"),
    ],
)
def test_a_row_that_fails_in_training_stops_no_other(error, words, in_folder, monkeypatch):
    trained = []

    def fake(config, folder):
        trained.append(folder.parent.name)
        if folder.parent.name == "base":
            raise error

    monkeypatch.setattr(ablation_runs, "train", fake)
    with pytest.raises(UserError, match=f"1 of 2 rows failed: base .*{words}"):
        train_all(plan(in_folder(seeds=1)), print)
    assert trained == ["base", "wide"]


def test_a_fault_of_ours_is_not_taken_for_a_failed_row(in_folder, monkeypatch):
    def fake(config, folder):
        raise RuntimeError("a fault")

    monkeypatch.setattr(ablation_runs, "train", fake)
    with pytest.raises(RuntimeError, match="a fault"):
        train_all(plan(in_folder(seeds=1)), print)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("search.beam_size=1",), "search.beam_size 2, and this command says 1"),
        (("optimizer.beta1=0.5",), "optimizer.beta1 0.9, and this command says 0.5"),
    ],
)
def test_runs_of_other_settings_are_refused_before_anything_is_trained(overrides, words, straight, monkeypatch):
    monkeypatch.setattr(ablation_runs, "train", lambda config, folder: pytest.fail("trained"))
    table = json.loads((straight / "report.json").read_text())["table"]
    with pytest.raises(UserError, match=words):
        train_all(plan(Settings(table, straight, rows="wide", seeds=3, overrides=overrides)), print)
    with pytest.raises(UserError, match=r"train\.steps 4, and this command says 2"):
        train_all(plan(Settings(table, straight, rows="wide", seeds=3, steps=2)), print)
    report = (straight / "report.md").read_bytes()
    option, _, value = overrides[0].partition("=")
    arguments = [table, "--workdir", str(straight), "--rows", "wide", f"--{option}", value, "--report-only"]
    assert main(["ablate", *arguments]) == 2
    assert (straight / "report.md").read_bytes() == report


def test_the_command_writes_a_report_of_what_is_there_without_training(in_folder, table, capsys, monkeypatch):
    settings = in_folder()
    first, second, *_ = plan(settings).runs()
    pretend(first, 2.0, 5.0)
    pretend(second, 1.9, 6.0)
    monkeypatch.setattr(ablation_runs, "train", lambda config, folder: pytest.fail("trained"))
    arguments = ["--rows", "WIDE", "--seeds", "2", "--workdir", settings.workdir]
    assert main(["ablate", str(table), *map(str, arguments), "--report-only"]) == 0
    assert capsys.readouterr().out.strip() == str(settings.workdir / "report.md")
    report = (settings.workdir / "report.md").read_text()
    assert "2 of 4 runs are finished" in report
    assert "- wide: 1 of 2 runs" in report
    assert (settings.workdir / "report.png").read_bytes().startswith(b"\x89PNG")
    assert not list(settings.workdir.glob(".*"))


def test_the_report_sets_means_and_spreads_beside_the_papers(in_folder):
    experiment = plan(in_folder(overrides=("optimizer.beta1=0.8",)))
    values = {("base", 0): (2.0, 5.0), ("base", 1): (2.02, 5.4), ("wide", 0): (1.8, 7.0), ("wide", 1): (1.8, 7.2)}
    for run in experiment.runs():
        pretend(run, *values[run.row.name, run.seed])
    path = write_report(experiment, {})
    report = path.read_text()
    mean = (math.exp(2.0) + math.exp(2.02)) / 2
    deviation = abs(math.exp(2.0) - math.exp(2.02)) / math.sqrt(2)
    assert f"| base |  | 1,234 | 2 | {mean:.2f} ± {deviation:.2f} |  | 5.0 |  |  |" in report
    paper = math.log(4.5 / 5.0)
    assert f"| wide | d_ff 32 | 1,234 | 2 | 6.05 ± 0.00 | -0.210 | 4.5 | {paper:+.3f} | yes |" in report
    assert "| base | 5.20 ± 0.28 |  | 20.0 |  |  | 10.00 ± 0.00 |" in report
    assert "| wide | 7.10 ± 0.14 | +1.90 | 21.0 | +1.00 | yes | 10.00 ± 0.00 |" in report
    assert "| optimizer.beta1 | 0.9 | 0.8 |" in report
    assert SIGNATURE in report and "Training took 4 minutes in all on 1 x cpu" in report
    assert "--rows wide" in report and "optimizer.beta1=0.8" in report
    assert "Not there" not in report


def test_one_seed_has_no_spread_and_no_verdict(in_folder):
    experiment = plan(in_folder(seeds=1))
    for run, nll in zip(experiment.runs(), (2.0, 1.8), strict=True):
        pretend(run, nll, 5.0)
    report = write_report(experiment, {}).read_text()
    assert "| wide | d_ff 32 | 1,234 | 1 | 6.05 | -0.200 | 4.5 | -0.105 |  |" in report


@pytest.mark.parametrize("content", ["[]", "{", "{}", '{"step": 4}', '{"step": 4, "split": "test", "scores": null}'])
def test_a_run_whose_results_are_damaged_is_not_finished(in_folder, content):
    experiment = plan(in_folder(seeds=1))
    for run in experiment.runs():
        pretend(run, 2.0, 5.0)
    (experiment.runs()[1].folder / "results.json").write_text(content)
    assert "1 of 2 runs are finished" in write_report(experiment, {}).read_text()


def test_a_row_that_diverged_has_a_perplexity(in_folder):
    experiment = plan(in_folder(seeds=1))
    for run, nll in zip(experiment.runs(), (2.0, 1e6), strict=True):
        pretend(run, nll, 0.0)
    assert "2 of 2 runs are finished" in write_report(experiment, {}).read_text()


def test_rows_on_other_text_than_the_first_ones_had_fail(in_folder, monkeypatch):
    """The file is another after the first seed; scores on it would not compare."""
    trained, texts = [], iter(["a", "a", "b", "a"])
    monkeypatch.setattr(ablation_runs, "train", lambda config, folder: trained.append(folder.parent.name))
    monkeypatch.setattr(TsvFile, "digest", lambda self: digest)
    settings = in_folder()
    load = ablation_runs.load_splits

    def load_another(data):
        nonlocal digest
        digest = next(texts)
        return load(data)

    digest = ""
    monkeypatch.setattr(ablation_runs, "load_splits", load_another)
    with pytest.raises(UserError, match=r"1 of 2 rows failed: base .* is not what the rows before were trained on"):
        train_all(plan(settings), print)
    assert trained == ["base", "wide", "wide"]


def test_a_table_without_a_papers_numbers_has_no_columns_for_them(tmp_path):
    experiment = plan(Settings(PRESETS, tmp_path, rows="modern", scale="demo", seeds=2))
    for run in experiment.runs():
        pretend(run, 2.0, 5.0)
    report = write_report(experiment, {}).read_text()
    assert "| row | changes | parameters | runs | perplexity | nats to the first |\n" in report
    assert "the paper" not in report


FIRST, BETTER, SAME = (
    Row("base", {}, Printed(5.0, 20.0)),
    Row("x", {}, Printed(4.5, 21.0)),
    Row("y", {}, Printed(5.02, 20.2)),
)


@pytest.mark.parametrize(
    ("row", "values", "nats", "bleu"),
    [
        (BETTER, [(1.8, 7.0), (1.8, 7.0)], "yes", "yes"),
        (BETTER, [(2.2, 5.0), (2.2, 3.0)], "no", "not seen"),
        (BETTER, [(2.0, 5.0), (1.99, 5.0)], "not seen", "not seen"),
        (SAME, [(2.0, 5.0), (1.99, 5.0)], "yes", "yes"),
        (SAME, [(2.2, 9.0), (2.2, 9.0)], "no", "no"),
    ],
)
def test_a_verdict_compares_directions_beyond_the_noise(row, values, nats, bleu):
    table = [scores_of(FIRST, (1.98, 4.9), (2.02, 5.1)), scores_of(row, *values)]
    assert verdict(table[1], table, NATS) == nats
    assert verdict(table[1], table, BLEU) == bleu
    assert verdict(table[0], table, NATS) is None


def test_noise_is_pooled_over_rows():
    table = [scores_of(FIRST, (1.0, 1.0), (3.0, 1.0)), scores_of(SAME, (2.0, 1.0), (2.0, 2.0), (2.0, 3.0))]
    assert noise(table, NATS) == pytest.approx(math.sqrt(2.0 / 3))
    assert noise(table, BLEU) == pytest.approx(math.sqrt(2.0 / 3))
    assert difference(table[1], table[0], BLEU) == pytest.approx(1.0)
    assert noise([scores_of(FIRST, (1.0, 1.0))], NATS) is None


def test_the_demos_scale_keeps_every_ratio_of_table_3():
    """Widths by 4, layers by 2; heads and rates as printed; no two rows fall together."""
    rows = load_rows(TABLE_3)
    full = {row.name: load_config(f"{TABLE_3}:{row.name}") for row in rows}
    small = {name: scaled(config, "demo") for name, config in full.items()}
    for name, config in full.items():
        before, after = config.model, small[name].model
        for field, divisor in {
            "d_model": 4, "d_ff": 4, "key_size": 4, "value_size": 4, "encoder_layers": 2, "decoder_layers": 2,
            "num_heads": 1, "dropout": 1,
        }.items():  # fmt: skip
            assert getattr(after, field) * divisor == getattr(before, field), (name, field)
        for field in ("positions", "norm", "tied_embeddings", "attention_bias"):
            assert getattr(after, field) == getattr(before, field)
        assert small[name].train.label_smoothing == config.train.label_smoothing
        assert small[name].train.steps == (1200 if name == "big" else 400)
    assert len({config.to_json() for config in small.values()}) == len(rows) == 20


def test_the_demos_scale_trains_on_the_embedded_corpus_at_the_papers_schedule():
    config = scaled(load_config(f"{TABLE_3}:base"), "demo")
    optimizer = config.optimizer
    peak = optimizer.learning_rate_factor * (config.model.d_model * optimizer.warmup_steps) ** -0.5
    assert peak == pytest.approx(2.53 * (512 * 4000) ** -0.5, rel=1e-3)
    assert (optimizer.warmup_steps, optimizer.decay, optimizer.beta2) == (100, "inverse_sqrt", 0.98)
    assert (config.data.corpus, config.data.target_language, config.model.vocab_size) == ("office", "de", None)
    assert config.train.average_checkpoints == 1
    explicit = dataclasses.replace(Config(), optimizer=dataclasses.replace(optimizer, learning_rate=1e-3))
    assert scaled(explicit, "demo").optimizer.learning_rate == pytest.approx(2.53e-3, rel=1e-3)
    assert scaled(explicit, "full") is explicit


def test_a_row_that_would_lose_its_meaning_cannot_be_scaled():
    config = load_config(f"{TABLE_3}:B1", ["model.d_k=18"])
    with pytest.raises(UserError, match=r"model\.d_k is 18, but must be divisible by 4"):
        scaled(config, "demo")


def test_steps_are_the_first_rows_and_others_keep_their_ratio(tmp_path):
    experiment = plan(
        Settings(TABLE_3, tmp_path, rows="C1,big", scale="demo", steps=50, overrides=("--data.vocab-size", "500"))
    )
    steps = {name: config.train.steps for name, config in experiment.configs.items()}
    assert steps == {"base": 50, "C1": 50, "big": 150}
    assert {config.data.vocab_size for config in experiment.configs.values()} == {500}
    changed = {name: after for name, _, after in experiment.shrunk}
    assert (changed["train.steps"], changed["model.d_model"], changed["data.vocab_size"]) == (50, 128, 500)
    assert flat(experiment.configs["C1"])["model.encoder_layers"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([TABLE_3, "--rows", "A1,Z9"], ["there is no row 'Z9'"]),
        ([TABLE_3, "--rows", "bse"], ["there is no row 'bse'", "did you mean 'base'?"]),
        ([TABLE_3, "--rows", ","], ["--rows names no row", "A1"]),
        ([TABLE_3, "--seeds", "0"], ["--seeds is 0"]),
        ([TABLE_3, "--steps", "0"], ["--steps is 0"]),
        ([TABLE_3, "--scale", "dem"], ["--scale", "'demo'"]),
        ([TABLE_3, "--model.dropout", "0.3"], ["model.dropout", "row D1", "leave it out"]),
        ([TABLE_3, "--train.steps", "9"], ["train.steps", "--steps"]),
        ([TABLE_3, "--model.dropuot", "0.3"], ["no row can be built", "did you mean 'model.dropout'?"]),
        ([f"{TABLE_3}:A1"], ["there is no configuration file", "table3.py:A1", "table3.py --rows A1"]),
        ([str(ROOT / "configs" / "demo.py")], ["demo.py", "it has no ROWS"]),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_that_says_what_to_do(arguments, words, tmp_path, capsys):
    line = refused([*arguments, "--workdir", tmp_path / "x"], capsys)
    assert all(word in line for word in words), line
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("(Row('a', {}), Row('A', {}))", "two rows are named 'a'"),
        ("(Row('a/b', {}),)", "row 'a/b': a row's name"),
        ("()", "it has no ROWS"),
        ("1 / 0", "line 2: ZeroDivisionError"),
        ("(Row('a', {'model.dmodel': 3}),)", "row a: there is no field 'model.dmodel'; did you mean 'model.d_model'?"),
    ],
)
def test_a_faulty_table_is_refused(rows, words, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from transformer_jax.ablation.table import Row, row_config, Config\n"
        f"ROWS = {rows}\n"
        "def get_config(variant): return row_config(Config(), ROWS, variant)\n"
    )
    with pytest.raises(UserError) as error:
        plan(Settings(str(path), tmp_path))
    assert words in str(error.value)
