import math
import os
from itertools import pairwise

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
from bloomery.config.load import load_recipe
from bloomery.plan.hardware import dump_hardware, load_hardware
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


def test_the_speed_of_a_disk_is_that_of_what_has_reached_it(quick, tmp_path, monkeypatch):
    sync, synced = durable.sync_file, []

    def noted(file):
        synced.append(os.fstat(file).st_size)
        sync(file)

    monkeypatch.setattr(durable, "sync_file", noted)
    assert min(machine.disk_gb_per_s(tmp_path)) > 0.0
    assert synced == [machine.DISK_BYTES]
