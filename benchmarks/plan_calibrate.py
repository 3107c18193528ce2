"""Predicted against measured on this machine: the step time and the memory of three small recipes.

`bloomery calibrate` measures the machine, `bloomery plan` predicts, and `bloomery train` trains each recipe
twice, a few steps and more: what the second took beyond the first is divided by the steps between them. It is
processor time, with one thread unless --threads says otherwise, which other work on the machine lengthens
little. Memory is the peak that the system counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from contract import Measurement, measurement, report

RECIPES = ("demo-small", "llmjp-172b-tiny", "intellect1-10b-tiny")
STEPS = (4, 24)
TIME_BAR, MEMORY_BAR = 15.0, 10.0
QUIET = (
    "evaluate.every_steps=0",
    "evaluate.at_end=false",
    "log.tensorboard=false",
    "checkpoint.every_minutes=0.0",
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
    spent = []
    for steps in (1, *STEPS):
        seconds, peak = _train(recipe, run, steps, environment)
        spent.append(seconds)
        # The first run also made the data, and the tokenizer takes more memory than the training.
        kept = run / "data"
        for child in run.iterdir():
            if child != kept:
                subprocess.run(["rm", "-rf", str(child)], check=True)
    each = (spent[2] - spent[1]) / (STEPS[1] - STEPS[0]) / options.threads
    return each, peak


def _train(recipe: str, run: Path, steps: int, environment: dict[str, str]) -> tuple[float, float]:
    settings = [f"train.steps={steps}", "train.tokens=0", "train.samples=0", "train.compile=off", *QUIET]
    unit = ["schedule.warmup=0", "checkpoint.at_end=false", "checkpoint.every_steps=0"]
    command = [
        sys.executable,
        "-m",
        "bloomery",
        "train",
        recipe,
        "--run",
        str(run),
        "--plain",
        *settings,
        *unit,
    ]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"training {recipe} failed")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024.0


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
