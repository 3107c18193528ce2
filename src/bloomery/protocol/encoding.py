"""Encodes and decodes every message and record of the protocol as strict, bounded JSON.

Each message is a `Message`: a frozen struct whose field types carry bounds. What arrives was written by
another process or another machine, so `decode` raises `ProtocolError` for everything that is not exactly one
message: a missing or an unknown field, a wrong type, a number, text or list beyond its bound, too deep
nesting. It converts no value and fills in no default.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from bloomery.data.position import Position
from bloomery.errors import CoordinatorError, PeerError
from bloomery.protocol.keys import NAME_PATTERN, NUMBER_AT_MOST

M = TypeVar("M", bound="Message")

COUNT_AT_MOST = 1 << 62
TEXT_AT_MOST = 2_000
SHORT_TEXT_AT_MOST = 256
PATH_AT_MOST = 4_096
PEERS_AT_MOST = 4_096
RANGES_AT_MOST = 65_536
FEW_RANGES_AT_MOST = 256
"""The most ranges that one offer may ask to skip."""
SECONDS_AT_MOST = 3_600.0
RATE_AT_MOST = 1e9
STEP_SAMPLES_AT_MOST = 10**9
"""The most samples of one inner step of a peer. A share of more would not fit into the record of shares."""
SAVES_AT_MOST = 64
"""The most checkpoints that a member may name."""
COPIES_AT_MOST = 8
"""The most copies of states that a member may name."""
PAST_AT_MOST = 8
"""The most earlier parts that an offer may list."""

# Texts reach logs and terminals, so they hold no control characters, no line separators, and no characters
# that are invisible or change the direction of a text.
_PRINTABLE = r"\A[^\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]*\Z"

Name = Annotated[str, Meta(pattern=NAME_PATTERN)]
Text = Annotated[str, Meta(max_length=TEXT_AT_MOST, pattern=_PRINTABLE)]
ShortText = Annotated[str, Meta(max_length=SHORT_TEXT_AT_MOST, pattern=_PRINTABLE)]
Names = Annotated[tuple[Name, ...], Meta(max_length=PEERS_AT_MOST)]
Texts = Annotated[tuple[Text, ...], Meta(max_length=PEERS_AT_MOST)]
FewTexts = Annotated[tuple[Text, ...], Meta(max_length=COPIES_AT_MOST)]
TextByName = Annotated[Mapping[Name, Text], Meta(max_length=PEERS_AT_MOST)]
TextByText = Annotated[Mapping[Text, Text], Meta(max_length=PEERS_AT_MOST)]

Count = Annotated[int, Meta(ge=0, le=COUNT_AT_MOST)]
StepSamples = Annotated[int, Meta(ge=0, le=STEP_SAMPLES_AT_MOST)]
Counts = Annotated[tuple[Count, ...], Meta(max_length=PEERS_AT_MOST)]
Number = Annotated[int, Meta(ge=0, le=NUMBER_AT_MOST)]
"""The number of a round or an epoch, so bounded that a key can hold it and the number after it."""
NumberOrNone = Annotated[int, Meta(ge=-1, le=NUMBER_AT_MOST)]
"""The number of a round; -1 before the first one."""
Numbers = Annotated[tuple[Number, ...], Meta(max_length=SAVES_AT_MOST)]
Weights = Annotated[tuple[Annotated[float, Meta(ge=0.0, le=1.0)], ...], Meta(max_length=PEERS_AT_MOST)]
Norm = Annotated[float, Meta(ge=0.0)]
PastParts = Annotated[tuple[tuple[Count, Norm], ...], Meta(max_length=PAST_AT_MOST)]
"""(steps, norm) of earlier parts."""
Seconds = Annotated[float, Meta(ge=0.0, le=SECONDS_AT_MOST)]
Ranges = Annotated[tuple[range, ...], Meta(max_length=RANGES_AT_MOST)]
"""Ranges of samples; in JSON `[[start, stop], …]`."""
FewRanges = Annotated[tuple[range, ...], Meta(max_length=FEW_RANGES_AT_MOST)]
RangesByName = Annotated[Mapping[Name, Ranges], Meta(max_length=PEERS_AT_MOST)]
Rates = Annotated[dict[Name, Annotated[float, Meta(ge=0.0, le=RATE_AT_MOST)]], Meta(max_length=PEERS_AT_MOST)]

if TYPE_CHECKING:
    StreamPosition = Position
else:

    class _IsPosition(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, Position)

    class StreamPosition(metaclass=_IsPosition):
        """Stands for `Position` in the types of messages.

        msgspec would decode the dataclass `Position` by itself, without bounds and with unknown fields. It
        does not know this class, so it calls `_from_plain` instead.
        """


class ProtocolError(CoordinatorError, PeerError):
    """Another process has sent or written something that is not a valid message of the expected kind."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(
            f"What was received is no {kind}: {printable(why)[:500]}",
            remedy="Do all peers run the same version of bloomery? Or did something else write it?",
        )


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message or a record. Its fields have no defaults, so that `decode` refuses one that lacks a field."""


class Reasoned(Message, frozen=True, kw_only=True):
    """A message with a reason in words.

    why: the reason. It may come from a library, so unprintable characters in it are replaced by spaces.
    """

    why: Text

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "why", printable(self.why))


class _StoredPosition(Message, frozen=True, kw_only=True):
    consumed: Count
    skips: Ranges
    holes: Ranges


def encode(message: Message) -> bytes:
    """Return a message as JSON."""
    return msgspec.json.encode(message, enc_hook=_to_plain)


def encode_text(message: Message) -> str:
    """Return a message as the JSON text that is stored under a key in the coordinator."""
    return encode(message).decode()


def decode(content: bytes | str, kind: type[M]) -> M:
    """Return the message of this kind that `encode` wrote. Raises ProtocolError for anything else."""
    message: M = _decode(content, kind, kind.__name__)
    return message


def decode_epoch(text: str) -> int:
    """Return the number that is stored under the key of the epoch. Raises ProtocolError."""
    epoch: int = _decode(text, Number, "epoch")
    return epoch


def decode_rates(text: str) -> dict[str, float]:
    """Return the bandwidths that a peer measured, by peer, in megabits a second. Raises ProtocolError."""
    rates: dict[str, float] = _decode(text, Rates, "table of rates in megabits a second")
    return rates


def encode_settings(settings: Mapping[str, str]) -> str:
    """Return the text that is stored under the key of a peer's settings."""
    return msgspec.json.encode({key: printable(value) for key, value in settings.items()}).decode()


def decode_settings(text: str) -> dict[str, str]:
    """Return the settings that `encode_settings` wrote. Raises ProtocolError."""
    settings: dict[str, str] = _decode(text, TextByText, "table of settings")
    return settings


def decode_union(
    content: bytes, union: Any, name: str
) -> Any:  # Any: a union of messages, told by their tags
    """Return the message of a tagged union. name: what the error calls it. Raises ProtocolError."""
    return _decode(content, union, name)


def printable(text: str) -> str:
    """Return a text with unprintable characters replaced by spaces, cut to TEXT_AT_MOST characters."""
    text = text[:TEXT_AT_MOST]
    if text.isprintable():  # nearly always, and many times faster than sign by sign
        return text
    return "".join(sign if sign.isprintable() else " " for sign in text)


_BUILDING = threading.RLock()
"""Held while a decoder is built. msgspec publishes what it knows of a struct before that is complete, and a
second thread that decodes the struct meanwhile ends the process by a segmentation fault."""


def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    with _BUILDING:
        return _built_decoder(kind)


@cache
def _built_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, dec_hook=_from_plain)


def _decode(content: bytes | str, kind: Any, name: str) -> Any:
    try:
        return _decoder(kind).decode(content)
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors
        raise ProtocolError(name, str(error)) from error


def _to_plain(value: object) -> object:
    if isinstance(value, range):
        return [value.start, value.stop]
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _from_plain(kind: type, value: Any) -> object:  # Any: JSON of another process, checked here
    """Return a value of a type that msgspec does not know.

    Raises ValueError, to which msgspec adds where in the message the value is.
    """
    if kind is range:
        return _range(value)
    if kind is StreamPosition:
        _decoder(_StoredPosition)  # so that msgspec knows all of it before `convert` asks
        stored = msgspec.convert(value, _StoredPosition, dec_hook=_from_plain)
        return Position(consumed=stored.consumed, skips=stored.skips, holes=stored.holes)
    if kind is Path:
        if not isinstance(value, str) or not 0 < len(value) <= PATH_AT_MOST or "\0" in value:
            raise ValueError(f"no path of up to {PATH_AT_MOST} characters")
        return Path(value)
    raise TypeError(f"{kind.__name__} has no form in JSON")


def _range(value: Any) -> range:  # Any: JSON of another process, checked here
    if type(value) is not list or len(value) != 2 or any(type(end) is not int for end in value):
        raise ValueError("no [start, stop] of samples")
    start, stop = value
    if not 0 <= start <= stop <= COUNT_AT_MOST:
        raise ValueError("no [start, stop] of samples: 0 <= start <= stop <= 2^62")
    return range(start, stop)
