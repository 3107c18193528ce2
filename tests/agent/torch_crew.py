"""Peers as their users start them, `bloomery peer`, with ranks that train: on a tiny recipe, data at hand."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.agent.crew import Crew, Peer
from tests.tiny_run import TINY

OVERRIDES = (
    "train.ramp_up=[]",
    "train.global_batch=4",
    "train.compile=off",
    "checkpoint.every_steps=0",
    "evaluate.every_steps=0",
    "elastic.inner_steps=3",
    "elastic.heartbeat_s=0.3",
    "elastic.lease_s=3",
    "elastic.grace_s=120",
    "elastic.patience_s=120",
)


class TorchCrew(Crew):
    """Implements `Crew` with real ranks. overrides: of every peer; those of `start` come after them."""

    asked_to_end = (128 + signal.SIGTERM,)
    deadline_s = 600.0  # up to four ranks load torch at once, on two cores

    def __init__(self, base: Path, endpoint: str, corpus: Path, prepared: Path, *overrides: str) -> None:
        super().__init__(base, endpoint, "tiny")
        self.recipe, self.prepared = base / "tiny.toml", prepared
        self.recipe.write_text(TINY.replace("[data]", f"[data]\nsources = ['{corpus}']"))
        self.overrides = (*OVERRIDES, *overrides)

    def start(  # type: ignore[override]
        self, name: str, *overrides: str, nproc: int = 1, environment: dict[str, str] | None = None
    ) -> Peer:
        directory = self.base / name
        if not directory.exists():
            shutil.copytree(self.prepared, directory / "data")
        command = [sys.executable, "-m", "bloomery", "peer", str(self.recipe), "--run", str(directory)]
        command += ["--plain", "--nproc", str(nproc), *self.overrides, f"elastic.peer={name}", *overrides]
        command += [f"elastic.coordinator={self.endpoint}"]
        command += [f"checkpoint.memory_directory={self._memory.name}/{name}"]
        with (directory / "out").open("ab") as out:
            process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
            )
        peer = self.peers[name] = Peer(name, directory, process, "rounds.jsonl")
        self._started.append(peer)
        return peer

    @property
    def left_in_memory(self) -> list[Path]:
        return [path for path in Path(self._memory.name).rglob("*") if path.is_file()]
