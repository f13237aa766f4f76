"""The end of a run: the averaged model, its scores on the test set, some translations, the curve."""

import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import jax

from transformer_jax.checkpointing.checkpoint_files import complete_steps
from transformer_jax.evaluation.report import scores_table
from transformer_jax.training.averaging import average_run
from transformer_jax.training.evaluating import score_pairs
from transformer_jax.training.metrics import draw_curve
from transformer_jax.training.preparation import Prepared, write_whole
from transformer_jax.training.reporting import Reporter
from transformer_jax.translation.translator import Translator

_SHOWN = 5  # translations printed beside their references


def finish(prepared: Prepared, run: pathlib.Path, facts: Mapping[str, Any], report: Reporter) -> None:
    """Scores a finished run, once for each last step; writes averaged/, results.json and curve.png.

    `facts` become part of results.json; `step` is one of them.
    """
    path = run / "results.json"
    results = _read(path)
    if results is None or results["step"] != facts["step"]:
        page, scored = _score(prepared, run, report)
        results = {**facts, **scored, "page": page}
        write_whole(path, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    for line in results["page"]:
        report.say(line)
    draw_curve(run)
    command = pathlib.Path(sys.executable).with_name("transformer-jax")
    report.say(f"\ntranslate with: {os.path.relpath(command)} translate {run} < in.txt > out.txt")


def _read(path: pathlib.Path) -> dict[str, Any] | None:
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return (
        results if isinstance(results, dict) and isinstance(results.get("page"), list) and "step" in results else None
    )


def _score(prepared: Prepared, run: pathlib.Path, report: Reporter) -> tuple[list[str], dict[str, Any]]:
    """The page for people, and the numbers."""
    config, splits = prepared.config, prepared.splits
    count = min(config.train.average_checkpoints, len(complete_steps(run / "checkpoints")))
    averaged, steps = average_run(run, count, warn=report.warn)
    # From the files, so that what is scored is what will translate.
    translator = Translator.load(averaged, warn=report.warn)
    split, text = ("dev", splits.dev) if splits.test is None else ("test", splits.test)
    pairs = list(text)
    report.say(f"scoring    {len(pairs):,} sentences of {text.name}, mean of checkpoints {', '.join(map(str, steps))}")
    hypotheses, scores = score_pairs(translator, pairs, config.data.target_language)
    page = [""]
    for (source, target), hypothesis in list(zip(pairs, hypotheses, strict=True))[:_SHOWN]:
        page += [f"source      {source}", f"translation {hypothesis}", f"reference   {target}", ""]
    title = f"{run} on {text.name} ({config.data.source_language} to {config.data.target_language})"
    page += scores_table(scores, title).splitlines()
    return page, {
        "split": split,
        "scores": dataclasses.asdict(scores),
        "averaged_steps": steps,
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}, {os.cpu_count()} processors",
        "jax": jax.__version__,
    }
