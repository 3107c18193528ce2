"""The training loop. It reads from top to bottom; features are parts of the trainer, never branches here."""

from __future__ import annotations

from bloomery.config.load import LoadedRecipe
from bloomery.events.run_directory import RunDirectory
from bloomery.guard.judge import judge
from bloomery.guard.verdict import CarryOn, Rewind, Save, Stop, Verdict, Watch
from bloomery.train.assemble import build_trainer
from bloomery.train.settings import StartOptions
from bloomery.train.state import TrainingOutcome, TrainState
from bloomery.train.step import train_step
from bloomery.train.trainer import Trainer


def train(loaded: LoadedRecipe, rundir: RunDirectory, options: StartOptions) -> TrainingOutcome:
    """Train until a guard stops the run, or until its samples are done. Collective over the whole peer."""
    with build_trainer(loaded, rundir, options) as trainer:
        state = trainer.outer.admit(trainer.saver.restore())
        while not state.done:
            phase = trainer.phase(state)
            span = trainer.order.next_span(state.position, phase.global_batch, trainer.outer.share)
            result = train_step(
                trainer.step_parts(phase), trainer.batches.batch(span, phase.micro_batch), state
            )
            state = state.after(span)
            trainer.prefetch(state)
            state, report = trainer.metrics.report(state, result, trainer.control.local_facts())
            verdict = judge(trainer.guards, report)
            # the journal comes before the action, so that it holds what a save contains
            trainer.record(report, verdict)
            state = trainer.apply_requests(state, report.facts)
            state, due = trainer.outer.average(state, verdict)
            state = trainer.outer.admit(apply_verdict(trainer, state, due))
        return trainer.conclude(state)


def apply_verdict(trainer: Trainer, state: TrainState, verdict: Verdict) -> TrainState:
    """Do what the guards decided: the only place where a verdict changes the run. Collective over the peer.

    verdict: equal on all ranks.
    """
    match verdict:
        case CarryOn() | Watch():
            return state
        case Save():
            trainer.saver.save(state)
            return state
        case Rewind():
            return trainer.saver.rewind(state, verdict)
        case Stop(reason=reason, failed=failed):
            return state.halting(reason, failed=failed)
    raise AssertionError(f"apply_verdict does not know this verdict: {verdict!r}")
