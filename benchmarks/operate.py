"""Operating a run, figure by figure, against the bars: what people and clocks meet when something fails.

    python benchmarks/operate.py --json [--only recovery,verdicts,hangs,states,cut,launchers,…]

recovery: `bloomery drill` kills a rank of a small recipe; the seconds to the first step, without the load.
watch, alert, disk: benchmarks/operate_watch.py (--minutes of the cost).
stop, limit, handover, lost, ledger: soaks of `make soak PART=operate` and `PART=ledger`, shortened by
BLOOMERY_SOAK_MOMENTS, _TRIALS, _JOB_MINUTES and _FAULTS. verdicts, hangs: `PART=faults`. states, cut,
slurm_limit, day: `PART=states`, `split_brain`, `limits`, `chronicle`. launchers: tests/operate/
test_any_launcher.py. All parts together take about three hours.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from contract import Measurement, measurement, report

HERE = Path(__file__).parent
FAULTS = 3
LAUNCHERS = "two_processes or long_name or mpirun or launchers_of_two or srun_with"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--json", action="store_true")
    options.add_argument("--only", default=",".join(PARTS), help="comma-separated parts (default: all)")
    options.add_argument("--minutes", type=float, default=60.0, help="minutes of the cost of watching")
    chosen = options.parse_args()
    unknown = set(chosen.only.split(",")) - set(PARTS)
    if unknown:
        options.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    status = 0
    for name in chosen.only.split(","):  # each part is reported when it is done: the whole takes hours
        status |= report(list(PARTS[name](chosen.minutes)), as_json=chosen.json)
    return status


def recovery(minutes: float) -> Iterator[Measurement]:
    command = [
        "drill",
        "demo-small",
        "train.samples=4000000",
        "train.micro_batch=1",
        "train.compile=off",
        "data.sequence_length=128",
        "checkpoint.every_steps=5",
        "evaluate.every_steps=0",
        "--faults",
        "kill",
        "--rounds",
        str(FAULTS),
        "--json",
    ]
    results = json.loads(run([sys.executable, "-m", "bloomery", *command]))["faults"]
    survived = [result for result in results if result["survived"]]
    beyond = sorted(result["total_s"] - result["phases"]["loaded"] for result in survived)
    phases = {name: round(seconds or 0.0, 2) for name, seconds in results[0]["phases"].items()}
    yield measured("kills survived", len(beyond) / FAULTS, unit="share", reference="drill", bar=">= 1")
    if beyond:
        middle = beyond[len(beyond) // 2]
        yield measured(
            "a killed rank to the first step, beyond load",
            middle,
            unit="s",
            reference=str(phases),
            bar="<= 5",
        )


def watch(minutes: float) -> Iterator[Measurement]:
    seen = watching("cost", minutes)
    beside = f"{seen['minutes']:.0f} minutes beside a run that writes a step a second"
    yield measured("memory of watch", seen["resident_mb"], unit="MB", reference=beside, bar="<= 60")
    share = 100 * seen["share_of_a_core"]
    yield measured("processor time of watch", share, unit="% of a core", reference=beside, bar="<= 0.5")
    beside += "".join(f"; {words}" for words in seen["told"])
    yield measured("alerts beside a healthy run", seen["alerts"], unit="alerts", reference=beside, bar="<= 0")


def alert(minutes: float) -> Iterator[Measurement]:
    for kind, seen in watching("alert", minutes).items():
        told = seen["alert_after_s"] if seen["alert_after_s"] is not None else float("inf")
        beside = f"interval 15 s; told as {seen['kind'] or 'nothing'}"
        yield measured(f"alert after a run is {kind}", told, unit="s", reference=beside, bar="<= 60")
        yield measured(f"alerts of a {kind} run", seen["alerts"], unit="alerts", reference=beside, bar="<= 1")


def disk(minutes: float) -> Iterator[Measurement]:
    seen = watching("disk", minutes)
    for name, ratio in seen.items() if isinstance(seen, dict) else ():
        beside = f"{name.replace('_', ' ')}: {ratio:.3f}"
        yield measured(f"off: {name}", abs(ratio - 1.0), unit="of the truth", reference=beside, bar="<= 0.1")


def stop(minutes: float) -> Iterator[Measurement]:
    seen = soak("operate", "random_moments")
    beside = f"{seen['moments']} moments, {seen['of them before the first step']} before the first step"
    for name in ("ranks that stopped at different steps", "stops that lost a step"):
        yield measured(name, seen[name], unit="moments", reference=beside, bar="<= 0")


def limit(minutes: float) -> Iterator[Measurement]:
    seen = soak("operate", "time_limit")
    beside = f"{seen['trials']} jobs, {seen['jobs that trained']} of which trained"
    yield measured(
        "steps lost to time limits", seen["lost steps"], unit="steps", reference=beside, bar="<= 0"
    )
    failed = seen["jobs that failed"]
    yield measured("jobs that failed at their limit", failed, unit="jobs", reference=beside, bar="<= 0")


def handover(minutes: float) -> Iterator[Measurement]:
    seen = soak("operate", "next_task")
    beside = f"{seen['tasks']} tasks on a real SLURM, each of which fails; longest {seen['longest, s']} s"
    yield measured("the next task of an array", seen["median, s"], unit="s", reference=beside, bar="<= 2")


def ledger(minutes: float) -> Iterator[Measurement]:
    seen = soak("ledger", "ledger")
    beside = f"{sum(seen['struck'].values())} faults in {seen['elapsed_s']:.0f} s"
    off = abs(seen["percent"] - 100.0)
    yield measured("the ledger's sum is off", off, unit="%", reference=beside, bar="<= 0.05")
    unexplained = 100 * seen["unexplained"]
    yield measured("time without a class", unexplained, unit="%", reference=beside, bar="<= 0.5")


def lost(minutes: float) -> Iterator[Measurement]:
    seen = soak("operate", "frozen_node")["noticed and ended, s"]
    for kind in ("node lost", "node frozen"):
        beside = "emulated nodes; the other launchers have ended the attempt, and a spare starts"
        yield measured(f"{kind}: noticed", seen[kind], unit="s", reference=beside, bar="<= 10")


def verdicts(minutes: float) -> Iterator[Measurement]:
    seen = soak("faults", "sixty")
    beside = f"of {seen['faults']} faults of {seen['kinds']} kinds, planted in real ranks"
    for name, bar in (("causes right", 57), ("culprits right", 57), ("retried or not, right", 60)):
        yield measured(name, seen[name], unit="faults", reference=beside, bar=f">= {bar}")


def hangs(minutes: float) -> Iterator[Measurement]:
    seen = soak("faults", "hangs")
    beside = f"of {seen['hangs']} hangs planted in a run of four ranks"
    yield measured("hangs whose rank is named", seen["named"], unit="hangs", reference=beside, bar=">= 11")


def states(minutes: float) -> Iterator[Measurement]:
    seen = soak("states", "name_each_state")
    beside = f"{seen['states']} states, each produced on a real SLURM; status and watch asked"
    wrong = seen["asked"] - seen["right"]
    yield measured("states told wrongly", wrong, unit="states", reference=beside, bar="<= 0")


def cut(minutes: float) -> Iterator[Measurement]:
    seen = soak("split_brain", "visible")
    beside = f"{seen['manifests of the old one after it']} manifests of it were written"
    name = "the old incarnation's manifests beyond the new base: visible"
    yield measured(name, seen["of them visible"], unit="manifests", reference=beside, bar="<= 0")


def slurm_limit(minutes: float) -> Iterator[Measurement]:
    seen = soak("limits", "costs_a_step")
    beside = f"{seen['trials']} jobs of a real SLURM, {seen['jobs that trained']} of which trained"
    for name in ("lost steps", "jobs that failed"):
        yield measured(f"SLURM's limit: {name}", seen[name], unit="", reference=beside, bar="<= 0")


def day(minutes: float) -> Iterator[Measurement]:
    seen = soak("chronicle", "13b")
    beside = f"{seen['hours']} simulated hours: {'; '.join(seen['incidents'])}"
    name = "a day of the 13B model: commands by hand"
    yield measured(name, seen["commands by hand"], unit="commands", reference=beside, bar="<= 0")


def launchers(minutes: float) -> Iterator[Measurement]:
    path = HERE.parent / "tests" / "operate" / "test_any_launcher.py"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-rA",
        str(path),
        "-k",
        LAUNCHERS,
        "-p",
        "no:cacheprovider",
    ]
    said = run(command, may_fail=True).splitlines()
    equal = sum(line.startswith("PASSED") for line in said)
    beside = (
        "train with two processes, torchrun, mpirun, launch on two nodes, srun with train and with launch"
    )
    name = "launchers with losses equal to the bit"
    yield measured(name, equal, unit="launchers", reference=beside, bar=">= 6")


PARTS: dict[str, Callable[[float], Iterator[Measurement]]] = {
    "recovery": recovery,
    "watch": watch,
    "alert": alert,
    "disk": disk,
    "stop": stop,
    "limit": limit,
    "handover": handover,
    "ledger": ledger,
    "lost": lost,
    "verdicts": verdicts,
    "hangs": hangs,
    "states": states,
    "cut": cut,
    "slurm_limit": slurm_limit,
    "day": day,
    "launchers": launchers,
}


def measured(name: str, value: float, *, unit: str, reference: str, bar: str) -> Measurement:
    return measurement(f"operate: {name}", float(value), unit=unit, reference=reference, bar=bar)


def watching(part: str, minutes: float) -> Any:  # Any: parsed JSON
    command = [sys.executable, str(HERE / "operate_watch.py"), "--json", "--only", part]
    return json.loads(run([*command, "--minutes", str(minutes)]))[part]


def soak(module: str, test: str) -> dict[str, Any]:  # Any: parsed JSON
    """Run a test of tests/soak and return the figures that it prints; it prints them before it judges."""
    path = HERE.parent / "tests" / "soak" / f"{module}.py"
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-m", "slow", str(path), "-k", test]
    said = run([*command, "--timeout", "14400", "-p", "no:cacheprovider"], may_fail=True)
    figures = [json.loads(line) for line in said.splitlines() if line.startswith('{"name"')]
    if not figures:
        sys.exit(f"{path.name} -k {test} printed no figures:\n{said[-2000:]}")
    return figures[-1]


def run(command: list[str], *, may_fail: bool = False) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=HERE.parent)
    if done.returncode and not may_fail:
        sys.exit(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
