"""What one process of `gpu.py` measures: a job is a dictionary of plain values, and so is what it finds.

A new kind of job is a function here and its name in `KINDS`.
"""

from __future__ import annotations

import gc
import json
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from gpu_attention import chosen_attention
from gpu_outer import outer_figures
from gpu_recording import parts_of, peak_bytes_of
from gpu_run import LOSS_CHUNK
from peers_throughput import (
    LEARNING_RATE,
    Shape,
    Step,
    bloomery_step,
    bloomery_training,
    build_step,
    device,
    matmul_peak,
    micro_batches,
    random_batch,
    seconds_of,
    section_of,
    timed,
)
from torch import Tensor
from torch.nn import functional as F

from bloomery.config.model import ModelSection
from bloomery.config.parallel import ParallelSection
from bloomery.model.attention_choice import attention_kernel, use_attention
from bloomery.model.loss import NextTokenLoss
from bloomery.parallel.precision import DTYPES, resolve_precision
from bloomery.plan.parameters import token_cost

Figures = dict[str, Any]

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "bloom": dict(norm="layernorm", position="alibi", activation="gelu", bias=True, tied=True),
    "gpt": dict(norm="layernorm", position="learned", activation="gelu", bias=True, tied=True),
}
SIZES: dict[str, dict[str, int]] = {
    "tiny": dict(layers=2, hidden=64, heads=4, ffn=176, vocabulary=256),
    "0.3B": dict(layers=16, hidden=1024, heads=16, ffn=2816, vocabulary=32_768),
    "1B": dict(layers=16, hidden=2048, heads=16, ffn=5632, vocabulary=32_768),
    "3B": dict(layers=26, hidden=3072, heads=24, ffn=8192, vocabulary=32_768),
    "8B": dict(layers=32, hidden=4096, heads=32, ffn=14_336, vocabulary=32_768),
}
CONTENDERS = {"transformers": "transformers-compiled", "minimal model": "minimal"}
TOKENS = 16_384
"""Tokens of a step: as many samples as fit."""
STEPS = 8
NOISE_STEPS, NOISE_WARMUP, NOISE_LAST = 500, 50, 50
BYTES = 256
"""The vocabulary of text whose tokens are bytes."""


def main() -> None:
    """Print what the job of the command line finds, one JSON object for each step of it."""
    for figures in work(json.loads(sys.argv[1])):
        print(json.dumps(figures), flush=True)


def work(job: Figures) -> Iterator[Figures]:
    """Yield what a job finds as soon as it is known: what is there counts, also if the rest fails."""
    torch.manual_seed(0)
    yield from KINDS[job["kind"]](job)


def layout_of(job: Figures) -> dict[str, Any]:
    """How a job computes so that it fits an H200: 8B in 16 bytes a parameter and a sample at a time."""
    if job.get("size") != "8B" or job["kind"] == "peer":
        return {"working": "kept", "recompute": "none", "micro_batch": 0}
    recompute = "elementwise" if job["length"] <= 4096 else "full"
    return {"working": "by-block", "recompute": recompute, "micro_batch": 1}


def shape_of(job: Figures) -> Shape:
    """The sizes of a job's model and batch."""
    samples = 2 if job["size"] == "tiny" else max(1, TOKENS // job["length"])
    return Shape(**SIZES[job["size"]], sequence_length=job["length"], samples=samples)


def section_for(shape: Shape, job: Figures) -> ModelSection:
    """The model of a job's family. A family without a gate has an MLP of 4 × hidden."""
    family, dropout = job.get("family", "llama"), job.get("dropout", 0.0)
    section = replace(section_of(shape), **FAMILIES[family])
    if family != "llama":
        section = replace(section, ffn=4 * shape.hidden)
    return replace(section, hidden_dropout=dropout, attention_dropout=dropout)


def _learn(job: Figures) -> Iterator[Figures]:
    """The loss after some steps in each precision, from the same weights."""
    tiny = job["size"] == "tiny"
    sizes = SIZES["tiny"] if tiny else SIZES["0.3B"] | {"layers": 4}
    shape = Shape(**sizes, sequence_length=64 if tiny else 1024, samples=4)
    for precision in job["precisions"]:
        step = bloomery_step(
            shape,
            compiled=False,
            parallel=ParallelSection(),
            section=section_for(shape, job),
            computes_in=precision,
        )
        losses = [timed(step)[1] for _ in range(1 + STEPS)]
        yield {precision: losses[-1]}


def _speed(job: Figures) -> Iterator[Figures]:
    """Seconds of a step, its FLOPs, memory and time by part, and the product of the same process."""
    yield {"peak": matmul_peak(), "machine": _machine()}  # so that it is known if what follows fails
    shape, layout = shape_of(job), layout_of(job)
    at_once = layout["micro_batch"] or shape.samples
    kernel, seconds = chosen_attention(section_for(shape, job), shape, job, device(), samples=at_once)
    yield {"attention": seconds}
    _free()
    with attention_kernel(kernel):
        yield from _speed_of_ours(job, kernel)
    _free()  # the product's matrices need the model's room
    yield {"peak": matmul_peak()}  # of a device that is as warm as it was for the steps


def _speed_of_ours(job: Figures, kernel: str) -> Iterator[Figures]:
    shape, layout = shape_of(job), layout_of(job)
    section = section_for(shape, job)
    own = bloomery_training(
        shape,
        compiled=job["size"] != "tiny",
        parallel=ParallelSection(working=layout["working"]),
        section=section,
        computes_in=job["precision"],
        recompute=layout["recompute"],
        micro_batch=layout["micro_batch"],
        fills_quickly=True,
        loss_chunk=LOSS_CHUNK,
        **job.get("settings", {}),
    )
    use_attention(own.model.decoder, kernel)
    layout["loss_chunk"] = LOSS_CHUNK
    layout["attention"] = kernel or "the device's own"
    batches = micro_batches(
        shape,
        *random_batch(shape),
        mesh=own.mesh,
        micro_batch=layout["micro_batch"],
        document_tokens=min(job.get("document_tokens", 0), shape.sequence_length // 2),
    )

    def step() -> Tensor:
        return own.step(batches)

    yield _timed(step, shape) | {"layout": ", ".join(f"{name} {value}" for name, value in layout.items())}
    cost = token_cost(
        section,
        vocabulary=shape.vocabulary,
        sequence_length=shape.sequence_length,
        recompute=layout["recompute"],
    )
    yield {"flops": cost.model * shape.tokens, "hardware_flops": cost.hardware * shape.tokens}
    yield {"parts": parts_of(step, device())}
    if job.get("outer"):
        yield from outer_figures(own, step)


def _peer(job: Figures) -> Iterator[Figures]:
    """Seconds of the step of another trainer, of a Llama of the same sizes."""
    shape = shape_of(job)
    step = build_step(CONTENDERS[job["peer"]], shape, compiled=job["size"] != "tiny")
    yield _timed(step, shape)


def _timed(step: Step, shape: Shape) -> Figures:
    first = timed(step)[0]
    seconds, losses = zip(*(timed(step) for _ in range(STEPS)), strict=True)
    memory = torch.cuda.max_memory_allocated() if device().type == "cuda" else 0
    return {
        "first": first,
        "loss": losses[-1],
        "seconds": median(seconds[2:]),
        "tokens": shape.tokens,
        "bytes": memory,
    }


def _head(job: Figures) -> Iterator[Figures]:
    """Bytes that head and loss take at most, forward and backward: ours, and fp32 logits written out."""
    tokens, hidden, vocabulary = job["tokens"], job["hidden"], job["vocabulary"]
    dtype = DTYPES[resolve_precision("auto", device())]
    states = torch.randn(tokens, hidden, device=device()).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, hidden, device=device()).mul_(0.02).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=device())
    ours = NextTokenLoss()

    def fused() -> Tensor:
        sums = ours(states, weight, targets, z_loss=0.0, chunk=LOSS_CHUNK, matmul_mode="native")
        return sums.total / tokens

    def naive() -> Tensor:
        return F.cross_entropy((states @ weight.t()).float(), targets)

    forms = {"ours": fused, "naive": naive}
    if device().type == "cuda":
        forms["naive compiled"] = torch.compile(naive)
    for name, loss in forms.items():
        states.grad = weight.grad = None
        found: list[Tensor] = []

        def both(loss: Callable[[], Tensor] = loss, found: list[Tensor] = found) -> None:
            value = loss()
            value.backward()
            found.append(value.detach())

        both()
        states.grad = weight.grad = None
        yield {
            name: {
                "bytes": peak_bytes_of(both, device()),
                "seconds": seconds_of(both),
                "loss": float(found[0]),
            }
        }


def _noise(job: Figures) -> Iterator[Figures]:
    """The mean loss of the last steps of runs on real text, by precision and seed of the initial values.

    All runs see the same batches.
    """
    tiny = job["size"] == "tiny"
    steps, last = (8, 4) if tiny else (NOISE_STEPS, NOISE_LAST)
    sizes = SIZES[job["size"]] | {"vocabulary": BYTES}
    shape = Shape(**sizes, sequence_length=job["length"], samples=2 if tiny else 8)
    text = text_of_bytes(1 << 16 if tiny else 1 << 25).to(device())
    for precision, seed in job["runs"]:
        losses, taken = [], 0

        def rate() -> float:
            return LEARNING_RATE * min(1.0, (taken + 1) / NOISE_WARMUP)  # noqa: B023  — called at once

        own = bloomery_training(
            shape,
            compiled=not tiny,
            parallel=ParallelSection(),
            computes_in=precision,
            seed=seed,
            learning_rate=rate,
        )
        while taken < steps:
            windows = _windows(text, shape, number=taken)
            batches = micro_batches(
                shape, windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), mesh=own.mesh
            )
            losses.append(own.step(batches))
            taken += 1
        yield {f"{precision} {seed}": {"first": float(losses[0]), "last": fmean(map(float, losses[-last:]))}}


def text_of_bytes(most: int) -> Tensor:
    """The first bytes of the source code of this Python, as tokens."""
    found = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")) + sorted(
        Path(sysconfig.get_paths()["stdlib"]).glob("*/*.py")
    ):
        found += path.read_bytes()
        if len(found) >= most:
            break
    return torch.frombuffer(found[:most], dtype=torch.uint8).long()


def _windows(text: Tensor, shape: Shape, *, number: int) -> Tensor:
    """Windows at random places [samples, sequence + 1], which depend on the number of the step alone."""
    generator = torch.Generator().manual_seed(number)
    begins = torch.randint(len(text) - shape.sequence_length, (shape.samples,), generator=generator)
    return torch.stack([text[begin : begin + shape.sequence_length + 1] for begin in begins.tolist()])


def _free() -> None:
    """Give back what is held for tensors that are gone."""
    gc.collect()
    if device().type == "cuda":
        torch.cuda.empty_cache()


def _machine() -> str:
    """What was measured on."""
    name = torch.cuda.get_device_name() if device().type == "cuda" else "CPU"
    packages = ", ".join(f"{one} {version(one)}" for one in ("torch", "transformers", "numpy"))
    return f"{name}, Python {sys.version.split()[0]}, {packages}"


KINDS: dict[str, Callable[[Figures], Iterator[Figures]]] = {
    "learn": _learn,
    "speed": _speed,
    "peer": _peer,
    "head": _head,
    "noise": _noise,
}


if __name__ == "__main__":
    main()
