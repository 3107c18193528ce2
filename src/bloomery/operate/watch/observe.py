"""Observes one run repeatedly, reading only what its journal gained since the last time."""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from bloomery.checkpoint.format.manifest import parse_name
from bloomery.config.checkpoint import BackupSection
from bloomery.config.load import load_recipe
from bloomery.config.recipe import Recipe
from bloomery.errors import BloomeryError
from bloomery.events.run_directory import RunDirectory
from bloomery.events.shared_memory import shared_memory_space
from bloomery.events.switches import switch_places
from bloomery.operate.node_shm import NodeShm, shm_of_nodes
from bloomery.operate.run_state import RunObservation, RunStatus, RunVerdict, judge_state, observe_run
from bloomery.operate.schedulers.interface import QueuedJob
from bloomery.operate.standstill import StandstillLimits, peers_awaited_s
from bloomery.operate.submission import jobs_of_run, kept_submission
from bloomery.operate.watch.conditions import WatchedQuota, WatchedRun
from bloomery.operate.watch.disk import DiskSample, directory_bytes, forecast_full, sample_disk, thinned
from bloomery.operate.watch.quota import sample_quotas

_T = TypeVar("_T")

log = logging.getLogger(__name__)

_FIRST_BYTES = 1 << 20
_MOST_BYTES = 8 << 20
_JOBS_EVERY_S = 45.0
_QUOTAS_EVERY_S = 60.0
_QUOTA_KEPT_S = 3600.0
"""The seconds for which the last known quota is used while no command reports one, as if a server is slow."""
_LIMITS = StandstillLimits(silence_s=15.0)
_WANTS_JOBS = (RunStatus.RUNNING, RunStatus.STARTING, RunStatus.PENDING)
"""States in which a queue that keeps itself full should be full; after a stop it empties itself."""


@dataclass
class JournalTail:
    """Reads what a growing journal has gained since the last call.

    offset: the next byte to read; -1 before the first call, which reads the last mebibyte.
    """

    path: Path
    offset: int = -1

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the new events of whole lines. A journal that was replaced by a shorter one is read anew."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                if self.offset < 0 or self.offset > size or size - self.offset > _MOST_BYTES:
                    self.offset = max(0, size - _FIRST_BYTES)
                file.seek(self.offset)
                content = file.read(size - self.offset)
        except OSError:
            return
        whole = content.rfind(b"\n") + 1
        self.offset += whole
        for line in content[:whole].splitlines():
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict) and "event" in event:
                yield event


@dataclass
class RunObserver:
    """Looks at one run. What it must remember between processes is in its fields.

    since: when the present state began, in seconds since 1970.
    unheard_since: when the scheduler first did not answer; 0.0 where it does.
    short_since: when fewer jobs than wanted were first in the queue; 0.0 where there are enough.
    quotas: what was left of each quota, by its owner.
    saves, guards, failed_save: the last checkpoints and findings of guards, and why the last save failed. The
        end of a journal that a new process reads has hundreds of steps, perhaps without any of these.
    """

    rundir: RunDirectory
    state: str = ""
    since: float = 0.0
    unheard_since: float = 0.0
    short_since: float = 0.0
    disks: list[DiskSample] = field(default_factory=list)
    quotas: dict[str, list[DiskSample]] = field(default_factory=dict)
    saves: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=20))
    guards: deque[tuple[float, str, str]] = field(default_factory=lambda: deque(maxlen=50))
    failed_save: str = ""

    def __post_init__(self) -> None:
        self._journal = JournalTail(self.rundir.journal())
        self._step_s: deque[float] = deque(maxlen=20)
        self._usual_step_s: deque[float] = deque(maxlen=200)
        self._recipe: Recipe | None = None
        self._recipe_time = -1.0
        self._jobs: Sequence[QueuedJob] = ()
        self._jobs_time = self._quotas_time = 0.0
        self._unheard = ""

    def observe(self, *, now: float, silent_s: float = 0.0) -> WatchedRun:
        """Return what the run shows. now: seconds since 1970. silent_s: for how long no watcher checked."""
        for event in self._journal.read():
            self._take(event)
        recipe = self._current_recipe()
        switches = switch_places(recipe.control.directory) if recipe else []
        jobs = self._current_jobs(recipe, now)
        seen = observe_run(self.rundir, jobs, switches=switches, silent=self._unheard)
        verdict, shm = judge_state(seen, limits=_LIMITS), shm_of_nodes(seen)
        # A scheduler that is silent for a while changes nothing: what was known before remains.
        if verdict.state != self.state and not (verdict.state == RunStatus.UNKNOWN and self.state):
            self.state, self.since = str(verdict.state), _began(verdict, seen, now)
        self._sample(now)
        newest = self.saves[-1][1] if self.saves else ""
        living, wanted = self._queue_depth(recipe, verdict, now)
        return WatchedRun(
            path=self.rundir.as_word(),
            verdict=verdict,
            now=now,
            since=self.since,
            disk=self.disks[-1] if self.disks else None,
            forecast=forecast_full(self.disks),
            quotas=[
                WatchedQuota(owner=owner, left=samples[-1], forecast=forecast_full(samples))
                for owner, samples in self.quotas.items()
            ],
            save_bytes=directory_bytes(self.rundir.checkpoints / newest) if newest else 0,
            shm_used=_used_share_here(shm),
            shm=shm,
            saves=[time for time, _ in self.saves],
            failed_save=self.failed_save,
            guards=tuple(self.guards),
            step_s=tuple(self._step_s) if len(self._usual_step_s) >= 20 else (),
            usual_step_s=tuple(self._usual_step_s),
            unsaved_copy_s=self._unsaved_copy_s(recipe, now),
            silent_s=silent_s,
            awaited_s=peers_awaited_s(seen.ranks, now=seen.now),
            peers_command=_peers_command(recipe),
            unheard=self._unheard,
            unheard_s=now - self.unheard_since if self._unheard else 0.0,
            jobs=living,
            wanted_jobs=wanted,
            short_s=now - self.short_since if self.short_since else 0.0,
        )

    def set_back(self, by_s: float) -> None:
        """Move the times that are remembered with a clock that was set back by so many seconds."""
        self.since -= by_s
        self.saves = deque(((time - by_s, name) for time, name in self.saves), self.saves.maxlen)
        guards = ((time - by_s, guard, words) for time, guard, words in self.guards)
        self.guards = deque(guards, self.guards.maxlen)
        self.unheard_since -= by_s if self.unheard_since else 0.0
        self.short_since -= by_s if self.short_since else 0.0

    def forget_queue(self) -> None:
        """Forget since when the scheduler did not answer, and since when the queue was short."""
        self.unheard_since = self.short_since = 0.0

    def _queue_depth(self, recipe: Recipe | None, verdict: RunVerdict, now: float) -> tuple[int, int]:
        """Return the jobs that run or wait, and those that are wanted; note since when there are fewer."""
        wanted = recipe.submit.keep_queued if recipe is not None else 0
        living = sum(job.tasks for job in self._jobs if not job.state.is_over)
        is_short = living < wanted and verdict.state in _WANTS_JOBS and not self._unheard
        self.short_since = (self.short_since or now) if is_short else 0.0
        return living, wanted

    def _take(self, event: dict[str, Any]) -> None:
        name, time = event["event"], event.get("time")
        if not isinstance(time, int | float):
            return
        if name == "step":
            if len(self._step_s) == self._step_s.maxlen:
                self._usual_step_s.append(self._step_s[0])
            seconds = event.get("seconds")
            self._step_s.append(float(seconds) if isinstance(seconds, int | float) else 0.0)
        elif name in ("start", "phase"):  # other steps are to be expected from here on
            self._step_s.clear()
            self._usual_step_s.clear()
        elif name == "checkpoint":
            _add(self.saves, (float(time), str(event.get("path", ""))))
            self.failed_save = ""
        elif name == "checkpoint_failed":
            self.failed_save = f"no checkpoint at step {event.get('step')}: {event.get('why', '')}"
        elif name == "guard" and event.get("action") != "carryon":
            words = f"step {event.get('step')}: {event.get('action')}: {event.get('reason', '')}"
            _add(self.guards, (float(time), str(event.get("guard", "")), words))

    def _sample(self, now: float) -> None:
        try:
            self.disks = thinned(self.disks, sample_disk(self.rundir.path, now=now))
        except OSError as refused:
            log.warning("%s: %s", self.rundir.path, refused.strerror)
        if abs(now - self._quotas_time) >= _QUOTAS_EVERY_S:
            self._quotas_time = now
            left = sample_quotas(self.rundir.path, now=now)
            kept = {
                owner: samples
                for owner, samples in self.quotas.items()
                if samples and now - samples[-1].time < _QUOTA_KEPT_S
            }
            self.quotas = kept | {
                owner: thinned(self.quotas.get(owner, []), sample) for owner, sample in left.items()
            }

    def _current_recipe(self) -> Recipe | None:
        try:
            written = self.rundir.recipe.stat().st_mtime
        except OSError:
            written = 0.0
        if written != self._recipe_time:
            self._recipe_time = written
            try:
                at_disk = (
                    load_recipe(str(self.rundir.recipe)) if written else kept_submission(self.rundir).load()
                )
                self._recipe = at_disk.recipe
            except BloomeryError:
                self._recipe = None  # a run of another version: its journal speaks for it
        return self._recipe

    def _current_jobs(self, recipe: Recipe | None, now: float) -> Sequence[QueuedJob]:
        if recipe is not None and abs(now - self._jobs_time) >= _JOBS_EVERY_S:
            self._jobs, self._unheard = jobs_of_run(self.rundir, recipe)
            if self._unheard:
                log.warning("%s", self._unheard)
                self.unheard_since = self.unheard_since or now
            else:
                self._jobs_time, self.unheard_since = now, 0.0
        return self._jobs

    def _unsaved_copy_s(self, recipe: Recipe | None, now: float) -> float:
        """Return for how long the newest checkpoint that a place is to have has had no copy there."""
        if recipe is None:
            return 0.0
        places = {"": recipe.backup, ".second": recipe.second_backup}
        return max(self._uncopied_s(section, f"{place}.json", now) for place, section in places.items())

    def _uncopied_s(self, section: BackupSection, record: str, now: float) -> float:
        saves = [save for save in self.saves if not section.every_steps or _is_multiple(save[1], section)]
        if not section.url or not saves:
            return 0.0
        for age, (time, name) in enumerate(reversed(saves)):
            if (self.rundir.backups / f"{name}{record}").exists():
                return 0.0 if age == 0 else now - saves[-age][0]
            oldest = time
        return now - oldest


def _is_multiple(name: str, section: BackupSection) -> bool:
    base = parse_name(name)
    return base is not None and base[0] % section.every_steps == 0


def _began(verdict: RunVerdict, seen: RunObservation, now: float) -> float:
    """Return when a state began that was not there at the last look: now, or when a job began to wait."""
    job = verdict.job
    if job is None or not job.state.is_queued or not job.submitted:
        return now
    # What follows another job was submitted long before that one ended.
    lived = [rank.written_s for rank in seen.ranks.values() if rank.written_s <= now]
    return min(now, max([job.submitted, *lived]))


def _peers_command(recipe: Recipe | None) -> str:
    """Return the command that shows the peers of a run; "" for a run of one peer."""
    if recipe is None or not recipe.elastic.inner_steps:
        return ""
    place = f" --endpoints {recipe.elastic.coordinator}" if recipe.elastic.coordinator else ""
    return f"bloomery coordinate --status {recipe.run.name}{place}"


def _add(known: deque[_T], one: _T) -> None:
    """Add one to what is known, unless a process before this one has read it, too."""
    if one not in known:
        known.append(one)


def _used_share_here(nodes: Sequence[NodeShm]) -> float | None:
    """Return the used share of this machine's /dev/shm; None where its ranks tell of it, or there is none."""
    free_bytes, total_bytes = shared_memory_space()
    if not total_bytes or any(node.host == os.uname().nodename for node in nodes):
        return None
    return 1.0 - free_bytes / total_bytes
