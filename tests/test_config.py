"""Configurations: defaults, Table 3, JSON, files, overrides, and the words for each mistake."""

import ast
import dataclasses
import inspect
import itertools
import pathlib
import subprocess
import sys
import textwrap
from typing import Literal

import pytest

import transformer_jax.config
from transformer_jax.config import Config, DataConfig, MeshConfig, ModelConfig, SearchConfig, TrainConfig
from transformer_jax.config_fields import describe_type, field_types, parse_value
from transformer_jax.config_loading import load_config, override
from transformer_jax.errors import UserError

CONFIGS = pathlib.Path(__file__).parent.parent / "configs"
TABLE3 = str(CONFIGS / "table3.py")

# Table 3 as printed: what each row changes of the base model. Blank cells are the base's.
CHANGES = {
    "base": {},
    "A1": {"model.num_heads": 1, "model.d_k": 512, "model.d_v": 512},
    "A2": {"model.num_heads": 4, "model.d_k": 128, "model.d_v": 128},
    "A3": {"model.num_heads": 16, "model.d_k": 32, "model.d_v": 32},
    "A4": {"model.num_heads": 32, "model.d_k": 16, "model.d_v": 16},
    "B1": {"model.d_k": 16},
    "B2": {"model.d_k": 32},
    "C1": {"model.encoder_layers": 2, "model.decoder_layers": 2},
    "C2": {"model.encoder_layers": 4, "model.decoder_layers": 4},
    "C3": {"model.encoder_layers": 8, "model.decoder_layers": 8},
    "C4": {"model.d_model": 256, "model.d_k": 32, "model.d_v": 32},
    "C5": {"model.d_model": 1024, "model.d_k": 128, "model.d_v": 128},
    "C6": {"model.d_ff": 1024},
    "C7": {"model.d_ff": 4096},
    "D1": {"model.dropout": 0.0},
    "D2": {"model.dropout": 0.2},
    "D3": {"train.label_smoothing": 0.0},
    "D4": {"train.label_smoothing": 0.2},
    "E": {"model.positions": "learned"},
    "big": {
        "model.d_model": 1024,
        "model.d_ff": 4096,
        "model.num_heads": 16,
        "model.dropout": 0.3,
        "train.steps": 300_000,
    },
}


def flat(config):
    """Dotted name -> value."""
    values = {}
    for name in field_types(Config):
        section, _, field = name.partition(".")
        values[name] = getattr(getattr(config, section), field)
    return values


def refused(*arguments):
    """The message of the UserError that loading raises; it must be one line."""
    with pytest.raises(UserError) as error:
        load_config(*arguments)
    message = str(error.value)
    assert "\n" not in message
    return message


def config_file(folder, body):
    """A configuration file with this body."""
    file = folder / "mine.py"
    file.write_text(textwrap.dedent(body), encoding="utf-8")
    return str(file)


def test_defaults_are_the_papers_base_model():
    config = Config()
    assert (config.model.encoder_layers, config.model.d_model, config.model.d_ff, config.model.num_heads) == (
        6,
        512,
        2048,
        8,
    )
    assert (config.model.key_size, config.model.value_size) == (64, 64)
    assert (config.optimizer.beta1, config.optimizer.beta2, config.optimizer.epsilon) == (0.9, 0.98, 1e-9)
    assert (config.model.dropout, config.train.label_smoothing, config.optimizer.warmup_steps) == (0.1, 0.1, 4000)
    assert (config.search.beam_size, config.search.length_penalty, config.search.max_extra_length) == (4, 0.6, 50)


@pytest.mark.parametrize("row", CHANGES)
def test_a_row_of_table_3_changes_what_the_paper_prints_and_nothing_else(row):
    base, config = flat(load_config(f"{TABLE3}:base")), flat(load_config(f"{TABLE3}:{row}"))
    assert {name: value for name, value in config.items() if value != base[name]} == CHANGES[row]


def test_table_3_base_is_the_default_but_for_the_vocabulary_the_corpus_and_averaging():
    default, base = flat(Config()), flat(load_config(f"{TABLE3}:base"))
    changed = {name: value for name, value in base.items() if value != default[name]}
    assert changed == {
        "model.vocab_size": 40_960,
        "model.dtype": "bfloat16",
        "data.corpus": "tfds:wmt14_translate/de-en",
        "train.average_checkpoints": 1,
        "train.evaluate_sentences": 3000,
    }


@pytest.mark.parametrize("name", ["base", "base.py:fr", "big", "big.py:fr"])
def test_models_of_table_2_average_as_many_checkpoints_as_the_paper(name):
    config = load_config(str(CONFIGS / (name if ":" in name else f"{name}.py")))
    big, french = name.startswith("big"), name.endswith("fr")
    assert config.train.steps == (300_000 if big else 100_000)
    assert config.train.average_checkpoints == (20 if big else 5)
    assert config.model.dropout == (0.3 if big and not french else 0.1)
    assert config.data.vocab_size == (32_000 if french else 37_000)


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.py")), ids=lambda file: file.name)
def test_every_configuration_file_loads_and_survives_json(file):
    spec = str(file) + {"table3.py": ":base", "presets.py": ":paper"}.get(file.name, "")
    config = load_config(spec)
    assert Config.from_json(config.to_json(), "config.json") == config


def test_json_gives_back_every_field_and_fills_absent_ones():
    config = override(Config(), ["model.d_k=16", "optimizer.learning_rate=1e-3", "data.tokenizer=a b.model"])
    assert Config.from_json(config.to_json(), "config.json") == config
    assert Config.from_json('{"model": {"d_ff": 4096}}', "x") == override(Config(), ["model.d_ff=4096"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"model": {"num_hads": 8}}', ["run/config.json: ", "'model.num_hads'", "did you mean 'model.num_heads'?"]),
        ('{"modle": {}}', ["'modle'", "did you mean 'model'?"]),
        ('{"model": {"num_heads": "8"}}', ["model.num_heads is '8'", "a whole number"]),
        ('{"model": {"num_heads": 8.0}}', ["model.num_heads is 8.0", "a whole number"]),
        ('{"model": {"num_heads": true}}', ["model.num_heads is True", "a whole number"]),
        ('{"model": {"num_heads": null}}', ["model.num_heads is None", "a whole number"]),
        ('{"model": {"dropout": NaN}}', ["model.dropout is nan", "a number"]),
        ('{"model": {"scan_layers": 1}}', ["model.scan_layers is 1", "true or false"]),
        ('{"model": {"norm": "mid"}}', ["model.norm is 'mid'", "'post' or 'pre'"]),
        ('{"model": {"d_k": []}}', ["model.d_k is []", "a whole number or None"]),
        ('{"model": 3}', ["model is 3", "section"]),
        ('{"model": {"d_model": 7}}', ["run/config.json: ", "model.d_model is 7", "even"]),
        ('{"model": {\n"d_ff": }}', ["run/config.json, line 2", "not JSON"]),
        ("[]", ["one JSON object", "list"]),
    ],
)
def test_json_with_a_mistake_is_refused_by_name(text, words):
    with pytest.raises(UserError) as error:
        Config.from_json(text, "run/config.json")
    assert all(word in str(error.value) for word in words), str(error.value)


def test_whole_numbers_serve_as_numbers_with_a_fraction():
    config = Config.from_json('{"search": {"length_penalty": 1}}', "x")
    assert type(config.search.length_penalty) is float


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.num_heads=16", "model.d_k=None", "model.tied_embeddings=false", "mesh.data=-1"],
        ["--model.num-heads=16", "--model.d-k=none", "--model.tied-embeddings=False", "--mesh.data=-1"],
        ["--model.num-heads", "16", "--model.d_k", "None", "--model.tied_embeddings", "False", "--mesh.data", "-1"],
    ],
)
def test_overrides_in_every_spelling(overrides):
    """The contract's example: load_config("configs/table3.py:B1", overrides=["model.num_heads=16"])."""
    config = load_config(f"{TABLE3}:B1", overrides)
    base = load_config(f"{TABLE3}:B1").model
    assert config.model == dataclasses.replace(base, num_heads=16, d_k=None, tied_embeddings=False)
    assert config.mesh == MeshConfig(data=-1)


def test_overrides_are_a_list():
    with pytest.raises(UserError, match="overrides are of the type str; give a list"):
        override(Config(), "model.num_heads=16")


def test_overrides_that_only_fit_together_are_applied_together():
    config = load_config(str(CONFIGS / "base.py"), ["search.n_best=8", "search.beam_size=8"])
    assert config.search == SearchConfig(beam_size=8, n_best=8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["model.num_hads=3"], ["'model.num_hads'", "did you mean 'model.num_heads'?"]),
        (["num_heads=3"], ["did you mean 'model.num_heads'?"]),
        (["train.num_heads=3"], ["did you mean 'model.num_heads'?"]),
        (["vocab_size=3"], ["'model.vocab_size' or 'data.vocab_size'"]),
        (["optimizer.lr=3"], ["optimizer.learning_rate"]),
        (["qqq=3"], ["model.*"]),
        (["model.num_heads=banana"], ["model.num_heads is 'banana'", "a whole number"]),
        (["model.num_heads=1.5"], ["model.num_heads is '1.5'", "a whole number"]),
        (["model.d_k=x"], ["model.d_k is 'x'", "a whole number or None"]),
        (["model.dropout=nan"], ["model.dropout is nan", "a number"]),
        (["model.dropout=1"], ["model.dropout is 1.0", "below 1"]),
        (["model.tied_embeddings=0"], ["model.tied_embeddings is '0'", "true or false"]),
        (["model.norm=mid"], ["model.norm is 'mid'", "'post' or 'pre'"]),
        (["train.steps=0"], ["train.steps is 0", "from 1 to"]),
        (["junk"], ["'junk'", "section.field=value"]),
        (["--model.d-k"], ["--model.d-k needs a value"]),
        (["--model.d-k", "--model.d-v", "3"], ["--model.d-k needs a value"]),
        # P1: an odd width, and a width that the heads do not divide, are refused in words.
        (["model.d_model=7", "model.num_heads=1"], ["model.d_model is 7", "even"]),
        (["model.d_model=6", "model.num_heads=4"], ["model.d_model is 6", "divisible by num_heads 4"]),
        (["search.n_best=5"], ["search.n_best is 5", "search.beam_size (4)"]),
        (["data.batch_tokens=100"], ["data.batch_tokens is 100", "256"]),
        (["train.average_checkpoints=9"], ["train.average_checkpoints is 9", "train.keep_checkpoints (5)"]),
    ],
)
def test_an_override_with_a_mistake_is_refused_by_name(changes, words):
    message = refused(str(CONFIGS / "base.py"), changes)
    assert all(word in message for word in words), message


def test_odd_width_is_allowed_where_nothing_needs_it_even():
    """P1: learned positions have no pairs of sine and cosine."""
    assert ModelConfig(d_model=7, num_heads=1, positions="learned").key_size == 7


@pytest.mark.parametrize(
    ("variant", "words"),
    [
        (":b1", ["'b1'", "did you mean 'B1'?", "A1", "big"]),
        (":F9", ["'F9'", "A1", "big"]),
        ("", ["a variant must be named", "A1", "big"]),
    ],
)
def test_an_unknown_variant_lists_those_there_are(variant, words):
    message = refused(TABLE3 + variant)
    assert all(word in message for word in ["table3.py", *words]), message


def test_a_file_without_variants_says_so(tmp_path):
    file = config_file(
        tmp_path,
        """
        from transformer_jax.config import Config
        from transformer_jax.config_loading import choose_variant
        def get_config(variant): return choose_variant({"": Config()}, variant)
        """,
    )
    assert load_config(file) == Config()
    assert "this file has no variants" in refused(f"{file}:big")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("x = 1", ["mine.py", "get_config"]),
        ("def get_config(variant): return {}", ["mine.py", "returned dict", "Config"]),
        ("def get_config(variant):\n    return 1 / 0", ["mine.py, line 2", "ZeroDivisionError"]),
        ("import nothing_of_this_name", ["mine.py, line 1", "ModuleNotFoundError", "nothing_of_this_name"]),
        ("x = 1\ndef get_config(variant:", ["mine.py, line 2", "SyntaxError"]),
        ("def get_config(variant):\n    raise SystemExit(0)", ["mine.py, line 2", "it ends the program"]),
        ("x = '\0'", ["mine.py: SyntaxError", "null bytes"]),
        (
            "from transformer_jax.config import *\ndef get_config(variant):\n    return Config(ModelConfig(d_modle=8))",
            ["mine.py, line 3", "d_modle"],
        ),
    ],
)
def test_a_file_that_fails_is_named_with_the_line(tmp_path, body, words):
    message = refused(config_file(tmp_path, body))
    assert all(word in message for word in words), message


def test_the_line_is_named_whatever_the_file_is_called_by(tmp_path, monkeypatch):
    config_file(tmp_path, "def get_config(variant):\n    return 1 / 0")
    monkeypatch.chdir(tmp_path)
    assert "mine.py, line 2: ZeroDivisionError" in refused("./mine.py")


def test_missing_and_strange_files_are_named(tmp_path):
    assert "'nowhere.py'" in refused("nowhere.py")
    assert "'nowhere.py'" in refused("nowhere.py:B1")
    assert str(tmp_path / "config.json") in refused(str(tmp_path))
    (tmp_path / "a.txt").write_text("x")
    assert "neither a Python file" in refused(str(tmp_path / "a.txt"))
    (tmp_path / "latin.json").write_bytes(b"\xe9")
    assert "latin.json" in refused(str(tmp_path / "latin.json"))


def test_a_runs_folder_and_a_json_file_load_too(tmp_path):
    config = override(Config(), ["train.seed=7"])
    (tmp_path / "config.json").write_text(config.to_json(), encoding="utf-8")
    assert load_config(str(tmp_path)) == load_config(str(tmp_path / "config.json")) == config
    assert load_config(str(tmp_path), ["train.seed=8"]).train == TrainConfig(seed=8)
    assert "no variants" in refused(f"{tmp_path}/config.json:x")


def test_every_field_has_a_docstring():
    """They are the help page of `train --help`."""
    for node in ast.parse(inspect.getsource(transformer_jax.config)).body:
        if isinstance(node, ast.ClassDef):
            body = node.body[1:]
            for field, after in itertools.pairwise(body):
                if isinstance(field, ast.AnnAssign):
                    documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                    assert documented, f"{node.name}.{ast.unparse(field.target)}"


def test_every_type_of_a_field_has_words():
    assert describe_type(field_types(Config)["model.d_k"]) == "a whole number or None"
    assert all(describe_type(kind) for kind in field_types(Config).values())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("Config(ModelConfig(norm='mid'))", "model.norm is 'mid', but must be 'post' or 'pre'"),
        ("Config(ModelConfig(d_ff='9'))", "model.d_ff is '9', but must be a whole number"),
        ("Config(model=None)", "model is None, but must be a ModelConfig"),
        ("Config(train=SearchConfig())", "train is SearchConfig("),
        ("Config(data=DataConfig(cache_dir=''))", "data.cache_dir is '', but must be given a value, or left out"),
    ],
)
def test_types_are_checked_also_when_built_in_python(tmp_path, config, words):
    """In a process of its own: in this one, a hook of the test suite checks annotations before our own words do."""
    body = f"from transformer_jax.config import *\ndef get_config(variant): return {config}"
    code = "import sys; from transformer_jax.cli.main import main; sys.exit(main(sys.argv[1:]))"
    argv = [sys.executable, "-c", code, "describe", config_file(tmp_path, body)]
    result = subprocess.run(argv, cwd=CONFIGS.parent, capture_output=True, text=True)
    assert result.returncode == 2
    assert f"mine.py: {words}" in result.stderr and result.stderr.count("\n") == 1


def test_configurations_are_values():
    assert hash(Config()) == hash(Config())
    with pytest.raises(dataclasses.FrozenInstanceError):
        DataConfig().corpus = "x"


def test_reading_a_configuration_imports_no_jax():
    """A job's launcher can check a configuration in a tenth of a second."""
    code = "import sys, transformer_jax.config_loading; sys.exit('jax' in sys.modules or 'tyro' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=CONFIGS.parent)


def test_a_literal_may_be_none_too():
    """Its type is a typing.Union where that of other unions is a types.UnionType."""
    kind = Literal["post", "pre"] | None
    assert (parse_value("pre", kind, "norm"), parse_value("none", kind, "norm")) == ("pre", None)
    with pytest.raises(UserError, match="'post' or 'pre' or None"):
        parse_value("mid", kind, "norm")
