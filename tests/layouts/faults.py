"""Mistakes that the matrix must find: each is planted on every rank while one job trains.

A fault is a context manager that patches what a mistake would have changed. `CONTROLS` in test_matrix.py says
in which layout, and which style, each must be found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import PropertyMock, patch

import torch

from bloomery.data_loader.batches import Batches, MicroBatch
from bloomery.model import fp8, fp8_scaling
from bloomery.model.decoder import Decoder
from bloomery.optim import clip
from bloomery.optim.clip import CountedGradient
from bloomery.parallel import build, local_loss, precision
from bloomery.parallel.axis import Axis, PendingCollective
from bloomery.parallel.flat import FlatGroup
from bloomery.parallel.fp8_weights import Fp8Weights


@contextmanager
def unreduced_norms() -> Iterator[None]:
    """Gradients of norms and biases stay each rank's own: `reduce` forgets their group."""
    reduce = precision.MasterWeights.reduce

    def forgetful(weights: precision.MasterWeights) -> None:
        own = [flat.clone() for flat in weights.gradient]
        reduce(weights)
        for group, flat, mine in zip(weights.layouts, weights.gradient, own, strict=True):
            if group.rule == "plain":
                flat.copy_(mine)

    with patch.object(precision.MasterWeights, "reduce", forgetful):
        yield


@contextmanager
def skipped_micro_batch() -> Iterator[None]:
    """The last micro-batch of each rank is lost."""
    batch = Batches.batch

    def short(batches: Batches, *arguments: Any) -> Sequence[MicroBatch]:
        return batch(batches, *arguments)[:-1]

    with patch.object(Batches, "batch", short):
        yield


@contextmanager
def norm_counted_twice() -> Iterator[None]:
    """What every rank holds is counted by every rank."""

    def everything(**values: Any) -> CountedGradient:
        return CountedGradient(**(values | {"counts": True}))

    with patch.object(precision, "CountedGradient", everything):
        yield


@contextmanager
def wrong_dropout_address() -> Iterator[None]:
    """Samples are numbered within this rank's micro-batch, not within the run."""
    address = local_loss.dropout_address

    def local(*, samples: torch.Tensor, **values: Any) -> Any:
        return address(samples=torch.arange(len(samples)), **values)

    with patch.object(local_loss, "dropout_address", local):
        yield


@contextmanager
def wrong_dropout_address_of_a_shard() -> Iterator[None]:
    """Heads and positions are numbered within what this rank holds."""
    with patch.object(Decoder, "_held", lambda decoder, address, length: address):
        yield


@contextmanager
def untied_embedding() -> Iterator[None]:
    """Each end of the pipeline takes its copy of the embedding for one of its own."""
    with patch.object(build, "mark_tied_embedding", lambda pieces, _decoder: list(pieces)):
        yield


@contextmanager
def short_warm_up() -> Iterator[None]:
    """No mistake: clipping by z-score or by tensor begins after 3 steps."""
    with (
        patch.object(clip, "TENSOR_WARMUP", 3),
        patch.object(clip, "Z_SCORE_WARMUP", 3),
    ):
        yield


@contextmanager
def branches_of_nccl() -> Iterator[None]:
    """No mistake: the collectives that are chosen where reduce_scatter is quick."""
    with patch.object(Axis, "has_fast_reduce_scatter", new_callable=PropertyMock, return_value=True):
        yield


@contextmanager
def weights_scaled_in_each_product() -> Iterator[None]:
    """No mistake: each product of 8 bits finds the scale of its weight, and rounds it, as if no step knew."""
    with patch.object(Fp8Weights, "use", lambda _weights, *, wanted: None):
        yield


@contextmanager
def reduction_in_bf16() -> Iterator[None]:
    """Gradients are rounded to bf16 before they are summed over the data axis."""
    begin = FlatGroup.begin_reduction

    def rounded(group: FlatGroup, elements: range) -> PendingCollective:
        gradient = group._summed[elements.start : elements.stop]
        gradient.copy_(gradient.bfloat16())
        return begin(group, elements)

    with patch.object(FlatGroup, "begin_reduction", rounded):
        yield


@contextmanager
def fp32_around_8_bits() -> Iterator[None]:
    """No mistake: between products of 8 bits values stay fp32, and scales are powers of two.

    In bf16, or where the last bit of a scale follows the order of a sum, so many codes differ between layouts
    that they hide a mistake.
    """

    def power_of_two(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return fp8_scaling.power_of_two_from(fp8.fp8_scale(largest, dtype))

    with (
        patch.dict(precision.DTYPES, {"fp8": torch.float32}),
        patch.object(fp8_scaling, "fp8_scale", power_of_two),
    ):
        yield


@contextmanager
def fp32_between_products() -> Iterator[None]:
    """No mistake: between products of 8 bits values stay fp32; scales are as they are."""
    with patch.dict(precision.DTYPES, {"fp8": torch.float32}):
        yield


FAULTS: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    "unreduced norm gradient": unreduced_norms,
    "untied embedding": untied_embedding,
    "skipped micro-batch": skipped_micro_batch,
    "norm counted twice": norm_counted_twice,
    "wrong dropout address": wrong_dropout_address,
    "wrong dropout address of a shard": wrong_dropout_address_of_a_shard,
    "short warm-up of limits": short_warm_up,
    "branches of NCCL": branches_of_nccl,
    "weights scaled in each product": weights_scaled_in_each_product,
    "reduction in bf16": reduction_in_bf16,
    "fp32 around 8 bits": fp32_around_8_bits,
    "fp32 between products": fp32_between_products,
}
