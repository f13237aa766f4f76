"""`transformer-jax bleu` on plain files, and the perplexity that a model's scores give."""

import dataclasses
import json
import math
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from small_models import random_params, rows

import transformer_jax as tj
from transformer_jax.cli.main import main
from transformer_jax.config import Config, DataConfig, ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.evaluation.bleu import corpus_scores
from transformer_jax.evaluation.forced_decoding import reference_perplexity
from transformer_jax.ops.masks import BOS
from transformer_jax.translation.translator import Translator

REFERENCES = ["Die E-Mail-Adresse ist „neu“.", "Zweite Zeile hier.", ""]
HYPOTHESES = ["Die E-Mail-Adresse ist neu.", "", "Zu viel."]


def files(folder, hypotheses, references):
    words = []
    for name, lines in (("hypothesis", hypotheses), ("reference", references)):
        (folder / f"{name}.txt").write_bytes("".join(f"{line}\n" for line in lines).encode())
        words += [f"--{name}", str(folder / f"{name}.txt")]
    return words


def test_json_holds_the_whole_set(tmp_path, capfdbinary):
    words = files(tmp_path, HYPOTHESES, REFERENCES)
    assert main(["bleu", *words, "--language", "de", "--json"]) == 0
    found = json.loads(capfdbinary.readouterr().out)
    scores = dataclasses.asdict(corpus_scores(HYPOTHESES, REFERENCES, "de"))
    assert found == scores | {
        "system": words[1], "test_set": words[3], "direction": "de", "perplexity": None
    }  # fmt: skip
    assert found["sentences"] == 3


def test_the_table_names_the_test_set_in_every_row(tmp_path, capfdbinary):
    words = files(tmp_path, HYPOTHESES, REFERENCES)
    assert main(["bleu", *words, "--language", "de"]) == 0
    table, warnings = capfdbinary.readouterr()
    scored = [line for line in table.decode().splitlines() if "version:" in line]
    assert len(scored) == 4 and all(f"{words[3]} de, 3 lines" in line for line in scored)
    assert warnings == b""


def test_lines_end_at_line_feeds_only(tmp_path, capfdbinary):
    """T1: U+2028 and a carriage return at the end are not lines of their own; a byte order mark is no text."""
    (tmp_path / "h").write_bytes("\ufeffeins zwei\u2028drei vier\r\nfünf\r\n".encode())
    (tmp_path / "r").write_bytes("eins zwei\u2028drei vier\nfünf".encode())
    argv = ["bleu", "--hypothesis", str(tmp_path / "h"), "--reference", str(tmp_path / "r"), "--language", "de"]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capfdbinary.readouterr().out)
    assert found["sentences"] == 2 and found["paper_bleu"] == pytest.approx(100.0)


def test_text_that_is_not_plain_is_warned_of(tmp_path, capfdbinary):
    words = files(tmp_path, ["▁Das ▁Haus", "ja"], ["Das &quot; Haus &quot;", "ja"])
    assert main(["bleu", *words, "--language", "de"]) == 0
    warnings = capfdbinary.readouterr().err.decode().splitlines()
    assert len(warnings) == 2
    assert all(f"warning: {words[i]}: 1 of 2 lines hold " in line for i, line in zip((1, 3), warnings, strict=True))


@pytest.mark.parametrize(
    ("hypothesis", "reference", "parts"),
    [
        (b"a\nb\n", b"a\nb\nc\n", ["hypothesis.txt has 2 lines but", "reference.txt has 3"]),
        (b"a\n\xff\n", b"a\nb\n", ["hypothesis.txt, line 2: byte 1 (0xff) is not UTF-8"]),
        (b"", b"a\n", ["hypothesis.txt: holds no text"]),
        (b"a\n", b"\n", ["nothing to score"]),
        (None, b"a\n", ["hypothesis.txt: cannot be read"]),
    ],
)
def test_bad_files_are_one_line_and_exit_2(tmp_path, capfd, hypothesis, reference, parts):
    """E1, E3 (d)."""
    for name, content in (("hypothesis", hypothesis), ("reference", reference)):
        if content is not None:
            (tmp_path / f"{name}.txt").write_bytes(content)
    argv = ["--hypothesis", str(tmp_path / "hypothesis.txt"), "--reference", str(tmp_path / "reference.txt")]
    assert main(["bleu", *argv, "--language", "de"]) == 2
    out, error = capfd.readouterr()
    assert out == "" and error.count("\n") == 1 and all(part in error for part in parts)


@pytest.mark.parametrize("language", ["german", "d", "de|x", "zh\nx"])
def test_what_is_no_language_code_is_no_guess_either(tmp_path, capfd, language):
    """E4: Chinese asked for as `chinese` would be split as English is."""
    assert main(["bleu", *files(tmp_path, ["a"], ["a"]), "--language", language]) == 2
    assert "but must be a language code such as de, fr, zh or pt_BR" in capfd.readouterr().err


def test_codes_of_three_letters_are_the_same_languages(tmp_path, capfdbinary):
    assert main(["bleu", *files(tmp_path, HYPOTHESES, REFERENCES), "--language", "deu", "--json"]) == 0
    assert "tok:moses-de|" in json.loads(capfdbinary.readouterr().out)["paper_bleu_signature"]


def test_no_language_is_no_guess(tmp_path, capfd):
    assert main(["bleu", *files(tmp_path, ["a"], ["a"])]) == 2
    assert "--language must be given" in capfd.readouterr().err


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    lines = ["ein kleines Haus", "zwei große Häuser", "a small house", "two large houses"] * 4
    tokenizer = tj.Tokenizer.train(lines, tmp_path_factory.mktemp("t") / "tokenizer.model", vocab_size=290)
    model = ModelConfig(
        vocab_size=tokenizer.size, encoder_layers=1, decoder_layers=1, d_model=16, d_ff=16, num_heads=2, dropout=0.0
    )
    return Translator(Config(model=model, data=DataConfig(target_language="de")), random_params(model), tokenizer)


@pytest.mark.slow
def test_a_models_perplexity_is_that_of_its_loss_without_smoothing(translator):
    """Every pair counts, an empty reference too: it is one piece, its end."""
    pairs = [("a small house", "ein kleines Haus"), ("two large houses", "zwei große Häuser"), ("a", "")]
    nats = pieces = 0.0
    for source, target in pairs:
        source_ids, labels = (translator.tokenizer.encode([line])[0] for line in (source, target))
        logits = tj.Transformer(translator.config.model).apply(
            {"params": translator._params}, rows([source_ids], len(source_ids)), jnp.array([[BOS, *labels[:-1]]])
        )
        logits = np.asarray(logits[0], np.float64)
        nats -= sum(row[label] - np.logaddexp.reduce(row) for row, label in zip(logits, labels, strict=True))
        pieces += len(labels)
    found = reference_perplexity(translator, pairs, pytest.fail)
    assert found.pieces == pieces and found.nats == pytest.approx(nats, rel=1e-5)
    assert found.per_piece == pytest.approx(math.exp(nats / pieces), rel=1e-5)
    assert found.words == 3 + 3 + 0 + 3


def test_references_beyond_the_models_positions_leave_the_scores_without_perplexity(translator, monkeypatch):
    def refuse(self, sources, targets):
        raise UserError("target line 1 has 9 pieces")

    monkeypatch.setattr(Translator, "score", refuse)
    warnings = []
    assert reference_perplexity(translator, [("a", "b")], warnings.append) is None
    assert warnings == ["no perplexity: target line 1 has 9 pieces"]


def test_the_command_does_not_wait_for_jax(tmp_path, monkeypatch):
    """Nor for the model's code: it scores the output of any system."""
    for name in ("jax", "transformer_jax.translation.translator"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("cli.bleu", "evaluation.report", "evaluation.bleu", "evaluation.perplexity", "evaluation.plain_text"):
        monkeypatch.delitem(sys.modules, f"transformer_jax.{name}", raising=False)
    assert main(["bleu", *files(tmp_path, ["a"], ["a"]), "--language", "de"]) == 0
