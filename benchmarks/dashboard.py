"""What the dashboard costs: a long run in a browser, reading a journal, and twenty viewers.

    python benchmarks/dashboard.py --json [--steps 10000000] [--seconds 60] [--only long,reading,viewers,…]

long: a run of so many steps, in memory, drawn by Chromium: seconds until its charts stand, frames a second
    while its charts are moved, resident memory of the server.
reading: steps a second at which a journal is read, beside parsing each line with `json`.
viewers: twenty viewers of a run that makes a step a second, each asking what the page asks: the server's
    memory and its share of a core. The benchmark's own processes use the same machine.
killed: four peers as processes that write heartbeats, one of which is killed, five times: seconds until a
    viewer of the page is told.
watching: what a dashboard with one viewer costs a training on the same machine: the processor seconds that it
    takes itself, and the steps of a real training in slices of five seconds in which it runs or is stopped.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import psutil
from contract import Measurement, measurement, report
from dashboard_watching import WARM_UP_S, view, watching

from bloomery.events.incarnation import begin
from bloomery.events.journal import Journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.dashboard.run_reader import RunReader

VIEWERS = 20
MIB = 1 << 20


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--json", action="store_true")
    options.add_argument("--steps", type=int, default=10_000_000, help="steps of the long run")
    options.add_argument("--seconds", type=float, default=60.0, help="seconds of the viewers")
    options.add_argument("--watched", type=float, default=300.0, help="seconds of the watched training")
    options.add_argument("--only", default="long,reading,viewers,killed,watching")
    chosen = options.parse_args()
    measured: list[Measurement] = []
    for name in chosen.only.split(","):
        if name == "long":
            measured += long_run(chosen.steps)
        elif name == "reading":
            measured += reading(100_000)
        elif name == "killed":
            measured += killed(5)
        elif name == "watching":
            measured += watching(chosen.watched)
        else:
            measured += viewers(chosen.seconds)
    return report(measured, as_json=chosen.json)


def long_run(steps: int) -> list[Measurement]:
    """Serve columns of so many steps from a process of its own, and draw them in a browser."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as place, serving_long(Path(place), steps) as (url, process):
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
            loads = []
            for _ in range(3):
                page = browser.new_page(viewport={"width": 1280, "height": 900})
                began = time.perf_counter()
                page.goto(url)
                page.wait_for_selector("html[data-loaded]", state="attached", timeout=120_000)
                loads.append(time.perf_counter() - began)
            frames = page.evaluate(
                """async () => {
                    const page = bloomery.page, [low, high] = page.whole, width = (high - low) / 10;
                    let frames = 0, begin = performance.now();
                    while (performance.now() - begin < 3000) {
                        page.zoom(low + frames % 100 * width / 25, low + frames % 100 * width / 25 + width);
                        await new Promise(requestAnimationFrame);
                        frames += 1;
                    }
                    return 1000 * frames / (performance.now() - begin);
                }"""
            )
            browser.close()
        memory = psutil.Process(process.pid).memory_info().rss / MIB
    reference = f"{steps:,} steps, Chromium, first of three loads"
    return [
        measurement("first load of a long run", loads[0], unit="s", reference=reference, bar="<= 2"),
        measurement("median load", sorted(loads)[1], unit="s", reference=f"{steps:,} steps", bar="<= 2"),
        measurement(
            "moving along it", frames, unit="frames/s", reference="the charts in view move", bar=">= 30"
        ),
        measurement("memory of its server", memory, unit="MiB", reference=f"{steps:,} steps"),
    ]


@contextmanager
def serving_long(place: Path, steps: int) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, __file__, "--serve", str(place), str(steps)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process
    finally:
        process.kill()
        process.wait()


def serve(place: Path, steps: int) -> None:
    """Serve a run whose columns are drawn, for a journal of ten million lines has ten gigabytes."""
    import socket

    import uvicorn

    from bloomery.operate.dashboard.access import AccessRules
    from bloomery.operate.dashboard.server import DashboardServer
    from bloomery.operate.dashboard.step_columns import GrowingArray, RowRange

    begin(RunDirectory(place).create(), base=None, reason="start")
    server = DashboardServer([place], AccessRules())
    columns, chance = server.runs[0].reader.columns, np.random.default_rng(1)
    numbers = np.arange(1, steps + 1, dtype=np.float64)
    for name, scale in (("step", 1.0), ("samples", 512.0), ("tokens", 1e6), ("time", 3.0)):
        columns.axes[name].extend(numbers * scale)
    for name in ("loss", "gradient_norm", "learning_rate", "tokens_per_s", "seconds", "memory_bytes"):
        columns.figures[name] = GrowingArray(np.float32)
        columns.figures[name].extend(2.0 + chance.random(steps, np.float32))
    columns._segments = [RowRange(begin=0, end=steps, incarnation=1)]
    server.runs[0].reader.poll()
    listener = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{listener.getsockname()[1]}/", flush=True)
    uvicorn.Server(uvicorn.Config(server.application, log_level="warning", lifespan="off")).run([listener])


def step_line(step: int) -> dict[str, object]:
    figures = (
        "loss",
        "gradient_norm",
        "learning_rate",
        "z_loss",
        "tokens_per_s",
        "model_tflops",
        "memory_bytes",
    )
    spent = {f"activity {number}": 0.1 for number in range(8)}
    rest = {"seconds": 1.0, "global_batch": 512, "update_applied": True, "facts": {"note": "x" * 200}}
    consumed = {"consumed_samples": 512 * step, "consumed_tokens": step * 10**6}
    return {name: 2.0 + 1.0 / step for name in figures} | rest | consumed | {"spent": spent}


def reading(steps: int) -> list[Measurement]:
    with tempfile.TemporaryDirectory() as place:
        run = RunDirectory(Path(place)).create()
        begin(run, base=None, reason="start")
        with Journal(run.journal()) as journal:
            for step in range(1, steps + 1):
                journal.write("step", incarnation=1, step=step, **step_line(step))
        began = time.perf_counter()
        with run.journal().open("rb") as file:
            for line in file:
                json.loads(line)
        plain_s = time.perf_counter() - began
        began = time.perf_counter()
        reader = RunReader(run.path).read_all()
        ours_s = time.perf_counter() - began
        size = reader.columns.nbytes / steps
    reference = f"json.loads of each line: {steps / plain_s:,.0f} steps/s"
    return [
        measurement("reading a journal", steps / ours_s, unit="steps/s", reference=reference),
        measurement(
            "the same, × json", plain_s / ours_s, unit="×", reference="parsing alone, columns not counted"
        ),
        measurement("columns", size, unit="bytes/step", reference="17 columns and 4 axes", bar="<= 150"),
    ]


def viewers(seconds: float) -> list[Measurement]:
    with tempfile.TemporaryDirectory() as place:
        run = RunDirectory(Path(place) / "run").create()
        begin(run, base=None, reason="start")
        journal = Journal(run.journal())
        for step in range(1, 2001):
            journal.write("step", incarnation=1, step=step, **step_line(step))
        command = [sys.executable, "-m", "bloomery", "dashboard", str(run.path), "--port", "0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        ended = threading.Event()
        try:
            assert process.stdout is not None
            found = re.match(r"(http://\S+)", process.stdout.readline())
            assert found
            answers = [0] * VIEWERS
            crowd = [
                threading.Thread(target=view, args=(found[1], ended, answers, number), daemon=True)
                for number in range(VIEWERS)
            ]
            for thread in crowd:
                thread.start()
            server, step = psutil.Process(process.pid), 2000
            began = used = 0.0
            end = time.monotonic() + WARM_UP_S + seconds
            while time.monotonic() < end:
                step += 1
                journal.write("step", incarnation=1, step=step, **step_line(step))
                time.sleep(1.0)
                if not began and end - time.monotonic() < seconds:
                    began, used = time.monotonic(), sum(server.cpu_times()[:2])
            share = (sum(server.cpu_times()[:2]) - used) / (time.monotonic() - began)
            memory = server.memory_info().rss / MIB
            count = sum(answers)
        finally:
            ended.set()
            process.kill()
            process.wait()
            journal.close()
    reference = f"{VIEWERS} viewers, {count} answers, a step a second"
    return [
        measurement(
            "processor of the server", 100 * share, unit="% of a core", reference=reference, bar="<= 3"
        ),
        measurement("memory of the server", memory, unit="MiB", reference=reference, bar="<= 150"),
    ]


BEATING = """
import sys
from bloomery.events.heartbeat import Heartbeat, RankActivity
from bloomery.events.run_directory import RunDirectory
beat = Heartbeat(RunDirectory(sys.argv[1]).heartbeat())
beat.enter(RankActivity.COMPUTING)
beat.start()
print("ready", flush=True)
sys.stdin.read()
"""


def killed(times: int) -> list[Measurement]:
    """Kill one of four processes that write heartbeats, and wait until the page's data says so."""
    waits = []
    for _ in range(times):
        with tempfile.TemporaryDirectory() as place:
            runs = [RunDirectory(Path(place) / name).create() for name in ("a", "b", "c", "d")]
            peers = []
            for run in runs:
                begin(run, base=None, reason="start")
                command = [sys.executable, "-c", BEATING, str(run.path)]
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
                peers.append(subprocess.Popen(command, text=True, **pipes))
                assert peers[-1].stdout is not None and peers[-1].stdout.readline() == "ready\n"
            command = [sys.executable, "-m", "bloomery", "dashboard", *(str(run.path) for run in runs)]
            server = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True)
            try:
                assert server.stdout is not None
                found = re.match(r"(http://\S+)", server.stdout.readline())
                assert found
                waits.append(_until_told(found[1], peers[2]))
            finally:
                for process in (server, *peers):
                    process.kill()
                    process.wait()
    reference = f"four peers, {times} times: median {sorted(waits)[times // 2]:.2f} s"
    return [
        measurement("a killed peer is told, longest", max(waits), unit="s", reference=reference, bar="<= 3")
    ]


def _until_told(url: str, peer: subprocess.Popen[str]) -> float:
    with urlopen(f"{url}api/changes", timeout=60) as stream:
        while not stream.readline().startswith(b"event: change"):  # all are known to run
            continue
        began = time.monotonic()
        peer.kill()
        while True:
            if not stream.readline().startswith(b"event: change"):
                continue
            with urlopen(f"{url}api/runs", timeout=60) as answer:
                if json.load(answer)["runs"][2]["state"] == "gone":
                    return time.monotonic() - began


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        sys.exit(main())
