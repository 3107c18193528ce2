"""The training loop. It reads from top to bottom; features are parts, never branches here."""

from __future__ import annotations

from bloomery.config.load import LoadedRecipe
from bloomery.events.rundir import RunDir
from bloomery.guard.judge import judge
from bloomery.train.act import act
from bloomery.train.assemble import build_parts
from bloomery.train.options import StartOptions
from bloomery.train.state import Outcome
from bloomery.train.step import train_step


def train(loaded: LoadedRecipe, rundir: RunDir, options: StartOptions) -> Outcome:
    """Train until a guard says stop, or the samples are done. Collective over the whole peer."""
    with build_parts(loaded, rundir, options) as parts:
        state = parts.outer.admit(parts.restore())
        while not state.done:
            phase = parts.phase(state)
            span = parts.order.next_span(state.position, phase, parts.outer.share)
            result = train_step(parts.for_phase(phase), parts.data.batch(span, phase), state)
            state = state.after(span)
            parts.expect(state)
            state, report = parts.metrics.report(state, result, parts.control.local_facts())
            verdict = judge(parts.guards, report)
            parts.tell(report, verdict)  # before acting: what a checkpoint holds is already in the journal
            state = parts.honour(state, report.facts)
            state, due = parts.outer.average(state, verdict)
            state = parts.outer.admit(act(parts, state, due))
        return parts.conclude(state)
