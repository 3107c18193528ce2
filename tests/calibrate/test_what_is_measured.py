"""What a measurement runs: on which device, forward and backward, as which rank; what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.calibrate.test_measuring import ANSWERS
from torch.nn import functional as F

from bloomery import durable
from bloomery.calibrate import compute, machine, node_probe
from bloomery.plan.hardware import Accelerator, Hardware, Node

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Run once whatever is to be measured, keep what it returns, and say that it took a second."""
    returned: list[Any] = []

    def once(work: Callable[[], object], device: torch.device) -> float:
        returned.append(work())
        return 1.0

    monkeypatch.setattr(compute, "best_s", once)
    return returned


def test_a_matmul_has_the_rows_and_columns_that_are_counted(
    results: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LARGE", 32), ("WIDTHS", (16,)), ("ROWS", 64)):
        monkeypatch.setattr(compute, name, {"cpu": value})
    rates = compute.measure_matmuls(CPU, torch.bfloat16)
    assert [tuple(result.shape) for result in results] == [(rate.rows, rate.columns) for rate in rates]
    compute.measure_peak_flops(CPU, torch.bfloat16)
    assert len(results) == 5 and {result.dtype for result in results} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_units", [False, True])
def test_attention_is_causal_forward_and_backward_and_on_units_where_they_take_it(
    dtype: torch.dtype, has_units: bool, results: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute, "ATTENTIONS", {"cpu": ((2, 3, 8, 4), (1, 2, 16, 8))})
    monkeypatch.setattr(compute, "has_amx", lambda: has_units)
    monkeypatch.setattr(compute, "_least_squares", lambda rows: (1.0, 0.0))
    attend, seen, backward = F.scaled_dot_product_attention, list[Any](), list[tuple[int, ...]]()

    def watched(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **how: Any) -> torch.Tensor:
        seen.append((tuple(query.shape), how))
        query.register_hook(lambda gradient: backward.append(tuple(gradient.shape)))
        return attend(query, key, value, **how)

    def on_units(qkv: torch.Tensor, *, heads: int, rotary: object) -> torch.Tensor:
        seen.append(("units", heads, rotary))
        qkv.register_hook(lambda gradient: backward.append(("units", heads, None)))
        return qkv[:, :, :heads]

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(compute, "causal_attention", on_units)
    compute.measure_attention(CPU, dtype, 1e12)
    if has_units and dtype == torch.bfloat16:
        assert seen == backward == [("units", 3, None), ("units", 2, None)]
    else:
        assert backward == [(2, 3, 8, 4), (1, 2, 16, 8)]
        assert seen == [(shape, {"is_causal": True}) for shape in backward]


def test_a_loss_is_measured_with_the_gradients_of_hidden_states_and_head(
    results: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute, "LOSSES", {"cpu": ((4, 8, 16),)})
    loss, given = compute.next_token_loss, list[Any]()

    def watched(states: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, **how: Any) -> Any:
        given.extend((states, head, how))
        return loss(states, head, targets, **how)

    monkeypatch.setattr(compute, "next_token_loss", watched)
    compute.measure_exponential_ns(machine_of(), "bf16", CPU)
    states, head, how = given
    assert (states.shape, head.shape, how) == ((4, 8), (16, 8), {"chunk": 2048})
    assert states.dtype == torch.bfloat16 and bool(states.grad.any()) and bool(head.grad.any())


def machine_of(**figures: float) -> Hardware:
    usual = {"memory_gib": 1.0, "memory_gb_per_s": 1e12, "fp32_teraflops": 1e12, "bf16_teraflops": 1e12}
    accelerator = Accelerator(**{**usual, "kernel_us": 0.0, **figures})
    return Hardware(name="quick", accelerator=accelerator, node=Node(accelerators=1))


def test_each_run_of_blocks_makes_every_gradient_and_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    decoders: list[torch.nn.Module] = []
    build = compute.build

    def built(*told: Any, **how: Any) -> torch.nn.Module:
        decoders.append(build(*told, **how))
        return decoders[-1]

    counts: list[tuple[int, int]] = []

    def twice(work: Callable[[], object], device: torch.device) -> float:
        made: list[torch.Tensor] = []
        decoder = decoders[-1]
        blocks = list(decoder.blocks.parameters())  # type: ignore[operator,union-attr]
        for parameter in blocks:
            parameter.register_post_accumulate_grad_hook(lambda one: made.append(one.grad.clone()))
        for _ in range(2):
            work()
        assert {parameter.dtype for parameter in decoder.parameters()} == {torch.bfloat16}
        assert all(parameter.grad is None for parameter in decoder.parameters())
        assert all(torch.equal(*pair) for pair in zip(made[: len(blocks)], made[len(blocks) :], strict=True))
        counts.append((len(decoder.blocks), len(made) // len(blocks)))  # type: ignore[arg-type]
        return 1.0

    monkeypatch.setattr(compute, "build", built)
    monkeypatch.setattr(compute, "best_s", twice)
    model = compute._model(32, 2)
    taken = compute._block_s(model, samples=2, length=8, device=CPU, dtype=torch.bfloat16)
    assert counts == [(1, 2), (3, 2)]
    assert taken == 1 / 3, "blocks that add nothing are no divisor"


def test_blocks_that_are_faster_than_their_matmuls_and_starts_leave_a_twentieth_for_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compute, "SHAPES", {"cpu": ((32, 2, 4, 2),)})
    found = []
    for measured in (16e-6, 32e-6):  # 15 and 18 kernels start in a microsecond each
        monkeypatch.setattr(compute, "_block_s", lambda model, measured=measured, **how: measured)
        found.append(compute.measure_elementwise_gb_per_s(machine_of(kernel_us=1.0), "fp32", CPU))
    moved_bytes = 3 * 8 * 4 * (10 * 32 + 3 * 96 + 2 * 2 * 32)
    assert found[0] == pytest.approx(moved_bytes / 0.8e-6 / 1e9, rel=1e-3)
    assert found[1] == pytest.approx(found[0] / 2)


def test_a_kernel_of_a_gpu_is_an_addition_to_one_number(
    results: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: zeros(*shape))
    assert compute.measure_kernel_us(GPU, torch.bfloat16) == pytest.approx(1e6)
    assert [result.tolist() for result in results] == [[1.0]]


def test_the_watcher_of_memory_tells_the_peak_of_the_process_that_it_starts_and_that_alone() -> None:
    def watched(program: str) -> subprocess.CompletedProcess[str]:
        python = [sys.executable, "-I", "-S", "-c"]
        command = [*python, machine.MEMORY_WATCHER, *python, program]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert int(watched("print('of a library', len(b'x' * (64 << 20)))").stdout) > 64 << 10
    assert int(watched("pass").stdout) < 64 << 10
    assert watched("raise SystemExit(1)").returncode != 0


def test_what_was_written_is_dropped_from_memory_before_it_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "DISK_BYTES", 2**20)
    order: list[Any] = []
    monkeypatch.setattr(durable, "sync_file", lambda file: order.append("synced"))
    monkeypatch.setattr(os, "posix_fadvise", lambda file, *told: order.append(told))
    machine.disk_gb_per_s(tmp_path)
    assert order == ["synced", (0, 0, os.POSIX_FADV_DONTNEED)]


@pytest.mark.parametrize(("gpus", "backend"), [(0, "gloo"), (1, "gloo"), (2, "nccl"), (8, "nccl")])
def test_a_link_is_that_of_two_gpus_where_two_are_there(
    gpus: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ones, begun, devices = torch.ones, list[Any](), set[torch.device]()

    def made(size: int, *, device: torch.device) -> torch.Tensor:
        devices.add(device)
        return ones(size)

    fake = SimpleNamespace(
        init_process_group=lambda kind, **how: begun.append(kind),
        all_reduce=lambda tensor: None,
        destroy_process_group=lambda: begun.append("ended"),
    )
    monkeypatch.setattr(machine, "dist", fake)
    monkeypatch.setattr(machine, "LINK_BYTES", 400)
    monkeypatch.setattr(machine, "_measured_overlap", lambda device: devices.add(device) or 0.5)
    monkeypatch.setattr(torch, "ones", made)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", begun.append)
    monkeypatch.setattr(torch.cuda, "synchronize", devices.add)
    machine._as_one_of_two("/meeting", 1)
    own = torch.device("cuda", 1) if backend == "nccl" else CPU
    assert devices == {own} and begun == [*([own] if backend == "nccl" else []), backend, "ended"]


def test_a_machine_with_gpus_has_as_many_and_reserves_what_a_context_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = ANSWERS | {"multiplies_bf16": True, "context_gib": 1.5, "measure_peak_flops": 2e12}
    asked: dict[str, Any] = {}
    for name, answer in answers.items():
        monkeypatch.setattr(
            machine, name, lambda *given, name=name, answer=answer: asked.update({name: given}) or answer
        )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    found = machine.measure_machine(tmp_path, say=lambda line: None)
    assert (found.accelerator.kind, found.accelerator.reserved_gib) == ("gpu", 1.5)
    assert found.node.accelerators == 4 and "process_gib" not in asked
    assert asked["memory_gib"] == asked["context_gib"] == (GPU,)
    assert {f"accelerator.{name}_teraflops" for name in ("bf16", "fp16", "fp32")} <= set(found.sources)


@pytest.mark.parametrize(
    ("has_gpus", "local", "backend", "device"),
    [
        (False, "1", "gloo", CPU),
        (True, "1", "nccl", torch.device("cuda", 1)),
        (True, None, "nccl", torch.device("cuda", 0)),
    ],
)
def test_a_probe_meets_the_other_ranks_as_a_training_does_and_leaves_them_whatever_happens(
    has_gpus: bool,
    local: str | None,
    backend: str,
    device: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []

    def products(device: torch.device, *, seconds: float) -> Any:
        calls.append((device, seconds))
        raise ZeroDivisionError

    fake = SimpleNamespace(
        init_process_group=lambda kind, **how: calls.append((kind, how)),
        destroy_process_group=lambda: calls.append("left"),
    )
    monkeypatch.setattr(node_probe, "dist", fake)
    monkeypatch.setattr(node_probe, "FileStore", lambda *told: told)
    monkeypatch.setattr(node_probe, "_products", products)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpus)
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("BLOOMERY_RENDEZVOUS_FILE", "there")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_RANK", local)
    with pytest.raises(ZeroDivisionError):
        node_probe.probe_as_rank(tmp_path / "probe.json", seconds=2.0)
    joins = {"store": ("there", 4), "rank": 3, "world_size": 4, "timeout": timedelta(seconds=300)}
    assert calls == [(backend, joins), (device, 2.0), "left"]


@pytest.mark.parametrize(("rank", "world", "speed"), [(0, 1, None), (0, 2, 7.5), (1, 2, None)])
def test_the_first_rank_of_a_probe_alone_writes_whole_what_the_slowest_reached(
    rank: int, world: int, speed: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_reduce(tensor: torch.Tensor, *, op: str) -> None:
        assert op == "min"
        tensor.copy_(torch.tensor([1.5, 0.0]))

    fake = SimpleNamespace(
        init_process_group=lambda kind, **how: None,
        destroy_process_group=lambda: None,
        all_reduce=all_reduce,
        ReduceOp=SimpleNamespace(MIN="min"),
    )
    monkeypatch.setattr(node_probe, "dist", fake)
    monkeypatch.setattr(node_probe, "FileStore", lambda *told: told)
    monkeypatch.setattr(node_probe, "_products", lambda device, *, seconds: (2.0, True, 9))
    monkeypatch.setattr(node_probe, "_all_reduce", lambda device: 7.5)
    for name, value in (("RANK", rank), ("WORLD_SIZE", world), ("BLOOMERY_RENDEZVOUS_FILE", "there")):
        monkeypatch.setenv(name, str(value))
    written: list[Path] = []
    write = durable.write_whole
    monkeypatch.setattr(durable, "write_whole", lambda path, text: written.append(path) or write(path, text))
    target = tmp_path / "probe.json"
    node_probe.probe_as_rank(target, seconds=2.0)
    if rank:
        assert not target.exists()
        return
    assert written == [target] and target.read_text(encoding="utf-8").endswith("}\n")
    assert json.loads(target.read_text(encoding="utf-8")) == {
        "teraflops": 1.5,
        "all_reduce_gb_per_s": speed,
        "is_exact": False,
        "products": 9,
    }
