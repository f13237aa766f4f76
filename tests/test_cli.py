"""The command line: exit codes, one line for each mistake, and text that goes in and comes out line by line."""

import dataclasses
import io
import json
import pathlib
import subprocess
import sys
import types
from dataclasses import dataclass
from typing import ClassVar

import pytest
from rich.console import Console

import transformer_jax.evaluation.forced_decoding
from transformer_jax.cli import progress
from transformer_jax.cli.main import COMMANDS, main
from transformer_jax.cli.options import split_overrides
from transformer_jax.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from transformer_jax.config_loading import load_config
from transformer_jax.errors import UserError

ROOT = pathlib.Path(__file__).parent.parent
DEMO = str(ROOT / "configs" / "demo.py")


@dataclass(frozen=True)
class Translation:
    """As the translator's."""

    text: str
    score: float
    tokens: list[str]
    token_scores: list[float]
    finished: bool


@dataclass(frozen=True)
class Score:
    """As the translator's."""

    log_prob: float
    tokens: tuple


class UpperCase:
    """A translator that shouts, and keeps the options it was called with."""

    config = Config()
    called_with: ClassVar[dict] = {}

    @classmethod
    def load(cls, path, *, mesh):
        if path == "nowhere":
            raise UserError("there is no run in 'nowhere'")
        return cls()

    def translate(self, lines, **options):
        return list(self.translate_stream(lines, **options))

    def translate_stream(self, lines, n_best=1, on_progress=lambda done: None, **options):
        UpperCase.called_with = {"n_best": n_best, **options}

        def translated():
            for done, line in enumerate(lines, start=1):
                yield [
                    Translation(line.upper() + "!" * rank, -1.5 - rank, ["a"], [-1.5], True) for rank in range(n_best)
                ]
                on_progress(done)

        return translated()

    def score(self, sources, targets):
        return [Score(-float(len(target)), tuple((piece, -1.0) for piece in target)) for target in targets]


@pytest.fixture(autouse=True)
def translator(monkeypatch):
    module = types.ModuleType("translator")
    module.Translator, module.warn_on_stderr = UpperCase, print
    monkeypatch.setitem(sys.modules, "transformer_jax.translation.translator", module)
    # Its annotations name the translator's class, and are checked: it is imported anew, with this one.
    monkeypatch.delitem(sys.modules, transformer_jax.evaluation.forced_decoding.__name__)
    UpperCase.called_with = {}


@pytest.fixture
def trained(monkeypatch):
    """What the training loop was called with."""
    calls = []
    module = types.ModuleType("loop")
    module.train = lambda config, workdir, profile: calls.append((config, workdir, profile))
    monkeypatch.setitem(sys.modules, "transformer_jax.training.loop", module)
    return calls


def give_stdin(monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def text_file(folder, name, *lines):
    file = folder / name
    file.write_bytes("".join(f"{line}\n" for line in lines).encode())
    return str(file)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["no command", "train", "translate"]),
        (["trian"], ["'trian'", "did you mean 'train'?"]),
        (["train"], ["--config and --workdir must be given", "train --help"]),
        (["train", "--config", DEMO], ["--workdir must be given"]),
        (["train", "--config", DEMO, "--workdir"], ["--workdir needs a value"]),
        (["train", "--config", DEMO, "--workdr", "x"], ["'--workdr'", "did you mean '--workdir'?"]),
        (["train", "--config", DEMO, "--workdir", "x", "--steps", "5"], ["did you mean '--train.steps'?"]),
        (["train", "--config", DEMO, "--workdir", "x", "--model.num-heds", "5"], ["'model.num_heads'?"]),
        (["train", "--config", DEMO, "--workdir", "x", "--model.num-heads", "x"], ["model.num_heads is 'x'"]),
        (["train", "--config", DEMO, "--workdir", "x", "--model.num-heads", "7"], ["divisible by num_heads 7"]),
        (["train", "--config", DEMO, "--workdir", "x", "model.num_heads=x"], ["model.num_heads is 'x'"]),
        (["train", "--config", DEMO, "--workdir", "x", "--profile-steps", "5"], ["--profile-steps is '5'", "a:b"]),
        (["train", "--config", DEMO, "--workdir", "x", "--profile-steps", "5:3"], ["'5:3'", "1 <= a <= b"]),
        (["train", "--config", DEMO, "--workdir", "x", "--train.steps=9", "--profile-steps", "0:3"], ["'0:3'"]),
        (["train", "--config", DEMO, "--workdir", "x", "--train.steps=9", "--profile-steps", "8:10"], ["steps (9)"]),
        (["train", "--config", "nowhere.py", "--workdir", "x"], ["'nowhere.py'"]),
        (["train", "--config", DEMO + ":xx", "--workdir", "x"], ["demo.py", "'xx'"]),
        (["translate"], ["RUN must be given"]),
        (["translate", "nowhere"], ["no run in 'nowhere'"]),
        (["translate", "run", "more"], ["more"]),
        (["translate", "run", "--beam-siz", "3"], ["did you mean '--beam-size'?"]),
        (["translate", "run", "--beam-size", "x"], ["--beam-size is 'x'", "a whole number"]),
        (["translate", "run", "--length-penalty=x"], ["--length-penalty is 'x'", "a number"]),
        (["translate", "run", "--input", "nowhere.txt"], ["nowhere.txt"]),
        (["translate", "run", "--output", "no/such/folder/out.txt"], ["no/such/folder"]),
        (["translate", "run", "--output", "."], ["--output .", "folder"]),
        (["evaluate", "run", "--split", "trian"], ["--split is 'trian'", "'dev' or 'test'"]),
        (["evaluate", "run", "--source", "x"], ["--source and --reference"]),
        (["score", "run", "--source", "x"], ["--target must be given"]),
        (["average"], ["RUN must be given"]),
        (["average", "run", "--last", "two"], ["--last is 'two'"]),
        (["average", ""], ["RUN is empty"]),
        (["prepare", DEMO, "--workdir", ""], ["--workdir is empty"]),
        (["prepare", DEMO, "--data.cache-dir="], ["data.cache_dir is ''"]),
        (["describe"], ["must be given"]),
        (["describe", DEMO, "--model.norm", "mid"], ["model.norm is 'mid'", "'post' or 'pre'"]),
    ],
)
def test_a_mistake_ends_with_2_and_one_line_that_names_it(argv, words, capsys, monkeypatch):
    give_stdin(monkeypatch, b"a\n")
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert all(word in err for word in words), err
    assert "╭" not in err and "Traceback" not in err


@pytest.mark.parametrize("argv", [["--help"], ["-h"], *([command, "--help"] for command in COMMANDS)])
def test_help_ends_with_0(argv, capsys):
    try:
        code = main(argv)
    except SystemExit as stop:
        code = stop.code or 0
    out, err = capsys.readouterr()
    assert code == 0 and err == ""
    assert "usage: transformer-jax" in out
    assert all(command in out for command in COMMANDS) or argv[0] in COMMANDS


def test_help_of_train_shows_every_field_with_its_docstring(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--model.num-heads INT" in out and "Attention heads (h). (default: 8)" in out
    assert "--train.label-smoothing FLOAT" in out and "eps_ls (section 5.4)" in out


@pytest.mark.parametrize(
    "argv",
    [
        ["train", "--config", DEMO],
        ["train", f"--config={DEMO}", "--bogus", "3", "--workdir"],
        ["train", "--config", DEMO, "--model.d-model"],
        ["describe", "--devices", "8", DEMO, "--json"],
        ["describe", DEMO, "surplus"],
    ],
)
def test_help_beside_a_configuration_shows_what_that_has(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*argv, "--help"])
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert not stop.value.code
    assert "Width of the residual stream (D). (default: 128)" in out
    # What the command itself needs stays as it is.
    assert out.count("(required)") == (2 if argv[0] == "train" else 1)


def test_help_beside_a_configuration_that_is_not_there(capsys):
    assert main(["train", "--help", "--config", "nowhere.py"]) == 2
    assert "'nowhere.py'" in capsys.readouterr().err


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("transformer-jax ")


def test_train_passes_the_configuration_with_its_changes(trained):
    argv = ["train", "--workdir=runs/x", "--model.num-heads", "8", "--config", DEMO + ":fr", "train.steps=7",
            "--profile-steps", "2:5"]  # fmt: skip
    assert main(argv) == 0
    [(config, workdir, profile)] = trained
    assert workdir == "runs/x" and profile == range(2, 6)
    assert (config.model.num_heads, config.train.steps, config.data.target_language) == (8, 7, "fr")


def test_train_py_is_the_command_train():
    result = subprocess.run([sys.executable, "train.py"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("error: --config and --workdir must be given")


def test_fields_are_told_from_options():
    argv = ["--config", "runs.v2/c.py", "--model.d-k", "-1", "--workdir", "a.b=c", "model.d_v=3", "--mesh.data=-1"]
    rest, overrides = split_overrides(argv)
    assert rest == ["--config", "runs.v2/c.py", "--workdir", "a.b=c"]
    assert overrides == ["--model.d-k", "-1", "model.d_v=3", "--mesh.data=-1"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"a\n\n   \nb\n\n", b"A\n\n   \nB\n\n"),
        (b"", b""),
        (b"a\nb", b"A\nB\n"),
        ("a\u2028b\nc\rd\n".encode(), "A\u2028B\nC\rD\n".encode()),
        (b"\xef\xbb\xbfa\r\nb\r\n", b"A\nB\n"),
        ("x\x85y\x0bz\x1cä\n".encode(), "X\x85Y\x0bZ\x1cÄ\n".encode()),
    ],
)
@pytest.mark.parametrize("by_file", [False, True])
def test_as_many_lines_out_as_in(text, expected, by_file, capfdbinary, monkeypatch, tmp_path):
    """T1, T3, T5: blank lines, an empty file, no final newline, separators that are no newline, BOM and CRLF."""
    argv = ["translate", "run"]
    if by_file:
        (tmp_path / "in.txt").write_bytes(text)
        argv += ["--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out.txt")]
    else:
        give_stdin(monkeypatch, text)
    assert main(argv) == 0
    out, err = capfdbinary.readouterr()
    assert ((tmp_path / "out.txt").read_bytes() if by_file else out) == expected
    assert err == b""


def test_text_that_is_not_utf_8_is_refused_with_its_line(capsys, monkeypatch):
    give_stdin(monkeypatch, b"a\n\xe9\n")
    assert main(["translate", "run"]) == 2
    assert "line 2" in capsys.readouterr().err


def test_output_is_utf_8_in_every_locale(tmp_path):
    code = (
        "import sys, types\nsys.path.insert(0, 'tests')\nfrom test_cli import UpperCase\n"
        "module = types.ModuleType('t'); module.Translator = UpperCase\n"
        "sys.modules['transformer_jax.translation.translator'] = module\n"
        "from transformer_jax.cli.main import main\nsys.exit(main(['translate', 'run']))"
    )
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, input="größe 中\n".encode(), capture_output=True, env=environment
    )
    assert result.stdout == "GRÖSSE 中\n".encode(), result.stderr


def test_options_of_the_search_go_to_the_translator_only_when_given(capfdbinary, monkeypatch):
    give_stdin(monkeypatch, b"a\n")
    assert main(["translate", "run"]) == 0
    assert UpperCase.called_with == {"n_best": 1}
    give_stdin(monkeypatch, b"a\n")
    argv = ["translate", "run", "--beam-size", "8", "--length_penalty", "1", "--n-best=2", "--batch-tokens", "64"]
    assert main(argv) == 0
    assert UpperCase.called_with == {"n_best": 2, "beam_size": 8, "length_penalty": 1.0, "batch_tokens": 64}


def test_at_a_terminal_each_line_is_answered_as_it_comes(capfdbinary, monkeypatch):
    give_stdin(monkeypatch, b"a\n")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert main(["translate", "run"]) == 0
    assert UpperCase.called_with == {"n_best": 1, "buffer_size": 1}
    give_stdin(monkeypatch, b"a\n")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert main(["translate", "run", "--buffer-size", "7"]) == 0
    assert UpperCase.called_with == {"n_best": 1, "buffer_size": 7}
    assert b"end with Ctrl-D" in capfdbinary.readouterr().err


def test_none_is_a_value_of_an_option_that_may_be_none(capfdbinary, monkeypatch):
    """None in the spellings that a field of the configuration has; help comes before any mistake."""
    give_stdin(monkeypatch, b"a\n")
    assert main(["translate", "run", "--beam-size", "none", "--length-penalty=null"]) == 0
    assert UpperCase.called_with == {"n_best": 1}
    with pytest.raises(SystemExit) as stop:
        main(["translate", "--beam-size", "x", "--help"])
    out, err = capfdbinary.readouterr()
    assert stop.value.code == 0 and b"usage" in out and err == b""


def test_columns_of_scores_and_n_best_lists(capfdbinary, monkeypatch):
    give_stdin(monkeypatch, b"a\nb\n")
    assert main(["translate", "run", "--scores"]) == 0
    assert capfdbinary.readouterr().out == b"-1.5000\tA\n-1.5000\tB\n"
    give_stdin(monkeypatch, b"a\nb\n")
    assert main(["translate", "run", "--n-best", "2", "--scores"]) == 0
    assert capfdbinary.readouterr().out == b"1\t-1.5000\tA\n1\t-2.5000\tA!\n2\t-1.5000\tB\n2\t-2.5000\tB!\n"


def test_progress_is_said_now_and_then(capfdbinary, monkeypatch):
    monkeypatch.setattr("transformer_jax.cli.progress._QUIET", 0.0)
    give_stdin(monkeypatch, b"a\nb\n")
    assert main(["translate", "run"]) == 0
    out, err = capfdbinary.readouterr()
    assert out == b"A\nB\n" and b"translated 2 lines" in err


@pytest.mark.parametrize("name", ["two.tsv", "two.tsv.gz"])
def test_columns_are_no_sentences(name, capsys):
    assert main(["translate", "run", "--input", name]) == 2
    assert f"--input {name} has columns, where one sentence a line is wanted" in capsys.readouterr().err


def test_json_of_translations(capfdbinary, monkeypatch):
    give_stdin(monkeypatch, "a\u2028ä\nb\n".encode())
    assert main(["translate", "run", "--json"]) == 0
    out = capfdbinary.readouterr().out
    entries = [json.loads(line) for line in out.removesuffix(b"\n").split(b"\n")]
    assert [entry["source"] for entry in entries] == ["a\u2028ä", "b"]
    assert entries[0]["translations"] == [
        {"text": "A\u2028Ä", "score": -1.5, "tokens": ["a"], "token_scores": [-1.5], "finished": True}
    ]


def test_evaluate_scores_every_sentence(tmp_path, capfdbinary):
    """E6: 11 in, 11 scored and 11 written."""
    lines = [f"the cat sat on mat {number}" for number in range(11)]
    source = text_file(tmp_path, "s.txt", *lines)
    reference = text_file(tmp_path, "r.txt", *(line.upper() for line in lines))
    output = tmp_path / "out.txt"
    argv = ["evaluate", "run", "--source", source, "--reference", reference, "--output", str(output)]
    assert main([*argv, "--json"]) == 0
    scores = json.loads(capfdbinary.readouterr().out)
    assert scores["bleu"] == pytest.approx(100.0) and scores["sentences"] == 11
    assert output.read_bytes().count(b"\n") == 11
    assert main(argv) == 0
    table = capfdbinary.readouterr().out.decode()
    assert "100.00" in table and "tok:13a" in table and source in table


def test_evaluate_takes_the_runs_own_corpus(capfdbinary, monkeypatch):
    monkeypatch.setattr(UpperCase, "config", Config(data=Config().data.__class__(corpus="office")))
    assert main(["evaluate", "run", "--split", "dev", "--json"]) == 0
    scores = json.loads(capfdbinary.readouterr().out)
    assert scores["sentences"] > 100 and scores["bleu"] < 20.0


@pytest.mark.parametrize(("command", "other"), [("evaluate", "--reference"), ("score", "--target")])
def test_files_of_unequal_length_are_refused_with_names_and_counts(command, other, tmp_path, capsys):
    """E1, T13: before any model is loaded."""
    source, target = text_file(tmp_path, "s.txt", "a", "b", "c"), text_file(tmp_path, "t.txt", "a", "c")
    assert main([command, "nowhere", "--source", source, other, target]) == 2
    error = capsys.readouterr().err
    assert f"{source} has 3 lines but {target} has 2" in error


def test_score_gives_a_line_for_each_pair(tmp_path, capfdbinary):
    source, target = text_file(tmp_path, "s.txt", "a", "b"), text_file(tmp_path, "t.txt", "xx", "yyy")
    argv = ["score", "run", "--source", source, "--target", target]
    assert main(argv) == 0
    assert capfdbinary.readouterr().out == b"-2.0000\n-3.0000\n"
    assert main([*argv, "--json"]) == 0
    assert json.loads(capfdbinary.readouterr().out.split(b"\n")[0]) == {
        "log_prob": -2.0,
        "tokens": [["x", -1.0], ["x", -1.0]],
    }


def test_describe_counts_a_small_model_by_hand():
    from transformer_jax.cli.describe import SENTENCE_PIECES, describe

    d, f, pieces = 8, 32, 100
    model = ModelConfig(d_model=d, d_ff=f, num_heads=2, encoder_layers=1, decoder_layers=1)
    config = Config(model=model, data=DataConfig(batch_tokens=500), train=TrainConfig(steps=7))
    description = describe(config, pieces)
    attention, network, norm = 4 * (d * d + d), 2 * d * f + f + d, 2 * d
    assert description.total_parameters == 3 * attention + 2 * network + 5 * norm + pieces * d
    assert sum(description.parameters.values()) == description.total_parameters
    weights = 3 * 4 * d * d + 2 * 2 * d * f + pieces * d
    scores_and_sums = 3 * 2 * SENTENCE_PIECES * d
    assert description.forward_flops == 2 * (weights + scores_and_sums)
    assert description.run_flops == 3 * description.forward_flops * 500 * 7
    assert description.training_bytes == 16 * description.total_parameters
    averaging = dataclasses.replace(config, optimizer=OptimizerConfig(ema_decay=0.9))
    assert describe(averaging, pieces).training_bytes == 20 * description.total_parameters


@pytest.mark.parametrize(
    ("name", "hours", "printed", "utilisation"), [("base", 12, 3.3e18, 0.29), ("big", 84, 2.3e19, 0.42)]
)
def test_table_2_counts_what_the_gpus_could_have_done(name, hours, printed, utilisation):
    """docs/results/table2.md: 8 P100 at the paper's 9.5 TFLOP/s each (footnote 5)."""
    from transformer_jax.cli.describe import describe

    config = load_config(DEMO.replace("demo", name))
    could = hours * 3600 * 8 * 9.5e12
    assert could == pytest.approx(printed, rel=0.01)
    assert describe(config, config.data.vocab_size).run_flops / could == pytest.approx(utilisation, abs=0.005)


def test_describe_prints_a_page_and_json(capfdbinary):
    argv = ["describe", DEMO, "model.encoder_layers=2", "--model.vocab-size", "50"]
    assert main(argv) == 0
    page = capfdbinary.readouterr().out.decode()
    assert "50 word pieces" in page and "encoder/self_attention" in page
    assert main([*argv, "--json"]) == 0
    assert json.loads(capfdbinary.readouterr().out)["vocab_size"] == 50


def test_interruption_ends_with_130(monkeypatch, capsys):
    def interrupted(config, workdir, profile):
        raise KeyboardInterrupt

    module = types.ModuleType("loop")
    module.train = interrupted
    monkeypatch.setitem(sys.modules, "transformer_jax.training.loop", module)
    assert main(["train", "--config", DEMO, "--workdir", "x"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_fault():
    code = "import sys; from transformer_jax.cli.main import main; sys.stdin.read(); sys.exit(main(['--help']))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    process.stdin.close()
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 141
    assert error == b""


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch):
    def fails(config, workdir, profile):
        raise ZeroDivisionError

    module = types.ModuleType("loop")
    module.train = fails
    monkeypatch.setitem(sys.modules, "transformer_jax.training.loop", module)
    with pytest.raises(ZeroDivisionError):
        main(["train", "--config", DEMO, "--workdir", "x"])


def test_help_waits_for_no_jax():
    code = (
        "import sys; from transformer_jax.cli.main import main; main(['--help'])\n"
        "try: main(['train', '--help'])\nexcept SystemExit: pass\nsys.exit('jax' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


WAITED_FOR = """
import concurrent.futures, time
from transformer_jax.cli import main
from transformer_jax.errors import Interrupted

def download(argv):
    concurrent.futures.ThreadPoolExecutor().submit(time.sleep, 600)
    raise Interrupted(15)

main._dispatch = download
main.run_and_exit([])
"""


def test_a_signal_ends_a_command_whose_library_has_threads_at_work():
    """Python waits for the threads of pools before it ends: a download of hours would go on."""
    result = subprocess.run([sys.executable, "-c", WAITED_FOR], capture_output=True, text=True, timeout=300)
    assert result.returncode == 143
    assert result.stderr == "interrupted by SIGTERM: run the command again to go on\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_how_far_a_command_has_come_is_told(terminal, monkeypatch):
    monkeypatch.setattr(progress, "_QUIET", -1.0)
    told = io.StringIO()
    with progress.counting(Console(file=told, force_terminal=terminal, width=80), "translating", 2000) as on_progress:
        on_progress(1000)
    assert "1,000/2,000" in told.getvalue() or "1000/2000" in told.getvalue()
