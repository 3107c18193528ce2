"""Applies the guards to an old log, quickly, and returns what they would have done."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bloomery.config.checkpoint import GuardSection
from bloomery.guard.basic_guards import LossScaleCollapse, NotFinite
from bloomery.guard.corruption import SilentCorruption
from bloomery.guard.creep import HeldOutRise, InnerGrowth, MemoryCreep
from bloomery.guard.judge import Guard, watching_guards
from bloomery.guard.ladder import Ladder, earlier_rungs_words
from bloomery.guard.log_lines import Numbers
from bloomery.guard.logs import Columns
from bloomery.guard.parity import REMEMBERED, ResumeParity
from bloomery.guard.robust_window import BLOCK, calm_blocks
from bloomery.guard.spike import FLOOR, SpikeGuard
from bloomery.guard.trend import GradientNormRise, Plateau, ThroughputDrop
from bloomery.guard.verdict import Anomaly, CarryOn, Rewind, Rung, Save, Stop, Verdict, Watch

_MANY_BLOCKS = 64
_MANY_LINES = 200_000
"""The number of lines from which on the guards judge in parallel processes."""

ReplayedVerdict = Watch | Rewind | Stop


@dataclass(frozen=True, kw_only=True)
class ReplayFinding:
    """The verdict that one guard would have given at one line of a log.

    again: the verdict if the anomaly came again after `verdict`; None where `verdict` undoes nothing.
    in_steps: whether the log has no samples, so that what is skipped is counted in steps.
    """

    guard: str
    line: int
    step: int
    verdict: ReplayedVerdict
    again: Rewind | Stop | None = None
    in_steps: bool = False


def replay_columns(columns: Columns, section: GuardSection) -> list[ReplayFinding]:
    """Return the verdicts that the guards would have given on a log, in its order.

    The guards judge independently, and nothing is undone, so each sees the whole log. The verdicts equal
    those of `judge` line by line, which a test compares: blocks of calm lines are only judged faster.
    """
    guards = watching_guards(section)
    if len(columns) < _MANY_LINES or (os.cpu_count() or 1) < 2:
        by_guard = [_replayed(guard, columns) for guard in guards]
    else:
        # Forked, so that the columns are shared and not copied; no thread runs yet.
        context = multiprocessing.get_context("fork")
        _shared.append(columns)
        with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
            by_guard = list(pool.map(_replayed_of_shared, guards))
        _shared.clear()
    ordered = sorted(
        (judgement for each in by_guard for judgement in each), key=lambda judgement: judgement[1]
    )
    ladder = Ladder(section=section)
    return [_finding(name, line, verdict, columns, ladder) for name, line, verdict in ordered]


_Judgement = tuple[str, int, ReplayedVerdict | Anomaly]


def _finding(
    name: str, line: int, verdict: ReplayedVerdict | Anomaly, columns: Columns, ladder: Ladder
) -> ReplayFinding:
    """Return a finding, with what the ladder would have done: its first rung, and then its next."""
    step = int(columns.step[line])
    if not isinstance(verdict, Anomaly):
        return ReplayFinding(guard=name, line=line, step=step, verdict=verdict)
    report, to_step = columns.report(line), verdict.first_bad - 1 - ladder.section.spike_rewind_steps
    earlier = max(line - 10_000, 0)
    known = np.flatnonzero(columns.step[earlier : line + 1] >= max(to_step, 0))
    before = int(np.nan_to_num(columns.cursor[earlier + known[0]])) if to_step > 0 and len(known) else 0
    in_steps = bool(np.isnan(columns.cursor[line])) or not report.global_batch
    if in_steps:
        report, before = replace(report, cursor=step, global_batch=1), max(to_step, 0)
    first = ladder.answer_from(Rung.WATCH, verdict, report, before=before, in_steps=in_steps)
    again = None
    if isinstance(first, Rewind):
        history = earlier_rungs_words(first.rung, 0)
        again = ladder.answer_from(
            first.rung, verdict, report, before=before, history=history, in_steps=in_steps
        )
    return ReplayFinding(guard=name, line=line, step=step, verdict=first, again=again, in_steps=in_steps)


_shared: list[Columns] = []


def _replayed_of_shared(guard: Guard) -> list[_Judgement]:
    return _replayed(guard, _shared[0])


def _replayed(guard: Guard, columns: Columns) -> list[_Judgement]:
    verdicts: Iterator[tuple[int, Verdict | Anomaly]]
    match guard:
        case SpikeGuard():
            verdicts = _spikes(guard, columns)
        case GradientNormRise():
            norms = np.log(np.where(columns.gradient_norm > 0, columns.gradient_norm, np.nan))
            verdicts = _levels(guard, columns, norms)
        case ThroughputDrop():
            verdicts = _levels(guard, columns, columns.shared_seconds)
        case NotFinite():
            verdicts = _at(guard, columns, _around(_not_finite(columns)))
        case LossScaleCollapse():
            verdicts = _at(guard, columns, _scale_changes(columns, interval_steps=5 * guard.STEPS))
        case ResumeParity():
            verdicts = _resumes(guard, columns)
        case Plateau():
            verdicts = _doublings(guard, columns)
        case HeldOutRise() | MemoryCreep() | InnerGrowth() | SilentCorruption():
            verdicts = iter(())  # what they judge is not among the columns
        case _:
            verdicts = _at(guard, columns, range(len(columns)))
    return [
        (guard.name, line, verdict) for line, verdict in verdicts if not isinstance(verdict, CarryOn | Save)
    ]


def _at(guard: Guard, columns: Columns, lines: Sequence[int]) -> Iterator[tuple[int, Verdict | Anomaly]]:
    """Judge some lines; the others must change nothing that the guard remembers."""
    history = guard.fresh()
    for line in lines:
        history, verdict = guard.judge(history, columns.report(line))
        yield line, verdict


def _not_finite(columns: Columns) -> Any:  # Any: an array of truth values
    return ~np.isfinite(columns.loss) | (columns.refused > 0)


def _around(bad: Any) -> list[int]:
    """Return the bad lines, and the line after each run of them."""
    wanted = bad.copy()
    wanted[1:] |= bad[:-1]
    lines: list[int] = np.flatnonzero(wanted).tolist()
    return lines


def _scale_changes(columns: Columns, *, interval_steps: int) -> list[int]:
    """Return the lines where the loss scale changed, those before them, and one in `interval_steps` steps."""
    scale = columns.loss_scale
    changed = np.flatnonzero(np.diff(scale) != 0) + 1
    changed = changed[~np.isnan(scale[changed])]
    regular = np.flatnonzero(np.diff(columns.step // interval_steps) != 0) + 1
    return sorted({0, *changed.tolist(), *(changed - 1).tolist(), *regular.tolist()} if len(scale) else ())


def _resumes(guard: ResumeParity, columns: Columns) -> Iterator[tuple[int, Verdict | Anomaly]]:
    """Judge the lines after each resume against those before the step that it went on from."""
    for start in np.flatnonzero(columns.resumed > 0).tolist():
        history, first = guard.fresh(), columns.step[start]
        before = [line for line in range(max(start - 4000, 0), start) if columns.step[line] < first][
            -REMEMBERED:
        ]
        for line in before:
            history, _ = guard.judge(history, columns.report(line))
        history = guard.resumed(history)
        for line in range(start, min(start + REMEMBERED, len(columns))):
            history, verdict = guard.judge(history, columns.report(line))
            yield line, verdict


def _doublings(guard: Plateau, columns: Columns) -> Iterator[tuple[int, Verdict | Anomaly]]:
    """Add the lines of each doubling of the steps at once; only the first line of a doubling is judged."""
    history = guard.fresh()
    good = np.isfinite(columns.loss) & ~(columns.refused > 0)
    bits = np.frexp(columns.step)[1]
    breaks = np.flatnonzero((np.diff(columns.step) <= 0) | (np.diff(bits) != 0)) + 1
    for start, end in zip([0, *breaks.tolist()], [*breaks.tolist(), len(columns)], strict=True):
        lines = np.flatnonzero(good[start:end]) + start
        if not len(lines):
            continue
        history, verdict = guard.judge(history, columns.report(int(lines[0])))
        yield int(lines[0]), verdict
        rest = lines[1:]
        if len(rest):
            history = guard.absorbed(
                history,
                losses=columns.loss[rest],
                peak_rate=float(np.nanmax(columns.learning_rate[rest], initial=0.0)),
                step=int(columns.step[rest[-1]]),
            )


class _Breaks:
    """The lines that do not continue the one before: other distance, batch, peers, a resume, a bad value."""

    def __init__(self, columns: Columns, values: Numbers) -> None:
        distance = np.diff(columns.step, prepend=columns.step[0] - 1)
        is_new = (np.diff(distance, prepend=distance[0]) != 0) | (distance <= 0) | (columns.resumed > 0)
        for same in (columns.global_batch, columns.peers):
            known = np.nan_to_num(same, nan=-1.0)
            is_new |= np.diff(known, prepend=known[0]) != 0
        is_new |= ~np.isfinite(values) | (columns.refused > 0)
        is_new[1:] |= is_new[:-1]  # the line after an odd one is judged by itself, too
        self._lines = [*np.flatnonzero(is_new).tolist(), len(columns)]
        self._next = 0

    def whole_blocks(self, line: int, first: int, *, most: int) -> int:
        """Return how many lines from `line` on have no break and are a first block and whole blocks after it.

        first: lines of the first block. most: blocks. Must be called with ascending lines; 0: not one block.
        """
        while self._lines[self._next] < line:
            self._next += 1
        room = self._lines[self._next] - line - first
        return first + BLOCK * min(room // BLOCK, most - 1) if room >= 0 else 0


def _levels(
    guard: GradientNormRise | ThroughputDrop, columns: Columns, values: Numbers
) -> Iterator[tuple[int, Verdict | Anomaly]]:
    """Judge blocks of calm values at once, and all others line by line."""
    past, line, most, breaks = guard.begin(), 0, 1, _Breaks(columns, values)
    while line < len(columns):
        count = breaks.whole_blocks(line, BLOCK - past.level.entered, most=most) if past.level.is_full else 0
        calm = calm_blocks(
            past.level, values[line : line + count], floor=guard.FLOOR, least=guard.LEAST_SPREAD
        )
        levels = list(calm) if count else []
        most = _blocks_at_once(most, len(levels))
        if levels:
            line += BLOCK * len(levels) - past.level.entered
            past = replace(past, level=levels[-1], step=int(columns.step[line - 1]))
            continue
        past, verdict = guard.judged(past, columns.report(line))
        yield line, verdict
        line += 1


def _blocks_at_once(asked: int, calm: int) -> int:
    """Return how many blocks to describe at once: twice as many as were calm, since those beyond are lost."""
    return min(2 * calm, _MANY_BLOCKS) if calm >= asked else calm + 1


def _spikes(guard: SpikeGuard, columns: Columns) -> Iterator[tuple[int, Verdict | Anomaly]]:
    past, line, most, breaks = guard.begin(), 0, 1, _Breaks(columns, columns.loss)
    rates, batches = np.nan_to_num(columns.learning_rate), np.nan_to_num(columns.global_batch)
    while line < len(columns):
        count = breaks.whole_blocks(line, BLOCK - past.level.entered, most=most) if past.level.is_full else 0
        calm = 0
        for level in calm_blocks(past.level, columns.loss[line : line + count], floor=FLOOR) if count else ():
            end = line + BLOCK - past.level.entered
            if not guard.is_plain(past, step=int(columns.step[line]), rate=float(rates[line:end].max())):
                break
            last = end - 1
            past, verdict = guard.after_block(
                past, level, step=int(columns.step[last]), rate=float(rates[last]), batch=int(batches[last])
            )
            yield last, verdict
            line, calm = end, calm + 1
            if past.level is not level:
                break
        most = _blocks_at_once(most, calm)
        if not calm:
            past, verdict = guard.judged(past, columns.report(line))
            yield line, verdict
            line += 1
