"""The initial values of weights, and of an embedding and a head made from bigram counts.

The values of 64 rows of a logical tensor are a function of (seed, name, number of the block of rows). So a
shard is made without the whole tensor, and every layout starts from the same model. The generator is
NumPy's Philox (Salmon et al. 2011), which is specified; torch's differs between devices.

With residual projections that start at zero, a decoder is norm(embedding[a]) · head: a low-rank bigram
model. A short run that starts from counted bigrams saves the steps that would learn them.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from bloomery.model.shape import ResolvedModel, is_residual_output

ROWS_PER_BLOCK = 64


@dataclass(frozen=True, kw_only=True)
class InitialRule:
    """The distribution of a tensor's initial values.

    kind: 'normal', 'uniform' or 'constant'.
    scale: the standard deviation, the bound or the value.
    """

    kind: str
    scale: float


def initial_rule(name: str, model: ResolvedModel) -> InitialRule:
    """Return the rule of the logical tensor `name`."""
    if name.endswith(".bias"):
        return InitialRule(kind="constant", scale=0.0)
    if name.split(".")[-2].endswith("norm"):
        return InitialRule(kind="constant", scale=1.0)
    if name == "embedding.weight" and model.section.embedding_init == "xavier_uniform":
        return InitialRule(kind="uniform", scale=math.sqrt(6.0 / (model.vocabulary + model.section.hidden)))
    if is_residual_output(name) and model.section.residual_init == "zero":
        return InitialRule(kind="constant", scale=0.0)
    if is_residual_output(name) and model.section.residual_init == "scaled":
        return InitialRule(kind="normal", scale=model.init_std / math.sqrt(2.0 * model.section.layers))
    return InitialRule(kind="normal", scale=model.init_std)


def initial_rows(
    name: str, shape: tuple[int, ...], *, rows: range, rule: InitialRule, seed: int
) -> np.ndarray:
    """Return the fp32 values of `rows` of the logical tensor `name`, equal to that slice of the whole.

    shape: shape of the whole logical tensor.
    """
    values = np.empty((len(rows), *shape[1:]), dtype=np.float32)
    columns = tuple(slice(0, size) for size in shape[1:])
    write_values(values, name, shape, rows=rows, columns=columns, rule=rule, seed=seed)
    return values


def write_values(
    values: np.ndarray,
    name: str,
    shape: tuple[int, ...],
    *,
    rows: range,
    columns: tuple[slice, ...],
    rule: InitialRule,
    seed: int,
) -> None:
    """Write the values of `rows` and `columns` of the logical tensor `name` into `values`, fp32.

    shape: shape of the whole logical tensor. columns: one slice for each dim but the first.
    Whole blocks are drawn in place; of a part of a block all numbers are drawn, and the part is copied.
    """
    assert rows.step == 1 and 0 <= rows.start <= rows.stop <= shape[0]
    if rule.kind == "constant":
        values.fill(rule.scale)
        return
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    for block in range(rows.start // ROWS_PER_BLOCK, -(-rows.stop // ROWS_PER_BLOCK)):
        first = block * ROWS_PER_BLOCK
        last = min(first + ROWS_PER_BLOCK, shape[0])
        start, stop = max(first, rows.start), min(last, rows.stop)
        # 2**128 numbers lie between two blocks' counters, so they never meet.
        generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, block, 0]))
        wanted = values[start - rows.start : stop - rows.start]
        whole = (last - first, *shape[1:])
        if wanted.shape == whole and wanted.flags.c_contiguous:
            _draw(generator, wanted, rule)
        else:
            drawn = np.empty(whole, dtype=np.float32)
            _draw(generator, drawn, rule)
            wanted[...] = drawn[start - first : stop - first, *columns]


def _draw(generator: np.random.Generator, values: np.ndarray, rule: InitialRule) -> None:
    """Draw numbers into `values`; several threads may at once, since NumPy holds no lock meanwhile."""
    if rule.kind == "normal":
        generator.standard_normal(out=values, dtype=np.float32)
    else:
        generator.random(out=values, dtype=np.float32)
        values *= np.float32(2.0)
        values -= np.float32(1.0)
    values *= np.float32(rule.scale)


SMOOTHING = 1.0
"""Pseudo-occurrences of the unigram distribution that are added after each token."""
LARGEST_VOCABULARY = 32768
"""The largest vocabulary: counts are a dense square, of 4 GiB at this size."""
_MOST_WEIGHT = 5.0
_POWER_ITERATIONS = 2
_EMBEDDING_RMS = 0.5


def bigram_factors(counts: Tensor, *, hidden: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return embedding and head, [v, h] each, fp32, for which head · rms_norm(embedding[a]) ≈
    ln(p(b | a) / p(b)), the pointwise mutual information (PMI).
    counts: how often b follows a, [v, v].
    The factors of rank h come from a randomised singular value decomposition (Halko, Martinsson & Tropp,
    2011) that gives frequent tokens more weight. They depend only on the arguments, so are equal on all
    ranks.
    """
    counts = counts.float()
    after = counts.sum(1, keepdim=True)  # [v, 1]
    unigram = counts.sum(0, keepdim=True) / counts.sum()  # [1, v]
    smoothed = (counts + SMOOTHING * unigram) / (after + SMOOTHING)
    pmi = torch.log(smoothed / (unigram + 1e-9) + 1e-9)
    row_weight = torch.sqrt(after / after.mean()).clamp(max=_MOST_WEIGHT).sqrt()
    column_weight = torch.sqrt(unigram * unigram.numel()).clamp(max=_MOST_WEIGHT).sqrt()
    left, values, right = _factorise(pmi * row_weight * column_weight, rank=hidden, seed=seed)
    embedding = left * values.sqrt() / row_weight.clamp(min=0.05)
    head = right * values.sqrt() / column_weight.T.clamp(min=0.05)
    lacking = (0, hidden - values.numel())  # a matrix of fewer tokens has no more factors
    embedding, head = pad(embedding, lacking), pad(head, lacking)
    # The norm removes a row's length, so the head gets the mean of the lengths.
    lengths = embedding.square().mean(1, keepdim=True).sqrt()
    length = (lengths * after).sum() / after.sum()
    return embedding / lengths.clamp(min=1e-6) * _EMBEDDING_RMS, head * length


def _factorise(matrix: Tensor, *, rank: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (U [m, k], S [k], V [n, k]) of about the best rank-k approximation."""
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
