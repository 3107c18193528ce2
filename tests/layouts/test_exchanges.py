"""The plan says exactly which collectives and messages each rank begins in a step, and of how many bytes."""

from __future__ import annotations

import pytest
from tests.layouts.comparison import Matrix
from tests.layouts.counting import exchanged
from tests.layouts.layouts import BLOOM, GPT, LLAMA

# Two jobs of ranks, however slow the machine: they have deadlines of their own.
pytestmark = pytest.mark.timeout(900)

# Small enough that a group of gradients is summed in several ranges.
BUCKETS = ("parallel.bucket_mb=0.02",)
FULL = ("train.recompute=full",)
# Style, layout, further settings. Of these each has something that no other has.
ROWS = (
    (LLAMA, 2, "tensor=2", FULL),
    (BLOOM, 2, "tensor=2", (*FULL, "train.micro_batch=4")),
    (LLAMA, 2, "tensor=2", ("train.precision=fp8", *FULL)),
    (GPT, 2, "tensor=2 sequence=true", ("train.recompute=elementwise",)),
    (LLAMA, 2, "tensor=2 sequence=true", (*FULL, "model.qk_norm=true", "optim.clip_method=tensor")),
    (LLAMA, 2, "pipeline=2 schedule=zero-bubble", FULL),
    (BLOOM, 2, "pipeline=2 schedule=interleaved chunks=2", ()),
    (BLOOM, 2, "pipeline=2 schedule=zbv chunks=2", ()),
    (GPT, 2, "data=2 overlap=false", BUCKETS),
    (BLOOM, 2, "data=2 zero=1", ("train.precision=bf16", *BUCKETS)),
    (GPT, 2, "data=2 zero=2", ("train.precision=bf16",)),
    (LLAMA, 2, "data=2 zero=3", FULL),
    (LLAMA, 2, "data=2 working=by-block", ("optim.name=muon", "optim.qk_clip=10.0", "train.precision=bf16")),
    (LLAMA, 4, "data=4 zero=3 shard_degree=2", ()),
    (BLOOM, 4, "tensor=2 sequence=true data=2 zero=1", ("parallel.bucket_mb=0",)),
    (GPT, 4, "tensor=2 sequence=true data=2 zero=2", ()),
    (GPT, 4, "tensor=2 sequence=true pipeline=2", FULL),
    (BLOOM, 4, "pipeline=2 data=2 zero=1", BUCKETS),
    (LLAMA, 4, "pipeline=2 data=2 zero=2 schedule=zero-bubble", ()),
)


@pytest.mark.parametrize(
    ("style", "ranks", "layout", "settings"), ROWS, ids=[" ".join((r[2], r[0], *r[3])) for r in ROWS]
)
def test_every_rank_exchanges_what_the_plan_says_with_the_collectives_of_gloo_and_of_nccl(
    matrix: Matrix, style: str, ranks: int, layout: str, settings: tuple[str, ...]
) -> None:
    degrees = tuple(f"parallel.{one}" for one in layout.split())
    counted = matrix.ranks.run(exchanged, style, (*settings, *degrees), ranks, ranks=ranks)
    assert all(total > 0 for totals, _ in counted for total in totals)
    assert [wrong for _, wrong in counted] == [[{}, {}]] * ranks
