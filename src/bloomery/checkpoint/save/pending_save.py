"""A save that has begun beside the training, as its threads and the trainer see it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
