"""Which lines of a log a replay looks at: where a rewind would have gone, and around a resume."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from tests.guard.reports import noisy

from bloomery.config.checkpoint import GuardSection
from bloomery.guard import replay
from bloomery.guard.ladder import Ladder
from bloomery.guard.logs import Columns
from bloomery.guard.parity import ResumeParity
from bloomery.guard.replay import (
    _doublings,
    _finding,
    _levels,
    _replayed,
    _resumes,
    _spikes,
    replay_columns,
)
from bloomery.guard.spike import SpikeGuard
from bloomery.guard.trend import GradientNormRise, Plateau
from bloomery.guard.verdict import Anomaly, CarryOn, Rewind


def columns(count: int) -> Columns:
    """Steps of ten samples; the first line is of another run, which was far beyond."""
    values = {field.name: np.zeros(count) for field in fields(Columns)}
    steps = np.arange(count, dtype=np.float64)
    steps[0] = 1e6
    values |= {"step": steps, "cursor": 10 * steps, "global_batch": np.full(count, 10.0)}
    return Columns(**values)


@pytest.mark.parametrize("line", [10_001, 10_250])
@pytest.mark.parametrize("back", [20, 9000])
def test_a_rewind_goes_to_the_samples_of_its_own_run(line: int, back: int) -> None:
    section = GuardSection(spike_rewind_steps=back)
    anomaly = Anomaly(judged_step=line, first_bad=line - 1, reason="high")
    found = _finding("spike", line, anomaly, columns(line + 1), Ladder(section=section))
    step = line - 1 - 1 - back
    assert isinstance(found.verdict, Rewind) and found.verdict.to_step == step
    assert found.verdict.skip == range(10 * step, 10 * step), "a first rewind leaves nothing out"
    assert isinstance(found.again, Rewind) and found.again.skip.start == 10 * step
    assert found.again.skip.stop == 10 * line + section.spike_skip_steps * 10
    assert "It came again after the same steps were made again. " in found.again.reason


def test_a_resume_is_judged_with_the_last_lines_before_its_first_step_and_as_many_after() -> None:
    steps = np.array([*range(1, 201), *range(151, 251)], dtype=np.float64)
    resumed = np.where(np.arange(300) == 200, 1.0, 0.0)
    values = {field.name: np.zeros(300) for field in fields(Columns)} | {"step": steps, "resumed": resumed}
    judged: list[object] = []

    class Recorder(ResumeParity):
        def judge(self, history: Any, report: Any) -> Any:
            judged.append(report.step)
            return history, CarryOn(judged_step=report.step)

        def resumed(self, history: Any) -> Any:
            judged.append("resumed")
            return history

    told = [line for line, _ in _resumes(Recorder(), Columns(**values))]
    assert judged == [*range(101, 151), "resumed", *range(151, 201)]
    assert told == list(range(200, 250)), "lines before the resume are not judged again"


def test_doublings_that_are_added_at_once_are_those_of_line_by_line() -> None:
    steps = np.array([*range(1, 41), *range(33, 61)], dtype=np.float64)
    losses, rates, refused = 100.0 - steps, 0.5 / steps, np.zeros(len(steps))
    refused[[20, 50]], losses[[25, 55]], rates[60] = 1.0, np.nan, 4.0
    values = {field.name: np.zeros(len(steps)) for field in fields(Columns)}
    values |= {"step": steps, "loss": losses, "refused": refused, "learning_rate": rates}
    kept: list[Any] = []

    class Recorder(Plateau):
        def judge(self, history: Any, report: Any) -> Any:
            history, verdict = super().judge(history, report)
            kept.append(history)
            return history, verdict

        def absorbed(self, history: Any, **told: Any) -> Any:
            kept.append(super().absorbed(history, **told))
            return kept[-1]

    guard = Recorder()
    for lines, count, peak_rate in ((slice(None), 26, 4.0), (slice(35, 40), 5, 0.5 / 36)):
        rows = Columns(**{name: column[lines] for name, column in values.items()})
        list(_doublings(guard, rows))
        at_once, history = kept[-1], guard.fresh()
        for line in range(len(rows)):
            history, _ = guard.judge(history, rows.report(line))
        assert at_once == history and history["count"] == count and history["peak_rate"] == peak_rate


def test_blocks_of_calm_losses_leave_the_past_that_their_lines_leave() -> None:
    steps = np.arange(1, 1201, dtype=np.float64)
    rates = 1e-3 * np.where(steps < 700, 1.0, 0.4) * np.where(steps > 913, 3.0, 1.0) * 0.9998**steps
    values = {field.name: np.zeros(1200) for field in fields(Columns)} | {"peers": np.ones(1200)}
    values |= {"step": steps, "loss": np.array(noisy(1200)), "learning_rate": rates}
    values["global_batch"] = np.where(steps < 500, 8.0, 16.0)
    rows, pasts, seen = Columns(**values), dict[int, Any](), dict[int, Any]()

    class Recorder(SpikeGuard):
        def judged(self, past: Any, report: Any) -> Any:
            seen[report.step], verdict = super().judged(past, report)
            return seen[report.step], verdict

        def after_block(self, past: Any, level: Any, *, step: int, **told: Any) -> Any:
            seen[step], verdict = super().after_block(past, level, step=step, **told)
            return seen[step], verdict

    guard = SpikeGuard(patience=8)
    past = guard.begin()
    for line in range(len(rows)):
        past, _ = guard.judged(past, rows.report(line))
        pasts[line + 1] = past
    told = [line for line, _ in _spikes(Recorder(patience=8), rows)]
    assert len(told) < 700, "calm lines are judged in blocks"
    for step, found in seen.items():
        wanted = pasts[step]
        assert (found.rate, found.batch, found.blocks) == (wanted.rate, wanted.batch, wanted.blocks), step
        assert found.excused_until == wanted.excused_until


def test_a_machine_of_one_core_judges_many_lines_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_MANY_LINES", 10)
    monkeypatch.setattr(replay.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(replay, "ProcessPoolExecutor", None)
    assert replay_columns(columns(20), GuardSection()) == []


@pytest.mark.parametrize(("count", "further"), [(169, []), (170, [169])])
def test_each_line_is_judged_once_up_to_the_last_block_of_calm_lines_and_after_it(
    count: int, further: list[int]
) -> None:
    values = {field.name: np.ones(count) for field in fields(Columns)}
    values |= {"step": np.arange(1, count + 1), "resumed": np.zeros(count), "refused": np.zeros(count)}
    told = [line for line, _ in _levels(GradientNormRise(), Columns(**values), np.zeros(count))]
    assert told == [*range(105), *further]


def test_calm_norms_are_judged_in_blocks_by_their_logarithms_and_a_norm_of_0_has_none() -> None:
    values = {field.name: np.ones(170) for field in fields(Columns)}
    values |= {"step": np.arange(1, 171), "resumed": np.zeros(170), "refused": np.zeros(170)}
    values["gradient_norm"] = np.where(values["step"] < 170, 50.0, 0.0)
    judged: list[int] = []

    class Recorder(GradientNormRise):
        def judged(self, past: Any, report: Any) -> Any:
            judged.append(report.step)
            return super().judged(past, report)

    with np.errstate(divide="raise"):
        assert _replayed(Recorder(), Columns(**values)) == []
    assert judged == [*range(1, 106), 170]
