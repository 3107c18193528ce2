"""What private functions of torch are called with where no machine of the suite can run them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bloomery import torch_private


@pytest.mark.parametrize("machine", ["x86_64", "AMD64", "aarch64"])
def test_units_are_those_that_the_processors_kind_is_asked_for(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    supported: set[str] = set()
    monkeypatch.setattr(torch_private.platform, "machine", lambda: machine)
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_amx_fp16_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda name=name: name in supported)
    told = {
        name: lambda name=name: name in supported
        for name in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported")
    }
    monkeypatch.setattr(torch_private.torch, "ops", SimpleNamespace(mkldnn=SimpleNamespace(**told)))
    is_x86 = machine != "aarch64"
    has: dict[str, tuple[bool, bool]] = {}
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_amx_fp16_supported", *told):
        supported.clear()
        supported.add(name)
        has[name] = torch_private.has_bf16_matmul(), torch_private.has_fp16_matmul()
    assert has == {
        "_is_avx512_bf16_supported": (is_x86, False),
        "_is_amx_tile_supported": (is_x86, False),
        "_is_amx_fp16_supported": (False, is_x86),
        "_is_mkldnn_bf16_supported": (not is_x86, False),
        "_is_mkldnn_fp16_supported": (False, not is_x86),
    }


def test_collectives_go_to_their_group_and_products_of_8_bits_have_a_scale_of_each_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []

    def noted(name: str) -> Any:
        return lambda *told, **more: calls.append((name, *told, *([more] if more else []))) or name

    names = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "wait_tensor")
    functional = SimpleNamespace(**{name: noted(name) for name in names})
    monkeypatch.setattr(torch_private.torch, "ops", SimpleNamespace(_c10d_functional=functional))
    monkeypatch.setattr(torch_private.torch, "_scaled_mm", noted("scaled_mm"))
    snapshots: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", snapshots.append)
    x: Any = "x"
    assert torch_private.begin_all_reduce(x, "max", "group") == "all_reduce"
    assert torch_private.begin_all_gather(x, 4, "group") == "all_gather_into_tensor"
    assert torch_private.begin_reduce_scatter(x, 4, "group") == "reduce_scatter_tensor"
    assert torch_private.wait_for(x) == "wait_tensor"
    scales: Any = ("of left", "of right")
    assert torch_private.scaled_matmul(x, x, scales, torch.bfloat16, is_fast=True) == "scaled_mm"
    assert calls == [
        ("all_reduce", "x", "max", "group"),
        ("all_gather_into_tensor", "x", 4, "group"),
        ("reduce_scatter_tensor", "x", "sum", 4, "group"),
        ("wait_tensor", "x"),
        (
            "scaled_mm",
            "x",
            "x",
            {
                "scale_a": "of left",
                "scale_b": "of right",
                "out_dtype": torch.bfloat16,
                "use_fast_accum": True,
            },
        ),
    ]
    torch_private.write_memory_snapshot(Path("memory/x.pickle"))
    assert snapshots == ["memory/x.pickle"]


def test_the_flight_record_is_that_of_nccl_where_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch._C._distributed_c10d
    monkeypatch.delattr(module, "_dump_nccl_trace", raising=False)
    assert torch_private.flight_record() == b""
    monkeypatch.setattr(module, "_dump_nccl_trace", lambda: b"record", raising=False)
    assert torch_private.flight_record() == b"record"
