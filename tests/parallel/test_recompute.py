"""What is kept for the backward, what is compiled by block, rates of groups, and the tiles of kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from bloomery.config.optim import OptimSection
from bloomery.errors import TrainingFailed
from bloomery.kernels.rules import tiles_for
from bloomery.parallel import recompute
from bloomery.parallel.loss_scale import LossScale
from bloomery.parallel.optimizers import peak_rates
from bloomery.parallel.recompute import _kept_or_recomputed, compile_by_block
from bloomery.parallel.rendezvous import Introduction, is_lost_rank_error, refuse_unequal, setting_difference


@pytest.mark.parametrize(
    ("operator", "is_kept"),
    [
        ("aten::mm", True),
        ("aten::addmm.out", True),
        ("aten::bmm", True),
        ("aten::_scaled_mm", True),
        ("aten::baddbmm", True),
        ("aten::_scaled_dot_product_flash_attention", True),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", True),
        ("aten::_scaled_dot_product_efficient_attention", True),
        ("aten::_scaled_dot_product_cudnn_attention", True),
        ("aten::mul", False),
        ("aten::mm_extra", False),
        ("other::mm", False),
        ("bloomery::sum_of_rows", True),
        ("_c10d_functional::all_reduce", True),
        ("_c10d_functional::wait_tensor", False),
    ],
)
def test_products_and_what_collectives_return_are_kept_and_the_rest_is_computed_again(
    operator, is_kept
) -> None:
    policy = _kept_or_recomputed(None, SimpleNamespace(name=lambda: operator))
    assert (policy is CheckpointPolicy.MUST_SAVE) is is_kept
    assert is_kept or policy is CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(
    ("device", "tensor", "data", "working", "by_block"),
    [
        ("cpu", 1, 1, "kept", False),
        ("cpu", 2, 1, "kept", True),
        ("cpu", 1, 2, "kept", True),
        ("cpu", 1, 1, "block", True),
        ("cuda", 1, 1, "kept", True),
    ],
)
def test_one_part_of_a_cpu_is_compiled_whole_and_all_else_by_block(
    device, tensor, data, working, by_block, monkeypatch
) -> None:
    allowed: list[int] = []
    monkeypatch.setattr(recompute, "allow_compilations", allowed.append)
    mesh: Any = SimpleNamespace(
        tensor=SimpleNamespace(degree=tensor), data=SimpleNamespace(degree=data), device=torch.device(device)
    )
    decoder: Any = SimpleNamespace(blocks=range(6))
    parallel: Any = SimpleNamespace(working=working)
    assert compile_by_block(decoder, mesh=mesh, parallel=parallel) is by_block
    assert allowed == [64]
    decoder.blocks = range(20)
    compile_by_block(decoder, mesh=mesh, parallel=parallel)
    assert allowed == [64, 80]


def test_a_group_has_the_peak_rate_of_its_own_or_that_of_all() -> None:
    usual = peak_rates(OptimSection(learning_rate=0.5))
    assert usual == dict.fromkeys(("muon", "matrix", "embedding", "head", "plain"), 0.5)
    own = OptimSection(
        learning_rate=0.5, muon_learning_rate=0.1, embedding_learning_rate=0.2, head_learning_rate=0.3
    )
    assert peak_rates(own) == {"muon": 0.1, "matrix": 0.5, "embedding": 0.2, "head": 0.3, "plain": 0.5}


def test_a_loss_scale_is_never_below_one_and_begins_anew_where_it_began() -> None:
    scale = LossScale(torch.device("cpu"))
    finite, overflow = torch.tensor(True), torch.tensor(False)
    scale.update(finite)
    assert (float(scale.scale), float(scale.good_steps)) == (65536.0, 1.0)
    for _ in range(20):
        scale.update(overflow)
    assert (float(scale.scale), float(scale.good_steps)) == (1.0, 0.0)
    scale.update(finite)
    scale.reset()
    assert (float(scale.scale), float(scale.good_steps)) == (65536.0, 0.0)


def test_wider_heads_have_more_warps_in_the_forward() -> None:
    narrow, wide = tiles_for(64), tiles_for(65)
    assert (narrow.forward.warps, wide.forward.warps) == (4, 8)
    assert (narrow.forward.queries, narrow.forward.keys, narrow.forward.stages) == (128, 64, 3)
    for tiles in (narrow, wide):
        by_keys, by_queries = tiles.backward_of_keys, tiles.backward_of_queries
        assert (by_keys.queries, by_keys.keys, by_queries.queries, by_queries.keys) == (64, 128, 128, 64)


def test_the_first_rank_that_refuses_or_differs_is_named() -> None:
    usual = Introduction(host="n0", recipe={"a": "1", "b": "2"}, chosen={"c": "3"})
    refuse_unequal([usual, usual])
    refusing = Introduction(host="n2", recipe={"a": "9"}, refusal="no GPU", remedy="buy one")
    with pytest.raises(TrainingFailed) as refused:
        refuse_unequal([usual, Introduction(host="n1", recipe={"a": "9"}), refusing])
    assert refused.value.message == "rank 2 on n2: no GPU" and refused.value.remedy == "buy one"
    other = Introduction(host="n1", recipe={"a": "1", "b": "5"}, chosen={"c": "4"})
    with pytest.raises(
        TrainingFailed, match="Rank 1 on n1 has another recipe than rank 0 on n0: b is 5 there"
    ):
        refuse_unequal([usual, other])
    chosen = Introduction(host="n1", recipe=usual.recipe, chosen={"c": "4"})
    with pytest.raises(
        TrainingFailed, match=r"Rank 2 on n1 resolves 'auto' differently.*c is 4 there and 3 here"
    ):
        refuse_unequal([usual, usual, chosen])
    assert (
        setting_difference({"x": "1"}, {}, there="in one", here="in two")
        == "x is 1 in one and missing in two"
    )


@pytest.mark.parametrize(
    ("text", "is_lost"),
    [
        ("[gloo] Connection closed by peer", True),
        ("Application timeout caused pair closure", True),
        ("NCCL communicator was aborted on rank 3", True),
        ("Socket Timeout", True),
        ("[gloo] Connection timed out", True),
        ("[gloo] Connect timeout", True),
        ("[gloo] Timed out connecting", True),
        ("[gloo] Connection refused", True),
        ("[gloo] Connection reset by node-1", True),
        ("[gloo] Broken pipe", True),
        ("[gloo] No route to host", True),
        ("[gloo] Network is unreachable", True),
        ("NET/Socket : closed by remote peer", True),
        ("unbound_buffer: Timed out waiting 5ms", True),
        ("recv: Operation timed out", True),
        ("wait timeout after 5ms", True),
        ("Watchdog caught collective operation timeout", True),
        ("remote process exited", True),
        ("ncclRemoteError", True),
        ("Got completion from peer 10.0.0.1 with error 12", True),
        ("CUDA error: out of memory", False),
        ("shapes do not match", False),
    ],
)
def test_an_error_of_a_lost_rank_is_told_from_one_of_its_own(text: str, is_lost: bool) -> None:
    assert is_lost_rank_error(RuntimeError(text)) is is_lost
