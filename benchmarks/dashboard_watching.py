"""What a dashboard with one viewer costs a training on the same machine; part of benchmarks/dashboard.py."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

import numpy as np
import psutil
from contract import Measurement, measurement

from bloomery.events.journal import last_step, read_journal
from bloomery.events.run_directory import RunDirectory

WARM_UP_S, SLICE_S = 15.0, 5.0
PAGE = "api/curves?run=0&axis=step&points=800&name=loss&name=loss~&name=gradient_norm&name=learning_rate"
TRAINED = (
    *("demo-small", "train.steps=1000000", "train.global_batch=1", "train.micro_batch=1"),
    *("data.sequence_length=256", "train.loss_chunk=256", "train.compile=off"),
    *("evaluate.every_steps=0", "checkpoint.every_steps=0", "checkpoint.every_minutes=0"),
)


def watching(seconds: float) -> list[Measurement]:
    """Train, and follow the training in half of the slices of time: on, off, off, on, and so on."""
    with tempfile.TemporaryDirectory() as place:
        run = RunDirectory(Path(place) / "run")
        command = [sys.executable, "-m", "bloomery", "train", *TRAINED, "--run", str(run.path)]
        with (Path(place) / "log").open("w") as log:
            trainer = subprocess.Popen(command, stdout=log, stderr=log)
        while not run.journal().exists() or last_step(run.journal()) < 50:
            assert trainer.poll() is None, (Path(place) / "log").read_text()
            time.sleep(0.5)
        command = [sys.executable, "-m", "bloomery", "dashboard", str(run.path), "--port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        ended = threading.Event()
        try:
            assert server.stdout is not None
            found = re.match(r"(http://\S+)", server.stdout.readline())
            assert found
            viewer = threading.Thread(target=view, args=(found[1], ended, [0], 0), daemon=True)
            viewer.start()
            time.sleep(WARM_UP_S)
            slices = [
                _slice(trainer, server, watched=at % 4 in (0, 3)) for at in range(int(seconds / SLICE_S))
            ]
        finally:
            ended.set()
            for process in (server, trainer):
                process.kill()
                process.wait()
        times = np.array([event["time"] for event in read_journal(run.journal()) if event["event"] == "step"])
    return _cost_of_watching(slices, times)


class Slice(NamedTuple):
    """A stretch of time, what each process used of a processor in it, and the bytes that the server read."""

    watched: bool
    begin: float
    end: float
    trainer_s: float
    server_s: float
    read_bytes: int


def _slice(trainer: subprocess.Popen[str], server: subprocess.Popen[str], *, watched: bool) -> Slice:
    server.send_signal(signal.SIGCONT if watched else signal.SIGSTOP)
    processes = [psutil.Process(process.pid) for process in (trainer, server)]
    begin, before = time.time(), [sum(process.cpu_times()[:2]) for process in processes]
    read = processes[1].io_counters().read_chars
    time.sleep(SLICE_S)
    used = [sum(process.cpu_times()[:2]) - was for process, was in zip(processes, before, strict=True)]
    read = processes[1].io_counters().read_chars - read
    return Slice(watched, begin, time.time(), *used, read)


def _cost_of_watching(slices: list[Slice], times: np.ndarray) -> list[Measurement]:
    """Compare the slices of each pair: seconds a step, and the trainer's processor seconds a step."""
    steps = np.interp([[part.begin, part.end] for part in slices], times, np.arange(len(times))) @ [-1, 1]
    wall, own = (
        np.array([figure(part) for part in slices]) / steps
        for figure in (lambda part: part.end - part.begin, lambda part: part.trainer_s)
    )
    is_on = np.array([part.watched for part in slices])
    seconds = sum(part.end - part.begin for part in slices if part.watched)
    used = sum(part.server_s for part in slices if part.watched) / seconds
    read = sum(part.read_bytes for part in slices if part.watched) / seconds
    cores = psutil.cpu_count() or 1
    measured = [
        measurement(
            "processor of the dashboard, of the machine",
            100 * used / cores,
            unit="% of all cores",
            reference=f"a viewer, {1 / np.median(wall):.1f} steps/s: {100 * used:.2f}% of 1 of {cores} cores "
            f"and {read / 1e3:,.1f} kB/s read",
            bar="<= 0.5",
        )
    ]
    chance = np.random.default_rng(1)
    for name, cost in (("seconds of a step", wall), ("the trainer's processor seconds a step", own)):
        pairs = cost[: len(cost) // 2 * 2].reshape(-1, 2)
        ratios = np.log(
            np.where(is_on[: len(cost) // 2 * 2 : 2], pairs[:, 0] / pairs[:, 1], pairs[:, 1] / pairs[:, 0])
        )
        drawn = np.median(chance.choice(ratios, (4000, len(ratios))), axis=1)
        low, high = 100 * np.expm1(np.quantile(drawn, (0.025, 0.975)))
        is_decided = high - low < 1.0
        measured.append(
            measurement(
                f"{name}, watched",
                100 * float(np.expm1(np.median(ratios))),
                unit="% more",
                reference=f"median of {len(ratios)} pairs of slices; 95% of it: {low:+.2f} to {high:+.2f}%"
                + ("" if is_decided else ": too wide to decide"),
                bar="<= 0.5" if is_decided else None,
            )
        )
    return measured


def view(url: str, ended: threading.Event, answers: list[int], number: int) -> None:
    """Ask what a page asks, each time that the server says that something changed."""
    with urlopen(f"{url}api/changes", timeout=60) as stream:
        while not ended.is_set():
            if not stream.readline().startswith(b"event: change"):
                continue
            for path in ("api/runs", PAGE, "api/panels?run=0"):
                with urlopen(url + path, timeout=60) as answer:
                    answer.read()
                answers[number] += 1
