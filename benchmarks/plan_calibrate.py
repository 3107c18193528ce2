"""Predicted against measured on this machine: the step time and the memory of three small recipes.

`bloomery calibrate` measures the machine, `bloomery plan` predicts, and `bloomery train` trains each recipe.
Its step is processor time, of the quickest few steps in a row, with one thread unless --threads says
otherwise: as the calibration measures, and what other work on the machine lengthens least. Memory is the peak
that the system counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from contract import Measurement, measurement, report

RECIPES = ("demo-small", "llmjp-172b-tiny", "intellect1-10b-tiny")
STEPS, WINDOW, POLL_S = 30, 6, 0.01
TIME_BAR, MEMORY_BAR = 15.0, 10.0
QUIET = (
    *("evaluate.every_steps=0", "evaluate.at_end=false", "log.tensorboard=false", "schedule.warmup=0"),
    *("checkpoint.every_minutes=0.0", "checkpoint.every_steps=0", "checkpoint.at_end=false"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
    with tempfile.TemporaryDirectory(prefix="bloomery-plan-") as directory:
        machine = Path(directory) / "machine.toml"
        _bloomery(["calibrate", "--to", str(machine), "--disk", directory], environment)
        found: list[Measurement] = []
        for recipe in options.recipes:
            planned = _planned(recipe, machine, environment)
            seconds, peak_bytes = _measured(recipe, Path(directory), environment, options)
            found += _compared(recipe, planned, seconds, peak_bytes)
    return report(found, as_json=options.json)


def _compared(
    recipe: str, planned: tuple[float, float], seconds: float, peak_bytes: float
) -> list[Measurement]:
    planned_s, planned_bytes = planned
    return [
        measurement(
            f"plan_calibrate: step time of {recipe}, off by",
            100 * abs(planned_s / seconds - 1),
            unit="%",
            reference=f"planned {planned_s:.4g} s, measured {seconds:.4g} s",
            bar=f"<= {TIME_BAR}",
        ),
        measurement(
            f"plan_calibrate: memory of {recipe}, off by",
            100 * abs(planned_bytes / peak_bytes - 1),
            unit="%",
            reference=f"planned {planned_bytes / 2**20:.0f} MiB, measured {peak_bytes / 2**20:.0f} MiB",
            bar=f"<= {MEMORY_BAR}",
        ),
    ]


def _planned(recipe: str, machine: Path, environment: dict[str, str]) -> tuple[float, float]:
    """(seconds a step, bytes at most)."""
    told = _bloomery(["plan", recipe, "--hardware", str(machine), "--gpus", "1", "--json"], environment)
    figures = json.loads(told)
    return figures["speed"]["step_s"], figures["memory"]["peak_bytes"]


def _measured(
    recipe: str, directory: Path, environment: dict[str, str], options: argparse.Namespace
) -> tuple[float, float]:
    """(processor seconds a step and thread, bytes at most) of real training."""
    run = directory / recipe
    # The first run makes the data: the tokenizer takes more memory than the training does.
    _train(recipe, run, steps=1, environment=environment)
    for child in run.iterdir():
        if child.name != "data":
            shutil.rmtree(child) if child.is_dir() else child.unlink()
    seconds, peak = _train(recipe, run, steps=STEPS, environment=environment)
    return seconds / options.threads, peak


def _train(recipe: str, run: Path, *, steps: int, environment: dict[str, str]) -> tuple[float, float]:
    """(processor seconds of a step in the quickest WINDOW of them, the process's peak in bytes)."""
    length = [f"train.steps={steps}", "train.tokens=0", "train.samples=0", "train.compile=off"]
    command = [
        sys.executable,
        "-m",
        "bloomery",
        "train",
        recipe,
        "--run",
        str(run),
        "--plain",
        *length,
        *QUIET,
    ]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    journal, spent = run / "journal" / "0-0.jsonl", []
    while True:
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        if ended:
            break
        if journal.is_file() and journal.read_text().count('"event": "step"') > len(spent):
            spent.append(_processor_s(process.pid))
        time.sleep(POLL_S)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"training {recipe} failed")
    windows = [(last - first) / WINDOW for first, last in zip(spent, spent[WINDOW:], strict=False)]
    return min(windows, default=0.0), usage.ru_maxrss * 1024.0


def _processor_s(process: int) -> float:
    """Of all threads of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _bloomery(arguments: Sequence[str], environment: dict[str, str]) -> str:
    command = [sys.executable, "-m", "bloomery", *arguments]
    return subprocess.run(command, env=environment, check=True, text=True, stdout=subprocess.PIPE).stdout


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process (default 1)")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), help="shipped recipes that train here")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
