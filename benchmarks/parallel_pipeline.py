"""What a pipeline costs: its bubble against the timetable's, and its speed against torch's own schedules.

Two ranks of one thread each, 1F1B, forward and backward of the same micro-batches from the same weights. A
pass of m micro-batches takes m slots and the bubble: two lengths give the slot, and so the bubble of the
shorter. Passes of both sides are interleaved, the order turns, and medians are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from contract import Measurement, measurement, report

OURS, PEER = "ours", "torch"
FEW, MANY, STAGES = 2, 8, 2
SHAPES = {
    "small": dict(layers=8, hidden=512, heads=8, ffn=1408, vocabulary=8000, sequence_length=256, samples=1),
    "tiny": dict(layers=2, hidden=64, heads=4, ffn=128, vocabulary=512, sequence_length=64, samples=1),
}
Pass = Callable[[int], float]
"""Forward and backward of so many micro-batches; returns the mean loss, on every rank."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 0 when every bar was reached."""
    options = _parse(arguments)
    if options.rank is not None:
        _work(options)
        return 0
    return report(measurements(options.shape, options.rounds), as_json=options.json)


def measurements(shape: str, rounds: int) -> list[Measurement]:
    """What `parallel.py` prints of pipelines."""
    with tempfile.TemporaryDirectory() as directory:
        sides = {name: _Side(name, shape, Path(directory)) for name in (OURS, PEER)}
        try:
            losses = {name: side.read() for name, side in sides.items()}
            if abs(losses[OURS] - losses[PEER]) > 1e-4 * losses[PEER]:
                raise SystemExit(f"the losses are {losses}: not the same model")
            times = _rounds(sides, rounds)
        finally:
            for side in sides.values():
                side.close()
    medians = {key: statistics.median(found) for key, found in times.items()}
    from bloomery.parallel.pipeline_schedule import bubble_fraction, pipeline_order

    idle = bubble_fraction(pipeline_order("1f1b", pipeline=STAGES, chunks=1, micro_batches=FEW))
    predicted = FEW * idle / (1 - idle)
    slot = {name: (medians[name, MANY] - medians[name, FEW]) / (MANY - FEW) for name in sides}
    bubble = {name: (medians[name, FEW] - FEW * slot[name]) / slot[name] for name in sides}
    told = f"{rounds} rounds, {shape} shape, {STAGES} ranks × 1 thread"
    return [
        measurement(
            "parallel: bubble of 1F1B, measured ÷ predicted",
            bubble[OURS] / predicted,
            unit="×",
            reference=f"{FEW} micro-batches {medians[OURS, FEW]:.3g} s, {MANY} {medians[OURS, MANY]:.3g} s; "
            f"torch's own schedule {bubble[PEER] / predicted:.2f}; {told}",
        ),
        *(
            measurement(
                f"parallel: speed of a pipeline, {count} micro-batches",
                medians[PEER, count] / medians[OURS, count],
                unit="× of torch's",
                reference=f"ours {medians[OURS, count]:.3g} s, torch's Schedule1F1B "
                f"{medians[PEER, count]:.3g} s; {told}",
                bar=None if shape == "tiny" else ">= 0.95",
            )
            for count in (FEW, MANY)
        ),
    ]


def _rounds(sides: dict[str, _Side], rounds: int) -> dict[tuple[str, int], list[float]]:
    times: dict[tuple[str, int], list[float]] = {(name, n): [] for name in sides for n in (FEW, MANY)}
    for number in range(rounds):
        keys = list(times)
        turn = number % len(keys)
        for name, count in (*keys[turn:], *keys[:turn]):
            times[name, count].append(sides[name].passed(count))
        print(f"pipeline round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return times


class _Side:
    """The two ranks of one side, each in a process that waits between passes."""

    def __init__(self, name: str, shape: str, directory: Path) -> None:
        self.name = name
        environment = os.environ | {
            "WORLD_SIZE": str(STAGES),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "BLOOMERY_RENDEZVOUS_FILE": str(directory / name),
        }
        command = [sys.executable, __file__, "--side", name, "--shape", shape]
        self._ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(STAGES)
        ]

    def read(self) -> float:
        """The largest of what the ranks answer."""
        return max(self._answer(rank) for rank in self._ranks)

    def passed(self, micro_batches: int) -> float:
        """Seconds of one pass, of the slower rank."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{micro_batches}\n")
            rank.stdin.flush()
        return self.read()

    def close(self) -> None:
        """End the ranks; they have nothing to save."""
        for rank in self._ranks:
            rank.kill()
            rank.communicate()

    def _answer(self, rank: subprocess.Popen[str]) -> float:
        assert rank.stdout is not None
        line = rank.stdout.readline()
        if not line:
            raise SystemExit(f"a rank of {self.name} ended with status {rank.wait()}: its error is above")
        return float(json.loads(line))


def _work(options: argparse.Namespace) -> None:
    """A rank's life: both lengths once, then a pass for each line that is read."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    from peers_throughput import Shape, timed

    torch.set_num_threads(1)
    shape = Shape(**SHAPES[options.shape])
    run = (_ours if options.side == OURS else _peer)(shape, options.rank)
    loss = run(FEW)
    run(MANY)
    print(json.dumps(loss), file=answers, flush=True)
    for line in sys.stdin:
        count = int(line)
        print(json.dumps(timed(lambda count=count: torch.tensor(run(count)))[0]), file=answers, flush=True)


def _ours(shape: Any, rank: int) -> Pass:
    import torch
    from peers_throughput import section_of

    from bloomery.config.optim import LossSection, OptimSection
    from bloomery.config.parallel import ParallelSection
    from bloomery.data_loader.batches import MicroBatch
    from bloomery.parallel.build import build_training_model
    from bloomery.parallel.mesh import join_mesh

    parallel = ParallelSection(pipeline=STAGES)
    mesh = join_mesh(parallel)
    model = build_training_model(
        section_of(shape),
        parallel=parallel,
        vocabulary=shape.vocabulary,
        sequence_length=shape.sequence_length,
        optim=OptimSection(learning_rate=1e-3),
        loss=LossSection(),
        loss_chunk=1024,
        seed=0,
        mesh=mesh,
        compiled=False,
    )
    model.initialise(seed=0, bigrams=lambda: torch.empty(0))
    batches = [
        MicroBatch(tokens=text[:, :-1], targets=text[:, 1:], documents=None, samples=torch.arange(len(text)))
        for text in _texts(shape)
    ]

    def run(count: int) -> float:
        tokens = count * batches[0].tokens.numel()
        sums, _ = model.accumulate(batches[:count], 0, weight=1 / tokens)
        return float(sums) / tokens

    return run


def _peer(shape: Any, rank: int) -> Pass:
    """The same decoder's stages under torch.distributed.pipelining."""
    import torch
    from peers_throughput import section_of
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from bloomery.config.parallel import ParallelSection
    from bloomery.model.decoder import build
    from bloomery.model.initial_filling import initialise
    from bloomery.parallel.mesh import join_mesh
    from bloomery.plan.pipeline_stages import stages_of

    parallel, section, length = ParallelSection(pipeline=STAGES), section_of(shape), shape.sequence_length
    join_mesh(parallel)
    own = stages_of(section, parallel, vocabulary=shape.vocabulary, sequence_length=length)[rank]
    decoder = build(section, vocabulary=shape.vocabulary, sequence_length=length, blocks=own.blocks)
    initialise(decoder, seed=0)
    texts = _texts(shape)
    nothing = torch.zeros(shape.samples, length, dtype=torch.int64)

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = decoder

        def forward(self, x: Any) -> Any:
            if own.embeds:
                return decoder(x, blocks=own.blocks)
            return decoder(nothing.to(x.device), hidden=x, blocks=own.blocks)

    def loss_of(hidden: Any, targets: Any) -> Any:
        return decoder.loss(hidden, targets).total / targets.numel()

    schedules = {
        count: Schedule1F1B(
            PipelineStage(Module(), rank, STAGES, torch.device("cpu")), count, loss_fn=loss_of
        )
        for count in (FEW, MANY)
    }

    def run(count: int) -> float:
        decoder.zero_grad(set_to_none=True)
        whole, losses = torch.cat(texts[:count]), list[Any]()
        if own.embeds:
            schedules[count].step(whole[:, :-1])
            return 0.0
        schedules[count].step(target=whole[:, 1:], losses=losses)
        return float(torch.stack(losses).detach().mean())

    return run


def _texts(shape: Any) -> list[Any]:
    import torch

    generator = torch.Generator().manual_seed(1)
    size = (shape.samples, shape.sequence_length + 1)
    return [torch.randint(0, shape.vocabulary, size, generator=generator) for _ in range(MANY)]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--rounds", type=int, default=6, help="passes of each kind (default 6)")
    parser.add_argument("--shape", choices=SHAPES, default="small", help="'tiny' only shows that it runs")
    parser.add_argument("--side", choices=(OURS, PEER), help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
