"""Profiles some steps of the first rank with torch's profiler, as an observer of the run."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from bloomery import durable
from bloomery.events.records import StepReport
from bloomery.guard.verdict import Verdict
from bloomery.train.console import Say

_ROWS = 40
_SORTED_BY = {"cuda": "self_cuda_time_total", "cpu": "self_cpu_time_total"}


class StepProfiler:
    """Records the steps `first` to `last` and writes a Chrome trace and a table of operators.

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
        recording.export_chrome_trace(str(stem.with_suffix(".trace.json.gz")))
        table = recording.key_averages().table(sort_by=_SORTED_BY[self._device.type], row_limit=_ROWS)
        durable.write_whole(stem.with_suffix(".txt"), table)
        self._say(
            f"steps {self._first} to {last} were profiled: {stem}.trace.json.gz is for chrome://tracing or "
            f"ui.perfetto.dev, {stem}.txt is the table of operators"
        )
