"""What is waited for while a GPU is measured, which works on after it was asked. No GPU is at hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bloomery.calibrate import compute, machine, node_probe

GPU = torch.device("cuda", 0)


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done, in order: tensors of a GPU lie in main memory, and waits for it are noted."""
    noted: list[str] = []
    ones, tensor = torch.ones, torch.tensor
    monkeypatch.setattr(torch, "ones", lambda *shape, device: ones(*shape))
    monkeypatch.setattr(torch, "tensor", lambda values, *, device: tensor(values))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: noted.append("wait"))
    fake = SimpleNamespace(
        barrier=lambda: noted.append("barrier"),
        all_reduce=lambda tensor, **how: noted.append("reduce") or SimpleNamespace(wait=lambda: None),
        init_process_group=lambda kind, **how: None,
        destroy_process_group=lambda: None,
        ReduceOp=SimpleNamespace(MAX="max"),
    )
    for module in (machine, node_probe):
        monkeypatch.setattr(module, "dist", fake)
    return noted


def test_an_exchange_between_gpus_is_timed_from_when_they_are_idle_until_it_is_done(
    order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "LINK_BYTES", 400)
    monkeypatch.setattr(machine, "_measured_overlap", lambda device: 0.5)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    machine._as_one_of_two("/meeting", 1)
    assert order == ["reduce", *["wait", "reduce", "wait"] * 10] * 2


def test_matmuls_and_exchanges_of_gpus_are_timed_from_when_they_are_idle_until_both_are_done(
    order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "LINK_BYTES", 400)
    monkeypatch.setattr(machine, "OVERLAP_SIDE", {"cuda": 4})
    monkeypatch.setattr(machine, "OVERLAP_ROUNDS", 1)
    monkeypatch.setattr(machine, "overlap_share", lambda **times: 0.5)
    monkeypatch.setattr(torch, "mm", lambda left, right, out: order.append("multiply"))
    ticks = iter(range(1000))
    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    machine._measured_overlap(GPU)
    both, exchange, matmul = ["reduce", "multiply"], ["reduce"], ["multiply"]
    rounds = [both, exchange, matmul, matmul, both]
    assert order == [word for one in rounds for word in ("barrier", "wait", *one, "wait", "reduce")]


def test_a_probe_of_a_gpu_waits_before_it_stops_the_clock(
    order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_probe, "_REDUCED", {"cuda": 10})
    node_probe._all_reduce(GPU)
    assert order == ["barrier", "reduce", "wait"] * 5
    order.clear()
    monkeypatch.setattr(node_probe, "_SIZE", {"cuda": 4})
    dtypes: set[torch.dtype] = set()
    multiply = torch.Tensor.__matmul__
    monkeypatch.setattr(
        torch.Tensor, "to", lambda values, device, dtype: dtypes.add(dtype) or values.type(dtype)
    )
    monkeypatch.setattr(
        torch.Tensor, "__matmul__", lambda one, other: order.append("multiply") or multiply(one, other)
    )
    _, is_exact, products = node_probe._products(GPU, seconds=0.0)
    assert (is_exact, products, dtypes) == (True, 1, {torch.bfloat16})
    assert order == ["multiply", "wait", "multiply", "wait"]


def test_what_a_process_takes_of_a_gpu_is_read_after_a_library_has_worked_on_it(
    order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "ones", lambda *shape, device, dtype: None)
    monkeypatch.setattr(torch, "mm", lambda left, right: order.append("multiply"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: order.append("read") or (1 << 30, 2 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    assert machine.context_gib(GPU) == 1.0
    assert order == ["multiply", "wait", "read"]


def test_one_run_that_takes_longer_than_a_row_of_them_is_a_row_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock_ms, runs = [0.0], list[Any]()

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            pass

        def record(self, stream: object) -> None:
            self.at_ms = clock_ms[0]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return end.at_ms - self.at_ms

    def work() -> None:
        runs.append(clock_ms[0])
        clock_ms[0] += 40.0

    monkeypatch.setattr(compute, "BUDGET_S", 0.0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert compute.best_s(work, GPU) == pytest.approx(0.040)
    assert len(runs) == 1 + 3 + compute.LEAST_REPEATS
