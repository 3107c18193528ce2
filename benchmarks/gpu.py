"""All that wants an accelerator, in one command: correctness, then speed and memory.

check: three families learn in bf16 and in FP8 what they learn in fp32; a run is saved, goes on and is
exported; the tests that are marked `gpu` pass. speed: tokens a second, share of the matrix product measured
in the same process and of the published peak, and peak memory, for sizes from 0.3B to 8B, against compiled
transformers and a compiled minimal model. styles: BLOOM's ALiBi, dropout and documents against a Llama of 1B.
Each measurement is a process of its own, so that one that runs out of memory costs no other. `--tiny` shows
on any machine that everything runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from contract import Measurement, measurement, report

import bloomery

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
STYLES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "bloom": {"family": "bloom"},
    "bloom, dropout 0.1": {"family": "bloom", "dropout": 0.1},
    "documents": {"family": "llama", "document_tokens": 1024},
}
STYLE_BARS = {"bloom": ">= 0.9", "bloom, dropout 0.1": ">= 0.8", "documents": ">= 0.9"}
TINY = dict(layers=2, hidden=64, heads=4, ffn=176, vocabulary=256)
SEQUENCES = (2048, 4096, 8192)
TOKENS = 16_384
"""Tokens of a step: as many samples as fit."""
H200_BF16 = 989e12
"""FLOP/s of dense bf16 products of an H200, as published."""
PEERS = {"transformers": ">= 1.4", "minimal model": None}
CONTENDERS = {"transformers": "transformers-compiled", "minimal model": "minimal"}
PARTS = ("check", "speed", "styles")
STEPS = 8
DEADLINE_S = 570.0


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    if options.worker:
        print(json.dumps(_work(json.loads(options.worker))), flush=True)
        return 0
    statuses = [report(found, as_json=options.json) for found in _measurements(options)]
    return max(statuses, default=0)


def _measurements(options: argparse.Namespace) -> Iterator[list[Measurement]]:
    """Each part's figures as soon as they are there, so that a time limit costs only those to come."""
    if "check" in options.parts:
        yield from _checked(tiny=options.tiny)
    if "speed" in options.parts:
        for size in ["tiny"] if options.tiny else options.sizes:
            for length in [64] if options.tiny else options.sequences:
                yield _speed(size, length, options.precisions, peers=not options.no_peers)
    if "styles" in options.parts:
        yield _styles(*(("tiny", 64) if options.tiny else ("1B", 4096)))


def _checked(*, tiny: bool) -> Iterator[list[Measurement]]:
    """Each family in each precision against itself in fp32, a run that is resumed, and the marked tests."""
    for family in FAMILIES:
        losses = {
            precision: _measured(kind="learn", family=family, precision=precision, tiny=tiny)
            for precision in ("fp32", *TOLERANCES)
        }
        exact = losses["fp32"].get("loss", float("nan"))
        found = []
        for precision, bar in TOLERANCES.items():
            loss = losses[precision].get("loss", float("nan"))
            seen = f"after {STEPS} steps: {loss:.4f} and {exact:.4f}"
            failure = losses[precision].get("failure") or losses["fp32"].get("failure")
            title = f"gpu: {family} in {precision}, loss from fp32's"
            share = abs(loss - exact) / exact
            found.append(measurement(title, share, unit="", reference=failure or seen, bar=bar))
        yield found
    failure = _resumes_and_exports()
    title = "gpu: a run that is stopped goes on, and is exported"
    reference = failure or "bloomery train, ckpt export"
    yield [measurement(title, float(not failure), unit="", reference=reference, bar=">= 1")]
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "tests/gpu"]
    tests = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    failed = float(tests.returncode not in (0, 5))
    yield [measurement("gpu: marked tests fail", failed, unit="", reference=_last_line(tests), bar="<= 0")]


def _resumes_and_exports() -> str:
    """Train a few steps, some more by the same command, and export; return what went wrong, or ''."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        train = ["train", "demo-small", "--run", str(run), "data.sources=['python:stdlib']"]
        train += ["data.tokenizer_vocabulary=300", "model.layers=2", "schedule.warmup=2"]
        # `ckpt export` compares the logits of transformers with ours.
        export = ["ckpt", "export", str(run), str(Path(directory) / "exported")]
        for arguments in ([*train, "train.steps=4"], [*train, "train.steps=8"], export):
            command = [sys.executable, "-m", "bloomery", *arguments]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=ROOT
            )
            if done.returncode:
                return f"bloomery {arguments[0]}: {_last_line(done)}"
        starts = list(bloomery.journal(run, "start")["step"])
        return "" if starts == [0, 4] else f"it began at the steps {starts}"


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stderr.strip().splitlines() or done.stdout.strip().splitlines()
    return lines[-1] if lines else f"ended with status {done.returncode}"


def _speed(size: str, length: int, precisions: Sequence[str], *, peers: bool) -> list[Measurement]:
    """Ours in each precision, and the peers; each beside a product of its process."""
    job = {"kind": "speed", "size": size, "length": length, "family": "llama"}
    found, seconds = [], dict[str, float]()
    for name in precisions:
        told = _measured(**job, precision=name)
        is_bar = size in ("1B", "8B") and length == 4096 and name == "bf16"
        found += _figures(f"gpu: {size} llama, {name}, {length:,}", told, is_bar=is_bar)
        seconds[name] = told.get("seconds", float("nan"))
    base = seconds.get("bf16", float("nan"))
    if "bf16" in seconds and "fp8" in seconds:
        bar = ">= 1.35" if size == "8B" else None
        title = f"gpu: {size}, {length:,}: FP8 against bf16"
        found.append(measurement(title, base / seconds["fp8"], unit="x", reference="", bar=bar))
    for peer, bar in PEERS.items() if peers else ():
        theirs = _measured(kind="peer", peer=peer, size=size, length=length)
        theirs_s = theirs.get("seconds", float("nan"))
        found.append(
            measurement(
                f"gpu: {size}, {length:,}: against compiled {peer}",
                theirs_s / base,
                unit="x",
                reference=theirs.get("failure", f"{theirs_s:.4g} s a step"),
                bar=bar if "seconds" in theirs and size != "tiny" else None,
            )
        )
    return found


def _styles(size: str, length: int) -> list[Measurement]:
    """Each style's step against that of a Llama of the same sizes, all in bf16."""
    job = {"kind": "speed", "size": size, "length": length, "precision": "bf16"}
    told = {name: _measured(**job, **style) for name, style in STYLES.items()}
    found, base = [], told["llama"].get("seconds", float("nan"))
    for name, figures in told.items():
        found += _figures(f"gpu: {size} {name}, bf16, {length:,}", figures, is_bar=False)
        if name in STYLE_BARS:
            ratio = base / figures.get("seconds", float("nan"))
            title = f"gpu: {size}, {length:,}: {name} against llama"
            bar = STYLE_BARS[name] if size == "1B" else None
            found.append(measurement(title, ratio, unit="x", reference="", bar=bar))
    return found


def _figures(title: str, told: dict[str, Any], *, is_bar: bool) -> list[Measurement]:
    """The speed of one job, its share of the product and of the published peak, and its memory."""
    if "failure" in told:
        return [measurement(title, float("nan"), unit="", reference=told["failure"])]
    rate = told["flops"] / told["seconds"]
    reference = (
        f"{told['seconds']:.4g} s a step of {told['tokens']:,} tokens, {rate / 1e12:.4g} TFLOP/s; "
        f"product {told['peak'] / 1e12:.4g} TFLOP/s; {told['layout']}"
    )
    figures = (
        ("speed", told["tokens"] / told["seconds"], "tokens/s", None),
        ("of the product", 100 * rate / told["peak"], "%", ">= 62"),
        (f"MFU of {H200_BF16 / 1e12:.0f} TFLOP/s", 100 * rate / H200_BF16, "%", ">= 50"),
        ("memory", told["bytes"] / 2**30, "GiB", None),
    )
    return [
        measurement(f"{title}: {name}", value, unit=unit, reference=reference, bar=bar if is_bar else None)
        for name, value, unit, bar in figures
    ]


def _measured(**job: Any) -> dict[str, Any]:
    """Run one job in a process of its own; its figures, or why there are none, as `failure`."""
    command = [sys.executable, __file__, "--worker", json.dumps(job)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        return {"failure": f"not done within {DEADLINE_S:.0f} s"}
    if done.returncode:
        return {"failure": _last_line(done)}
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
    layout = _layout(job)
    section = None
    if job["kind"] == "peer":
        step = build_step(CONTENDERS[job["peer"]], shape, compiled=not tiny)
    else:
        section = replace(section_of(shape), **FAMILIES[job["family"]])
        if job["family"] != "llama":
            section = replace(section, ffn=4 * shape.hidden)
        dropout = job.get("dropout", 0.0)
        section = replace(section, hidden_dropout=dropout, attention_dropout=dropout)
        step = bloomery_step(
            shape,
            compiled=job["kind"] == "speed" and not tiny,
            parallel=ParallelSection(working=layout["working"]),
            section=section,
            computes_in=job["precision"],
            recompute=layout["recompute"],
            micro_batch=layout["micro_batch"],
            document_tokens=min(job.get("document_tokens", 0), shape.sequence_length // 2),
        )
    first = timed(step)[1]
    seconds, losses = zip(*(timed(step) for _ in range(STEPS)), strict=True)
    memory = torch.cuda.max_memory_allocated() if device().type == "cuda" else 0
    del step  # the product's matrices need room
    if memory:
        torch.cuda.empty_cache()
    return {
        "first": first,
        "loss": losses[-1],
        "seconds": median(seconds[2:]),
        "tokens": shape.tokens,
        "flops": flops_of_step(shape, section),
        "peak": matmul_peak(),
        "bytes": memory,
        "layout": ", ".join(f"{name} {value}" for name, value in layout.items()),
    }


def _layout(job: dict[str, Any]) -> dict[str, Any]:
    """How a job computes so that it fits an H200: 8B in 16 bytes a parameter and a sample at a time."""
    if job.get("size") != "8B" or job["kind"] == "peer":
        return {"working": "kept", "recompute": "none", "micro_batch": 0}
    recompute = "elementwise" if job["length"] <= 4096 else "full"
    return {"working": "by-block", "recompute": recompute, "micro_batch": 1}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--sequences", nargs="+", type=int, default=list(SEQUENCES))
    parser.add_argument("--precisions", nargs="+", choices=("bf16", "fp8"), default=["bf16", "fp8"])
    parser.add_argument("--no-peers", action="store_true", help="without transformers beside ours")
    parser.add_argument("--tiny", action="store_true", help="only show that it runs, on any machine")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
