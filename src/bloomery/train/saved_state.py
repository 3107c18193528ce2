"""The state of a run as it goes into a checkpoint, and what a restored checkpoint says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from bloomery.checkpoint.format.state import Json, Stateful


@dataclass(frozen=True)
class RunStateToSave:
    """The state of a run after a step, as it goes into a checkpoint.

    parts: the parts whose tensors and values are saved, by the prefix of their names. Each rank passes the
    parts whose tensors it shall write; the values are the first rank's.
    step: number of steps done.
    values: further values by part, as JSON, beside those of `parts`.
    about: what lists of checkpoints show of this one.
    run_length_steps: steps of the whole run, of each tenth of which one checkpoint is kept; None if unknown.
    """

    parts: Mapping[str, Stateful]
    _: KW_ONLY
    step: int
    values: Mapping[str, Mapping[str, Json]] = field(default_factory=dict)
    about: Mapping[str, Json] = field(default_factory=dict)
    run_length_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The restored checkpoint, named by step and incarnation; its tensors and parts are filled already."""

    step: int
    incarnation: int
    directory: Path
    values: Mapping[str, Mapping[str, Any]]  # Any: JSON
    about: Mapping[str, Json]
