"""Whether this version trains what another one trained: five runs by both, compared bit by bit.

Alone, TP 2 × PP 2, ZeRO 1 × DP 2, bf16 with Muon, and two peers with int8: 15 steps each (12 between peers),
one thread a rank, on the corpus of `tests/recorded`. Compared are the losses and gradient norms of all steps
and the tensors of all checkpoints; each ratio has to be 1. Tensors that only this version has are named.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from contract import Measurement, measurement, report

RECORDED = Path(__file__).parents[1] / "tests" / "recorded" / "runs-of-6af57c4.tar.xz"
RUNS = {
    "alone": (),
    "TP 2 × PP 2": ("--nproc", "4", "parallel.tensor=2", "parallel.pipeline=2"),
    "ZeRO 1 × DP 2": ("--nproc", "2", "parallel.zero=1"),
    "bf16 with Muon": ("train.precision=bf16", "optim.name=muon", "model.tied=false"),
}
PEERS = (
    "elastic.inner_steps=3", "elastic.codec=int8", "elastic.peers=2", "elastic.minimum_peers=2",
    "elastic.listen=127.0.0.1:0", "train.ramp_up=[]", "train.samples=192",
)  # fmt: skip
START_S, END_S = 60.0, 600.0
Tensors = dict[tuple[str, str, str], tuple[str, list[int], bytes]]
"""Type, shape and bytes by checkpoint, file and name."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("other", metavar="PYTHON", help="the Python of the other version's environment")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    options = parser.parse_args(arguments)
    found: list[Measurement] = []
    with TemporaryDirectory(prefix="bloomery-benchmark-") as directory:
        for name, settings in RUNS.items():
            runs = [
                _trained(Path(directory) / name / which, python, settings)
                for which, python in (("this", sys.executable), ("other", options.other))
            ]
            found += _compared(name, *runs)
        both = [
            _peers(Path(directory) / "peers" / which, python)
            for which, python in (("this", sys.executable), ("other", options.other))
        ]
        for peer in "ab":
            found += _compared(f"two peers with int8, {peer}", *(place / peer for place in both))
    return report(found, as_json=options.json)


def _trained(place: Path, python: str, settings: Sequence[str]) -> Path:
    _laid_out(place)
    _ended(_begun(place, python, "train", "tiny.toml", "--run", "run", "--plain", *settings), place)
    return place / "run"


def _peers(place: Path, python: str) -> Path:
    _laid_out(place)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    etcd = _begun(place, python, "coordinate", "--data", "coordinator", "--listen", f"127.0.0.1:{port}")
    try:
        _until_open(port)
        given = ("peer", "tiny.toml", "--plain", *PEERS, f"elastic.coordinator=http://127.0.0.1:{port}")
        peers = [_begun(place, python, *given, "--run", name, f"elastic.peer={name}") for name in "ab"]
        for peer in peers:
            _ended(peer, place)
    finally:
        etcd.terminate()
        etcd.wait(END_S)
    return place


def _laid_out(place: Path) -> None:
    place.mkdir(parents=True)
    with tarfile.open(RECORDED) as archive:
        archive.extractall(place, filter="data")
    shutil.rmtree(place / "runs")


def _begun(place: Path, python: str, *words: str) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BLOOMERY_")}
    with (place / "output.log").open("ab") as output:
        return subprocess.Popen(
            [python, "-m", "bloomery", *words], cwd=place, stdout=output, stderr=subprocess.STDOUT,
            env=environment | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def _ended(process: subprocess.Popen[bytes], place: Path) -> None:
    if process.wait(END_S):
        raise SystemExit(
            f"{' '.join(map(str, process.args))} failed:\n{(place / 'output.log').read_text()[-2000:]}"
        )


def _until_open(port: int) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                return
        if time.monotonic() > deadline:
            raise SystemExit(f"no coordinator listens on port {port}")
        time.sleep(0.2)


def _compared(name: str, ours: Path, theirs: Path) -> Iterator[Measurement]:
    steps, expected = _steps(ours), _steps(theirs)
    equal = sum(steps.get(step) == told for step, told in expected.items())
    reference = f"{equal} of {len(expected)} steps by the other version"
    yield measurement(
        f"{name}: equal steps", equal / len(expected), unit="x", reference=reference, bar=">= 1"
    )
    here, there = _tensors(ours), _tensors(theirs)
    equal = sum(here.get(key) == value for key, value in there.items())
    more = sorted({key[2] for key in here.keys() - there.keys()})
    reference = (
        f"{equal} of {len(there)} tensors by the other version; only here: {', '.join(more) or 'none'}"
    )
    yield measurement(f"{name}: equal tensors", equal / len(there), unit="x", reference=reference, bar=">= 1")


def _steps(run: Path) -> Mapping[int, tuple[float, float]]:
    """Loss and gradient norm by step."""
    found: dict[int, tuple[float, float]] = {}
    for path in sorted((run / "journal").iterdir()):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event.get("event") == "step":
                found[event["step"]] = (event["loss"], event["gradient_norm"])
    return found


def _tensors(run: Path) -> Tensors:
    found: Tensors = {}
    for path in sorted(run.glob("checkpoints/*/*.safetensors")):
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        for name, facts in json.loads(content[8 : 8 + length]).items():
            if name != "__metadata__":
                begin, end = facts["data_offsets"]
                data = content[8 + length + begin : 8 + length + end]
                found[path.parent.name, path.name, name] = (facts["dtype"], facts["shape"], data)
    return found


if __name__ == "__main__":
    sys.exit(main())
