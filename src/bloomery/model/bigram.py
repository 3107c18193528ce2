"""An embedding and a head that know the training text's bigrams before the first step.

With residual projections that start at zero a decoder is norm(embedding[a]) · head: a low-rank bigram model.
Filling it from counted bigrams saves a short run the steps that would learn just that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bloomery.model.init import InitialRule, initial_rows

SMOOTHING = 1.0
"""Pseudo-occurrences of the unigram distribution after each token."""
LARGEST_VOCABULARY = 32768
"""Counts are a dense square: 4 GiB at this size."""
_MOST_WEIGHT = 5.0
_POWER_ITERATIONS = 2
_EMBEDDING_RMS = 0.5


def bigram_factors(counts: Tensor, *, hidden: int, seed: int) -> tuple[Tensor, Tensor]:
    """Embedding and head, [v, h] each, fp32: head · rms_norm(embedding[a]) ≈ ln p(b | a) / p(b).

    counts: how often b follows a, [v, v]. The rank-h factors are those of a randomised singular value
    decomposition (Halko, Martinsson & Tropp, 2011), with frequent tokens weighted up. A function of its
    arguments alone, so equal on all ranks.
    """
    counts = counts.float()
    after = counts.sum(1, keepdim=True)  # [v, 1]
    unigram = counts.sum(0, keepdim=True) / counts.sum()  # [1, v]
    smoothed = (counts + SMOOTHING * unigram) / (after + SMOOTHING)
    surprise = torch.log(smoothed / (unigram + 1e-9) + 1e-9)
    row_weight = torch.sqrt(after / after.mean()).clamp(max=_MOST_WEIGHT).sqrt()
    column_weight = torch.sqrt(unigram * unigram.numel()).clamp(max=_MOST_WEIGHT).sqrt()
    left, values, right = _factorise(surprise * row_weight * column_weight, rank=hidden, seed=seed)
    embedding = left * values.sqrt() / row_weight.clamp(min=0.05)
    head = right * values.sqrt() / column_weight.T.clamp(min=0.05)
    # The norm takes a row's length away: the head gets back the mean of them.
    lengths = embedding.square().mean(1, keepdim=True).sqrt()
    length = (lengths * after).sum() / after.sum()
    return embedding / lengths.clamp(min=1e-6) * _EMBEDDING_RMS, head * length


def _factorise(matrix: Tensor, *, rank: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(U [m, k], S [k], V [n, k]) of the best rank-k approximation, nearly."""
    rule = InitialRule(kind="normal", scale=1.0)
    shape = (matrix.shape[1], rank)
    sketch = torch.from_numpy(
        initial_rows("bigram.sketch", shape, rows=range(shape[0]), rule=rule, seed=seed)
    )
    basis = torch.linalg.qr(matrix @ sketch).Q
    for _ in range(_POWER_ITERATIONS):
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ basis).Q).Q
    left, values, right = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
    return basis @ left, values, right.T
