"""What `bloomery watch` costs and how soon it tells: memory, processor time, alerts, and the disk forecast.

    python benchmarks/operate_watch.py --json [--minutes 60] [--only cost,alert,disk]

cost: a watcher beside a run that writes a step a second: resident memory and share of a core.
alert: seconds from the last sign of life of a run to the alert, and alerts for each incident.
disk: a tmpfs (root only) that fills at a steady rate, with saves that come and go: forecast and truth.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from bloomery.events.heartbeat import RankActivity
from bloomery.events.journal import Journal, read_journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.watch.disk import DiskSample, forecast_full, sample_disk, thinned

INTERVAL_S = 15
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--json", action="store_true")
    options.add_argument("--minutes", type=float, default=60.0, help="minutes of the cost")
    options.add_argument("--only", default="cost,alert,disk")
    chosen = options.parse_args()
    parts = {"cost": lambda: cost(chosen.minutes * 60.0), "alert": alert, "disk": disk}
    figures = {name: parts[name]() for name in chosen.only.split(",")}
    print(json.dumps(figures) if chosen.json else json.dumps(figures, indent=2))


def cost(seconds: float) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as directory:
        run = begun(Path(directory) / "run")
        with watching(run) as watcher, Journal(run.journal()) as journal:
            began, step, most_kib = time.monotonic(), 0, 0
            while time.monotonic() - began < seconds:
                step += 1
                journal.write(
                    "step", incarnation=1, step=step, seconds=1.0, consumed_tokens=step, padding="x" * 900
                )
                if step % 60 == 0:
                    journal.write("checkpoint", incarnation=1, step=step, path=f"step-{step:06d}.i001")
                beat(run, step=step)
                most_kib = max(most_kib, resident_kib(watcher.pid))
                time.sleep(1.0)
            cpu_s, elapsed_s = processor_s(watcher.pid), time.monotonic() - began
        alerts = [event for event in read_journal(run.operations) if event["event"] == "alert"]
    return {
        "minutes": elapsed_s / 60,
        "resident_mb": most_kib / 1024,
        "share_of_a_core": cpu_s / elapsed_s,
        "alerts": len(alerts),
        "told": lines(alerts),
    }


def alert() -> dict[str, object]:
    """Two runs whose life ends: one stands still while its heartbeat is fresh, one falls silent."""
    latencies = {}
    with tempfile.TemporaryDirectory() as directory:
        for kind in ("stuck", "silent"):
            run = begun(Path(directory) / kind)
            with watching(run):
                for step in range(1, 21):
                    beat(run, step=step)
                    time.sleep(1.0)
                last = time.time()
                while not told(run) and time.time() - last < 300:
                    if kind == "stuck":
                        beat(run, step=20, since=last)
                    time.sleep(1.0)
                first = told(run)
                time.sleep(3 * INTERVAL_S)
            latencies[kind] = {
                "alert_after_s": first[0]["time"] - last if first else None,
                "kind": first[0]["kind"] if first else "",
                # another incident may come meanwhile: other programs fill the disk
                "alerts": sum(event["kind"] == first[0]["kind"] for event in told(run)) if first else 0,
                "told": lines(told(run)),
            }
    return latencies


def disk() -> dict[str, float] | str:
    if os.geteuid() != 0:
        return "not measured: a tmpfs is mounted by root alone"
    with tempfile.TemporaryDirectory() as directory:
        mount = Path(directory) / "disk"
        mount.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", str(mount)], check=True)
        try:
            return _fill(mount)
        finally:
            subprocess.run(["umount", str(mount)], check=True)


def _fill(mount: Path) -> dict[str, float]:
    """Write a mebibyte a second until the disk is full; half way through ask for the forecast."""
    began, samples, asked = time.time(), list[DiskSample](), {}
    log, save = mount / "log", mount / "save"
    with log.open("ab", buffering=0) as file, suppress(OSError):
        while True:
            passed = time.time() - began
            if int(passed) % 20 == 10:
                save.write_bytes(b"x" * (8 << 20))
            elif save.exists() and int(passed) % 20 == 19:
                save.unlink()
            for _ in range(max(0, int(passed) - int(file.tell() / 2**20))):
                file.write(b"x" * 2**20)
                if file.tell() % 2**20:
                    raise OSError("the disk is full")
            samples = thinned(samples, sample_disk(mount, now=time.time()))
            for share in (0.25, 0.5, 0.75):
                if share not in asked and passed > share * 240:
                    forecast = forecast_full(samples)
                    asked[share] = (time.time(), forecast.full_in_s if forecast else float("nan"))
            time.sleep(1.0)
    full = time.time()
    return {f"forecast_over_truth_at_{share}": said / (full - when) for share, (when, said) in asked.items()}


def begun(path: Path) -> RunDirectory:
    run = RunDirectory(path).create()
    run.incarnation(1).write_text('{"base": null}')
    with Journal(run.journal()) as journal:
        journal.write("start", incarnation=1, step=0, reason="start", ranks=1)
    beat(run, step=0)
    return run


def beat(run: RunDirectory, *, step: int, since: float | None = None) -> None:
    now = time.time()
    record = {"rank": 0, "world": 1, "step": step, "activity": RankActivity.COMPUTING, "pid": os.getpid()}
    record |= {"since": since or now, "time": now, "moves": step, "longest_s": {RankActivity.COMPUTING: 1.0}}
    draft = run.heartbeat().with_name("draft")
    draft.write_text(json.dumps(record))
    draft.replace(run.heartbeat())


class watching:
    """A watcher in a process of its own, until the block ends."""

    def __init__(self, run: RunDirectory) -> None:
        command = [sys.executable, "-m", "bloomery", "watch", str(run.path), "--interval", str(INTERVAL_S)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def __enter__(self) -> subprocess.Popen[bytes]:
        return self.process

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        self.process.wait(60)


def told(run: RunDirectory) -> list[dict]:
    return [event for event in read_journal(run.operations) if event["event"] == "alert"]


def lines(alerts: list[dict]) -> list[str]:
    return [f"{event['word']} {event['kind']}: {event['line']}" for event in alerts]


def resident_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next((line.split()[1] for line in lines if line.startswith("VmRSS")), 0))


def processor_s(pid: int) -> float:
    """Processor time of a process and of its children that have ended, its start included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / TICKS


if __name__ == "__main__":
    main()
