"""What a rank keeps of others in memory: only what the plan of the run allows, and from nobody who stalls."""

import errno
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.checkpoint.format.commit import Part
from bloomery.checkpoint.format.deadlines import send_replica_s
from bloomery.checkpoint.format.manifest import FileRecord, IndexedBox
from bloomery.checkpoint.writer import partner
from bloomery.checkpoint.writer.memory_replica import SLOTS, MemoryReplica, MemoryReplicas
from bloomery.checkpoint.writer.partner import ReplicaLimits, ReplicaServer, ReplicaSettings, send_replica

TOKEN = "0123456789abcdef" * 2
LIMITS = ReplicaLimits(owners=(1, 2), world=3, bytes=100_000, boxes=10)
DEADLINE_S = 120.0


class Kept:
    def __init__(self, root: Path) -> None:
        self.replicas = MemoryReplicas(root, root / "run", "it")
        self.replicas.create()
        self.keeper = ReplicaServer(self.replicas, rank=0, token=TOKEN, host="127.0.0.1", limits=LIMITS)
        self.address = ("127.0.0.1", self.keeper.port)

    def listed(self) -> list[tuple[int, int]]:
        return sorted((one.rank, one.step) for one in self.replicas.complete())

    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.replicas.directory.glob("*-by-*"))


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    one = Kept(tmp_path)
    yield one
    one.keeper.close()
    one.replicas.release()


def replica(*, rank: int = 1, step: int = 1, size: int = 1000, **more: Any) -> MemoryReplica:
    file = FileRecord(name="model-000.safetensors", bytes=size, xxh3_128="", blocks="")
    usual = MemoryReplica(
        path=Path("wherever"),
        step=step,
        incarnation=1,
        rank=rank,
        world=3,
        time=0.0,
        part=Part(files=(file,), boxes=()),
        offsets={file.name: 0},
        values={},
        about={},
    )
    return replace(usual, **more)


def content(size: int, step: int = 1) -> memoryview:
    return memoryview(bytes([step % 256]) * size)


def test_the_two_newest_parts_of_each_owner_are_kept_and_no_memory_beyond(kept: Kept):
    for step in range(1, 6):
        for rank in LIMITS.owners:
            send_replica(kept.address, TOKEN, replica(rank=rank, step=step), content(1000, step))
    assert kept.listed() == [(1, 4), (1, 5), (2, 4), (2, 5)]
    slots = {one.path: one.step for one in kept.replicas.complete()}
    assert all(path.read_bytes() == content(1000, step) for path, step in slots.items())
    assert kept.bytes() < SLOTS * len(LIMITS.owners) * 4096
    names = {f"rank-{owner:05d}-by-00000-{number}" for owner in LIMITS.owners for number in (0, 1)}
    assert {path.name for path in slots} == names
    assert {path.stat().st_mode & 0o777 for path in slots} == {0o600}, "nobody else reads the state"


def test_parts_of_any_size_are_kept_byte_for_byte_however_they_arrive(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(partner, "_RECEIVE_BYTES", 64)
    for step, size in enumerate((3000, 3000, 1000, 5000, 0), 1):
        sent = bytes(number * step % 251 for number in range(size))
        send_replica(kept.address, TOKEN, replica(step=step, size=size), memoryview(sent))
        (newest,) = (one for one in kept.replicas.complete() if one.step == step)
        assert newest.path.read_bytes() == sent


def test_memory_that_is_full_refuses_a_part_and_the_keeper_lives(kept: Kept, monkeypatch: pytest.MonkeyPatch):
    def full(file: int, start: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as filled:
        filled.setattr(partner.os, "posix_fallocate", full)
        with pytest.raises(OSError):
            send_replica(kept.address, TOKEN, replica(), content(1000))
    assert kept.listed() == []
    send_replica(kept.address, TOKEN, replica(), content(1000))
    assert kept.listed() == [(1, 1)]


def test_after_a_rewind_the_parts_that_it_abandoned_make_room_first(kept: Kept):
    for incarnation, step in ((1, 8), (1, 9), (2, 5), (2, 6)):
        send_replica(kept.address, TOKEN, replica(step=step, incarnation=incarnation), content(1000))
    assert kept.listed() == [(1, 5), (1, 6)]


FILE = FileRecord(name="f", bytes=10, xxh3_128="", blocks="")


@pytest.mark.parametrize(
    "wrong",
    [
        replica(rank=0),
        replica(rank=-1),
        replica(rank=7),
        replica(world=4),
        replica(step=-1),
        replica(step="1"),
        replica(offsets={}),
        replica(offsets={"model-000.safetensors": -5}),
        replica(offsets={"model-000.safetensors": 500}),
        replica(size=1001),
        replica(part=Part(files=(replace(FILE, name="../../f"),), boxes=()), offsets={"../../f": 0}),
        replica(part=Part(files=(FILE,) * 20, boxes=()), offsets={"f": 0}),
    ],
    ids=lambda one: f"{one.rank}-{one.world}-{one.step}-{sorted(one.offsets.items())}",
)
def test_a_part_that_the_plan_does_not_allow_is_refused(kept: Kept, wrong: MemoryReplica):
    with pytest.raises(OSError):
        send_replica(kept.address, TOKEN, wrong, content(1000))
    assert kept.listed() == [] and kept.bytes() == 0
    send_replica(kept.address, TOKEN, replica(), content(1000))
    assert kept.listed() == [(1, 1)]


def test_more_bytes_than_any_rank_has_and_another_secret_are_refused(
    kept: Kept, caplog: pytest.LogCaptureFixture
):
    with pytest.raises(OSError):
        send_replica(kept.address, TOKEN, replica(size=100_001), content(100_001))
    with pytest.raises(OSError):
        send_replica(kept.address, TOKEN[::-1], replica(), content(1000))
    assert kept.bytes() == 0
    for why in ("100001 bytes, of at most 100000", "it does not belong to this run"):
        assert wait_for(lambda why=why: f"a partner's part was not kept: {why}" in caplog.text)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n" + bytes(100),
        TOKEN.encode() + struct.pack("<Q", 1 << 62),
        TOKEN.encode() + struct.pack("<Q", LIMITS.hello_bytes + 1),
        TOKEN.encode() + struct.pack("<Q", 3) + b"[1]",
        TOKEN.encode() + struct.pack("<Q", 2) + b"{}",
        TOKEN.encode() + struct.pack("<Q", 3) + b"\xff\xfe{",
        TOKEN.encode() + struct.pack("<Q", 1000) + b"{",
    ],
)
def test_whatever_a_stranger_says_the_keeper_lives(kept: Kept, said: bytes):
    with socket.create_connection(kept.address, timeout=DEADLINE_S) as stranger:
        with suppress(OSError):  # it may have hung up before all was said
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
        assert gone(stranger)
    send_replica(kept.address, TOKEN, replica(), content(1000))
    assert kept.listed() == [(1, 1)]


def gone(connection: socket.socket) -> bool:
    """Wait until the other side has hung up."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def stalling(kept: Kept) -> tuple[socket.socket, socket.socket, socket.socket]:
    """One says nothing, one stops in its hello, one in its part."""
    hello = json.dumps({"bytes": 1000, "holding": replica(rank=2).to_json()}).encode()
    lead = TOKEN.encode() + struct.pack("<Q", len(hello))
    silent, halting, slow = (socket.create_connection(kept.address, timeout=DEADLINE_S) for _ in range(3))
    halting.sendall(lead)
    slow.sendall(lead + hello + b"x")
    return silent, halting, slow


def test_who_stalls_holds_up_nobody_else(kept: Kept):
    silent, halting, slow = stalling(kept)
    with silent, halting, slow:
        send_replica(kept.address, TOKEN, replica(rank=1), content(1000))
        assert kept.listed() == [(1, 1)]


def test_who_stalls_is_dropped_however_often_a_byte_comes(kept: Kept, monkeypatch):
    monkeypatch.setattr(partner, "AUTHENTICATION_S", 0.3)
    monkeypatch.setattr(partner, "send_replica_s", lambda bytes: 0.6)
    silent, halting, slow = stalling(kept)
    with silent, halting, slow:
        assert gone(silent) and gone(halting)
        assert wait_for(lambda: dropped_after_a_byte(slow))
    assert kept.listed() == []


def dropped_after_a_byte(connection: socket.socket) -> bool:
    """Send one more byte, as somebody does who is slow: a deadline for each byte would never come."""
    try:
        connection.send(b"x")
    except ConnectionError:
        return True
    return False


def wait_for(seen: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while not seen():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_a_slow_link_has_the_time_that_so_many_bytes_take():
    assert send_replica_s(0) == 60 and send_replica_s(200 << 30) > (200 << 30) / 50e6


def test_memory_is_asked_for_what_all_ranks_of_the_machine_have_not_allocated_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(partner, "refuse_without_memory", asked.append)
    machine = partner.machine_id()
    ranks = SimpleNamespace(gather=lambda value: [value, [machine, 70], ["another", 9_000]])
    settings = ReplicaSettings(
        root=tmp_path,
        run=tmp_path / "run",
        identity="it",
        rank=0,
        token=TOKEN,
        host="127.0.0.1",
        limits=LIMITS,
    )
    gathers_failures = SimpleNamespace(
        gather=lambda value: [value] if value is None or isinstance(value, str) else ranks.gather(value)
    )
    assert partner.memory_shortage(gathers_failures, 100, None) == ""
    settings.replicas.create()
    for existing in range(partner.BUFFERS + 1):
        if existing:
            settings.slot(existing - 1).write_bytes(b"kept by an earlier process")
        assert partner.memory_shortage(gathers_failures, 100, settings) == ""
    buffers = partner.BUFFERS
    assert asked == [buffers * 100 + 70, *(2 * 100 * left + 70 for left in range(buffers, -1, -1))]


def files(*sizes: int) -> Part:
    records = [
        FileRecord(name=f"f-{n}.safetensors", bytes=size, xxh3_128="", blocks="")
        for n, size in enumerate(sizes)
    ]
    return Part(files=tuple(records), boxes=())


def boxes(count: int) -> Part:
    box = IndexedBox(
        name="a",
        dtype="int8",
        global_shape=(1,),
        offset=(0,),
        shape=(1,),
        scope="shared",
        file="f",
        begin=0,
        end=1,
    )
    return Part(files=(), boxes=(box,) * count)


@pytest.mark.parametrize(
    ("sent", "size", "said"),
    [
        (replica(size=100_000), 100_000, ""),
        (replica(size=100_000), 100_001, "100001 bytes, of at most 100000"),
        (replica(rank=2), 1000, ""),
        (replica(rank=0), 1000, "rank 0 of 3 is not kept here"),
        (replica(rank=1, world=2), 1000, "rank 1 of 2 is not kept here"),
        (replica(step=0, incarnation=0), 1000, ""),
        (replica(step=-1), 1000, "bytes, of at most"),
        (replica(incarnation=-1), 1000, "bytes, of at most"),
        (replica(step=True), 1000, "bytes, of at most"),
        (replica(), -1, "bytes, of at most"),
        (replica(offsets={"model-000.safetensors": -1}), 1000, "bytes, of at most"),
        (replica(part=boxes(10), offsets={}), 0, ""),
        (replica(part=boxes(11), offsets={}), 0, "11 boxes, of at most 10"),
        (replica(part=files(*[1] * 11), offsets={f"f-{n}.safetensors": n for n in range(11)}), 11, ""),
        (
            replica(part=files(*[1] * 12), offsets={f"f-{n}.safetensors": n for n in range(12)}),
            12,
            "of at most",
        ),
        (replica(part=files(3, 4), offsets={"f-0.safetensors": 0}), 7, "places"),
        (replica(part=files(3), offsets={"f-0.safetensors": 0, "f-1.safetensors": 0}), 7, "places"),
        (replica(part=files(3, 4), offsets={"f-0.safetensors": 4, "f-1.safetensors": 0}), 7, ""),
        (replica(part=files(3, 4), offsets={"f-0.safetensors": 5, "f-1.safetensors": 0}), 7, "lies outside"),
        (replica(part=files(-1), offsets={"f-0.safetensors": 0}), 7, "lies outside"),
        (replica(part=files(0, 7), offsets={"f-0.safetensors": 7, "f-1.safetensors": 0}), 7, ""),
        *(
            (replica(part=Part(files=(replace(FILE, name=name),), boxes=()), offsets={name: 0}), 10, "named")
            for name in ("../f", "f/../../g")
        ),
    ],
)
def test_each_limit_of_what_is_kept_has_its_edge(sent: MemoryReplica, size: int, said: str):
    if not said:
        LIMITS.check(sent, bytes=size)
        return
    with pytest.raises(ValueError, match=said):
        LIMITS.check(sent, bytes=size)


def test_a_label_may_be_as_long_as_its_boxes_and_hashes_need():
    limits = ReplicaLimits(owners=(3, 1), world=5, bytes=7 << 20, boxes=11)
    assert limits.hello_bytes == (16 << 20) + 2048 * 11 + 2 * 16 * 7
    assert ReplicaLimits.from_json(json.loads(json.dumps(limits.to_json()))) == limits


def test_who_is_past_the_deadline_gets_no_further_wait():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"abcd")
        assert partner._received(ours, 4, until=time.monotonic() + 60) == b"abcd"
        with pytest.raises(TimeoutError, match="too slow"):
            partner._received(ours, 4, until=time.monotonic() - 1)
        theirs.sendall(b"ab")
        theirs.close()
        with pytest.raises(OSError, match="ended too early"):
            partner._received(ours, 4, until=time.monotonic() + 60)


def test_two_keepers_of_one_machine_have_ports_of_their_own(kept: Kept) -> None:
    other = ReplicaServer(kept.replicas, rank=5, token=TOKEN, host="127.0.0.1", limits=LIMITS)
    assert other.port != kept.keeper.port
    other.close()


def test_a_server_that_is_closed_takes_no_more_connections(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)

    def servers() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "replica-server"]

    assert wait_for(lambda: len(servers()) == 1), "those of earlier tests have ended"
    (serving,) = servers()
    with socket.create_connection(kept.address, timeout=DEADLINE_S) as stranger:
        stranger.sendall(b"x" * len(TOKEN))
        assert stranger.recv(1) == b""
    time.sleep(0.1)  # so that it waits for the next one
    kept.keeper.close()
    serving.join(DEADLINE_S)
    assert not servers() and failures == [] and serving.daemon
    assert kept.keeper._socket.fileno() == -1
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(kept.address, timeout=DEADLINE_S)


def test_a_server_that_lacks_a_descriptor_for_a_moment_keeps_parts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = socket.create_server

    class Short(SimpleNamespace):
        shortages = 3

        def accept(self) -> Any:
            if self.shortages:
                self.shortages -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return self.real.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

    monkeypatch.setattr(partner.socket, "create_server", lambda *address: Short(real=made(*address)))
    monkeypatch.setattr(partner, "_PAUSE_S", 0.001)
    kept = Kept(tmp_path)
    try:
        send_replica(kept.address, TOKEN, replica(), content(1000))
        assert kept.listed() == [(1, 1)] and caplog.text.count("no part of a partner can be accepted") == 1
        kept.keeper._socket.shortages = 2  # of another time, which is told as well
        for step in (2, 3):
            send_replica(kept.address, TOKEN, replica(step=step), content(1000))
        assert caplog.text.count("no part of a partner can be accepted") == 2
    finally:
        kept.keeper.close()
        kept.replicas.release()
