"""Layouts whose exchanges are counted: style, ranks, layout, further settings."""

from __future__ import annotations

from tests.layouts.layouts import BLOOM, GPT, LLAMA

Row = tuple[str, int, str, tuple[str, ...]]

# Small enough that a group of gradients is summed, and one of weights gathered, in several ranges.
BUCKETS = ("parallel.bucket_mb=0.02",)
FULL, MLP = ("train.recompute=full",), ("train.recompute=mlp",)
FP8, BY_ROW = ("train.precision=fp8",), ("train.fp8_scaling=row",)

# Of these each has something that no other has.
ROWS: tuple[Row, ...] = (
    (BLOOM, 2, "tensor=2", (*FULL, "train.micro_batch=4")),
    (LLAMA, 2, "tensor=2", (*FP8, *FULL)),
    (LLAMA, 2, "tensor=2", (*FP8, *BY_ROW, *MLP)),
    (BLOOM, 2, "tensor=2 sequence=true", MLP),
    (LLAMA, 2, "tensor=2 sequence=true", (*FULL, "model.qk_norm=true", "optim.clip_method=tensor")),
    (LLAMA, 2, "pipeline=2 schedule=zero-bubble", FULL),
    (BLOOM, 2, "pipeline=2 schedule=interleaved chunks=2", ()),
    (BLOOM, 2, "pipeline=2 schedule=zbv chunks=2", ()),
    (GPT, 2, "data=2 overlap=false", BUCKETS),
    (BLOOM, 2, "data=2 zero=1", ("train.precision=bf16", *BUCKETS)),
    (GPT, 2, "data=2 zero=2", ("train.precision=bf16", *BUCKETS)),
    (LLAMA, 2, "data=2 zero=3 prefetch_blocks=2", FULL),
    (LLAMA, 2, "data=2 working=by-block", ("optim.name=muon", "optim.qk_clip=10.0", "train.precision=bf16")),
    (LLAMA, 4, "data=4 zero=3 shard_degree=2", ()),
    (LLAMA, 4, "tensor=2 sequence=true data=2 zero=3", (*FP8, "train.recompute=elementwise")),
    (GPT, 4, "tensor=2 sequence=true pipeline=2", FULL),
    (BLOOM, 4, "pipeline=2 data=2 zero=1", BUCKETS),
    (LLAMA, 4, "pipeline=2 data=2 zero=2 schedule=zero-bubble", FP8),
)
# These combine what others have.
FURTHER_ROWS: tuple[Row, ...] = (
    (LLAMA, 2, "tensor=2", FULL),
    (LLAMA, 2, "tensor=2 working=by-block", (*FP8, *BY_ROW)),
    (LLAMA, 2, "tensor=2", (*FP8, "train.fp8_scaling=mx", "model.kv_heads=8", "model.ffn=128", *MLP)),
    (GPT, 2, "tensor=2 sequence=true", ("train.recompute=elementwise",)),
    (BLOOM, 4, "tensor=2 sequence=true data=2 zero=1", (*FP8, *BY_ROW, "parallel.bucket_mb=0")),
    (GPT, 4, "tensor=2 sequence=true data=2 zero=2", ()),
    (LLAMA, 4, "tensor=2 data=2 zero=3", (*FP8, *BY_ROW, *FULL)),
    (GPT, 4, "tensor=2 sequence=true data=2 working=by-block", FP8),
    (LLAMA, 4, "pipeline=2 data=2 zero=3 schedule=interleaved chunks=2 prefetch_blocks=2", ()),
)


def name_of(row: Row) -> str:
    """A row as one line."""
    style, _, layout, settings = row
    return " ".join((layout, style, *settings))
