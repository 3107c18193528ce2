"""The names of a run's keys in etcd, all below /bloomery/<run>/: makes them and takes them apart.

A peer writes its own records below `peers/<peer>/`, where no other peer may write. `Keys.shared` are the keys
of records that any peer may write, since the first that does so writes them for all. Numbers in keys have ten
digits, so that keys sort by them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bloomery.errors import Mistake

ROOT = "/bloomery/"
NAME_PATTERN = r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z"
"""The pattern of the name of a run or a peer."""
RECOVERY = "testimony"
"""The last part of the keys of recovery records. Accounts that were made before hold rights to this name."""
_OWN = ("member", "ready", "done", "failed", RECOVERY, "rates")
"""The kinds of records that a peer writes below its own prefix, and that a snapshot reads."""
_DIGITS = 10
NUMBER_AT_MOST = 10**_DIGITS - 2
"""The highest number of a round or an epoch that a message may name; the next one still has a key."""


def is_name(text: object) -> bool:
    """Return whether this may name a run or a peer; the name is used in keys, certificates and files."""
    return isinstance(text, str) and re.search(NAME_PATTERN, text) is not None


def name_mistake(key: str, value: str, source: str) -> Mistake:
    """Return the message for the user about a setting whose value is no such name."""
    return Mistake(
        key=key,
        value=value,
        source=source,
        problem="is no name of a run or a peer",
        remedy="Up to 63 letters, digits, '.', '_' and '-', a letter or digit first.",
    )


@dataclass(frozen=True)
class Keys:
    """The keys of one run. Raises ValueError for a name of a run or a peer that is invalid."""

    run: str

    def __post_init__(self) -> None:
        _checked(self.run)

    @property
    def root(self) -> str:
        """The prefix of all keys of the run."""
        return f"{ROOT}{self.run}/"

    @property
    def epoch(self) -> str:
        """The key of the epoch, a number that grows with every attempt."""
        return f"{self.root}epoch"

    @property
    def adopted(self) -> str:
        """The key of the epoch from which a run continued after its coordinator had lost it.

        An operator writes it.
        """
        return f"{self.root}adopted"

    @property
    def shared(self) -> tuple[str, ...]:
        """What every peer may write: the key of the epoch, and three prefixes."""
        return self.epoch, self.commits, f"{self.root}attempt/", f"{self.root}shares/"

    @property
    def revocations(self) -> str:
        """The prefix of the serial numbers of revoked certificates. No peer may write below it."""
        return f"{self.root}revoked/"

    def revoked(self, serial: str) -> str:
        """Return the key of a revoked certificate, whose value is the peer that had it."""
        return f"{self.revocations}{serial}"

    @property
    def token(self) -> str:
        """The key of the secret that peers without certificates show one another."""
        return f"{self.root}token"

    @property
    def commits(self) -> str:
        """The prefix of the commits."""
        return f"{self.root}commit/"

    @property
    def peers(self) -> str:
        """The prefix of all records that peers write of themselves."""
        return f"{self.root}peers/"

    def of_peer(self, peer: str) -> str:
        """Return the prefix of one peer's own records, which no other peer may write."""
        return f"{self.peers}{_checked(peer)}/"

    def settings(self, peer: str) -> str:
        """Return the key of the settings of a peer that must be equal on all peers."""
        return f"{self.of_peer(peer)}settings"

    def member(self, peer: str) -> str:
        """Return the key of a peer's `Member`, which lists it."""
        return f"{self.of_peer(peer)}member"

    def recovery_record(self, peer: str) -> str:
        """Return the key of a peer's `RecoveryRecord`."""
        return f"{self.of_peer(peer)}{RECOVERY}"

    def rate(self, peer: str) -> str:
        """Return the key of the bandwidths that a peer measured."""
        return f"{self.of_peer(peer)}rates"

    def commit(self, round: int) -> str:
        """Return the key of a round's `Commit`."""
        return f"{self.commits}{_padded(round)}"

    def shares(self, round: int) -> str:
        """Return the key of a round's `RoundShares`."""
        return f"{self.root}shares/{_padded(round)}"

    def ready(self, round: int, peer: str) -> str:
        """Return the key of a peer's `Ready`."""
        return f"{self.of_peer(peer)}ready/{_padded(round)}"

    def attempts(self, round: int) -> str:
        """Return the prefix of a round's attempts."""
        return f"{self.root}attempt/{_padded(round)}/"

    def attempt(self, round: int, epoch: int) -> str:
        """Return the key of a `ProposedAttempt`."""
        return f"{self.attempts(round)}{_padded(epoch)}"

    def done(self, round: int, epoch: int, peer: str) -> str:
        """Return the key of a peer's `Done`."""
        return f"{self.of_peer(peer)}done/{_padded(round)}/{_padded(epoch)}"

    def failed(self, round: int, epoch: int, peer: str) -> str:
        """Return the key of a peer's `Failed`."""
        return f"{self.of_peer(peer)}failed/{_padded(round)}/{_padded(epoch)}"

    def parts(self, key: str) -> tuple[str, ...]:
        """Return the kind of a key of this run, its numbers, and its peer: ('ready', '0000000003', 'a').

        Returns ('',) for a kind in the wrong place, because a peer may write any key below its own prefix.
        """
        kind, *rest = key.removeprefix(self.root).split("/")
        if kind == "peers" and len(rest) > 1:
            peer, own, *numbers = rest
            return (own, *numbers, peer) if own in _OWN else ("",)
        return ("",) if kind in _OWN else (kind, *rest)

    @staticmethod
    def number(part: str) -> int:
        """Return the number of a round or an epoch in a key. Raises ValueError unless it has ten digits."""
        if len(part) != _DIGITS or not (part.isascii() and part.isdecimal()):
            raise ValueError(f"{part[:40]!r} is no number of a round or an epoch")
        return int(part)


def _checked(name: str) -> str:
    if not is_name(name):
        raise ValueError(f"{name!r} is no name of a run or a peer")
    return name


def _padded(number: int) -> str:
    text = f"{number:0{_DIGITS}d}"
    if number < 0 or len(text) > _DIGITS:
        raise ValueError(f"{number} is no number of a round or an epoch")
    return text
