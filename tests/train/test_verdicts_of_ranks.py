"""Ranks that see different things judge alike: other clocks, signals, losses and speed on each."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.train.real_ranks import train_on_ranks

from bloomery.events import heartbeat
from bloomery.events.heartbeat import RankActivity
from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory
from bloomery.train import loop, metrics, step

SLOW, SIGNALLED, NAN, JUMPS = range(42, 50), 12, 15, range(28, 37)
STEPS = 50


class _Clock:
    """A clock that the test moves. Ranks have clocks of different speed."""

    def __init__(self, speed: float) -> None:
        self.speed, self.now = speed, 1e6 * speed

    def pass_(self, seconds: float) -> None:
        self.now += self.speed * seconds


def _with(**clocks: Any) -> SimpleNamespace:
    """Return what stands for the module `time`, with other clocks."""
    return SimpleNamespace(**{**vars(time), **clocks})


def see_different_things(record: Path, jumping: int, rank: int) -> None:
    """Let rank 1 be slow, get a signal and a NaN; each rank has a clock and a journal of its own.

    jumping: the rank whose losses are high for a while.
    """
    real_step, real_judge, random = loop.train_step, loop.judge, torch.Generator().manual_seed(rank)
    clock, work = _Clock(speed=3.0 if rank else 1.0), _Clock(speed=1.0)
    for module in (metrics, step):
        module.time = _with(perf_counter=lambda: clock.now)
    heartbeat.time = _with(monotonic=lambda: work.now)

    def train_step(parts: Any, micro_batches: Sequence[Any], state: Any) -> Any:
        number, result = state.step + 1, real_step(parts, micro_batches, state)
        result.cross_entropy.mul_(1.0 + 0.02 * torch.rand((), generator=random))
        # All ranks take as long as the slowest, which alone works that long.
        clock.pass_(0.6 if number in SLOW else 0.1)
        parts.enter(RankActivity.COMPUTING)
        work.pass_(0.6 if number in SLOW and rank == 1 else 0.1)
        parts.enter(RankActivity.UPDATING)
        if rank == 1:
            if number == SIGNALLED:
                os.kill(os.getpid(), signal.SIGUSR1)
            if number == NAN:
                result.cross_entropy.fill_(torch.nan)
        if rank == jumping and number in JUMPS:
            result.cross_entropy.mul_(4.0)
        return result

    def judge(guards: Any, report: Any) -> Any:
        verdict = real_judge(guards, report)
        with (record / f"{rank}.jsonl").open("a") as file:
            file.write(
                json.dumps([report.step, repr(verdict), repr((guards.findings, report.inner_sizes))]) + "\n"
            )
        return verdict

    loop.train_step, loop.judge = train_step, judge


@pytest.mark.parametrize(
    ("layout", "jumping"), [("parallel.data=2", 1), ("parallel.tensor=2", 0), ("parallel.pipeline=2", 1)]
)
def test_ranks_with_other_clocks_signals_and_losses_come_to_the_same_verdicts(
    corpus: Path, tmp_path: Path, layout: str, jumping: int
) -> None:
    record, path = tmp_path / "record", tmp_path / "run"
    record.mkdir()
    settings = (
        f"data.sources={corpus}",
        layout,
        "optim.name=adamw",
        "train.samples=0",
        f"train.steps={STEPS}",
        "train.ramp_up=[]",
        "checkpoint.every_steps=0",
        "evaluate.every_steps=0",
        "guard.growth_steps=20",
    )
    plant = partial(see_different_things, record, jumping)  # the first tensor rank reports losses
    assert train_on_ranks(2, path, *settings, plant=plant) == ["the samples are done"] * 2
    ranks = [(record / f"{rank}.jsonl").read_text().splitlines() for rank in range(2)]
    assert len(ranks[0]) == STEPS and ranks[0] == ranks[1]
    told = {step: f"{verdict} {findings}" for step, verdict, findings in map(json.loads, ranks[0])}
    assert any("Save(" in told[step] for step in (SIGNALLED, SIGNALLED + 1)) and "not finite" in told[NAN]
    assert any("spike" in told[step] for step in JUMPS), [told[step] for step in JUMPS]
    slow = [(step, text) for step, text in told.items() if "throughput" in text]
    assert slow and slow[0][0] in range(SLOW.start + 3, SLOW.start + 7), "three slow reports, one step late"
    assert [step for step, text in told.items() if "'logit'" in text] == [20, 40], "sizes are measured"
    journals = [list(read_journal(RunDirectory(path).journal(rank=rank))) for rank in range(2)]
    clocks = [[r["seconds"] for r in journal if r["event"] == "step"] for journal in journals]
    assert clocks[1] == pytest.approx([3.0 * seconds for seconds in clocks[0]])
    (named,) = (r for r in journals[0] if r["event"] == "slow_ranks")
    ((rank, _, seconds),) = named["slow"]
    assert (rank, seconds, named["usual_s"]) == (1, pytest.approx(0.6), pytest.approx(0.1))
