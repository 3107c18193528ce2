"""How often one token follows another in tokenised datasets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bloomery.data.indexed import IndexedDataset

MOST_TOKENS = 50_000_000
"""Tokens that are counted of each dataset: more changes the statistics little."""
_PIECE = 1 << 22


def count_bigrams(datasets: Sequence[IndexedDataset], vocabulary: int) -> npt.NDArray[np.int64]:
    """counts[a, b]: how often b follows a, over the beginning of each dataset; [vocabulary, vocabulary]."""
    counts = np.zeros(vocabulary * vocabulary, dtype=np.int64)
    for dataset in datasets:
        counted = min(dataset.token_count, MOST_TOKENS)
        for start in range(0, counted - 1, _PIECE):
            tokens = dataset.window(start, min(_PIECE, counted - 1 - start) + 1).astype(np.int64)
            pairs, times = np.unique(tokens[:-1] * vocabulary + tokens[1:], return_counts=True)
            counts[pairs] += times
    return counts.reshape(vocabulary, vocabulary)
