"""A part of a checkpoint, sent from one rank's memory into another's by their writers."""

from __future__ import annotations

import hmac
import json
import logging
import mmap
import os
import socket
import struct
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

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

TIMEOUT_S = 60.0
"""Without a byte from the other side."""
_LENGTH = struct.Struct("<Q")
_GREETING_BYTES_AT_MOST = 1 << 30
_RECEIVE_BYTES = 8 << 20
_DONE = b"done"


def send_part(address: tuple[str, int], token: str, holding: Holding, content: memoryview) -> None:
    """Have a partner keep a part, and return when it is whole there. Raises OSError."""
    greeting = json.dumps({"token": token, "bytes": len(content), "holding": holding.to_json()}).encode()
    with socket.create_connection(address, timeout=TIMEOUT_S) as connection:
        connection.sendall(_LENGTH.pack(len(greeting)) + greeting)
        connection.sendall(content)
        if _received(connection, len(_DONE)) != _DONE:
            raise OSError(f"the partner at {address[0]}:{address[1]} has not kept it")


class Keeper:
    """Listens for parts of others and keeps them in this node's memory."""

    def __init__(self, holdings: Holdings, *, rank: int, token: str, host: str) -> None:
        self._holdings, self._rank, self._token = holdings, rank, token
        self._socket = socket.create_server((host, 0))
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._serve, name="keeper", daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            with connection:
                connection.settimeout(TIMEOUT_S)
                try:
                    self._keep(connection)
                except (OSError, ValueError, KeyError, TypeError) as error:
                    log.warning("a partner's part was not kept: %s", error)

    def _keep(self, connection: socket.socket) -> None:
        (length,) = _LENGTH.unpack(_received(connection, _LENGTH.size))
        if length > _GREETING_BYTES_AT_MOST:
            raise ValueError(f"a greeting of {length} bytes")
        greeting: Mapping[str, Any] = json.loads(_received(connection, length))
        if not hmac.compare_digest(str(greeting["token"]), self._token):
            raise ValueError("it does not belong to this run")
        holding = Holding.from_json(greeting["holding"])
        slot = self._free_slot(holding)
        remove_label(slot)
        _receive_into(slot, connection, int(greeting["bytes"]))
        write_label(replace(holding, path=slot))
        connection.sendall(_DONE)

    def _free_slot(self, holding: Holding) -> Path:
        """Return the slot whose loss costs least: an empty one, or the older."""
        slots = [self._holdings.slot(holding.rank, number, keeper=self._rank) for number in range(SLOTS)]

        def age(slot: Path) -> tuple[int, int]:
            kept = read_holding(label_of(slot))
            return (-1, -1) if kept is None else (kept.incarnation, kept.step)

        return min(slots, key=age)


def _receive_into(path: Path, connection: socket.socket, size: int) -> None:
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
                count = connection.recv_into(view[filled:], min(_RECEIVE_BYTES, size - filled))
                if count == 0:
                    raise OSError("the connection ended too early")
                filled += count
    finally:
        os.close(file)


def _received(connection: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        more = connection.recv(min(_RECEIVE_BYTES, size - len(received)))
        if not more:
            raise OSError("the connection ended too early")
        received += more
    return bytes(received)
