"""The trainer: what the training loop asks of a run, from the next step's parts to the last backup."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bloomery.checkpoint.format.deadlines import BACKUP_AFTER_ERROR_S
from bloomery.checkpoint.format.state import Json
from bloomery.checkpoint.remote.places import CombinedBackups
from bloomery.data.megatron_order import MegatronOrder
from bloomery.data.order import Order
from bloomery.data_loader.batches import Batches
from bloomery.diloco.outer import Outer
from bloomery.events.heartbeat import Heartbeat, RankActivity
from bloomery.events.journal import Journal
from bloomery.events.records import Facts, StepReport
from bloomery.guard.corruption import CORRUPTION
from bloomery.guard.judge import Guards, described
from bloomery.guard.trend import THROUGHPUT
from bloomery.guard.verdict import Rewind, Stop, Verdict
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.rank_zero_task import ReportProgress
from bloomery.plan.schedule import Phase
from bloomery.torch_private import compiled_graphs
from bloomery.train.checkpoint_store import Store
from bloomery.train.control import Control
from bloomery.train.data_stream import DataStream
from bloomery.train.held_out import HeldOutLoss
from bloomery.train.metrics import Metrics, SlowRanks, memory_in_use
from bloomery.train.observers import Observers
from bloomery.train.saver import Learner, RunSaver
from bloomery.train.settings import RunSettings
from bloomery.train.state import TrainingOutcome, TrainState
from bloomery.train.step import StepCheck, StepParts, follow_update

log = logging.getLogger(__name__)


class Trainer:
    """The parts of a run, and what the training loop asks of them. Methods are collective over the peer.

    learner: the model with its optimizer state.
    settings: the current recipe and the guards, which `control/set` may change between steps.
    saver: saves and restores the run.
    outer: averages with other peers; does nothing in a run of one peer.
    """

    def __init__(
        self,
        *,
        mesh: Mesh,
        learner: Learner,
        data_stream: DataStream,
        settings: RunSettings,
        store: Store,
        control: Control,
        metrics: Metrics,
        held_out: HeldOutLoss | None,
        journal: Journal,
        observers: Observers,
        make_outer: Callable[[Trainer], Outer],
        on_begin: Callable[[TrainState, str, int], None],
        heartbeat: Heartbeat,
        take_fallback: bool,
        check: StepCheck,
    ) -> None:
        """held_out: None where the run has no held-out text.

        make_outer: makes the outer for this trainer, which it may call from its first `admit` on.
        on_begin, take_fallback: see `RunSaver`.
        heartbeat: shows other processes what this rank does.
        check: computes the gradients of each step, and may refuse its update.
        """
        self.mesh, self.store, self.control, self.metrics = mesh, store, control, metrics
        self.settings = settings
        self.learner, self._data_stream, self._held_out = learner, data_stream, held_out
        self._journal, self._observers, self._heartbeat = journal, observers, heartbeat
        self._check = check
        self._slow_ranks = SlowRanks(mesh)
        self._steps: dict[Phase, StepParts] = {}
        self._steps_recipe = settings.recipe
        self._compiled_graphs = compiled_graphs()
        self.outer = make_outer(self)
        self.saver = RunSaver(
            learner=learner,
            outer=self.outer,
            settings=settings,
            data_stream=data_stream,
            store=store,
            control=control,
            journal=journal,
            mesh=mesh,
            on_begin=on_begin,
            enter=heartbeat.enter,
            take_fallback=take_fallback,
        )

    @property
    def guards(self) -> Guards:
        """Return the guards that judge each report."""
        return self.settings.guards

    @property
    def order(self) -> Order | MegatronOrder:
        """The order of samples."""
        return self._data_stream.order

    @property
    def batches(self) -> Batches:
        """The reader of micro-batches."""
        return self._data_stream.batches

    def phase(self, state: TrainState) -> Phase:
        """Return the batch and precision at a position, with 'auto' resolved for this device."""
        return self.settings.phase(state)

    def step_parts(self, phase: Phase) -> StepParts:
        """Return what a step of `phase` works with, after setting the model to compute as the phase says.

        Each phase is journalled when it begins, and again after a change of settings.
        """
        self._heartbeat.enter(RankActivity.WAITING_FOR_SAMPLES)  # which the loop asks for next
        recipe, learner = self.settings.recipe, self.learner
        learner.model.set_phase(precision=phase.precision, recompute=phase.recompute)
        if self._steps_recipe is not recipe:
            self._steps.clear()
            self._steps_recipe = recipe
        if phase not in self._steps:
            self._heartbeat.expect_compilation()
            self._steps[phase] = StepParts(
                phase=phase,
                model=learner.model,
                optimizers=learner.optimizers,
                loss_scale=learner.loss_scale if phase.precision == "fp16" else None,
                clip=self.settings.clip,
                clamps=self.settings.clamps,
                sizes_every=lambda: self.settings.recipe.guard.growth_steps,
                sequence_length=recipe.data.sequence_length,
                learning_rate=self.settings.learning_rate,
                average_gradients=self.outer.average_gradients,
                wait_staged=self.store.wait_staged,
                enter=self._heartbeat.enter,
                check=self._check,
            )
            last_report = self.saver.last_report
            self._record("phase", last_report.step if last_report else 0, **_described(phase))
        return self._steps[phase]

    def follow(self, state: TrainState) -> TrainState:
        """Make the update with gradients that other peers brought, and return the state after it."""
        return follow_update(self.step_parts(self.phase(state)), state)

    def prefetch(self, state: TrainState) -> None:
        """Read the batches of the next steps ahead, as far as they can be known."""
        self._data_stream.prefetch(state, phase_of=self.phase, share=self.outer.share)

    def enter(self, activity: RankActivity) -> None:
        """Record in the heartbeat the activity that this rank begins."""
        self._heartbeat.enter(activity)

    def record(self, report: StepReport, verdict: Verdict) -> None:
        """Journal the step, the epochs and the saves that ended with it, and show it to the observers."""
        self._heartbeat.at(step=report.step, memory_bytes=memory_in_use(self.mesh.device))
        self._heartbeat.enter(RankActivity.BETWEEN_STEPS)
        self.saver.last_report = report
        fields = report.values()
        del fields["step"]
        spent = self._heartbeat.take_spent()
        self._record("step", report.step, **fields, spent=spent)
        self._slow_ranks.count(spent)
        self._record_compilations(report)
        self.saver.complete_receipt(report)
        for guard, finding in self.guards.findings:
            self._record("guard", report.step, guard=guard, **described(finding))
            if guard == THROUGHPUT:
                self._name_slow_ranks(report.step)
            if guard == CORRUPTION and isinstance(finding, Rewind | Stop):
                self.saver.suspect(finding, step=report.step)
        end = self.settings.stream_end(cursor=report.cursor, consumed=report.consumed_samples)
        # The last batch may go beyond the end, and an epoch may end in what it takes there.
        for epoch in self._data_stream.epochs_ended(report.cursor, below=max(end, report.cursor)):
            self._record("epoch_end", report.step, **epoch)
        self.saver.journal_ended_saves()
        self.control.settle(report.facts, stops=isinstance(verdict, Stop))
        self._observers.tell(report, verdict)

    def _record_compilations(self, report: StepReport) -> None:
        """Journal how many graphs torch.compile made for a step, which took longer by that."""
        before, self._compiled_graphs = self._compiled_graphs, compiled_graphs()
        if made := self._compiled_graphs - before:
            self._record("compiled", report.step, graphs=made, seconds=report.seconds)

    def _name_slow_ranks(self, step: int) -> None:
        """Journal and log which ranks the others wait for. All ranks have equal findings, so all call it."""
        compared = self._slow_ranks.compare()
        self._record("slow_ranks", step, **compared)
        ranks: Any = compared["slow"]  # Any: JSON
        if self.mesh.is_first and ranks:
            slow = ", ".join(f"rank {rank} on {host} {seconds} s" for rank, host, seconds in ranks)
            log.warning("steps are slower: each takes %s; other ranks take %s s", slow, compared["usual_s"])

    def apply_requests(self, state: TrainState, facts: Facts) -> TrainState:
        """Apply what control files asked for: samples to skip, and changes of free settings."""
        return self.settings.apply_requests(state, facts, skip=self.outer.skipping)

    def conclude(self, state: TrainState) -> TrainingOutcome:
        """Take the last checkpoint where it is not there yet, and return how the run ended."""
        outcome = state.stopped or TrainingOutcome(
            reason="the samples are done", step=state.step, finished=True
        )
        held_out = self._held_out
        if outcome.finished and self.saver.last_report and held_out and held_out.is_owed(state):
            self._heartbeat.enter(RankActivity.EVALUATING)
            self._record("evaluation", state.step, **held_out.run(state))
        self._heartbeat.enter(RankActivity.ENDING)
        saves_at_end = self.settings.recipe.checkpoint.at_end and not outcome.failed
        self.saver.finish(state, save=saves_at_end)
        self._record(
            "end",
            state.step,
            reason=outcome.reason,
            finished=outcome.finished,
            failed=outcome.failed,
            spent=self._heartbeat.take_spent(),
        )
        return outcome

    def _record(self, event: str, step: int, **fields: object) -> None:
        self._journal.write(event, incarnation=self.store.incarnation, step=step, **fields)


def _described(phase: Phase) -> dict[str, Json]:
    return {
        "global_batch": phase.global_batch,
        "micro_batch": phase.micro_batch,
        "precision": phase.precision,
        "recompute": phase.recompute,
    }


_TELL_EVERY_S = 30.0
_POLL_S = 0.1


@contextmanager
def backed_up_at_the_end(
    backup: CombinedBackups | None,
    mesh: Mesh,
    *,
    interruptions: Callable[[], int],
    say: Callable[[str], None],
    on_progress: ReportProgress = lambda: None,
) -> Iterator[None]:
    """Wait at the end of a run until its backup is finished. Collective over the peer when the run ends well.

    backup: None on ranks that have none.
    interruptions: returns how often the process was interrupted so far.
    say: prints what is left to copy.
    on_progress: called on the first rank while it copies.

    Every rank stays until the first has copied what is left, or until it is interrupted once more. After an
    error nobody waits for more than a moment: the launcher ends what is left, and the next start continues
    the copying.
    """
    try:
        yield
    except BaseException:
        if backup is not None:
            backup.close(wait_s=BACKUP_AFTER_ERROR_S)
        raise

    def finish(tick: ReportProgress) -> None:
        assert backup is not None, "the first rank has the backup"

        def report_progress() -> None:
            tick()
            on_progress()

        _finish(backup, report_progress, interruptions=interruptions, say=say)

    mesh.run_on_rank_zero(finish, doing="backing up the last checkpoints")


def _finish(
    backup: CombinedBackups,
    tick: ReportProgress,
    *,
    interruptions: Callable[[], int],
    say: Callable[[str], None],
) -> None:
    closing = threading.Thread(target=backup.close, name="end of the backup", daemon=True)
    so_far, begun, told_at = interruptions(), time.monotonic(), float("-inf")
    closing.start()
    while closing.is_alive():
        closing.join(_POLL_S)
        tick()
        left = [checkpoint.name for checkpoint in backup.due()] if closing.is_alive() else []
        if left and time.monotonic() - told_at > _TELL_EVERY_S:
            told_at = time.monotonic()
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            say(
                f"backing up {left[0]}{more} before the end, {told_at - begun:.0f} s so far; "
                "Ctrl-C leaves it to the next start"
            )
        if interruptions() > so_far:
            backup.close(wait_s=0.0)
            return
