"""Which box of each weight a tensor-parallel rank holds, and what its collectives do with a sequence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bloomery.config.model import ModelSection
from bloomery.model.decoder import Decoder, build
from bloomery.parallel import tensor as tensor_module
from bloomery.parallel import tensor_collectives
from bloomery.parallel.axis import Axis
from bloomery.parallel.tensor import (
    SequenceParallelPositions,
    VocabularyParallelEmbedding,
    split_decoder,
    split_of,
)
from bloomery.parallel.tensor_collectives import (
    EnterTensorParallelRegion,
    LeaveTensorParallelRegion,
    TensorGroup,
)
from bloomery.parallel.vocabulary_loss import VocabularyParallelLoss

CPU = torch.device("cpu")
GROUP = TensorGroup(group="g", index=1, degree=2, has_fast_reduce_scatter=True)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("embedding.weight", "vocabulary"),
        ("head.weight", "vocabulary"),
        ("positions.weight", None),
        ("embedding_norm.weight", None),
        ("final_norm.weight", None),
        ("blocks.3.attention.query.weight", "rows"),
        ("blocks.3.attention.key.bias", "rows"),
        ("blocks.3.attention.value.weight", "rows"),
        ("blocks.3.attention.query_norm.weight", None),
        ("blocks.3.attention.output.weight", "columns"),
        ("blocks.3.attention.output.bias", None),
        ("blocks.3.mlp.gate.weight", "rows"),
        ("blocks.3.mlp.up.bias", "rows"),
        ("blocks.3.mlp.down.weight", "columns"),
        ("blocks.3.mlp.down.bias", None),
        ("blocks.3.mlp_norm.weight", None),
    ],
)
def test_what_expands_is_split_by_rows_and_what_contracts_by_columns(name: str, split: str | None) -> None:
    assert split_of(name) == split


def split(
    section: ModelSection,
    *,
    sequence: bool,
    monkeypatch: pytest.MonkeyPatch,
    degree: int = 2,
    index: int | None = None,
) -> tuple[Decoder, dict[str, Any]]:
    """The last rank's part of a decoder or that of `index`, and its pieces by name."""
    monkeypatch.setattr(tensor_module, "tensor_group_of", lambda axis: GROUP)
    decoder = build(section, vocabulary=11, sequence_length=6, device="meta")
    axis = Axis(index=degree - 1 if index is None else index, ranks=tuple(range(degree)))
    pieces = split_decoder(decoder, axis, sequence=sequence, device=CPU)
    return decoder, {piece.name: piece for piece in pieces}


GPT = ModelSection(
    layers=1,
    hidden=8,
    heads=4,
    kv_heads=2,
    ffn=12,
    norm="layernorm",
    position="learned",
    activation="gelu",
    bias=True,
    qk_norm=True,
)


@pytest.mark.parametrize("sequence", [False, True])
def test_a_rank_holds_its_boxes_of_split_weights_and_all_of_the_others(
    sequence: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, pieces = split(GPT, sequence=sequence, monkeypatch=monkeypatch)
    whole = "partial" if sequence else "whole"
    block, attention, mlp = "blocks.0", "blocks.0.attention", "blocks.0.mlp"
    assert {n: (p.offset, p.shape, p.global_shape, p.row_start, p.share) for n, p in pieces.items()} == {
        "embedding.weight": ((5, 0), (6, 8), (11, 8), 0, "split"),
        "positions.weight": ((0, 0), (6, 8), (6, 8), 0, whole),
        f"{block}.attention_norm.weight": ((0,), (8,), (8,), 0, whole),
        f"{block}.attention_norm.bias": ((0,), (8,), (8,), 0, whole),
        f"{attention}.query.weight": ((4, 0), (4, 8), (8, 8), 0, "split"),
        f"{attention}.key.weight": ((2, 0), (2, 8), (4, 8), 4, "split"),
        f"{attention}.value.weight": ((2, 0), (2, 8), (4, 8), 6, "split"),
        f"{attention}.query.bias": ((4,), (4,), (8,), 0, "split"),
        f"{attention}.key.bias": ((2,), (2,), (4,), 4, "split"),
        f"{attention}.value.bias": ((2,), (2,), (4,), 6, "split"),
        f"{attention}.query_norm.weight": ((0,), (2,), (2,), 0, "partial"),
        f"{attention}.key_norm.weight": ((0,), (2,), (2,), 0, "partial"),
        f"{attention}.output.weight": ((0, 4), (8, 4), (8, 8), 0, "split"),
        f"{attention}.output.bias": ((0,), (8,), (8,), 0, whole),
        f"{block}.mlp_norm.weight": ((0,), (8,), (8,), 0, whole),
        f"{block}.mlp_norm.bias": ((0,), (8,), (8,), 0, whole),
        f"{mlp}.up.weight": ((6, 0), (6, 8), (12, 8), 0, "split"),
        f"{mlp}.up.bias": ((6,), (6,), (12,), 0, "split"),
        f"{mlp}.down.weight": ((0, 6), (8, 6), (8, 12), 0, "split"),
        f"{mlp}.down.bias": ((0,), (8,), (8,), 0, whole),
        "final_norm.weight": ((0,), (8,), (8,), 0, whole),
        "final_norm.bias": ((0,), (8,), (8,), 0, whole),
        "head.weight": ((5, 0), (6, 8), (11, 8), 0, "split"),
    }
    assert decoder.heads == range(2, 4)
    assert (decoder.sequence_index, decoder.sequence_degree) == ((1, 2) if sequence else (0, 1))
    assert isinstance(decoder.positions, SequenceParallelPositions) is sequence
    embedding, loss, first = decoder.embedding, decoder.token_loss, decoder.blocks[0]
    assert isinstance(embedding, VocabularyParallelEmbedding) and embedding.rows == range(5, 11)
    assert isinstance(loss, VocabularyParallelLoss) and loss.rows == range(5, 11)
    regions = [first.enter_attention, first.enter_mlp, first.leave_attention, first.leave_mlp]
    regions += [embedding.leave, loss.enter]
    assert [type(one) for one in regions] == [
        *[EnterTensorParallelRegion] * 2,
        *[LeaveTensorParallelRegion] * 3,
        EnterTensorParallelRegion,
    ]
    assert all(one.sequence is sequence and one.group is GROUP for one in regions)
    assert first.attention.qkv.maximum == GROUP.maximum == first.mlp.down.maximum
    assert all(parameter.untyped_storage().size() == 0 for parameter in decoder.parameters())


def test_one_rank_holds_everything_and_has_no_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, pieces = split(GPT, sequence=False, monkeypatch=monkeypatch, degree=1)
    assert {piece.share for name, piece in pieces.items() if split_of(name) is None} == {"whole"}
    assert all(piece.shape == piece.global_shape and not any(piece.offset) for piece in pieces.values())
    assert decoder.heads == range(4) and not isinstance(decoder.token_loss, VocabularyParallelLoss)


@pytest.mark.parametrize(("index", "rows"), [(0, 5), (1, 6)])
def test_ranks_pad_their_parts_of_the_vocabulary_to_one_size_of_whole_eights(
    index: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, pieces = split(GPT, sequence=False, monkeypatch=monkeypatch, index=index)
    assert pieces["embedding.weight"].shape == pieces["head.weight"].shape == (rows, 8)
    stored = {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
    assert stored["embedding.weight"] == stored["head.weight"] == (8, 8)


class Exchanges:
    """The collectives of torch: the other rank, index 0, has what this one has, plus 100."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        private = tensor_collectives.torch_private
        for name in ("begin_all_reduce", "begin_all_gather", "begin_reduce_scatter"):
            monkeypatch.setattr(private, name, getattr(self, name))
        monkeypatch.setattr(private, "wait_for", lambda x: x)

    def begin_all_reduce(self, x: torch.Tensor, operation: str, group: str) -> torch.Tensor:
        assert group == "g" and x.is_contiguous()
        self.calls.append(operation)
        return x + (x + 100.0) if operation == "sum" else torch.maximum(x, x + 100.0)

    def begin_all_gather(self, x: torch.Tensor, degree: int, group: str) -> torch.Tensor:
        assert (degree, group) == (2, "g") and x.is_contiguous()
        both = [x + 100.0, x]
        return torch.stack(both) if x.dim() == 0 else torch.cat(both)

    def begin_reduce_scatter(self, x: torch.Tensor, degree: int, group: str) -> torch.Tensor:
        assert (degree, group) == (2, "g") and x.is_contiguous()
        self.calls.append("scatter")
        return (x + (x + 100.0)).chunk(2)[1]


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> Exchanges:
    return Exchanges(monkeypatch)


def test_positions_are_joined_by_rank_and_sums_are_cut_to_the_ranks_own(exchanges: Exchanges) -> None:
    x = torch.arange(12.0).reshape(2, 2, 3)  # [b, s/tp, h]
    assert torch.equal(GROUP.all_gather_sequence(x), torch.cat([x + 100.0, x], dim=1))
    assert torch.equal(GROUP.all_gather(x), torch.stack([x + 100.0, x]))
    assert GROUP.all_gather(torch.tensor(3.0)).tolist() == [103.0, 3.0]
    whole = torch.arange(24.0).reshape(2, 4, 3)
    expected = (2 * whole + 100.0)[:, 2:]
    slow = TensorGroup(group="g", index=1, degree=2, has_fast_reduce_scatter=False)
    for group, called in ((GROUP, ["scatter"]), (slow, ["sum"])):
        exchanges.calls.clear()
        found = group.reduce_scatter_sequence(whole)
        assert torch.equal(found, expected) and found.is_contiguous() and exchanges.calls == called
    assert torch.equal(GROUP.maximum(x.transpose(0, 1)), x.transpose(0, 1) + 100.0)
    turned = x.transpose(1, 2)
    assert torch.equal(GROUP.all_reduce(turned), 2 * turned + 100.0)
    assert torch.equal(GROUP.all_gather(turned), torch.stack([turned + 100.0, turned]))


@pytest.mark.parametrize("is_fast", [False, True])
def test_the_group_of_an_axis_has_its_name_its_places_and_what_is_fast_there(
    is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Axis, "has_fast_reduce_scatter", is_fast)
    axis = Axis(index=1, ranks=(4, 6, 8), group=SimpleNamespace(group_name="g"))  # type: ignore[arg-type]
    group = TensorGroup(group="g", index=1, degree=3, has_fast_reduce_scatter=is_fast)
    assert tensor_collectives.tensor_group_of(axis) == group


@pytest.mark.parametrize("sequence", [False, True])
def test_regions_of_split_layers_are_each_others_backward(exchanges: Exchanges, sequence: bool) -> None:
    enter, leave = (
        kind(GROUP, sequence=sequence) for kind in (EnterTensorParallelRegion, LeaveTensorParallelRegion)
    )
    part, whole = torch.ones(1, 2, 3), torch.arange(12.0).reshape(1, 4, 3)
    inner, outer = (part, whole) if sequence else (whole, whole)
    x, y = inner.clone().requires_grad_(), whole.clone().requires_grad_()
    entered, left = enter(x), leave(y)
    summed = 2 * whole + 100.0
    if sequence:
        assert torch.equal(entered, torch.cat([part + 100.0, part], dim=1))
        assert torch.equal(left, summed[:, 2:])
        wanted = summed[:, 2:], torch.cat([inner + 100.0, inner], dim=1)
    else:
        assert torch.equal(entered, whole) and torch.equal(left, summed)
        wanted = summed, inner
    (by_x,) = torch.autograd.grad(entered, x, outer)
    (by_y,) = torch.autograd.grad(left, y, inner)
    assert torch.equal(by_x, wanted[0]) and torch.equal(by_y, wanted[1])


def test_a_rank_looks_up_its_own_rows_and_its_own_positions(exchanges: Exchanges) -> None:
    weight = nn.Parameter(torch.arange(12.0).reshape(4, 3))  # rows 5 to 7, and one of padding
    made = VocabularyParallelEmbedding(weight, GROUP, range(5, 8), sequence=False)
    found = made(torch.tensor([[4, 5], [7, 8]]))
    own = torch.stack([torch.zeros(3), weight[0], weight[2], torch.zeros(3)]).reshape(2, 2, 3)
    assert torch.equal(found, 2 * own + 100.0)
    positions = SequenceParallelPositions(weight, GROUP)
    assert torch.equal(positions(torch.arange(4)), weight[2:])
    assert torch.equal(positions(torch.tensor([[0, 1, 0, 1]])), weight[None, :2])
