"""The state that a save is given, and how the save ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bloomery.checkpoint.format.state import CollectedState, Json
from bloomery.errors import BloomeryError


@dataclass(frozen=True, kw_only=True)
class StateSnapshot:
    """The state that is to be saved: tensors by reference, everything else as it is now.

    values: the small JSON values of each part of the run. about: facts for people.
    run_length_steps: the length of the run, for retention; None where it is not known.
    """

    step: int
    incarnation: int
    state: CollectedState
    values: Mapping[str, Mapping[str, Json]]
    about: Mapping[str, Json]
    run_length_steps: int | None


@dataclass(frozen=True, kw_only=True)
class SaveResult:
    """How a save ended.

    failure: the error; None when it is committed, as far as this rank knows.
    seconds, bytes: how long this rank's writer took, and for how many bytes; 0 for a save at once.
    """

    step: int
    name: str
    failure: BloomeryError | None = None
    seconds: float = 0.0
    bytes: int = 0
