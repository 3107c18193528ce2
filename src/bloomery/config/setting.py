"""Declares the settings of a recipe: dataclass fields with a kind, a help text and bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, Field, field
from typing import Any, Literal

from bloomery.frozen import dataclass

LARGEST_SEED = 2**63 - 1
"""The largest integer of TOML; every generator here takes it."""
LARGEST_COUNT = 10**15
"""No count of a run is larger, and its products with other counts fit 64 bits. The largest size of an integer
setting that declares no bound of its own."""

Kind = Literal["free", "journalled", "fixed"]
"""What a resume may do to a setting.

free: it may change, also while the run goes on. journalled: it may change at a resume, which is written to
the journal. fixed: a resume with another value is refused.
"""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The declaration of one setting.

    kind: what a resume may do to it.
    help: its meaning, in a sentence; shown by `config show --why` and on the reference page.
    minimum, maximum: smallest and largest number; None: no bound, except that of `convert` for integers.
    above: bound that a number must exceed; None: no bound.
    choices: the texts it takes; empty: any. Numbers are not bound by it.
    at_start: whether a free setting is read only when training starts, so that `control/set` refuses it.
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
    """Declare one field of a section; see `Setting`. Without a default the setting is required."""
    declaration = Setting(
        kind=kind,
        help=help,
        minimum=minimum,
        maximum=maximum,
        above=above,
        choices=tuple(choices),
        at_start=at_start,
    )
    return field(default=default, metadata={"setting": declaration})


def key_of(declared: Field[Any]) -> str:
    """Return the name of a section's field as recipes write it: without the underscore after a keyword."""
    return declared.name.removesuffix("_")


def declaration_of(declared: Field[Any]) -> Setting:
    """Return the declaration of a section's field."""
    declaration: Setting = declared.metadata["setting"]
    return declaration
