"""The end of a run: the averaged model, its scores on the test set, some translations, the curve."""

import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from transformer_jax.checkpointing.checkpoint_files import complete_steps
from transformer_jax.evaluation.forced_decoding import reference_perplexity
from transformer_jax.evaluation.report import Evaluation
from transformer_jax.parallel.processes import gathered, is_first
from transformer_jax.training.averaging import average_run
from transformer_jax.training.evaluating import score_pairs
from transformer_jax.training.metrics import draw_curve
from transformer_jax.training.preparation import Prepared, write_whole
from transformer_jax.training.reporting import Reporter
from transformer_jax.translation.run_folder import named_steps
from transformer_jax.translation.translator import Translator

_SHOWN = 5  # translations printed beside their references


def finish(prepared: Prepared, mesh: Mesh, facts: Mapping[str, Any], report: Reporter) -> None:
    """Scores a finished run, once for each last step, text and search; writes averaged/, results.json and curve.png.

    `facts` become part of results.json; `step` is one of them. Every process calls this and has a part in the work.
    """
    home = prepared.home
    path = home.local / "results.json"
    asked = _asked(prepared, facts["step"])
    # One of them looks, as it is also the one that writes.
    results = json.loads(gathered(json.dumps(_read(path) if is_first() else None))[0])
    if results is None or results.get("asked") != asked:
        with report.during("scoring"):
            page, scored = _score(prepared, mesh, report)
        results = {**facts, **scored, "asked": asked, "page": page}
        if is_first():
            write_whole(path, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    if not is_first():
        return
    for line in results["page"]:
        report.say(line)
    draw_curve(home.local)
    command = pathlib.Path(sys.executable).with_name("transformer-jax")
    report.say(f"\ntranslate with: {os.path.relpath(command)} translate {home} < in.txt > out.txt")


def _asked(prepared: Prepared, step: int) -> dict[str, Any]:
    """All that the scores depend on."""
    config, splits = prepared.config, prepared.splits
    text = splits.dev if splits.test is None else splits.test
    return {
        "step": step,
        "text": text.digest(),
        "search": dataclasses.asdict(config.search),
        "average_checkpoints": config.train.average_checkpoints,
    }


def _read(path: pathlib.Path) -> dict[str, Any] | None:
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return (
        results if isinstance(results, dict) and isinstance(results.get("page"), list) and "step" in results else None
    )


def _score(prepared: Prepared, mesh: Mesh, report: Reporter) -> tuple[list[str], dict[str, Any]]:
    """The page for people, and the numbers."""
    config, splits, home = prepared.config, prepared.splits, prepared.home
    # A moving average is a mean already: the last is scored.
    wanted = 1 if config.optimizer.ema_decay is not None else config.train.average_checkpoints
    count = min(wanted, len(complete_steps(home.checkpoints)))
    averaged, steps = average_run(str(home), count, warn=report.warn)
    # From the files, so that what is scored is what will translate.
    translator = Translator.load(averaged, warn=report.warn, mesh=mesh)
    split, text = ("dev", splits.dev) if splits.test is None else ("test", splits.test)
    pairs = list(text)
    named = text.name if split == "test" else f"{text.name}, dev (no test text was given)"
    report.say(f"scoring    {len(pairs):,} sentences of {named}, {named_steps(steps)}")
    with report.counting("scoring", len(pairs)) as on_progress:
        hypotheses, scores = score_pairs(translator, pairs, config.data.target_language, on_progress)
    page = [""]
    for (source, target), hypothesis in list(zip(pairs, hypotheses, strict=True))[:_SHOWN]:
        page += [f"source      {source}", f"translation {hypothesis}", f"reference   {target}", ""]
    direction = f"{config.data.source_language}-{config.data.target_language}"
    perplexity = reference_perplexity(translator, pairs, report.warn)
    page += Evaluation(str(home), named, direction, scores, perplexity).table().splitlines()
    return page, {
        "split": split,
        "test_set": text.name,
        "direction": direction,
        "scores": dataclasses.asdict(scores),
        "perplexity": perplexity and dataclasses.asdict(perplexity),
        "averaged_steps": steps,
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}, {os.cpu_count()} processors",
        "jax": jax.__version__,
    }
