import errno
import math
import os
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from bloomery import durable
from bloomery.calibrate import compute, machine
from bloomery.calibrate import compute as blocks
from bloomery.calibrate import compute as stopwatch
from bloomery.calibrate import machine as surroundings
from bloomery.calibrate.compute import HALF_SIZES, MatmulRate, fit_half_size
from bloomery.calibrate.machine import MeasuredLink, measure_machine
from bloomery.cli import main
from bloomery.cli.train import PREPARED
from bloomery.config.load import load_recipe
from bloomery.plan.block_cost import block_passes
from bloomery.plan.hardware import (
    Accelerator,
    Hardware,
    Node,
    dump_hardware,
    load_hardware,
)
from bloomery.plan.overview import make_plan
from bloomery.plan.request import Request

CPU = torch.device("cpu")


@pytest.fixture
def quick(monkeypatch):
    """Small shapes and few repeats: that every part measures, not what."""
    monkeypatch.setattr(stopwatch, "BUDGET_S", 0.0)
    monkeypatch.setattr(compute, "LARGE", {"cpu": 256})
    monkeypatch.setattr(compute, "WIDTHS", {"cpu": (64, 128)})
    monkeypatch.setattr(blocks, "SHAPES", {"cpu": ((64, 4, 64, 2),)})
    monkeypatch.setattr(surroundings, "COPY_BYTES", 2**22)
    monkeypatch.setattr(surroundings, "DISK_BYTES", 2**22)


@pytest.mark.parametrize("half", HALF_SIZES[::6])
@pytest.mark.parametrize("efficiency", [0.5, 0.9])
def test_the_fit_finds_the_half_size_that_matmuls_were_made_with(half, efficiency):
    sides = [(2048, 64, 64), (2048, 512, 256), (96, 96, 2048), (1024, 1024, 1024)]
    made = [
        MatmulRate(
            rows=rows,
            columns=columns,
            inner=inner,
            flops=1e11 * efficiency * math.prod(side / (side + half) for side in (rows, columns, inner)),
        )
        for rows, columns, inner in sides
    ]
    found_efficiency, found_half = fit_half_size(made, 1e11)
    assert found_efficiency == pytest.approx(efficiency)
    assert found_half == half


def test_the_fit_of_attention_finds_both_figures():
    rows = [(x, y, 2.5 * x + 4.0 * y) for x, y in ((1e-3, 1e-4), (2e-3, 1e-3), (5e-4, 8e-4))]
    share, pass_ns = compute._least_squares(rows)
    assert share == pytest.approx(2.5)
    assert pass_ns == pytest.approx(4.0)


def test_the_stopwatch_takes_the_quickest_run(quick):
    lengths = iter([1_000_000, 300_000, 50_000, 300_000, 300_000, 300_000, 300_000])
    taken = []

    def work():
        taken.append(sum(range(next(lengths))))

    assert stopwatch.best_s(work, CPU) > 0
    assert len(taken) == 1 + stopwatch.LEAST_REPEATS


def test_a_gpu_is_measured_by_its_own_clock_over_rows_of_runs(quick, monkeypatch):
    """No GPU is at hand: events that tell a made-up clock, on which each run takes two microseconds."""
    clock, waits = [0.0], []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self, stream):
            self.at_ms = clock[0]

        def synchronize(self):
            waits.append(clock[0])

        def elapsed_time(self, end):
            return end.at_ms - self.at_ms

    def work():
        clock[0] += 2e-3  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert stopwatch.best_s(work, torch.device("cuda")) == pytest.approx(2e-6)
    runs_waited_for = [(after - before) / 2e-3 for before, after in pairwise(waits)]
    assert min(runs_waited_for) >= stopwatch.ROW_S / 2e-6 * 0.99  # the host waits once a row


def test_two_processes_measure_the_link_between_them():
    link = surroundings.link_between_processes()
    assert 1e-4 < link.gb_per_s < 1e4
    assert link.latency_us > 0
    assert 0.0 <= link.overlap <= 1.0


@pytest.mark.parametrize(("both_s", "share"), [(2.0, 1.0), (3.0, 0.0), (2.25, 0.75), (1.8, 1.0), (4.0, 0.0)])
def test_overlap_is_the_share_of_the_shorter_time_that_was_saved(both_s, share):
    for exchange_s, compute_s in ((1.0, 2.0), (2.0, 1.0)):
        measured = machine.overlap_share(exchange_s=exchange_s, compute_s=compute_s, both_s=both_s)
        assert measured == pytest.approx(share)


def test_a_measured_machine_makes_a_file_that_plans(quick, tmp_path, monkeypatch):
    # Other processes are started in the tests around this one, and by benchmarks/plan_calibrate.py.
    link = MeasuredLink(gb_per_s=1.0, latency_us=50.0, overlap=0.37)
    monkeypatch.setattr(machine, "link_between_processes", lambda: link)
    monkeypatch.setattr(machine, "process_gib", lambda: 0.3)
    said = []
    hardware = measure_machine(tmp_path, say=said.append)
    assert [line.split()[0] for line in said] == ["matmuls", "peak", "memory,", "blocks"]
    assert "TFLOP/s" in said[1]
    given = {key.split(".")[1] for key in hardware.sources}
    assert {"memory_gib", "kernel_us", "link_gb_per_s", "write_gb_per_s"} <= given
    path = tmp_path / "machine.toml"
    path.write_text(dump_hardware(hardware), encoding="utf-8")
    again = load_hardware(str(path))
    assert again.accelerator == hardware.accelerator
    assert again.peak_flops("auto") > 1e9
    assert again.node.overlap == 0.37
    assert 0.05 < again.accelerator.reserved_gib < 2.0
    plan = make_plan(Request(loaded=load_recipe("llmjp-172b-tiny"), hardware=again, accelerators=1))
    assert plan.fits
    assert 0.0 < plan.speed.step_s < 600.0


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, capsys):
    assert main(["calibrate", "--to", str(tmp_path / "no" / "machine.toml")]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_a_full_disk_leaves_the_hardware_file_that_is_there(tmp_path, capsys, monkeypatch):
    def full(*told, **more):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "machine.toml"
    earlier = dump_hardware(load_hardware("h200"))
    path.write_text(earlier)
    monkeypatch.setenv(PREPARED, "1")
    monkeypatch.setattr(machine, "measure_machine", lambda disk, say: load_hardware("h100-80g"))
    with monkeypatch.context() as patch:
        patch.setattr(durable, "write_new", full)
        assert main(["calibrate", "--to", str(path), "--disk", str(tmp_path)]) == 1
    assert "Writing the hardware file failed" in capsys.readouterr().err and path.read_text() == earlier
    assert main(["calibrate", "--to", str(path), "--disk", str(tmp_path)]) == 0
    assert load_hardware(str(path)).accelerator == load_hardware("h100-80g").accelerator


def test_no_efficiency_above_the_peak_is_fitted():
    fast = [MatmulRate(rows=side, columns=side, inner=side, flops=1.2e11) for side in (64, 256, 1024)]
    assert fit_half_size(fast, 1e11) == (1.0, 0.0)


def test_attention_never_takes_less_than_nothing_for_its_weights():
    rows = [(x, y, 2.5 * x - 0.5 * y) for x, y in ((1e-3, 1e-4), (2e-3, 1e-3), (5e-4, 8e-4))]
    assert compute._least_squares(rows)[1] == 0.0


def test_the_time_of_a_block_is_half_of_what_two_more_add(monkeypatch):
    seconds = iter([1.0, 5.0])
    monkeypatch.setattr(compute, "best_s", lambda work, device: next(seconds))
    model = compute._model(32, 2)
    taken = compute._block_s(model, samples=1, length=8, device=CPU, dtype=torch.float32)
    assert taken == 2.0


def test_a_block_takes_a_third_of_three_where_a_single_one_was_slowed_by_other_work(monkeypatch):
    monkeypatch.setattr(blocks, "SHAPES", {"cpu": ((32, 2, 4, 2),)})

    def bandwidth(*seconds):
        taking(monkeypatch, *seconds)
        return compute.measure_elementwise_gb_per_s(quickest(), "fp32", CPU)

    assert bandwidth(9e-3, 6e-3) == pytest.approx(bandwidth(0.0, 4e-3), rel=1e-9)
    # Of a difference that is nothing beside the matmuls, these alone are left, and a twentieth for memory.
    known = quickest(fp32_teraflops=1e-6, **PERFECT)
    taking(monkeypatch, 1.0, 1.0 + 1e-9)
    passes = block_passes(compute._workload(compute._model(32, 2), known, "fp32", samples=2, length=4))
    compute_s = (passes.forward + passes.backward).compute_s
    moved_bytes = 3 * 8 * 4 * (10 * 32 + 3 * 96 + 2 * 2 * 32)
    found = compute.measure_elementwise_gb_per_s(known, "fp32", CPU)
    assert compute_s > 0.1 and found == pytest.approx(moved_bytes / (0.05 * compute_s) / 1e9, rel=1e-3)


def test_the_speed_of_a_disk_is_that_of_what_has_reached_it(quick, tmp_path, monkeypatch):
    sync, synced = durable.sync_file, []

    def noted(file):
        synced.append(os.fstat(file).st_size)
        sync(file)

    monkeypatch.setattr(durable, "sync_file", noted)
    assert min(machine.disk_gb_per_s(tmp_path)) > 0.0
    assert synced == [machine.DISK_BYTES]


def taking(monkeypatch, *seconds):
    """Let each measurement take so long, one after another."""
    left = iter(seconds)
    for module in (compute, machine):
        monkeypatch.setattr(module, "best_s", lambda work, device: next(left))


PERFECT = {"matmul_efficiency": 1.0, "matmul_half_size": 0.0}


def quickest(**figures):
    """A machine that computes and moves in no time, but for what is given."""
    usual = {"memory_gib": 1.0, "memory_gb_per_s": 1e12, "fp32_teraflops": 1e12, "bf16_teraflops": 1e12}
    return Hardware(
        name="quick",
        accelerator=Accelerator(**{**usual, "kernel_us": 0.0, **figures}),
        node=Node(accelerators=1),
    )


def test_matmuls_are_those_of_a_layer_forward_and_for_both_gradients(monkeypatch):
    for name, value in (("LARGE", 32), ("WIDTHS", (16,)), ("ROWS", 64)):
        monkeypatch.setattr(compute, name, {"cpu": value})
    taking(monkeypatch, 0.5, 0.25, 2.0, 4.0, 0.125)
    found = compute.measure_matmuls(CPU, torch.float32)
    shapes = [(32, 32, 32, 0.5), (64, 16, 16, 0.25), (64, 48, 16, 2.0), (48, 16, 64, 4.0)]
    assert [(one.rows, one.columns, one.inner, one.flops) for one in found] == [
        (rows, columns, inner, 2 * rows * columns * inner / seconds)
        for rows, columns, inner, seconds in shapes
    ]
    assert compute.measure_peak_flops(CPU, torch.float32) == 2 * 32**3 / 0.125


def test_a_copy_reads_and_writes_each_byte(monkeypatch):
    monkeypatch.setattr(machine, "COPY_BYTES", 2**22)
    taking(monkeypatch, 0.25)
    assert machine.memory_gb_per_s(CPU) == pytest.approx(2 * 2**22 / 0.25 / 1e9)


def test_attention_is_fitted_to_the_matmuls_and_passes_that_a_plan_counts(monkeypatch):
    monkeypatch.setattr(compute, "ATTENTIONS", {"cpu": ((2, 3, 8, 4), (1, 2, 16, 8))})
    fitted = []
    monkeypatch.setattr(compute, "_least_squares", lambda rows: fitted.extend(rows) or (2.5, 4.0))
    taking(monkeypatch, 0.5, 0.25)
    found = compute.measure_attention(CPU, torch.float32, 1e6)
    assert (found.efficiency, found.pass_ns) == (0.4, 4.0)
    weights = (2 * 3 * 64, 1 * 2 * 256)
    assert fitted[0] == pytest.approx((7 * weights[0] * 4 / 1e6, 1.5e-9 * weights[0], 0.5))
    assert fitted[1] == pytest.approx((7 * weights[1] * 8 / 1e6, 1.5e-9 * weights[1], 0.25))


def test_the_least_time_of_a_kernel_is_that_of_a_block_on_next_to_nothing(monkeypatch):
    asked = {}
    monkeypatch.setattr(compute, "_block_s", lambda model, **how: asked.update(how) or 66e-6)
    assert compute.measure_kernel_us(CPU, torch.float32) == pytest.approx(2.0)
    assert asked == {"samples": 1, "length": 8, "device": CPU, "dtype": torch.float32}


def test_bytes_of_blocks_explain_what_they_take_besides_matmuls_and_starts(monkeypatch):
    monkeypatch.setattr(blocks, "SHAPES", {"cpu": ((32, 2, 4, 2), (64, 2, 4, 2))})
    seconds = iter([2e-3 + 33e-6, 4e-3 + 33e-6])  # with the starts of 33 kernels
    monkeypatch.setattr(compute, "_block_s", lambda model, **how: next(seconds))
    found = compute.measure_elementwise_gb_per_s(quickest(kernel_us=1.0), "fp32", CPU)

    def moved(hidden, ffn):  # eight tokens: ten passes over the stream, three within, rotation; thrice
        return 3 * 8 * 4 * (10 * hidden + 3 * ffn + 2 * 2 * hidden)

    weights = 1 / (2e-3 + 33e-6), 1 / (4e-3 + 33e-6)
    of_both = moved(32, 96) * weights[0] + moved(64, 176) * weights[1]
    assert found == pytest.approx(of_both / (2e-3 * weights[0] + 4e-3 * weights[1]) / 1e9, rel=1e-3)


def test_logits_take_what_a_loss_takes_beyond_matmuls_and_memory(monkeypatch):
    monkeypatch.setattr(compute, "LOSSES", {"cpu": ((4, 8, 16), (2, 8, 32))})
    taking(monkeypatch, 64 * 10e-9, 64 * 30e-9)
    assert compute.measure_exponential_ns(quickest(), "fp32", CPU) == pytest.approx(20.0, rel=1e-3)
    # Besides: 28 bytes for each of 64 logits, and three products of 1,024 operations.
    known = quickest(memory_gb_per_s=1.0, memory_efficiency=1.0, fp32_teraflops=5e-4, **PERFECT)
    taking(monkeypatch, *[64 * 28e-9 + 3 * 2048e-9 + 64 * 10e-9] * 2)
    assert compute.measure_exponential_ns(known, "fp32", CPU) == pytest.approx(10.0)
    taking(monkeypatch, 0.0, 0.0)
    assert compute.measure_exponential_ns(quickest(memory_gb_per_s=1.0), "fp32", CPU) == 0.0


def test_the_memory_of_a_machine_without_a_gpu_is_what_this_process_may_use_of_it(monkeypatch):
    monkeypatch.setattr(machine, "main_memory_gib", lambda: 1.5)
    assert machine.memory_gib(CPU) == 1.5


def test_the_memory_of_a_process_is_told_in_kibibytes(monkeypatch):
    done = SimpleNamespace(stdout=str(3 << 19))
    monkeypatch.setattr(machine.subprocess, "run", lambda *words, **how: done)
    assert machine.process_gib() == 1.5


def test_a_disks_speeds_are_its_bytes_over_the_time_of_each_way(tmp_path, monkeypatch):
    clock = iter([0.0, 2.0, 10.0, 14.0])
    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(machine, "DISK_BYTES", 2**22)
    assert machine.disk_gb_per_s(tmp_path) == (2**22 / 2.0 / 1e9, 2**22 / 4.0 / 1e9)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("precision", "has_bf16", "peaks"),
    [
        ("bf16", True, {"bf16": 9.0, "fp16": 7.0, "fp32": 3.0}),
        ("fp32", False, {"fp32": 9.0, "fp16": 7.0}),
    ],
)
def test_a_gpu_is_measured_in_each_precision_that_it_may_train_in(monkeypatch, precision, has_bf16, peaks):
    speeds = {torch.float16: 7e12, torch.bfloat16: 8e12, torch.float32: 3e12}
    monkeypatch.setattr(machine, "measure_peak_flops", lambda device, dtype: speeds[dtype])
    monkeypatch.setattr(machine, "multiplies_bf16", lambda device: has_bf16)
    found = machine._peaks_teraflops(torch.device("cuda"), precision, 9e12)
    assert found == {f"{name}_teraflops": peak for name, peak in peaks.items()}
    on_cpu = {"bf16_teraflops": 9.0, "fp32_teraflops": 3.0} if has_bf16 else {"fp32_teraflops": 9.0}
    assert machine._peaks_teraflops(CPU, precision, 9e12) == on_cpu


@pytest.mark.parametrize("has_bf16", [False, True])
def test_each_figure_of_a_machine_is_the_one_that_was_measured(tmp_path, monkeypatch, has_bf16):
    measured = {
        "multiplies_bf16": has_bf16,
        "measure_matmuls": [
            MatmulRate(rows=1, columns=1, inner=1, flops=flops) for flops in (2e12, 5e12, 3e12)
        ],
        "fit_half_size": (0.75, 48.0),
        "measure_peak_flops": 1.5e12,
        "measure_attention": compute.AttentionCost(efficiency=0.3, pass_ns=0.6),
        "memory_gb_per_s": 11.0,
        "disk_gb_per_s": (0.7, 1.9),
        "link_between_processes": MeasuredLink(gb_per_s=4.0, latency_us=35.0, overlap=0.4),
        "memory_gib": 24.0,
        "process_gib": 0.8,
        "measure_kernel_us": 6.5,
        "measure_elementwise_gb_per_s": 13.0,
        "measure_exponential_ns": 0.9,
    }
    asked = {}
    for name, value in measured.items():
        monkeypatch.setattr(
            machine, name, lambda *given, name=name, value=value: asked.update({name: given}) or value
        )
    found = measure_machine(tmp_path, say=lambda line: None)
    accelerator, node = found.accelerator, found.node
    peaks = (accelerator.fp32_teraflops, accelerator.bf16_teraflops)
    assert accelerator.kind == "cpu" and peaks == ((1.5, 5.0) if has_bf16 else (5.0, 0.0))
    assert asked["measure_matmuls"] == (CPU, torch.bfloat16 if has_bf16 else torch.float32)
    assert (accelerator.memory_gib, accelerator.reserved_gib) == (24.0, 0.8)
    assert (accelerator.matmul_efficiency, accelerator.matmul_half_size) == (0.75, 48.0)
    assert (accelerator.attention_efficiency, accelerator.attention_pass_ns) == (0.3, 0.6)
    assert (accelerator.kernel_us, accelerator.memory_gb_per_s, accelerator.exponential_ns) == (
        6.5,
        13.0,
        0.9,
    )
    assert (node.link_gb_per_s, node.link_us, node.overlap, node.accelerators) == (4.0, 35.0, 0.4, 1)
    assert (found.storage.write_gb_per_s, found.storage.read_gb_per_s) == (0.7, 1.9)
    assert accelerator.memory_efficiency == node.link_efficiency == 1.0
    assert asked["fit_half_size"][1] == asked["measure_attention"][2] == 5e12, (
        "the quickest matmul is the peak"
    )
    assert asked["disk_gb_per_s"] == (tmp_path,)
    built_on = asked["measure_elementwise_gb_per_s"][0].accelerator
    assert (built_on.kernel_us, built_on.memory_gb_per_s) == (6.5, 11.0)
    assert asked["measure_exponential_ns"][0].accelerator.memory_gb_per_s == 13.0
    precision, dtype = ("bf16", torch.bfloat16) if has_bf16 else ("fp32", torch.float32)
    assert asked["measure_attention"][:2] == asked["measure_kernel_us"] == (CPU, dtype)
    for name in ("measure_elementwise_gb_per_s", "measure_exponential_ns"):
        assert asked[name][1:] == (precision, CPU)
    assert f"accelerator.{'bf16' if has_bf16 else 'fp32'}_teraflops" in found.sources
