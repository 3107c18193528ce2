"""Host memory that training between peers takes of a peer, counted, by parameter.

The outer optimizer runs in a process of its own at two sizes, with an int8 ring of two; the difference is
what each parameter takes, without buffers of bounded size. Copies for newcomers are files in memory.
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

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from contract import Measurement, measurement, report
from tests.checkpoint.small_run import Moments, Run, Weights

from bloomery.config.checkpoint import CheckpointSection
from bloomery.events.run_directory import RunDirectory
from bloomery.train.checkpoint_store import Store
from bloomery.train.saved_state import RunStateToSave

PEER_MEMORY = Path(__file__).parents[1] / "tests" / "diloco" / "peer_memory.py"
SIZES = (8_000_000, 40_000_000)
RETURN_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args(arguments)
    return report([*outer_optimizer(), *copies()], as_json=chosen.json)


def outer_optimizer() -> list[Measurement]:
    """What is kept between rounds, and the most while a round is made."""
    seen = []
    for elements in SIZES:
        ended = subprocess.run(
            [sys.executable, str(PEER_MEMORY), str(elements), "int8"],
            env=os.environ | RETURN_AT_ONCE,
            check=True,
            capture_output=True,
            text=True,
        )
        seen.append(json.loads(ended.stdout))
    each = {what: (seen[1][what] - seen[0][what]) / (SIZES[1] - SIZES[0]) for what in seen[0]}
    beside = f"resident memory, {SIZES[1]:,} against {SIZES[0]:,} parameters, int8, ring of two"
    return [
        measurement(
            "elastic_memory: kept for a parameter between rounds",
            round(each["kept"], 2),  # resident memory is counted in pages
            unit="bytes",
            reference=beside,
            bar="<= 8",
        ),
        measurement(
            "elastic_memory: for a parameter while a round is made",
            each["peak"],
            unit="bytes",
            reference=f"{beside}; the average itself takes {each['average']:.2f}",
            bar="<= 10",
        ),
    ]


def copies() -> list[Measurement]:
    """Memory files without a newcomer, with one, and after it."""
    weights, moments = Weights(rows=2048, width=512), Moments(size=1 << 20)
    run = Run()
    run.parts = {"model": weights, "optim": moments}
    tensors = [*weights.tensors.values(), moments.flat]
    state = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    with tempfile.TemporaryDirectory() as place:
        memory = Path(place) / "memory"
        section = CheckpointSection(background="off", memory_directory=str(memory))
        store = Store(RunDirectory(Path(place) / "run"), section)
        store.restore(run.parts)
        before = _bytes_of(memory)
        directory = store.copy_for_peers(RunStateToSave(run.parts, step=1))
        assert directory is not None
        meanwhile = _bytes_of(memory)
        store.remove_copy(directory)
        after = _bytes_of(memory)
        store.close()
    return [
        measurement(
            "elastic_memory: copies of the state while nobody wants one, before and after a newcomer",
            (before + after) / state,
            unit="states",
            reference="files in memory",
            bar="<= 0",
        ),
        measurement(
            "elastic_memory: copies of the state while a newcomer fetches",
            meanwhile / state,
            unit="states",
            reference=f"a state of {state / 1e6:.1f} MB, its manifest and index are counted too",
            bar="<= 1.05",
        ),
    ]


def _bytes_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


if __name__ == "__main__":
    sys.exit(main())
