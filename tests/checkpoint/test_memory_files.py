"""Files of copies in memory: which go with their rank, whose lock is waited for, and where each is read."""

import errno
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.test_memory_replica import replicas_of

from bloomery import durable
from bloomery.checkpoint.format.commit import Part
from bloomery.checkpoint.format.manifest import FileRecord, read_manifest
from bloomery.checkpoint.writer import memory_replica
from bloomery.checkpoint.writer.memory_replica import (
    MemoryReplica,
    MemoryReplicas,
    find_in_memory,
    label_of,
)
from bloomery.checkpoint.writer.partner import ReplicaLimits, ReplicaServer, agree_on_partner
from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.events.incarnation import identity
from bloomery.events.machine import machine_id
from bloomery.events.run_directory import RunDirectory


def test_a_rank_removes_what_it_staged_and_what_it_kept_and_nothing_of_others(tmp_path: Path):
    replicas = replicas_of(tmp_path, "run")
    assert replicas.directory.stat().st_mode & 0o777 == 0o700
    left = [replicas.slot(1, 0, keeper=2), replicas.slot(2, 1), replicas.slot(11, 0)]
    gone = [replicas.slot(1, 0), replicas.slot(1, 1), replicas.slot(2, 0, keeper=1)]
    for path in (*left, *gone, label_of(gone[0])):
        path.touch()
    replicas.remove(1)
    assert sorted(path for path in replicas.directory.glob("rank-*")) == sorted(left)
    replicas.remove(2)
    assert [path.name for path in replicas.directory.glob("rank-*")] == [left[2].name]
    replicas.remove(11)
    assert not replicas.directory.exists()
    replicas.release()


def test_memory_of_ranks_that_are_on_other_nodes_by_now_is_freed_at_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    replicas = replicas_of(tmp_path, "run")
    memory, here = (
        tmp_path / "memory",
        f"{os.uname().nodename}/{machine_id()} {(tmp_path / 'memory').resolve()}",
    )
    left = [replicas.slot(0, 1), replicas.slot(1, 0), replicas.slot(2, 1, keeper=0)]
    gone = [replicas.slot(2, 0), replicas.slot(1, 0, keeper=0), replicas.slot(2, 1, keeper=1)]
    for path in (*left, *gone, label_of(left[0]), label_of(gone[0])):
        path.touch()

    def gather(value: Any) -> list[Any]:
        return [said] * 3 if isinstance(value, dict) else [value, [here, 5, 5], ["far /dev/shm", 5, 5]]

    said = {"result": identity(RunDirectory(tmp_path / "run")), "failure": None}

    agree_on_partner(Ranks(rank=1, world=3, gather=gather), memory, run=tmp_path / "run", bytes=5, boxes=5)
    assert all(path.exists() for path in gone), "the first rank of the node does it"
    agree_on_partner(Ranks(rank=0, world=3, gather=gather), memory, run=tmp_path / "run", bytes=5, boxes=5)
    assert sorted(replicas.directory.glob("rank-*")) == sorted([*left, label_of(left[0])])
    assert f"no longer on this node was freed: {gone[0]}" in caplog.text
    replicas.release()


def test_a_directory_that_another_removes_right_now_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(memory_replica, "_LOCK_TIMEOUT_S", 0.0)
    first = replicas_of(tmp_path, "run")
    (owner,) = first.directory.iterdir()
    first.release()
    with owner.open("rb") as file:
        assert durable.try_lock(file.fileno())
        with pytest.raises(TimeoutError, match="locked by another process") as late:
            MemoryReplicas(
                tmp_path / "memory", tmp_path / "run", identity(RunDirectory(tmp_path / "run"))
            ).create()
    assert (late.value.errno, late.value.filename) == (errno.ETIMEDOUT, str(owner))


def test_the_first_rank_of_each_node_frees_the_memory_there(tmp_path: Path) -> None:
    replicas = replicas_of(tmp_path, "run")
    left = [replicas.slot(0, 1, keeper=2), replicas.slot(2, 0)]
    gone = [replicas.slot(0, 0), replicas.slot(2, 1, keeper=0)]
    for path in (*left, *gone):
        path.touch()

    def gather(value: Any) -> list[Any]:
        return [said] * 3 if isinstance(value, dict) else [*[["far /dev/shm", 5, 5]] * 2, value]

    said = {"result": identity(RunDirectory(tmp_path / "run")), "failure": None}

    ranks = Ranks(rank=2, world=3, gather=gather)
    agree_on_partner(ranks, tmp_path / "memory", run=tmp_path / "run", bytes=5, boxes=5)
    assert sorted(replicas.directory.glob("rank-*")) == sorted(left)
    replicas.release()


def test_each_file_is_read_where_its_own_part_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def part(rank: int, step: int) -> MemoryReplica:
        path = tmp_path / f"rank-{rank:05d}-{step}"
        path.write_bytes(b"0123456789")
        file = FileRecord(name=f"f{rank}.safetensors", bytes=7, blocks="", xxh3_128="0" * 32)
        usual = {"incarnation": 1, "world": 2, "time": 0.0, "values": {}, "about": {}}
        files = Part(files=(file,), boxes=())
        return MemoryReplica(path=path, step=step, rank=rank, part=files, offsets={file.name: 2}, **usual)

    on_first, on_second = [part(0, 5), part(0, 6)], [part(0, 5), part(1, 5), part(1, 4)]
    replicas = replicas_of(tmp_path, "run")
    monkeypatch.setattr(MemoryReplicas, "complete", lambda self: on_first)
    said = {"result": None, "failure": None}

    def gather(value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [value, said]
        labels = value and isinstance(value[0], dict)
        return [value, [on_second[1].to_json()] if labels else [one.held_part for one in on_second]]

    found = find_in_memory(replicas, Ranks(rank=0, world=2, gather=gather), lambda bases: bases)
    assert found is not None and found.base == (5, 1)
    assert found.readers == {"f0.safetensors": [0, 1], "f1.safetensors": [1]}
    preadv, content = os.preadv, bytearray(9)
    monkeypatch.setattr(os, "preadv", lambda file, views, at: preadv(file, [views[0][:3]], at))
    with found.source.open("f0.safetensors") as opened:
        assert opened.read_into([memoryview(content)[:4], memoryview(content)[4:]], begin=1) == 6
    assert bytes(content) == b"345678\0\0\0"
    os.truncate(on_first[0].path, 6)
    with found.source.open("f0.safetensors") as opened:
        assert opened.read_into([memoryview(content)[:3], memoryview(content)[3:]], begin=0) == 4
    with pytest.raises(FileNotFoundError):
        found.source.open("f1.safetensors")
    replicas.release()
    assert find_in_memory(replicas, Ranks(rank=0, world=2, gather=gather), lambda bases: []) is None


def test_the_values_of_a_checkpoint_are_those_of_its_first_part_whichever_rank_tells_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def part(rank: int, values: dict[str, Any]) -> MemoryReplica:
        path = tmp_path / f"rank-{rank:05d}-0"
        path.write_bytes(b"0123456789")
        file = FileRecord(name=f"f{rank}.safetensors", bytes=7, blocks="", xxh3_128="0" * 32)
        usual = {"step": 5, "incarnation": 1, "world": 2, "time": 0.0, "about": {}, "offsets": {file.name: 0}}
        return MemoryReplica(path=path, rank=rank, part=Part(files=(file,), boxes=()), values=values, **usual)

    first = part(0, {"train": {"at": 7}})

    def gather(value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [value] * 2
        if not isinstance(value[0], dict):
            return [value, [first.held_part]]
        assert [label["values"] for label in value] == [{}], "all parts have the same ones"
        return [value, [first.to_json()]]

    monkeypatch.setattr(MemoryReplicas, "complete", lambda self: [part(1, {"train": {"at": 9}})])
    replicas = replicas_of(tmp_path, "run")
    found = find_in_memory(replicas, Ranks(rank=0, world=2, gather=gather), lambda bases: bases)
    assert found is not None and found.readers == {"f0.safetensors": [1], "f1.safetensors": [0]}
    manifest = read_manifest(found.source)
    assert manifest.values == {"train": {"at": 7}} and manifest.world == 2
    assert [file.name for file in manifest.files] == ["f0.safetensors", "f1.safetensors"]
    replicas.release()


@pytest.mark.parametrize(
    ("host", "address", "bound"),
    [
        ("node-1", "127.0.1.1", "0.0.0.0"),
        ("node-1", None, "0.0.0.0"),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
    ],
)
def test_a_node_whose_own_name_leads_to_itself_is_reached_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, address: str | None, bound: str
) -> None:
    def look_up(name: str) -> str:
        assert name == host
        if address is None:
            raise socket.gaierror(-2, "Name or service not known")
        return address

    monkeypatch.setattr(socket, "gethostbyname", look_up)
    limits = ReplicaLimits(owners=(1,), world=2, bytes=5, boxes=5)
    replicas = MemoryReplicas(tmp_path, tmp_path / "run", "it")
    server = ReplicaServer(replicas, rank=0, token="0" * 32, host=host, limits=limits)
    try:
        assert server._socket.getsockname() == (bound, server.port)
    finally:
        server.close()
