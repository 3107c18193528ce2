"""What layouts cost: two processes of one thread against one process of two, with the same global batch.

All train the same model from the same weights on the same batch; a step is forward, backward, clipping and
AdamW. Steps are interleaved, the order turns, and medians are compared. fp32 where the CPU has no bf16 units.
Pipelines, in fp32 and without an update, are in parallel_pipeline.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from contract import Measurement, measurement, report

ONE, DATA, TENSOR = "one process", "DP 2", "TP 2 + SP"
BARS = {DATA: ">= 0.85", TENSOR: ">= 0.6"}
SHAPES = {
    "small": dict(layers=8, hidden=512, heads=8, ffn=1408, vocabulary=32000, sequence_length=512, samples=8),
    "tiny": dict(layers=2, hidden=64, heads=4, ffn=128, vocabulary=512, sequence_length=64, samples=4),
}
THREADS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 0 when every bar was reached."""
    options = _parse(arguments)
    if options.rank is not None:
        _work(options)
        return 0
    found = [] if options.only == "pipeline" else _speeds(options)
    if options.only in (None, "pipeline"):
        from parallel_pipeline import measurements

        found += measurements(options.shape, options.rounds)
    return report(found, as_json=options.json)


def _speeds(options: argparse.Namespace) -> list[Measurement]:
    with tempfile.TemporaryDirectory() as directory:
        contenders = [_Contender(name, options, Path(directory)) for name in (ONE, DATA, TENSOR)]
        try:
            losses = {one.name: one.ready() for one in contenders}
            times = _rounds(contenders, options.rounds)
        finally:
            for one in contenders:
                one.close()
    return _measurements(times, losses, options)


def _measurements(
    times: dict[str, list[float]], losses: dict[str, float], options: argparse.Namespace
) -> list[Measurement]:
    alone = statistics.median(times[ONE])
    found = []
    for name in (DATA, TENSOR):
        # The same batch and weights: a layout that learns something else would be no contender.
        if abs(losses[name] - losses[ONE]) > 1e-3 * losses[ONE]:
            raise SystemExit(f"{name} has loss {losses[name]}, one process {losses[ONE]}: not the same model")
        seconds = statistics.median(times[name])
        mode = "compiled" if options.compiled else "eager"
        found.append(
            measurement(
                f"parallel: speed of {name}",
                alone / seconds,
                unit="× of one process",
                reference=f"2 processes × 1 thread {seconds:.3g} s/step, 1 × {THREADS} threads {alone:.3g} "
                f"s/step; {options.shape} shape, {mode}, {options.rounds} rounds",
                bar=None if options.shape == "tiny" else BARS[name],
            )
        )
    return found


def _rounds(contenders: list[_Contender], count: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {one.name: [] for one in contenders}
    for number in range(count):
        turn = number % len(contenders)
        for one in (*contenders[turn:], *contenders[:turn]):
            found[one.name].append(one.step())
        shown = ", ".join(f"{name} {times[-1]:.3g}" for name, times in found.items())
        print(f"round {number + 1} of {count}: {shown}", file=sys.stderr, flush=True)
    return found


class _Contender:
    """The ranks of one layout, each in a process that waits between steps."""

    def __init__(self, name: str, options: argparse.Namespace, directory: Path) -> None:
        from bloomery.cli.train import MALLOC

        self.name = name
        world = 1 if name == ONE else 2
        command = [sys.executable, __file__, "--contender", name, "--shape", options.shape]
        command += ["--compiled"] if options.compiled else []
        environment = os.environ | MALLOC
        environment |= {
            "WORLD_SIZE": str(world),
            "OMP_NUM_THREADS": str(THREADS // world),
            "GLOO_SOCKET_IFNAME": "lo",
            "BLOOMERY_RENDEZVOUS_FILE": str(directory / name.replace(" ", "-")),
        }
        self._ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]

    def ready(self) -> float:
        """Wait for the first steps; returns the first loss."""
        first, *_others = [self._read(rank) for rank in self._ranks]
        return float(first["loss"])

    def step(self) -> float:
        """Seconds of one step, of the slower rank."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write("step\n")
            rank.stdin.flush()
        return max(float(self._read(rank)["seconds"]) for rank in self._ranks)

    def close(self) -> None:
        """End the ranks; they have nothing to save."""
        for rank in self._ranks:
            rank.kill()
            rank.communicate()

    def _read(self, rank: subprocess.Popen[str]) -> dict[str, Any]:
        assert rank.stdout is not None
        line = rank.stdout.readline()
        if not line:
            raise SystemExit(f"a rank of {self.name} ended with status {rank.wait()}: its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _work(options: argparse.Namespace) -> None:
    """A rank's life: two steps to warm up, then one for each line that is read."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    from peers_throughput import Shape, bloomery_step, timed

    from bloomery.config.parallel import ParallelSection

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    layout = {ONE: {}, DATA: {"data": 2}, TENSOR: {"tensor": 2, "sequence": True}}[options.contender]
    shape = Shape(**SHAPES[options.shape])
    step = bloomery_step(shape, compiled=options.compiled, parallel=ParallelSection(**layout))
    _, loss = timed(step)
    timed(step)
    print(json.dumps({"loss": loss}), file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps({"seconds": timed(step)[0]}), file=answers, flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--only", choices=("speed", "pipeline"), help="which part (default: both)")
    parser.add_argument("--rounds", type=int, default=6, help="steps of each contender (default 6)")
    parser.add_argument("--shape", choices=SHAPES, default="small", help="'tiny' only shows that it runs")
    parser.add_argument(
        "--compiled", action="store_true", help="compile: one process as a whole, blocks under TP"
    )
    parser.add_argument("--contender", choices=(ONE, DATA, TENSOR), help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
