"""How quickly a plan is made: the whole command, and a search over 1,024 accelerators.

Processor time of a process that does it, the median of several, beside an interpreter that does nothing.
Modules are compiled beforehand, as installing the package compiles them. With --other, each process takes
turns with one of another version, and the ratio is the median over the turns.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from tempfile import TemporaryDirectory

from contract import Measurement, measurement, report

COMMANDS = {
    "the help": (["--help"], 0.15),
    "plan: a whole plan": (["plan", "tr11-176b"], 0.3),
    "plan: a search over 1,024 accelerators": (["plan", "llmjp-172b", "--gpus", "1024", "--search"], 2.0),
}
NOTHING = [sys.executable, "-c", "pass"]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    with TemporaryDirectory(prefix="bloomery-benchmark-") as directory:
        compiled = os.environ | {"PYTHONPYCACHEPREFIX": directory, "PYTHONDONTWRITEBYTECODE": ""}
        found = [one for name in COMMANDS for one in _measured(name, options.rounds, compiled, options.other)]
    return report(found, as_json=options.json)


def _measured(name: str, rounds: int, environment: Mapping[str, str], other: str) -> Iterator[Measurement]:
    command, bar = COMMANDS[name]
    ours, bare, ratios = [], [], []
    for turn in range(rounds + 1):
        spent = _processor_s([sys.executable, "-m", "bloomery", *command], environment)
        theirs = _processor_s([other, "-m", "bloomery", *command], environment) if other else math.inf
        if turn:  # the first one compiles
            ours.append(spent)
            bare.append(_processor_s(NOTHING, environment))
            ratios.append(spent / theirs)
    reference = (
        f"an interpreter that does nothing: {median(bare):.3f} s; {rounds} rounds, quickest {min(ours):.3f} s"
    )
    yield measurement(name, median(ours), unit="s", reference=reference, bar=f"<= {bar}")
    if other:
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        yield measurement(
            f"{name}, × {other}", median(ratios), unit="x", reference=f"{rounds} turns: {spread}"
        )


def _processor_s(command: Sequence[str], environment: Mapping[str, str]) -> float:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return usage.ru_utime + usage.ru_stime


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--rounds", type=int, default=7, help="processes of each kind (default 7)")
    parser.add_argument(
        "--other", default="", metavar="PYTHON", help="the Python of another version's environment"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
