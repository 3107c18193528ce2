"""Checks a resume against what its checkpoint promised of the next step, on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import isclose
from typing import Any

from bloomery.events.records import Json

_OF_LIBRARIES = 1e-12
"""The share by which a learning rate may differ: a cosine may have other last bits on another system, and on
processors with and without fused products."""


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What the step after a checkpoint starts from, equal in any layout.

    first: the stream index of the next sample.
    count: the number of samples that were hashed.
    samples: the hash of their addresses, which are the dataset and the window of each.
    learning_rate: the learning rate of that step.
    settings: the hash of the settings that the learning rate depends on.
    optimizer: the digest of all moments, whichever ranks hold them.
    """

    first: int
    count: int
    samples: str
    learning_rate: float
    settings: str
    optimizer: str

    def to_json(self) -> dict[str, Json]:
        """Return what `promise_from_json` reads."""
        return asdict(self)


def promise_from_json(values: Any) -> Promise | None:  # Any: of a manifest or a journal
    """Return the promise that was stored; None where there is none, as in checkpoints of earlier versions."""
    if not isinstance(values, Mapping):
        return None
    names = [item.name for item in fields(Promise)]
    return (
        Promise(**{name: values[name] for name in names}) if all(name in values for name in names) else None
    )


@dataclass(frozen=True, kw_only=True)
class RankEvidence:
    """What one rank will do in the first step after a resume.

    promise: what the step starts from on this rank.
    part: the rank's index on the data axis.
    given: the samples that it reads first; () where they are unknown before the step, as between peers.
    """

    promise: Promise
    part: int
    given: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Json]:
        """Return what `evidence_from_json` reads."""
        return {"promise": self.promise.to_json(), "part": self.part, "given": list(self.given)}


def evidence_from_json(values: Mapping[str, Any]) -> RankEvidence:
    """Return the evidence that another rank sent."""
    promise = promise_from_json(values["promise"])
    assert promise is not None, "every rank says all of it"
    return RankEvidence(promise=promise, part=int(values["part"]), given=tuple(values["given"]))


def broken_promises(
    promised: Promise,
    ranks: Sequence[RankEvidence],
    *,
    shares: Mapping[int, Sequence[int]],
    other_mixture: bool = False,
) -> list[str]:
    """Return a sentence for each way in which a resumed run would differ from what its checkpoint promises.

    ranks: the evidence of all ranks, in their order.
    shares: the samples that each index on the data axis has to read first; empty where that is unknown.
    other_mixture: whether the mixture of datasets was changed, so that other samples are right.
    """
    # A switch of [optim] may give the optimizer other tensors.
    same_settings = all(evidence.promise.settings == promised.settings for evidence in ranks)
    differences = [
        ("samples", "other samples come next", not other_mixture),
        ("first", "the stream is at another place", True),
        ("optimizer", "the optimizer state is another", same_settings),
    ]
    broken = []
    for name, kind_of_promise, counts in differences:
        wrong = [
            rank
            for rank, evidence in enumerate(ranks)
            if getattr(evidence.promise, name) != getattr(promised, name)
        ]
        if wrong and counts:
            was, now = getattr(promised, name), getattr(ranks[wrong[0]].promise, name)
            broken.append(f"{kind_of_promise} on {_named(wrong, len(ranks))} ({name} {now}, promised {was})")
    wrong = [
        rank
        for rank, evidence in enumerate(ranks)
        if evidence.promise.settings == promised.settings
        and not isclose(evidence.promise.learning_rate, promised.learning_rate, rel_tol=_OF_LIBRARIES)
    ]
    if wrong:
        now = ranks[wrong[0]].promise.learning_rate
        broken.append(
            f"the learning rate is {now!r} on {_named(wrong, len(ranks))}, promised "
            f"{promised.learning_rate!r}, though no setting changed"
        )
    wrong = [
        rank
        for rank, evidence in enumerate(ranks)
        if shares and evidence.given and tuple(shares[evidence.part]) != evidence.given
    ]
    if wrong:
        broken.append(f"the first batch has another rank's samples on {_named(wrong, len(ranks))}")
    return broken


def _named(ranks: Sequence[int], count: int) -> str:
    if len(ranks) == count:
        return "all ranks" if count > 1 else "its only rank"
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"{len(ranks)} of {count} ranks ({shown}{', …' if len(ranks) > 8 else ''})"
