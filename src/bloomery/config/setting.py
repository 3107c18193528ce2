"""How a setting is declared: a dataclass field that knows its kind, its meaning and its bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, field
from typing import Any, Literal

Kind = Literal["free", "journalled", "fixed"]
"""What a resume may do to a setting. free: change at will, also while running. journalled: change at a
resume, and the journal says so. fixed: part of what the run *is*; a resume with another value is refused."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the loader, the checks, `config show --why` and the reference page know of one field.

    `choices` binds strings alone: a field that also takes a number keeps taking it. `at_start` marks a free
    setting that is read once, when training starts: `control/set` refuses it and says so.
    """

    kind: Kind
    help: str
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    at_start: bool = False


def setting(
    default: Any = MISSING,  # Any: a field of any type is declared here
    *,
    kind: Kind,
    help: str,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    choices: Sequence[str] = (),
    at_start: bool = False,
) -> Any:
    """Declare one field of a section. Without a default the setting is required."""
    known = Setting(
        kind=kind,
        help=help,
        minimum=minimum,
        maximum=maximum,
        above=above,
        choices=tuple(choices),
        at_start=at_start,
    )
    return field(default=default, metadata={"setting": known})


def about(declared: Field[Any]) -> Setting:
    """What was declared with `setting` for a dataclass field of a section."""
    known: Setting = declared.metadata["setting"]
    return known
