"""The report of an ablation: report.md for people, report.json for programs, report.png; from what is finished."""

import dataclasses
import json
import os
import pathlib
import shlex
from collections.abc import Callable, Mapping, Sequence

from transformer_jax.ablation.comparison import (
    BLEU,
    NATS,
    Measure,
    difference,
    noise,
    paper_difference,
    spread,
    verdict,
)
from transformer_jax.ablation.experiment import Experiment, flat
from transformer_jax.ablation.figure import draw
from transformer_jax.ablation.scores import RowScores, collect
from transformer_jax.ablation.table import Printed, Row
from transformer_jax.training.preparation import write_whole

_VERDICTS = """\
Differences are those of a row's mean to the first row's, in nats for each word piece (0.01 is 1 % of perplexity).
"As the paper" compares their direction alone: "yes" where both go the same way or neither goes anywhere, "not seen"
where only the paper's does, "no" where they go apart. A difference counts as none up to two standard errors, from the
spread of all rows' seeds pooled, and up to {nats} nats or {bleu} BLEU, in the paper too, which gives no spread."""


def write_report(experiment: Experiment, failures: Mapping[str, str]) -> pathlib.Path:
    """Writes the three files into the ablation's folder, each whole or not at all.

    Args:
        experiment: what was wanted.
        failures: by row, why it has not all its runs.

    Returns:
        The path of report.md.
    """
    table = collect(experiment.rows, experiment.runs())
    folder = experiment.settings.workdir
    write_whole(folder / "report.json", json.dumps(_as_json(experiment, table, failures), indent=2) + "\n")
    if any(scores.runs for scores in table):
        unfinished = folder / ".report.unfinished.png"
        draw(table, unfinished)
        os.replace(unfinished, folder / "report.png")
    write_whole(folder / "report.md", page(experiment, table, failures))
    return folder / "report.md"


def page(experiment: Experiment, table: Sequence[RowScores], failures: Mapping[str, str]) -> str:
    """report.md as text."""
    settings = experiment.settings
    runs = [run for scores in table for run in scores.runs]
    wanted = sum(scores.wanted for scores in table)
    lines = [f"# {settings.table} at the scale `{settings.scale}`", "", f"    {command(experiment)}", ""]
    lines += [f"{len(runs)} of {wanted} runs are finished, breadth first: a seed of every row before the next seed."]
    if runs:
        minutes = sum(run.seconds for run in runs) / 60
        lines += [
            f"Training took {minutes:,.0f} minutes in all on {', '.join(sorted({run.device for run in runs}))}.",
            "Perplexity is per word piece of the dev set without label smoothing, BLEU is sacreBLEU's "
            f"`{runs[0].signature}` on the dev set, ± the standard deviation over seeds.",
        ]
        if all(scores.row.printed is None for scores in table):
            lines += ["", *_perplexities(experiment, table), "", *_bleus(table), ""]
        else:
            lines += [
                "The paper's are of its own dev set, word pieces and BLEU: differences compare, values do not.",
                "", *_perplexities(experiment, table), "", *_bleus(table), "",
                _VERDICTS.format(nats=NATS.least, bleu=BLEU.least), "",
            ]  # fmt: skip
        lines += ["![differences to the first row](report.png)", ""]
    lines += [*_missing(table, failures), *_shrunk(experiment)]
    return "\n".join(lines)


def command(experiment: Experiment) -> str:
    """The command line that asks for this ablation."""
    settings = experiment.settings
    words = ["transformer-jax", "ablate", settings.table, "--scale", settings.scale, "--seeds", str(settings.seeds)]
    words += ["--rows", settings.rows] if settings.rows else []
    words += ["--steps", str(settings.steps)] if settings.steps else []
    return shlex.join([*words, "--workdir", str(settings.workdir), *settings.overrides])


def changes_of(row: Row, experiment: Experiment) -> str:
    """What a row changes, at the scale: `num_heads 1, d_k 128, d_v 128`."""
    config = experiment.configs.get(row.name)
    if config is None:
        return ""
    values = flat(config)
    return ", ".join(f"{name.rpartition('.')[2]} {values[name]}" for name in row.changes)


def _perplexities(experiment: Experiment, table: Sequence[RowScores]) -> list[str]:
    header = ["row", "changes", "parameters", "runs", "perplexity", "nats to the first"]
    if any(scores.row.printed for scores in table):
        header += ["paper", "nats to its first", "as the paper"]
    rows = []
    for scores in table:
        cells = [scores.row.name, changes_of(scores.row, experiment)]
        cells += [f"{scores.runs[0].parameters:,}" if scores.runs else "", f"{len(scores.runs)}"]
        cells += [_spread([run.perplexity for run in scores.runs], 2)]
        cells += _comparison(scores, table, NATS, lambda printed: printed.perplexity)
        rows.append(cells)
    return _table(header, rows)


def _bleus(table: Sequence[RowScores]) -> list[str]:
    header = ["row", "BLEU", "to the first"]
    paper = any(scores.row.printed for scores in table)
    header += ["paper", "to its first", "as the paper"] if paper else []
    tested = any(run.test_bleu is not None for scores in table for run in scores.runs)
    rows = []
    for scores in table:
        cells = [scores.row.name, _spread([run.bleu for run in scores.runs], 2)]
        cells += _comparison(scores, table, BLEU, lambda printed: printed.bleu)
        if tested:
            cells.append(_spread([run.test_bleu for run in scores.runs if run.test_bleu is not None], 2))
        rows.append(cells)
    return _table([*header, *(["BLEU of the test set"] if tested else [])], rows)


def _comparison(
    scores: RowScores, table: Sequence[RowScores], measure: Measure, printed: Callable[[Printed], float]
) -> list[str]:
    """To the first row, here; what the paper prints, its difference to its first row, and the verdict."""
    first, is_first = table[0], scores is table[0]

    def signed(value: float | None) -> str:
        return "" if value is None or is_first else f"{value:+.{measure.digits}f}"

    cells = [signed(difference(scores, first, measure))]
    if not any(other.row.printed for other in table):
        return cells
    cells.append(str(printed(scores.row.printed)) if scores.row.printed else "")
    cells.append(signed(paper_difference(scores.row, first.row, measure)))
    return [*cells, verdict(scores, table, measure) or ""]


def _missing(table: Sequence[RowScores], failures: Mapping[str, str]) -> list[str]:
    lines = [f"- {name} failed: {reason}" for name, reason in failures.items()]
    lines += [
        f"- {scores.row.name}: {len(scores.runs)} of {scores.wanted} runs"
        for scores in table
        if len(scores.runs) < scores.wanted and scores.row.name not in failures
    ]
    return ["## Not there", "", *lines, ""] if lines else []


def _shrunk(experiment: Experiment) -> list[str]:
    if not experiment.shrunk:
        return []
    rows = [[name, str(before), str(after)] for name, before, after in experiment.shrunk]
    return [
        "## The scale",
        "",
        "What the first row has in place of the table's own; why is in `transformer_jax/ablation/scale.py`.",
        "",
        *_table(["field", "table", "here"], rows),
        "",
    ]


def _spread(values: Sequence[float], digits: int) -> str:
    if not values:
        return ""
    found = spread(values)
    deviation = "" if found.deviation is None else f" ± {found.deviation:.{digits}f}"
    return f"{found.mean:.{digits}f}{deviation}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def _as_json(experiment: Experiment, table: Sequence[RowScores], failures: Mapping[str, str]) -> dict[str, object]:
    settings = experiment.settings
    rows = []
    for scores in table:
        config = experiment.configs.get(scores.row.name)
        rows.append(
            {
                "name": scores.row.name,
                "changes": {} if config is None else {name: flat(config)[name] for name in scores.row.changes},
                "paper": scores.row.printed and dataclasses.asdict(scores.row.printed),
                "failure": failures.get(scores.row.name),
                "runs_wanted": scores.wanted,
                "runs": [{**dataclasses.asdict(run), "perplexity": run.perplexity} for run in scores.runs],
                "nats_to_first": difference(scores, table[0], NATS),
                "bleu_to_first": difference(scores, table[0], BLEU),
                "perplexity_as_paper": verdict(scores, table, NATS),
                "bleu_as_paper": verdict(scores, table, BLEU),
            }
        )
    return {
        "command": command(experiment),
        "table": settings.table,
        "scale": {name: [before, after] for name, before, after in experiment.shrunk},
        "noise_nats": noise(table, NATS),
        "noise_bleu": noise(table, BLEU),
        "rows": rows,
    }
