"""What the audit calls exact equals a count by hand, one token and one sample at a time."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from bloomery.data import ngrams
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.mixture import Mixture
from bloomery.data.order import Order, order_through
from bloomery.data.order_audit import neighbours_of, sample_counts_of
from bloomery.data.position import without
from bloomery.data.text_audit import Ngrams, audit_text


@pytest.mark.parametrize("size", [1, 2, 5, 50, 120, 199, 1050])
def test_a_small_dataset_that_is_read_many_times_is_not_suspected(size: int) -> None:
    """A window never follows itself within an epoch: of fewer than a hundred none lies near another there."""
    samples = min(size * 2000, 60_000)
    for seed in range(3):
        (found,) = neighbours_of(Order([size], [1.0], seed), [size], samples=samples)
        assert found.alarms == ()
        assert found.near == pytest.approx(found.near_by_chance, abs=5 * samples**-0.5)


class InFileOrder(Order):
    """Takes the windows of its dataset one after another."""

    def locate_samples(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros_like(samples), samples % self.windows[0]


def test_an_order_that_is_none_is_told_of_a_small_dataset_too() -> None:
    (found,) = neighbours_of(InFileOrder([50], [1.0], 1), [50], samples=1500)
    assert found.alarms and found.correlations[0] > 0.8


@pytest.mark.parametrize("seed", range(6))
def test_samples_that_are_skipped_are_not_taken(seed: int) -> None:
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 60, int(draw.integers(1, 4))).tolist()
    order, samples = Order(sizes, draw.uniform(0.1, 1, len(sizes)).tolist(), seed), 300
    cuts = np.sort(draw.choice(400, 6, replace=False)).tolist()
    skips = tuple(range(begin, end) for begin, end in zip(cuts[::2], cuts[1::2], strict=True))
    taken = [index for piece in without((range(samples),), skips) for index in piece]
    which, windows, epochs = (column.tolist() for column in order.locate_epochs(np.array(taken)))
    for dataset, found in enumerate(sample_counts_of(order, sizes, samples=samples, skips=skips)):
        own = [place for place, of in enumerate(which) if of == dataset]
        times = Counter(windows[place] for place in own)
        of_epoch = Counter(epochs[place] for place in own)
        assert found.taken == len(own)
        assert found.epochs == tuple(of_epoch[epoch] for epoch in range(len(found.epochs)))
        assert sum(found.epochs) == len(own)
        assert (found.least, found.most) == (
            min(times[window] for window in range(sizes[dataset])),
            max(times.values(), default=0),
        )


def test_what_mixtures_ask_in_turn_is_what_they_deliver_to_the_sample(tmp_path: Path) -> None:
    from bloomery.data.dataset_shares import Demand
    from bloomery.data.stream import SampleStream

    mixtures = (
        Mixture.of((90, 40), [Fraction(1, 4), Fraction(3, 4)]),
        Mixture.of((90, 40), [Fraction(5, 6), Fraction(1, 6)], at=130),
    )
    demand = Demand(claims=(), samples=300, slack=0, sequence_length=8)
    order = order_through(mixtures, 3)
    stream = SampleStream(order=order, mixtures=mixtures, seed=3, demand=demand, windows=(90, 40))
    for samples in (1, 100, 130, 131, 300, 1000):
        asked = [float(count) for count in stream.asked(samples)]
        assert sum(asked) == pytest.approx(samples)
        assert np.abs(order.given_before(samples) - asked).max() < 2


def written(prefix: Path, texts: list[list[int]], dtype: str = "<u2") -> IndexedDataset:
    with IndexedWriter(prefix, dtype=dtype) as writer:
        for text in texts:
            writer.add_document(text)
    return IndexedDataset(prefix)


def grams(text: list[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(text[start : start + size]) for start in range(len(text) - size + 1)]


@pytest.mark.parametrize("seed", range(8))
def test_ngrams_are_those_of_a_count_by_hand(seed: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(seed)
    size, ids = int(draw.integers(1, 8)), int(draw.integers(2, 30))

    def some(count: int) -> list[list[int]]:
        return [draw.integers(0, ids, int(draw.integers(0, 25))).tolist() for _ in range(count)]

    training = {"one": some(20), "two": some(9)}
    others = {"held": some(6), "texts": some(4)}
    compared = {
        "held": Ngrams.of_dataset(written(tmp_path / "held", others["held"], "<i4"), size),
        "texts": Ngrams.of_texts((np.array(text, dtype=np.int64) for text in others["texts"]), size),
    }
    pairs = {name: written(tmp_path / name, texts) for name, texts in training.items()}
    found = audit_text(pairs, compared, size=size, at_most_tokens=10**9)
    assert found.is_exact and found.tokens_read == sum(len(t) for texts in training.values() for t in texts)
    in_training = {gram for texts in training.values() for text in texts for gram in grams(text, size)}
    for name, texts in others.items():
        theirs = {gram for text in texts for gram in grams(text, size)}
        shared = [
            (of, number, sum(gram in theirs for gram in grams(text, size)))
            for of, own in training.items()
            for number, text in enumerate(own)
        ]
        shared = [entry for entry in shared if entry[2]]
        told = found.shared[name]
        assert (told.ngrams, told.found, told.is_whole) == (len(theirs), len(theirs & in_training), True)
        assert (told.documents, told.examples) == (len(shared), tuple(shared[:20]))
    for name, texts in training.items():
        again = [len(grams(text, size)) - len(set(grams(text, size))) for text in texts]
        whole = [len(grams(text, size)) for text in texts]
        told_again = found.repeated[name]
        assert told_again.share == pytest.approx(sum(again) / max(sum(whole), 1))
        assert told_again.documents == sum(told_again.histogram) == len(texts)


def test_a_document_that_is_not_read_to_its_end_is_not_called_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ngrams, "HASHED_TOKENS", 30)
    pair = written(tmp_path / "long", [[*range(10)], [*range(100, 145)], [*range(5)]])
    whole = written(tmp_path / "whole", [[*range(10)]])
    monkeypatch.setattr(ngrams, "_TOKENS_AT_ONCE", 20)
    other = Ngrams.of_dataset(pair, 3)
    found = audit_text({"whole": whole}, {"other": other}, size=3, at_most_tokens=1000)
    assert found.is_exact and not found.shared["other"].is_whole
    found = audit_text({"long": pair}, {"whole": Ngrams.of_dataset(whole, 3)}, size=3, at_most_tokens=1000)
    assert (found.is_exact, found.tokens_read, found.left_out) == (False, 45, 15)
    assert found.shared["whole"].is_whole
