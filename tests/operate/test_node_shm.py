"""/dev/shm of the nodes of a run: what heartbeats tell of it, and who is told when it is nearly full."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from bloomery.cli import main
from bloomery.events.heartbeat import Heartbeat, RankActivity, RankBeat, read_beat
from bloomery.events.run_directory import RunDirectory
from bloomery.events.shared_memory import shared_memory_space
from bloomery.operate.node_shm import NodeShm, shm_of_nodes, shm_warning
from bloomery.operate.run_state import RunObservation
from bloomery.operate.standstill import RankObservation
from bloomery.operate.watch.observe import RunObserver

NOW = 1e9


def observed(*beats: RankBeat, ages_s: tuple[float, ...] = (), died: tuple[int, ...] = ()) -> RunObservation:
    ages_s = ages_s or (1.0,) * len(beats)
    ranks = {
        number: RankObservation(beat=beat, written_s=NOW - age_s, moved_s=NOW - age_s)
        for number, (beat, age_s) in enumerate(zip(beats, ages_s, strict=True))
    }
    return RunObservation(ranks=ranks, now=NOW, died=died)


def of(host: str, free: int, total: int = 100, **more: object) -> RankBeat:
    return RankBeat(host=host, shm_free_bytes=free, shm_bytes=total, **more)  # type: ignore[arg-type]


def node(host: str, free: int, total: int = 100) -> NodeShm:
    return NodeShm(host=host, free_bytes=free, total_bytes=total)


def test_a_heartbeat_tells_of_the_space_that_its_rank_sees(tmp_path: Path) -> None:
    Heartbeat(tmp_path / "beat").write()
    beat = read_beat(tmp_path / "beat")
    assert beat is not None and beat.shm_bytes == shared_memory_space()[1]
    assert 0 <= beat.shm_free_bytes <= beat.shm_bytes


def test_a_heartbeat_of_an_earlier_version_tells_of_no_space(tmp_path: Path) -> None:
    record = {name: value for name, value in asdict(of("n1", 5)).items() if not name.startswith("shm")}
    (tmp_path / "beat").write_text(json.dumps(record))
    beat = read_beat(tmp_path / "beat")
    assert beat == RankBeat(host="n1") and shm_of_nodes(observed(beat)) == ()


def test_each_node_counts_once_by_the_rank_that_sees_the_least_in_the_order_of_nodes() -> None:
    ranks = [of("n10", 50), of("n2", 30), of("n2", 9), of("n2", 5, total=20), of("n10", 60), of("", 1)]
    assert shm_of_nodes(observed(*ranks)) == (node("n2", 9), node("n10", 50))


def test_ranks_that_ended_died_or_are_silent_tell_of_no_node() -> None:
    ranks = [of("n1", 1, activity=RankActivity.ENDED), of("n2", 1), of("n3", 1), of("n4", 1), of("n5", 1)]
    seen = observed(*ranks, ages_s=(1.0, 1.0, 121.0, 120.0, 1.0), died=(1,))
    assert shm_of_nodes(seen) == (node("n4", 1), node("n5", 1))
    rare = [of("n1", 1, world=10_000), of("n2", 1, world=10_000)]  # which write every 100 s
    assert shm_of_nodes(observed(*rare, ages_s=(299.0, 301.0))) == (node("n1", 1),)


def test_the_fullest_nodes_are_named_up_to_four_of_them() -> None:
    assert shm_warning([node("n1", 10), node("n2", 99)]) == ""
    gib = 1 << 30
    assert shm_warning([node("n1", 50), node("n2", gib, 16 * gib)]) == (
        "/dev/shm is nearly full on n2 (94% used, 1.00 of 16.00 GiB free): "
        "remove there what earlier jobs left, or enlarge it"
    )
    many = shm_warning([node(f"n{number}", 1) for number in range(9)])
    assert "n3 (99% used" in many and "free) and 5 more: remove" in many and "n4" not in many


def test_a_run_with_a_node_whose_space_is_nearly_used_up_is_told_by_status_and_by_watch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, now = RunDirectory(tmp_path / "mine").create(), time.time()
    gib = 1 << 30
    for rank, (host, free) in enumerate((("n1", 6 * gib), ("n2", gib // 2))):
        beat = of(host, free, 8 * gib, rank=rank, world=2, time=now, since=now, activity="evaluating")
        run.heartbeat(rank=rank).write_text(json.dumps(asdict(beat)))
    assert main(["status", str(run.path), "--nodes"]) == 0
    shown = capsys.readouterr().out
    assert "/dev/shm is nearly full on n2 (94% used, 0.50 of 8.00 GiB free): remove" in shown
    rows = [line.split() for line in shown.splitlines() if line.startswith(("n1", "n2"))]
    assert [row[:5] for row in rows] == [
        ["n1", "mine", "6.00", "8.00", "25%"],
        ["n2", "mine", "0.50", "8.00", "94%"],
    ]
    main(["status", str(run.path), "--json"])
    (told,) = json.loads(capsys.readouterr().out)["runs"]
    assert told["shm"][1] == {"host": "n2", "free_bytes": gib // 2, "total_bytes": 8 * gib}
    assert main(["watch", str(run.path), "--once"]) == 1
    assert "[mine] new: node shm: /dev/shm is nearly full on n2" in capsys.readouterr().out


@pytest.mark.parametrize("is_here", [True, False])
def test_a_watcher_tells_of_its_own_machine_where_no_rank_does(tmp_path: Path, is_here: bool) -> None:
    run, now = RunDirectory(tmp_path / "mine").create(), time.time()
    host = os.uname().nodename if is_here else "elsewhere"
    run.heartbeat().write_text(json.dumps(asdict(of(host, 60, time=now, since=now, activity="evaluating"))))
    seen = RunObserver(run).observe(now=now)
    assert seen.shm == (node(host, 60),) and (seen.shm_used is None) is is_here
