"""The training loop: prepare, go on from where the folder stands, update, validate, save, and score at the end."""

import collections
import contextlib
import math
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from transformer_jax.checkpointing.checkpoints import Checkpoints
from transformer_jax.config import Config
from transformer_jax.data.batches import PlannedBatch, assemble, batches_from
from transformer_jax.errors import UserError
from transformer_jax.ops.masks import BOS
from transformer_jax.parallel.compilation_cache import enable_compilation_cache
from transformer_jax.parallel.mesh import make_mesh, replicated, rows_sharding
from transformer_jax.training.evaluating import validate
from transformer_jax.training.finishing import finish
from transformer_jax.training.interruption import Interruption, only_process
from transformer_jax.training.metrics import MetricsWriter
from transformer_jax.training.preparation import Prepared, prepare
from transformer_jax.training.reporting import Reporter
from transformer_jax.training.state import TrainState, all_finite, init_state, make_optimizer
from transformer_jax.training.step import make_loss_step, make_train_step
from transformer_jax.training.throughput import Throughput


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
    with Reporter() as report, only_process(folder):
        prepared = prepare(config, folder, mesh.size, report.say)
        report.attach(folder)
        checkpoints = Checkpoints(
            folder / "checkpoints",
            keep=prepared.config.train.keep_checkpoints,
            warn=report.warn,
            scheduled=prepared.config.train.saves_at,
        )
        with contextlib.closing(checkpoints), jax.set_mesh(mesh):
            run = _Run(prepared, folder, mesh, checkpoints, report)
            run.update_until_done()
        finish(prepared, folder, run.facts(), report)


class _Run:
    """A run between its first update in this process and its last."""

    def __init__(
        self, prepared: Prepared, folder: pathlib.Path, mesh: Mesh, checkpoints: Checkpoints, report: Reporter
    ) -> None:
        self.prepared, self.folder, self.checkpoints, self.report = prepared, folder, checkpoints, report
        self.config, self.mesh = prepared.config, mesh
        model, train = self.config.model, self.config.train
        optimizer = make_optimizer(self.config.optimizer, model.d_model, train.steps)
        self.train_step = make_train_step(self.config, optimizer, mesh)
        self.loss_step = make_loss_step(self.config, mesh)
        self.all_finite = jax.jit(all_finite)
        self.seconds = 0.0
        self.epoch = self.index = 0
        # Nothing is made on one device that belongs on others; a restored run makes nothing at all.
        init = jax.jit(lambda: init_state(model, optimizer, train.seed), out_shardings=replicated(mesh))
        restored = checkpoints.restore(jax.eval_shape(init)._asdict())
        if restored is None:
            self.state = init()
        else:
            self.state = TrainState(**restored.state)
            self._go_on(restored.extra)
        self.step = int(self.state.step)
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(self.state.params))
        self._describe()

    def facts(self) -> dict[str, Any]:
        """What results.json says of the training."""
        return {"step": self.step, "parameters": self.parameters, "training_seconds": round(self.seconds, 1)}

    def _go_on(self, extra: Mapping[str, Any]) -> None:
        self.epoch, self.index, self.seconds = extra["epoch"], extra["index"], extra["seconds"]
        self.report.say(f"going on from update {int(self.state.step):,}")
        before, now = extra["rows"], self._rows()
        if before != now:
            self.index = self.index * sum(before) // sum(now)
            self.report.warn(
                f"on {self.mesh.size} devices a batch has {now} rows, where it had {before}: the run goes on at much "
                f"the same place of epoch {self.epoch}, but not with the same batches"
            )

    def _rows(self) -> list[int]:
        return [shape.rows for shape in self.prepared.plan.shapes]

    def _describe(self) -> None:
        plan, report = self.prepared.plan, self.report
        dev_plan = self.prepared.dev_plan
        batches = plan.epoch(0)
        shapes = ", ".join(f"{s.rows} x ({s.source_width} + {s.target_width})" for s in plan.shapes)
        report.say(
            f"model      {self.parameters:,} parameters on {self.mesh.size} {jax.devices()[0].device_kind} device(s)"
        )
        report.say(
            f"text       {self.prepared.splits.train.name}: {len(plan.kept):,} pairs of {len(plan.lengths):,} "
            f"({plan.dropped:,} blank or longer than data.max_length)"
        )
        report.say(
            f"dev        {self.prepared.splits.dev.name}: loss over {len(dev_plan.kept):,} pairs of "
            f"{len(dev_plan.lengths):,}, the first "
            f"{min(self.config.train.evaluate_sentences, len(dev_plan.lengths)):,} translated"
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
        clock = Throughput(self.prepared.plan.lengths)
        running: collections.deque[tuple[int, PlannedBatch, Any]] = collections.deque()
        batches = batches_from(self.prepared.plan, self.epoch, self.index)
        rows = rows_sharding(self.mesh)
        while self.step < train.steps:
            self.epoch, self.index, planned = next(batches)
            batch = jax.device_put(assemble(planned, self.prepared.train, bos_id=BOS), rows)
            self.state, metrics = self.train_step(self.state, batch)
            self.step += 1
            running.append((self.step, planned, metrics))
            evaluate = train.evaluates_at(self.step)
            save = train.saves_at(self.step) or interruption.asked is not None
            # One update stays in flight: the host looks at the one before while the device works.
            while len(running) > (0 if save else 1):
                self._record(*running.popleft(), clock, writer)
            score = self._validate(writer) if evaluate else None
            if save:
                self._save(score, clock)
                if interruption.asked is not None:
                    break
            if evaluate:
                clock.restart()
        self.seconds += clock.total()

    def _record(self, step: int, planned: PlannedBatch, metrics: Any, clock: Throughput, writer: MetricsWriter) -> None:
        """Waits for an update and looks at its numbers."""
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        for name in ("loss", "gradient_norm"):
            if not math.isfinite(values[name]):
                self._stop_at(step, planned, name, values)
        if clock.count(planned):
            shape = planned.shape
            self.report.say(
                f"compiled   {shape.rows} x ({shape.source_width} + {shape.target_width}); "
                f"update {step:,} done after {clock.total():.1f} s"
            )
        values |= clock.rates()
        self.report.progress(step, self.config.train.steps, values)
        if step % self.config.train.log_every == 0 or step == self.config.train.steps:
            writer.write(step, values)
            clock.restart()

    def _stop_at(self, step: int, planned: PlannedBatch, name: str, values: Mapping[str, float]) -> None:
        lines = ", ".join(str(i + 1) for i in planned.examples[:5])
        raise UserError(
            f"update {step}: the {name.replace('_', ' ')} is {values[name]} at learning rate "
            f"{values['learning_rate']:.3g}, on pairs {lines} and {max(len(planned.examples) - 5, 0)} more of the "
            f"training text; {self._mend()}"
        )

    def _mend(self) -> str:
        self.checkpoints.wait()
        kept = self.checkpoints.steps()
        return (
            f"{f'checkpoint {kept[-1]} is sound' if kept else 'nothing was saved before'}: "
            "lower optimizer.learning_rate (or its factor), or raise optimizer.warmup_steps, in another --workdir"
        )

    def _validate(self, writer: MetricsWriter) -> float:
        start = time.monotonic()
        found = validate(self.prepared, self.state.params, self.loss_step, self.report.warn)
        if not math.isfinite(found.nll):
            raise UserError(f"update {self.step}: the loss of the dev text is {found.nll} after it; {self._mend()}")
        seconds = time.monotonic() - start
        writer.write(
            self.step,
            {
                "dev_nll": found.nll,
                "dev_perplexity": found.perplexity,
                "dev_bleu": found.scores.bleu,
                "dev_chrf": found.scores.chrf,
                "dev_sentences": found.scores.sentences,
                "dev_signature": found.scores.bleu_signature,
                "validation_seconds": seconds,
            },
        )
        self.report.say(
            f"update {self.step:<6,} dev loss {found.nll:.3f}  perplexity {found.perplexity:.2f}  "
            f"BLEU {found.scores.bleu:.2f}  chrF2 {found.scores.chrf:.2f}  ({found.scores.sentences} sentences, beam "
            f"{self.config.search.beam_size}, {seconds:.1f} s)"
        )
        return found.scores.bleu

    def _save(self, score: float | None, clock: Throughput) -> None:
        if not self.all_finite(self.state.params):
            raise UserError(f"update {self.step}: parameters are not finite after it; {self._mend()}")
        extra = {
            "epoch": self.epoch,
            "index": self.index,
            "rows": self._rows(),
            "seconds": self.seconds + clock.total(),
            **self.prepared.identity,
        }
        self.checkpoints.save(self.step, self.state._asdict(), extra, score=score)
