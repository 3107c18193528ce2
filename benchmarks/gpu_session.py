"""Runs the jobs of `gpu.py` while time is left, each in a process of its own, and judges what they find."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from contract import Measurement, measurement
from gpu_run import CommandFailed, NoTime

from bloomery.cli.train import ALLOCATOR

ROOT = Path(__file__).parents[1]
WORKERS = Path(__file__).with_name("gpu_workers.py")
Figures = dict[str, Any]

FAMILIES = ("llama", "bloom", "gpt")
TOLERANCES = {"bf16": "<= 0.01", "fp8": "<= 0.03"}
"""How far the last loss may be from that in fp32, relative to it."""

BARS: dict[str, str] = {
    **{
        f"{family} in {precision}: loss from fp32's": bar
        for family in FAMILIES
        for precision, bar in TOLERANCES.items()
    },
    "a stopped run goes on and is exported": ">= 1",
    "marked tests fail": "<= 0",
    **{
        f"{size} llama, bf16, 4,096: {figure}": bar
        for size in ("1B", "8B")
        for figure, bar in (("MFU of 989 TFLOP/s", ">= 50"), ("of the product", ">= 62"))
    },
    "8B, 4,096: FP8 against bf16": ">= 1.35",
    "FP8's loss from bf16's, in spreads of seeds": "<= 1",
    "1B, 4,096: against compiled transformers": ">= 1.4",
    "1B, 4,096: BLOOM style against llama": ">= 0.9",
    "1B, 4,096: BLOOM style, dropout 0.1 against llama": ">= 0.8",
    "1B, 4,096: documents of 1,024 tokens against llama": ">= 0.9",
    "head, 8,192 x 131,072: memory of the naive one": ">= 2",
    "1B: step beside an asynchronous save": "<= 1.03",
    "1B: outer step, of 100 steps": "<= 1",
    "1B: outer step, of 100 steps, beside steps": "<= 1",
    "1B: planned step time, off by": "<= 15",
    "1B: planned memory, off by": "<= 10",
}
PREDICTED_S: dict[str, float] = {
    **{"learn": 30, "head": 30, "noise": 130},
    **{"speed 0.3B": 35, "speed 1B": 45, "speed 3B": 50, "speed 8B": 70},
    **{"peer 0.3B": 45, "peer 1B": 60, "peer 3B": 90, "peer 8B": 120},
    **{"tests": 130, "resume": 60, "train": 80, "calibrate": 80, "plan": 10},
}
"""Seconds of each job on an H200 with 16 cores, its start and its compilation included."""
LEAST_S = 60.0
"""A job that was begun has this long, or what was predicted, or what is left, whatever is most."""


class Session:
    """Runs jobs while time is left, and remembers what each found.

    seen: the measurements so far, by title.
    left_out: jobs that were not begun since too little time was left.
    """

    def __init__(self, *, within_s: float, tiny: bool, keep: Path | None) -> None:
        """keep: a file to which figures and measurements are appended, and from which they are known."""
        self.tiny = tiny
        self.seen: dict[str, Measurement] = {}
        self.left_out: list[str] = []
        self._until_s = time.monotonic() + within_s
        self._keep = keep
        self._known: dict[str, Figures] = {}
        if keep is not None and keep.exists():
            for line in keep.read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                if "job" in record:
                    self._known[record["job"]] = record["found"]
                else:
                    self.seen[record["title"]] = Measurement(**record["measurement"])

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return max(0.0, self._until_s - time.monotonic())

    def say(self, line: str) -> None:
        """Tell whoever watches; figures go to standard output."""
        print(line, file=sys.stderr, flush=True)

    def size(self, name: str) -> str:
        """The size that is measured in place of another one."""
        return "tiny" if self.tiny else name

    def length(self, tokens: int) -> int:
        """The tokens of a sample that are measured in place of others."""
        return 64 if self.tiny else tokens

    def knows(self, title: str) -> bool:
        """Whether this was measured already, and has met its bar."""
        return title in self.seen and self.seen[title].ok

    def newly_seen(self, found: Sequence[Measurement]) -> list[Measurement]:
        """Remember measurements, and return those that were not there before."""
        new = [one for one in found if not self.knows(_title(one))]
        for one in new:
            self.seen[_title(one)] = one
            self._append({"title": _title(one), "measurement": asdict(one)})
        return new

    def measured(self, **job: Any) -> Figures:
        """What a job found, now or earlier; with `failure` if it failed, `left_out` if it was not begun."""
        key = json.dumps(job, sort_keys=True)
        if key not in self._known:
            named = " ".join([job["kind"], str(job.get("size", ""))]).strip()
            predicted_s = PREDICTED_S.get(named, PREDICTED_S.get(job["kind"], LEAST_S))
            if not self._may_begin(f"{named}: {key}", predicted_s):
                return {"left_out": True}
            found = _in_this_process(job) if self.tiny else self._in_a_process(key, predicted_s)
            self._remember(key, found)
        return self._known[key]

    def command(self, arguments: Sequence[str], *, job: str, accepts: Sequence[int] = (0,)) -> str:
        """Run a command and return its standard output. Raises CommandFailed, and NoTime as one kind of it.

        job: its name among the predicted seconds. accepts: statuses that are no failure.
        """
        predicted_s = PREDICTED_S[job]
        if not self._may_begin(job, predicted_s):
            raise NoTime(job)
        done = ended(arguments, timeout_s=self._timeout_s(predicted_s))
        if done.returncode not in accepts:
            self.say(f"{done.stdout[-4000:]}{done.stderr[-4000:]}")
            raise CommandFailed(f"{job}: {last_line(done)}")
        return done.stdout

    def judged(self, title: str, value: float, unit: str, *, reference: str) -> Measurement:
        """A figure, ok if it is a number and meets its bar; sizes that were made tiny are held to none."""
        bar = None if self.tiny else BARS.get(title)
        one = measurement(f"{_PREFIX}{title}", value, unit=unit, reference=reference, bar=bar)
        return replace(one, ok=one.ok and not math.isnan(value))

    def _may_begin(self, what: str, predicted_s: float) -> bool:
        if self.tiny or predicted_s <= self.left_s:
            self.say(f"  {what} (predicted {predicted_s:.0f} s)")
            return True
        self.say(f"  left out: {what}: {predicted_s:.0f} s predicted, {self.left_s:.0f} s are left")
        self.left_out.append(what)
        return False

    def _timeout_s(self, predicted_s: float) -> float:
        return max(LEAST_S, predicted_s, self.left_s)

    def _in_a_process(self, key: str, predicted_s: float) -> Figures:
        command = [sys.executable, str(WORKERS), key]
        # As `bloomery train` sets it for its ranks; whoever set it already decides.
        environment = ALLOCATOR | os.environ
        done = ended(command, timeout_s=self._timeout_s(predicted_s), environment=environment)
        found: Figures = {}
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                found |= json.loads(line)
        if done.returncode:
            self.say(done.stderr[-4000:])
            found["failure"] = last_line(done)
        return found

    def _remember(self, key: str, found: Figures) -> None:
        self._known[key] = found
        if "failure" not in found:
            self._append({"job": key, "found": found})

    def _append(self, record: dict[str, Any]) -> None:
        if self._keep is not None:
            with self._keep.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


_PREFIX = "gpu: "


def _title(one: Measurement) -> str:
    return one.name.removeprefix(_PREFIX)


def _in_this_process(job: Figures) -> Figures:
    from gpu_workers import work

    found: Figures = {}
    for figures in work(job):
        found |= figures
    return found


def ended(
    command: Sequence[str], *, timeout_s: float, environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run a command; past its time end it with all that it started, and keep what it had printed."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=error, process_group=0
        )
        late = ""
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status, late = process.wait(), f"\nnot done within {timeout_s:.0f} s"
        out.seek(0)
        error.seek(0)
        return subprocess.CompletedProcess(command, status, out.read(), error.read() + late)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Why a command failed, as far as its last line tells."""
    lines = done.stderr.strip().splitlines() or done.stdout.strip().splitlines()
    return lines[-1] if lines else f"ended with status {done.returncode}"
