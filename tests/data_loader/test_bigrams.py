from itertools import pairwise
from pathlib import Path

import numpy as np

from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data_loader import reading


def test_bigrams_are_counted_across_pieces(tmp_path: Path, monkeypatch) -> None:
    tokens = np.random.default_rng(0).integers(0, 5, 1000)
    with IndexedWriter(tmp_path / "d", dtype=np.uint16) as writer:
        writer.add_document(tokens)
    monkeypatch.setattr(reading, "_PIECE", 37)
    counts = reading.count_bigrams([IndexedDataset(tmp_path / "d")], 5)
    expected = np.zeros((5, 5), dtype=int)
    for a, b in pairwise(tokens):
        expected[a, b] += 1
    assert (counts == expected).all()
