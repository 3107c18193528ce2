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
"""Settings that a refusal names, with both values."""


class Admission:
    """Compares this peer's settings with those of the member that was listed first. Whoever differs from it
    ends.

    settings, fingerprint: what this peer trains, and a hash of it; empty before `publish`.

    Args:
        context: of this agent.
        refuse: called with the reason, on the writer's thread, when this peer is not to take part.
    """

    def __init__(self, context: AgentContext, *, refuse: Callable[[CoordinatorError], None]) -> None:
        self._context, self._refuse = context, refuse
        self.settings: Mapping[str, str] = {}
        self.fingerprint = ""
        self._asked: str | None = None

    def publish(self, data: Mapping[str, str]) -> None:
        """Say what this peer trains, before it is listed for the first time. data: identity of its stream."""
        self.settings = {**self._context.settings.settings, **data}
        self.fingerprint = fingerprint(self.settings)
        text = encode_settings(self.settings)
        self._context.writer.write("settings", lambda: self._put(text))

    def _put(self, text: str) -> None:
        self._context.etcd.put(self._context.keys.settings(self._context.me), text)

    def is_other(self, snapshot: RunSnapshot) -> bool:
        """Whether the first member trains something else; then `refuse` is called, with what differs."""
        me = self._context.me
        others = {name: one for name, one in snapshot.members.items() if name != me}
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
        """On the writer's thread: say what differs."""
        found = self._context.etcd.get(self._context.keys.settings(first))
        theirs = {} if found is None else decode_settings(found.value)
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
    """Return a hash of settings: what members compare first."""
    return hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()[:32]


def differences(theirs: Mapping[str, str], mine: Mapping[str, str]) -> list[str]:
    """Return in what two peers differ, each with both values."""
    return [
        f"{key} is {theirs.get(key, 'unknown')} there and {mine.get(key, 'unknown')} here"
        for key in sorted({*theirs, *mine})
        if theirs.get(key) != mine.get(key)
    ]
