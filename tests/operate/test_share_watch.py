"""What the ranks of one launcher hear of the job, and what the job hears of them."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from bloomery.errors import StorageError
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.decision import FAILURE, HANG, SILENT, Decision
from bloomery.operate.departure import Departure
from bloomery.operate.job_board import JobBoard, LauncherCard
from bloomery.operate.process_tree import sees_kernel_pids
from bloomery.operate.share_log import ShareLog
from bloomery.operate.share_watch import ShareWatch


def board(place: Path, host: str) -> JobBoard:
    return JobBoard(place / "board", LauncherCard(host=host, address="127.0.0.1", ranks=1, pid=1), nodes=2)


def watch(place: Path, *, host: str = "n1", departure: Departure | None = None) -> ShareWatch:
    share = ShareLog(RunDirectory(place), ranks=range(1), host=host)
    decision = Decision(number=4, hosts=("n1", "n2"), ranks=1)
    return ShareWatch(board(place, host), decision, share, name="x-4", departure=departure)


def test_nothing_ends_ranks_of_which_nobody_said_anything(tmp_path: Path) -> None:
    alone = watch(tmp_path)
    alone.poll()
    assert (alone.why_to_stop(), alone.why_to_end(), alone.failure(), alone.asked) == ("", "", "", 0)


@pytest.mark.parametrize("kind", [HANG, SILENT])
def test_a_hang_that_the_leader_found_ends_the_ranks_of_every_node(kind: str, tmp_path: Path) -> None:
    ours, theirs = watch(tmp_path), watch(tmp_path, host="n2")
    board(tmp_path, "n1").put("ending-4", {"kind": kind, "why": "no rank has moved"})
    for one in (ours, theirs):
        one.poll()
        assert (one.why_to_end(), one.failure()) == ("no rank has moved", "")


def test_the_failure_of_a_rank_ends_those_of_other_nodes_and_the_first_report_counts(tmp_path: Path) -> None:
    ours, theirs = watch(tmp_path), watch(tmp_path, host="n2")
    ours.report_failure("rank 0 was ended by SIGKILL")
    theirs.report_failure("rank 1 lost rank 0")
    for one in (ours, theirs):
        one.poll()
        assert one.why_to_end() == ""
    assert ours.failure() == "", "its own launcher ends them"
    assert theirs.failure() == "rank 0 was ended by SIGKILL"
    ending = board(tmp_path, "n1").get("ending-4")
    assert ending is not None and (ending["kind"], ending["host"]) == (FAILURE, "n1")


def test_ranks_end_where_the_job_has_gone_on_without_their_node(tmp_path: Path) -> None:
    late = watch(tmp_path)
    for number, why in ((4, ""), (5, "the other launchers have gone on without this node")):
        board(tmp_path, "n2").put(f"decision-{number:06d}", {})
        late.poll()
        assert late.why_to_end() == why


def test_a_signal_asks_the_launcher_to_end_and_the_schedulers_warning_asks_for_the_end_of_the_job(
    tmp_path: Path,
) -> None:
    departure = Departure(
        RunDirectory(tmp_path), end_of_job=lambda: None, notices=(), ahead_s=0.0, unmeasured_s=300.0
    )
    watched = watch(tmp_path, departure=departure)
    watched.signalled(signal.SIGUSR1)
    assert watched.asked == 0 and "signalled" in departure.check()
    watched.signalled(signal.SIGTERM)
    assert watched.asked == signal.SIGTERM
    departure.reason = "maintenance: soon"
    assert watched.why_to_stop() == "maintenance: soon"
    without = watch(tmp_path)
    without.signalled(signal.SIGUSR1)
    assert without.asked == 0


def test_each_look_notes_what_the_ranks_have_started(tmp_path: Path) -> None:
    share = ShareLog(RunDirectory(tmp_path), ranks=range(1), host="n1")
    watched = ShareWatch(board(tmp_path, "n1"), Decision(number=4), share, name="x-4")
    with subprocess.Popen(
        ["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdout is not None
        sleeper = int(rank.stdout.readline())
        try:
            watched.started({0: rank.pid})
            watched.poll()
        finally:
            os.kill(sleeper, signal.SIGTERM)
    watched.ended({0: 143}, killed=(0,))
    (end,) = share.ends(attempt="x-4")
    assert (end.status, end.is_killed_here, end.pid) == (143, True, rank.pid)
    assert end.children == ((sleeper,) if sees_kernel_pids() else None)


def test_what_the_ranks_have_started_is_looked_up_once_a_second_and_not_at_each_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, noted, now = watch(tmp_path), list[float](), [50.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(ShareLog, "note_children", lambda share: noted.append(now[0]))
    for _ in range(10):
        watched.poll()
        now[0] += 0.25
    assert noted == [50.0, 51.0, 52.0]


def test_a_report_that_the_storage_refuses_ends_no_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(board: JobBoard, name: str, record: object) -> None:
        raise StorageError("no space", remedy="Free some.")

    monkeypatch.setattr(JobBoard, "put", refused)
    one = watch(tmp_path)
    one.report_failure("rank 0 was ended by SIGKILL")
    one.poll()
    assert (one.why_to_end(), one.failure()) == ("", "")


def test_an_end_that_was_heard_of_stays_heard_though_the_board_is_read_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = watch(tmp_path)
    board(tmp_path, "n2").put("ending-4", {"kind": HANG, "why": "no rank has moved", "host": "n2"})
    one.poll()
    monkeypatch.setattr(JobBoard, "get", lambda board, name: None)
    one.poll()
    assert one.why_to_end() == "no rank has moved"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_each_signal_that_asks_a_launcher_to_end_is_kept_and_a_warning_is_none(
    number: signal.Signals, tmp_path: Path
) -> None:
    asked = watch(tmp_path)
    asked.signalled(signal.SIGUSR1)
    assert asked.asked == 0
    asked.signalled(number)
    assert asked.asked == number


def test_a_line_that_the_log_of_a_rank_did_not_take_is_told_at_its_end(tmp_path: Path) -> None:
    share = ShareLog(RunDirectory(tmp_path), ranks=range(2, 4), host="n1")
    watched = ShareWatch(board(tmp_path, "n1"), Decision(number=4), share, name="x-4")
    watched.unlogged(3, "OSError: [Errno 28] No space left on device\n")
    watched.ended({2: 3, 3: 1}, killed=())
    assert ["No space left" in end.log for end in share.ends(attempt="x-4")] == [False, True]
    assert watched.name == "x-4"
