"""The benchmarks of Table 1: the recurrent layer and model, and what is counted in a traced program."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import table1
from program_counts import sequential_operations, work
from recurrent_layers import gru
from recurrent_model import RecurrentTranslator
from small_models import BOS, EOS, PAD, VOCABULARY, rows, sentence
from small_runs import run_config
from train_recurrent import run, schedule

import transformer_jax as tj

D, H = 5, 4


def gru_in_loops(x, mask, w_x, b_x, w_h, b_h):
    """Equations of Cho et al. with the reset gate after the product, as in cuDNN."""

    def sigmoid(value):
        return 1 / (1 + np.exp(-value))

    states = np.zeros((*x.shape[:2], H))
    for b in range(x.shape[0]):
        h = np.zeros(H)
        for t in range(x.shape[1]):
            if mask[b, t]:
                i, s = x[b, t] @ w_x + b_x, h @ w_h + b_h
                r, z = sigmoid(i[:H] + s[:H]), sigmoid(i[H : 2 * H] + s[H : 2 * H])
                h = (1 - z) * np.tanh(i[2 * H :] + r * s[2 * H :]) + z * h
            states[b, t] = h
    return states


@pytest.mark.parametrize("reverse", [False, True])
def test_the_recurrent_layer_is_a_gru(reverse):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 6, D))
    mask = np.arange(6) < np.array([[6], [4]])
    weights = [rng.normal(size=shape) for shape in ((D, 3 * H), (3 * H,), (H, 3 * H), (3 * H,))]
    found = gru(jnp.asarray(x, jnp.float32), *map(jnp.float32, weights), mask=jnp.asarray(mask), reverse=reverse)
    flip = slice(None, None, -1) if reverse else slice(None)
    expected = gru_in_loops(x[:, flip], mask[:, flip], *weights)[:, flip]
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.fixture(scope="module")
def model():
    module = RecurrentTranslator(VOCABULARY, 8, dropout=0.0)
    token = jnp.ones((1, 2), jnp.int32)
    return module, module.init(jax.random.key(0), token, token)


@pytest.mark.slow
def test_step_by_step_equals_the_full_pass(model):
    module, params = model
    source, target = rows([sentence(4), sentence(7)], 8), rows([[BOS, *sentence(5)], [BOS, *sentence(3)]], 6)
    full = module.apply(params, source, target)
    memory = module.apply(params, source, method="encode")
    states = (jnp.zeros((2, 8)), jnp.zeros((2, 8)))
    for t in range(target.shape[1]):
        logits, states = module.apply(params, target[:, t : t + 1], memory, states, method="decode")
        np.testing.assert_allclose(logits[:, 0], full[:, t], atol=1e-5)


@pytest.mark.slow
def test_padding_of_the_source_changes_nothing(model):
    module, params = model
    target = rows([[BOS, *sentence(5)]], 6)
    narrow, wide = (module.apply(params, rows([sentence(4)], width), target) for width in (4, 9))
    np.testing.assert_allclose(narrow, wide, atol=1e-6)


def test_greedy_takes_the_most_probable_piece_and_stops(model):
    module, params = model
    source = rows([sentence(4), sentence(7)], 8)
    found = np.asarray(module.apply(params, source, 12, method="greedy"))
    target = np.concatenate([np.full((2, 1), BOS), found[:, :-1]], axis=1)
    logits = np.array(module.apply(params, source, jnp.asarray(target)))
    logits[:, :, [PAD, BOS]] = -np.inf
    for row, expected in zip(found, logits.argmax(-1), strict=True):
        end = int(np.argmax(row == EOS)) + 1 if (row == EOS).any() else len(row)
        assert row[:end].tolist() == expected[:end].tolist() and not row[end:].any()


@pytest.mark.slow
def test_the_whole_way_at_small_size(tmp_path):
    """Its own evaluation: every sentence of the test set, the set of scores, perplexity."""
    config = run_config(tmp_path / "text", optimizer__learning_rate=0.01)
    lines = (tmp_path / "text" / "train.tsv").read_text().splitlines()
    tokenizer = tj.Tokenizer.train(lines, tmp_path / "tokenizer.model", vocab_size=290)
    evaluation = run(config, tokenizer, tmp_path / "run", width=8, processor_seconds=None, updates=6)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["updates"] == 6 and results["sentences"] == 3 == evaluation.scores.sentences
    assert results["parameters"] > 0 and results["perplexity"]["per_piece"] > 1.0
    assert (tmp_path / "run" / "translations.txt").read_text().count("\n") == 3


def test_the_rate_rises_and_falls_with_the_budget():
    assert schedule(2.0, 0.05) == pytest.approx(1.0) and schedule(2.0, 0.1) == pytest.approx(2.0)
    assert schedule(2.0, 0.55) == pytest.approx(1.0) and schedule(2.0, 0.0) > 0.0


def test_work_is_that_of_table_1():
    """4 n d^2 products of projections and 2 n^2 d of attention; 6 n d^2; k n d^2: two operations each."""
    d, n = 16, 12
    x = jnp.ones((1, n, d))
    found = [work(jax.make_jaxpr(layer)(params, x)) for layer, params in table1.make_layers(d).values()]
    assert found == [2 * (4 * n * d**2 + 2 * n**2 * d), 2 * 6 * n * d**2, 2 * 3 * n * d**2]


def test_only_the_recurrent_layer_has_a_sequence_that_grows():
    def counts(n):
        x = jnp.ones((1, n, 16))
        return [
            sequential_operations(jax.make_jaxpr(layer)(params, x)) for layer, params in table1.make_layers(16).values()
        ]

    (attention, recurrent, convolution), longer = counts(8), counts(16)
    assert longer[0] == attention and longer[2] == convolution == 1
    assert 8 * 5 <= longer[1] - recurrent <= 8 * 20


def test_independent_operations_are_no_sequence():
    assert sequential_operations(jax.make_jaxpr(lambda x: jnp.sin(x) + jnp.cos(x) * 2.0)(1.0)) == 3
    looped = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=7)[0])
    assert sequential_operations(looped(1.0)) == 7


def test_the_page_and_the_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(table1, "LEAST_SECONDS", 0.0)
    measured = table1.measure_all(16, [4, 8], 1)
    facts = {"d": 16, "repeats": 1, "device": "cpu", "processors": 2, "load_average": 0.0}
    text = table1.page(measured, facts)
    assert "| recurrent | O(n d^2) | 1.00 | O(n) |" in text
    table1.draw(measured, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
