"""On what the ranks agree before they keep copies of each other's parts in memory, and what is told of it."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.checkpoint.test_memory_replica import replicas_of
from tests.checkpoint.test_partner import DEADLINE_S, LIMITS, TOKEN, content, replica

from bloomery.checkpoint.format.commit import Part
from bloomery.checkpoint.format.manifest import FileRecord, Manifest, read_index, read_manifest
from bloomery.checkpoint.format.manifest import IndexedBox as StoredBox
from bloomery.checkpoint.writer import memory_replica, partner
from bloomery.checkpoint.writer.memory_replica import (
    HeldPart,
    MemoryReplica,
    MemoryReplicas,
    MemorySource,
    find_in_memory,
    label_of,
    newest_complete,
    partners_of,
    read_replica,
)
from bloomery.checkpoint.writer.partner import (
    ReplicaLimits,
    ReplicaServer,
    ReplicaSettings,
    agree_on_partner,
    memory_shortage,
    send_replica,
)
from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.errors import StorageError
from bloomery.events.incarnation import begin, identity
from bloomery.events.machine import machine_id
from bloomery.events.run_directory import RunDirectory


def ranks_with(rank: int, *others: list[Any], firsts: list[Any] | None = None) -> Ranks:
    """A rank whose others have this to say. firsts: what rank 0 returns, time after time."""

    def gather(value: Any) -> list[Any]:
        if isinstance(value, dict):
            if firsts:
                return [{"result": firsts.pop(0), "failure": None}, value]
            return [value] * (len(others) + 1)
        said = list(others)
        said.insert(rank, value)
        return said

    return Ranks(rank=rank, world=len(others) + 1, gather=gather)


def test_the_ranks_agree_on_partners_on_limits_and_on_one_secret(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run").create()
    begin(run, base=None, reason="start")
    (tmp_path / "memory").mkdir()
    machine, place = f"{os.uname().nodename}/{machine_id()}", (tmp_path / "memory").resolve()
    others = (["far /dev/shm", 900, 4], [f"{machine} {place}", 800, 9], ["far /dev/shm", 700, 2])
    memory, keeper = agree_on_partner(
        ranks_with(0, *others), tmp_path / "memory", run=run.path, bytes=500, boxes=6
    )
    assert keeper == 1 and len(memory.token) == 32 and int(memory.token, 16)
    limits = ReplicaLimits(owners=(1,), world=4, bytes=900, boxes=9)
    assert memory == ReplicaSettings(
        root=tmp_path / "memory",
        run=run.path,
        identity=identity(run),
        rank=0,
        token=memory.token,
        host=os.uname().nodename,
        limits=limits,
    )
    again, _ = agree_on_partner(ranks_with(0, *others), tmp_path / "memory", run=run.path, bytes=500, boxes=6)
    assert again.token != memory.token
    second, keeper = agree_on_partner(
        ranks_with(1, [f"{machine} /elsewhere", 5, 7], firsts=["the run's", "0123" * 8]),
        tmp_path / "memory",
        run=run.path,
        bytes=6,
        boxes=2,
    )
    assert keeper == 0 and (second.identity, second.token, second.rank) == ("the run's", "0123" * 8, 1)
    assert second.host == "127.0.0.1" and second.limits.owners == (0,)
    alone, keeper = agree_on_partner(Ranks(), tmp_path / "memory", run=run.path, bytes=6, boxes=2)
    assert keeper == 0 and alone.limits.owners == (), "nobody keeps its own part twice"


def test_memory_that_runs_left_is_freed_before_and_that_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    gone = replicas_of(tmp_path, "gone")
    gone.release()
    (tmp_path / "gone" / "incarnations").rename(tmp_path / "elsewhere")
    run = RunDirectory(tmp_path / "run").create()
    begin(run, base=None, reason="start")
    agree_on_partner(Ranks(), tmp_path / "memory", run=run.path, bytes=6, boxes=2)
    assert f"memory that a run had left behind was freed: {gone.directory}" in caplog.text
    assert not gone.directory.exists()


def test_the_first_rank_that_lacks_memory_is_named_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = ["rank 1 has none", None]
    ranks = Ranks(
        rank=0,
        world=3,
        gather=lambda own: [own, [own[0], 5], ["x", 6]] if isinstance(own, list) else [own, *said],
    )
    monkeypatch.setattr(partner, "refuse_without_memory", lambda bytes: None)
    assert memory_shortage(ranks, 100, None) == "rank 1: rank 1 has none"
    asked: list[object] = []

    def full(path: Path, *, doing: str, bytes_needed: int) -> None:
        asked.append((path, doing, bytes_needed))
        raise StorageError("the memory is full", remedy="")

    monkeypatch.setattr(partner, "require_space", full)
    assert memory_shortage(ranks, 100, None) == "rank 1: rank 1 has none" and asked == []
    memory = ReplicaSettings(
        root=tmp_path, run=tmp_path / "run", identity="it", rank=0, token=TOKEN, host="h", limits=LIMITS
    )
    assert memory_shortage(ranks, 100, memory) == "rank 0: the memory is full"
    assert asked == [(tmp_path, "Keeping copies in memory", 405)], "another rank of this machine wants some"
    said[:] = [None, None]
    monkeypatch.setattr(partner, "require_space", lambda *_, **__: None)
    assert memory_shortage(ranks, 100, memory) == ""


@pytest.fixture
def listening() -> Iterator[Callable[[bytes], tuple[tuple[str, int], list[bytes]]]]:
    """Make a keeper that takes everything and answers with these bytes; returns its address, and the log."""
    made: list[socket.socket] = []

    def make(answer: bytes) -> tuple[tuple[str, int], list[bytes]]:
        server, heard = socket.create_server(("127.0.0.1", 0)), list[bytes]()
        made.append(server)

        def serve() -> None:
            connection, _ = server.accept()
            connection.settimeout(DEADLINE_S)
            with connection:
                while not (heard and heard[-1].endswith(b"\x01" * 10)):
                    heard.append(connection.recv(1 << 20))
                connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        return server.getsockname()[:2], heard

    yield make
    for server in made:
        server.close()


def test_a_part_counts_as_kept_only_once_the_partner_has_said_so(
    listening: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, waits = socket.create_connection, list[float | None]()

    def watched(address: tuple[str, int], timeout: float | None = None) -> socket.socket:
        waits.append(timeout)
        return connect(address, timeout=timeout)

    monkeypatch.setattr(partner.socket, "create_connection", watched)
    address, heard = listening(b"done")
    send_replica(address, TOKEN, replica(), content(1000))
    assert b"".join(heard).startswith(TOKEN.encode())
    address, _ = listening(b"gone")
    with pytest.raises(OSError, match=rf"the partner at 127.0.0.1:{address[1]} has not kept it"):
        send_replica(address, TOKEN, replica(), content(1000))
    address, _ = listening(b"do")
    with pytest.raises(OSError, match="ended too early"):
        send_replica(address, TOKEN, replica(), content(1000))
    assert waits == [partner.AUTHENTICATION_S] * 3, "nobody waits long for a node that is gone"


def test_all_of_a_part_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits, takes_s = [100.0], list[float](), [25.0]

    class Connection:
        def __enter__(self) -> Connection:
            return self

        def __exit__(self, *_: object) -> None:
            waits.append(-1.0)

        def settimeout(self, seconds: float) -> None:
            waits.append(seconds)

        def sendall(self, content: bytes) -> None:
            now[0] += takes_s[0]

        def recv(self, size: int) -> bytes:
            return b"done"[:size]

    made = SimpleNamespace(create_connection=lambda address, timeout: Connection())
    monkeypatch.setattr(partner, "socket", made)
    monkeypatch.setattr(partner, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(partner, "send_replica_s", lambda size: 0.06 * size)
    send_replica(("far", 1), TOKEN, replica(), content(1000))
    assert waits == pytest.approx([60.0, 35.0, 10.0, -1.0])
    waits.clear()
    takes_s[0] = 70.0
    with pytest.raises(TimeoutError, match="too slow"):
        send_replica(("far", 1), TOKEN, replica(), content(1000))
    assert waits == pytest.approx([60.0, 0.001, -1.0])


def test_a_keeper_without_a_whole_secret_is_not_begun(tmp_path: Path) -> None:
    replicas = MemoryReplicas(tmp_path, tmp_path / "run", "it")
    for token in ("", TOKEN[:-1], TOKEN + "0"):
        with pytest.raises(ValueError, match="a secret has 32 characters"):
            ReplicaServer(replicas, rank=0, token=token, host="127.0.0.1", limits=LIMITS)


def test_partners_are_found_whichever_way_the_ranks_lie_on_the_nodes() -> None:
    assert partners_of(["a", "b", "a", "b"]) == [1, 0, 3, 2]
    assert partners_of(["a", "a", "b"]) == [2, 2, 0]
    assert partners_of(["a", "b", "b", "c"]) == [1, 3, 3, 0]
    assert partners_of(["a"]) == [0]


def test_of_one_step_the_later_life_is_taken_wherever_its_parts_are() -> None:
    def held(rank: int, incarnation: int) -> HeldPart:
        return HeldPart(step=5, incarnation=incarnation, world=2, rank=rank)

    on_a, on_b = [held(0, 1), held(1, 1), held(0, 2)], [held(1, 1), held(1, 2), held(0, 1)]
    for life in (1, 2):
        assert newest_complete([on_a, on_b], {(5, 1), (5, life)}) == [held(0, life), held(1, life)]
    assert newest_complete([on_a[:1], []], iter([(5, 1)])) == [] == newest_complete([], set())


def test_a_checkpoint_in_memory_says_all_that_its_save_said(tmp_path: Path) -> None:
    def part(rank: int) -> MemoryReplica:
        file = FileRecord(name=f"f-{rank}.safetensors", bytes=8, xxh3_128="ab" * 16, blocks="cd" * 8)
        box = StoredBox(
            name=f"model.{rank}",
            dtype="float32",
            global_shape=(2,),
            offset=(0,),
            shape=(2,),
            scope="shared",
            file=file.name,
            begin=0,
            end=8,
        )
        usual = {"step": 7, "incarnation": 3, "world": 2, "values": {"train": {"at": 1}}}
        return MemoryReplica(
            path=tmp_path / f"{rank}",
            rank=rank,
            time=5.0 + rank,
            part=Part(files=(file,), boxes=(box,)),
            offsets={file.name: 0},
            about={"told": rank},
            **usual,
        )

    parts = [part(0), part(1)]
    source = MemorySource(parts, parts[1:])
    manifest = read_manifest(source)
    files = tuple(replace(one.part.files[0], blocks="") for one in parts)
    assert manifest == Manifest(
        step=7,
        incarnation=3,
        time=5.0,
        world=2,
        about={"told": 0},
        values={"train": {"at": 1}},
        files=files,
        index_bytes=source.size("index.json"),
        index_xxh3_128=manifest.index_xxh3_128,
    )
    index = read_index(source, manifest)
    assert index.boxes == tuple(box for one in parts for box in one.part.boxes)
    assert index.files == {one.part.files[0].name: one.part.files[0] for one in parts}
    assert source.name == "step-000007.i003" == source.place().removesuffix(" in memory")
    assert source.place("f-0.safetensors") == "step-000007.i003 in memory (f-0.safetensors)"
    assert source.place("f-1.safetensors") == f"{tmp_path / '1'} (f-1.safetensors)"


def test_a_directory_of_copies_is_locked_once_until_it_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[dict[str, object]] = []
    wait_for_lock = memory_replica.durable.wait_for_lock

    def watched(file: int, **how: Any) -> bool:
        taken.append(how)
        return bool(wait_for_lock(file, **how))

    monkeypatch.setattr(memory_replica.durable, "wait_for_lock", watched)
    one = MemoryReplicas(tmp_path / "memory", tmp_path / "run", "it")
    one.create()
    one.create()
    assert taken == [{"shared": True, "timeout_s": 60.0}]
    owner = one.directory / "run.json"
    assert owner.read_text() == f'{{"run": "{(tmp_path / "run").resolve()}", "identity": "it"}}'
    before = owner.stat().st_ino
    one.release()
    one.release()
    one.create()
    assert len(taken) == 2 and owner.stat().st_ino == before
    one.release()
    names = {
        MemoryReplicas(tmp_path, tmp_path / run, name).directory.name
        for run, name in (("run", "it"), ("run", "other"), ("second", "it"))
    }
    assert len(names) == 3 and all(name.startswith("bloomery-") for name in names)
    assert one.slot(3, 1).name == "rank-00003-1" and one.slot(3, 0, keeper=12).name == "rank-00003-by-00012-0"


def test_a_label_that_cannot_be_read_is_told_and_one_that_is_not_there_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slot = tmp_path / "rank-00000-0"
    slot.touch()
    assert read_replica(label_of(slot)) is None and not caplog.text
    for damaged in ("{", "[]", "7", '{"part": 5}', "{}"):
        caplog.clear()
        label_of(slot).write_text(damaged)
        assert read_replica(label_of(slot)) is None
        assert f"{label_of(slot)} was ignored: " in caplog.text
    label_of(slot).unlink()
    label_of(slot).mkdir()
    assert read_replica(label_of(slot)) is None


def test_bytes_of_the_newest_step_alone_are_read_and_only_by_who_has_that_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def part(rank: int, step: int) -> MemoryReplica:
        path = tmp_path / f"{rank}-{step}"
        path.write_bytes(f"{rank}{step}".encode())
        files = (FileRecord(name=f"f{rank}.safetensors", bytes=2, blocks="", xxh3_128="0" * 32),)
        usual = {"incarnation": 1, "world": 2, "time": 0.0, "values": {}, "about": {}}
        offsets = {files[0].name: 0}
        return MemoryReplica(
            path=path, step=step, rank=rank, part=Part(files=files, boxes=()), offsets=offsets, **usual
        )

    here = [part(0, 4), part(0, 5), part(0, 3)]
    there = [[part(1, 5), part(0, 4)], [part(0, 5), part(1, 4)], [part(1, 5)]]
    monkeypatch.setattr(MemoryReplicas, "complete", lambda self: here)
    seen: list[set[tuple[int, int]]] = []

    def visible(bases: Any) -> set[tuple[int, int]]:
        seen.append(set(bases))
        return seen[-1] - {(9, 9)}

    def gather(value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [value] * 4
        labels = [there[0][0].to_json()], list[Any](), list[Any]()
        parts = ([one.held_part for one in held] for held in there)
        return [value, *(labels if isinstance(value[0], dict) else parts)]

    replicas = MemoryReplicas(tmp_path, tmp_path / "run", "it")
    found = find_in_memory(replicas, Ranks(rank=0, world=4, gather=gather), visible)
    assert found is not None and found.base == (5, 1) and seen == [{(3, 1), (4, 1), (5, 1)}]
    assert found.readers == {"f0.safetensors": [0, 2], "f1.safetensors": [1, 3]}
    content = bytearray(2)
    with found.source.open("f0.safetensors") as opened:
        assert opened.read_into([memoryview(content)], begin=0) == 2
    assert bytes(content) == b"05"
    with pytest.raises(FileNotFoundError):
        found.source.open("f1.safetensors")


def test_a_label_that_is_too_long_is_refused_before_it_is_read_and_a_stranger_before_that(
    tmp_path: Path,
) -> None:
    replicas = MemoryReplicas(tmp_path, tmp_path / "run", "it")
    server = ReplicaServer(replicas, rank=0, token=TOKEN, host="127.0.0.1", limits=LIMITS)
    most = LIMITS.hello_bytes

    def told(lead: bytes) -> str:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(lead)
            theirs.shutdown(socket.SHUT_WR)
            with pytest.raises((OSError, ValueError)) as refused:
                server._receive(ours)
        return str(refused.value)

    try:
        length = TOKEN.encode() + partner._LENGTH.pack(most)
        assert told(length) == "the connection ended too early"
        too_long = TOKEN.encode() + partner._LENGTH.pack(most + 1)
        assert told(too_long) == f"a hello of {most + 1} bytes, of at most {most}"
        assert told(TOKEN[::-1].encode()) == "it does not belong to this run"
    finally:
        server.close()


def test_a_second_part_of_a_rank_waits_for_the_first_until_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = MemoryReplicas(tmp_path, tmp_path / "run", "it")
    replicas.create()
    server = ReplicaServer(replicas, rank=0, token=TOKEN, host="127.0.0.1", limits=LIMITS)
    waits: list[float] = []
    busy: Any = SimpleNamespace(acquire=lambda timeout: bool(waits.append(timeout)))
    server._owner_locks[2] = busy
    monkeypatch.setattr(partner, "send_replica_s", lambda bytes: 1e6 if bytes == LIMITS.bytes else 9.0)
    hello = json.dumps({"bytes": 1000, "holding": replica(rank=2).to_json()}).encode()
    ours, theirs = socket.socketpair()
    try:
        with ours, theirs:
            theirs.sendall(TOKEN.encode() + partner._LENGTH.pack(len(hello)) + hello)
            with pytest.raises(TimeoutError, match="another part of rank 2 is still being sent"):
                server._receive(ours)
        assert waits == [pytest.approx(1e6, rel=0.01)]
        assert list(replicas.directory.glob("rank-*")) == []
    finally:
        server.close()
        replicas.release()


def test_a_replica_that_is_being_written_over_is_no_longer_believed(tmp_path: Path) -> None:
    replicas = MemoryReplicas(tmp_path, tmp_path / "run", "it")
    replicas.create()
    server = ReplicaServer(replicas, rank=0, token=TOKEN, host="127.0.0.1", limits=LIMITS)
    try:
        for step in (1, 2):
            send_replica(("127.0.0.1", server.port), TOKEN, replica(step=step), content(1000, step))
        hello = json.dumps({"bytes": 1000, "holding": replica(step=3).to_json()}).encode()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(TOKEN.encode() + partner._LENGTH.pack(len(hello)) + hello + b"half")
            theirs.shutdown(socket.SHUT_WR)
            with pytest.raises(OSError, match="ended too early"):
                server._receive(ours)
        assert [one.step for one in replicas.complete()] == [2], "the older one made room"
        send_replica(("127.0.0.1", server.port), TOKEN, replica(step=4), content(1000, 4))
        assert sorted(one.step for one in replicas.complete()) == [2, 4]
    finally:
        server.close()
        replicas.release()
