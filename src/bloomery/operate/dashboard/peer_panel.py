"""Builds the peer panel of a run's page: the newest rounds, their ring, and the rates of its links."""

from __future__ import annotations

from typing import Any

from bloomery.operate.dashboard.run_reader import RunReader
from bloomery.operate.ledger.operations import finite

_SHOWN_ROUNDS, _MOST_PEERS, _MOST_AMOUNT = 120, 512, 1e11


def rounds(reader: RunReader) -> dict[str, Any]:  # Any: of JSON
    """Return the newest rounds of a peer, the peers that they name, and the newest ring; {} for a run of one
    peer.

    Each round has `begin`, when the one before was committed, and `end`, when it was itself; `ring_s` is how
    long the all-reduce took on this peer. `ring` is [peer, Mbit/s to the next one, or None] in its order.
    """
    with reader.lock:
        events = [event for event in reader.news.rounds if event.get("event") == "round"][-_SHOWN_ROUNDS:]
        left_out = [event for event in reader.news.rounds if event.get("event") in ("left_out", "parity")]
    if not events:
        return {}
    shown: list[dict[str, Any]] = []
    before: Any = None
    for event in events:
        ended = _amount(event.get("time"))
        if ended is None or not isinstance(event.get("round"), int):
            continue
        shown.append(
            {
                "round": event["round"],
                "begin": before if before is not None else ended,
                "end": ended,
                "ring_s": _amount(event.get("ring_s")),
                "members": _names(event.get("members")),
                "included": bool(event.get("included")),
            }
        )
        before = ended
    if not shown:
        return {}
    names = sorted({name for row in shown for name in row["members"]})
    newest = set(shown[-1]["members"])
    why = {str(event.get("whom"))[:40]: str(event.get("why", ""))[:200] for event in left_out}
    peers = [
        {
            "name": name,
            "rounds": sum(name in row["members"] for row in shown),
            "in_newest": name in newest,
            "left_out": why.get(name, ""),
        }
        for name in sorted({*names, *why})[:_MOST_PEERS]
    ]
    return {
        "rounds": shown,
        "peers": peers,
        "me": str(events[-1].get("peer", ""))[:40],
        "ring": _newest_ring(events),
    }


def _amount(value: object) -> float | None:
    """Return seconds or a rate; None for what can be neither, for another peer may have written anything."""
    number = finite(value)
    return number if number is not None and 0.0 <= number < _MOST_AMOUNT else None


def _names(value: object) -> list[str]:
    return [str(name)[:40] for name in value][:_MOST_PEERS] if isinstance(value, list) else []


def _newest_ring(events: list[Any]) -> list[list[Any]]:  # Any: of JSON
    """Return the members of the newest ring that this peer was in, each with the rate to the next one."""
    for event in reversed(events):
        names, rates = _names(event.get("ring")), event.get("ring_mbit_s")
        if names:
            known = rates if isinstance(rates, list) else []
            return [
                [name, _amount(known[place]) if place < len(known) else None]
                for place, name in enumerate(names)
            ]
    return []
