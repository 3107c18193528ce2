"""Forty faults of a supervised run: its ledger sums to 100.0% and agrees with the clock of the journal."""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.commands import running, wait_for

from bloomery.events.heartbeat import RankBeat, read_beat
from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.ledger.figures import percentages
from bloomery.operate.ledger.run_ledger import read_ledger
from bloomery.operate.ledger.time_class import TimeClass

FAULTS = int(os.environ.get("BLOOMERY_SOAK_FAULTS", "40"))
KINDS = (signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP)


@pytest.mark.slow
def test_the_ledger_of_forty_faults_sums_and_agrees_with_the_clock(
    train_command: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, rng = RunDirectory(tmp_path / "run"), random.Random(int(os.environ.get("BLOOMERY_SOAK_SEED", "1")))
    command = ["launch", *train_command("train.samples=400_000")[1:], "--nproc", "2", "--supervise"]
    struck: Counter[str] = Counter()
    with running(*command, log=tmp_path / "log") as launcher:
        for number in range(FAULTS):
            victim = _stepping(run, number, rank=rng.randrange(2), steps=rng.randrange(6, 14))
            kind = rng.choice(KINDS)
            os.kill(victim.pid, kind)
            struck[kind.name] += 1
            wait_for(lambda number=number: _count(run, "attempt_end") == number + 1)
        _stepping(run, FAULTS, rank=0, steps=6)
        launcher.process.send_signal(signal.SIGTERM)
        launcher.ended()
    ledger = read_ledger(run)
    assert ledger is not None
    events = [float(event["time"]) for path in run.journals() for event in read_journal(path)]
    clock_s = max(events) - min(events)
    shares = percentages(list(ledger.seconds.values()))
    per_rank_s = [sum(spent.values()) for spent in ledger.ranks.values()]
    figures = {
        "name": "ledger",
        "struck": struck,
        "incidents": Counter(incident.cause for incident in ledger.history.incidents),
        "elapsed_s": ledger.end - ledger.begin,
        "journal_clock_s": clock_s,
        "per_rank_s": per_rank_s,
        "percent": round(sum(shares), 6),
        "unexplained": ledger.seconds.get(TimeClass.UNEXPLAINED, 0.0) / ledger.total_s,
        "effective_time": ledger.effective_time,
        "seconds": {str(kind): round(seconds, 3) for kind, seconds in ledger.seconds.items()},
    }
    with capsys.disabled():
        print(json.dumps(figures))
    assert round(sum(shares), 6) == 100.0
    assert figures["unexplained"] <= 0.005
    # What lies outside the journal's clock: the first start-up, and the launcher's own end.
    first_s = min(events) - ledger.begin
    last_s = ledger.end - max(events)
    for rank_s in per_rank_s:
        assert rank_s - first_s - last_s == pytest.approx(clock_s, rel=0.005)
    assert sum(figures["incidents"].values()) == FAULTS


def _stepping(run: RunDirectory, attempt: int, *, rank: int, steps: int) -> RankBeat:
    """Wait until a rank of an attempt has made so many steps in it, and return its heartbeat."""
    first: list[int] = []

    def is_there() -> bool:
        beat = read_beat(run.heartbeat(rank=rank))
        if beat is None or not beat.attempt.endswith(f"-{attempt}") or not beat.incarnation:
            return False
        first.append(beat.step)
        return beat.step >= first[0] + steps

    wait_for(is_there)
    beat = read_beat(run.heartbeat(rank=rank))
    assert beat is not None
    return beat


def _count(run: RunDirectory, name: str) -> int:
    return sum(event["event"] == name for event in read_journal(run.operations))
