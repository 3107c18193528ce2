"""Attempts of a job of several launchers: how each goes on, and whole ones of threads in place of nodes."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from tests.operate.test_group import boards

from bloomery import durable
from bloomery.errors import StorageError
from bloomery.events.heartbeat import RankActivity, RankBeat
from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate import group_supervisor as group_module
from bloomery.operate.decision import HANG, SILENT, Decision, ShareResult, evidence_of
from bloomery.operate.diagnosis import GAVE_UP, Cause, Diagnosis
from bloomery.operate.failure_evidence import RankEnd
from bloomery.operate.group_supervisor import GroupSize, GroupSupervisor
from bloomery.operate.job_board import JobBoard
from bloomery.operate.share_watch import ShareWatch
from bloomery.operate.standstill import StandstillLimits
from bloomery.operate.supervise import JobReactions, RestartBudget

XID = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run").create()


def told(run: RunDirectory, *names: str) -> list[dict]:
    return [event for event in read_journal(run.operations) if event["event"] in names]


class Group:
    """The launcher of n1, which leads n2 and, as a spare, n3; and what it said, decided and reacted to."""

    def __init__(self, run: RunDirectory, *, budget: RestartBudget | None = None) -> None:
        self.board, *_ = boards(run.path / "board", "n1", "n2", "n3")
        self.said, self.bad, self.repeating = list[str](), list[Diagnosis](), list[Diagnosis]()
        self.leader = GroupSupervisor(
            run,
            self.board,
            job="x",
            size=GroupSize(nodes=3, needed=2, ranks=1),
            say=self.said.append,
            reactions=JobReactions(on_bad_node=self.bad.append, on_repeating=self.repeating.append),
            budget=budget,
        )

    def concludes(self, decision: Decision, *results: ShareResult, ending: dict | None = None) -> Decision:
        self.leader._conclude(decision, {result.host: result for result in results}, ending)
        record = self.board.get(f"decision-{decision.number + 1:06d}")
        assert record is not None
        return Decision.from_json(record)


FIRST = Decision(number=1, hosts=("n1", "n2"), ranks=1)


def result(host: str, status: int, **more: object) -> ShareResult:
    end = RankEnd(rank=int(host[1]) - 1, host=host, status=status)
    return ShareResult(host=host, status=status, ends=(end,), **more)  # type: ignore[arg-type]


def test_a_node_with_a_bad_gpu_is_left_out_and_a_spare_takes_its_place(run: RunDirectory) -> None:
    group = Group(run)
    following = group.concludes(FIRST, result("n1", 3), result("n2", 1, kernel=(XID,)))
    assert (following.number, following.hosts, following.bad) == (2, ("n1", "n3"), ("n2",))
    assert (following.in_a_row, following.in_all, following.status) == (1, 1, None)
    assert [(diagnosis.cause, diagnosis.culprit.host) for diagnosis in group.bad] == [(Cause.BAD_GPU, "n2")]
    (diagnosis,) = told(run, "diagnosis")
    assert (diagnosis["attempt"], diagnosis["cause"], diagnosis["gives_up"]) == ("x-1", "bad GPU", "")
    (attempt,) = told(run, "attempt")
    assert (attempt["attempt"], attempt["ranks"], attempt["hosts"]) == ("x-2", 2, ["n1", "n3"])
    later = group.concludes(following, result("n1", 1, kernel=(XID,)), result("n3", 3))
    assert later.why.endswith("1 of 2 nodes are left in this job") and later.status == 67


def test_a_rank_that_was_killed_is_started_again_where_it_was_until_the_budget_is_spent(
    run: RunDirectory,
) -> None:
    group = Group(run, budget=RestartBudget(without_progress=2, in_all=9))
    decision = FIRST
    for restarts in (1, 2):
        decision = group.concludes(decision, result("n1", 3), result("n2", -9))
        assert (decision.hosts, decision.bad, decision.in_a_row) == (("n1", "n2"), (), restarts)
    end = group.concludes(decision, result("n1", 3), result("n2", -9))
    assert end.status == GAVE_UP and "2 restarts in a row" in end.why and end.hosts == ()
    assert (group.bad, group.repeating) == ([], []), "the same start may succeed in another job"


def test_every_launcher_that_told_no_result_is_left_out_though_one_of_them_is_blamed(
    run: RunDirectory,
) -> None:
    group = Group(run)
    end = group.concludes(replace(FIRST, hosts=("n1", "n2", "n3")), result("n1", 3))
    assert end.why.endswith("1 of 2 nodes are left in this job") and end.status == 67
    assert [diagnosis.culprit.host for diagnosis in group.bad] == ["n2"]


def test_a_failure_that_would_repeat_ends_the_job_and_stops_the_queue(run: RunDirectory) -> None:
    group, is_decided = Group(run), list[bool]()
    group.leader._reactions = JobReactions(
        on_bad_node=group.bad.append,
        on_repeating=lambda why: (
            group.repeating.append(why),
            is_decided.append(group.board.has("decision-000002")),
        ),
    )
    erred = replace(result("n1", 1).ends[0], error="KeyError: 'loss'", log="KeyError: 'loss'")
    end = group.concludes(FIRST, ShareResult(host="n1", status=1, ends=(erred,)), result("n2", 3))
    assert (end.status, end.why) == (65, "not started again: the same start would fail again")
    assert [diagnosis.cause for diagnosis in group.repeating] == [Cause.EXCEPTION]
    assert is_decided == [False], "its launchers end with the decision, and the next job starts"


def test_an_attempt_that_is_ending_is_ended_once_and_not_searched_for_a_hang(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(run)
    leader, board, concluded = group.leader, group.board, list[list[str]]()
    lost: set[str] = set()
    looked: list[int] = []
    monkeypatch.setattr(board, "is_alive", lambda host: host not in lost)
    monkeypatch.setattr(leader, "_look_for_hang", lambda decision: looked.append(decision.number))
    monkeypatch.setattr(
        leader, "_conclude", lambda decision, results, ending: concluded.append(sorted(results))
    )
    leader._adopt(FIRST)
    leader._lead()
    assert looked == [1] and concluded == []
    board.put("ending-1", {"kind": HANG, "why": "it hung"})
    leader._lead()
    lost.add("n2")
    leader._lead()
    assert (looked, concluded, group.said) == ([1], [], []), "n1 is there, and its ranks have not ended"
    board.put("result-1-n1", result("n1", 3).to_json())
    leader._lead()
    assert (looked, concluded, group.said) == ([1], [["n1"]], []), "nobody waits for a launcher that is lost"


def test_a_launcher_that_does_not_lead_decides_nothing(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, led = Group(run).leader, list[bool]()
    monkeypatch.setattr(leader, "_lead", lambda: led.append(True))
    for leads in (False, True):
        monkeypatch.setattr(leader._board, "leads", lambda leads=leads: leads)
        leader._tick()
    assert led == [True]


def test_a_launcher_that_falls_silent_is_a_lost_node(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(run)
    group.leader._adopt(FIRST)
    group.board.put("result-1-n1", result("n1", 3).to_json())
    group.leader._lead()
    assert group.board.get("ending-1") is None, "it lives"
    monkeypatch.setattr(group.board, "is_alive", lambda host: host != "n2")
    monkeypatch.setattr(group.board, "living", lambda: ["n1", "n3"])
    for _ in range(2):
        group.leader._lead()
    ending = group.board.get("ending-1")
    assert ending is not None and ending["kind"] == SILENT and "launcher on n2" in ending["why"]
    (diagnosis,) = told(run, "diagnosis")
    assert (diagnosis["cause"], diagnosis["culprit"]["host"]) == ("node lost", "n2")
    (attempt,) = told(run, "attempt")
    assert attempt["hosts"] == ["n1", "n3"]


def test_what_led_to_a_decision_is_told_once_however_often_the_disk_refuses_it(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, create, refusals = Group(run), durable.create, [errno.ENOSPC] * 3
    group.leader._adopt(FIRST)
    for host, status, kernel in (("n1", 3, ()), ("n2", 1, (XID,))):
        group.board.put(f"result-1-{host}", result(host, status, kernel=kernel).to_json())

    def refused(path: Path, content: str) -> None:
        if refusals:
            raise OSError(refusals.pop(), "No space left on device")
        create(path, content)

    monkeypatch.setattr(durable, "create", refused)
    for _ in range(3):
        with pytest.raises(StorageError):
            group.leader._lead()
    group.leader._lead()
    following = group.leader._decision
    assert following is not None and (following.number, following.hosts) == (2, ("n1", "n3"))
    names = [event["event"] for event in told(run, "attempt_end", "diagnosis", "attempt")]
    assert names == ["attempt_end", "diagnosis", "attempt"] and len(group.bad) == 1 and len(group.said) == 2


def test_a_node_is_late_with_its_result_after_45_seconds_in_which_the_leader_watched(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launchers were frozen together while the ranks of an attempt ended: no node is bad for that."""
    group, clock = Group(run), [1000.0]
    monkeypatch.setattr(group_module.time, "monotonic", lambda: clock[-1])
    group.leader._adopt(FIRST)
    group.board.put("ending-1", {"kind": HANG, "why": "it hung"})
    group.board.put("result-1-n1", result("n1", 143).to_json())
    monkeypatch.setattr(group.board, "is_alive", lambda host: True)
    monkeypatch.setattr(group.board, "living", lambda: ["n1", "n2", "n3"])
    group.leader._lead()
    for later_s in (3600.0, *[1.0] * 42):
        clock.append(clock[-1] + later_s)
        group.leader._lead()
    assert group.leader._decision == FIRST, "its result may still come"
    for _ in range(4):
        clock.append(clock[-1] + 1.0)
        group.leader._lead()
    assert group.leader._decision is not None and group.leader._decision.bad == ("n2",)


def test_ranks_that_stand_still_are_found_by_a_look_a_second(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, clock = Group(run), [1000.0]
    monkeypatch.setattr(group_module.time, "monotonic", lambda: clock[-1])
    monkeypatch.setattr(group.leader, "_all_stacks", lambda decision: {})
    group.leader._adopt(FIRST)
    for rank in (0, 1):
        beat = RankBeat(rank=rank, world=2, pid=7, activity=RankActivity.COMPUTING, attempt="x-1")
        run.heartbeat(rank=rank).parent.mkdir(exist_ok=True)
        run.heartbeat(rank=rank).write_text(json.dumps(asdict(beat)))
    looks: list[float] = []
    read = group.leader._beats
    monkeypatch.setattr(group.leader, "_beats", lambda *more: looks.append(clock[-1]) or read(*more))
    for now in (1000.0, 1000.5, 1000.9, 1001.0):
        clock.append(now)
        group.leader._look_for_hang(FIRST)
    assert looks == [1000.0, 1001.0] and group.board.get("ending-1") is None
    clock.append(9000.0)
    group.leader._look_for_hang(FIRST)
    assert group.board.get("ending-1") is None, "the leader itself stood still"
    while group.board.get("ending-1") is None:
        clock.append(clock[-1] + 1.0)
        group.leader._look_for_hang(FIRST)
    ending = group.board.get("ending-1")
    assert ending is not None and ending["kind"] == HANG and "no rank has moved for 7 s" in ending["why"]
    assert clock[-1] <= 9000.0 + StandstillLimits().silence_s
    hang = evidence_of(FIRST, {host: result(host, 143) for host in FIRST.hosts}, ending=ending).hang
    assert hang is not None and hang.summary == ending["finding"]["summary"]


def test_the_fullest_shared_memory_of_all_nodes_is_the_evidence() -> None:
    shares = {"n1": (0.5, 60.0), "n2": (0.0, 0.0), "n3": (0.9, 70.0)}
    results = {host: result(host, 1, shm_free=free, shm_free_gib=gib) for host, (free, gib) in shares.items()}
    evidence = evidence_of(FIRST, results, ending=None)
    assert (evidence.shm_free, evidence.shm_free_gib) == (0.0, 0.0)
    unknown = evidence_of(FIRST, {"n1": result("n1", 1)}, ending=None)
    assert (unknown.shm_free, unknown.shm_free_gib) == (None, None)


def launch(
    run: RunDirectory,
    hosts: str,
    attempt: Callable[[str, Decision, ShareWatch], int],
    monkeypatch: pytest.MonkeyPatch,
    *,
    needed: int,
    **more: float,
) -> tuple[list[int], list[str]]:
    """Run a launcher for each host at once, and return their exit statuses, and what they said."""
    monkeypatch.setattr(group_module, "_TICK_S", 0.01)
    said: list[str] = []

    def one(board) -> int:
        board.interval_s = 0.02
        size = GroupSize(nodes=len(hosts.split()), needed=needed, ranks=1)
        group = GroupSupervisor(run, board, job="x", size=size, say=said.append, **more)
        return group.run(lambda decision, watch: attempt(board.host, decision, watch))

    everyone = boards(run.path / "board", *hosts.split())
    with ThreadPoolExecutor(len(everyone)) as pool:
        return list(pool.map(one, everyone)), said


def test_launchers_start_again_together_and_end_with_one_status_while_a_spare_waits(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, int]] = []

    def attempt(host: str, decision: Decision, watch: ShareWatch) -> int:
        (rank,) = decision.share(host)
        ran.append((host, decision.number))
        status = 0 if decision.number == 2 else -9 if host == "n2" else 3
        watch.started({rank: os.getpid()})
        watch.ended({rank: status}, killed=())
        return status

    statuses, said = launch(run, "n1 n2 n3", attempt, monkeypatch, needed=2)
    assert statuses == [0, 0, 0]
    assert sorted(ran) == [("n1", 1), ("n1", 2), ("n2", 1), ("n2", 2)]
    names = ("attempt", "attempt_end", "diagnosis")
    assert [(event["event"], event["attempt"]) for event in told(run, *names)] == [
        ("attempt", "x-1"),
        ("attempt_end", "x-1"),
        ("diagnosis", "x-1"),
        ("attempt", "x-2"),
        ("attempt_end", "x-2"),
    ]
    assert told(run, "diagnosis")[0]["culprit"]["rank"] == 1
    assert any("starting again" in line for line in said)


def test_nodes_that_do_not_come_in_time_end_the_job(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses, said = launch(run, "n1", lambda *_: 0, monkeypatch, needed=2, join_timeout_s=0.05)
    assert statuses == [3] and "1 of 2 nodes did not come" in said[0] and told(run, "attempt") == []


def test_an_error_of_the_thread_that_leads_is_raised_by_the_launcher(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GroupSupervisor, "_lead", lambda self: [][0])
    with pytest.raises(IndexError):
        launch(run, "n1", lambda *_: 0, monkeypatch, needed=1)


def test_a_signal_that_asked_for_the_end_stays_known_and_a_start_without_a_checkpoint_is_at_step_0(
    run: RunDirectory,
) -> None:
    group = Group(run)
    asked = iter((15, 0))

    def attempt(decision: Decision, watch: ShareWatch) -> int:
        watch.asked = next(asked)
        return 143

    for number in (1, 2):
        group.leader._run_share(replace(FIRST, number=number), attempt)
    card = json.loads((run.path / "board" / "n1.json").read_text())
    assert card["asked"] == 15
    group.leader._attempt(Decision(number=0), ["n1", "n2"])
    assert [event["step"] for event in told(run, "attempt")] == [0]


def test_the_wait_for_results_begins_anew_with_each_attempt(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, now = Group(run), [1000.0]
    monkeypatch.setattr(group.board, "now", lambda: now[0])
    monkeypatch.setattr(group.board, "is_alive", lambda host: True)
    concluded: list[tuple[float, int]] = []
    conclude = lambda decision, results, ending: concluded.append((now[0], decision.number))  # noqa: E731
    monkeypatch.setattr(group.leader, "_conclude", conclude)
    for number, first in ((1, 1000.0), (2, 2000.0)):
        group.leader._adopt(replace(FIRST, number=number))
        group.board.put(f"ending-{number}", {"kind": HANG, "why": "it hung"})
        group.board.put(f"result-{number}-n1", result("n1", 143).to_json())
        for now[0] in (first, first + 45.0, first + 45.5):
            group.leader._lead()
    assert concluded == [(1045.5, 1), (2045.5, 2)]


def test_who_asked_for_the_end_of_a_job_is_told_before_how_its_ranks_ended(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, asked, put = Group(run), list[int](), JobBoard.put

    def noted(board: JobBoard, name: str, record: dict) -> bool:
        asked.append(json.loads((run.path / "board" / "n1.json").read_text())["asked"])
        return put(board, name, record)

    monkeypatch.setattr(JobBoard, "put", noted)
    group.leader._asked = 15
    group.leader._report(1, result("n1", 143))
    assert asked == [15], "else the leader takes it for a failure"


def test_launchers_of_several_nodes_lock_the_records_that_they_write_together(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: list[int] = []
    monkeypatch.setattr(durable, "wait_for_lock", lambda file, *, timeout_s: bool(locked.append(file)))
    group = Group(run)
    group.leader._attempt(Decision(number=0), ["n1", "n2"])
    started = len(locked)
    group.concludes(FIRST, result("n1", 143), result("n2", 143))
    assert 0 < started < len(locked)


def test_a_job_that_has_ended_well_is_led_no_further(run: RunDirectory) -> None:
    group = Group(run)
    group.leader._adopt(Decision(number=2, status=0))
    group.leader._lead()
    assert group.board.get("decision-000003") is None and told(run, "attempt", "attempt_end") == []
