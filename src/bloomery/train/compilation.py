"""Decides before the first step whether it is compiled, and says why."""

from __future__ import annotations

import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

CPU_BREAK_EVEN_FLOPS = 2e13
GPU_BREAK_EVEN_FLOPS = 2e16
"""A compilation takes 15 to 130 s and saves about a third of a step, so it never pays below this much
work.
"""


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """The decision and its reason, as a person would say it."""

    on: bool
    why: str


def decide(choice: str, *, device: torch.device, run_flops: float) -> Compilation:
    """Resolve train.compile from the recipe and what is installed, so that a resume decides alike."""
    if choice == "off":
        return Compilation(on=False, why="train.compile = off")
    lacking = lacking_toolchain()
    if lacking:
        return Compilation(on=False, why=f"{lacking}: training eagerly, which is slower")
    if choice == "on":
        return Compilation(on=True, why="train.compile = on")
    threshold = GPU_BREAK_EVEN_FLOPS if device.type == "cuda" else CPU_BREAK_EVEN_FLOPS
    if run_flops < threshold:
        return Compilation(on=False, why="the run is shorter than a compilation would pay for")
    return Compilation(on=True, why="the run is long enough to pay for it")


def lacking_toolchain() -> str:
    """Return what torch.compile would miss on this machine, as a phrase; '' if nothing."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        return "no C++ compiler (install g++)"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        return f"no Python headers at {header} (install python3-dev)"
    return ""
