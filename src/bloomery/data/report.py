"""What a run takes from each dataset: arithmetic on its stream, without reading a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bloomery.data.epochs import epoch_ends
from bloomery.data.stream import Stream


@dataclass(frozen=True, kw_only=True)
class Row:
    """One dataset, or a group of them. tokens: what it holds. epochs: how often the run goes through it.

    first_epoch_step: the step at which its first epoch ends; None where the run ends before, or of a group.
    """

    name: str
    group: str
    tokens: int
    wanted: float
    delivered: float
    epochs: float
    first_epoch_step: int | None


def dataset_rows(
    stream: Stream,
    *,
    names: Sequence[str],
    groups: Sequence[str],
    tokens: Sequence[int],
    sequence_length: int,
    samples: int,
    step_of: Callable[[int], int],
) -> list[Row]:
    """A row for each dataset of a run of some samples. step_of: the step that consumes a sample count."""
    given = stream.order.given_before(samples).tolist()
    shares = stream.mixtures[-1].shares
    ends = dict(epoch_ends(stream.order, below=samples))
    return [
        Row(
            name=name,
            group=groups[number],
            tokens=tokens[number],
            wanted=shares[number] / sum(shares),
            delivered=given[number] / samples,
            epochs=given[number] * sequence_length / tokens[number],
            first_epoch_step=step_of(ends[number]) if number in ends else None,
        )
        for number, name in enumerate(names)
    ]


def group_rows(rows: Sequence[Row]) -> list[Row]:
    """The sums of each named group, the largest share first."""
    found = []
    for group in {row.group: None for row in rows if row.group}:
        members = [row for row in rows if row.group == group]
        tokens = sum(row.tokens for row in members)
        found.append(
            Row(
                name=group,
                group="",
                tokens=tokens,
                wanted=sum(row.wanted for row in members),
                delivered=sum(row.delivered for row in members),
                epochs=sum(row.epochs * row.tokens for row in members) / tokens,
                first_epoch_step=None,
            )
        )
    return sorted(found, key=lambda row: -row.wanted)
