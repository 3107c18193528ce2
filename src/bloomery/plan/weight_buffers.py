"""Predicts the flat buffers of one rank: which parameters lie in each, and their padding, exactly.

The parameters of a rank that follow one optimizer rule, and are split among ranks in one way, share a buffer
(`optim/groups.py` lays them out). Under ZeRO 2 and 3, and where weights are rounded block by block, each
block has buffers of its own. Collectives move whole buffers, or ranges of them.

Legend: t tensor-parallel ranks, h hidden, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bloomery.config.model import ModelSection
from bloomery.config.optim import OptimSection
from bloomery.config.parallel import ParallelSection
from bloomery.frozen import dataclass
from bloomery.plan.parameters import ffn_width, head_size, kv_heads, query_width
from bloomery.plan.pipeline_stages import PipelineStage, padded_rows
from bloomery.plan.ranks import Degrees

ALIGNMENT = 64
"""Each parameter starts at a multiple of this number of elements, so every fp32 view is 256-byte aligned."""
GATHERED_BUCKETS = 4
"""How many gradient buckets' elements of updated weights are gathered at one time
(`parallel/updated_weights.py`)."""


@dataclass(frozen=True, kw_only=True)
class StoredParameter:
    """One parameter as a rank stores it.

    name: as the decoder names it. rows, columns: 1 column of a norm or a bias.
    share: 'whole', 'split', 'partial', 'echoed' or 'echo', see `optim/groups.py`.
    """

    name: str
    rule: str
    share: str
    rows: int
    columns: int = 1

    @property
    def numel(self) -> int:
        """The number of its elements on one rank."""
        return self.rows * self.columns

    @property
    def block(self) -> str:
        """The block that it belongs to, 'blocks.3'; '' outside of blocks."""
        return ".".join(self.name.split(".")[:2]) if self.name.startswith("blocks.") else ""


@dataclass(frozen=True, kw_only=True)
class WeightBuffer:
    """The parameters of one rule, one share and one bucket, one after the other, each aligned.

    bucket: a block; '' where all blocks share the buffer, and for what is outside of blocks.
    shards: the number of ranks that divide it.
    """

    rule: str
    share: str
    bucket: str
    parameters: tuple[StoredParameter, ...]
    shards: int

    @property
    def starts(self) -> tuple[int, ...]:
        """The first element of each parameter."""
        starts, start = [], 0
        for parameter in self.parameters:
            starts.append(start)
            start += aligned(parameter.numel)
        return tuple(starts)

    @property
    def numel(self) -> int:
        """The number of elements with padding, a multiple of the shards."""
        return aligned(sum(aligned(one.numel) for one in self.parameters), ALIGNMENT * self.shards)

    @property
    def held(self) -> int:
        """The number of elements of one shard."""
        return self.numel // self.shards

    def ranges(self, bucket_bytes: int) -> list[range]:
        """Return the ranges of elements that are summed at one time, from the end of the buffer.

        bucket_bytes: fp32 bytes at which a range is closed; 0: the whole buffer at one time.
        """
        ranges, stop = [], self.numel
        for number, start in reversed(list(enumerate(self.starts))):
            if number == 0 or 0 < bucket_bytes <= 4 * (stop - start):
                ranges.append(range(start, stop))
                stop = start
        return ranges

    def gathered_ranges(self, bucket_bytes: int) -> list[range]:
        """Return the ranges of updated weights that are gathered at one time, from the start of the buffer.

        bucket_bytes: as in `ranges`; a range is closed at GATHERED_BUCKETS of them. That of a block is whole.
        """
        range_bytes = GATHERED_BUCKETS * bucket_bytes if self.bucket == "" else 0
        ranges, start = [], 0
        for stop in (*self.starts[1:], self.numel):
            if stop == self.numel or 0 < range_bytes <= 4 * (stop - start):
                ranges.append(range(start, stop))
                start = stop
        return ranges

    def parts_of_shards(self, elements: range) -> list[range]:
        """Return the parts of these elements that different ranks hold."""
        return [
            range(max(elements.start, shard * self.held), min(elements.stop, (shard + 1) * self.held))
            for shard in range(elements.start // self.held, -(-elements.stop // self.held))
        ]


def aligned(numel: int, alignment: int = ALIGNMENT) -> int:
    """Return `numel` rounded up to a multiple of the alignment."""
    return -(-numel // alignment) * alignment


def weight_buffers(
    model: ModelSection,
    parallel: ParallelSection,
    optim: OptimSection,
    *,
    stages: Sequence[PipelineStage],
    degrees: Degrees,
    vocabulary: int,
    sequence_length: int,
) -> tuple[WeightBuffer, ...]:
    """Return the buffers of one rank, in the order in which it makes them.

    stages: those of its pipeline rank. vocabulary: without padding. sequence_length: the number of learned
    positions that are 'auto'.
    """
    by_block = (parallel.zero >= 2 and degrees.shard > 1) or parallel.working == "by-block"
    members: dict[tuple[str, str, str], list[StoredParameter]] = {}
    for parameter in stored_parameters(
        model, parallel, optim, stages=stages, vocabulary=vocabulary, sequence_length=sequence_length
    ):
        bucket = parameter.block if by_block else ""
        members.setdefault((parameter.rule, parameter.share, bucket), []).append(parameter)
    return tuple(
        WeightBuffer(
            rule=rule, share=share, bucket=bucket, parameters=tuple(parameters), shards=degrees.shard
        )
        for (rule, share, bucket), parameters in members.items()
    )


def stored_parameters(
    model: ModelSection,
    parallel: ParallelSection,
    optim: OptimSection,
    *,
    stages: Sequence[PipelineStage],
    vocabulary: int,
    sequence_length: int,
) -> Iterator[StoredParameter]:
    """Yield the parameters of one rank in the order of its decoder; see `weight_buffers`."""
    t, hidden = parallel.tensor, model.hidden
    rows, summed = padded_rows(vocabulary, degree=t), "partial" if parallel.sequence and t > 1 else "whole"
    split = "split" if t > 1 else "whole"
    embeds, finishes = any(one.embeds for one in stages), any(one.finishes for one in stages)

    def norm(name: str) -> Iterator[StoredParameter]:
        for kind in ("weight", "bias") if model.norm == "layernorm" else ("weight",):
            yield StoredParameter(name=f"{name}.{kind}", rule="plain", share=summed, rows=hidden)

    if embeds or (finishes and model.tied):
        share = split
        if model.tied and embeds != finishes:
            share = "echoed" if embeds else "echo"
        yield StoredParameter(
            name="embedding.weight", rule="embedding", share=share, rows=rows, columns=hidden
        )
    if embeds and model.position == "learned":
        positions = sequence_length if model.max_positions == "auto" else model.max_positions
        yield StoredParameter(
            name="positions.weight", rule="embedding", share=summed, rows=positions, columns=hidden
        )
    if embeds and model.embedding_norm:
        yield from norm("embedding_norm")
    for stage in stages:
        for block in stage.blocks:
            for parameter in _of_block(model, optim, t=t, split=split, summed=summed):
                yield StoredParameter(
                    name=f"blocks.{block}.{parameter.name}",
                    rule=parameter.rule,
                    share=parameter.share,
                    rows=parameter.rows,
                    columns=parameter.columns,
                )
    if finishes:
        yield from norm("final_norm")
        if not model.tied:
            yield StoredParameter(name="head.weight", rule="head", share=split, rows=rows, columns=hidden)


def tensor_count(model: ModelSection) -> int:
    """Return the number of logical tensors of the whole model, in which fused ones count apart."""
    norm = 2 if model.norm == "layernorm" else 1
    gates = 2 if model.activation == "swiglu" else 1
    block = 2 * norm + 4 * (1 + model.attention_bias) + (gates + 1) * (1 + model.mlp_bias)
    block += 2 if model.qk_norm else 0
    ends = 1 + (model.position == "learned") + norm * model.embedding_norm + norm + (not model.tied)
    return model.layers * block + ends


def _of_block(
    model: ModelSection, optim: OptimSection, *, t: int, split: str, summed: str
) -> Iterator[StoredParameter]:
    """Yield the parameters of one block. split, summed: the share of what is divided, and of what is not."""
    hidden, matrix = model.hidden, "muon" if optim.name == "muon" else "matrix"
    norms = ("weight", "bias") if model.norm == "layernorm" else ("weight",)

    def linear(name: str, rows: int, columns: int, *, bias: bool, by_rows: bool) -> Iterator[StoredParameter]:
        yield StoredParameter(name=f"{name}.weight", rule=matrix, share=split, rows=rows, columns=columns)
        if bias:
            share = split if by_rows else summed
            yield StoredParameter(name=f"{name}.bias", rule="plain", share=share, rows=rows)

    def norm(name: str) -> Iterator[StoredParameter]:
        for kind in norms:
            yield StoredParameter(name=f"{name}.{kind}", rule="plain", share=summed, rows=hidden)

    width, narrow = query_width(model), kv_heads(model) * head_size(model)
    has_bias = model.attention_bias
    yield from norm("attention_norm")
    yield from linear("attention.qkv", (width + 2 * narrow) // t, hidden, bias=has_bias, by_rows=True)
    if model.qk_norm:
        # Each rank's heads give it a part of the gradient, whether the sequence is split or not.
        share = "partial" if t > 1 else "whole"
        for name in ("attention.query_norm.weight", "attention.key_norm.weight"):
            yield StoredParameter(name=name, rule="plain", share=share, rows=head_size(model))
    yield from linear("attention.output", hidden, width // t, bias=has_bias, by_rows=False)
    yield from norm("mlp_norm")
    gates = 2 if model.activation == "swiglu" else 1
    inner = gates * ffn_width(model) // t
    yield from linear("mlp.expand", inner, hidden, bias=model.mlp_bias, by_rows=True)
    yield from linear("mlp.down", hidden, ffn_width(model) // t, bias=model.mlp_bias, by_rows=False)
