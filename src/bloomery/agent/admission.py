"""Compares a peer's settings with those of the members that were listed before it, and refuses others."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

from bloomery.agent.agent_context import AgentContext
from bloomery.coordination.membership import Membership
from bloomery.coordination.snapshot import ListedMember, RunSnapshot
from bloomery.data.position import RULE_KEY
from bloomery.errors import CoordinatorError
from bloomery.protocol.encoding import ProtocolError, decode_settings, encode_settings, printable
from bloomery.protocol.records import Member

log = logging.getLogger(__name__)

_SHOWN = 5
"""The most differing settings that a refusal names."""
_ASKED = 8
"""The most members whose settings are read for one comparison; usually that is one."""


class Admission:
    """Compares this peer's settings with those of most members that were listed before, and refuses to take
    part if they differ. So a single member keeps nobody out of a run of several.

    It compares them once for each time that this peer is listed: what a member that was listed before writes
    later must not end this peer.

    settings: what this peer trains, by key; empty before `publish`.
    fingerprint: a hash of these settings; empty before `publish`.

    Args:
        context: what all parts of this agent share.
        membership: holds the settings in the coordinator while this peer is listed.
        refuse: called on the writer's thread, with the reason, when this peer must not take part.
    """

    def __init__(
        self,
        context: AgentContext,
        membership: Membership,
        *,
        refuse: Callable[[CoordinatorError], None],
    ) -> None:
        self._context, self._membership, self._refuse = context, membership, refuse
        self.settings: Mapping[str, str] = {}
        self.fingerprint = ""
        self._asked: str | None = None
        self._alike: frozenset[str] = frozenset()
        self._admitted_life = self._counted_life = 0

    def publish(self, data: Mapping[str, str]) -> None:
        """Have this peer's settings in the coordinator while it is listed. Call it before it first is.

        data: what identifies the stream of samples that this peer's ranks read.
        """
        self.settings = {**self._context.settings.settings, **data}
        self.fingerprint = fingerprint(self.settings)
        text = encode_settings(self.settings)
        key = self._context.keys.settings(self._context.me)
        self._context.writer.write("settings", lambda: self._membership.keep(key, text))

    def is_other(self, snapshot: RunSnapshot) -> bool:
        """Return whether most members that were listed before have other settings than this peer.

        If so the settings are compared on the writer's thread, which calls `refuse` with the differences. The
        rule of the mixture counts only before the first commit: a state names the rule that its run follows.
        """
        me, mine = self._context.me, self._own(snapshot)
        if mine is not None and mine.life == self._admitted_life:
            return False
        before = {
            name: listed
            for name, listed in snapshot.members.items()
            if name != me and (mine is None or listed.life < mine.life)
        }
        most = _most(before, lambda member: member.recipe)
        theirs = before[most[0]].member.recipe if most else self.fingerprint
        if theirs == self.fingerprint or theirs in self._alike:
            self._admitted_life = self._admitted_life if mine is None else mine.life
            return False
        if self._asked != theirs:
            self._asked = theirs
            without = (RULE_KEY,) if snapshot.commits else ()
            write = self._context.writer.write
            write("the settings of the run", lambda: self._compare(most, theirs, without=without))
        return True

    def wrong_ranks(self, snapshot: RunSnapshot) -> str:
        """Return a message if most peers that were listed before this one have another number of ranks.

        Otherwise return "". The numbers are compared once for each time that this peer is listed.
        """
        mine = self._own(snapshot)
        if mine is None or mine.life == self._counted_life:
            return ""
        self._counted_life = mine.life
        before = {name: other for name, other in snapshot.members.items() if other.life < mine.life}
        most = _most(before, lambda member: member.ranks)
        ranks = before[most[0]].member.ranks if most else mine.member.ranks
        if ranks == mine.member.ranks:
            return ""
        return f"'{most[0]}', who was listed before, has {ranks} ranks: use --nproc {ranks}"

    def _own(self, snapshot: RunSnapshot) -> ListedMember | None:
        """Return the entry of this process; None while it is not listed."""
        mine = snapshot.members.get(self._context.me)
        return mine if mine and mine.member.incarnation == self._context.settings.incarnation else None

    def _compare(self, most: Sequence[str], asked: str, *, without: Collection[str]) -> None:
        """Refuse with the settings that differ. It asks the coordinator, so the writer's thread runs it.

        most: the members with these settings, in the order in which they were listed.
        asked: the fingerprint of their settings. without: settings that need not be alike.
        """
        unreadable: UnreadableSettings | None = None
        for name in most[:_ASKED]:
            key = self._context.keys.settings(name)
            entry = self._context.etcd.get(key)
            if entry is None:  # that member has left since
                continue
            try:
                theirs = decode_settings(entry.value)
            except ProtocolError as error:  # a record that others of these members need not share
                log.warning("the key %s is ignored: %s", key, error.message)
                unreadable = unreadable or UnreadableSettings(name, key, error)
                continue
            self._judge(name, theirs, asked, without=without)
            return
        if unreadable is None:  # whoever is the first now is asked at the next look
            self._asked = None
        else:
            self._refuse(unreadable)

    def _judge(self, name: str, theirs: Mapping[str, str], asked: str, *, without: Collection[str]) -> None:
        """Call `refuse` with the settings in which member `name` differs from this peer; where it does not,
        remember its fingerprint `asked` as one of equal settings.
        """
        # The record lacks unprintable characters and the end of a long text; the fingerprint is of all.
        mine = {key: printable(value) for key, value in self.settings.items()}
        alike = {key: self.settings[key] for key in mine if theirs.get(key) == mine[key]}
        compared = {key: value for key, value in mine.items() if key not in without}
        differing = differences({key: theirs[key] for key in theirs if key not in without}, compared)
        if differing or fingerprint({**theirs, **alike}) != asked:
            self._refuse(SettingsMismatch(name, differing))
        else:
            self._alike |= {asked}


def _most(members: Mapping[str, ListedMember], what: Callable[[Member], Hashable]) -> list[str]:
    """Return the members that agree with most others, in the order in which they were listed."""
    counts = Counter(what(listed.member) for listed in members.values())
    highest = max(counts.values(), default=0)
    most = [name for name, listed in members.items() if counts[what(listed.member)] == highest]
    most.sort(key=lambda name: members[name].life)
    return [name for name in most if what(members[name].member) == what(members[most[0]].member)]


class UnreadableSettings(CoordinatorError):
    """Members have other settings than a peer by their fingerprint, and their records do not tell which."""

    def __init__(self, first: str, key: str, error: ProtocolError) -> None:
        super().__init__(
            f"'{first}', who was there before, trains another run by the fingerprint of its settings, and "
            f"the key {key}, which has to tell in what it differs, cannot be read: {error.message}",
            remedy=f"If '{first}' belongs to this run, start it again, which writes the key anew; if not, "
            f"end it, and remove it with `bloomery coordinate --revoke {first}`.",
        )


class SettingsMismatch(CoordinatorError):
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
