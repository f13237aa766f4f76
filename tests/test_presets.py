"""The presets: what they change, that each change is told, and what it costs in parameters."""

import dataclasses
import math
import pathlib

import jax
import jax.numpy as jnp
import pytest

from transformer_jax.ablation.experiment import flat
from transformer_jax.config_loading import load_config
from transformer_jax.model.transformer import Transformer
from transformer_jax.presets import MODERN, T2T, T2T_BIG_FRENCH

ROOT = pathlib.Path(__file__).parent.parent
PAPER_BASE = {
    "model.norm": "post", "model.attention_dropout": 0.0, "model.relu_dropout": 0.0, "model.attention_bias": True,
    "model.sinusoids": "interleaved", "optimizer.beta2": 0.98, "optimizer.warmup_steps": 4000,
    "optimizer.learning_rate_factor": 1.0, "optimizer.decay": "inverse_sqrt", "optimizer.clip_norm": None,
    "train.average_checkpoints": 5, "search.max_extra_length": 50,
}  # fmt: skip


def load(spec):
    return load_config(str(ROOT / "configs" / spec))


def parameters(config):
    model = Transformer(dataclasses.replace(config.model, vocab_size=config.data.vocab_size))
    token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), token, token)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize(
    ("variant", "changes"),
    [("t2t", T2T), ("modern", MODERN), ("fr-t2t", T2T), ("fr-modern", MODERN), ("de-t2t", T2T), ("de", {}), ("fr", {})],
)
@pytest.mark.parametrize("file", ["base.py", "big.py"])
def test_a_preset_changes_what_it_names_and_nothing_else(file, variant, changes):
    paper = flat(load(f"{file}:fr" if variant.startswith("fr") else file))
    expected = {**changes, **(T2T_BIG_FRENCH if (file, variant) == ("big.py", "fr-t2t") else {})}
    found = flat(load(f"{file}:{variant}"))
    assert {name: value for name, value in found.items() if value != paper[name]} == expected


def test_the_papers_values_are_those_of_the_configuration():
    found = flat(load("base.py"))
    assert {name: found[name] for name in PAPER_BASE} == PAPER_BASE
    assert T2T.keys() | MODERN.keys() == PAPER_BASE.keys()


def test_every_difference_of_a_preset_is_a_row_of_the_deviations():
    text = (ROOT / "docs" / "deviations.md").read_text(encoding="utf-8")
    rows = {
        name: [cell.strip() for cell in line.split("|")[2:5]]
        for line in text.splitlines()
        for name in PAPER_BASE
        if line.startswith(f"| `{name}` |")
    }
    for name, (_, t2t, modern) in rows.items():
        for preset, cell in ((T2T, t2t), (MODERN, modern)):
            assert cell == ("" if name not in preset else str(preset[name])), name
    assert rows.keys() == PAPER_BASE.keys()
    assert all(f"`{name}`" in text for name in T2T_BIG_FRENCH)


@pytest.mark.parametrize("file", ["base.py", "big.py"])
def test_presets_have_the_papers_parameters(file):
    """All but the biases and, with pre-norm, a norm more on each stack: within a thousandth."""
    paper = parameters(load(file))
    assert parameters(load(f"{file}:modern")) == pytest.approx(paper, rel=2e-3)
    assert parameters(load(f"{file}:t2t")) == parameters(load(f"{file}:modern"))
