"""The quickest kernel of attention is found by a clock, and torch computes by it until it is let go."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from bloomery.config.model import ModelSection
from bloomery.model import attention_choice
from bloomery.model.attention_choice import (
    BACKENDS,
    AttentionSizes,
    attention_kernel,
    forward_and_backward,
    measure,
    quickest,
    refusal_of,
    use_attention,
)
from bloomery.model.decoder import build

CPU = torch.device("cpu")
SIZES = AttentionSizes(samples=2, heads=4, kv_heads=2, length=32, width=16, dtype=torch.float32)
OPERATIONS = {"flash": "_scaled_dot_product_flash_attention_for_cpu", "math": "_safe_softmax"}


class _Kernels(TorchDispatchMode):
    """Notes which kernels of attention ran, and on which sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in OPERATIONS.values():
            self.ran.append(name)
            self.shapes.add(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("slower", ["flash", "math"])
def test_the_clock_decides_among_kernels_that_really_run(slower: str) -> None:
    timed: list[list[str]] = []

    def time_s(run: Callable[[], None]) -> float:
        with _Kernels() as seen:
            run()
        timed.append(seen.ran)
        return 2.0 if OPERATIONS[slower] in seen.ran else 1.0

    ticks: list[int] = []
    seconds, refusals = measure(
        ("cudnn", "flash", "math"), SIZES, CPU, time_s=time_s, on_progress=lambda: ticks.append(1)
    )
    assert timed == [[OPERATIONS["flash"]], [OPERATIONS["math"]]] and len(ticks) == 3
    assert seconds == {"flash": 1.0, "math": 1.0} | {slower: 2.0}
    assert refusals == {"cudnn": "needs a GPU"}
    assert quickest(seconds) == ({"flash", "math"} - {slower}).pop()


def test_the_math_is_left_where_no_kernel_can_run() -> None:
    seconds, refusals = measure(("cudnn", "efficient"), SIZES, CPU, time_s=lambda run: 1.0)
    assert seconds == {} and set(refusals) == {"cudnn", "efficient"} and quickest(seconds) == "math"


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_what_is_timed_has_the_sizes_and_strides_of_the_run(kv_heads: int) -> None:
    run = forward_and_backward("flash", replace(SIZES, kv_heads=kv_heads), CPU)
    with _Kernels() as seen:
        run()
    assert seen.shapes == {(2, 4, 32, 16)} and len(seen.ran) == 1


def test_a_kernel_says_itself_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal_of("flash", SIZES, CPU) == refusal_of("math", SIZES, CPU) == ""
    assert "needs a GPU with Triton" in refusal_of("triton", SIZES, CPU)

    def refuse(*_: Any) -> Any:
        warnings.warn("Expected a head width of at most 256.\nMore. (Triggered internally)", stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.\n  at ::sdp")

    monkeypatch.setattr(attention_choice, "forward_and_backward", refuse)
    told = refusal_of("flash", SIZES, CPU)
    assert told == "Expected a head width of at most 256. No available kernel. Aborting execution."


def test_an_error_that_is_no_refusal_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("planted")

    monkeypatch.setattr(attention_choice, "forward_and_backward", fail)
    with pytest.raises(ValueError, match="planted"):
        refusal_of("flash", SIZES, CPU)


def state() -> tuple[Any, ...]:
    backends = torch.backends.cuda
    return (
        tuple(torch._C._get_sdp_priority_order()),
        backends.flash_sdp_enabled(),
        backends.mem_efficient_sdp_enabled(),
        backends.math_sdp_enabled(),
        backends.cudnn_sdp_enabled(),
        torch.compiler.config.cache_key_tag,
    )


@pytest.mark.parametrize("kernel", ["", "triton", "cudnn", "flash", "efficient", "math"])
def test_a_kernel_is_chosen_until_the_end_also_by_an_error(kernel: str) -> None:
    before = state()
    with pytest.raises(ValueError, match="planted"), attention_kernel(kernel):
        inside = state()
        raise ValueError("planted")
    assert state() == before
    assert (inside == before) is (kernel in ("", "triton"))
    if inside != before:
        assert inside[0][0] == int(BACKENDS[kernel]) and inside[-1] == f"{before[-1]} attention={kernel}"


@pytest.mark.parametrize("kernel", ["flash", "math"])
def test_a_chosen_kernel_computes_also_in_other_threads_and_backwards(kernel: str) -> None:
    found: list[list[str]] = []
    query = torch.randn(1, 2, 8, 4, requires_grad=True)

    def attend(query: torch.Tensor) -> torch.Tensor:
        seen = _Kernels()
        found.append(seen.ran)  # before it runs, for recomputation stops at the last tensor that it needs
        with seen:
            return F.scaled_dot_product_attention(query, query, query, is_causal=True)

    with attention_kernel(kernel):
        # Recomputation calls the function again, from the thread of the backward.
        mixed = torch.utils.checkpoint.checkpoint(attend, query, use_reentrant=False)
        mixed.sum().backward()
    assert found == [[OPERATIONS[kernel]]] * 2


@pytest.mark.parametrize("kernel", ["", "flash", "math", "triton"])
def test_a_named_kernel_replaces_that_of_amx(kernel: str) -> None:
    section = ModelSection(layers=2, hidden=32, heads=4)
    decoder = build(section, vocabulary=50, sequence_length=8)
    for block in decoder.blocks:
        block.attention.has_units = True
    use_attention(decoder, kernel)
    assert [block.attention.has_units for block in decoder.blocks] == [kernel == ""] * 2
    assert decoder.tiles_plain_attention is (kernel == "triton")


def test_nothing_is_left_of_a_measurement() -> None:
    before = state()
    measure(("flash", "math"), SIZES, CPU, time_s=lambda run: 1.0)
    assert state() == before
