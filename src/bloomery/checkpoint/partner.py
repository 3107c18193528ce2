"""A part of a checkpoint, sent from one rank's memory into another's by their writers.

Who connects says the run's secret first, then how long its greeting is (JSON: what is in the part), then the
part's bytes. A keeper believes none of it: lengths, names and places are held against what the plan of the
run allows, and each wait has a deadline.
"""

from __future__ import annotations

import hmac
import json
import logging
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bloomery.checkpoint.deadlines import STRANGER_S, to_partner_s
from bloomery.checkpoint.manifest import FILE_NAME
from bloomery.checkpoint.ramcopy import (
    SLOTS,
    Holding,
    Holdings,
    label_of,
    read_holding,
    remove_label,
    write_label,
)

log = logging.getLogger(__name__)

_TOKEN_BYTES = 32
_LENGTH = struct.Struct("<Q")
_RECEIVE_BYTES = 8 << 20
_DONE = b"done"
_VALUES_BYTES = 16 << 20
_BYTES_A_BOX = 2048
_BYTES_A_HASH = 16
"""Hex digits of the hash of each mebibyte."""
_STRANGERS_AT_ONCE = 4


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a keeper takes at most: parts of these ranks, of a run with so many.

    bytes, boxes: of the largest part that any rank has.
    """

    owners: tuple[int, ...]
    world: int
    bytes: int
    boxes: int

    @property
    def greeting_bytes(self) -> int:
        """Of what is said about a part: its boxes, the hashes of its blocks, and the values of the run."""
        return _VALUES_BYTES + _BYTES_A_BOX * self.boxes + 2 * _BYTES_A_HASH * (self.bytes >> 20)

    def check(self, holding: Holding, *, bytes: int) -> None:
        """Raise ValueError for a part that no rank of this run, whose copies belong here, can have sent."""
        if holding.rank not in self.owners or holding.world != self.world:
            raise ValueError(f"rank {holding.rank} of {holding.world} is not kept here")
        numbers = (holding.step, holding.incarnation, bytes, *holding.offsets.values())
        if any(type(number) is not int or number < 0 for number in numbers) or bytes > self.bytes:
            raise ValueError(f"{bytes} bytes, of at most {self.bytes}")
        if len(holding.part.boxes) > self.boxes or len(holding.part.files) > self.boxes + 1:
            raise ValueError(f"{len(holding.part.boxes)} boxes, of at most {self.boxes}")
        if set(holding.offsets) != {file.name for file in holding.part.files}:
            raise ValueError("its files are not those that it has places for")
        for file in holding.part.files:
            if not FILE_NAME.fullmatch(file.name):
                raise ValueError(f"a file cannot be named {file.name!r}")
            if not 0 <= file.bytes <= bytes - holding.offsets[file.name]:
                raise ValueError(f"{file.name} lies outside of what was sent")

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON, for a writer."""
        return {**vars(self), "owners": list(self.owners)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Limits:
        """Return what `to_json` wrote."""
        return cls(**{**content, "owners": tuple(content["owners"])})


def send_part(address: tuple[str, int], token: str, holding: Holding, content: memoryview) -> None:
    """Have a partner keep a part, and return when it is whole there. Raises OSError.

    The deadline is that of so many bytes over a slow link, and it is for all of it.
    """
    greeting = json.dumps({"bytes": len(content), "holding": holding.to_json()}).encode()
    until = time.monotonic() + to_partner_s(len(content))
    with socket.create_connection(address, timeout=STRANGER_S) as connection:
        connection.settimeout(until - time.monotonic())
        connection.sendall(token.encode() + _LENGTH.pack(len(greeting)) + greeting)
        connection.settimeout(max(0.001, until - time.monotonic()))
        connection.sendall(content)
        if _received(connection, len(_DONE), until=until) != _DONE:
            raise OSError(f"the partner at {address[0]}:{address[1]} has not kept it")


class Keeper:
    """Listens for parts of others and keeps them in this node's memory, within limits. `close` ends it."""

    def __init__(self, holdings: Holdings, *, rank: int, token: str, host: str, limits: Limits) -> None:
        if len(token) != _TOKEN_BYTES:
            raise ValueError(f"a secret has {_TOKEN_BYTES} characters")
        self._holdings, self._rank, self._token, self._limits = holdings, rank, token.encode(), limits
        self._places = {owner: threading.Lock() for owner in limits.owners}
        self._room = threading.BoundedSemaphore(len(limits.owners) + _STRANGERS_AT_ONCE)
        self._socket = socket.create_server((host, 0))
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._serve, name="keeper", daemon=True).start()

    def close(self) -> None:
        """Take no more parts."""
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, address = self._socket.accept()
            except OSError:  # closed
                return
            if not self._room.acquire(blocking=False):
                log.warning("a connection from %s was closed: too many at once", address[0])
                connection.close()
                continue
            threading.Thread(target=self._take, args=(connection,), name="keep", daemon=True).start()

    def _take(self, connection: socket.socket) -> None:
        try:
            with connection:
                self._keep(connection)
        except Exception as error:  # noqa: BLE001  — a thread's edge, and a stranger's words
            log.warning("a partner's part was not kept: %s", error)
        finally:
            self._room.release()

    def _keep(self, connection: socket.socket) -> None:
        until = time.monotonic() + STRANGER_S
        if not hmac.compare_digest(_received(connection, _TOKEN_BYTES, until=until), self._token):
            raise ValueError("it does not belong to this run")
        (length,) = _LENGTH.unpack(_received(connection, _LENGTH.size, until=until))
        if length > self._limits.greeting_bytes:
            raise ValueError(f"a greeting of {length} bytes, of at most {self._limits.greeting_bytes}")
        until = time.monotonic() + to_partner_s(self._limits.bytes)
        greeting: Mapping[str, Any] = json.loads(_received(connection, length, until=until))
        holding, size = Holding.from_json(greeting["holding"]), greeting["bytes"]
        self._limits.check(holding, bytes=size)
        if not self._places[holding.rank].acquire(timeout=max(0.0, until - time.monotonic())):
            raise TimeoutError(f"another part of rank {holding.rank} is still being sent")
        try:
            slot = self._free_slot(holding)
            remove_label(slot)
            _receive_into(slot, connection, size, until=until)
            write_label(replace(holding, path=slot))
        finally:
            self._places[holding.rank].release()
        _wait_at_most(connection, until=until)
        connection.sendall(_DONE)

    def _free_slot(self, holding: Holding) -> Path:
        """Return the slot whose loss costs least: an empty one, or the older."""
        slots = [self._holdings.slot(holding.rank, number, keeper=self._rank) for number in range(SLOTS)]

        def age(slot: Path) -> tuple[int, int]:
            kept = read_holding(label_of(slot))
            return (-1, -1) if kept is None else (kept.incarnation, kept.step)

        return min(slots, key=age)


def _receive_into(path: Path, connection: socket.socket, size: int, *, until: float) -> None:
    """Fill a file of a memory file system with so many bytes, in place where it has that size already."""
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
                _wait_at_most(connection, until=until)
                count = connection.recv_into(view[filled:], min(_RECEIVE_BYTES, size - filled))
                if count == 0:
                    raise OSError("the connection ended too early")
                filled += count
    finally:
        os.close(file)


def _received(connection: socket.socket, size: int, *, until: float) -> bytes:
    received = bytearray()
    while len(received) < size:
        _wait_at_most(connection, until=until)
        more = connection.recv(min(_RECEIVE_BYTES, size - len(received)))
        if not more:
            raise OSError("the connection ended too early")
        received += more
    return bytes(received)


def _wait_at_most(connection: socket.socket, *, until: float) -> None:
    """Let the next call wait until then, whoever sends however slowly. Raises TimeoutError."""
    left_s = until - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the other side is too slow")
    connection.settimeout(left_s)
