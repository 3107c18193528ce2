"""How the keys of a run are spelled, all below /bloomery/<run>/. Numbers have ten digits: so keys sort."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bloomery.errors import Mistake

ROOT = "/bloomery/"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_DIGITS = 10


def is_name(text: object) -> bool:
    """Whether this may name a run or a peer: it becomes part of a key, a certificate and a file."""
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


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
    def token(self) -> str:
        """What peers without certificates show one another."""
        return f"{self.root}token"

    @property
    def members(self) -> str:
        """Who is present: prefix."""
        return f"{self.root}members/"

    @property
    def commits(self) -> str:
        """The rounds decided: prefix."""
        return f"{self.root}commit/"

    @property
    def testimonies(self) -> str:
        """What peers remember of a run that its coordinator has lost: prefix."""
        return f"{self.root}testimony/"

    @property
    def rates(self) -> str:
        """What peers measured of their links: prefix."""
        return f"{self.root}rates/"

    def member(self, peer: str) -> str:
        """One peer's presence."""
        return f"{self.members}{_checked(peer)}"

    def testimony(self, peer: str) -> str:
        """What one peer remembers."""
        return f"{self.testimonies}{_checked(peer)}"

    def rate(self, peer: str) -> str:
        """What one peer measured."""
        return f"{self.rates}{_checked(peer)}"

    def commit(self, round: int) -> str:
        """A round, decided."""
        return f"{self.commits}{_padded(round)}"

    def shares(self, round: int) -> str:
        """What each peer may take in a round."""
        return f"{self.root}shares/{_padded(round)}"

    def readies(self, round: int) -> str:
        """What peers bring to a round: prefix."""
        return f"{self.root}ready/{_padded(round)}/"

    def ready(self, round: int, peer: str) -> str:
        """What one peer brings."""
        return f"{self.readies(round)}{_checked(peer)}"

    def attempts(self, round: int) -> str:
        """The attempts of a round: prefix."""
        return f"{self.root}attempt/{_padded(round)}/"

    def attempt(self, round: int, epoch: int) -> str:
        """One attempt."""
        return f"{self.attempts(round)}{_padded(epoch)}"

    def dones(self, round: int) -> str:
        """What peers hold after the attempts of a round: prefix."""
        return f"{self.root}done/{_padded(round)}/"

    def done(self, round: int, epoch: int, peer: str) -> str:
        """What one peer holds after an attempt."""
        return f"{self.dones(round)}{_padded(epoch)}/{_checked(peer)}"

    def failures(self, round: int) -> str:
        """What went wrong in the attempts of a round: prefix."""
        return f"{self.root}failed/{_padded(round)}/"

    def failed(self, round: int, epoch: int, peer: str) -> str:
        """What went wrong for one peer."""
        return f"{self.failures(round)}{_padded(epoch)}/{_checked(peer)}"

    def of_round(self, round: int) -> tuple[str, ...]:
        """Prefixes of what a round needs no more once it and the next are decided."""
        return self.readies(round), self.attempts(round), self.dones(round), self.failures(round)

    def parts(self, key: str) -> tuple[str, ...]:
        """Return what a key of this run is made of after the root: ('ready', '0000000003', 'a')."""
        return tuple(key.removeprefix(self.root).split("/"))


def _checked(name: str) -> str:
    if not is_name(name):
        raise ValueError(f"{name!r} is no name of a run or a peer")
    return name


def _padded(number: int) -> str:
    text = f"{number:0{_DIGITS}d}"
    if number < 0 or len(text) > _DIGITS:
        raise ValueError(f"{number} is no number of a round or an epoch")
    return text
