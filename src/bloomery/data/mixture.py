"""What a stream of samples is mixed from: sizes and shares, in the few bytes that a checkpoint keeps."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from bloomery.data.quotas import RULE, Weight, whole_shares
from bloomery.data.shares import Demand
from bloomery.errors import DataError

_SHARE_BYTES = 6


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """From stream index `at` on: how many windows each dataset has, and its share in 2**-46 of the whole.

    `rule`: how quotas are rounded, see `quotas.RULE`. Of a mixture with budgets also: `length`, the samples
    from `at` to the run's end, in which they are spent; `budgeted`, the datasets that have one; `demand`, a
    digest of what is asked of all. Without budgets these are empty.
    """

    at: int
    windows: tuple[int, ...]
    shares: tuple[int, ...]
    rule: int = RULE
    length: int = 0
    budgeted: tuple[int, ...] = ()
    demand: str = ""

    @classmethod
    def of(
        cls,
        windows: Sequence[int],
        weights: Sequence[Weight],
        *,
        at: int = 0,
        demand: Demand | None = None,
        length: int = 0,
    ) -> Mixture:
        """The mixture of weights that need not sum to one; DataError where they sum to nothing.

        demand: what they came from; with budgets, `length` is what they were shared out over.
        """
        mixture = cls(at=at, windows=tuple(windows), shares=tuple(whole_shares(weights)))
        if demand is None or not demand.budgeted:
            return mixture
        return replace(mixture, length=length, budgeted=demand.budgeted, demand=demand.digest)

    @property
    def shares_after(self) -> tuple[int, ...]:
        """The shares beyond `length`: without those whose budgets are spent, where others are left."""
        spent = set(self.budgeted)
        others = tuple(0 if number in spent else share for number, share in enumerate(self.shares))
        return tuple(whole_shares(others)) if any(others) else self.shares

    def is_like(self, other: Mixture) -> bool:
        """Whether both mix the same; rule and beginning do not count."""
        return (self.windows, self.shares) == (other.windows, other.shares)

    def to_json(self) -> dict[str, Any]:
        """As a checkpoint keeps it: of the windows a digest, of the shares 6 bytes each."""
        packed = b"".join(share.to_bytes(_SHARE_BYTES, "little") for share in self.shares)
        return {
            "at": self.at,
            "rule": self.rule,
            "datasets": len(self.windows),
            "windows": _digest(self.windows),
            "shares": base64.b85encode(packed).decode(),
            **({"budgets": [self.length, self.demand, *self.budgeted]} if self.length else {}),
        }

    @classmethod
    def from_json(cls, values: dict[str, Any], *, windows: Sequence[int]) -> Mixture:
        """What `to_json` described, or its first version did; `windows` are today's, of these datasets first.

        Raises DataError where the datasets have other sizes than they had.
        """
        if "rule" not in values:
            found = cls(
                at=int(values["at"]),
                windows=tuple(values["windows"]),
                shares=tuple(whole_shares(values["weights"])),
                rule=1,
            )
        else:
            packed = base64.b85decode(values["shares"])
            length, demand, *budgeted = values.get("budgets", (0, ""))
            cuts = range(0, len(packed), _SHARE_BYTES)
            found = cls(
                at=int(values["at"]),
                windows=tuple(windows[: values["datasets"]]),
                shares=tuple(int.from_bytes(packed[cut : cut + _SHARE_BYTES], "little") for cut in cuts),
                rule=int(values["rule"]),
                length=int(length),
                budgeted=tuple(budgeted),
                demand=str(demand),
            )
        if _digest(found.windows) != values.get("windows") and list(found.windows) != values.get("windows"):
            _refuse(len(found.shares), windows)
        if tuple(windows[: len(found.windows)]) != found.windows:
            _refuse(len(found.shares), windows)
        return found


def _digest(windows: Sequence[int]) -> str:
    return xxhash.xxh3_64_hexdigest(struct.pack(f"<{len(windows)}q", *windows))


def _refuse(count: int, windows: Sequence[int]) -> None:
    raise DataError(
        f"The checkpoint's mixture is of {count} datasets with other numbers of samples, or in another "
        f"order, than today's {len(windows)}.",
        remedy="Keep the datasets and their order; retire one with weight 0; add new ones last.",
    )
