"""The loss of logits that are split along the vocabulary, on two ranks of one process in turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bloomery import torch_private
from bloomery.model.layers import MatmulMode
from bloomery.model.loss import IGNORED, LossSums, next_token_loss
from bloomery.parallel import vocabulary_loss
from bloomery.parallel.fused_vocabulary_loss import begin_gather, split_loss_and_gradients
from bloomery.parallel.vocabulary_loss import VocabularyParallelLoss, _LossTerms

ROWS = (range(17), range(17, 40))
PADDED = 24


class Told:
    """The group of one of two ranks: notes what this rank tells, and hears what the other told before."""

    group, index, degree, has_fast_reduce_scatter = "tensor", 0, 2, True

    def __init__(self, index: int, others: list[torch.Tensor] | None = None) -> None:
        self.index, self._others = index, others
        self.told: list[torch.Tensor] = []

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        other = x if self._others is None else self._others[len(self.told)]
        self.told.append(x.clone())
        return torch.stack([x, other] if self.index == 0 else [other, x])


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(3, 7, 16, generator=generator).to(dtype)
    weight = torch.randn(40, 16, generator=generator).to(dtype)
    targets = torch.randint(0, 40, (3, 7), generator=generator)
    targets[0, 2:4] = IGNORED
    targets[1, :3] = torch.tensor([0, 16, 17])  # the ends of both parts
    targets[2, 0] = 39
    return hidden, weight, targets


def of_both(
    dtype: torch.dtype, mode: MatmulMode, *, grad: bool
) -> list[tuple[LossSums, torch.Tensor, torch.Tensor]]:
    """The sums of each rank, with the leaves that it has."""
    hidden, weight, targets = inputs(dtype)
    found: list[Any] = []
    heard: list[list[torch.Tensor] | None] = [None, None]
    for _ in range(2):  # first what each tells, then what both make of it
        found.clear()
        groups = [Told(index, others=heard[1 - index]) for index in range(2)]
        for group, rows in zip(groups, ROWS, strict=True):
            padding = torch.full((PADDED - len(rows), 16), 9.0, dtype=dtype)
            own = torch.cat([weight[rows.start : rows.stop], padding]).requires_grad_(grad)
            leaf = hidden.clone().requires_grad_(grad)
            loss = VocabularyParallelLoss(group, rows, sequence=False)  # type: ignore[arg-type]
            sums = loss(leaf, own, targets, z_loss=0.01, chunk=8, matmul_mode=mode)
            found.append((sums, leaf, own))
        heard = [group.told for group in groups]
    return found


@pytest.mark.parametrize(
    ("dtype", "mode", "tolerance"),
    [
        (torch.float32, "native", 1e-5),
        (torch.float32, "fp32", 1e-5),
        (torch.bfloat16, "native", 2**-6),
        (torch.bfloat16, "fp32", 2**-6),
    ],
)
def test_two_ranks_with_parts_of_the_vocabulary_have_the_loss_and_gradients_of_the_whole(
    dtype: torch.dtype, mode: MatmulMode, tolerance: float
) -> None:
    hidden, weight, targets = inputs(dtype)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    whole = next_token_loss(*leaves, targets, z_loss=0.01, chunk=8, matmul_mode=mode)
    by_hidden, by_weight = torch.autograd.grad(whole.total * 0.5, leaves)
    parts = of_both(dtype, mode, grad=True)
    of_hidden, of_weight = list[torch.Tensor](), list[torch.Tensor]()
    for (sums, leaf, own), rows in zip(parts, ROWS, strict=True):
        torch.testing.assert_close(tuple(sums), tuple(whole), rtol=1e-5, atol=1e-5)
        assert sums.total.requires_grad and not sums.cross_entropy.requires_grad
        assert not sums.z.requires_grad
        slope_of_hidden, slope_of_weight = torch.autograd.grad(sums.total * 0.5, (leaf, own))
        assert slope_of_hidden.dtype == slope_of_weight.dtype == dtype
        assert not slope_of_weight[len(rows) :].any(), "padding has no gradient"
        of_hidden.append(slope_of_hidden.float())
        of_weight.append(slope_of_weight[: len(rows)].float())
    for found, wanted in ((sum(of_hidden), by_hidden), (torch.cat(of_weight), by_weight)):
        assert (found - wanted).norm() < tolerance * wanted.float().norm()


@pytest.mark.parametrize("mode", ["native", "fp32"])
def test_without_gradients_the_sums_are_the_same(mode: MatmulMode) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        with_gradient = of_both(dtype, mode, grad=True)
        for (quiet, *_), (loud, *_) in zip(of_both(dtype, mode, grad=False), with_gradient, strict=True):
            assert not quiet.total.requires_grad
            torch.testing.assert_close(tuple(quiet), tuple(part.detach() for part in loud))


@pytest.mark.parametrize("is_enabled", [True, False])
@pytest.mark.parametrize("wants", [(False, False), (True, False), (False, True)])
def test_gradients_are_computed_only_where_somebody_wants_one(
    is_enabled: bool, wants: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[torch.Tensor] = []
    gradient = _LossTerms.gradient
    monkeypatch.setattr(
        _LossTerms, "gradient", lambda self, *told: computed.append(told[0]) or gradient(self, *told)
    )
    hidden, weight, targets = inputs(torch.float32)
    hidden.requires_grad_(wants[0])
    weight.requires_grad_(wants[1])
    loss = VocabularyParallelLoss(Told(0), range(40), sequence=False)  # type: ignore[arg-type]
    with torch.set_grad_enabled(is_enabled):
        sums = loss(hidden, weight, targets, z_loss=0.01, chunk=8, matmul_mode="native")
    assert sums.total.requires_grad is bool(computed) is (is_enabled and any(wants))


@pytest.mark.parametrize("grad", [True, False])
def test_the_head_is_rounded_to_the_precision_of_the_hidden_states_unless_it_multiplies_in_fp32(
    grad: bool,
) -> None:
    hidden, weight, targets = inputs(torch.float32)
    loss = VocabularyParallelLoss(Told(0), range(40), sequence=False)  # type: ignore[arg-type]

    def total(head: torch.Tensor, mode: MatmulMode) -> float:
        own = head.clone().requires_grad_(grad)
        return float(
            loss(hidden.bfloat16(), own, targets, z_loss=0.01, chunk=8, matmul_mode=mode).total.detach()
        )

    rounded = weight.bfloat16().float()
    assert total(weight, "native") == total(rounded, "native")
    assert total(weight, "fp32") != total(rounded, "fp32")


def test_targets_of_other_ranks_before_and_after_its_rows_need_no_padding_here() -> None:
    hidden, weight, _ = inputs(torch.float32)
    own = weight[10:30].clone().requires_grad_()
    loss = VocabularyParallelLoss(Told(0), range(10, 30), sequence=False)  # type: ignore[arg-type]
    sums = loss(
        hidden[:1, :4], own, torch.tensor([[0, 9, 30, 39]]), z_loss=0.0, chunk=8, matmul_mode="native"
    )
    (slope,) = torch.autograd.grad(sums.total, own)
    logits = hidden[0, :4] @ own.detach().t()
    # As if the other rank had the same logits, so that each row has half of its probability here.
    torch.testing.assert_close(slope, (0.5 * logits.softmax(1)).t() @ hidden[0, :4])


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What each fused loss was told; its gradients by hidden states and weight are ones and twos."""
    calls: list[dict[str, Any]] = []

    def ones(
        hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, **told: Any
    ) -> tuple[torch.Tensor, ...]:
        calls.append(told | {"tokens": len(targets), "hidden": tuple(hidden.shape)})
        by_weight = torch.full(weight.shape, 2.0)
        return torch.ones_like(hidden), by_weight, torch.tensor(3.0), torch.tensor(0.5)

    monkeypatch.setattr(vocabulary_loss, "split_loss_and_gradients", ones)
    monkeypatch.setattr(vocabulary_loss, "supports_fused_loss", lambda hidden: hidden.dtype == torch.bfloat16)
    return calls


def part_of_loss(dtype: torch.dtype, *, triton: bool, mode: MatmulMode) -> tuple[LossSums, Any]:
    """The loss of the rank with the first 17 rows, and its leaves."""
    hidden, weight, targets = inputs(dtype)
    own = torch.cat([weight[:17], torch.zeros(7, 16).to(dtype)])
    leaves = hidden.requires_grad_(), own.requires_grad_()
    loss = VocabularyParallelLoss(Told(0), range(17), sequence=False)  # type: ignore[arg-type]
    loss.has_triton = triton
    return loss(*leaves, targets, z_loss=0.25, chunk=8, matmul_mode=mode), leaves


def test_a_fused_loss_gets_this_ranks_rows_and_group_and_its_gradients_are_scaled(
    fused: list[dict[str, Any]],
) -> None:
    sums, leaves = part_of_loss(torch.bfloat16, triton=True, mode="native")
    assert fused == [
        {
            "z_loss": 0.25,
            "chunk": 8,
            "rows": range(17),
            "group": "tensor",
            "degree": 2,
            "tokens": 21,
            "hidden": (21, 16),
        }
    ]
    assert [float(part.detach()) for part in sums] == [3.5, 3.0, 0.5]
    assert not sums.cross_entropy.requires_grad and not sums.z.requires_grad
    by_hidden, by_weight = torch.autograd.grad(sums.total * 0.5, leaves)
    assert by_hidden.dtype == by_weight.dtype == torch.bfloat16
    assert bool((by_hidden == 0.5).all()) and bool((by_weight == 1.0).all())


def test_a_loss_is_fused_where_the_device_can_and_matmuls_are_native(fused: list[dict[str, Any]]) -> None:
    part_of_loss(torch.float32, triton=True, mode="native")
    part_of_loss(torch.bfloat16, triton=False, mode="native")
    part_of_loss(torch.bfloat16, triton=True, mode="fp32")
    assert fused == []


def test_a_compiler_is_told_the_shapes_and_dtypes_of_a_fused_loss() -> None:
    with FakeTensorMode():
        hidden, weight = torch.empty(6, 8, dtype=torch.bfloat16), torch.empty(24, 8, dtype=torch.bfloat16)
        found = split_loss_and_gradients(
            hidden,
            weight,
            torch.zeros(6).long(),
            z_loss=0.1,
            chunk=4,
            rows=range(20),
            group="tensor",
            degree=2,
        )
    assert [(tuple(one.shape), one.dtype) for one in found] == [
        ((6, 8), torch.bfloat16),
        ((24, 8), torch.float32),
        ((), torch.float32),
        ((), torch.float32),
    ]


def test_what_ranks_measured_is_gathered_by_rank_and_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []

    def gather(own: torch.Tensor, degree: int, group: str) -> torch.Tensor:
        calls.append(("begin", degree, group))
        return torch.cat([own + 10 * rank for rank in range(degree)])

    monkeypatch.setattr(torch_private, "begin_all_gather", gather)
    monkeypatch.setattr(torch_private, "wait_for", lambda gathered: calls.append("wait") or gathered)
    own = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    wait_for_all = begin_gather(own, group="tensor", degree=4)
    assert calls == [("begin", 4, "tensor")]
    told = wait_for_all()
    assert calls == [("begin", 4, "tensor"), "wait"]
    assert torch.equal(told, torch.stack([own, own + 10, own + 20, own + 30])) and told.is_contiguous()
