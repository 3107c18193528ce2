"""Checks that a peer trains what the run trains: compares its settings with the first member's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping

from bloomery.agent.agent_context import AgentContext
from bloomery.coordination.snapshot import ListedMember, RunSnapshot
from bloomery.errors import CoordinatorError
from bloomery.protocol.encoding import decode_settings, encode_settings

_SHOWN = 5
"""How many of the differing settings a refusal names."""


class Admission:
    """Compares this peer's settings with those of the member that was listed first, and refuses to take part
    if they differ.

    settings: what this peer trains, by key; empty before `publish`.
    fingerprint: a hash of these settings; empty before `publish`.

    Args:
        context: what all parts of this agent share.
        refuse: called on the writer's thread, with the reason, when this peer must not take part.
    """

    def __init__(self, context: AgentContext, *, refuse: Callable[[CoordinatorError], None]) -> None:
        self._context, self._refuse = context, refuse
        self.settings: Mapping[str, str] = {}
        self.fingerprint = ""
        self._asked: str | None = None

    def publish(self, data: Mapping[str, str]) -> None:
        """Write this peer's settings to the coordinator. Call it before the peer is first listed.

        data: what identifies the stream of samples that this peer's ranks read.
        """
        self.settings = {**self._context.settings.settings, **data}
        self.fingerprint = fingerprint(self.settings)
        text = encode_settings(self.settings)
        self._context.writer.write("settings", lambda: self._put(text))

    def _put(self, text: str) -> None:
        self._context.etcd.put(self._context.keys.settings(self._context.me), text)

    def is_other(self, snapshot: RunSnapshot) -> bool:
        """Return whether the member that was listed first has other settings than this peer.

        If so the settings are compared on the writer's thread, which calls `refuse` with the differences.
        """
        me = self._context.me
        others = {name: listed for name, listed in snapshot.members.items() if name != me}
        first = min(others, key=lambda name: others[name].life, default=None)
        if first is None or not self._comes_after(others[first], snapshot.members.get(me)):
            return False
        theirs = others[first].member.recipe
        if theirs == self.fingerprint:
            return False
        if self._asked != theirs:
            self._asked = theirs
            self._context.writer.write("the settings of the run", lambda: self._compare(first))
        return True

    def _comes_after(self, other: ListedMember, mine: ListedMember | None) -> bool:
        is_listed = mine is not None and mine.member.incarnation == self._context.settings.incarnation
        return not is_listed or (mine is not None and other.life < mine.life)

    def _compare(self, first: str) -> None:
        """Refuse with the settings that differ. It asks the coordinator, so the writer's thread runs it."""
        entry = self._context.etcd.get(self._context.keys.settings(first))
        theirs = {} if entry is None else decode_settings(entry.value)
        self._refuse(OtherRun(first, differences(theirs, self.settings)))


class OtherRun(CoordinatorError):
    """The settings of a peer are not those of the run; the message names some of them, with both values."""

    def __init__(self, first: str, differing: list[str]) -> None:
        shown = "; ".join(differing[:_SHOWN])
        more = f"; and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        super().__init__(
            f"'{first}', who was there before, trains another run: "
            f"{shown + more or 'it does not say in what it differs'}",
            remedy="Give all peers the same data and settings, or stop them all and begin with the new ones.",
        )


def fingerprint(settings: Mapping[str, str]) -> str:
    """Return a hash of the settings. Members compare hashes first, and settings only where those differ."""
    return hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()[:32]


def differences(theirs: Mapping[str, str], mine: Mapping[str, str]) -> list[str]:
    """Return one sentence for each setting in which two peers differ, with both values."""
    return [
        f"{key} is {theirs.get(key, 'unknown')} there and {mine.get(key, 'unknown')} here"
        for key in sorted({*theirs, *mine})
        if theirs.get(key) != mine.get(key)
    ]
