"""The state that a save is given, a save that has begun beside the training, and how a save ended."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bloomery.checkpoint.format.state import CollectedState, Json
from bloomery.checkpoint.save.staging import CopyPace
from bloomery.checkpoint.save.write_plan import RankWritePlan
from bloomery.checkpoint.writer.deadlines import Deadlines
from bloomery.errors import BloomeryError


@dataclass(kw_only=True)
class PendingSave:
    """A save that has begun. failure, seconds and bytes are set once `over` is.

    order: what the writer is told, as JSON values. texts: further fields of it that are JSON texts already.
    buffer: the number of the shared buffer it uses. run_length_steps: for retention; None where unknown.
    window_s: the time over which the copying may spread.
    staged: set when the state was copied. over: set when the writer has answered and the callback returned.
    """

    step: int
    name: str
    run_length_steps: int | None
    plan: RankWritePlan
    order: dict[str, Any]  # Any: JSON
    texts: Mapping[str, str]
    buffer: int
    pace: CopyPace
    window_s: float
    deadlines: Deadlines
    failure: BloomeryError | None = None
    seconds: float = 0.0
    bytes: int = 0
    staged: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)


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
