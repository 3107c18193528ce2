"""The ladder: what is done about an anomaly, rung by rung, from repeating steps to stopping for a person.

rung    the run …                                                 anomaly   long calm
------  --------------------------------------------------------  --------  ---------
WATCH   goes on; guards wait whether a loss comes back by itself  REPEAT    WATCH
REPEAT  went back, and makes the same steps again                 SKIP      WATCH
SKIP    went back, and leaves out the samples of the anomaly      SLOW      REPEAT
SLOW    the same, with a lower learning rate for a while          CLAMP     SKIP
CLAMP   the same, with tighter clipping, by z-score, and QK-clip   STOP      SLOW
STOP    ends: a person has to look                                STOP      STOP

An anomaly is what a guard asks to undo; a long calm is `guard.forget_rewind_steps` without one. Settings
may leave REPEAT out, and end the ladder at an earlier rung: the next one is then STOP. To go back takes a
checkpoint that is early enough, and one is kept (`GuardSection.reach_steps`); where there is none
nevertheless, the run stops. With `guard.trial_steps` each rung is on trial first (`trial`): what is discarded
is an anomaly, and the next rung begins from the same checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from bloomery.config.checkpoint import GuardSection
from bloomery.events.records import Json, StepReport, as_float, as_json
from bloomery.guard import trial as trials
from bloomery.guard.restraint import Restraint
from bloomery.guard.robust_window import WINDOW
from bloomery.guard.trial import Trial, trial_from_json
from bloomery.guard.verdict import Anomaly, Rewind, Rung, Stop, Watch

OTHER_BITS = "other bits"
"""The kind of the warning that a step, made again on the same data, gave another loss."""
_MARGIN, _MOST = 64, 4096
"""The number of steps remembered: those that a rewind may go back, at least so many beyond
`spike_rewind_steps`, and at most so many in all, for they are part of each checkpoint."""
_RUNGS = {"repeat": Rung.REPEAT, "skip": Rung.SKIP, "slow": Rung.SLOW, "clamp": Rung.CLAMP}


@dataclass(frozen=True, kw_only=True)
class StepMade:
    """A step that is remembered.

    cursor: the stream index after the step.
    alone: whether no other peer took part in it.
    """

    step: int
    cursor: int
    loss: float
    alone: bool = True


@dataclass(frozen=True, kw_only=True)
class LadderState:
    """The rung of a run on the ladder, and its newest steps.

    calm: the steps without an anomaly since the run came to this rung; after a rewind it is below 0 until as
        many were made as were undone, since the anomaly has not had its second chance before.
    steps: the newest steps, ascending.
    repeats: the steps that are to be made again, each of which must give the same loss bit for bit.
    same: how many steps have been made again with the same loss.
    trial: the remedy on trial.
    discarded: what the trials since the problem found, a sentence each.
    """

    rung: Rung = Rung.WATCH
    calm: int = 0
    steps: tuple[StepMade, ...] = ()
    repeats: tuple[StepMade, ...] = ()
    same: int = 0
    trial: Trial | None = None
    discarded: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Json]:
        """Return what `ladder_from_json` reads."""
        return {
            "rung": int(self.rung),
            "calm": self.calm,
            "steps": [_packed(made) for made in self.steps],
            "repeats": [_packed(made) for made in self.repeats],
            "same": self.same,
            "trial": None if self.trial is None else self.trial.to_json(),
            "discarded": list(self.discarded),
        }


def ladder_from_json(values: Any) -> LadderState:  # Any: written by `to_json`
    """Return the state that a checkpoint holds; the lowest rung without history where it holds none."""
    if not isinstance(values, dict):
        return LadderState()
    return LadderState(
        rung=Rung(values["rung"]),
        calm=int(values["calm"]),
        steps=tuple(_unpacked(made) for made in values["steps"]),
        repeats=tuple(_unpacked(made) for made in values["repeats"]),
        same=int(values["same"]),
        trial=trial_from_json(values.get("trial")),  # absent before there were trials
        discarded=tuple(map(str, values.get("discarded", ()))),
    )


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """The rules of the ladder as pure functions of its state. Equal on all ranks, as the reports are."""

    section: GuardSection

    def after_anomaly(self, rung: Rung) -> Rung:
        """Return the rung that follows an anomaly on `rung`."""
        following = Rung(min(rung + 1, Rung.STOP))
        if following is Rung.REPEAT and not self.section.repeat:
            following = Rung.SKIP
        return following if following <= _RUNGS[self.section.last_rung] else Rung.STOP

    def after_calm(self, rung: Rung) -> Rung:
        """Return the rung that follows a long calm on `rung`."""
        return rung if rung in (Rung.WATCH, Rung.STOP) else Rung(rung - 1)

    def after_step(
        self, state: LadderState, report: StepReport, *, is_calm: bool
    ) -> tuple[LadderState, tuple[Watch | Anomaly, ...]]:
        """Return the state with one more step, and what it showed.

        That is a warning if the step, made again, gave another loss, and how a trial ended.

        is_calm: whether no guard warned or found an anomaly, and the update was applied.
        """
        made = StepMade(step=report.step, cursor=report.cursor, loss=report.loss, alone=report.peers == 1)
        kept = state.steps
        if kept and kept[-1].step >= made.step:  # of a step that is made again, the newer counts
            kept = tuple(earlier for earlier in kept if earlier.step < made.step)
        state = replace(state, steps=(*kept, made)[-self._remembered_steps :])
        if is_calm and state.rung is not Rung.WATCH:
            state = replace(state, calm=state.calm + 1)
            if state.calm >= self.section.forget_rewind_steps:
                state = replace(state, rung=self.after_calm(state.rung), calm=0)
        state, other_bits = _compared(state, made) if state.repeats else (state, None)
        trial, end = trials.after_step(state.trial, report) if state.trial else (None, None)
        discarded = () if isinstance(end, Watch) else state.discarded
        shown = tuple(each for each in (other_bits, end) if each is not None)
        return replace(state, trial=trial, discarded=discarded), shown

    @property
    def _remembered_steps(self) -> int:
        section = self.section
        return max(section.spike_rewind_steps + _MARGIN, min(section.loss_reach_steps + 1, _MOST))

    def answer(self, state: LadderState, anomaly: Anomaly, report: StepReport) -> Rewind | Stop:
        """Return what is done about an anomaly, with the reason in a sentence."""
        if state.trial is not None:
            return self._after_trial(state, state.trial, anomaly, report)
        to_step = max(anomaly.first_bad - 1 - self.section.spike_rewind_steps, 0)
        before, history = _cursor_after(state.steps, to_step), earlier_rungs_words(state.rung, state.same)
        return self.answer_from(state.rung, anomaly, report, before=before, history=history)

    def _after_trial(
        self, state: LadderState, trial: Trial, anomaly: Anomaly, report: StepReport
    ) -> Rewind | Stop:
        """Return the next remedy, from the checkpoint that the discarded one began from."""
        before = _cursor_after(state.steps, trial.base_step)
        history = "" if trial.is_over else earlier_rungs_words(state.rung, state.same)
        asked = self.answer_from(state.rung, anomaly, report, before=before, history=history)
        numbers = {**trial.evidence(), **asked.numbers}
        if isinstance(asked, Stop):
            tried = " ".join((*state.discarded, _found(trial, anomaly)))
            return replace(asked, reason=f"{asked.reason}. Tried on forks: {tried}", numbers=numbers)
        return replace(asked, to_step=trial.base_step, latest_step=trial.base_step, numbers=numbers)

    def answer_from(
        self,
        rung: Rung,
        anomaly: Anomaly,
        report: StepReport,
        *,
        before: int,
        history: str = "",
        in_steps: bool = False,
    ) -> Rewind | Stop:
        """Return what is done about an anomaly on `rung`.

        before: the stream index after the step to go back to, from which samples may be left out.
        history: a sentence on what was tried before.
        in_steps: whether `before` and the report's cursor count steps, as of an old log without samples.
        """
        following = self.after_anomaly(rung)
        judged, numbers = anomaly.judged_step, {**anomaly.numbers, "rung": float(following)}
        if following is Rung.STOP:
            reason = f"{anomaly.reason}. {history}Nothing milder is left: a person has to look"
            return Stop(judged_step=judged, reason=reason, failed=True, numbers=numbers)
        skip = range(before, before)
        if following is not Rung.REPEAT:
            batch = report.global_batch * report.peers  # of a step of the whole run
            skip = range(before, report.cursor + self.section.spike_skip_steps * batch)
        return Rewind(
            judged_step=judged,
            to_step=max(anomaly.first_bad - 1 - self.section.spike_rewind_steps, 0),
            latest_step=anomaly.first_bad - 1,
            skip=skip,
            rung=following,
            reason=f"{anomaly.reason}. {history}{self._remedy(following, skip, in_steps=in_steps)}",
            numbers=numbers,
        )

    def restraint(
        self, rung: Rung, *, consumed: int, problem: int, samples_per_step: int
    ) -> Restraint | None:
        """Return the limits on learning rate and clipping after a rewind; None on a rung that sets none.

        They hold until `restrain_steps` beyond the problem, however far back the checkpoint is.

        consumed: the samples consumed at the restored position, from which on the limits hold.
        problem: the samples consumed where the problem was judged.
        """
        section = self.section
        if rung not in (Rung.SLOW, Rung.CLAMP):
            return None
        return Restraint(
            start=consumed,
            stop=max(consumed, problem) + section.restrain_steps * samples_per_step,
            rate=section.slow_rate,
            clip=section.clamp if rung is Rung.CLAMP else 1.0,
            z_score=section.clamp_z_score if rung is Rung.CLAMP else 0.0,
            qk_clip=section.clamp_qk if rung is Rung.CLAMP else 0.0,
        )

    def rewound(self, before: LadderState, restored: LadderState, rung: Rung) -> LadderState:
        """Return the state after a rewind.

        before: the state when the rewind was decided.
        restored: the state in the checkpoint.
        rung: the rung of the rewind; WATCH leaves the ladder where it was.
        """
        if rung is Rung.WATCH:
            return LadderState(
                rung=before.rung,
                calm=before.calm,
                steps=restored.steps,
                trial=restored.trial,
                discarded=before.discarded,
            )
        last = restored.steps[-1].step if restored.steps else 0
        repeats = tuple(made for made in before.steps if made.step > last and made.alone)
        undone = max(before.steps[-1].step - last, 0) if before.steps else 0
        state = LadderState(
            rung=max(rung, before.rung),
            calm=-undone,
            steps=restored.steps,
            repeats=repeats if rung is Rung.REPEAT else (),
        )
        return self._on_trial(state, before, base_step=last) if self.section.trial_steps else state

    def _on_trial(self, state: LadderState, before: LadderState, *, base_step: int) -> LadderState:
        """Return the state after a rewind with its rung on trial; before: that of before the rewind."""
        problem_step, discarded = before.steps[-1].step if before.steps else base_step, before.discarded
        if before.trial is not None:
            discarded = (*discarded, _found(before.trial, None))
            if before.trial.is_over:
                problem_step = before.trial.problem_step
        trial = trials.begin_trial(
            state.rung,
            base_step=base_step,
            problem_step=problem_step,
            steps=self.section.trial_steps,
            losses_before=[made.loss for made in state.steps[-WINDOW:]],
        )
        return replace(state, trial=trial, discarded=discarded)

    def _remedy(self, rung: Rung, skip: range, *, in_steps: bool) -> str:
        if rung is Rung.REPEAT:
            return "The run goes back and makes the same steps again"
        what = f"{len(skip):,} steps' samples from step" if in_steps else f"{len(skip):,} samples from"
        skipped = f"The run goes back and leaves out the {what} {skip.start:,} on"
        if rung is Rung.SKIP:
            return skipped
        section = self.section
        slower = f"{section.slow_rate:g} times the learning rate"
        limits = [slower]
        if rung is Rung.CLAMP:
            limits.append(f"{section.clamp:g} times the largest gradient norm")
            if section.clamp_z_score:
                limits.append(f"norms clipped from a z-score of {section.clamp_z_score:g} on")
            if section.clamp_qk:
                limits.append(f"attention logits clipped at {section.clamp_qk:g}")
        held = f"until {section.restrain_steps} steps beyond the problem"
        return f"{skipped}, with {', '.join(limits)} {held}"


def _found(trial: Trial, anomaly: Anomaly | None) -> str:
    """Return what a trial found that was discarded. anomaly: what ended it, where that is known."""
    if trial.is_over:
        loss = trial.evidence()["median"]
        return f"{trials.rung_words(trial.rung)}: the median loss was {loss:.4f} in the end."
    why = "the problem came again" if anomaly is None else anomaly.reason
    return f"{trials.rung_words(trial.rung)}: {why}."


def earlier_rungs_words(rung: Rung, same: int) -> str:
    """Return a sentence on what was tried before; "" where nothing was."""
    match rung:
        case Rung.REPEAT:
            bits = f", {same} of them with the same bits" if same else ""
            return f"It came again after the same steps were made again{bits}. "
        case Rung.SKIP:
            return "It came again after samples were left out. "
        case Rung.SLOW:
            return "It came again after samples were left out and the learning rate was lowered. "
        case Rung.CLAMP | Rung.STOP:
            return "It came again after samples were left out at a lower learning rate and tighter clipping. "
    return ""


def _compared(state: LadderState, made: StepMade) -> tuple[LadderState, Watch | None]:
    """Compare a step that was made again with what it was before: the same data has to give the same bits."""
    due = [repeat for repeat in state.repeats if repeat.step >= made.step]
    rest = tuple(repeat for repeat in due if repeat.step > made.step)
    if not due or due[0].step != made.step or due[0].cursor != made.cursor or not made.alone:
        return replace(state, repeats=rest), None
    was = due[0].loss
    if was == made.loss or (was != was and made.loss != made.loss):
        return replace(state, repeats=rest, same=state.same + 1), None
    reason = (
        f"step {made.step} was made again from the same state on the same samples, and its loss is "
        f"{made.loss!r} where it was {was!r}: the machine made a mistake then or now, or its kernels are not "
        "deterministic"
    )
    numbers = {"loss": made.loss, "before": was, "same_steps": float(state.same)}
    verdict = Watch(judged_step=made.step, kind=OTHER_BITS, reason=reason, numbers=numbers)
    return replace(state, repeats=()), verdict


def _cursor_after(steps: tuple[StepMade, ...], step: int) -> int:
    """Return where the data stood after `step`, or at the nearest later known step; 0 at the start."""
    if step == 0:
        return 0
    return next((made.cursor for made in steps if made.step >= step), 0)


def _packed(made: StepMade) -> Json:
    return [made.step, made.cursor, as_json(made.loss), made.alone]


def _unpacked(values: Any) -> StepMade:  # Any: written by `_packed`
    step, cursor, loss, alone = values
    return StepMade(step=int(step), cursor=int(cursor), loss=as_float(loss), alone=bool(alone))
