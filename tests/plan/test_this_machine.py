"""The machine that a plan is for when nothing names one."""

from __future__ import annotations

from pathlib import Path

import pytest

from bloomery.cli import main
from bloomery.plan.hardware import this_machine


def cpuinfo(tmp_path: Path, flags: str, megahertz: str = "cpu MHz : 2000.0\n") -> Path:
    path = tmp_path / "cpuinfo"
    path.write_text(f"model name : X\n{megahertz}flags : fpu {flags}\n")
    return path


@pytest.mark.parametrize(
    ("flags", "per_cycle", "bf16_gain"),
    [("avx2", 32, 0), ("avx512f avx512_bf16", 64, 2), ("avx2 avx512f amx_bf16", 64, 8), ("", 8, 0)],
)
def test_a_processor_is_judged_by_its_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, per_cycle: float, bf16_gain: float
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    machine = this_machine(gpus=tmp_path / "none", processor=cpuinfo(tmp_path, flags), memory_gib=3.0)
    assert machine is not None
    assert machine.accelerator.fp32_teraflops == pytest.approx(3 * 2e9 * per_cycle / 1e12)
    assert machine.accelerator.bf16_teraflops == pytest.approx(bf16_gain * machine.accelerator.fp32_teraflops)
    assert machine.accelerator.memory_gib == 3.0 and "3 cores" in machine.name


def test_a_clock_that_a_virtual_machine_does_not_tell_is_the_usual_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    path = cpuinfo(tmp_path, "avx2", megahertz="cpu MHz : 0.000\n")
    machine = this_machine(gpus=tmp_path / "none", processor=path, memory_gib=3.0)
    assert machine is not None and machine.accelerator.fp32_teraflops == pytest.approx(2.5e9 * 32 / 1e12)


def test_a_gpu_is_known_by_its_name_and_an_unknown_one_is_not_guessed(tmp_path: Path) -> None:
    information = tmp_path / "0000:01:00.0" / "information"
    information.parent.mkdir()
    known = {"NVIDIA H200": "h200", "NVIDIA A100-SXM4-80GB": "a100-80g", "NVIDIA A100 80GB PCIe": "a100-80g"}
    of_other_memory = ("NVIDIA A100-SXM4-40GB", "Tesla V100-SXM2-16GB", "NVIDIA GH200 480GB")
    for model, name in (known | dict.fromkeys(("GeForce 8", *of_other_memory))).items():
        information.write_text(f"Model: \t\t {model}\nIRQ: 5\n")
        machine = this_machine(gpus=tmp_path)
        assert (machine.name if machine else None) == name


def test_a_plan_without_a_machine_is_for_this_one_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["plan", "demo"])
    told = capsys.readouterr()
    assert "no machine is named" in told.err and "a100-80g" not in told.out
    main(["plan", "demo", "--gpus", "1"])
    assert "is for a100-80g" in capsys.readouterr().err
