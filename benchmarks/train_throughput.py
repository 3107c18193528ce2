"""Our training step against others', and against the matmul peak, measured in turns in one run.

Two heats: in one the others run as shipped, in the other in the environment that `bloomery train` gives
itself. Each contender lives in its own process, and only one works at a time. A ratio is the median over
rounds of two steps that were timed within one round, so that a machine that slows down slows both.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from types import TracebackType
from typing import Any

from contract import Measurement, measurement, report

from bloomery.cli.train import MALLOC

OURS, PEAK = "bloomery", "matmul"
PEERS = ("minimal", "transformers-eager", "transformers-compiled", "litgpt-compiled")
AS_SHIPPED, OUR_ENVIRONMENT = "as shipped", "with our environment"
BARS = {AS_SHIPPED: ">= 1.3", OUR_ENVIRONMENT: ">= 1.0"}
PEAK_BAR = ">= 25"
SHAPES = {
    # ffn makes a gated MLP cost what a plain one of 4 × hidden costs, to 0.7 %.
    "small": dict(layers=8, hidden=512, heads=8, ffn=1376, vocabulary=32_000, sequence_length=512, samples=8),
    "tiny": dict(layers=1, hidden=32, heads=2, ffn=88, vocabulary=128, sequence_length=16, samples=2),
}
INSTALL_LITGPT = "pip install -e '.[bench]' && pip install --no-deps litgpt"
WARMING_AT_ONCE = 2
"""Compiling is mostly one thread's work, so two warm up together; afterwards only one works at a time."""

Rounds = Mapping[str, Sequence[float]]
"""Seconds of a step, for the peak FLOP/s, by contender, one for each round."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    if options.worker:
        _work(options.worker, options)
        return 0
    peers = [name for name in PEERS if name in options.contenders]
    missing = _missing(peers)
    for name, remedy in missing.items():
        print(f"{name} is not installed and not compared. To compare with it: {remedy}", file=sys.stderr)
    peers = [name for name in peers if name not in missing]
    with ExitStack() as stack:
        ours, peak = stack.enter_context(_Crew(_Worker(name, options, MALLOC) for name in (OURS, PEAK)))
        heats = {}
        for heat, environment in ((AS_SHIPPED, {}), (OUR_ENVIRONMENT, MALLOC)):
            with _Crew(_Worker(name, options, environment) for name in peers) as others:
                heats[heat] = _rounds([ours, peak, *others], count=options.rounds)
        facts = Facts(**ours.facts, missing=missing)
    return report(measurements(heats, facts), as_json=options.json)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was compared."""

    device: str
    precision: str
    compiled: bool
    flops: int
    tokens: int
    threads: int
    missing: Mapping[str, str]

    def __str__(self) -> str:
        without = "".join(f"; without {name}, which is not installed" for name in self.missing)
        return (
            f"{self.precision} for all on {self.device} with {self.threads} threads, "
            f"{self.tokens} tokens a step, {self.flops / self.tokens / 1e6:.0f} MFLOP a token, "
            f"head and embedding untied{'' if self.compiled else ', nothing compiled'}{without}"
        )


def measurements(heats: Mapping[str, Rounds], facts: Facts) -> list[Measurement]:
    """Every ratio, its bar and what stood beside it. heats: rounds by the environment of the others."""
    found, shares, speeds = [], [], []
    for heat, rounds in heats.items():
        peers = {name: times for name, times in rounds.items() if name not in (OURS, PEAK)}
        table = ", ".join(f"{name} {median(rounds[name]):.3g}" for name in (OURS, *peers))
        ratios = {name: _paired(times, rounds[OURS]) for name, times in peers.items()}
        for name, ratio in ratios.items():
            title = f"train_throughput: against {name}, {heat}"
            found.append(measurement(title, ratio, unit="x", reference=str(facts)))
        if ratios:
            best = min(ratios, key=lambda name: ratios[name])
            single = [theirs / ours for theirs, ours in zip(rounds[best], rounds[OURS], strict=True)]
            spread = f"single rounds {min(single):.2f} to {max(single):.2f}"
            medians = median(rounds[best]) / median(rounds[OURS])
            found.append(
                measurement(
                    f"train_throughput: against the best {heat}",
                    ratios[best],
                    unit="x",
                    reference=f"best: {best} ({spread}, ratio of medians {medians:.2f}); "
                    f"seconds a step: {table}; {facts}",
                    bar=BARS[heat],
                )
            )
        pairs = zip(rounds[OURS], rounds[PEAK], strict=True)
        shares += [100 * facts.flops / seconds / peak for seconds, peak in pairs]
        speeds += [facts.tokens / seconds for seconds in rounds[OURS]]
    peaks = [peak for rounds in heats.values() for peak in rounds[PEAK]]
    reference = f"matmul peak {median(peaks) / 1e12:.3g} TFLOP/s (stretch 30 %); {facts}"
    found.append(
        measurement(
            "train_throughput: share of the matmul peak",
            median(shares),
            unit="%",
            reference=reference,
            bar=PEAK_BAR,
        )
    )
    found.append(
        measurement("train_throughput: tokens a second", median(speeds), unit="tokens/s", reference=reference)
    )
    return found


def _paired(slower: Sequence[float], faster: Sequence[float]) -> float:
    return median(theirs / ours for theirs, ours in zip(slower, faster, strict=True))


def _rounds(workers: Sequence[_Worker], *, count: int) -> Rounds:
    """Let each work once a round. The order turns, so that nobody always follows the same neighbour."""
    found: dict[str, list[float]] = {worker.name: [] for worker in workers}
    for number in range(count):
        turn = number % len(workers)
        for worker in (*workers[turn:], *workers[:turn]):
            found[worker.name].append(worker.step())
        shown = ", ".join(f"{name} {times[-1]:.3g}" for name, times in found.items())
        print(f"round {number + 1} of {count}: {shown}", file=sys.stderr, flush=True)
    return found


class _Worker:
    """One contender's process. It starts when made; wait until it is ready before the first step."""

    def __init__(self, name: str, options: argparse.Namespace, environment: Mapping[str, str]) -> None:
        self.name = name
        self.facts: dict[str, Any] = {}
        self._first_loss = float("nan")
        self._command = [sys.executable, __file__, "--worker", name, "--shape", options.shape]
        shipped = {key: value for key, value in os.environ.items() if key not in MALLOC}
        self._environment = shipped | dict(environment)
        self._process: subprocess.Popen[str] | None = None

    def warm_up(self) -> None:
        """Start it, and wait until it has compiled and made its first steps."""
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        ready = self._read()
        self.facts, self._first_loss = ready["facts"], ready["loss"]
        print(f"{self.name}: ready after {ready['seconds']:.0f} s", file=sys.stderr, flush=True)

    def step(self) -> float:
        """Seconds of one step; of the peak, FLOP/s."""
        process = self._process
        assert process is not None and process.stdin is not None
        process.stdin.write("step\n")
        process.stdin.flush()
        answer = self._read()
        if self.name != PEAK and not answer["loss"] < self._first_loss:
            raise SystemExit(f"{self.name} did not learn: loss {self._first_loss} → {answer['loss']}")
        return float(answer["value"])

    def close(self) -> None:
        """End the process; it has nothing to save."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with status {self._process.wait()}: its error is above")
        return json.loads(line)


class _Crew:
    """Workers that warm up together and end together."""

    def __init__(self, workers: Iterable[_Worker]) -> None:
        self._workers = list(workers)

    def __enter__(self) -> list[_Worker]:
        try:
            with ThreadPoolExecutor(WARMING_AT_ONCE) as pool:
                list(pool.map(_Worker.warm_up, self._workers))
        except BaseException:
            self._close()
            raise
        return self._workers

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        for worker in self._workers:
            worker.close()


def _work(name: str, options: argparse.Namespace) -> None:
    """A worker's life: warm up, then one step for each line that is read."""
    # Libraries print to standard output; the parent must read our answers alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import time

    import torch
    from peers_throughput import Shape, build_step, device, flops_of_step, matmul_peak, precision, timed

    started = time.perf_counter()
    shape, compiled = Shape(**SHAPES[options.shape]), options.shape != "tiny"
    facts = {
        "device": torch.cuda.get_device_name() if device().type == "cuda" else "CPU",
        "precision": precision(),
        "compiled": compiled,
        "flops": flops_of_step(shape),
        "tokens": shape.tokens,
        "threads": torch.get_num_threads(),
    }
    if name == PEAK:
        first, measure = 0.0, lambda: (matmul_peak(), 0.0)
    else:
        step = build_step(name, shape, compiled=compiled)
        first, measure = timed(step)[1], lambda: timed(step)
    measure()
    ready = {"facts": facts, "loss": first, "seconds": time.perf_counter() - started}
    print(json.dumps(ready), file=answers, flush=True)
    for _ in sys.stdin:
        value, loss = measure()
        print(json.dumps({"value": value, "loss": loss}), file=answers, flush=True)


def _missing(peers: Sequence[str]) -> dict[str, str]:
    """Peers that are not installed, each with how to install it."""
    needed = {"litgpt-compiled": ("litgpt", "lightning", "jsonargparse", "psutil", "yaml")}
    return {
        name: INSTALL_LITGPT
        for name in peers
        if any(importlib.util.find_spec(module) is None for module in needed.get(name, ()))
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument(
        "--rounds", type=int, default=4, help="steps of each contender in each heat (default 4)"
    )
    parser.add_argument(
        "--shape",
        choices=SHAPES,
        default="small",
        help="'tiny' only shows that it runs, and compiles nothing",
    )
    parser.add_argument(
        "--contenders", nargs="+", choices=PEERS, default=list(PEERS), help="against whom (default: all)"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
