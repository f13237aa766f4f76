"""The training loop: prepare, go on from where the folder stands, update, validate, save, and score at the end."""

import collections
import math
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from transformer_jax.checkpointing.checkpoints import Checkpoints
from transformer_jax.config import Config
from transformer_jax.data.batches import PlannedBatch, assemble, batches_from
from transformer_jax.errors import UserError
from transformer_jax.ops.masks import BOS
from transformer_jax.parallel.compilation_cache import enable_compilation_cache
from transformer_jax.parallel.mesh import make_mesh, replicated, rows_sharding
from transformer_jax.training.evaluating import validate
from transformer_jax.training.finishing import finish
from transformer_jax.training.interruption import Interruption
from transformer_jax.training.metrics import MetricsWriter
from transformer_jax.training.preparation import Prepared, prepare
from transformer_jax.training.reporting import Reporter
from transformer_jax.training.state import TrainState, init_state, make_optimizer
from transformer_jax.training.step import make_loss_step, make_train_step
from transformer_jax.translation.translator import Translator


def train(config: Config, workdir: str | os.PathLike[str]) -> None:
    """Trains the run in `workdir` to train.steps, from its newest sound checkpoint if it has one.

    Run again after any end, it goes on as if it had never stopped: same batches, same dropout, same parameters. A
    finished run prints its scores.

    Raises:
        UserError: a faulty configuration, text or folder, or a loss or gradient that is not finite.
        SystemExit: 130 or 143 after SIGINT or SIGTERM, when the checkpoint is safe.
    """
    folder = pathlib.Path(workdir)
    enable_compilation_cache()
    mesh = make_mesh(config.mesh)
    with Reporter() as report:
        prepared = prepare(config, folder, mesh.size, report.say)
        report.attach(folder)
        checkpoints = Checkpoints(folder / "checkpoints", keep=prepared.config.train.keep_checkpoints, warn=report.warn)
        with jax.set_mesh(mesh):
            run = _Run(prepared, folder, mesh, checkpoints, report)
            try:
                run.update_until_done()
            finally:
                checkpoints.close()
        finish(prepared, folder, run.seconds, report)


class _Run:
    """A run between its first update in this process and its last."""

    def __init__(
        self, prepared: Prepared, folder: pathlib.Path, mesh: Any, checkpoints: Checkpoints, report: Reporter
    ) -> None:
        self.prepared, self.folder, self.checkpoints, self.report = prepared, folder, checkpoints, report
        self.config = prepared.config
        self.mesh = mesh
        train = self.config.train
        optimizer = make_optimizer(self.config.optimizer, self.config.model.d_model, train.steps)
        self.train_step = make_train_step(self.config, optimizer, mesh)
        self.loss_step = make_loss_step(self.config, mesh)
        self.seconds = 0.0
        self.epoch = self.index = 0
        whole = replicated(mesh)
        shapes = jax.eval_shape(lambda: init_state(self.config.model, optimizer, train.seed))
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), shapes)
        restored = checkpoints.restore(abstract._asdict())
        if restored is None:
            init = jax.jit(lambda: init_state(self.config.model, optimizer, train.seed), out_shardings=whole)
            self.state = init()
        else:
            self._require_same_text(restored.extra)
            self.state = TrainState(**restored.state)
            self.epoch, self.index = restored.extra["epoch"], restored.extra["index"]
            self.seconds = restored.extra["seconds"]
            report.say(f"going on from update {int(self.state.step):,}")
        self.step = int(self.state.step)
        self._describe()

    def _identity(self) -> dict[str, str]:
        """Digests of what a checkpoint's parameters and data position belong to."""
        return {"tokenizer": self.prepared.tokenizer.digest, "text": self.prepared.train.folder.name}

    def _require_same_text(self, extra: Mapping[str, Any]) -> None:
        for name, digest in self._identity().items():
            if extra[name] != digest:
                raise UserError(
                    f"{self.folder}: its checkpoints were trained with another {name} than it holds now; "
                    f"choose another --workdir, or bring that {name} back"
                )

    def _describe(self) -> None:
        plan, report = self.prepared.plan, self.report
        count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.state.params))
        batches = plan.epoch(0)
        shapes = ", ".join(f"{s.rows} x ({s.source_width} + {s.target_width})" for s in plan.shapes)
        report.say(f"model      {count:,} parameters on {self.mesh.size} {jax.devices()[0].device_kind} device(s)")
        report.say(
            f"text       {self.prepared.splits.train.name}: {len(plan.kept):,} pairs of {len(plan.lengths):,} "
            f"({plan.dropped:,} blank or longer than data.max_length)"
        )
        report.say(
            f"batches    {len(batches):,} an epoch, fill {plan.fill(batches):.1%}, "
            f"{len(plan.shapes)} static shape(s), rows x (source + target): {shapes}"
        )

    def update_until_done(self) -> None:
        """Makes the updates that remain."""
        if self.step >= self.config.train.steps:
            return
        writer = MetricsWriter(self.folder, self.step)
        self.report.say(f"training   to update {self.config.train.steps:,}; compiling the first")
        self.report.start(self.step, self.config.train.steps)
        try:
            with Interruption(self.report.say) as interruption:
                self._update(writer, interruption)
                self.checkpoints.wait()
        finally:
            writer.close()
            self.report.stop()

    def _update(self, writer: MetricsWriter, interruption: Interruption) -> None:
        train = self.config.train
        # Three programs in all at the most: update, dev loss, and one of translation for each width.
        translator = Translator(self.config, self.state.params, self.prepared.tokenizer)
        clock = _Clock(self.prepared.plan.lengths)
        running: collections.deque[tuple[int, PlannedBatch, Any]] = collections.deque()
        batches = batches_from(self.prepared.plan, self.epoch, self.index)
        rows = rows_sharding(self.mesh)
        stopping = False
        while self.step < train.steps and not stopping:
            self.epoch, self.index, planned = next(batches)
            batch = jax.device_put(assemble(planned, self.prepared.train, bos_id=BOS), rows)
            self.state, metrics = self.train_step(self.state, batch)
            self.step += 1
            running.append((self.step, planned, metrics))
            evaluate = self.step % train.evaluate_every == 0 or self.step == train.steps
            stopping = interruption.asked is not None
            save = evaluate or stopping or self.step % train.checkpoint_every == 0
            # One update stays in flight: the host looks at the one before while the device works.
            while len(running) > (0 if save else 1):
                self._record(*running.popleft(), clock, writer)
            score = self._validate(translator, writer) if evaluate else None
            if save:
                self._save(score, clock)
            if evaluate:
                clock.restart()
        self.seconds += clock.total()

    def _record(self, step: int, planned: PlannedBatch, metrics: Any, clock: "_Clock", writer: MetricsWriter) -> None:
        """Waits for an update and looks at its numbers."""
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        for name in ("loss", "gradient_norm"):
            if not math.isfinite(values[name]):
                self._stop_at(step, planned, name, values)
        if clock.count(planned):
            self.report.say(f"first      update done after {clock.total():.1f} s")
        values |= clock.rates()
        self.report.progress(step, self.config.train.steps, values)
        if step % self.config.train.log_every == 0 or step == self.config.train.steps:
            writer.write(step, values)
            clock.restart()

    def _stop_at(self, step: int, planned: PlannedBatch, name: str, values: Mapping[str, float]) -> None:
        kept = self.checkpoints.steps()
        lines = ", ".join(str(i + 1) for i in planned.examples[:5])
        raise UserError(
            f"update {step}: the {name.replace('_', ' ')} is {values[name]} at learning rate "
            f"{values['learning_rate']:.3g}, on pairs {lines} and {max(len(planned.examples) - 5, 0)} more of the "
            f"training text; {f'checkpoint {kept[-1]} is sound' if kept else 'nothing was saved before'}: "
            "lower optimizer.learning_rate (or its factor), or raise optimizer.warmup_steps"
        )

    def _validate(self, translator: Translator, writer: MetricsWriter) -> float:
        start = time.monotonic()
        found = validate(self.prepared, self.state.params, self.loss_step, translator)
        writer.write(
            self.step,
            {
                "dev_nll": found.nll,
                "dev_perplexity": found.perplexity,
                "dev_bleu": found.scores.bleu,
                "dev_chrf": found.scores.chrf,
                "dev_signature": found.scores.bleu_signature,
                "validation_seconds": time.monotonic() - start,
            },
        )
        self.report.say(
            f"update {self.step:<6,} dev loss {found.nll:.3f}  perplexity {found.perplexity:.2f}  "
            f"BLEU {found.scores.bleu:.2f}  chrF2 {found.scores.chrf:.2f}  ({found.scores.sentences} sentences, beam "
            f"{self.config.search.beam_size}, {time.monotonic() - start:.1f} s)"
        )
        return found.scores.bleu

    def _save(self, score: float | None, clock: "_Clock") -> None:
        extra = {"epoch": self.epoch, "index": self.index, "seconds": self.seconds + clock.total(), **self._identity()}
        self.checkpoints.save(self.step, self.state._asdict(), extra, score=score)


class _Clock:
    """Counts pieces and seconds between lines of metrics."""

    def __init__(self, lengths: np.ndarray) -> None:
        self._lengths = lengths
        self._begin = time.monotonic()
        self._first = True
        self.restart()

    def restart(self) -> None:
        """A new interval begins."""
        self._start = time.monotonic()
        self._real = self._padded = 0

    def count(self, planned: PlannedBatch) -> bool:
        """An update is done; True for the first, which waited for a compiler and counts for no rate."""
        first, self._first = self._first, False
        if first:
            self.restart()
            self._padded = -1
        self._real += int(self._lengths[planned.examples].sum())
        self._padded = max(self._padded, 0) + planned.shape.rows * (
            planned.shape.source_width + planned.shape.target_width
        )
        return first

    def rates(self) -> dict[str, float]:
        """Source and target pieces a second, padding not counted, and their share of the batch."""
        seconds = max(time.monotonic() - self._start, 1e-9)
        return {"tokens_per_second": self._real / seconds, "fill": self._real / max(self._padded, 1)}

    def total(self) -> float:
        """Seconds since this process began to update."""
        return time.monotonic() - self._begin
