"""The training loop: prepare, go on from where the folder stands, update, validate, save, and score at the end."""

import collections
import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from transformer_jax.checkpointing.checkpoints import Checkpoints
from transformer_jax.config import Config, ModelConfig
from transformer_jax.data.batches import PlannedBatch, Shape, batches_from
from transformer_jax.errors import UserError
from transformer_jax.parallel.chips import peak_flops
from transformer_jax.parallel.compilation_cache import enable_compilation_cache
from transformer_jax.parallel.connecting import connect
from transformer_jax.parallel.mesh import AnyMesh, make_mesh, replicated, row_shares
from transformer_jax.parallel.processes import first_alone, is_first, require_alike, require_members
from transformer_jax.parallel.rules import placed_shapes, shardings
from transformer_jax.training.evaluating import validate
from transformer_jax.training.faults import Fault, write_fault
from transformer_jax.training.finishing import finish
from transformer_jax.training.interruption import Agreement, Interruption, only_process
from transformer_jax.training.metrics import MetricsWriter
from transformer_jax.training.opening import opening
from transformer_jax.training.placing import PlacedBatch, placed_ahead
from transformer_jax.training.preparation import Prepared, prepare, started_with
from transformer_jax.training.presence import only_trainer
from transformer_jax.training.profiling import Compilations, Profile, still_ahead
from transformer_jax.training.reporting import Reporter
from transformer_jax.training.run_home import RunHome
from transformer_jax.training.state import (
    all_finite,
    evaluated_params,
    from_checkpoint,
    init_params,
    init_state,
    make_optimizer,
    to_checkpoint,
)
from transformer_jax.training.step import make_loss_step, make_train_step
from transformer_jax.training.throughput import COMPILING, DATA, DEVICE, SAVING, Throughput, memory


def train(config: Config, workdir: str | os.PathLike[str], *, profile: range | None = None) -> None:
    """Trains the run in `workdir` to train.steps, from its newest sound checkpoint if it has one.

    Run again after any end, it goes on as if it had never stopped: same batches, same dropout, same parameters. A
    finished run prints its scores. Of several processes (`parallel.processes`) each calls this alike; the first speaks
    and writes, a trace of the updates in `profile` among the rest.

    Raises:
        UserError: a faulty configuration, text or folder, or a loss or gradient that is not finite.
        SystemExit: 130 or 143 after SIGINT or SIGTERM, when the checkpoint is safe.
    """
    home = RunHome.at(workdir)
    enable_compilation_cache()
    mesh = make_mesh(config.mesh)
    _require_divisible(config.model, mesh)
    require_members(mesh)
    require_alike(started_with(config))
    connect(mesh)
    with (
        only_process(home.local) if is_first() else contextlib.nullcontext(),
        contextlib.ExitStack() as after_the_log,
        Reporter() as report,
    ):
        report.console.quiet = not is_first()
        if is_first() and home.is_remote:
            with report.during("looking whether the run is trained elsewhere"):
                after_the_log.enter_context(only_trainer(home.kept, report.say))
        with report.during("preparing text"), first_alone("preparing text"):
            prepared = prepare(config, workdir, report.say)
        require_alike(prepared.common)
        home = prepared.home
        if is_first():
            report.attach(home.local)
            after_the_log.enter_context(home.brought_up_to_date())
        checkpoints = Checkpoints(
            home.checkpoints,
            keep=prepared.config.train.keep_checkpoints,
            keep_every=prepared.config.train.keep_every,
            warn=report.warn,
            scheduled=prepared.config.train.saves_at,
        )
        with contextlib.closing(checkpoints), jax.set_mesh(mesh):
            with report.during("making or restoring the parameters"):
                run = _Run(prepared, mesh, checkpoints, report)
            run.update_until_done(profile if is_first() else None)
        finish(prepared, mesh, run.facts(), report)


def _require_divisible(model: ModelConfig, mesh: AnyMesh) -> None:
    """Raises UserError where the mesh does not divide the model: before text is prepared, which may take hours."""
    # The vocabulary, whose size is not known yet, need not be divided.
    sized = dataclasses.replace(model, vocab_size=1)
    shardings(jax.eval_shape(lambda: init_params(sized, 0)), mesh)


class _Run:
    """A run between its first update in this process and its last."""

    def __init__(self, prepared: Prepared, mesh: Mesh, checkpoints: Checkpoints, report: Reporter) -> None:
        self.prepared, self.mesh, self.checkpoints, self.report = prepared, mesh, checkpoints, report
        self.config, self.home = prepared.config, prepared.home
        model, train = self.config.model, self.config.train
        optimizer = make_optimizer(self.config.optimizer, model.d_model, train.steps)
        self.train_step = make_train_step(self.config, optimizer, mesh)
        self.loss_step = make_loss_step(self.config, mesh)
        self.all_finite = jax.jit(all_finite, out_shardings=replicated(mesh))
        self.row_multiple = row_shares(mesh) * train.accumulate
        self.seconds = 0.0
        self.epoch = self.index = 0
        self.compiled: set[Shape] = set()
        # Nothing is made on one device that belongs on others; a restored run makes nothing at all.
        abstract = jax.eval_shape(lambda: init_state(model, optimizer, train.seed))
        laid = shardings(abstract, mesh, over_data=self.config.mesh.shard_weight_update)
        init = jax.jit(lambda: init_state(model, optimizer, train.seed), out_shardings=laid)
        restored = checkpoints.restore(to_checkpoint(placed_shapes(abstract, laid)))
        if restored is None:
            self.state = init()
            self.unvalidated = False
        else:
            self.state = from_checkpoint(restored.state)
            self._go_on(restored.extra)
            self.unvalidated = train.evaluates_at(restored.step) and restored.score is None
        self.step = int(self.state.step)
        require_alike({"newest sound checkpoint": str(self.step)})
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(self.state.params))
        for line in opening(prepared, self.state.params, mesh, self.row_multiple):
            report.say(line)

    def facts(self) -> dict[str, Any]:
        """What results.json says of the training."""
        return {"step": self.step, "parameters": self.parameters, "training_seconds": round(self.seconds, 1)}

    def _go_on(self, extra: Mapping[str, Any]) -> None:
        self.epoch, self.index, self.seconds = extra["epoch"], extra["index"], extra["seconds"]
        self.report.say(f"going on from update {int(self.state.step):,}")

    def update_until_done(self, profile: range | None) -> None:
        """Makes the updates that remain, those of `profile` recorded."""
        profile = still_ahead(profile, self.step, self.report.warn)
        if self.step >= self.config.train.steps and not self.unvalidated:
            return
        writer = MetricsWriter(self.home.local, self.step) if is_first() else None
        if writer is not None and writer.dropped is not None:
            self.report.say(f"           what came after it, up to update {writer.dropped:,} or later, is made again")
        self.report.say(f"training   to update {self.config.train.steps:,}; compiling the first")
        self.report.start(self.step, self.config.train.steps)
        planned = batches_from(self.prepared.plan, self.epoch, self.index)
        try:
            with (
                Interruption(self.report.say) as interruption,
                placed_ahead(planned, self.prepared.train, self.mesh, parts=self.config.train.accumulate) as batches,
                Profile(profile, self.home.local / "profile", self.report.say) as recorder,
                Compilations() as compilations,
            ):
                self._update(writer, interruption, batches, recorder, compilations)
                if self.step >= self.config.train.steps:
                    self.report.say(f"trained    {self.step:,} updates in {self.seconds:,.0f} s")
                with self.report.during(SAVING):
                    self.checkpoints.wait()
        finally:
            if writer is not None:
                writer.close()
            self.report.stop()

    def _update(
        self,
        writer: MetricsWriter | None,
        interruption: Interruption,
        batches: Iterator[PlacedBatch],
        recorder: Profile,
        compilations: Compilations,
    ) -> None:
        train, during = self.config.train, self.report.during
        clock = self._clock()
        running: collections.deque[tuple[int, PlannedBatch, Any, bool]] = collections.deque()
        agreement, stop = Agreement(self.mesh, interruption), False
        if self.unvalidated:
            score = self._validate(writer, agreement.reached)
            stop = score is None
            if not stop:
                self._save(score, clock, writer)
        while self.step < train.steps and not stop:
            with during(DATA):
                self.epoch, self.index, planned, arrays = next(batches)
            before = compilations.count
            phase = "starting an update" if planned.shape in self.compiled else COMPILING
            with during(phase), recorder.update(self.step + 1):
                self.state, metrics = self.train_step(self.state, arrays)
            self.step += 1
            running.append((self.step, planned, metrics, compilations.count > before))
            evaluate = train.evaluates_at(self.step)
            stop = agreement.reached()
            save = train.saves_at(self.step) or stop
            # One update stays in flight: the host looks at the one before while the device works.
            while len(running) > (0 if save or recorder.bounds(self.step) else 1):
                self._record(*running.popleft(), clock, writer, compilations.count)
            recorder.after(self.step)
            # A run that is to stop has no time for it: the next command validates first.
            score = self._validate(writer, agreement.reached) if evaluate and not stop else None
            if save:
                self._save(score, clock, writer)
                stop = stop or interruption.agreed()
        self.seconds += clock.total()

    def _clock(self) -> Throughput:
        peak = peak_flops(jax.devices()[0].device_kind)
        return Throughput(
            self.prepared.plan.lengths,
            self.config.model,
            self.report.seconds,
            peak=peak and peak * self.mesh.size,
            row_multiple=self.row_multiple,
        )

    def _record(
        self,
        step: int,
        planned: PlannedBatch,
        metrics: Any,
        compiled: bool,
        clock: Throughput,
        writer: MetricsWriter | None,
        compilations: int,
    ) -> None:
        """Waits for an update and looks at its numbers."""
        with self.report.during(DEVICE):
            values = {name: value.item() for name, value in jax.device_get(metrics).items()}
        if values["skipped_in_row"]:
            self._skipped(Fault.of(step, planned, values), planned, values["skipped_in_row"])
        if compiled:
            self._say_compiled(step, planned.shape, clock.total())
            clock.restart()
        else:
            clock.count(planned)
        values |= clock.rates()
        self.report.progress(step, self.config.train.steps, values)
        if step % self.config.train.log_every == 0 or step == self.config.train.steps:
            if writer is not None:
                writer.write(step, values | memory() | {"compilations": compilations})
            clock.restart()

    def _say_compiled(self, step: int, shape: Shape, seconds: float) -> None:
        filled = shape.filled_up(self.row_multiple)
        named = f"{filled.rows} x ({filled.source_width} + {filled.target_width})"
        if shape in self.compiled:
            self.report.warn(
                f"update {step:,}: the train step was compiled again for batches of {named}, which it had a program for"
            )
        else:
            self.report.say(f"compiled   {named}; update {step:,} done after {seconds:.1f} s")
        self.compiled.add(shape)

    def _skipped(self, fault: Fault, planned: PlannedBatch, in_row: int) -> None:
        """Says so, or ends the run; the state still has the parameters that the update failed with."""
        limit = self.config.train.skip_limit
        if in_row < limit:
            self.report.warn(f"update {fault.step:,} is skipped: {fault}")
            return
        dump = self.home.local / f"fault-{fault.step}"
        found = f"`transformer-jax diagnose {dump}` works through it again"
        try:
            write_fault(dump, fault, self.config, planned, self.prepared.train, self.state.params)
        except UserError as error:
            found = f"it is not kept for `transformer-jax diagnose`, as {error}"
        raise UserError(
            f"update {fault.step}, the last of {limit} skipped in a row (train.skip_limit): {fault}; "
            f"{found}; {self._mend()}"
        )

    def _mend(self) -> str:
        self.checkpoints.wait()
        kept = self.checkpoints.steps()
        return (
            f"{f'checkpoint {kept[-1]} is sound' if kept else 'nothing was saved before'}: "
            "lower optimizer.learning_rate (or its factor), or raise optimizer.warmup_steps, in another --workdir"
        )

    def _validate(self, writer: MetricsWriter | None, to_stop: Callable[[], bool]) -> float | None:
        """The dev BLEU; None where the run is to stop before it is known, which leaves it to the next command."""
        start = time.monotonic()
        params = evaluated_params(self.state)
        # With mesh.shard_weight_update a device holds a part of them, and all while this goes on.
        params = jax.device_put(params, shardings(params, self.mesh))
        found = validate(self.prepared, params, self.mesh, self.loss_step, self.report, to_stop)
        if found is None:
            return None
        if not math.isfinite(found.nll):
            raise UserError(f"update {self.step}: the loss of the dev text is {found.nll} after it; {self._mend()}")
        seconds = time.monotonic() - start
        if writer is not None:
            writer.write(self.step, {**found.as_metrics(), "validation_seconds": seconds})
        self.report.say(
            f"update {self.step:<6,} dev loss {found.nll:.3f}  perplexity {found.perplexity:.2f}  "
            f"BLEU {found.scores.bleu:.2f}  chrF2 {found.scores.chrf:.2f}  ({found.scores.sentences} sentences, beam "
            f"{self.config.search.beam_size}, {seconds:.1f} s)"
        )
        return found.scores.bleu

    def _save(self, score: float | None, clock: Throughput, writer: MetricsWriter | None) -> None:
        with self.report.during(DEVICE):
            finite = bool(self.all_finite((self.state.params, evaluated_params(self.state))))
        if not finite:
            raise UserError(f"update {self.step}: parameters are not finite after it; {self._mend()}")
        extra = {
            "epoch": self.epoch,
            "index": self.index,
            "seconds": self.seconds + clock.total(),
            **self.prepared.identity,
        }
        with self.report.during(SAVING):
            if writer is not None:
                writer.sync()
            self.checkpoints.save(
                self.step,
                to_checkpoint(self.state),
                extra,
                score=score,
                first=lambda: self.home.keep("metrics.jsonl", "log.txt"),
            )
