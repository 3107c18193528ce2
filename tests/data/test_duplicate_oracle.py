"""`data dedup` on small random texts, against comparing each document with every other one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bloomery.data.duplicates import SimilarityThreshold, deduplicate
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.overlap import overlap_of


def written(prefix: Path, texts: list[list[int]], dtype: str = "<u2") -> IndexedDataset:
    with IndexedWriter(prefix, dtype=dtype) as writer:
        for text in texts:
            writer.add_document(text)
    return IndexedDataset(prefix)


def alike(ours: list[int], theirs: list[int], size: int) -> float:
    if ours == theirs:
        return 1.0
    one, other = ({tuple(t[n : n + size]) for n in range(max(len(t) - size + 1, 1))} for t in (ours, theirs))
    return len(one & other) / len(one | other)


def related(draw: np.random.Generator, base: list[list[int]], count: int) -> list[list[int]]:
    """Return copies of texts, and of copies of them, with no or some tokens changed."""
    texts: list[list[int]] = []
    for _ in range(count):
        known = base if not texts or draw.random() < 0.5 else texts
        text = list(known[draw.integers(len(known))])
        for _ in range(int(draw.choice([0, 0, 1, 2, 4]))):
            text[draw.integers(len(text))] = int(draw.integers(1, 50))
        texts.append(text)
    return texts


@pytest.mark.parametrize(("seed", "threshold"), [(0, 0.8), (14, 0.8), (1, 0.9), (2, 1.0), (3, 0.5)])
def test_each_that_goes_is_like_one_that_stays_and_no_equal_one_stays(
    seed: int, threshold: float, tmp_path: Path
) -> None:
    draw = np.random.default_rng(seed)
    base = [draw.integers(1, 50, int(draw.integers(1, 120))).tolist() for _ in range(9)]
    texts = related(draw, base, 60)
    written(tmp_path / "pair", texts)
    likeness = SimilarityThreshold(threshold=threshold)
    deduplicate([tmp_path / "pair"], tmp_path / "new", likeness=likeness)
    listed = (tmp_path / "new-duplicates.jsonl").read_text().splitlines()
    gone = {row["document"]: row["like_document"] for row in map(json.loads, listed)}
    kept = [number for number in range(len(texts)) if number not in gone]
    new = IndexedDataset(tmp_path / "new")
    assert [new.document(n).tolist() for n in range(new.document_count)] == [texts[n] for n in kept]
    for document, earlier in gone.items():
        assert earlier < document and earlier in kept
        assert alike(texts[document], texts[earlier], 5) >= threshold
    assert len({tuple(texts[number]) for number in kept}) == len(kept)


def test_a_document_that_is_equal_to_a_removed_one_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shares keys with the removed one alone where another document was the first of each other key."""
    draw = np.random.default_rng(1)
    first = draw.integers(1, 1000, 100).tolist()
    second = [*first[:-2], 1, 2]
    written(tmp_path / "pair", [first, second, second])
    monkeypatch.setattr(
        "bloomery.data.duplicates.KeyFiles.candidates", lambda self, count, progress: iter([(1, 0), (2, 1)])
    )
    done = deduplicate([tmp_path / "pair"], tmp_path / "new", likeness=SimilarityThreshold())
    assert (done.documents, done.removed_near) == (1, 2)
    listed = [json.loads(line) for line in (tmp_path / "new-duplicates.jsonl").read_text().splitlines()]
    assert [(row["document"], row["like_document"]) for row in listed] == [(1, 0), (2, 0)]


def test_a_lower_threshold_finds_documents_that_are_less_alike(tmp_path: Path) -> None:
    """By 16 bands of 8, one in twelve of these would be found."""
    draw = np.random.default_rng(5)
    texts = []
    for _ in range(40):
        text = draw.integers(1, 60_000, 200).tolist()
        texts += [text, [*text[:146], *draw.integers(1, 60_000, 54).tolist()]]
    assert 0.5 < min(alike(texts[2 * n], texts[2 * n + 1], 5) for n in range(40)) < 0.6
    written(tmp_path / "pair", texts)
    done = deduplicate([tmp_path / "pair"], tmp_path / "new", likeness=SimilarityThreshold(threshold=0.5))
    assert done.removed_near >= 34


def test_equal_documents_are_found_whatever_the_type_of_their_tokens(tmp_path: Path) -> None:
    training = written(tmp_path / "training", [[1, 2, 3], [4, 5]])
    held_out = written(tmp_path / "held", [[4, 5], [4, 6]], "<i4")
    found = overlap_of({"t": training}, {"h": held_out})
    assert found.shared == {"h": 1}


def test_documents_of_a_part_are_told_by_their_numbers_in_the_file(tmp_path: Path) -> None:
    """Those of one file that are held out have others before them, which are trained on."""
    whole = written(tmp_path / "whole", [[1], [2], [3], [4], [2], [5]])
    training, held_out = whole.part(range(4)), whole.part(range(3, 6))
    (found,) = overlap_of({"t": training.part(range(1, 3))}, {"h": held_out}).examples
    assert (found.held_out_document, found.training_document) == (4, 1)
