"""Keeps a replica of each rank's part of a checkpoint in the memory of a partner rank on another node.

The ranks agree on partners once. Then the writers send the parts: a connection carries the run's secret, the
length of a JSON label that describes the part, the label, and the part's bytes. The receiver trusts none of
it: it checks lengths, names and offsets against the limits of the run, and each wait has a deadline.
"""

from __future__ import annotations

import hmac
import json
import logging
import mmap
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from bloomery.checkpoint.format.deadlines import AUTHENTICATION_S, send_replica_s
from bloomery.checkpoint.format.deadlines import CONCURRENT_SAVES as BUFFERS
from bloomery.checkpoint.format.manifest import FILE_NAME
from bloomery.checkpoint.writer.memory_replica import (
    SLOTS,
    MemoryReplica,
    MemoryReplicas,
    label_of,
    partners_of,
    read_replica,
    remove_label,
    write_label,
)
from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.checkpoint.writer.shared_buffer import refuse_without_memory
from bloomery.errors import StorageError, require_space
from bloomery.events.incarnation import identity
from bloomery.events.machine import machine_id
from bloomery.events.run_directory import RunDirectory

log = logging.getLogger(__name__)

_TOKEN_BYTES = 32
_LENGTH = struct.Struct("<Q")
_RECEIVE_BYTES = 8 << 20
_DONE = b"done"
_VALUES_BYTES = 16 << 20
_BYTES_A_BOX = 2048
_BYTES_A_HASH = 16
"""Hexadecimal digits of the hash of each mebibyte."""
_UNAUTHENTICATED_AT_ONCE = 16
"""The most open connections of strangers. A further one ends the oldest: a partner needs one round trip."""
_FURTHER_PARTS_AT_ONCE = 4
"""Parts that may be sent at once beside one of each owner."""
_PAUSE_S = 0.5
"""The seconds of pause after a connection could not be accepted."""


@dataclass(frozen=True, kw_only=True)
class ReplicaLimits:
    """What a replica server accepts.

    owners: the ranks whose parts it keeps. world: how many ranks the run has.
    bytes, boxes: of the largest part of any rank.
    """

    owners: tuple[int, ...]
    world: int
    bytes: int
    boxes: int

    @property
    def hello_bytes(self) -> int:
        """The longest label that is accepted: boxes, hashes of the blocks, and the values of the run."""
        return _VALUES_BYTES + _BYTES_A_BOX * self.boxes + 2 * _BYTES_A_HASH * (self.bytes >> 20)

    def check(self, replica: MemoryReplica, *, bytes: int) -> None:
        """Raise ValueError for a part that no rank of this run with this partner can have sent.

        bytes: the length of the part that the sender announced.
        """
        if replica.rank not in self.owners or replica.world != self.world:
            raise ValueError(f"rank {replica.rank} of {replica.world} is not kept here")
        numbers = (replica.step, replica.incarnation, bytes, *replica.offsets.values())
        if any(type(number) is not int or number < 0 for number in numbers) or bytes > self.bytes:
            raise ValueError(f"{bytes} bytes, of at most {self.bytes}")
        if len(replica.part.boxes) > self.boxes or len(replica.part.files) > self.boxes + 1:
            raise ValueError(f"{len(replica.part.boxes)} boxes, of at most {self.boxes}")
        if set(replica.offsets) != {file.name for file in replica.part.files}:
            raise ValueError("its files are not those that it has places for")
        for file in replica.part.files:
            if not FILE_NAME.fullmatch(file.name):
                raise ValueError(f"a file cannot be named {file.name!r}")
            if not 0 <= file.bytes <= bytes - replica.offsets[file.name]:
                raise ValueError(f"{file.name} lies outside of what was sent")

    def to_json(self) -> dict[str, Any]:
        """Return the limits as JSON, for the writer process."""
        return {**vars(self), "owners": list(self.owners)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ReplicaLimits:
        """Return what `to_json` wrote."""
        return cls(**{**content, "owners": tuple(content["owners"])})


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """How one rank keeps replicas in memory: its own staged parts, and those that it keeps for partners.

    root: a directory of a memory file system. run: the run directory. identity: of the run.
    rank: this rank. token: the run's secret. host: the address on which the writer accepts replicas.
    limits: what the writer accepts.
    """

    root: Path
    run: Path
    identity: str
    rank: int
    token: str
    host: str
    limits: ReplicaLimits

    @cached_property
    def replicas(self) -> MemoryReplicas:
        """The replicas of the run on this node."""
        return MemoryReplicas(self.root, self.run, self.identity)

    def slot(self, number: int) -> Path:
        """Return the file of one of this rank's shared buffers."""
        return self.replicas.slot(self.rank, number)


def agree_on_partner(
    ranks: Ranks, directory: Path, *, run: Path, bytes: int, boxes: int
) -> tuple[ReplicaSettings, int]:
    """Return this rank's replica settings, and the rank that keeps a replica of this rank's part. Collective.

    directory: of a memory file system. run: the run directory.
    bytes, boxes: the largest size that this rank's part will have.
    """
    host = os.uname().nodename
    gathered = ranks.gather([f"{host}/{machine_id()} {directory.resolve()}", bytes, boxes])
    nodes = [node for node, _, _ in gathered]
    partners = partners_of(nodes)
    machines = {node.partition(" ")[0] for node in nodes}
    is_one_machine = len(machines) == 1
    if ranks.is_first and len({machine.partition("/")[0] for machine in machines}) < len(machines):
        log.warning(
            "some machines have equal host names (%s, say), so that no part can be sent to a partner there: "
            "give each machine a name that the others reach it by",
            host,
        )
    memory = ReplicaSettings(
        root=directory,
        run=run,
        identity=ranks.run_on_first(lambda: identity(RunDirectory(run))),
        rank=ranks.rank,
        token=ranks.run_on_first(lambda: secrets.token_hex(16)),
        host="127.0.0.1" if is_one_machine else host,
        limits=ReplicaLimits(
            owners=tuple(owner for owner, keeper in enumerate(partners) if keeper == ranks.rank != owner),
            world=ranks.world,
            bytes=max(size for _, size, _ in gathered),
            boxes=max(count for _, _, count in gathered),
        ),
    )
    for path in memory.replicas.sweep():
        log.info("memory that a run had left behind was freed: %s", path)
    here = [rank for rank, node in enumerate(nodes) if node == nodes[ranks.rank]]
    if ranks.rank == here[0]:
        kept = [(owner, keeper) for owner, keeper in enumerate(partners) if keeper in here]
        for path in memory.replicas.keep_only(here, kept):
            log.info("memory of a rank that is no longer on this node was freed: %s", path)
    return memory, partners[ranks.rank]


def memory_shortage(ranks: Ranks, bytes: int, memory: ReplicaSettings | None) -> str:
    """Return which rank lacks the memory for its shared buffers, and why; "" where all have it.

    What the ranks of one machine need is added up. Collective; returns the same on every rank.
    bytes: the size of one of this rank's buffers. memory: None where no replicas are kept.
    """
    machine_here, own = machine_id(), _bytes_needed(bytes, memory)
    wanted = sum(needed for machine, needed in ranks.gather([machine_here, own]) if machine == machine_here)
    failure = None
    try:
        refuse_without_memory(wanted)
        if memory is not None:
            require_space(memory.root, doing="Keeping copies in memory", bytes_needed=wanted)
    except StorageError as error:
        failure = error.message
    failures = ranks.gather(failure)
    return next((f"rank {rank}: {why}" for rank, why in enumerate(failures) if why), "")


def _bytes_needed(bytes: int, memory: ReplicaSettings | None) -> int:
    """Return the memory that must still be allocated: for the buffers, and as much for a partner's parts.

    Buffers that an earlier process of the run left are used again.
    """
    if memory is None:
        return BUFFERS * bytes
    existing = sum(memory.slot(number).exists() for number in range(BUFFERS))
    return 2 * bytes * (BUFFERS - existing)


def send_replica(address: tuple[str, int], token: str, replica: MemoryReplica, content: memoryview) -> None:
    """Send a part to the partner's writer, and return once it is complete there. Raises OSError.

    The deadline, for all of it together, is the time that `content` takes over the slowest link that is
    allowed for (`send_replica_s`).
    """
    hello = json.dumps({"bytes": len(content), "holding": replica.to_json()}).encode()
    until = time.monotonic() + send_replica_s(len(content))
    with socket.create_connection(address, timeout=AUTHENTICATION_S) as connection:
        connection.settimeout(until - time.monotonic())
        connection.sendall(token.encode() + _LENGTH.pack(len(hello)) + hello)
        connection.settimeout(max(0.001, until - time.monotonic()))
        connection.sendall(content)
        if _received(connection, len(_DONE), until=until) != _DONE:
            raise OSError(f"the partner at {address[0]}:{address[1]} has not kept it")


class ReplicaServer:
    """Accepts parts of other ranks and keeps them in this node's memory, within limits, until `close`."""

    def __init__(
        self, replicas: MemoryReplicas, *, rank: int, token: str, host: str, limits: ReplicaLimits
    ) -> None:
        if len(token) != _TOKEN_BYTES:
            raise ValueError(f"a secret has {_TOKEN_BYTES} characters")
        self._replicas, self._rank, self._token, self._limits = replicas, rank, token.encode(), limits
        self._owner_locks = {owner: threading.Lock() for owner in limits.owners}
        self._partners = threading.BoundedSemaphore(len(limits.owners) + _FURTHER_PARTS_AT_ONCE)
        self._strangers: list[socket.socket] = []
        self._counting = threading.Lock()
        self._closed = threading.Event()
        self._socket = socket.create_server((_address_of(host), 0))
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._serve, name="replica-server", daemon=True).start()

    def close(self) -> None:
        """Accept no more parts."""
        self._closed.set()
        with suppress(OSError):  # closing alone leaves an `accept` that waits to take one more connection
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        is_short = False  # whether the last connection found no descriptor, and that is told
        while True:
            try:
                connection, address = self._socket.accept()
            except OSError as error:
                if self._closed.wait(_PAUSE_S if is_short else 0.0):
                    return
                if not is_short:
                    log.warning("no part of a partner can be accepted now: %s", error)
                is_short = True
                continue
            is_short = False
            self._admit(connection)
            try:
                threading.Thread(target=self._handle, args=(connection,), name="replica", daemon=True).start()
            except RuntimeError as error:  # no more threads may be started now
                log.warning("a connection from %s was closed: %s", address[0], error)
                self._count_out(connection)
                connection.close()

    def _admit(self, connection: socket.socket) -> None:
        """Count a connection as a stranger's; end the oldest of them where there are too many."""
        with self._counting:
            self._strangers.append(connection)
            surplus = self._strangers[:-_UNAUTHENTICATED_AT_ONCE]
            self._strangers = self._strangers[-_UNAUTHENTICATED_AT_ONCE:]
            for oldest in surplus:
                with suppress(OSError):  # its thread then finds its end, and closes it
                    oldest.shutdown(socket.SHUT_RDWR)

    def _count_out(self, connection: socket.socket) -> None:
        """Count a connection as a stranger's no more: it is authenticated, or over."""
        with self._counting:
            self._strangers = [other for other in self._strangers if other is not connection]

    def _handle(self, connection: socket.socket) -> None:
        try:
            with connection:
                self._receive(connection)
        except Exception as error:  # noqa: BLE001  — the thread's edge, and the input is not trusted
            log.warning("a partner's part was not kept: %s", error)
        finally:
            self._count_out(connection)

    def _receive(self, connection: socket.socket) -> None:
        until = time.monotonic() + AUTHENTICATION_S
        if not hmac.compare_digest(_received(connection, _TOKEN_BYTES, until=until), self._token):
            raise ValueError("it does not belong to this run")
        self._count_out(connection)
        if not self._partners.acquire(blocking=False):
            raise ValueError("too many parts at once")
        try:
            self._receive_part(connection, until=until)
        finally:
            self._partners.release()

    def _receive_part(self, connection: socket.socket, *, until: float) -> None:
        (length,) = _LENGTH.unpack(_received(connection, _LENGTH.size, until=until))
        if length > self._limits.hello_bytes:
            raise ValueError(f"a hello of {length} bytes, of at most {self._limits.hello_bytes}")
        until = time.monotonic() + send_replica_s(self._limits.bytes)
        hello: Mapping[str, Any] = json.loads(_received(connection, length, until=until))
        replica, size = MemoryReplica.from_json(hello["holding"]), hello["bytes"]
        self._limits.check(replica, bytes=size)
        if not self._owner_locks[replica.rank].acquire(timeout=max(0.0, until - time.monotonic())):
            raise TimeoutError(f"another part of rank {replica.rank} is still being sent")
        try:
            slot = self._free_slot(replica)
            remove_label(slot)
            _receive_into(slot, connection, size, until=until)
            write_label(replace(replica, path=slot))
        finally:
            self._owner_locks[replica.rank].release()
        _set_deadline(connection, until=until)
        connection.sendall(_DONE)

    def _free_slot(self, replica: MemoryReplica) -> Path:
        """Return the slot to overwrite: an empty one, or else that of the older replica."""
        slots = [self._replicas.slot(replica.rank, number, keeper=self._rank) for number in range(SLOTS)]

        def age(slot: Path) -> tuple[int, int]:
            kept = read_replica(label_of(slot))
            return (-1, -1) if kept is None else (kept.incarnation, kept.step)

        return min(slots, key=age)


def _address_of(host: str) -> str:
    """Return the address on which a writer accepts replicas; "", all of them, where `host` does not say it.

    Many systems give their own name an address within 127.0.0.0/8, which no other node reaches, or none.
    """
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return ""
    is_own_name = address.startswith("127.") and address != host
    return "" if is_own_name else address


def _receive_into(path: Path, connection: socket.socket, size: int, *, until: float) -> None:
    """Receive so many bytes into a file of a memory file system, in place where it has that size already."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if os.fstat(file).st_size != size:
            os.ftruncate(file, 0)
            os.ftruncate(file, size)
        if size == 0:
            return
        os.posix_fallocate(file, 0, size)  # otherwise a full memory ends this process instead of raising
        with mmap.mmap(file, size) as memory, memoryview(memory) as view:
            filled = 0
            while filled < size:
                _set_deadline(connection, until=until)
                count = connection.recv_into(view[filled:], min(_RECEIVE_BYTES, size - filled))
                if count == 0:
                    raise OSError("the connection ended too early")
                filled += count
    finally:
        os.close(file)


def _received(connection: socket.socket, size: int, *, until: float) -> bytes:
    received = bytearray()
    while len(received) < size:
        _set_deadline(connection, until=until)
        more = connection.recv(min(_RECEIVE_BYTES, size - len(received)))
        if not more:
            raise OSError("the connection ended too early")
        received += more
    return bytes(received)


def _set_deadline(connection: socket.socket, *, until: float) -> None:
    """Let the connection's next call wait until then (monotonic clock). Raises TimeoutError."""
    left_s = until - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the other side is too slow")
    connection.settimeout(left_s)
