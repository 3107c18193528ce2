"""What a rank holds at the worst moment of a step, counted, against what `bloomery plan` says of the layout.

Counted: bytes of all tensors that are alive at once, seen by a dispatch mode from before the model is built
to the end of the second step; a kernel's own scratch is not among them. One small model in fp32, eager, one
layout after another, each rank in a process of its own.
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
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from contract import Measurement, measurement, report

BAR = 10.0
RECIPE = """
[run]
name = "memory"
[model]
layers = 4
hidden = 256
heads = 8
ffn = 704
vocabulary = 4096
[data]
datasets = [{ name = "none", path = "none" }]
sequence_length = 256
tokenizer = "none"
[train]
steps = 10
global_batch = 16
micro_batch = 2
precision = "fp32"
loss_chunk = 256
compile = "off"
[optim]
learning_rate = 1e-3
"""
LONG = "data.sequence_length=768"
"""So that masks, which grow with its square, are not lost beside the rest."""
LAYOUTS: dict[str, tuple[str, ...]] = {
    "one process": (),
    "DP 2": ("parallel.data=2",),
    "ZeRO 1, DP 2": ("parallel.data=2", "parallel.zero=1"),
    "ZeRO 2, DP 2": ("parallel.data=2", "parallel.zero=2"),
    "ZeRO 3, DP 2": ("parallel.data=2", "parallel.zero=3"),
    "TP 2 + SP": ("parallel.tensor=2", "parallel.sequence=true"),
    "PP 2": ("parallel.pipeline=2",),
    "recompute full": ("train.recompute=full",),
    "hidden dropout": (LONG, "model.hidden_dropout=0.1"),
    "attention dropout": (LONG, "model.attention_dropout=0.1"),
    "attention dropout, recompute selective": (
        LONG,
        "model.attention_dropout=0.1",
        "train.recompute=selective",
    ),
    "ALiBi": (LONG, "model.position=alibi"),
    "documents masked": (LONG, "data.mask_documents=true"),
    "documents masked, ALiBi, dropout": (
        LONG,
        "data.mask_documents=true",
        "model.position=alibi",
        "model.hidden_dropout=0.1",
        "model.attention_dropout=0.1",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 0 when every bar was reached."""
    options = _parse(arguments)
    if options.rank is not None:
        _work(LAYOUTS[options.layout])
        return 0
    found: list[Measurement] = []
    with tempfile.TemporaryDirectory() as directory:
        recipe = Path(directory) / "memory.toml"
        recipe.write_text(RECIPE)
        for name in options.only or LAYOUTS:
            counted = _counted(name, Path(directory))
            stages = _planned(recipe, LAYOUTS[name], len(counted))
            for stage, planned in enumerate(stages):
                # Ranks of a stage hold alike; the plan's reserve is the driver's, not tensors.
                measured = max(counted[len(counted) // len(stages) * stage :][: len(counted) // len(stages)])
                own = planned["total"] - planned["reserved"]
                where = f"{name}, stage {stage}" if len(stages) > 1 else name
                found.append(
                    measurement(
                        f"parallel_memory: {where}, off by",
                        100 * abs(own / measured - 1),
                        unit="%",
                        reference=f"planned {own / 2**20:.1f} MiB, counted {measured / 2**20:.1f} MiB",
                        bar=f"<= {BAR}",
                    )
                )
    return report(found, as_json=options.json)


def _planned(recipe: Path, layout: Sequence[str], ranks: int) -> list[dict[str, int]]:
    command = [sys.executable, "-m", "bloomery", "plan", str(recipe), *layout]
    command += ["--gpus", str(ranks), "--hardware", "h100-80g", "--json"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    if told.returncode:
        raise SystemExit(told.stderr)
    stages: list[dict[str, int]] = json.loads(told.stdout)["memory"]["stages"]
    return stages


def _counted(name: str, directory: Path) -> list[int]:
    """Peak bytes of each rank."""
    degrees = [
        int(one.partition("=")[2]) for one in LAYOUTS[name] if "parallel." in one and one[-1].isdigit()
    ]
    world = 2 if any(degree == 2 for degree in degrees) else 1
    environment = os.environ | {
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "BLOOMERY_RENDEZVOUS_FILE": str(directory / name.replace(" ", "-")),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--layout", name, "--rank", str(rank)],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    answers = [rank.communicate(timeout=600)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"a rank of {name} failed: its error is above")
    return [int(json.loads(answer.splitlines()[-1])["peak"]) for answer in answers]


def _work(layout: Sequence[str]) -> None:
    """A rank's life: build the model, train two steps, tell the peak."""
    import torch

    from bloomery.config.load import parse_recipe
    from bloomery.data_loader.batches import MicroBatch
    from bloomery.parallel.build import build_training_model
    from bloomery.parallel.mesh import join_mesh
    from bloomery.parallel.optimizers import Optimizers
    from bloomery.plan.schedule import phase_at
    from bloomery.train.state import Goal, TrainState
    from bloomery.train.step import StepParts, train_step

    recipe = parse_recipe(RECIPE, layout, label="memory").recipe
    mesh = join_mesh(recipe.parallel)
    length, phase = recipe.data.sequence_length, phase_at(recipe.train, 0)
    with _live_bytes()() as counting:
        model = build_training_model(
            recipe.model,
            vocabulary=int(recipe.model.vocabulary),
            sequence_length=length,
            optim=recipe.optim,
            loss=recipe.loss,
            loss_chunk=recipe.train.loss_chunk,
            seed=0,
            mesh=mesh,
            parallel=recipe.parallel,
            compiled=False,
        )
        model.initialise(seed=0, bigrams=lambda: torch.empty(0))
        model.set_phase(precision="fp32", recompute=phase.recompute)
        start = counting.peak
        parts = StepParts(
            phase=phase,
            model=model,
            optimizers=Optimizers(model.weights, recipe.optim),
            loss_scale=None,
            clip=lambda state: recipe.optim.clip,
            sequence_length=length,
            learning_rate=lambda _state: 1e-3,
            wait_staged=lambda: None,
        )
        mine = phase.global_batch // mesh.data.degree
        tokens = torch.arange(mine * length).view(mine, length) % int(recipe.model.vocabulary)
        batches = [
            MicroBatch(
                tokens=part,
                targets=part,
                documents=(part // 100).int() if recipe.data.mask_documents else None,
                samples=torch.arange(len(part)),
            )
            for part in tokens.split(phase.micro_batch)
        ]
        state = TrainState(goal=Goal(steps=2))
        for _ in range(2):
            train_step(parts, batches, state)
    print(json.dumps({"peak": counting.peak, "start": start}))


def _live_bytes() -> Any:  # Any: a class that torch must be loaded for
    import torch
    from torch import Tensor
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    def _bytes_of(weak: StorageWeakRef) -> int | None:
        """What the storage takes now; None once it is gone."""
        storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
        return None if storage is None else storage.nbytes()

    class LiveBytes(TorchDispatchMode):
        """Keeps the largest sum of bytes that were alive after any operation."""

        def __init__(self) -> None:
            super().__init__()
            self.peak = 0
            self._live: dict[int, StorageWeakRef] = {}

        def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
            result = operation(*arguments, **(keywords or {}))
            for one in tree_iter(result):
                if isinstance(one, Tensor) and one.device.type != "meta":
                    storage = one.untyped_storage()
                    self._live[storage._cdata] = StorageWeakRef(storage)
            # As large as they are now: sharded weights are emptied without being dropped.
            sizes = {key: _bytes_of(weak) for key, weak in self._live.items()}
            self._live = {key: weak for key, weak in self._live.items() if sizes[key] is not None}
            self.peak = max(self.peak, sum(size for size in sizes.values() if size))
            return result

    return LiveBytes


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--only", nargs="*", choices=LAYOUTS, help="these layouts (default: all)")
    parser.add_argument("--layout", choices=LAYOUTS, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
