"""What two peers say to one another before a connection is theirs: short, strict, with a deadline."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from bloomery.elastic.links.refusal import Refused

MAGIC = b"bloomery link 1\n"
_MAX_BYTES = 2048
_MAX_TEXT = 256

PURPOSES = ("ring", "probe", "relay")


@dataclass(frozen=True, kw_only=True)
class Greeting:
    """The dialler's first words: who, to whom, and what the connection is for.

    sends: the dialler sends the tensors of a ring. circuit: with relay, which two ends belong together.
    """

    run: str
    peer: str
    incarnation: str
    target: str
    target_incarnation: str
    purpose: str
    lane: int = 0
    stream: int = 0
    sends: bool = False
    encrypt: bool = False
    circuit: str = ""
    nonce: str = ""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The listener's: who it is, and that it knows what only the run knows."""

    peer: str
    incarnation: str
    encrypt: bool
    nonce: str
    proof: str


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """The dialler's proof."""

    proof: str


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """The end. refused: why not; empty: welcome."""

    refused: str


Words = TypeVar("Words", Greeting, Answer, Confirmation, Welcome)


def say(
    connection: socket.socket, words: Greeting | Answer | Confirmation | Welcome, *, until: float
) -> bytes:
    """Send; returns the bytes, which both sides hash."""
    content = json.dumps(asdict(words), separators=(",", ":")).encode()
    connection.settimeout(_left(until))
    connection.sendall(len(content).to_bytes(2, "big") + content)
    return content


def hear(connection: socket.socket, kind: type[Words], *, until: float) -> tuple[Words, bytes]:
    """Receive what `say` sent, and its bytes. Refused: it is something else. until: a moment of the clock."""
    length = int.from_bytes(receive_exactly(connection, 2, until=until), "big")
    if length > _MAX_BYTES:
        raise Refused(f"a greeting of {length} bytes")
    content = receive_exactly(connection, length, until=until)
    try:
        stored = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Refused("a greeting that is no JSON") from error
    return _checked(kind, stored), content


def receive_exactly(connection: socket.socket, count: int, *, until: float) -> bytes:
    """`count` bytes, however slowly they come, but before `until`."""
    content = bytearray()
    while len(content) < count:
        connection.settimeout(_left(until))
        piece = connection.recv(count - len(content))
        if not piece:
            raise Refused("the connection ended within the greeting")
        content += piece
    return bytes(content)


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise Refused("the greeting took too long")
    return left


_TYPES: dict[str, type] = {"str": str, "int": int, "bool": bool}


def _checked(kind: type[Words], stored: Any) -> Words:  # Any: JSON
    wanted = {item.name: _TYPES[str(item.type)] for item in fields(kind)}
    if not isinstance(stored, dict) or set(stored) != set(wanted):
        raise Refused("a greeting with other fields")
    for name, value in stored.items():
        if type(value) is not wanted[name] or (isinstance(value, str) and len(value) > _MAX_TEXT):
            raise Refused(f"a greeting whose {name} cannot be")
    if isinstance(stored.get("lane"), int) and not (
        0 <= stored["lane"] < 4096 and 0 <= stored["stream"] < 256
    ):
        raise Refused("a greeting for a lane or a stream that cannot be")
    return kind(**stored)
