"""Observers of a run, and the profiler of steps. They see frozen reports; one that raises is dropped."""

from __future__ import annotations

import gzip
import json
import logging
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from bloomery import durable
from bloomery.config.checkpoint import LogSection
from bloomery.errors import BloomeryError
from bloomery.events.records import StepReport
from bloomery.events.run_directory import RunDirectory
from bloomery.guard.verdict import Verdict
from bloomery.train.console import (
    JsonLines,
    LastStep,
    LogLines,
    NotebookBar,
    ProgressBar,
    Say,
    notebook_display,
)
from bloomery.train.settings import StartOptions
from bloomery.train.time_by_part import table_of_parts, time_by_part
from bloomery.train.trackers import TrackedRun, scalars_of, trackers

log = logging.getLogger(__name__)

_ROWS = 40
_SORTED_BY = {"cuda": "self_cuda_time_total", "cpu": "self_cpu_time_total"}


class StepProfiler:
    """Records the steps `first` to `last` and writes a Chrome trace, and tables of parts and of operators.

    Steps are numbered as in the journal, from 1. A start at a later step, and a rewind, skip what is over;
    steps that are made again are recorded again. While it records, steps are slower.
    """

    def __init__(
        self, directory: Path, *, first: int, last: int, completed: int, device: torch.device, say: Say
    ) -> None:
        """directory: where the files go. completed: the steps that were made before this start."""
        self._directory, self._first, self._last = directory, first, last
        self._device, self._say = device, say
        self._profile: profile | None = None
        self._begin_after(completed)

    def tell(self, report: StepReport, verdict: Verdict) -> None:
        """Begin before the first step to record, and write the files after the last one."""
        if self._profile is not None and report.step >= self._last:
            self._write(report.step)
        self._begin_after(report.step)

    def rewound(self, step: int) -> None:
        """Drop what was recorded of steps that are discarded."""
        self._stop()
        self._begin_after(step)

    def close(self) -> None:
        """Stop recording; a recording that did not reach its last step is dropped."""
        self._stop()

    def _begin_after(self, step: int) -> None:
        if self._profile is None and step + 1 == self._first:
            activities = [ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities, record_shapes=True)
            self._profile.start()

    def _stop(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _write(self, last: int) -> None:
        recording = self._profile
        assert recording is not None, "only a recording that was begun is written"
        self._stop()
        durable.make_directory(self._directory)
        stem = self._directory / f"steps-{self._first}-{last}"
        trace = stem.with_suffix(".trace.json.gz")
        recording.export_chrome_trace(str(trace))
        steps = self._last - self._first + 1
        parts = table_of_parts(time_by_part(json.loads(gzip.decompress(trace.read_bytes()))), steps=steps)
        table = recording.key_averages().table(sort_by=_SORTED_BY[self._device.type], row_limit=_ROWS)
        durable.write_whole(stem.with_suffix(".txt"), f"{parts}\n{table}")
        self._say(
            f"steps {self._first} to {last} were profiled: {stem}.trace.json.gz is for chrome://tracing or "
            f"ui.perfetto.dev, {stem}.txt has tables of parts and operators"
        )


_WATCHED_STEPS, _WAITING_SHARE = 20, 0.1  # waiting for a tenth of the time deserves a warning


class Observer(Protocol):
    """Gets each report."""

    def tell(self, report: StepReport, verdict: Verdict) -> None:
        """Take in one step."""
        ...

    def rewound(self, step: int) -> None:
        """Take back what was shown of steps after `step`."""
        ...

    def close(self) -> None:
        """Release what the observer holds; nothing more will come."""
        ...


class Observers:
    """Keeps observers from disturbing the run: one that raises is dropped."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = list(observers)

    def join(self, newcomers: Sequence[Observer]) -> None:
        """Add observers."""
        self._observers.extend(newcomers)

    def tell(self, report: StepReport, verdict: Verdict) -> None:
        """Pass a report to every observer."""
        self._each(lambda observer: observer.tell(report, verdict))

    def rewound(self, step: int) -> None:
        """Pass a rewind to every observer."""
        self._each(lambda observer: observer.rewound(step))

    def close(self) -> None:
        """Close every observer."""
        self._each(lambda observer: observer.close())

    def _each(self, do: Callable[[Observer], None]) -> None:
        for observer in tuple(self._observers):
            try:
                do(observer)
            except BloomeryError as error:
                log.warning("%s no longer watches this run: %s", type(observer).__name__, error)
                self._observers.remove(observer)
            except Exception:
                # Whatever goes wrong in an observer must not reach the run.
                log.exception("%s failed and no longer watches this run", type(observer).__name__)
                self._observers.remove(observer)


class SlowDataWarning:
    """Warns when steps wait for their samples, because then the data pipeline, not the device, sets the
    pace.
    """

    def __init__(self, say: Say) -> None:
        self._say = say
        self._waits: deque[tuple[float, float]] = deque(maxlen=_WATCHED_STEPS)

    def tell(self, report: StepReport, verdict: Verdict) -> None:
        """Warn once for each stretch of steps that waited for too much of their time."""
        self._waits.append((report.data_wait_s, report.seconds))
        waited_s = sum(wait for wait, _ in self._waits)
        whole_s = waited_s + sum(seconds for _, seconds in self._waits)
        if len(self._waits) == _WATCHED_STEPS and waited_s > _WAITING_SHARE * whole_s:
            self._say(
                f"step {report.step} | the data pipeline is the bottleneck: the last {_WATCHED_STEPS} steps "
                f"waited {waited_s:.1f} of {whole_s:.1f} s for samples, {report.data_queue:.1f} batches "
                "ahead. Raise data.prefetch and data.read_threads, or put the data on a faster disk."
            )
            self._waits.clear()

    def rewound(self, step: int) -> None:
        """Start counting again."""
        self._waits.clear()

    def close(self) -> None:
        """Do nothing, since nothing is open."""


class TensorBoard:
    """Writes scalars for TensorBoard; points beyond a resumed step are purged from the curves."""

    def __init__(self, directory: Path, *, first_step: int) -> None:
        self._directory = directory
        self._open(first_step)

    def tell(self, report: StepReport, verdict: Verdict) -> None:
        """Write the step's scalars, by step; TensorBoard's wall-clock axis needs nothing from us."""
        for name, value in scalars_of(report).items():
            self._writer.add_scalar(name, value, report.step)

    def rewound(self, step: int) -> None:
        """Start a file that purges the points after `step`."""
        self._writer.close()
        self._open(step)

    def close(self) -> None:
        """Flush the file."""
        self._writer.close()

    def _open(self, step: int) -> None:
        # Imported here, because it takes half a second that runs without TensorBoard should not pay.
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(self._directory), purge_step=step + 1, flush_secs=20)


def build_observers(
    section: LogSection,
    options: StartOptions,
    *,
    first_step: int,
    total_steps: int,
    last_step: LastStep,
    rundir: RunDirectory,
    device: torch.device,
    tracked: TrackedRun,
) -> list[Observer]:
    """Return the observers that a run's settings and its start ask for.

    first_step: the steps that were made before. total_steps: the last step, as it is known at the start.
    last_step: tells the last step anew after each step.
    device: what this rank computes on.
    tracked: what trackers get about the run.
    """
    observers: list[Observer] = []
    if section.tensorboard:
        observers.append(TensorBoard(rundir.tensorboard, first_step=first_step))
    if section.profile_steps:
        first, last = section.profile_steps
        observers.append(
            StepProfiler(
                rundir.profiles,
                first=first,
                last=last,
                completed=first_step,
                device=device,
                say=options.say,
            )
        )
    observers += trackers(section.trackers, tracked)
    # Last, for a bar holds the terminal until it is closed, and what is made before it may be refused.
    console = _console(section, options, first_step=first_step, total_steps=total_steps, last_step=last_step)
    return [SlowDataWarning(options.say), console, *observers]


def _console(
    section: LogSection, options: StartOptions, *, first_step: int, total_steps: int, last_step: LastStep
) -> Observer:
    form = options.form or section.form
    if form == "json":
        return JsonLines(
            every_steps=section.every_steps, total_steps=total_steps, last_step=last_step, emit=options.emit
        )
    if form == "bar":
        display = notebook_display()
        if display is not None:
            return NotebookBar(total_steps=total_steps, last_step=last_step, display=display)
        return ProgressBar(total_steps=total_steps, first_step=first_step, last_step=last_step)
    return LogLines(
        every_steps=section.every_steps,
        total_steps=total_steps,
        last_step=last_step,
        say=options.say,
        started=options.started,
        full=form == "full",
        columns=options.columns,
    )
