"""How far a layout is from one process, and how far it may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from tests.layouts.layouts import Layout
from tests.layouts.training import Boxes, Job, RankResult, gathered, train
from tests.layouts.workers import Ranks

GRADIENT_TOLERANCE, LOSS_TOLERANCE, NORM_TOLERANCE = 1e-5, 1e-5, 1e-4
BF16_LOSS_TOLERANCE = 2e-2
LEARNT_NATS = 1.0
BF16 = ("train.precision=bf16",)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What one process found."""

    losses: list[float]
    norms: list[float]
    gradients: Mapping[str, np.ndarray]

    def first(self, steps: int) -> Reference:
        """What it found in its first steps."""
        return replace(self, losses=self.losses[:steps], norms=self.norms[:steps])


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The largest differences from one process; each relative. worst: the tensor of the first figure."""

    gradient: float
    worst: str
    loss: float
    norm: float

    @property
    def beyond(self) -> set[str]:
        """Which of the three are not within the matrix' tolerances."""
        limits = {"gradient": GRADIENT_TOLERANCE, "loss": LOSS_TOLERANCE, "norm": NORM_TOLERANCE}
        # NaN is beyond too.
        return {name for name, limit in limits.items() if not getattr(self, name) <= limit}


class Matrix:
    """Trains layouts on one set of ranks, and each style's reference once.

    steps: of each training that is compared.
    """

    def __init__(self, *, steps: int = 20) -> None:
        self.ranks, self.steps = Ranks(), steps
        self._references: dict[tuple[str, tuple[str, ...], str | None], Reference] = {}

    def close(self) -> None:
        """End the ranks."""
        self.ranks.close()

    def reference(self, style: str, *settings: str, fault: str | None = None) -> Reference:
        """One process, with settings that are not of the layout, and perhaps a patch of `faults`."""
        key = (style, settings, fault)
        if key not in self._references:
            (result,) = self.results(Job(style=style, settings=settings, steps=self.steps, fault=fault))
            self._references[key] = Reference(
                losses=result.losses, norms=result.norms, gradients=gathered(result.gradients)
            )
        return self._references[key]

    def learnt(self, style: str) -> float:
        """By how many nats the loss of one process falls within 20 steps."""
        (result,) = self.results(Job(style=style, steps=20, returns=()))
        return result.losses[0] - result.losses[-1]

    def results(self, job: Job) -> list[RankResult]:
        """Each rank's result."""
        results: list[RankResult] = self.ranks.run(train, job, ranks=job.ranks)
        return results

    def difference(
        self,
        layout: Layout,
        style: str,
        *,
        fault: str | None = None,
        settings: tuple[str, ...] = (),
        patch: str | None = None,
        steps: int | None = None,
    ) -> Difference:
        """Train a layout, and hold it against one process; both with `settings` beside the layout's.

        fault: planted in the layout alone. patch: the same, but planted in both.
        steps: how many are compared, if not as many as of other layouts.
        """
        job = Job(
            style=style,
            settings=(*settings, *layout.settings),
            ranks=layout.ranks,
            steps=steps or self.steps,
            fault=fault or patch,
        )
        reference = self.reference(style, *settings, fault=patch)
        return difference(self.results(job), reference.first(job.steps))


def difference(results: list[RankResult], reference: Reference) -> Difference:
    """The largest difference of any rank. Every rank must report every step, and together every gradient."""
    boxes = [box for result in results for box in result.gradients]
    assert set(gathered(boxes)) == set(reference.gradients)
    gradient, worst = max((_distance(box, reference.gradients), box.name) for box in boxes)
    return Difference(
        gradient=gradient,
        worst=worst,
        loss=max(_furthest(result.losses, reference.losses) for result in results),
        norm=max(_furthest(result.norms, reference.norms) for result in results),
    )


def _distance(box: Boxes, reference: Mapping[str, np.ndarray]) -> float:
    """‖box − reference‖ by the norm of the whole tensor's gradient.

    Softmax does not see a key's bias: its gradient is zero but for rounding, and is held against the query's.
    """
    whole = reference[box.name]
    window = tuple(
        slice(first, first + size) for first, size in zip(box.offset, box.values.shape, strict=True)
    )
    scale = np.linalg.norm(reference[box.name.replace(".key.bias", ".query.bias")])
    return float(np.linalg.norm(box.values.astype(np.float64) - whole[window]) / scale)


def _furthest(found: list[float], expected: list[float]) -> float:
    assert len(found) == len(expected)
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
