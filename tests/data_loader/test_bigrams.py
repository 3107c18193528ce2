from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data_loader import reading
from bloomery.errors import DataError


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


@pytest.mark.parametrize(
    ("dtype", "token", "problem"), [("uint16", 5, "token id 5"), ("int32", -1, "a negative")]
)
def test_an_id_that_the_vocabulary_lacks_is_refused_with_its_place(
    dtype: str, token: int, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [0, 1, 2, 3, 4, 0, 1, token, 2]
    with IndexedWriter(tmp_path / "d", dtype=np.dtype(dtype)) as writer:
        writer.add_document(np.array(tokens, dtype=dtype))
    monkeypatch.setattr(reading, "_PIECE", 4)
    with pytest.raises(
        DataError, match=f"d has {problem}.* within tokens 4 to 8, and the vocabulary ends at 4"
    ):
        reading.count_bigrams([IndexedDataset(tmp_path / "d")], 5)
