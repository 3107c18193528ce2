"""Divides the time of recorded steps among the parts of a step, from a trace of torch's profiler.

A GPU's time is that of its kernels. A kernel's part comes from its name and from the operators during which
it was launched. Without a GPU it is the time of operators, without that of the operators they call.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

UPDATE = "bloomery::update"
"""The range that `train_step` records around clipping, update, and rounding of the masters."""
IDLE, OTHER = "idle", "norms and elementwise"

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_RANGES = ("cpu_op", "user_annotation")

# Operators come before names of kernels: the head's matmuls belong to the loss, and rounding a gradient
# belongs to its sum. The range of the update comes last, because it has copies in it.
_BY_OPERATOR = (
    ("loss and head", r"loss_and_gradients|\b_Loss|entropy_gradient|nll_loss|cross_entropy"),
    ("sums of gradients", r"AccumulateGrad"),
    ("attention", r"attention|Attention|::attend"),
    ("products", r"^aten::(_scaled_mm|mm|addmm|bmm|baddbmm)"),
)
_BY_NAME = (
    ("collectives", r"nccl|^c10d::|_c10d_functional"),
    ("optimizer", r"[aA]dam"),
    ("copies", r"copy_kernel|Memcpy|Memset|^aten::(copy_|cat|clone|fill_|zero_)$"),
    ("attention", r"flash|fmha|sdpa|attention"),
    ("products", r"gemm|nvjet|cutlass|xmma|cublas|splitK|triton_tem\w*_mm"),
)
PARTS = (
    *("attention", "products", OTHER, "loss and head", "optimizer", "sums of gradients", "copies"),
    *("collectives", IDLE),
)


@dataclass(frozen=True, kw_only=True)
class PartTime:
    """What one part took of the steps that a trace holds.

    share: of the time from the first kernel's begin to the last one's end. calls: kernels, or operators.
    """

    part: str
    seconds: float
    share: float
    calls: int


def time_by_part(trace: Mapping[str, Any]) -> list[PartTime]:  # Any: the profiler's JSON
    """Return the parts that take time, the longest first, and the time in which nothing ran as `IDLE`.

    trace: what `torch.profiler.profile.export_chrome_trace` wrote. Kernels of several streams may run at
    once, so shares may add up to more than 1.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    kernels = [event for event in events if event.get("cat") in _ON_DEVICE]
    pieces = list(_kernels(events, kernels) if kernels else _operators(events))
    if not pieces:
        return []
    seconds, calls = defaultdict[str, float](float), defaultdict[str, int](int)
    for piece in pieces:
        seconds[piece.part] += piece.own_s
        calls[piece.part] += 1
    spans = [(piece.begin_s, piece.end_s) for piece in pieces]
    window_s = max(end for _, end in spans) - min(begin for begin, _ in spans)
    seconds[IDLE] = window_s - _covered_s(spans)
    parts = [
        PartTime(part=part, seconds=spent_s, share=spent_s / window_s, calls=calls[part])
        for part, spent_s in seconds.items()
        if window_s > 0
    ]
    return sorted(parts, key=lambda part: part.seconds, reverse=True)


def table_of_parts(parts: Sequence[PartTime], *, steps: int = 1) -> str:
    """Return one line for each part: milliseconds of a step, share, and calls of a step."""
    lines = [f"{'part':<24}{'ms a step':>12}{'share':>9}{'calls':>9}"]
    lines += [
        f"{part.part:<24}{1e3 * part.seconds / steps:>12.2f}{part.share:>9.1%}{part.calls / steps:>9.0f}"
        for part in parts
    ]
    return "".join(f"{line}\n" for line in lines)


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """A kernel, or an operator without what it calls."""

    part: str
    begin_s: float
    end_s: float
    own_s: float


def _kernels(events: Iterable[Mapping[str, Any]], kernels: Iterable[Mapping[str, Any]]) -> Iterator[_Piece]:
    around = {
        visit.event["args"]["correlation"]: visit.names
        for visit in _visits(event for event in events if event.get("cat") in (*_LAUNCHES, *_RANGES))
        if visit.event["cat"] in _LAUNCHES and "correlation" in visit.event.get("args", {})
    }
    for kernel in kernels:
        names = around.get(kernel.get("args", {}).get("correlation"), ())
        name = kernel["name"] if kernel["cat"] == "kernel" else "Memcpy"
        begin_s, lasts_s = kernel["ts"] * 1e-6, kernel["dur"] * 1e-6
        part = _part_of(name, names)
        yield _Piece(part=part, begin_s=begin_s, end_s=begin_s + lasts_s, own_s=lasts_s)


def _operators(events: Iterable[Mapping[str, Any]]) -> Iterator[_Piece]:
    for visit in _visits(event for event in events if event.get("cat") in _RANGES):
        begin_s, lasts_s = visit.event["ts"] * 1e-6, visit.event["dur"] * 1e-6
        if visit.event["cat"] == "cpu_op":
            part = _part_of(visit.event["name"], (*visit.names, visit.event["name"]))
            own_s = max(0.0, lasts_s - visit.called_us * 1e-6)
            yield _Piece(part=part, begin_s=begin_s, end_s=begin_s + lasts_s, own_s=own_s)


def _part_of(name: str, around: Sequence[str]) -> str:
    for part, pattern in _BY_OPERATOR:
        if any(re.search(pattern, operator) for operator in around):
            return part
    for part, pattern in _BY_NAME:
        if re.search(pattern, name):
            return part
    return "optimizer" if UPDATE in around else OTHER


@dataclass(kw_only=True)
class _Visit:
    """An event of a thread. names: of the ranges around it, outermost first. called_us: of those in it."""

    event: Mapping[str, Any]
    names: tuple[str, ...]
    called_us: float = 0.0

    @property
    def end_us(self) -> float:
        return float(self.event["ts"] + self.event["dur"])


def _visits(events: Iterable[Mapping[str, Any]]) -> Iterator[_Visit]:
    by_thread = defaultdict[tuple[Any, Any], list[Mapping[str, Any]]](list)
    for event in events:
        by_thread[event["pid"], event["tid"]].append(event)
    for of_thread in by_thread.values():
        open_visits: list[_Visit] = []
        visits = []
        for event in sorted(of_thread, key=lambda event: (event["ts"], -event["dur"])):
            while open_visits and open_visits[-1].end_us <= event["ts"]:
                open_visits.pop()
            visit = _Visit(event=event, names=tuple(each.event["name"] for each in open_visits))
            if open_visits:
                open_visits[-1].called_us += event["dur"]
            open_visits.append(visit)
            visits.append(visit)
        yield from visits


def _covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    covered_s, until_s = 0.0, float("-inf")
    for begin_s, end_s in sorted(spans):
        covered_s += max(0.0, end_s - max(begin_s, until_s))
        until_s = max(until_s, end_s)
    return covered_s
