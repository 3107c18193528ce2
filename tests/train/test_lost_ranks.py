"""Whoever waited in vain for another rank says which one it was, from the heartbeats of the run."""

from __future__ import annotations

import datetime
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.real_ranks import train_on_ranks

from bloomery.errors import RankLost, ReportedElsewhere
from bloomery.events.heartbeat import RankActivity, RankBeat, read_beat
from bloomery.events.run_directory import RunDirectory
from bloomery.events.timeouts import wait_until
from bloomery.parallel.axis import Axis
from bloomery.parallel.mesh import Mesh
from bloomery.train import lost_ranks
from bloomery.train.lost_ranks import missing_ranks, naming_lost_ranks

NOW = 1e9
COMPUTING, REPORTING, ENDED = RankActivity.COMPUTING, RankActivity.REPORTING, RankActivity.ENDED
TOLD_WITHIN_S = 90.0


def beat(rank: int, *, step: int = 8, activity: str = REPORTING, **more: Any) -> tuple[int, RankBeat]:
    values = {"time": NOW - 0.5, "since": NOW - 100.0, "host": "node1", "world": 4} | more
    return rank, RankBeat(rank=rank, step=step, activity=activity, **values)


def missing(*beats: tuple[int, RankBeat | None]) -> list[str]:
    return missing_ranks(beats, own=0, began=NOW - 1000.0, now=NOW)


def test_a_rank_that_is_behind_is_named_with_where_it_is_and_since_when() -> None:
    assert missing(beat(0), beat(1), beat(2, activity=COMPUTING), beat(3, step=7)) == [
        "Rank 2 on node1 has been in 'forward and backward' of step 9 for 100 s, while this rank waited in "
        "'reducing the report' of step 9.",
        "Rank 3 on node1 has been in 'reducing the report' of step 8 for 100 s, while this rank waited in "
        "'reducing the report' of step 9.",
    ]
    assert missing(beat(0), beat(1, activity=COMPUTING, since=NOW - 1.0)) == [], "its heartbeat may be old"
    assert missing(beat(0), beat(1, step=9), beat(2), beat(3, activity=RankActivity.EVALUATING)) == []
    assert missing(beat(1, activity=COMPUTING)) == [], "who does not know where it is itself compares nothing"


def test_a_rank_that_is_gone_or_silent_or_has_ended_is_named_before_those_that_wait_for_it() -> None:
    behind = beat(1, activity=COMPUTING)
    silent = beat(2, activity=COMPUTING, time=NOW - 34.0)
    assert missing(beat(0), behind, silent) == [
        "Rank 2 on node1 has written no heartbeat for 34 s; it was in 'forward and backward'."
    ]
    ended = beat(3, activity=ENDED, time=NOW - 50.0, error="ValueError: bad\nmore")
    assert missing(beat(0), behind, ended) == ["Rank 3 on node1 has ended (ValueError: bad)."]
    assert missing(beat(0), beat(3, activity=ENDED)) == ["Rank 3 on node1 has ended."]
    for error in ("RankLost: Another rank of this run is gone.", "ReportedElsewhere: "):
        assert missing(beat(0), beat(3, activity=ENDED, error=error)) == []
    own_host = {"host": os.uname().nodename, "pid": 2**22 + 1, "time": NOW - 2.0}
    assert missing(beat(0), behind, beat(3, **own_host)) == [
        f"Rank 3 on {os.uname().nodename}, process {2**22 + 1}, is gone."
    ]
    assert missing(beat(0), beat(3, time=NOW - 2000.0)) == [], "that is of an earlier start"
    assert missing(beat(0), (1, None)) == []


def test_the_first_rank_reads_all_heartbeats_and_the_others_those_of_their_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[int] = []
    monkeypatch.setattr(lost_ranks, "read_beat", lambda path: read.append(int(path.name.split("-")[1])))
    rundir = RunDirectory(Path("run"))
    axes: Any = {
        "tensor": Axis(index=1, ranks=(4, 5)),
        "data": Axis(ranks=(5, 7)),
        "pipeline": Axis(ranks=(1, 5)),
    }
    lost_ranks._beats(rundir, Mesh(device=torch.device("cpu"), rank=5, world=8, **axes))
    assert read == [1, 4, 5, 7]
    read.clear()
    lost_ranks._beats(rundir, Mesh(device=torch.device("cpu"), rank=0, world=8))
    assert read == list(range(8))


def test_the_message_keeps_its_words_and_names_eight_ranks_at_most(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mesh = Mesh(device=torch.device("cpu"), world=12)
    names = [f"Rank {rank} is gone." for rank in range(1, 11)]
    monkeypatch.setattr(lost_ranks, "missing_ranks", lambda beats, **_: names)
    with pytest.raises(RankLost) as lost, naming_lost_ranks(RunDirectory(tmp_path), mesh):
        raise RankLost("A collective timed out.", remedy="Look.")
    assert lost.value.message == f"A collective timed out. {' '.join(names[:8])} 2 more are missing."
    assert lost.value.remedy == "Look." and isinstance(lost.value.__cause__, RankLost)
    names[:] = []
    monkeypatch.setattr(lost_ranks, "_NOTICED_S", 0.0)
    with pytest.raises(RankLost) as lost, naming_lost_ranks(RunDirectory(tmp_path), mesh):
        raise RankLost("A collective timed out.", remedy="Look.")
    assert lost.value.message == "A collective timed out."
    with pytest.raises(ReportedElsewhere), naming_lost_ranks(RunDirectory(tmp_path), mesh):
        raise ReportedElsewhere
    with pytest.raises(ValueError, match="own"), naming_lost_ranks(RunDirectory(tmp_path), mesh):
        raise ValueError("own")


def _rank_1_stands_still_in_its_third_step(rank: int, *, first: Path) -> None:
    from bloomery.parallel import mesh
    from bloomery.train import loop

    mesh.TIMEOUT = datetime.timedelta(seconds=6)
    real = loop.train_step

    def train_step(parts: Any, micro_batches: Any, state: Any) -> Any:
        if rank == 1 and state.step == 2:
            parts.enter(RankActivity.COMPUTING)
            begun = time.time()

            def has_ended() -> bool:
                other = read_beat(first)
                return other is not None and other.activity == ENDED and other.time > begun

            assert wait_until(has_ended, within_s=TOLD_WITHIN_S, longest_pause_s=0.2)
            raise RankLost("This rank was let go.", remedy="")
        return real(parts, micro_batches, state)

    loop.train_step = train_step


def test_a_run_whose_rank_stands_still_ends_at_the_deadline_and_names_it(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    plant = partial(_rank_1_stands_still_in_its_third_step, first=RunDirectory(run).heartbeat(rank=0))
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(120):
        (texts / f"{number}.txt").write_text("".join(str(digit) for digit in range(number)))
    settings = (f"data.sources={texts}", "optim.name=adamw")
    first, second = train_on_ranks(2, run, *settings, plant=plant)
    assert "Another rank of this run is gone." in first
    assert f"Rank 1 on {os.uname().nodename} has been in 'forward and backward' of step 3 for " in first
    assert "of step 3 for" in first and "This rank was let go." in second
