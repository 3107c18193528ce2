"""The guards on generated losses, and what they and the switches against spikes cost.

False alarms, spikes that are missed, delay, and time; the parts can be measured one by one (`--parts`).
`--steps` of stable training are judged for each kind of noise, and `--spikes` of six spreads that last twenty
steps are planted. Nothing is tuned by kind. `--lines` of a Megatron-style log are replayed for the speed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import corruption
import numpy as np
import prevention
from contract import Measurement, measurement, report

from bloomery.config.checkpoint import CheckpointSection, GuardSection
from bloomery.events.journal import Journal
from bloomery.events.records import StepReport
from bloomery.guard.creep import InnerGrowth
from bloomery.guard.judge import build_guards
from bloomery.guard.logs import Columns, read_columns
from bloomery.guard.replay import replay_columns
from bloomery.guard.verdict import Rewind, Stop, Watch

KINDS = ("normal", "heavy tails", "mixture", "drift", "ramp-up", "learning-rate changes")
SPREAD = 0.02
PARTS = ("losses", "growth", "cost", "speed", "switches", "corruption")
STEP_S = 0.5
"""A short step of a real training, which the cost is held against."""
START_UP_STEPS = 400


def losses_of(kind: str, steps: int, random: np.random.Generator) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Losses of a stable training, and the columns that its kind says otherwise than usual."""
    at = np.arange(1, steps + 1)
    curve = 2.2 + 8.0 * np.exp(-at / random.uniform(30, 300)) + 3.0 * at**-0.3
    noise = SPREAD * random.standard_normal(steps)
    changed: dict[str, np.ndarray] = {"learning_rate": 1e-4 * np.minimum(at / 2000, 1.0)}
    if kind == "heavy tails":
        noise = SPREAD * random.standard_t(3, steps) / np.sqrt(3)
    elif kind == "mixture":
        noise = np.where(random.random(steps) < 0.05, 4.0, 0.9) * noise
    elif kind == "drift":
        curve = curve + 0.03 * np.sin(at / 700) + np.cumsum(0.0002 * random.standard_normal(steps))
    elif kind == "ramp-up":
        changed["global_batch"] = np.minimum(32.0 * (1 + at // 2000), 1024.0)
        noise = noise * np.sqrt(1024.0 / changed["global_batch"])
    elif kind == "learning-rate changes":
        changed["learning_rate"] = 1e-4 * np.where((at // 10_000) % 2 == 0, 1.0, 0.3)
        curve = curve - 0.02 * ((at // 10_000) % 2)
    return curve + noise, changed


OTHER_KINDS = (
    *("correlated", "strongly correlated", "skewed", "heavier tails", "data in runs", "sudden falls"),
    *("restarts", "a line every 10 steps", "a line every 100 steps", "warm restarts of the rate", "outliers"),
)
"""Noise that the rules were not made with."""


def other_columns(kind: str, steps: int, random: np.random.Generator) -> Columns:
    """Return the columns of a stable training with noise of another kind."""
    at = np.arange(1, steps + 1)
    curve = 2.2 + 8.0 * np.exp(-at / random.uniform(30, 300)) + 3.0 * at**-0.3
    noise = random.standard_normal(steps)
    changed: dict[str, np.ndarray] = {"learning_rate": 1e-4 * np.minimum(at / 2000, 1.0)}
    if kind == "correlated":
        noise = correlated(0.6, steps, random)
    elif kind == "strongly correlated":
        noise = correlated(0.9, steps, random)
    elif kind == "skewed":
        noise = random.exponential(1.0, steps) - 1.0
    elif kind == "heavier tails":
        noise = random.standard_t(2.5, steps) / np.sqrt(5.0)
    elif kind == "data in runs":
        lengths = random.integers(5, 60, steps // 5)
        levels = np.repeat(random.standard_normal(len(lengths)), lengths)[:steps]
        noise = 0.8 * (noise + levels)
    elif kind == "sudden falls":
        for fall in random.uniform(300, steps, 8):
            curve = curve - 0.1 * np.clip((at - fall) / random.uniform(20, 400), 0.0, 1.0)
    elif kind == "outliers":
        noise = noise + (random.random(steps) < 0.002) * random.uniform(5, 60, steps)
    elif kind == "warm restarts of the rate":
        part = (at % 10_000) / 10_000
        decays = 0.5 + 0.5 * np.cos(np.pi * part)
        changed["learning_rate"] = 1e-4 * decays
        curve = curve + 0.15 * decays * np.minimum(100 * part, 1.0) * (at > 10_000)
    losses = curve + SPREAD * noise
    if kind == "restarts":
        return with_restarts(columns_of(losses, changed), curve, random)
    if kind.startswith("a line every"):
        each = int(kind.split()[3])
        losses = losses[: steps // each * each].reshape(-1, each).mean(axis=1)
        every = np.arange(each - 1, steps, each)
        changed = {"learning_rate": changed["learning_rate"][every], "step": at[every].astype(np.float64)}
    return columns_of(losses, changed)


def with_restarts(columns: Columns, curve: np.ndarray, random: np.random.Generator) -> Columns:
    """Return the log of a run that went back twelve times, and made its steps again with other noise."""
    steps, first, parts = len(columns), 0, list[np.ndarray]()
    for stop in sorted(random.integers(1000, steps, 12).tolist()):
        parts.append(np.arange(first, stop))
        first = max(stop - int(random.integers(1, 800)), 0)
    lines = np.concatenate([*parts, np.arange(first, steps)])
    again = {name: values[lines] for name, values in vars(columns).items()}
    again["loss"] = curve[lines] + SPREAD * random.standard_normal(len(lines))
    again["resumed"][1:] = np.diff(again["step"]) <= 0
    return Columns(**again)


def correlated(neighbours: float, steps: int, random: np.random.Generator) -> np.ndarray:
    """Return noise of variance 1 in which each value goes with the one before."""
    values, value, own = [], 0.0, np.sqrt(1.0 - neighbours * neighbours)
    for fresh in random.standard_normal(steps).tolist():
        value = neighbours * value + own * fresh
        values.append(value)
    return np.array(values)


def columns_of(losses: np.ndarray, changed: dict[str, np.ndarray]) -> Columns:
    steps = len(losses)
    usual = {
        "step": np.arange(1.0, steps + 1),
        "loss": losses,
        "global_batch": np.full(steps, 1024.0),
        "loss_scale": np.full(steps, np.nan),
        "gradient_norm": np.ones(steps),
        "shared_seconds": np.full(steps, np.nan),
        "consumed_samples": 1024.0 * np.arange(1, steps + 1),
        "cursor": 1024.0 * np.arange(1, steps + 1),
        "refused": np.zeros(steps),
        "peers": np.ones(steps),
        "resumed": np.zeros(steps),
    }
    return Columns(**{**usual, **changed})


THE_13B_RUN = {29020: 2.775923, 29030: 2.772822, 29040: 2.768131, 29050: 7.343709, 29060: 8.715872}
"""Losses of a real run, ten steps a line, whose first high one is that of step 29050."""


def real_spike() -> list[Measurement]:
    """The step at which the spike of a real run is judged, of which three quiet lines are known."""
    steps = np.array([*THE_13B_RUN], dtype=float)
    changed = {"step": steps, "learning_rate": np.full(len(steps), 9.85e-5)}
    columns = columns_of(np.array([*THE_13B_RUN.values()]), changed)
    told = [one.step for one in replay_columns(columns, GuardSection()) if isinstance(one.verdict, Rewind)]
    return [
        measurement(
            "guard: the 13B run's spike is judged at step",
            min(told, default=0) or float("inf"),
            unit="",
            reference="high from step 29050 on; the lines of 29020, 29030 and 29040 are known before",
            bar="<= 29050",
        ),
        measurement(
            "guard: of it, verdicts before",
            sum(step < 29050 for step in told),
            unit="",
            reference="at the quiet lines",
            bar="<= 0",
        ),
    ]


def false_alarms(steps: int, starts: int, random: np.random.Generator) -> list[Measurement]:
    found: list[int] = []
    worst, early = ("", 0), 0
    for kind in KINDS:
        told = replay_columns(columns_of(*losses_of(kind, steps, random)), GuardSection())
        worst = max(worst, (kind, len(told)), key=lambda one: one[1])
        early += sum(one.step <= START_UP_STEPS for one in told)
        found.append(len(told))
    rate = 100_000 * sum(found) / (steps * len(KINDS))
    told = f"{steps:,} steps of each: {', '.join(KINDS)}; most of one kind: {worst[1]} ({worst[0]})"
    for _ in range(starts):
        kind = KINDS[int(random.integers(len(KINDS)))]
        early += len(replay_columns(columns_of(*losses_of(kind, START_UP_STEPS, random)), GuardSection()))
    return [
        measurement("guard: false alarms in 100,000 steps", rate, unit="", reference=told, bar="<= 1"),
        false_alarms_otherwise(steps // 2, random),
        measurement(
            "guard: alarms while runs start up",
            early,
            unit="",
            reference=f"the first {START_UP_STEPS} steps of {starts + len(KINDS)} runs",
            bar="<= 0",
        ),
    ]


def false_alarms_otherwise(steps: int, random: np.random.Generator) -> Measurement:
    """The rewinds and stops of noise that the rules were not made with, and what was only told."""
    undone, told = dict[str, int](), dict[str, int]()
    for kind in OTHER_KINDS:
        verdicts = [
            finding.verdict for finding in replay_columns(other_columns(kind, steps, random), GuardSection())
        ]
        undone[kind] = sum(isinstance(verdict, Rewind | Stop) for verdict in verdicts)
        told[kind] = len(verdicts) - undone[kind]
    each = ", ".join(f"{kind} {undone[kind]} and {told[kind]} told" for kind in OTHER_KINDS)
    return measurement(
        "guard: false rewinds in 100,000 steps of other noise",
        100_000 * sum(undone.values()) / (steps * len(OTHER_KINDS)),
        unit="",
        reference=f"{steps:,} steps of each: {each}",
        bar="<= 1",
    )


def planted(spikes: int, random: np.random.Generator) -> list[Measurement]:
    delays: list[int] = []
    each = 1000  # steps between two spikes
    for kind in KINDS:
        count = -(-spikes // len(KINDS))
        losses, changed = losses_of(kind, 2000 + each * count, random)
        batches = changed.get("global_batch", np.full(len(losses), 1024.0))
        firsts = [2500 + each * index for index in range(count)]
        for first in firsts:
            losses[first - 1 : first + 19] += 6.0 * SPREAD * np.sqrt(1024.0 / batches[first - 1])
        told = replay_columns(columns_of(losses, changed), GuardSection())
        for first in firsts:
            steps = [one.step for one in told if first <= one.step < first + 20]
            if steps:
                delays.append(min(steps) - first + 1)
    missed = len(KINDS) * -(-spikes // len(KINDS)) - len(delays)
    told_of = f"{missed + len(delays)} spikes of 6 spreads, 20 steps long"
    return [
        measurement("guard: spikes missed", missed, unit="", reference=told_of, bar="<= 0"),
        measurement("guard: delay", float(np.median(delays)), unit="steps", reference="the median of those"),
        measurement("guard: longest delay", max(delays), unit="steps", reference="of those", bar="<= 20"),
    ]


def growth_alarms(steps: int, random: np.random.Generator) -> Measurement:
    """False alarms on the sizes of inner tensors, which grow like powers of the steps, with heavy tails.

    Logits end below the limit at which the guard speaks rightly, and weights below 16 times their first size.
    """
    most = np.array([[0.45], [0.6], [0.3]])  # the powers of logits, hidden states and weights
    guard, every, layers, found, judged = InnerGrowth(), 50, 24, 0, 0
    blank = columns_of(np.full(2, 2.0), {"learning_rate": np.full(2, 1e-4)}).report(1)
    for spread in (0.05, 0.15, 0.3):
        for _ in range(max(1, steps // 10_000)):
            history, powers = guard.fresh(), most * random.random((3, layers))
            for step in range(every, 10_001, every):
                noise = np.exp(spread * np.array([[1.0], [1.0], [0.02]]) * random.standard_t(4, (3, layers)))
                sizes = np.array([[2.0], [3.0], [0.02]]) * step**powers * noise
                by_kind = dict(zip(("logit", "hidden", "weight"), sizes.tolist(), strict=True))
                rate = 1e-4 * min(step / 500, 1.0)
                one = replace(blank, step=step, inner_sizes=by_kind, learning_rate=rate)
                history, verdict = guard.judge(history, one)
                found += isinstance(verdict, Watch)
            judged += 10_000
    reference = f"{judged:,} steps of {layers} blocks, measured every {every}, at three levels of noise"
    alarms = found * 100_000 / judged
    return measurement(
        "guard: growth, false alarms", alarms, unit="/100,000", reference=reference, bar="<= 1"
    )


def cost(steps: int, random: np.random.Generator) -> Measurement:
    """The processor time of judging a report and writing it to the journal."""
    losses, changed = losses_of("normal", steps, random)
    columns = columns_of(losses, changed)
    reports: list[StepReport] = [columns.report(index) for index in range(steps)]
    guards = build_guards(checkpoint=CheckpointSection(), guard=GuardSection())
    with tempfile.TemporaryDirectory() as directory, Journal(Path(directory) / "0-0.jsonl") as journal:
        begun = time.process_time()
        for one in reports:
            guards.judge(one)
            told = one.to_json()
            del told["step"]
            journal.write("step", incarnation=1, step=one.step, **told)
        spent = (time.process_time() - begun) / steps
    reference = f"{spent * 1e6:.0f} us of judging and journalling a step, against a step of {STEP_S} s"
    return measurement("guard: cost", 100 * spent / STEP_S, unit="%", reference=reference, bar="<= 1")


def speed(lines: int, random: np.random.Generator) -> Measurement:
    losses, _ = losses_of("heavy tails", lines, random)
    line = (
        " iteration %8d/  311541 | consumed samples: %12d | elapsed time per iteration (ms): 22000.0 "
        "| learning rate: 1.000E-04 | global batch size:  1024 | lm loss: %.6E | loss scale: 32768.0 "
        "| grad norm: 1.000 | num zeros: 0.0 | number of skipped iterations:   0 "
        "| number of nan iterations:   0 |\n"
    )
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "training.log"
        with path.open("w") as file:
            file.writelines(line % (step, step * 1024, loss) for step, loss in enumerate(losses.tolist(), 1))
        begun = time.perf_counter()
        replay_columns(read_columns(path), GuardSection())
        seconds = time.perf_counter() - begun
        gigabytes = path.stat().st_size / 1e9
    reference = f"{lines:,} lines, {gigabytes:.2f} GB in {seconds:.1f} s"
    return measurement(
        "guard: replay of 1 GB", seconds / gigabytes, unit="s", reference=reference, bar="<= 30"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--steps", type=int, default=100_000, help="stable steps of each kind of noise")
    parser.add_argument("--starts", type=int, default=100, help="runs of which the first steps are judged")
    parser.add_argument("--spikes", type=int, default=1000, help="planted spikes")
    parser.add_argument("--lines", type=int, default=1_000_000, help="lines of the log that is replayed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--size", choices=prevention.SIZES, default="small", help="the model of the switches")
    parser.add_argument("--pairs", type=int, default=25, help="pairs of steps for each switch")
    parser.add_argument("--seconds", type=float, default=240.0, help="begin no more pairs after so long")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is measured")
    options = parser.parse_args()
    random = np.random.default_rng(options.seed)
    parts: dict[str, Callable[[], list[Measurement]]] = {
        "losses": lambda: [
            *real_spike(),
            *false_alarms(options.steps, options.starts, random),
            *planted(options.spikes, random),
        ],
        "growth": lambda: [growth_alarms(options.steps, random)],
        "cost": lambda: [cost(2000, random)],
        "speed": lambda: [speed(options.lines, random)],
        "switches": lambda: prevention.measured(options.size, pairs=options.pairs, seconds=options.seconds),
        "corruption": lambda: [corruption.measured(options.size, rounds=9)],
    }
    return report([row for part in options.parts for row in parts[part]()], as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
