"""How a machine is measured: which processes are started with what, by which clock, and what is divided."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bloomery.calibrate import compute, machine, node_probe
from bloomery.calibrate.machine import MeasuredLink
from bloomery.plan.hardware import Network, Operation

CPU = torch.device("cpu")


@pytest.mark.parametrize("fails", [False, True])
def test_a_link_is_measured_by_two_processes_of_which_none_is_left(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    started: list[Any] = []
    other = SimpleNamespace(
        wait=lambda timeout=None: started.append(("wait", timeout)), kill=lambda: started.append("kill")
    )

    def run(command: list[str], **how: Any) -> Any:
        started.append(("run", command, how))
        if fails:
            raise ZeroDivisionError
        return SimpleNamespace(stdout="of a library\n4.5 35.25 0.75\n")

    fake = SimpleNamespace(
        Popen=lambda command, **how: started.append(("begin", command, how)) or other, run=run
    )
    monkeypatch.setattr(machine, "subprocess", fake)
    monkeypatch.setenv("FROM_OUTSIDE", "kept")
    if fails:
        with pytest.raises(ZeroDivisionError):
            machine.link_between_processes()
        assert started[2:] == ["kill", ("wait", None)]
        return
    assert machine.link_between_processes() == MeasuredLink(gb_per_s=4.5, latency_us=35.25, overlap=0.75)
    (_, second, how), (_, first, more), *ended = started
    assert first[:3] == second[:3] == [sys.executable, "-m", "bloomery.calibrate.machine"]
    assert first[3] == second[3] and (first[4], second[4]) == ("0", "1")
    assert how["env"] == more["env"]
    expected = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "FROM_OUTSIDE": "kept"}
    assert {name: more["env"].get(name) for name in expected} == expected
    assert (more["check"], more["text"], more["capture_output"], more["timeout"]) == (True, True, True, 300)
    assert ended == [("wait", 300), "kill", ("wait", None)]


def test_the_memory_of_a_process_is_that_of_a_real_training_of_almost_no_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[Any] = []

    def run(command: list[str], **how: Any) -> Any:
        source = next(word for word in command if word.startswith("data.sources="))
        runs.append((command, how, Path(source.removeprefix("data.sources=")).read_text(encoding="utf-8")))
        return SimpleNamespace(stdout=str(1 << 20))

    monkeypatch.setattr(machine, "subprocess", SimpleNamespace(run=run))
    assert machine.process_gib() == 1.0
    monkeypatch.setattr(machine, "sys", SimpleNamespace(executable="python", platform="darwin"))
    assert machine.process_gib() == 1.0 / 1024
    (command, how, text), (other, _, _) = runs
    assert command[:3] == [sys.executable, "-c", machine.MEMORY_WATCHER] and other[0] == "python"
    assert command[3:8] == [sys.executable, "-m", "bloomery", "train", "demo-small"]
    run_directory = Path(command[command.index("--run") + 1])
    assert not run_directory.parent.exists(), "nothing is left behind"
    assert "--plain" in command and set(machine.TINY_MODEL) <= set(command) and len(text) > 10_000
    assert (how["check"], how["timeout"], how["text"], how["capture_output"]) == (True, 300, True, True)


def test_what_a_gpu_has_besides_tensors_is_what_is_neither_free_nor_reserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cpu")  # which stands for the GPU
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 << 30, 8 << 30))
    for reserved, gib in ((1 << 30, 2.0), (4 << 30, 0.0)):
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device, reserved=reserved: reserved)
        assert machine.context_gib(device) == gib
    properties = SimpleNamespace(total_memory=3 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert machine.memory_gib(torch.device("cuda")) == 3.0


class Clock:
    """A clock that a test puts forward."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = process_time = perf_counter


def test_the_quickest_of_some_runs_counts_for_as_long_as_there_is_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, seconds = Clock(), iter([9.0, 0.3, 0.2, 0.4, *[0.5] * 100])
    monkeypatch.setattr(compute, "time", clock)
    monkeypatch.setattr(compute, "BUDGET_S", 3.0)
    monkeypatch.setattr(compute, "LEAST_REPEATS", 2)
    runs = list[int]()

    def work() -> None:
        runs.append(1)
        clock.now += next(seconds)

    assert compute.best_s(work, CPU) == pytest.approx(0.2)
    assert len(runs) == 1 + 8  # one is not counted: 0.3 + 0.2 + 0.4 + 5 · 0.5 seconds are over 3
    monkeypatch.setattr(compute, "BUDGET_S", 0.0)
    monkeypatch.setattr(compute, "LEAST_REPEATS", 4)
    runs.clear()
    assert compute.best_s(work, CPU) == pytest.approx(0.5) and len(runs) == 1 + 4
    assert compute.best_s(lambda: None, CPU) == 1e-9, "no time is no divisor"


@pytest.mark.parametrize(("threads", "clock"), [(1, "process_time"), (2, "perf_counter")])
def test_one_thread_is_measured_by_the_time_of_its_processor(
    monkeypatch: pytest.MonkeyPatch, threads: int, clock: str
) -> None:
    asked = list[str]()
    now = iter(range(1000))
    clocks = {
        name: lambda name=name: asked.append(name) or float(next(now))
        for name in ("process_time", "perf_counter")
    }
    monkeypatch.setattr(compute, "time", SimpleNamespace(**clocks))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(compute, "BUDGET_S", 0.0)
    compute.best_s(lambda: None, CPU)
    assert asked[1:3] == [clock, clock]


def test_a_node_tells_the_speed_of_its_matmuls_and_whether_equal_ones_were_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_probe, "_SIZE", {"cpu": 16})
    clock = Clock()
    monkeypatch.setattr(node_probe, "time", clock)
    multiply, wrong, made = torch.Tensor.__matmul__, set[int](), list[int]()

    def timed(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        made.append(1)
        clock.now += 0.25
        return multiply(left, right) + (1e-3 if len(made) in wrong else 0.0)

    monkeypatch.setattr(torch.Tensor, "__matmul__", timed)
    for wrong_at, is_exact in ((set[int](), True), ({3}, False), ({5}, False)):
        made.clear()
        wrong.clear()
        wrong.update(wrong_at)
        # The first of five is what the others are compared with; they begin within a second.
        speed, exact, count = node_probe._products(CPU, seconds=1.0)
        assert (exact, count) == (is_exact, 4) and speed == pytest.approx(2 * 16**3 / 0.25 / 1e12)
    made.clear()
    assert node_probe._products(CPU, seconds=0.0)[2] == 1, "one is compared in any case"


def test_the_best_of_five_exchanges_counts_after_all_ranks_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_probe, "_REDUCED", {"cpu": 1000})
    clock, seconds, calls = Clock(), iter([0.4, 0.1, 0.2, 0.3, 0.5]), list[str]()
    monkeypatch.setattr(node_probe, "time", clock)

    def all_reduce(buffer: torch.Tensor) -> None:
        calls.append("reduce")
        assert buffer.numel() == 1000
        clock.now += next(seconds)

    fake = SimpleNamespace(barrier=lambda: calls.append("barrier"), all_reduce=all_reduce)
    monkeypatch.setattr(node_probe, "dist", fake)
    assert node_probe._all_reduce(CPU) == pytest.approx(4000 / 0.1 / 1e9)
    assert calls == ["barrier", "reduce"] * 5


ANSWERS: dict[str, Any] = {
    "multiplies_bf16": False,
    "measure_matmuls": [compute.MatmulRate(rows=1, columns=1, inner=1, flops=5e12)],
    "fit_half_size": (0.75, 48.0),
    "measure_attention": compute.AttentionCost(efficiency=0.3, pass_ns=0.6),
    "memory_gb_per_s": 11.0,
    "disk_gb_per_s": (0.7, 1.9),
    "memory_gib": 24.0,
    "process_gib": 0.8,
    "link_between_processes": MeasuredLink(gb_per_s=4.0, latency_us=35.0, overlap=0.4),
    "measure_kernel_us": 6.5,
    "measure_elementwise_gb_per_s": 13.0,
    "measure_exponential_ns": 0.9,
}
"""What each measurement of a machine returns, by the name of its function."""


def test_a_measured_machine_says_of_each_figure_how_it_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, answer in ANSWERS.items():
        monkeypatch.setattr(machine, name, lambda *given, answer=answer: answer)
    platform = SimpleNamespace(node=lambda: "", processor=lambda: "", machine=lambda: "x86_64")
    monkeypatch.setattr(machine, "platform", platform)
    said = list[str]()
    found = machine.measure_machine(tmp_path, say=said.append)
    threads = torch.get_num_threads()
    assert said == [
        f"matmuls in fp32 on cpu, {threads} threads",
        "peak 5 TFLOP/s; attention",
        "memory, disk, links",
        "blocks and losses",
    ]
    assert (found.name, found.notes) == (
        "this-machine",
        f"x86_64, {threads} threads, torch {torch.__version__}",
    )
    assert (found.network, found.operation) == (
        Network(), Operation(step_jitter=0.0, failures_per_1000_accelerator_days=0.0),
    )  # fmt: skip
    assert found.sources == machine.HOW | {"accelerator.fp32_teraflops": "the quickest matmul measured"}


class Pair(Clock):
    """Two ranks of which one is measured: an exchange takes its time, and so does each matmul beside it."""

    ReduceOp = SimpleNamespace(MAX="max")

    def __init__(self, seconds: dict[int, float]) -> None:
        super().__init__()
        self.seconds, self.begun, self.maxima = seconds, list[Any](), list[float]()
        self.exchanges = dict.fromkeys(seconds, 0)

    def init_process_group(self, kind: str, **more: Any) -> None:
        self.begun.append((kind, more["init_method"], more["rank"], more["world_size"], more["timeout"]))

    def destroy_process_group(self) -> None:
        self.begun.append("ended")

    def barrier(self) -> None:
        pass

    def all_reduce(self, tensor: torch.Tensor, op: str = "", *, async_op: bool = False) -> Any:
        if op:
            self.maxima.append(float(tensor))
            return None
        self.exchanges[tensor.numel()] += 1
        # The second of ten is the quickest.
        takes_s = self.seconds[tensor.numel()] * (1 if self.exchanges[tensor.numel()] == 3 else 2)
        if not async_op:
            self.now += takes_s
            return None
        begun = self.now

        def wait() -> None:
            self.now = max(self.now, begun + self.seconds[tensor.numel()])

        return SimpleNamespace(wait=wait)


@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks_measure_the_best_of_ten_exchanges_and_the_first_tells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int
) -> None:
    monkeypatch.setattr(machine, "LINK_BYTES", 4000)
    pair = Pair({1000: 0.5, 1: 3e-5})
    for name in ("dist", "time"):
        monkeypatch.setattr(machine, name, pair)
    monkeypatch.setattr(machine, "_measured_overlap", lambda device: 0.375)
    machine._as_one_of_two("/meeting", rank)
    timeout = machine.timedelta(seconds=300)
    assert pair.begun == [("gloo", "file:///meeting", rank, 2, timeout), "ended"]
    assert pair.exchanges == {1000: 11, 1: 11}, "the first of each is not counted"
    told = capsys.readouterr().out.split()
    expected = [4000 / 0.5 / 1e9, 15.0, 0.375]  # half of what one number takes there and back
    assert [float(word) for word in told] == (pytest.approx(expected) if rank == 0 else [])


def test_as_many_matmuls_as_an_exchange_takes_are_made_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LINK_BYTES", 4000)
    monkeypatch.setattr(machine, "OVERLAP_SIDE", {"cpu": 4})
    pair, matmuls = Pair({1000: 1.0}), list[float]()
    for name in ("dist", "time"):
        monkeypatch.setattr(machine, name, pair)

    def multiply(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> None:
        matmuls.append(pair.now)
        pair.now += 0.25

    monkeypatch.setattr(torch, "mm", multiply)
    asked: list[dict[str, float]] = []
    monkeypatch.setattr(machine, "overlap_share", lambda **times: asked.append(times) or 0.5)
    assert machine._measured_overlap(CPU) == 0.5
    assert asked == [{"exchange_s": 1.0, "compute_s": 1.0, "both_s": 1.0}]
    assert pair.maxima == [1.0, 1.0, 0.25, 1.0, 1.0], "of the slower rank"
    assert len(matmuls) == 9 * (1 + 1 + 4 + 4)
