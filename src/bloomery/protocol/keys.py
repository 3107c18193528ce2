"""How the keys of a run are spelled, all below /bloomery/<run>/. Numbers have ten digits: so keys sort.

What a peer says of itself lies below `peers/<peer>/`, where it alone may write. What several must be able to
write, since the first of them does, lies beside that: `shared`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bloomery.errors import Mistake

ROOT = "/bloomery/"
NAME_PATTERN = r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z"
"""Of a run and of a peer."""
_OWN = ("member", "ready", "done", "failed", "testimony", "rates")
"""What a peer writes of itself."""
_DIGITS = 10
NUMBER_AT_MOST = 10**_DIGITS - 2
"""Of a round or an epoch that somebody names: the one after it has a key, too."""


def is_name(text: object) -> bool:
    """Whether this may name a run or a peer: it becomes part of a key, a certificate and a file."""
    return isinstance(text, str) and re.search(NAME_PATTERN, text) is not None


def name_mistake(key: str, value: str, source: str) -> Mistake:
    """What to say of a name that is none."""
    return Mistake(
        key=key,
        value=value,
        source=source,
        problem="is no name of a run or a peer",
        remedy="Up to 63 letters, digits, '.', '_' and '-', a letter or digit first.",
    )


@dataclass(frozen=True)
class Keys:
    """The keys of one run. A ValueError for a run or a peer that is no name."""

    run: str

    def __post_init__(self) -> None:
        _checked(self.run)

    @property
    def root(self) -> str:
        """What all keys of the run begin with."""
        return f"{ROOT}{self.run}/"

    @property
    def epoch(self) -> str:
        """A number that grows with every attempt."""
        return f"{self.root}epoch"

    @property
    def adopted(self) -> str:
        """From which epoch a run went on that its coordinator had lost: written by whoever runs that."""
        return f"{self.root}adopted"

    @property
    def shared(self) -> tuple[str, ...]:
        """What every peer may write: the epoch, and three prefixes."""
        return self.epoch, self.commits, f"{self.root}attempt/", f"{self.root}shares/"

    @property
    def token(self) -> str:
        """What peers without certificates show one another."""
        return f"{self.root}token"

    @property
    def commits(self) -> str:
        """The rounds decided: prefix."""
        return f"{self.root}commit/"

    @property
    def peers(self) -> str:
        """What peers write of themselves: prefix."""
        return f"{self.root}peers/"

    def of_peer(self, peer: str) -> str:
        """What one peer writes of itself, and nobody else may: prefix."""
        return f"{self.peers}{_checked(peer)}/"

    def settings(self, peer: str) -> str:
        """What one peer trains, the settings that all must have in common: read where two differ."""
        return f"{self.of_peer(peer)}settings"

    def member(self, peer: str) -> str:
        """One peer's presence."""
        return f"{self.of_peer(peer)}member"

    def testimony(self, peer: str) -> str:
        """What one peer remembers."""
        return f"{self.of_peer(peer)}testimony"

    def rate(self, peer: str) -> str:
        """What one peer measured."""
        return f"{self.of_peer(peer)}rates"

    def commit(self, round: int) -> str:
        """A round, decided."""
        return f"{self.commits}{_padded(round)}"

    def shares(self, round: int) -> str:
        """What each peer may take in a round."""
        return f"{self.root}shares/{_padded(round)}"

    def ready(self, round: int, peer: str) -> str:
        """What one peer brings."""
        return f"{self.of_peer(peer)}ready/{_padded(round)}"

    def attempts(self, round: int) -> str:
        """The attempts of a round: prefix."""
        return f"{self.root}attempt/{_padded(round)}/"

    def attempt(self, round: int, epoch: int) -> str:
        """One attempt."""
        return f"{self.attempts(round)}{_padded(epoch)}"

    def done(self, round: int, epoch: int, peer: str) -> str:
        """What one peer holds after an attempt."""
        return f"{self.of_peer(peer)}done/{_padded(round)}/{_padded(epoch)}"

    def failed(self, round: int, epoch: int, peer: str) -> str:
        """What went wrong for one peer."""
        return f"{self.of_peer(peer)}failed/{_padded(round)}/{_padded(epoch)}"

    def parts(self, key: str) -> tuple[str, ...]:
        """Return what a key of this run says: kind, numbers, and whose it is: ('ready', '0000000003', 'a').

        A kind that belongs elsewhere is none: below its name a peer may write what it likes.
        """
        kind, *rest = key.removeprefix(self.root).split("/")
        if kind == "peers" and len(rest) > 1:
            peer, own, *numbers = rest
            return (own, *numbers, peer) if own in _OWN else ("",)
        return ("",) if kind in _OWN else (kind, *rest)

    @staticmethod
    def number(part: str) -> int:
        """The number of a round or an epoch in a key. Raises ValueError for one that is spelled otherwise."""
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
