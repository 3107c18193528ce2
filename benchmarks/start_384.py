"""How long a start on 384 ranks, in the layout of BLOOM-176B, takes, as far as one machine can tell.

The meeting is real: a store in a process of its own, and as many clients as there are ranks, threads of a few
processes, each with a connection. All run `rendezvous` with the whole recipe, and every call of the store is
counted. The rest is what the host does for one rank of a fake world that exchanges nothing: process groups,
its part of the model, and its first step, eager, on the device 'meta', so without a kernel's time, without
compiling and without connecting. Nothing is dropped there: hashing dropout masks is a kernel's work.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from contract import Measurement, measurement, report

RECIPE, WORLD, PROCESSES = "tr11-176b", 384, 4
MEETING_BAR_S = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 0 when every bar was reached."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--ranks", type=int, default=WORLD, help="of the meeting")
    parser.add_argument("--setting", action="append", default=[], help="a setting of the recipe, key=value")
    parser.add_argument("--world", type=int, default=WORLD, help="of the rank that makes a step")
    parser.add_argument("--meet", nargs=3, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.meet:
        print(json.dumps(_meet(*options.meet, world=options.ranks)))
        return 0
    found = _meeting(options.ranks) + _first_step(options.world, options.setting)
    return report(found, as_json=options.json)


def _meeting(ranks: int) -> list[Measurement]:
    """Have all ranks meet in one store, once all have a connection."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, __file__, "--ranks", str(ranks), "--meet", str(store.port)]
    bounds = [ranks * index // PROCESSES for index in range(PROCESSES + 1)]
    processes = [
        subprocess.Popen(
            [*command, str(first), str(stop)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for first, stop in pairwise(bounds)
        if stop > first
    ]
    connecting = [json.loads(process.stdout.readline()) for process in processes if process.stdout]
    begun = time.time()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("meet\n")
        process.stdin.flush()
    answers = [json.loads(process.communicate()[0]) for process in processes]
    calls: Counter[str] = sum((Counter(one["calls"]) for one in answers), Counter())
    of_first = answers[0]["of_first"]
    told = ", ".join(f"{name} {count:,}" for name, count in sorted(calls.items()))
    size = answers[0]["introduction_bytes"]
    return [
        measurement(
            f"start: {ranks} ranks meet in one store",
            max(one["ended"] for one in answers) - begun,
            unit="s",
            reference=f"to the last one's welcome; introductions of {size:,} bytes; threads of "
            f"{len(processes)} processes; all were connected after {max(connecting):.2g} s",
            bar=f"<= {MEETING_BAR_S}",
        ),
        measurement(
            "start: calls of the store, all ranks",
            calls.total(),
            unit="",
            reference=f"{told}; of these rank 0 {of_first:,}, "
            f"another rank {(calls.total() - of_first) / (ranks - 1):.1f}",
        ),
    ]


class _CountingStore:
    """A store that counts the calls of its methods."""

    def __init__(self, store: Any) -> None:
        self._store, self.calls = store, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*arguments: Any) -> Any:
            self.calls[name] += 1
            return method(*arguments)

        return call


def _meet(port: int, first: int, stop: int, *, world: int) -> dict[str, Any]:
    """Connect ranks `first` to `stop`, tell how long that took, and run their rendezvous when told to."""
    from torch.distributed import TCPStore

    from bloomery.config.convert import settings_of
    from bloomery.config.load import load_recipe
    from bloomery.parallel.rendezvous import Introduction, rendezvous

    recipe = settings_of(load_recipe(RECIPE).recipe)
    begun = time.time()
    with ThreadPoolExecutor(stop - first) as pool:
        clients = pool.map(lambda _: TCPStore("127.0.0.1", port, is_master=False), range(first, stop))
        stores = {rank: _CountingStore(client) for rank, client in enumerate(clients, start=first)}
    print(json.dumps(time.time() - begun), flush=True)
    sys.stdin.readline()

    def one(rank: int) -> None:
        own = Introduction(host=f"node-{rank // 8}", machine=str(rank // 8), recipe=recipe)
        rendezvous(stores[rank], own, rank=rank, world=world, check=lambda ranks: None)  # type: ignore[arg-type]

    threads = [threading.Thread(target=one, args=(rank,)) for rank in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {
        "ended": time.time(),
        "calls": sum((store.calls for store in stores.values()), Counter()),
        "of_first": stores[0].calls.total() if first == 0 else 0,
        "introduction_bytes": len(json.dumps(recipe)),
    }


def _first_step(world: int, settings: Sequence[str]) -> list[Measurement]:
    """Build one rank of a fake world, of a middle stage, and make its first step."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from bloomery.config.load import load_recipe
    from bloomery.data_loader.batches import MicroBatch
    from bloomery.parallel.build import build_training_model
    from bloomery.parallel.mesh import mesh_of
    from bloomery.parallel.optimizers import Optimizers
    from bloomery.plan.ranks import degrees_of
    from bloomery.plan.schedule import phases
    from bloomery.train.state import Goal, TrainState
    from bloomery.train.step import StepParts, train_step

    recipe = load_recipe(
        RECIPE, ["model.attention_dropout=0.0", "model.hidden_dropout=0.0", *settings]
    ).recipe
    degrees = degrees_of(recipe.parallel, world=world)
    assert degrees is not None and isinstance(recipe.model.vocabulary, int)
    phase, length = phases(recipe.train)[0][1], recipe.data.sequence_length
    times = [time.perf_counter()]
    rank = degrees.rank_at(pipeline=degrees.pipeline // 2, data=0, tensor=0)
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    mesh = mesh_of(
        degrees,
        rank=rank,
        device=torch.device("meta"),
        chunks=recipe.parallel.chunks,
        schedule=recipe.parallel.schedule,
        ties_embedding=recipe.model.tied,
    )
    times.append(time.perf_counter())
    model = build_training_model(
        recipe.model,
        vocabulary=recipe.model.vocabulary,
        sequence_length=length,
        optim=recipe.optim,
        loss=recipe.loss,
        loss_chunk=recipe.train.loss_chunk,
        seed=recipe.run.seed,
        mesh=mesh,
        parallel=recipe.parallel,
        compiled=False,
    )
    optimizers = Optimizers(model.weights, recipe.optim)
    model.set_phase(precision=phase.precision, recompute=phase.recompute)
    times.append(time.perf_counter())
    tokens = torch.empty(phase.micro_batch, length, dtype=torch.int64, device="meta")
    samples = torch.empty(phase.micro_batch, dtype=torch.int64, device="meta")
    micro_batch = MicroBatch(tokens=tokens, targets=tokens, documents=None, samples=samples)
    parts = StepParts(
        phase=phase,
        model=model,
        optimizers=optimizers,
        loss_scale=None,
        clip=lambda state: recipe.optim.clip,
        sequence_length=length,
        learning_rate=lambda state: recipe.optim.learning_rate,
        wait_staged=lambda: None,
    )
    count = phase.global_batch // (phase.micro_batch * degrees.data)
    for _ in range(2):
        train_step(parts, [micro_batch] * count, TrainState(goal=Goal(steps=10)))
        times.append(time.perf_counter())
    groups, building, first, second = (later - sooner for sooner, later in pairwise(times))
    dist.destroy_process_group()
    where = f"{RECIPE}, {world} ranks, a middle stage"
    return [
        measurement(
            "start: process groups of one rank",
            groups,
            unit="s",
            reference=f"{where}; one by one, as on CPUs; GPUs split a communicator once for all of an axis",
        ),
        measurement("start: part of the model and optimizer", building, unit="s", reference=where),
        measurement(
            "start: the host's work for the first step",
            first,
            unit="s",
            reference=f"{count} micro-batches of {phase.micro_batch}, on 'meta'; the second {second:.3g} s",
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
