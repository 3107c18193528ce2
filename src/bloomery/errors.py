"""The exceptions a caller may catch. Each carries a remedy: what the person reading it should do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class BloomeryError(Exception):
    """Something a user can fix. Printed as one message and a remedy, never as a traceback."""

    exit_status = 1

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  {self.remedy}" if self.remedy else self.message


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One wrong thing in what the user wrote."""

    key: str
    value: object
    source: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        shown = "" if self.value is None else f" = {self.value!r}"
        return f"{self.key}{shown}  ({self.source}): {self.problem}\n      {self.remedy}"


class ConfigError(BloomeryError):
    """What the user wrote in a recipe or on the command line: every mistake at once. of: in what."""

    exit_status = 2

    def __init__(self, mistakes: Sequence[Mistake], *, of: str = "the recipe") -> None:
        self.mistakes = tuple(mistakes)
        count = len(self.mistakes)
        lines = "\n".join(f"  {number}. {mistake}" for number, mistake in enumerate(self.mistakes, 1))
        super().__init__(f"{count} mistake{'s' if count != 1 else ''} in {of}:\n{lines}")


class DataError(BloomeryError):
    """A corpus, a tokenizer or an indexed file that cannot be used as it is."""


class CheckpointError(BloomeryError):
    """A checkpoint that is missing, damaged, or of another model."""


class ExportRefused(CheckpointError):
    """The exported model does not compute what ours computes, so it was not kept."""


class RunBusy(BloomeryError):
    """Another trainer holds the run directory and is alive."""


class StorageError(BloomeryError):
    """The disk refused: no space, no permission, or the directory is gone."""


class TrainingFailed(BloomeryError):
    """Training cannot go on; what was saved is safe."""


class RankLost(TrainingFailed):
    """Another rank of this peer is gone. The launcher looks for the one to blame elsewhere."""

    exit_status = 3


class ToldElsewhere(RankLost):
    """Another rank says what is wrong, so that it is said once: this one ends without a word."""

    def __init__(self) -> None:
        super().__init__("")


class PeerError(BloomeryError):
    """Between peers: somebody is gone, refused, or not to be trusted."""


class CoordinatorError(BloomeryError):
    """The coordinator of a run between peers refused, or holds what no peer of this version wrote."""


class CoordinatorAway(CoordinatorError):
    """No endpoint of the coordinator answered in time. What was asked may be asked again later."""
