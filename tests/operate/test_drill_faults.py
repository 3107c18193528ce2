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
    listed = [SimpleNamespace(step=step, name=f"step-{step}") for step in (2, 3, 1)]
    for checkpoint in listed:
        (rundir.checkpoints / checkpoint.name).mkdir()
        for name, size in (("a", 50), ("b", 1000), ("c", 70)):
            (rundir.checkpoints / checkpoint.name / f"{name}.safetensors").write_bytes(bytes(size))
    monkeypatch.setattr(faults, "checkpoints", lambda rundir: listed)
    for seed in range(20):
        path = flip_checkpoint_bit(rundir, Random(seed))
        assert path == rundir.checkpoints / "step-3" / "b.safetensors"
        (place,) = np.flatnonzero(np.frombuffer(path.read_bytes(), np.uint8)).tolist()
        assert place >= 500 and path.read_bytes()[place].bit_count() == 1
        path.write_bytes(bytes(1000))
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
