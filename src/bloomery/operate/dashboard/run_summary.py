"""Summarises a run for the head of its page: health, progress, the last night's events, and advice."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bloomery.config.load import load_recipe
from bloomery.config.recipe import Recipe
from bloomery.errors import BloomeryError
from bloomery.events.heartbeat import RankActivity, has_died_here, interval_of, read_beat
from bloomery.events.switches import switch_places
from bloomery.operate.dashboard.run_reader import RunReader
from bloomery.operate.dashboard.step_columns import HELD_OUT
from bloomery.operate.ledger.figures import duration
from bloomery.operate.run_state import RunStatus, RunVerdict, judge_state, observe_run
from bloomery.operate.schedulers.interface import QueuedJob
from bloomery.operate.standstill import StandstillLimits
from bloomery.operate.submission import jobs_of_run, was_submitted
from bloomery.plan.schedule import steps_at_end, steps_left, total_samples

NIGHT_S = 12 * 3600.0
_MEASURED_STEPS = 50
_LIMITS = StandstillLimits(silence_s=15.0)
_JOBS_EVERY_S = 60.0
_MOST_RANKS_READ = 64
_SILENT_BEATS = 3


class RunSummary(msgspec.Struct, kw_only=True):
    """The head of a run's page. Times are seconds since 1970, `_s` are seconds, None is unknown.

    health: "good", "attention" or "bad". state: a RunStatus. why: what shows it.
    done: the share of the samples that are used. step, steps: the last step and the run's last one.
    fork_of: the run that this one was forked from, and where; "" for a run that began by itself.
    night: what happened in the last hours, in a sentence. advice: what a person may do, one sentence each.
    """

    name: str
    path: str
    health: str
    state: str
    why: str
    problems: list[str]
    step: int | None = None
    steps: int | None = None
    done: float | None = None
    left_s: float | None = None
    ends: float | None = None
    step_s: float | None = None
    tokens: float | None = None
    loss: float | None = None
    held_out: float | None = None
    saved_step: int | None = None
    saved: float | None = None
    written: float | None = None
    ranks: int | None = None
    device: str = ""
    fork_of: str = ""
    night: str = ""
    advice: list[str] = []
    version: int = 0
    rows: int = 0
    names: list[str] = []


class RunSummarizer:
    """Makes the summary of a run. It keeps the recipe and asks the scheduler once a minute at most."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self._recipe: Recipe | None = None
        self._recipe_of: tuple[int, int] | None = None
        self._recipe_problem = ""
        self._jobs: Sequence[QueuedJob] = ()
        self._asked = -_JOBS_EVERY_S
        self._scheduler_problem = ""

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of the run as it could be read last; None where it never could."""
        path = self._reader.rundir.recipe
        try:
            facts = path.stat()
        except OSError:
            return self._recipe
        if self._recipe_of != (facts.st_mtime_ns, facts.st_size):
            self._recipe_of = (facts.st_mtime_ns, facts.st_size)
            try:
                self._recipe, self._recipe_problem = load_recipe(str(path)).recipe, ""
            except BloomeryError as refused:
                self._recipe_problem = f"the recipe cannot be read: {refused.message.splitlines()[0]}"
        return self._recipe

    def summary(self, *, now: float | None = None) -> RunSummary:
        """Return the head of the page as it stands now."""
        now = time.time() if now is None else now
        reader, recipe = self._reader, self.recipe
        problems = reader.problems()
        verdict = self._verdict(recipe)
        silent = silent_ranks(reader, now=now) if verdict.state == RunStatus.RUNNING else []
        with reader.lock:
            shown = RunSummary(
                name=_name(reader, recipe),
                path=str(reader.rundir.path),
                health="good",
                state=str(verdict.state),
                why=verdict.why,
                problems=[*problems, *filter(None, (self._recipe_problem, self._scheduler_problem))],
                version=reader.version,
                rows=len(reader.columns),
                names=reader.columns.names,
                fork_of=reader.fork_of,
                night=night_words(reader, now=now),
            )
            _add_progress(shown, reader, recipe, is_running=verdict.state == RunStatus.RUNNING, now=now)
        shown.advice = _advice(shown, verdict, reader, silent)
        shown.health = _health(shown, verdict)
        return shown

    def _verdict(self, recipe: Recipe | None) -> RunVerdict:
        rundir = self._reader.rundir
        if not rundir.path.is_dir():
            return RunVerdict(state=RunStatus.GONE, why="its directory is not there")
        if recipe is not None and was_submitted(rundir):
            self._ask_scheduler(recipe)
        elsewhere = switch_places(recipe.control.directory) if recipe else []
        last = None if self._reader.is_behind else self._reader.news.last
        verdict = self._judged(elsewhere, last)
        may_have_ended = verdict.state.is_bad or verdict.state == RunStatus.STOPPED
        if may_have_ended and last is not None:  # since its journal was read
            verdict = self._judged(elsewhere, None)
        return verdict

    def _judged(self, switches: Sequence[Path], last: Mapping[str, Any] | None) -> RunVerdict:
        seen = observe_run(
            self._reader.rundir, self._jobs, switches=switches, silent=self._scheduler_problem, last=last
        )
        return judge_state(seen, limits=_LIMITS)

    def _ask_scheduler(self, recipe: Recipe) -> None:
        if time.monotonic() - self._asked < _JOBS_EVERY_S:
            return
        self._jobs, self._scheduler_problem = jobs_of_run(self._reader.rundir, recipe)
        self._asked = time.monotonic()  # only now: one that is silent answers late


def _name(reader: RunReader, recipe: Recipe | None) -> str:
    """Return the name of the run directory, with run.name in brackets where that differs."""
    if recipe is None or recipe.run.name == reader.name:
        return reader.name
    return f"{reader.name} ({recipe.run.name})"


def silent_ranks(reader: RunReader, *, now: float) -> list[int]:
    """Return which of the first 64 ranks wrote no heartbeat for three intervals, or died on this machine.

    now: the present time, in seconds since 1970.
    """
    first = read_beat(reader.rundir.heartbeat())
    if first is None:
        return []
    allowed_s = _SILENT_BEATS * interval_of(first.world)
    silent = []
    for rank in range(min(first.world, _MOST_RANKS_READ)):
        beat = read_beat(reader.rundir.heartbeat(rank=rank))
        if beat is None or beat.activity == RankActivity.ENDED:
            continue
        if now - beat.time > allowed_s or has_died_here(beat, now=now):
            silent.append(rank)
    return silent


def night_words(reader: RunReader, *, now: float) -> str:
    """Return what happened in the last twelve hours as a sentence."""
    recent = [event for event in reader.news.events if event.time > now - NIGHT_S]
    counts = Counter(event.kind for event in recent if event.level != "info")
    restarts = sum(event.kind == "start" and "after" not in event.text for event in recent)
    columns = reader.columns
    times, steps_lost, steps_kept = columns.axes["time"].values, 0, 0
    for part in columns.discarded:
        steps_lost += int(np.count_nonzero(times[part.begin : part.end] > now - NIGHT_S))
    for part in columns.kept:
        steps_kept += int(np.count_nonzero(times[part.begin : part.end] > now - NIGHT_S))
    parts = [f"{steps_kept:,} steps"] if steps_kept else []
    parts += [f"{restarts} starts" if restarts > 1 else "1 start"] if restarts else []
    parts += [f"{number} × {kind}" for kind, number in counts.most_common(6)]
    parts += [f"{steps_lost:,} steps discarded"] if steps_lost else []
    return f"In the last 12 hours: {', '.join(parts)}." if parts else "In the last 12 hours nothing happened."


def _add_progress(
    shown: RunSummary, reader: RunReader, recipe: Recipe | None, *, is_running: bool, now: float
) -> None:
    columns, news = reader.columns, reader.news
    start: dict[str, Any] = dict(news.start)
    shown.ranks = start["ranks"] if isinstance(start.get("ranks"), int) else None
    shown.device = str(start.get("device", ""))[:40]
    if news.saves:
        newest = next(reversed(news.saves.values()))
        shown.saved_step, shown.saved = newest.get("step"), newest.get("time")
    if not columns.kept:
        return
    shown.step = int(columns.last("step") or 0)
    shown.tokens, shown.loss = columns.last("tokens"), _finite(columns.last("loss"))
    shown.written = columns.last("time")
    if HELD_OUT in columns.sparse:
        _, losses = columns.sparse_numbers(HELD_OUT, "step")
        shown.held_out = _finite(float(losses[-1])) if len(losses) else None
    if "seconds" in columns.figures:
        seconds = columns.numbers("seconds", columns.kept[-1:])[-_MEASURED_STEPS:]
        shown.step_s = _finite(float(np.median(seconds)))
    if recipe is None:
        return
    length, consumed = recipe.data.sequence_length, int(columns.last("samples") or 0)
    peers = max(1, int(_finite(columns.last("peers")) or 1))
    left = steps_left(recipe.train, sequence_length=length, consumed=consumed, peers=peers)
    shown.steps = steps_at_end(
        recipe.train, sequence_length=length, step=shown.step, consumed=consumed, peers=peers
    )
    shown.done = min(1.0, consumed / total_samples(recipe.train, sequence_length=length))
    if shown.step_s is not None:
        shown.left_s = left * shown.step_s
        shown.ends = now + shown.left_s if is_running else None


def _advice(shown: RunSummary, verdict: RunVerdict, reader: RunReader, silent: Sequence[int]) -> list[str]:
    advice = []
    if verdict.state.is_bad and verdict.remedy:
        advice.append(f"It is {verdict.state}: {verdict.remedy}")
    if silent and not verdict.state.is_bad:
        ranks = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent[:8]))}"
        advice.append(f"Look at {ranks}: no heartbeat for some seconds, or the process is gone.")
    if reader.news.failed_save:
        advice.append(f"Free space or inodes: {reader.news.failed_save}")
    if reader.news.is_refusing:
        advice.append("The newest updates were refused: read the guards' events below.")
    if shown.step is not None and shown.loss is None:
        advice.append("The newest loss is not finite: the guards go back, or `bloomery rewind` does.")
    if verdict.state == RunStatus.STOPPED and verdict.remedy:
        advice.append(f"It is stopped: {verdict.remedy}")
    if shown.problems and not reader.is_behind:
        advice.append("Read what is wrong with its files, above.")
    return [line[:400] for line in advice] or ["Nothing: no person is needed."]


def _health(shown: RunSummary, verdict: RunVerdict) -> str:
    if verdict.state.is_bad or (shown.step is not None and shown.loss is None):
        return "bad"
    is_quiet = shown.advice[0].startswith("Nothing")
    return "good" if is_quiet and not shown.problems else "attention"


def _finite(value: float | None) -> float | None:
    return value if value is not None and np.isfinite(value) else None


def left_words(shown: RunSummary) -> str:
    """Return the time that is left in words; "" where it is unknown."""
    return f"{duration(shown.left_s)} left" if shown.left_s is not None else ""
