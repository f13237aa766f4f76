"""The runs of an ablation, one after the other in this process, each as a run of its own; the report after each.

One process, not one a run: starting costs 5 s of a run's minute, and programs that do not fit twice would fit no better
alone, as each run's programs are dropped at its end.
"""

import dataclasses
import gc
import hashlib
import json
import pathlib
from collections.abc import Callable

import jax

from transformer_jax.ablation.experiment import Experiment, Run, flat
from transformer_jax.ablation.report import write_report
from transformer_jax.ablation.scores import read_scores
from transformer_jax.checkpointing.checkpoint_files import complete_steps
from transformer_jax.config import Config
from transformer_jax.data.sources import load_splits
from transformer_jax.data.vocabulary import learn_vocabulary
from transformer_jax.errors import UserError
from transformer_jax.training.interruption import only_process
from transformer_jax.training.loop import train
from transformer_jax.training.preparation import require_same_run, stored_config, write_whole
from transformer_jax.training.run_home import RunHome


def train_all(experiment: Experiment, say: Callable[[str], None]) -> pathlib.Path:
    """Trains what is not trained yet, seed by seed, and writes the report after each run.

    Killed at any moment and called again, it goes on with the run that it was at. A run that fails stops no other.

    Returns:
        The path of report.md.

    Raises:
        UserError: a folder in `workdir` holds a run of other settings, before anything is trained; or, at the end, rows
            that failed.
        SystemExit: 130 or 143 after SIGINT or SIGTERM during updates, when the checkpoint is safe.
    """
    workdir = experiment.settings.workdir
    with only_process(workdir):
        runs = experiment.runs()
        require_same_settings(experiment)
        failures = dict(experiment.failures)
        for number, run in enumerate(runs, start=1):
            if read_scores(run) is not None:
                continue
            say(f"\nrun {number} of {len(runs)}: {run.row.name}, seed {run.seed}")
            failure = _train(run, workdir / "text", say)
            if failure is not None:
                failures[run.row.name] = failure
                say(f"warning: row {run.row.name} is left out: {failure}")
            write_report(experiment, failures)
        report = write_report(experiment, failures)
    if failures:
        raise UserError(
            f"{len(failures)} of {len(experiment.rows)} rows failed: {', '.join(failures)} "
            f"({next(iter(failures.values()))}); the report is {report}"
        )
    return report


def _train(run: Run, text: pathlib.Path, say: Callable[[str], None]) -> str | None:
    """Why the run failed, None when it did not."""
    try:
        train(_with_shared_text(run.config, text, say), run.folder)
    except UserError as error:
        return str(error)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return "there is not enough memory for it: set --data.batch-tokens lower, for all rows"
    finally:
        jax.clear_caches()
        gc.collect()
    return None


def _with_shared_text(config: Config, folder: pathlib.Path, say: Callable[[str], None]) -> Config:
    """`config` with one tokenizer and one tokenized text for all runs of the same data section, made by the first.

    Perplexities per piece of runs with different tokenizers would not compare, nor scores on different text.

    Raises:
        UserError: the files that it names do not hold what they held for the runs before.
    """
    data = config.data
    section = hashlib.sha256(json.dumps(dataclasses.asdict(data)).encode()).hexdigest()[:8]
    splits = load_splits(data)
    digests = json.dumps([text and text.digest() for text in (splits.train, splits.dev, splits.test)])
    record = folder / f"text-{section}.json"
    if not record.exists():
        write_whole(record, digests)
    elif record.read_text(encoding="utf-8") != digests:
        raise UserError(
            f"{splits.train.name}, or the dev or test text beside it, is not what the rows before were trained on: "
            "bring that text back, or choose another --workdir"
        )
    cache = pathlib.Path(data.cache_dir or folder)
    tokenizer = pathlib.Path(data.tokenizer or folder / f"tokenizer-{section}.model")
    if not data.tokenizer and not tokenizer.exists():
        learn_vocabulary(splits.train, data, cache, say).save(tokenizer)
    return dataclasses.replace(config, data=dataclasses.replace(data, tokenizer=str(tokenizer), cache_dir=str(cache)))


def require_same_settings(experiment: Experiment) -> None:
    """A run that has begun goes on as it began, and is scored, and reported, as the others are.

    Raises:
        UserError: one has begun with other settings.
    """
    for run in experiment.runs():
        _require_settings_of(run)


def _require_settings_of(run: Run) -> None:
    checkpoints = run.folder / "checkpoints"
    if not checkpoints.is_dir() or not complete_steps(checkpoints):
        return
    stored = stored_config(RunHome.at(run.folder))
    require_same_run(stored, run.config, run.folder)
    before, now = flat(stored), flat(run.config)
    # With the paper's schedule a run may grow; it cannot shrink.
    free = "train.steps" if stored.train.steps < run.config.train.steps else ""
    scoring = ["train.steps", "train.evaluate_sentences", "train.average_checkpoints"]
    for name in [*scoring, *(name for name in before if name.startswith("search."))]:
        if before[name] != now[name] and name != free:
            raise UserError(
                f"{run.folder} holds a run with {name} {before[name]!r}, and this command says {now[name]!r}: "
                "choose another --workdir, or give the run's own value to go on with it"
            )
