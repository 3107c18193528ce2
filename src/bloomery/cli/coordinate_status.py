"""`bloomery coordinate --status`: prints a run's members, round and epoch, as the coordinator knows them."""

from __future__ import annotations

from typing import Any

from bloomery.cli.json_output import json_text
from bloomery.cli.tables import table_text
from bloomery.coordination.decide import FORGOTTEN
from bloomery.coordination.etcd import Etcd
from bloomery.coordination.run_view import RunView
from bloomery.coordination.snapshot import RunSnapshot
from bloomery.protocol.keys import Keys

_SHOWN = 12


def show(etcd: Etcd, keys: Keys, *, as_json: bool) -> int:
    """Print the state of a run that the coordinator holds now, and return the exit status."""
    with RunView(etcd, keys) as view:
        snapshot = view.snapshot
    content = _content(keys.run, snapshot)
    if as_json:
        print(json_text(content))
    else:
        _print(content)
    return 0


def _content(run: str, snapshot: RunSnapshot) -> dict[str, Any]:  # Any: JSON
    commit, shares = snapshot.commit, snapshot.shares
    return {
        "run": run,
        "known": bool(commit or snapshot.members or snapshot.epoch or snapshot.forgotten),
        "revision": snapshot.revision,
        "epoch": snapshot.epoch,
        "round": snapshot.round,
        "forgotten": snapshot.forgotten,
        "peers_ahead": list(snapshot.peers_ahead),
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
                "round": listed.member.round,
                "digest": listed.member.digest,
                "addresses": list(listed.member.addresses),
                "serves": list(listed.member.serves),
                "share": bool(shares and name in shares.shares),
                "ready": name in snapshot.readies,
                "done": name in snapshot.dones,
            }
            for name, listed in sorted(snapshot.members.items())
        ],
    }


def _print(content: dict[str, Any]) -> None:
    commit = content["commit"]
    if not content["known"]:
        print(f"run {content['run']}: not known here: no peer of it is listed, and it committed nothing")
        return
    print(f"run {content['run']}: round {content['round']} is under way, epoch {content['epoch']}")
    if commit is not None:
        who = ", ".join(commit["members"]) or commit["why"] or "nobody's part"
        print(f"committed: round {commit['round']}, {commit['consumed']:,} samples, {who}")
        for peer, why in commit["left_out"].items():
            print(f"left out:  {peer}: {why}")
    if content["forgotten"]:
        print(
            f"{FORGOTTEN} (told by {', '.join(content['peers_ahead'])})."
            if content["peers_ahead"]
            else FORGOTTEN
        )
    if not content["members"]:
        print("no peer is listed")
        return
    rows = [("peer", "holds", "state", "now", "address")]
    rows += [
        (
            member["peer"],
            "nothing" if member["round"] < 0 else f"round {member['round']}",
            member["digest"][:_SHOWN] or "-",
            _doing(member),
            (member["addresses"] or ["-"])[0],
        )
        for member in content["members"]
    ]
    print(f"\n{table_text(rows, left=range(len(rows[0])))}")


def _doing(member: dict[str, Any]) -> str:
    if member["done"]:
        return "reduced"
    if member["ready"]:
        return "ready"
    return "at its share" if member["share"] else "waits"
