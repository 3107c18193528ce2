import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
KEYS = {"name", "value", "unit", "reference", "bar", "ok"}


@pytest.fixture
def throughput(monkeypatch):
    """The module of the throughput benchmark; it loads no torch."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("train_throughput", BENCHMARKS / "train_throughput.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "train_throughput", module)
    spec.loader.exec_module(module)
    return module


def facts(throughput, **changed):
    usual = dict(
        device="CPU", precision="bf16", compiled=True, flops=4 * 10**12, tokens=4096, threads=2, missing={}
    )
    return throughput.Facts(**usual | changed)


def heats(throughput, *, shipped, ours=2.0, environment=2.4):
    """Two rounds in each heat; the matmul peak is 5 TFLOP/s."""
    return {
        throughput.AS_SHIPPED: {
            "bloomery": [ours] * 2,
            "matmul": [5e12] * 2,
            "quick": [shipped] * 2,
            "slow": [9.0] * 2,
        },
        throughput.OUR_ENVIRONMENT: {
            "bloomery": [ours] * 2,
            "matmul": [5e12] * 2,
            "quick": [environment] * 2,
        },
    }


def by_name(measurements):
    return {one.name.removeprefix("train_throughput: "): one for one in measurements}


def test_the_bars_hold_against_the_fastest_peer_of_each_heat(throughput):
    found = by_name(throughput.measurements(heats(throughput, shipped=3.0), facts(throughput)))

    assert found["against the best as shipped"].value == pytest.approx(1.5)
    assert found["against the best as shipped"].ok
    assert "best: quick" in found["against the best as shipped"].reference
    assert found["against slow, as shipped"].value == pytest.approx(4.5)
    assert found["against the best with our environment"].value == pytest.approx(1.2)


def test_a_missed_bar_is_not_ok_and_makes_the_exit_status_1(throughput, capsys):
    found = throughput.measurements(heats(throughput, shipped=2.5), facts(throughput))

    assert not by_name(found)["against the best as shipped"].ok
    assert throughput.report(found, as_json=True) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(set(line) == KEYS for line in lines)


def test_the_share_of_the_peak_is_our_operations_over_what_a_product_reaches(throughput):
    found = by_name(throughput.measurements(heats(throughput, shipped=3.0), facts(throughput)))

    # 4 TFLOP in 2 s is 2 of the 5 TFLOP/s.
    assert found["share of the matmul peak"].value == pytest.approx(40.0)
    assert found["tokens a second"].value == pytest.approx(2048.0)


def test_a_round_slowed_down_for_everybody_does_not_change_the_ratio(throughput):
    rounds = heats(throughput, shipped=3.0)
    for times in rounds[throughput.AS_SHIPPED].values():
        times[:] = [times[0], times[0] * 7, times[0]]

    found = by_name(throughput.measurements(rounds, facts(throughput)))

    assert found["against the best as shipped"].value == pytest.approx(1.5)


def test_what_was_not_compared_is_named_in_every_reference(throughput):
    without = facts(throughput, missing={"litgpt-compiled": "pip install …"})
    found = throughput.measurements(heats(throughput, shipped=3.0), without)

    assert all("without litgpt-compiled" in one.reference for one in found)


def test_a_worker_trains_the_tiny_shape_and_answers_a_line_a_step():
    command = [sys.executable, BENCHMARKS / "train_throughput.py", "--worker", "bloomery", "--shape", "tiny"]

    ended = subprocess.run(command, input="step\nstep\n", capture_output=True, text=True, check=True)

    ready, *steps = (json.loads(line) for line in ended.stdout.splitlines())
    assert ready["facts"]["tokens"] == 32
    assert len(steps) == 2
    assert steps[-1]["loss"] < ready["loss"]
    assert all(step["value"] > 0 for step in steps)


def test_the_tokenising_benchmark_compares_whole_files_of_real_text(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("data_benchmark", BENCHMARKS / "data.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    found = {one.name: one for one in module.tokenizing(tmp_path, 1, rounds=1, cores=1)}

    assert found["data: files equal to the byte"].ok
    assert found["data: tokenise and write"].bar == ">= 15"
    assert found["data: tokenise and write"].value > 0


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("data_order", ["--documents", "20000", "--blocks", "3"]),
        ("data_reading", ["--tokens", "1600000", "--rounds", "2", "--samples", "256", "--passes", "1"]),
    ],
)
def test_a_benchmark_of_the_data_compares_equal_things_and_keeps_the_contract(name, sizes, tmp_path):
    command = [sys.executable, BENCHMARKS / f"{name}.py", "--json", *sizes]
    if name == "data_reading":
        command += ["--directory", tmp_path]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)

    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(lines) >= 4 and all(set(line) == KEYS for line in lines), ended.stderr
    assert ended.returncode == (0 if all(line["ok"] for line in lines) else 1)  # bars are for idle machines


def test_the_benchmark_of_pipelines_compares_the_same_model_under_both_schedules():
    command = [sys.executable, BENCHMARKS / "parallel.py", "--json", "--only", "pipeline"]

    ended = subprocess.run(
        [*command, "--shape", "tiny", "--rounds", "1"], capture_output=True, text=True, timeout=280
    )

    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(lines) == 3 and all(set(line) == KEYS for line in lines), ended.stderr
    assert all(line["value"] > 0 for line in lines if "speed" in line["name"])


def test_the_benchmark_of_starts_has_ranks_meet_and_one_make_a_step():
    command = [sys.executable, BENCHMARKS / "start_384.py", "--json", "--ranks", "3"]
    small = ("model.hidden=448", "model.ffn=1792", "train.global_batch=192", "train.ramp_up=[8,8,1000000]")
    command += [part for one in small for part in ("--setting", one)]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=280)

    lines = {line["name"]: line for line in map(json.loads, ended.stdout.splitlines())}
    assert len(lines) == 5 and all(set(line) == KEYS for line in lines.values()), ended.stderr
    assert all(line["value"] > 0 for line in lines.values())
    # Each writes its introduction and rank 0 its verdict; rank 0 reads all, and the others the verdict.
    assert "get 5, set 4;" in lines["start: calls of the store, all ranks"]["reference"]


def test_the_benchmark_of_guards_prints_its_measurements():
    sizes = ["--steps", "10000", "--starts", "10", "--spikes", "6", "--lines", "3000"]
    sizes += ["--parts", "losses", "growth", "cost", "speed"]  # the others build models

    ended = subprocess.run(
        [sys.executable, BENCHMARKS / "guard.py", "--json", *sizes],
        capture_output=True,
        text=True,
        timeout=280,
    )

    lines = {line["name"]: line for line in map(json.loads, ended.stdout.splitlines())}
    assert lines and all(set(line) == KEYS for line in lines.values()), ended.stderr
    judged = [name for name in lines if "alarms" in name or "missed" in name or "13B" in name]
    assert len(judged) >= 4 and all(lines[name]["ok"] for name in judged)


@pytest.mark.parametrize("name", ["checkpoint_load", "checkpoint_remote"])
def test_the_benchmarks_of_loading_and_backing_up_print_their_measurements(tmp_path, name):
    command = [sys.executable, BENCHMARKS / f"{name}.py", "--json", "--megabytes", "3", "--rounds", "1"]

    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, "TMPDIR": str(tmp_path)}
    )

    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert lines, ended.stderr
    assert all(set(line) == KEYS and line["value"] > 0 for line in lines)
    assert ended.returncode == (0 if all(line["ok"] for line in lines) else 1)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("elastic_codec", ["--elements", "100000", "--rounds", "1", "--without-torch"]),
        ("elastic_control", ["--rounds", "2", "--kills", "1"]),
        ("elastic_sparse", ["--rounds", "1", "--steps", "1", "--seeds", "1"]),
        ("elastic_ring", ["--elements", "100000", "--rounds", "1", "--without-gloo"]),
        (
            "elastic_ring",
            ["--elements", "9", "--rounds", "1", "--without-gloo", "--rate-mbit", "1", "--pause-s", "0.01"],
        ),
    ],
)
def test_the_benchmarks_between_peers_print_their_measurements(name, sizes):
    command = [sys.executable, BENCHMARKS / f"{name}.py", "--json", *sizes]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)

    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert lines, ended.stderr
    assert all(set(line) == KEYS and line["value"] > 0 for line in lines)
    assert ended.returncode == (0 if all(line["ok"] for line in lines) else 1)  # bars are for idle machines


def test_the_comparison_of_bits_sees_one_bit_one_step_and_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    same_bits = importlib.import_module("same_bits")

    def run(name, *, loss=4.5, tensors):
        place = tmp_path / name
        (place / "journal").mkdir(parents=True)
        checkpoint = place / "checkpoints" / "step-000005"
        checkpoint.mkdir(parents=True)
        steps = [
            {"event": "step", "step": step, "loss": loss * step, "gradient_norm": 1.0} for step in (1, 2)
        ]
        lines = [json.dumps(step) for step in [{"event": "start"}, *steps]]
        (place / "journal" / "000001.jsonl").write_text("\n".join(lines))
        save_file(
            {key: np.array(value, "f4") for key, value in tensors.items()}, checkpoint / "m.safetensors"
        )
        return place

    def ratios(ours, theirs):
        return [(one.value, one.ok) for one in same_bits._compared("alone", ours, theirs)]

    first = run("first", tensors={"a": [1.0], "b": [2.0]})
    assert ratios(run("same", tensors={"a": [1.0], "b": [2.0], "new": [3.0]}), first) == [(1.0, True)] * 2
    assert ratios(run("bit", tensors={"a": [1.0], "b": [2.0000002]}), first) == [(1.0, True), (0.5, False)]
    assert ratios(run("less", loss=4.6, tensors={"a": [1.0]}), first) == [(0.0, False), (0.5, False)]
