"""Records as JSON and back, strictly: what is read comes from other machines.

A field that lacks, is unknown, has another type, is too long, or is no name where a name is due, is refused
(GarbledRecord). Nothing is converted and nothing is filled in.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from bloomery.data.position import Position
from bloomery.data.ranges import from_pairs, to_pairs
from bloomery.elastic.control.keys import is_name
from bloomery.elastic.records import Attempt, Commit, Done, Failed, Member, Ready, Shares
from bloomery.errors import CoordinatorError

Json: TypeAlias = Any  # JSON, checked field by field
Reader: TypeAlias = Callable[[Json], Any]  # Any: what the field holds
R = TypeVar("R")

TEXT_AT_MOST = 2_000
PEERS_AT_MOST = 4_096
RANGES_AT_MOST = 65_536
_WHOLE_AT_MOST = 1 << 62


class GarbledRecord(CoordinatorError):
    """What lies at a key is no record of its kind."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(
            f"{what} in the coordinator makes no sense: {why}",
            remedy="Do all peers run the same version of bloomery? Was the key written by something else?",
        )


@dataclass(frozen=True, kw_only=True)
class Tried:
    """An attempt as it is stored: with the life of each member, as the create_revision of its key."""

    attempt: Attempt
    lives: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Testimony:
    """What a peer remembers of the run, should the coordinator have lost it."""

    epoch: int
    commit: Commit
    shares: Shares | None


class Codec(Generic[R]):
    """Of one kind of record. readers: what each field is."""

    def __init__(self, kind: Callable[..., R], what: str, readers: Mapping[str, Reader]) -> None:
        self._kind, self._what, self._readers = kind, what, readers

    def text(self, record: R) -> str:
        """The record as JSON."""
        return json.dumps(self.plain(record), separators=(",", ":"), allow_nan=False)

    def record(self, text: str) -> R:
        """What `text` wrote. Raises GarbledRecord."""
        try:
            return self.from_plain(json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise GarbledRecord(self._what, str(error)) from error

    def plain(self, record: R) -> dict[str, Json]:
        """The record as what JSON knows."""
        return {name: _plain(getattr(record, name)) for name in self._readers}

    def from_plain(self, stored: Json) -> R:
        """What `plain` gave. Raises ValueError or TypeError."""
        if not isinstance(stored, dict) or set(stored) != set(self._readers):
            shown = sorted(map(str, stored)) if isinstance(stored, dict) else type(stored).__name__
            raise ValueError(f"fields {shown} instead of {sorted(self._readers)}"[:TEXT_AT_MOST])
        values = {}
        for name, reader in self._readers.items():
            try:
                values[name] = reader(stored[name])
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{name}: {error}") from error
        return self._kind(**values)


def whole(value: Json) -> int:
    """A number from 0 on."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _WHOLE_AT_MOST:
        raise ValueError(f"{_shown(value)} is no count")
    return value


def _round(value: Json) -> int:
    return -1 if value == -1 and not isinstance(value, bool | float) else whole(value)


def _number(value: Json) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{_shown(value)} is no number")
    return float(value)


def _norm(value: Json) -> float:
    """JSON has no infinity: `finite` says the same."""
    return math.inf if value is None else _number(value)


def _seconds(value: Json) -> float:
    seconds = _number(value)
    if not 0.0 <= seconds < math.inf:
        raise ValueError(f"{_shown(value)} is no time in seconds")
    return seconds


def _truth(value: Json) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{_shown(value)} is neither true nor false")
    return value


def _text(value: Json) -> str:
    if not isinstance(value, str) or len(value) > TEXT_AT_MOST or not value.isprintable():
        raise ValueError(f"{_shown(value)} is no text of up to {TEXT_AT_MOST} characters")
    return value


def _name(value: Json) -> str:
    if not is_name(value):
        raise ValueError(f"{_shown(value)} is no name")
    return str(value)


def _maybe(reader: Reader) -> Reader:
    return lambda value: None if value is None else reader(value)


def _several(reader: Reader) -> Reader:
    def read(value: Json) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) > PEERS_AT_MOST:
            raise ValueError(f"{_shown(value)} is no list of up to {PEERS_AT_MOST}")
        return tuple(reader(one) for one in value)

    return read


def _names(value: Json) -> tuple[str, ...]:
    names: tuple[str, ...] = _several(_name)(value)
    if len(set(names)) != len(names):
        raise ValueError("a peer is named twice")
    return names


def _by_name(reader: Reader) -> Reader:
    def read(value: Json) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > PEERS_AT_MOST:
            raise ValueError(f"{_shown(value)} is no table of up to {PEERS_AT_MOST} peers")
        return {_name(name): reader(one) for name, one in value.items()}

    return read


def _ranges(value: Json) -> tuple[range, ...]:
    if not isinstance(value, list) or len(value) > RANGES_AT_MOST:
        raise ValueError(f"{_shown(value)} is no list of up to {RANGES_AT_MOST} ranges")
    for pair in value:
        if not isinstance(pair, list) or len(pair) != 2 or whole(pair[0]) > whole(pair[1]):
            raise ValueError(f"{_shown(pair)} is no range")
    return from_pairs(value)


def _position(value: Json) -> Position:
    if not isinstance(value, dict) or set(value) != {"consumed", "skips", "holes"}:
        raise ValueError(f"{_shown(value)} is no position")
    for name in ("skips", "holes"):
        _ranges(value[name])
    whole(value["consumed"])
    return Position.from_json(value)


def _plain(value: Any) -> Json:  # Any: what a record's field may hold
    if isinstance(value, Position):
        return value.to_json()
    if isinstance(value, tuple) and value and isinstance(value[0], range):
        return to_pairs(value)
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):  # messages of libraries have several lines; readers refuse that
        return "".join(sign if sign.isprintable() else " " for sign in value[:TEXT_AT_MOST])
    return _NESTED[type(value)].plain(value) if type(value) in _NESTED else value


def _shown(value: Json) -> str:
    return repr(value)[:80]


MEMBER = Codec(
    Member,
    "a member",
    {
        "peer": _name,
        "incarnation": _text,
        "addresses": _several(_text),
        "serves": _several(_text),
        "round": _round,
        "digest": _text,
        "lanes": whole,
        "recipe": _text,
        "samples": whole,
        "relays": _truth,
        "epoch": whole,
        "overtaken": whole,
    },
)
READY = Codec(
    Ready,
    "what a peer brings to a round",
    {
        "peer": _name,
        "round": whole,
        "steps": whole,
        "tokens": whole,
        "spent": _ranges,
        "norm": _norm,
        "finite": _truth,
        "wants_save": _truth,
        "rewind_to": _maybe(whole),
        "kept": _ranges,
        "skip": _ranges,
        "why": _text,
        "step_s": _seconds,
    },
)
DONE = Codec(
    Done,
    "what a peer holds after an attempt",
    {"peer": _name, "round": whole, "epoch": whole, "digest": _text},
)
FAILED = Codec(
    Failed,
    "a failed attempt",
    {"peer": _name, "round": whole, "epoch": whole, "kind": _text, "culprit": _maybe(_name), "why": _text},
)
COMMIT = Codec(
    Commit,
    "a commit",
    {
        "round": whole,
        "epoch": whole,
        "members": _names,
        "digest": _text,
        "position": _position,
        "sources": _names,
        "left_out": _by_name(_text),
        "rewind_to": _maybe(whole),
        "save": _truth,
        "why": _text,
    },
)
SHARES = Codec(
    Shares,
    "the shares of a round",
    {"round": whole, "position": _position, "shares": _by_name(_ranges), "live": whole},
)
ATTEMPT = Codec(
    Attempt,
    "an attempt",
    {
        "round": whole,
        "epoch": whole,
        "members": _names,
        "weights": _several(_number),
        "left_out": _by_name(_text),
    },
)
TRIED = Codec(Tried, "an attempt", {"attempt": ATTEMPT.from_plain, "lives": _several(whole)})
TESTIMONY = Codec(
    Testimony,
    "what a peer remembers",
    {"epoch": whole, "commit": COMMIT.from_plain, "shares": _maybe(SHARES.from_plain)},
)
RATES: Reader = _by_name(_number)

_NESTED: Mapping[type, Codec[Any]] = {Attempt: ATTEMPT, Commit: COMMIT, Shares: SHARES}  # Any: by type


def epoch_of(text: str) -> int:
    """The number at the key of the epoch. Raises GarbledRecord."""
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise GarbledRecord("the epoch", _shown(text))
    return int(text)


def rates_of(text: str) -> dict[str, float]:
    """What a peer measured of its links to others, megabits a second. Raises GarbledRecord."""
    try:
        rates: dict[str, float] = RATES(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise GarbledRecord("measured links", str(error)) from error
    return rates
