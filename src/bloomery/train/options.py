"""What the person who started the process asked for, beside the recipe."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from bloomery.data.tokenize import Progress, silent
from bloomery.train.peering import Peering


def _nothing_shown() -> AbstractContextManager[Progress]:
    return nullcontext(silent)


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """Choices of one start. They are not settings: the next start may choose otherwise.

    take_fallback: resume from the newest intact checkpoint when the newest of all is damaged.
    bar: a progress bar in place of log lines. say: takes a line for people. data_progress: opens what takes
    the progress of preparing the data. started: `time.perf_counter()` when the command began. peering: the
    parent of a peer's ranks, for a run between peers.
    """

    say: Callable[[str], None]
    bar: bool = False
    take_fallback: bool = False
    data_progress: Callable[[], AbstractContextManager[Progress]] = _nothing_shown
    started: float = 0.0
    peering: Peering | None = None
