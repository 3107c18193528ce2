"""The last checkpoint of a single pass, against remembering every sample that was read."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from bloomery.data.mixture import Mixture
from bloomery.data.order import Order, order_through
from bloomery.data.position import Ranges
from bloomery.data.stream import epoch_ends, first_repeat


def repeat_by_hand(order: Order, below: int, skips: Ranges) -> int | None:
    """Return the first index of another epoch than the first that is not skipped."""
    which, windows, epochs = order.locate_epochs(np.arange(below))
    seen = set[tuple[int, int]]()
    for index in range(below):
        if any(index in skip for skip in skips):
            continue
        sample = (int(which[index]), int(windows[index]))
        assert epochs[index] > 0 or sample not in seen
        if epochs[index] > 0:
            return index
        seen.add(sample)
    return None


@pytest.mark.parametrize("seed", range(25))
def test_the_first_sample_that_is_read_again_is_found_across_mixtures_and_skips(seed: int) -> None:
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 40, int(draw.integers(1, 5))).tolist()
    mixtures, at = list[Mixture](), 0
    for _ in range(int(draw.integers(1, 4))):
        known = sizes[: int(draw.integers(len(mixtures[-1].windows), len(sizes) + 1)) if mixtures else 1]
        weights = [Fraction(int(draw.integers(0, 5))) for _ in known]
        weights[int(draw.integers(len(weights)))] += 1
        mixtures.append(Mixture.of(known, weights, at=at))
        at += int(draw.integers(1, 60))
    order, below = order_through(mixtures, seed), int(draw.integers(1, 200))
    cuts = np.sort(draw.choice(200, 4, replace=False)).tolist()
    for skips in ((), (range(*cuts[:2]), range(*cuts[2:]))):
        assert first_repeat(order, below=below, skips=skips) == repeat_by_hand(order, below, skips)


def test_a_dataset_that_is_spent_with_its_first_epoch_is_never_read_again() -> None:
    mixture = Mixture.of((10, 500), [Fraction(1, 2), Fraction(1, 2)])
    retired = Mixture.of((10, 500), [0, 1], at=20)
    order = order_through([mixture, retired], 3)
    assert epoch_ends(order, below=100)[0][1] <= 20 and first_repeat(order, below=100) is None
    assert first_repeat(order_through([mixture], 3), below=100) in (20, 21)
