"""What goes over the socket between a peer's parent and its ranks: strict JSON, with descriptors.

Both ends belong to one user on one machine; strictness is for mistakes and for versions that differ: an
unknown word, a missing field or a value of another type is refused, never guessed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from bloomery.data.position import Position
from bloomery.data.ranges import Ranges, from_pairs, to_pairs
from bloomery.elastic.records import Attempt, Commit, Ready, Shares
from bloomery.elastic.seam import Abort, Committed, Go, Halt, Hop, Hurry, Reduce, Replace, Told
from bloomery.errors import PeerError

MAX_BYTES = 160 * 1024
"""Of one message; the kernel takes this much at once without any setting."""

MAX_DESCRIPTORS = 253
"""The kernel's limit for one message (SCM_MAX_FD)."""

KEY_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class Hello:
    """A rank's first message. rank, world: within its peer."""

    rank: int
    world: int
    process: int


@dataclass(frozen=True, kw_only=True)
class Moving:
    """What a rank is doing."""

    phase: str
    step: int


@dataclass(frozen=True, kw_only=True)
class Holding:
    """Which state a rank holds."""

    round: int
    digest: str
    step: int
    directory: Path | None
    samples: int


@dataclass(frozen=True, kw_only=True)
class RingDone:
    """A rank's ring completed."""

    epoch: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class RingFailed:
    """A rank's ring did not."""

    epoch: int
    kind: str
    culprit: str | None
    why: str


@dataclass(frozen=True, kw_only=True)
class Heeded:
    """A rank has read an abort: it moves, and uses the connections of that epoch no more."""

    epoch: int


@dataclass(frozen=True, kw_only=True)
class Leave:
    """A rank ends, by intention."""

    why: str


Said = Hello | Moving | Holding | Ready | RingDone | RingFailed | Heeded | Leave


def encode(message: Said | Told) -> bytes:
    """The message as bytes. ValueError: it is too long to be sent."""
    word, form = _BY_TYPE[type(message)]
    content = json.dumps({"is": word} | form.write(message), allow_nan=False, separators=(",", ":")).encode()
    if len(content) > MAX_BYTES:
        raise ValueError(f"a message of {len(content)} bytes; {MAX_BYTES} fit")
    return content


def descriptors_of(message: Said | Told) -> tuple[int, ...]:
    """Descriptors that travel with the message, in the order in which `decode` takes them."""
    if not isinstance(message, Reduce):
        return ()
    found = tuple(fd for hop in message.hops for fd in (*hop.next_fds, *hop.previous_fds))
    if len(found) > MAX_DESCRIPTORS:
        raise ValueError(f"{len(found)} connections for one rank; {MAX_DESCRIPTORS} fit: use fewer streams")
    return found


def decode(content: bytes, descriptors: Sequence[int] = ()) -> Said | Told:
    """What `encode` wrote. Anything else is a PeerError; the descriptors stay the caller's then."""
    try:
        stored = json.loads(content)
        word = stored.pop("is")
        form = _BY_WORD[word]
        message: Said | Told = form.read(stored, list(descriptors))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise PeerError(
            f"A message between parent and rank that makes no sense ({type(error).__name__}: {error}).",
            remedy="Start parent and ranks from one installation.",
        ) from error
    return message


_Type = type | tuple[type, ...]
_Types = dict[str, _Type]


@dataclass(frozen=True, kw_only=True)
class _Form:
    """How one kind of message becomes JSON and comes back."""

    write: Callable[[Any], dict[str, Any]]  # Any: each form knows its own type
    read: Callable[[dict[str, Any], list[int]], Any]


def _plain(made: type, **types: _Type) -> _Form:
    """A message whose fields are JSON already. types: by field, checked when reading."""

    def read(stored: dict[str, Any], descriptors: list[int]) -> Any:
        _expect_none(descriptors)
        return made(**_checked(stored, types))

    return _Form(write=asdict, read=read)


def _checked(stored: Mapping[str, Any], types: Mapping[str, _Type]) -> dict[str, Any]:
    if set(stored) != set(types):
        raise ValueError(f"fields {sorted(stored)} instead of {sorted(types)}")
    for name, wanted in types.items():
        value = stored[name]
        allowed = wanted if isinstance(wanted, tuple) else (wanted,)
        if (isinstance(value, bool) and bool not in allowed) or not isinstance(value, allowed):
            raise TypeError(f"{name} is {value!r}")
    return dict(stored)


def _expect_none(descriptors: list[int]) -> None:
    if descriptors:
        raise ValueError(f"{len(descriptors)} descriptors that belong to nothing")


_NONE = type(None)
_PIECES = ("spent", "kept", "skip")
_SHARES: _Types = {"round": int, "position": dict, "shares": dict, "live": int}
_ATTEMPT: _Types = {"round": int, "epoch": int, "members": list, "weights": list, "left_out": dict}
_COMMIT: _Types = {
    **{"round": int, "epoch": int, "members": list, "digest": str, "position": dict, "sources": list},
    **{"left_out": dict, "rewind_to": (int, _NONE), "save": bool, "why": str},
}
_READY: _Types = {
    **{"peer": str, "round": int, "steps": int, "tokens": int, "spent": list, "norm": (int, float, _NONE)},
    **{"finite": bool, "wants_save": bool, "rewind_to": (int, _NONE), "kept": list, "skip": list, "why": str},
    "step_s": (int, float),
}


def _attempt_to_json(attempt: Attempt) -> dict[str, Any]:
    return asdict(attempt)


def _attempt_from_json(stored: Any) -> Attempt:
    values = _checked(stored, _ATTEMPT)
    if not all(isinstance(name, str) for name in values["members"]):
        raise TypeError("members that are no names")
    return Attempt(
        round=values["round"],
        epoch=values["epoch"],
        members=tuple(values["members"]),
        weights=tuple(float(weight) for weight in values["weights"]),
        left_out=_texts(values["left_out"]),
    )


def _texts(stored: Mapping[Any, Any]) -> dict[str, str]:
    if not all(isinstance(word, str) for pair in stored.items() for word in pair):
        raise TypeError(f"texts expected in {stored!r}")
    return dict(stored)


def _commit_to_json(commit: Commit) -> dict[str, Any]:
    plain = {item.name: getattr(commit, item.name) for item in fields(commit)}
    return plain | {"position": commit.position.to_json(), "left_out": dict(commit.left_out)}


def _commit_from_json(stored: Any) -> Commit:
    values = _checked(stored, _COMMIT)
    replaced = {
        "position": Position.from_json(values["position"]),
        "members": tuple(values["members"]),
        "sources": tuple(values["sources"]),
        "left_out": _texts(values["left_out"]),
    }
    return Commit(**(values | replaced))


def _write_go(go: Go) -> dict[str, Any]:
    shares = go.shares
    return {
        "shares": {
            "round": shares.round,
            "position": shares.position.to_json(),
            "shares": {peer: to_pairs(ranges) for peer, ranges in shares.shares.items()},
            "live": shares.live,
        },
        "samples": to_pairs(go.samples),
    }


def _read_go(stored: dict[str, Any], descriptors: list[int]) -> Go:
    _expect_none(descriptors)
    values = _checked(stored, {"shares": dict, "samples": list})
    shares = _checked(values["shares"], _SHARES)
    return Go(
        shares=Shares(
            round=shares["round"],
            position=Position.from_json(shares["position"]),
            shares={peer: from_pairs(pairs) for peer, pairs in shares["shares"].items()},
            live=shares["live"],
        ),
        samples=from_pairs(values["samples"]),
    )


def _write_replace(replace: Replace) -> dict[str, Any]:
    return {
        "round": replace.round,
        "digest": replace.digest,
        "position": replace.position.to_json(),
        "directory": str(replace.directory),
        "why": replace.why,
    }


def _read_replace(stored: dict[str, Any], descriptors: list[int]) -> Replace:
    _expect_none(descriptors)
    types: _Types = {"round": int, "digest": str, "position": dict, "directory": str, "why": str}
    values = _checked(stored, types)
    replaced = {"position": Position.from_json(values["position"]), "directory": Path(values["directory"])}
    return Replace(**(values | replaced))


def _write_reduce(reduce: Reduce) -> dict[str, Any]:
    hops = [
        {
            "lane": hop.lane,
            "next": [key.hex() for key in hop.send_keys],
            "previous": [key.hex() for key in hop.receive_keys],
        }
        for hop in reduce.hops
    ]
    return {
        "attempt": _attempt_to_json(reduce.attempt),
        "index": reduce.index,
        "hops": hops,
        "stall_s": reduce.stall_s,
        "deadline_s": reduce.deadline_s,
    }


def _read_reduce(stored: dict[str, Any], descriptors: list[int]) -> Reduce:
    values = _checked(
        stored,
        {"attempt": dict, "index": int, "hops": list, "stall_s": (int, float), "deadline_s": (int, float)},
    )
    left = list(descriptors)
    hops = []
    for entry in values["hops"]:
        hop = _checked(entry, {"lane": int, "next": list, "previous": list})
        send, receive = _keys(hop["next"]), _keys(hop["previous"])
        following, left = left[: len(send)], left[len(send) :]
        preceding, left = left[: len(receive)], left[len(receive) :]
        if len(following) != len(send) or len(preceding) != len(receive):
            raise ValueError("fewer descriptors than keys")
        hops.append(
            Hop(
                lane=hop["lane"],
                next_fds=tuple(following),
                previous_fds=tuple(preceding),
                send_keys=send,
                receive_keys=receive,
            )
        )
    _expect_none(left)
    replaced = {"attempt": _attempt_from_json(values["attempt"]), "hops": tuple(hops)}
    return Reduce(**(values | replaced))


def _keys(stored: Sequence[Any]) -> tuple[bytes, ...]:
    keys = tuple(bytes.fromhex(text) for text in stored)
    if any(len(key) != KEY_BYTES for key in keys):
        raise ValueError(f"a key that is not {KEY_BYTES} bytes long")
    return keys


def _write_committed(committed: Committed) -> dict[str, Any]:
    return {"commit": _commit_to_json(committed.commit), "included": committed.included}


def _read_committed(stored: dict[str, Any], descriptors: list[int]) -> Committed:
    _expect_none(descriptors)
    values = _checked(stored, {"commit": dict, "included": bool})
    return Committed(commit=_commit_from_json(values["commit"]), included=values["included"])


def _write_holding(holding: Holding) -> dict[str, Any]:
    return asdict(holding) | {"directory": None if holding.directory is None else str(holding.directory)}


def _read_holding(stored: dict[str, Any], descriptors: list[int]) -> Holding:
    _expect_none(descriptors)
    types: _Types = {"round": int, "digest": str, "step": int, "directory": (str, _NONE), "samples": int}
    values = _checked(stored, types)
    directory = values["directory"]
    return Holding(**(values | {"directory": None if directory is None else Path(directory)}))


def _write_ready(ready: Ready) -> dict[str, Any]:
    norm = ready.norm if ready.norm - ready.norm == 0 else None  # JSON has no infinity: `finite` says it
    plain = {item.name: getattr(ready, item.name) for item in fields(ready)}
    pieces = {name: to_pairs(getattr(ready, name)) for name in _PIECES}
    return plain | pieces | {"norm": norm}


def _read_ready(stored: dict[str, Any], descriptors: list[int]) -> Ready:
    _expect_none(descriptors)
    values = _checked(stored, _READY)
    norm = float("inf") if values["norm"] is None else float(values["norm"])
    pieces: dict[str, Ranges] = {name: from_pairs(values[name]) for name in _PIECES}
    return Ready(**(values | pieces | {"norm": norm}))


_WORDS: dict[str, tuple[type, _Form]] = {
    "hello": (Hello, _plain(Hello, rank=int, world=int, process=int)),
    "moving": (Moving, _plain(Moving, phase=str, step=int)),
    "holding": (Holding, _Form(write=_write_holding, read=_read_holding)),
    "ready": (Ready, _Form(write=_write_ready, read=_read_ready)),
    "ring done": (RingDone, _plain(RingDone, epoch=int, digest=str)),
    "ring failed": (RingFailed, _plain(RingFailed, epoch=int, kind=str, culprit=(str, _NONE), why=str)),
    "heeded": (Heeded, _plain(Heeded, epoch=int)),
    "leave": (Leave, _plain(Leave, why=str)),
    "go": (Go, _Form(write=_write_go, read=_read_go)),
    "replace": (Replace, _Form(write=_write_replace, read=_read_replace)),
    "hurry": (Hurry, _plain(Hurry, round=int)),
    "reduce": (Reduce, _Form(write=_write_reduce, read=_read_reduce)),
    "abort": (Abort, _plain(Abort, epoch=int, why=str)),
    "committed": (Committed, _Form(write=_write_committed, read=_read_committed)),
    "halt": (Halt, _plain(Halt, why=str, failed=bool)),
}
_BY_WORD = {word: form for word, (_, form) in _WORDS.items()}
_BY_TYPE = {kind: (word, form) for word, (kind, form) in _WORDS.items()}
