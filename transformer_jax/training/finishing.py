"""The end of a run: the averaged model, its scores on the test set, some translations, the curve."""

import dataclasses
import json
import os
import pathlib
from typing import Any

import jax

from transformer_jax.checkpointing.checkpoints import Checkpoints
from transformer_jax.evaluation.report import scores_table
from transformer_jax.training.averaging import average_checkpoints, save_averaged
from transformer_jax.training.evaluating import score_pairs
from transformer_jax.training.metrics import draw_curve
from transformer_jax.training.preparation import Prepared, write_whole
from transformer_jax.training.reporting import Reporter
from transformer_jax.translation.translator import Translator

_SHOWN = 5  # translations printed beside their references


def finish(prepared: Prepared, run: pathlib.Path, seconds: float, report: Reporter) -> None:
    """Scores a finished run, once; writes averaged/, results.json and curve.png."""
    path = run / "results.json"
    steps = prepared.config.train.steps
    results = _read(path)
    if results is None or results["step"] != steps:
        results = _score(prepared, run, seconds, report)
        write_whole(path, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    for line in results["page"]:
        report.say(line)
    draw_curve(run)
    report.say(f"\ntranslate with: transformer-jax translate {run}")


def _read(path: pathlib.Path) -> dict[str, Any] | None:
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return results if isinstance(results, dict) and {"step", "page"} <= results.keys() else None


def _score(prepared: Prepared, run: pathlib.Path, seconds: float, report: Reporter) -> dict[str, Any]:
    train, data = prepared.config.train, prepared.config.data
    folder = run / "checkpoints"
    reader = Checkpoints(folder, keep=train.keep_checkpoints, warn=report.warn)
    count = min(train.average_checkpoints, len(reader.steps()))
    reader.close()
    params, steps = average_checkpoints(folder, count, report.warn)
    save_averaged(run, params, steps, {"tokenizer": prepared.tokenizer.digest}, report.warn)
    name, text = "test", prepared.splits.test
    if text is None:
        name, text = "dev", prepared.splits.dev
    pairs = list(text)
    report.say(f"scoring    {len(pairs):,} sentences of {text.name}, mean of checkpoints {', '.join(map(str, steps))}")
    hypotheses, scores = score_pairs(
        Translator(prepared.config, params, prepared.tokenizer), pairs, data.target_language
    )
    page = [""]
    for (source, target), hypothesis in list(zip(pairs, hypotheses, strict=True))[:_SHOWN]:
        page += [f"source      {source}", f"translation {hypothesis}", f"reference   {target}", ""]
    title = f"{run} on {text.name} ({data.source_language} to {data.target_language})"
    page += scores_table(scores, title).splitlines()
    return {
        "step": train.steps,
        "split": name,
        "scores": dataclasses.asdict(scores),
        "averaged_steps": steps,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "training_seconds": round(seconds, 1),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}, {os.cpu_count()} processors",
        "jax": jax.__version__,
        "page": page,
    }
