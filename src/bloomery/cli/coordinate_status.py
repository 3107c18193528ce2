"""The table of `bloomery coordinate --status RUN`."""

from __future__ import annotations

import json
from typing import Any

from bloomery.elastic.control.etcd import Etcd
from bloomery.elastic.control.keys import Keys
from bloomery.elastic.control.snapshot import Snapshot
from bloomery.elastic.control.view import View

_SHOWN = 12


def show(etcd: Etcd, keys: Keys, *, as_json: bool) -> int:
    """Print a run as its coordinator has it now."""
    with View(etcd, keys) as view:
        snapshot = view.snapshot
    content = _content(keys.run, snapshot)
    if as_json:
        print(json.dumps(content))
    else:
        _print(content)
    return 0


def _content(run: str, snapshot: Snapshot) -> dict[str, Any]:  # Any: JSON
    commit, shares = snapshot.commit, snapshot.shares
    return {
        "run": run,
        "revision": snapshot.revision,
        "epoch": snapshot.epoch,
        "round": snapshot.round,
        "forgotten": snapshot.forgotten,
        "commit": None
        if commit is None
        else {
            "round": commit.round,
            "epoch": commit.epoch,
            "members": list(commit.members),
            "digest": commit.digest,
            "consumed": commit.position.consumed,
            "left_out": dict(commit.left_out),
            "rewind_to": commit.rewind_to,
            "why": commit.why,
        },
        "attempt": list(snapshot.tried.attempt.members) if snapshot.tried else None,
        "members": [
            {
                "peer": name,
                "round": one.member.round,
                "digest": one.member.digest,
                "addresses": list(one.member.addresses),
                "serves": list(one.member.serves),
                "share": bool(shares and name in shares.shares),
                "ready": name in snapshot.readies,
                "done": name in snapshot.dones,
            }
            for name, one in sorted(snapshot.members.items())
        ],
    }


def _print(content: dict[str, Any]) -> None:
    commit = content["commit"]
    print(f"run {content['run']}: round {content['round']} is under way, epoch {content['epoch']}")
    if commit is not None:
        who = ", ".join(commit["members"]) or commit["why"] or "nobody's part"
        print(f"committed: round {commit['round']}, {commit['consumed']:,} samples, {who}")
        for peer, why in commit["left_out"].items():
            print(f"left out:  {peer}: {why}")
    if content["forgotten"]:
        print("The coordinator has lost what it knew: `bloomery coordinate --adopt` restores it.")
    if not content["members"]:
        print("no peer is listed")
        return
    rows = [("peer", "holds", "state", "now", "address")]
    rows += [
        (
            one["peer"],
            "nothing" if one["round"] < 0 else f"round {one['round']}",
            one["digest"][:_SHOWN] or "-",
            _doing(one),
            (one["addresses"] or ["-"])[0],
        )
        for one in content["members"]
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    print()
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _doing(one: dict[str, Any]) -> str:
    if one["done"]:
        return "reduced"
    if one["ready"]:
        return "ready"
    return "at its share" if one["share"] else "waits"
