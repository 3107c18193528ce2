"""The benchmark of accelerators: all its parts on a CPU, and that its figures are what they say."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from bloomery.config.parallel import ParallelSection
from bloomery.parallel.mesh import Mesh

ROOT = Path(__file__).parents[1]
SIZES = dict(layers=2, hidden=32, heads=2, ffn=48, vocabulary=64, sequence_length=16, samples=3)
MODULES = tuple(path.stem for path in (ROOT / "benchmarks").glob("gpu*.py"))
LOADED_IF_PRESENT = {"bloomery", "colorama", "execnet", "pillow", "platformdirs", "pytest-xdist"}
"""Packages that others import where they find them, and the one that is carried as a wheel of its own."""
RECORDER = """
import atexit, os, sys

def tell():
    with open(os.environ["LOADED_MODULES"], "a") as file:
        file.write("".join(f"{name.partition('.')[0]}\\n" for name in list(sys.modules)))

atexit.register(tell)
"""


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what imports a module of the benchmarks."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in (*MODULES, "contract", "peers_throughput"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module


# Together they take some 60 s of processor time, and wait for much of it where other work goes on.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("parts", ["check", "speed run styles head noise scalings sizes"])
def test_every_part_runs_on_a_cpu_with_the_packages_that_a_bundle_carries(
    benchmarks: Any, tmp_path: Path, parts: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(RECORDER)
    loaded, kept = tmp_path / "loaded", tmp_path / "kept"
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", "--tiny", "--json", "--keep", kept]
    ended = subprocess.run(
        [*command, "--sizes", "1B", "--sequences", "4096", "--parts", *parts.split()],
        env=os.environ | {"LOADED_MODULES": str(loaded), "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = {line["name"]: line for line in map(json.loads, ended.stdout.splitlines())}
    verdicts = {line.rsplit("  ", 1)[-1] for line in ended.stderr.splitlines() if " not " in line}
    assert verdicts == {"not judged", "not run"}
    bars = {f"gpu: {title}" for title in benchmarks("gpu_session").BARS}
    of_check = {title for title in bars if "fp32's" in title or "stopped" in title or "marked" in title}
    assert found.keys() >= (of_check if parts == "check" else bars - of_check)
    present = closure(benchmarks("gpu_bundle").PRESENT)
    carried = set(benchmarks("gpu_bundle").CARRIED)
    assert packages_of(loaded.read_text().split()) - present - LOADED_IF_PRESENT <= carried


def packages_of(modules: list[str]) -> set[str]:
    packages = packages_distributions()
    known = set(modules) - sys.stdlib_module_names
    return {package.lower().replace("_", "-") for module in known for package in packages.get(module, ())}


def closure(packages: tuple[str, ...]) -> set[str]:
    """The packages with all that they need, as far as it is installed here."""
    found, wanted = set[str](), list(packages)
    while wanted:
        name = wanted.pop().lower().replace("_", "-")
        if name in found:
            continue
        found.add(name)
        try:
            needed = map(Requirement, requires(name) or ())
        except PackageNotFoundError:
            continue
        wanted += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


class Canned:
    """A session whose jobs have been measured."""

    def __init__(self, gpu_session: Any, **found: Any) -> None:
        self._session = gpu_session.Session(within_s=0.0, tiny=False, keep=None)
        self._found = found
        self.tiny = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def measured(self, **job: Any) -> dict[str, Any]:
        found: dict[str, Any] = self._found[
            " ".join(str(job[key]) for key in ("kind", "size", "precision") if key in job)
        ]
        return found


def judged(part: Any, session: Any) -> dict[str, Any]:
    measurements = [one for found in part(session, None) for one in found]
    return {one.name.removeprefix("gpu: "): one for one in measurements}


def speed_of(seconds: float, **more: Any) -> dict[str, Any]:
    base = dict(seconds=seconds, tokens=16_384, bytes=2**35, peak=8e14, flops=1e14, hardware_flops=1.5e14)
    return base | {"layout": "recompute full", "first": 9.0, "parts": {"attention": [30.0, 0.15]}} | more


def test_the_bars_of_speed_come_from_seconds_and_operations(benchmarks: Any) -> None:
    outer = {
        "outer_waits": {"offer": 0.02, "average and prepare": 0.33, "adopt": 0.05},
        "outer_beside": {"added": 0.1, "steps": 7, "alone": 0.2},
    }
    session = Canned(
        benchmarks("gpu_session"),
        **{"speed 1B bf16": speed_of(0.2, **outer), "peer 1B": {"seconds": 0.3}},
        **{"speed 8B bf16": speed_of(1.7), "speed 8B fp8": speed_of(1.25)},
    )
    found = judged(benchmarks("gpu_parts").PARTS["speed"], session)
    base = "1B llama, bf16, 4,096"
    assert found[f"{base}: MFU of 989 TFLOP/s"].value == pytest.approx(100 * 500 / 989)
    assert (
        found[f"{base}: of the product"].value == pytest.approx(62.5) and found[f"{base}: of the product"].ok
    )
    assert found[f"{base}: model TFLOP/s"].value == pytest.approx(500)
    assert found[f"{base}: hardware TFLOP/s"].value == pytest.approx(750)
    assert found[f"{base}: time of attention"].value == 30.0
    assert not found["8B llama, bf16, 4,096: of the product"].ok
    assert found["8B, 4,096: FP8 against bf16"].value == pytest.approx(1.36)
    assert found["1B, 4,096: against compiled transformers"].value == pytest.approx(1.5)
    assert found["1B: outer step, of 100 steps"].value == pytest.approx(2.0)
    assert found["1B: outer step, of 100 steps, beside steps"].value == pytest.approx(0.5)
    assert not found["1B: outer step, of 100 steps"].ok
    assert found["1B: outer step, of 100 steps, beside steps"].ok
    assert "steps 7" in found["1B: outer step, of 100 steps, beside steps"].reference


def test_a_job_that_failed_misses_its_bars_and_one_that_was_left_out_has_no_figure(benchmarks: Any) -> None:
    session = Canned(
        benchmarks("gpu_session"),
        **{"speed 1B bf16": {"failure": "out of memory"}, "peer 1B": {"seconds": 0.3}},
        **{"speed 8B bf16": speed_of(1.7), "speed 8B fp8": {"left_out": True}},
    )
    found = judged(benchmarks("gpu_parts").PARTS["speed"], session)
    assert found["1B, 4,096: against compiled transformers"].reference == "out of memory"
    assert not any(one.ok for title, one in found.items() if title.startswith("1B"))
    assert "8B, 4,096: FP8 against bf16" not in found


@pytest.mark.parametrize(("in_fp8", "is_met"), [(2.495, True), (2.56, False)])
def test_the_loss_in_fp8_is_held_to_the_spread_of_seeds(
    benchmarks: Any, in_fp8: float, *, is_met: bool
) -> None:
    last = {"bf16 0": 2.5, "bf16 1": 2.51, "bf16 2": 2.46, "fp8 0": in_fp8}
    told = {name: {"first": 5.5, "last": loss} for name, loss in last.items()}
    session = Canned(benchmarks("gpu_session"), **{"noise 0.3B": told})
    (one,) = judged(benchmarks("gpu_parts").PARTS["noise"], session).values()
    assert one.value == pytest.approx(abs(in_fp8 - 2.5) / 0.05) and one.ok == is_met


def test_runs_of_one_seed_have_one_loss_and_others_have_others(benchmarks: Any) -> None:
    runs = [["fp32", 0], ["fp32", 1], ["fp8", 0]]
    job = {"kind": "noise", "size": "tiny", "length": 64, "runs": runs}
    first, second = dict[str, Any](), dict[str, Any]()
    for found in (first, second):
        for figures in benchmarks("gpu_workers").work(job):
            found |= figures
    assert first == second
    assert len({one["last"] for one in first.values()}) == 3
    assert all(one["last"] != one["first"] for one in first.values())


def test_memory_of_the_head_is_that_of_the_naive_one_where_the_naive_one_takes_its_place(
    benchmarks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = benchmarks("gpu_workers")
    job = {"kind": "head", "tokens": 8192, "hidden": 16, "vocabulary": 512}

    def ratio() -> float:
        found: dict[str, Any] = {}
        for figures in workers.work(job):
            found |= figures
        assert found["ours"]["loss"] == pytest.approx(found["naive"]["loss"], rel=0.02)
        return float(found["naive"]["bytes"] / found["ours"]["bytes"])

    assert ratio() > 1.5

    def naive(states: Any, weight: Any, targets: Any, **more: Any) -> Any:
        logits = (states @ weight.t()).float()
        return SimpleNamespace(total=len(targets) * workers.F.cross_entropy(logits, targets))

    monkeypatch.setattr(workers, "NextTokenLoss", lambda: naive)
    assert ratio() == pytest.approx(1.0, rel=0.05)


def test_a_step_that_waits_for_a_save_counts_as_beside_it(benchmarks: Any) -> None:
    gpu_run = benchmarks("gpu_run")
    # Ten steps of 1 s; while the save of step 7 is written, until the tenth, they take 1.5 s.
    ends = [float(step) for step in range(1, 8)] + [8.5, 10.0, 11.5, 12.5, 13.5]
    events = [{"event": "step", "step": number, "time": end} for number, end in enumerate(ends, 1)]
    events.insert(10, {"event": "checkpoint", "step": 7, "time": 11.6})
    times = gpu_run.step_times([{"event": "start", "step": 0, "time": 0.0}, *events])
    assert times.beside == (1.5, 1.5, 1.5, 1.0) and times.alone == (1.0, 1.0, 1.0)
    assert times.mean_ratio == pytest.approx(5.5 / 4) and times.median_ratio == 1.5


def test_no_job_begins_without_the_time_that_it_is_predicted_to_take(
    benchmarks: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu, session = benchmarks("gpu"), benchmarks("gpu_session")
    monkeypatch.setattr(session, "ended", None)  # whoever calls it fails
    assert gpu.main(["--within", "0", "--parts", "check", "speed", "run", "styles", "head", "noise"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    bars = lines[1 : 1 + len(session.BARS)]
    assert all(line.endswith("not run") for line in bars)
    assert sum(line.startswith("left out: ") for line in lines) >= 12


def test_the_longest_parts_fit_ten_minutes_and_all_bars_fit_fifteen(benchmarks: Any) -> None:
    predicted = benchmarks("gpu_session").PREDICTED_S
    parts = {
        "check": max(predicted["learn"], predicted["tests"], 3 * predicted["resume"] / 2),
        "speed": predicted["speed 1B"] + 2 * predicted["speed 8B"] + predicted["peer 1B"],
        "run": predicted["train"] + predicted["calibrate"] + predicted["plan"],
        "styles": 3 * predicted["speed 1B"],
        "head": predicted["head"],
        "noise": predicted["noise"],
    }
    assert max(parts.values()) <= 600 and sum(parts.values()) <= 840


def test_a_second_session_knows_what_the_first_has_measured(
    benchmarks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_session = benchmarks("gpu_session")
    job = {"kind": "head", "tokens": 64, "hidden": 8, "vocabulary": 32}
    first = gpu_session.Session(within_s=600.0, tiny=False, keep=tmp_path / "kept")
    found = first.measured(**job)
    first.newly_seen([first.judged("marked tests fail", 0.0, "", reference="")])
    monkeypatch.setattr(gpu_session, "ended", None)
    second = gpu_session.Session(within_s=600.0, tiny=False, keep=tmp_path / "kept")
    assert second.measured(**job) == found and found["ours"]["bytes"] > 0
    assert second.knows("marked tests fail")
    assert second.newly_seen([second.judged("marked tests fail", 0.0, "", reference="")]) == []


def test_a_worker_that_fails_is_told_and_what_it_had_found_counts(
    benchmarks: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu_session = benchmarks("gpu_session")
    session = gpu_session.Session(within_s=600.0, tiny=False, keep=None)
    worker = tmp_path / "worker.py"
    worker.write_text("print('{\"seconds\": 0.5}', flush=True)\nraise SystemExit('out of memory')")
    monkeypatch.setattr(gpu_session, "WORKERS", worker)
    assert session.measured(kind="head") == {"seconds": 0.5, "failure": "out of memory"}
    with pytest.raises(gpu_session.CommandFailed, match="plan: out of memory"):
        session.command([sys.executable, str(worker)], job="plan")


def test_a_command_that_takes_too_long_is_ended_with_what_it_had_printed(benchmarks: Any) -> None:
    done = benchmarks("gpu_session").ended(["sh", "-c", "echo early; sleep 600 & wait"], timeout_s=1.0)
    assert done.stdout == "early\n" and done.returncode != 0
    assert benchmarks("gpu_session").last_line(done) == "not done within 1 s"


def test_the_script_of_a_bundle_installs_its_wheels_apart_and_passes_arguments_on(
    benchmarks: Any, tmp_path: Path
) -> None:
    (tmp_path / "run.sh").write_text(benchmarks("gpu_bundle").RUN)
    (tmp_path / "one-1.0-py3-none-any.whl").touch()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$PYTHONPATH|$*" >> {tmp_path}/calls\n')
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python), "PYTHONPATH": "/before"}
    command = ["sh", str(tmp_path / "run.sh"), "--within", "560"]
    subprocess.run(command, env=environment, check=True, cwd=ROOT)
    install, run = (line.split("|") for line in (tmp_path / "calls").read_text().splitlines())
    assert "--no-index" in install[1] and install[1].endswith("one-1.0-py3-none-any.whl")
    site = install[1].split("--target ")[1].split()[0]
    assert run == [f"{site}:/before", "benchmarks/gpu.py --within 560"]


def test_a_step_by_samples_that_computes_again_has_the_loss_and_the_update_of_one(benchmarks: Any) -> None:
    peers, layout = benchmarks("peers_throughput"), benchmarks("gpu_workers").layout_of
    shape = peers.Shape(**SIZES)
    usual = layout({"kind": "speed", "size": "1B", "length": 4096})
    losses = {}
    for length in (0, 4096, 8192):
        given = layout({"kind": "speed", "size": "8B", "length": length}) if length else usual
        parallel = ParallelSection(working=given.pop("working"))
        step = peers.bloomery_step(shape, compiled=False, parallel=parallel, **given)
        losses[length] = [float(step()) for _ in range(3)]
    assert losses[4096] == pytest.approx(losses[0], rel=1e-2)
    assert losses[8192] == pytest.approx(losses[0], rel=1e-2)
    assert len(set(losses[0])) == 3


def test_all_of_a_batch_is_where_its_tokens_are(benchmarks: Any) -> None:
    peers, shape = benchmarks("peers_throughput"), (3, 16)
    tokens, targets = (torch.empty(shape, dtype=torch.int64, device="meta") for _ in range(2))
    mesh = Mesh(device=torch.device("meta"))
    batches = peers.micro_batches(
        peers.Shape(**SIZES), tokens, targets, mesh=mesh, micro_batch=1, document_tokens=8
    )
    assert len(batches) == 3
    for batch in batches:
        parts = (batch.tokens, batch.targets, batch.documents, batch.samples)
        assert {part.device.type for part in parts} == {"meta"}


@pytest.mark.parametrize(
    ("family", "more", "is_measured"),
    [("llama", {}, True), ("bloom", {}, False), ("llama", {"document_tokens": 8}, False)],
)
def test_attention_is_measured_where_a_run_measures_it(
    benchmarks: Any, monkeypatch: pytest.MonkeyPatch, family: str, more: dict[str, Any], *, is_measured: bool
) -> None:
    workers, attention = benchmarks("gpu_workers"), benchmarks("gpu_attention")
    asked: list[Any] = []

    def measure(kernels: Any, sizes: Any, device: Any, *, time_s: Any) -> Any:
        asked.append(sizes)
        return {"cudnn": 2.0, "flash": 1.0}, {}

    monkeypatch.setattr(attention, "measure", measure)
    job = {"size": "1B", "length": 4096, "family": family, "precision": "fp8", **more}
    shape = workers.shape_of(job)
    section = workers.section_for(shape, job)
    device = workers.torch.device("cuda")
    kernel, _ = attention.chosen_attention(section, shape, job, device, samples=1)
    assert kernel == ("flash" if is_measured else "")
    assert [str(one.dtype) for one in asked] == ["torch.bfloat16"] * is_measured
    assert [(one.samples, one.heads, one.length, one.width) for one in asked] == [
        (1, 16, 4096, 128)
    ] * is_measured


def test_documents_hide_tokens_of_others(benchmarks: Any) -> None:
    peers = benchmarks("peers_throughput")
    losses = [
        float(
            peers.bloomery_step(
                peers.Shape(**SIZES), compiled=False, parallel=ParallelSection(), document_tokens=tokens
            )()
        )
        for tokens in (0, 16, 4)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] != pytest.approx(losses[0], rel=1e-4)


def test_weights_that_the_device_draws_have_the_distributions_of_those_by_address(benchmarks: Any) -> None:
    peers = benchmarks("peers_throughput")
    spreads = []
    for fills_quickly in (False, True):
        own = peers.bloomery_training(
            peers.Shape(**SIZES), compiled=False, parallel=ParallelSection(), fills_quickly=fills_quickly
        )
        spreads.append({one.name: float(one.tensor.std()) for one in own.model.weights.state_entries()})
    assert spreads[0].keys() == spreads[1].keys()
    for name, spread in spreads[0].items():
        assert spreads[1][name] == pytest.approx(spread, rel=0.2)
