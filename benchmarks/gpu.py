"""All that wants an accelerator, in one command: correctness, then speed and memory.

check: three families learn in bf16 and in FP8 what they learn in fp32; a run is saved and goes on; the tests
that are marked `gpu` pass. speed: tokens a second, share of the matrix product measured in the same process
and of the published peak, and peak memory, for sizes from 0.3B to 8B, against compiled transformers. Each
measurement is a process of its own, so that one that runs out of memory costs no other. `--tiny` shows on any
machine that everything runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from contract import Measurement, measurement, report

ROOT = Path(__file__).parents[1]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "bloom": dict(norm="layernorm", position="alibi", activation="gelu", bias=True, tied=True),
    "gpt": dict(norm="layernorm", position="learned", activation="gelu", bias=True, tied=True),
}
TOLERANCES = {"bf16": "<= 0.01", "fp8": "<= 0.03"}
"""How far the last loss may be from that in fp32, relative to it."""
SIZES: dict[str, dict[str, int]] = {
    "0.3B": dict(layers=16, hidden=1024, heads=16, ffn=2816, vocabulary=32_768),
    "1B": dict(layers=16, hidden=2048, heads=16, ffn=5632, vocabulary=32_768),
    "3B": dict(layers=26, hidden=3072, heads=24, ffn=8192, vocabulary=32_768),
    "8B": dict(layers=32, hidden=4096, heads=32, ffn=14_336, vocabulary=32_768),
}
TINY = dict(layers=2, hidden=64, heads=4, ffn=176, vocabulary=256)
SEQUENCES = (2048, 4096, 8192)
TOKENS = 16_384
"""Tokens of a step: as many samples as fit."""
H200_BF16 = 989e12
"""FLOP/s of dense bf16 products of an H200, as published."""
STEPS = 8
DEADLINE_S = 570.0


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    if options.worker:
        print(json.dumps(_work(json.loads(options.worker))), flush=True)
        return 0
    measurements: list[Measurement] = []
    if "check" in options.parts:
        measurements += _checked(tiny=options.tiny)
    if "speed" in options.parts:
        for size in ["tiny"] if options.tiny else options.sizes:
            for length in [64] if options.tiny else options.sequences:
                measurements += _speed(size, length, options.precisions, peers=not options.no_peers)
    return report(measurements, as_json=options.json)


def _checked(*, tiny: bool) -> list[Measurement]:
    """Each family in each precision against itself in fp32, a resumed run, and the tests for accelerators."""
    found = []
    for family in FAMILIES:
        losses = {
            precision: _measured(kind="learn", family=family, precision=precision, tiny=tiny)
            for precision in ("fp32", *TOLERANCES)
        }
        exact = losses["fp32"].get("loss", float("nan"))
        for precision, bar in TOLERANCES.items():
            loss = losses[precision].get("loss", float("nan"))
            found.append(
                measurement(
                    f"gpu: {family} in {precision}, loss from fp32's",
                    abs(loss - exact) / exact,
                    unit="",
                    reference=f"after {STEPS} steps: {loss:.4f} and {exact:.4f}",
                    bar=bar,
                )
            )
    found.append(
        measurement(
            "gpu: a run that is stopped goes on",
            float(_resumes()),
            unit="",
            reference="bloomery train",
            bar=">= 1",
        )
    )
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests"]
    tests = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    last = (tests.stdout.strip().splitlines() or [tests.stderr.strip()])[-1]
    found.append(
        measurement(
            "gpu: marked tests fail",
            float(tests.returncode not in (0, 5)),
            unit="",
            reference=last,
            bar="<= 0",
        )
    )
    return found


def _resumes() -> bool:
    """Train a few steps, then some more by the same command; whether the second went on from the first."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        command = [sys.executable, "-m", "bloomery", "train", "demo-small", "--run", str(run)]
        command += ["data.sources=['python:stdlib']", "data.tokenizer_vocabulary=300", "model.layers=2"]
        for steps in (4, 8):
            subprocess.run(
                [*command, f"train.steps={steps}"], check=True, capture_output=True, timeout=DEADLINE_S
            )
        journal = (run / "journal" / "rank-00000.jsonl").read_text().splitlines()
        starts = [record["step"] for record in map(json.loads, journal) if record.get("event") == "start"]
        return starts == [0, 4]


def _speed(size: str, length: int, precisions: Sequence[str], *, peers: bool) -> list[Measurement]:
    """Ours in each precision, BLOOM style for 1B, and the peer; each beside a product of its process."""
    wanted = [("llama", precision) for precision in precisions] + (
        [("bloom", "bf16")] if size == "1B" else []
    )
    found, ours = [], dict[tuple[str, str], dict[str, Any]]()
    for family, precision in wanted:
        told = _measured(kind="speed", size=size, length=length, family=family, precision=precision)
        title = f"gpu: {size} {family}, {precision}, {length:,}"
        if "failure" in told:
            found.append(measurement(title, float("nan"), unit="", reference=told["failure"]))
            continue
        ours[family, precision] = told
        reference = (
            f"{told['seconds']:.4g} s a step of {told['tokens']:,} tokens, product {told['peak']:.4g} FLOP/s"
        )
        is_bar = size in ("1B", "8B") and length == 4096 and precision == "bf16" and family == "llama"
        rate = told["flops"] / told["seconds"]
        found += [
            measurement(
                f"{title}: speed", told["tokens"] / told["seconds"], unit="tokens/s", reference=reference
            ),
            measurement(
                f"{title}: of the product",
                100 * rate / told["peak"],
                unit="%",
                reference=reference,
                bar=">= 62" if is_bar else None,
            ),
            measurement(
                f"{title}: MFU of {H200_BF16 / 1e12:.0f} TFLOP/s",
                100 * rate / H200_BF16,
                unit="%",
                reference=reference,
                bar=">= 50" if is_bar else None,
            ),
            measurement(f"{title}: memory", told["bytes"] / 2**30, unit="GiB", reference=reference),
        ]
    base = ours.get(("llama", "bf16"))
    if base and ("llama", "fp8") in ours:
        ratio = base["seconds"] / ours["llama", "fp8"]["seconds"]
        bar = ">= 1.35" if size == "8B" else None
        found.append(
            measurement(f"gpu: {size}, {length:,}: FP8 against bf16", ratio, unit="x", reference="", bar=bar)
        )
    if base and peers:
        theirs = _measured(kind="peer", size=size, length=length, family="llama", precision="bf16")
        ratio = theirs.get("seconds", float("nan")) / base["seconds"]
        found.append(
            measurement(
                f"gpu: {size}, {length:,}: against compiled transformers",
                ratio,
                unit="x",
                reference=theirs.get("failure", f"{theirs.get('seconds')} s a step"),
                bar=">= 1.4" if "seconds" in theirs and size != "tiny" else None,
            )
        )
    return found


def _measured(**job: Any) -> dict[str, Any]:
    """Run one job in a process of its own; its figures, or why there are none, as `failure`."""
    command = [sys.executable, __file__, "--worker", json.dumps(job)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        return {"failure": f"not done within {DEADLINE_S:.0f} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"failure": lines[-1] if lines else f"ended with status {done.returncode}"}
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def _work(job: dict[str, Any]) -> dict[str, Any]:
    import torch
    from peers_throughput import (
        Shape,
        bloomery_step,
        build_step,
        device,
        flops_of_step,
        matmul_peak,
        section_of,
        timed,
    )

    from bloomery.config.parallel import ParallelSection

    torch.manual_seed(0)
    tiny = job.get("tiny", False) or job.get("size") == "tiny"
    if job["kind"] == "learn":
        sizes = TINY if tiny else SIZES["0.3B"] | {"layers": 4}
        shape = Shape(**sizes, sequence_length=64 if tiny else 1024, samples=4)
    else:
        length = job["length"]
        shape = Shape(
            **(TINY if tiny else SIZES[job["size"]]),
            sequence_length=length,
            samples=max(1, TOKENS // length) if not tiny else 2,
        )
    if job["kind"] == "peer":
        step = build_step("transformers-compiled", shape, compiled=not tiny)
    else:
        section = replace(section_of(shape), **FAMILIES[job["family"]])
        if job["family"] != "llama":
            section = replace(section, ffn=4 * shape.hidden)
        step = bloomery_step(
            shape,
            compiled=job["kind"] == "speed" and not tiny,
            parallel=ParallelSection(),
            section=section,
            computes_in=job["precision"],
        )
    first = timed(step)[1]
    seconds, losses = zip(*(timed(step) for _ in range(STEPS)), strict=True)
    on_gpu = device().type == "cuda"
    return {
        "first": first,
        "loss": losses[-1],
        "seconds": median(seconds[2:]),
        "tokens": shape.tokens,
        "flops": flops_of_step(shape),
        "peak": matmul_peak(),
        "bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "shape": asdict(shape),
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--parts", nargs="+", choices=("check", "speed"), default=["check", "speed"])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--sequences", nargs="+", type=int, default=list(SEQUENCES))
    parser.add_argument("--precisions", nargs="+", choices=("bf16", "fp8"), default=["bf16", "fp8"])
    parser.add_argument("--no-peers", action="store_true", help="without transformers beside ours")
    parser.add_argument("--tiny", action="store_true", help="only show that it runs, on any machine")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
