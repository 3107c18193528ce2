"""Faults of a drill that strike connections, and nodes of a job of SLURM."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from bloomery.errors import TrainingFailed
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.drill import faults
from bloomery.operate.drill.allocation import drill_nodes
from bloomery.operate.drill.faults import DrillFault, cut_connections, flip_checkpoint_bit, strike

CONNECTED = """
import os, socket, sys
ends = [socket.create_connection(("127.0.0.1", int(port))) for port in sys.argv[1:]]
listener = socket.create_server(("127.0.0.1", 0)); pair = socket.socketpair()
print(listener.getsockname()[1], flush=True)
for end in ends: print("ended", end.recv(1), flush=True)
sys.stdin.read()
"""


def test_a_bit_of_the_newest_checkpoint_flips_in_the_second_half_of_its_largest_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = RunDirectory(tmp_path).create()
    listed = [SimpleNamespace(step=step, name=f"step-{step}") for step in (2, 10, 9)]
    whole = np.arange(1000, dtype=np.uint8)
    for checkpoint in listed:
        (rundir.checkpoints / checkpoint.name).mkdir()
        for name, size in (("a", 50), ("b", 1000), ("c", 70)):
            (rundir.checkpoints / checkpoint.name / f"{name}.safetensors").write_bytes(whole[:size].tobytes())
    monkeypatch.setattr(faults, "checkpoints", lambda rundir: listed)
    flipped = set()
    for seed in range(60):
        path = flip_checkpoint_bit(rundir, Random(seed))
        assert path == rundir.checkpoints / "step-10" / "b.safetensors"
        changed = np.frombuffer(path.read_bytes(), np.uint8) ^ whole
        (place,) = np.flatnonzero(changed).tolist()
        assert place >= 500
        flipped.add(int(changed[place]))
        path.write_bytes(whole.tobytes())
    assert flipped == {1 << bit for bit in range(8)}
    monkeypatch.setattr(faults, "checkpoints", lambda rundir: [])
    assert flip_checkpoint_bit(rundir, Random(0)) is None


@contextmanager
def connected(**environment: str) -> Iterator[tuple[subprocess.Popen[str], list[socket.socket], list[int]]]:
    """Yield a process that has a connection to each of two servers here, our ends of them, and the ports."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [server.getsockname()[1] for server in servers]
    with subprocess.Popen(
        [sys.executable, "-c", CONNECTED, *map(str, ports)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    ) as process:
        ends = [server.accept()[0] for server in servers]
        try:
            yield process, ends, ports
        finally:
            process.kill()
            for open_socket in (*servers, *ends):
                open_socket.close()


def test_a_cut_ends_the_connections_of_another_process_and_leaves_its_listener() -> None:
    with connected() as (process, ends, _):
        assert process.stdout is not None
        port = int(process.stdout.readline())
        assert cut_connections(process.pid) == 2
        assert [end.recv(1) for end in ends] == [b"", b""], "its peers see the end"
        assert [process.stdout.readline() for _ in ends] == ["ended b''\n"] * 2, "and so does the process"
        socket.create_connection(("127.0.0.1", port)).close()


def test_the_store_where_ranks_met_is_a_port_or_a_file(tmp_path: Path) -> None:
    with connected() as (process, _, ports):
        assert process.stdout is not None
        process.stdout.readline()
        assert cut_connections(process.pid, port=ports[0]) == 1
    meeting = tmp_path / "meeting"
    meeting.touch()
    with connected(BLOOMERY_RENDEZVOUS_FILE=str(meeting)) as (process, _, _ports):
        assert process.stdout is not None
        process.stdout.readline()
        strike(DrillFault.STORE, process.pid)
        assert not meeting.exists() and cut_connections(process.pid) == 2


def test_what_closes_while_connections_are_cut_is_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected() as (process, ends, _):
        assert process.stdout is not None
        process.stdout.readline()
        listed = faults._sockets(process.pid)
        monkeypatch.setattr(faults, "_sockets", lambda pid: [999, *listed])
        assert cut_connections(process.pid) == 2 and [end.recv(1) for end in ends] == [b"", b""]


def test_a_descriptor_that_closes_while_it_is_looked_at_is_no_socket() -> None:
    with socket.create_server(
        ("127.0.0.1", 0)
    ) as server:  # of this process, which closes that of the listing
        assert server.fileno() in faults._sockets(os.getpid())


class Copy:
    """A socket of another process, as this one sees it."""

    def __init__(
        self, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM, *, is_quick: bool = False
    ) -> None:
        self.family, self.type, self.is_quick = family, kind, is_quick
        self.ended, self.is_open = list[int](), True

    def __enter__(self) -> Copy:
        return self

    def __exit__(self, *error: object) -> None:
        self.is_open = False

    def getsockname(self) -> tuple[str, int]:
        return "here", 5

    def getpeername(self) -> tuple[str, int]:
        return "there", 7

    def shutdown(self, how: int) -> None:
        self.ended.append(how)
        if self.is_quick:
            raise OSError(107, "Transport endpoint is not connected")


@pytest.mark.parametrize(
    ("copy", "port", "is_cut"),
    [
        (Copy(), 0, True),
        (Copy(), 5, True),
        (Copy(), 7, True),
        (Copy(), 6, False),
        (Copy(socket.AF_INET6), 7, True),
        (Copy(kind=socket.SOCK_DGRAM), 0, False),
        (Copy(socket.AF_UNIX), 0, False),
        (Copy(is_quick=True), 0, True),
    ],
    ids=["any", "own port", "its peer's port", "another port", "IPv6", "UDP", "a pipe", "ended meanwhile"],
)
def test_a_connection_is_cut_by_either_port_and_its_copy_is_closed(
    monkeypatch: pytest.MonkeyPatch, copy: Copy, port: int, *, is_cut: bool
) -> None:
    copied = SimpleNamespace(syscall=lambda call, process, number, flags: 0)
    monkeypatch.setattr(faults.ctypes, "CDLL", lambda name, use_errno: copied)
    monkeypatch.setattr(faults.socket, "socket", lambda fileno: copy)
    assert faults._cut(3, 4, port) is is_cut and copy.ended == [socket.SHUT_RDWR] * is_cut
    assert not copy.is_open


def test_a_process_that_is_gone_is_told_as_gone() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    with pytest.raises(ProcessLookupError):
        cut_connections(process.pid)


def test_a_drill_in_a_batch_script_trains_on_all_nodes_of_the_job() -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "node1"}
    nodes = drill_nodes(job)
    assert (nodes.count, nodes.here) == (2, "node1") and nodes.launch()[0] == "srun"
    assert nodes.reach("node1") == [] and "--nodelist=node2" in nodes.reach("node2")
    alone = drill_nodes(job | {"SLURM_JOB_NUM_NODES": "1"})
    assert (alone.count, alone.reach("anywhere")) == (1, []) and alone.launch()[0] == sys.executable
    with pytest.raises(TrainingFailed, match="srun has started 2 drills") as refused:
        drill_nodes(job | {"SLURM_STEP_NUM_TASKS": "2"})
    assert "in the batch script without srun" in refused.value.remedy
