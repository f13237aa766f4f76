"""Small runs for the tests of training: text made here, a model that compiles in seconds, what a run left behind."""

import contextlib
import dataclasses
import random

import jax
from jax.experimental.compilation_cache import compilation_cache

from transformer_jax.checkpointing.checkpoint_files import complete_steps, read_record
from transformer_jax.config import Config, DataConfig, ModelConfig, OptimizerConfig, SearchConfig, TrainConfig
from transformer_jax.training import loop
from transformer_jax.training.metrics import MetricsWriter, read_metrics

WORDS = ["ab", "cd", "ef", "gh", "ij", "kl", "mn", "op"]
# What no two runs have in common.
OF_THE_CLOCK = {
    "tokens_per_second", "fill", "validation_seconds", "seconds", "compilations", "host_peak_bytes",
    "data_seconds", "device_seconds", "checkpoint_seconds", "host_seconds",
}  # fmt: skip


@contextlib.contextmanager
def programs_kept_in(folder):
    """Compiled programs are kept in `folder`, not at the user's home, and no longer than the context.

    They are compiled with few optimisations, which takes half the time.
    """
    new = {"jax_compilation_cache_dir": str(folder), "jax_disable_most_optimizations": True}
    before = {name: jax.config.values[name] for name in (*new, "jax_persistent_cache_min_compile_time_secs")}
    for name, value in new.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def pairs(count, seed=0, words=WORDS, longest=5):
    """Sentences of 1 to `longest` words; the translation is the words in reverse."""
    rng = random.Random(seed)
    chosen = [rng.choices(words, k=rng.randint(1, longest)) for _ in range(count)]
    return [(" ".join(sentence), " ".join(sentence[::-1])) for sentence in chosen]


def write_pairs(path, rows):
    path.write_text("".join(f"{source}\t{target}\n" for source, target in rows), encoding="utf-8")
    return str(path)


def run_config(folder, **changes):
    """A configuration with its text in `folder`; changes are `section__field=value`.

    Two or three batches an epoch; six updates, validation after every second and a checkpoint after every third.
    """
    folder.mkdir(exist_ok=True)
    data = {
        f"{part}_source": write_pairs(folder / f"{part}.tsv", pairs(count, seed))
        for seed, (part, count) in enumerate({"train": 40, "dev": 4, "test": 3}.items())
    }
    config = Config(
        model=ModelConfig(encoder_layers=1, decoder_layers=1, d_model=16, d_ff=16, num_heads=2, dropout=0.1),
        optimizer=OptimizerConfig(learning_rate=0.01, warmup_steps=4),
        data=DataConfig(vocab_size=290, max_length=16, batch_tokens=64, target_language="xx", **data),
        search=SearchConfig(beam_size=2, max_extra_length=4, max_source_length=16, batch_tokens=64),
        train=TrainConfig(steps=6, evaluate_every=2, checkpoint_every=3, log_every=1, average_checkpoints=2),
    )
    sections = {}
    for name, value in changes.items():
        section, _, field = name.partition("__")
        sections.setdefault(section, {})[field] = value
    return dataclasses.replace(
        config,
        **{section: dataclasses.replace(getattr(config, section), **fields) for section, fields in sections.items()},
    )


def straight_run(folder):
    """A run of six updates without a stop, made in `folder`, and its configuration."""
    config = run_config(folder / "text")
    loop.train(config, folder / "run")
    return folder / "run", config


def watch_updates(monkeypatch, watch):
    """Calls `watch` with the batch of each update that the loop begins; batches are made ahead, in threads."""
    make_train_step = loop.make_train_step

    def make_watched(*given):
        step = make_train_step(*given)

        def watched(state, batch):
            watch(batch)
            return step(state, batch)

        return watched

    monkeypatch.setattr(loop, "make_train_step", make_watched)


def act_after_writing(monkeypatch, step, act):
    """Calls `act` each time that the line of this update is written down."""
    write = MetricsWriter.write

    def write_and_act(self, at, values):
        write(self, at, values)
        if at == step:
            act()

    monkeypatch.setattr(MetricsWriter, "write", write_and_act)


def saved(run):
    """Every checkpoint: digests of all arrays (parameters, optimizer, step), score and data position."""
    folder = run / "checkpoints"
    records = {step: read_record(folder / str(step)) for step in complete_steps(folder)}
    return {
        step: {name: value for name, value in {**record, **record["extra"]}.items() if name not in _UNLIKE}
        for step, record in records.items()
    }


def metrics(run, *names):
    """Lines of metrics.jsonl without the clock's numbers; with names, the lines that have these, as tuples."""
    lines = [
        {name: value for name, value in line.items() if name not in OF_THE_CLOCK}
        for line in read_metrics(run / "metrics.jsonl")
    ]
    return [tuple(line[name] for name in names) for line in lines if set(names) <= line.keys()] if names else lines


# Sizes of orbax's files go with the length of their paths.
_UNLIKE = OF_THE_CLOCK | {"extra", "files"}
