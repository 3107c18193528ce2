"""What the leader of several launchers decides when they come together, and when an attempt ends."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.operate.test_group import boards
from tests.operate.test_group_attempts import FIRST, XID, Group, launch, result, told
from tests.operate.test_wrong_bits import faulty, words_of_the_guard

from bloomery.errors import StorageError
from bloomery.events.heartbeat import RankActivity, RankBeat
from bloomery.events.run_directory import RunDirectory
from bloomery.operate import group_supervisor as group_module
from bloomery.operate import share_log
from bloomery.operate.decision import HANG, Decision, ShareResult, evidence_of
from bloomery.operate.diagnosis import GAVE_UP, REMEDIES, Cause
from bloomery.operate.failure_evidence import RankEnd
from bloomery.operate.group_supervisor import GroupSize, GroupSupervisor
from bloomery.operate.hang import HangFinding
from bloomery.operate.job_board import JobBoard, LauncherCard
from bloomery.operate.newest_checkpoint import NO_CHECKPOINT, NewestCheckpoint
from bloomery.operate.node_facts import NodeFacts
from bloomery.operate.share_watch import ShareWatch
from bloomery.operate.stacks import RankStack
from bloomery.operate.supervise import RestartBudget

SAVING = str(RankActivity.SAVING)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run").create()


@pytest.fixture
def newest(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The step of the newest checkpoint; what was known of it before is added when it is asked for."""
    steps = [-1]

    def asked(rundir: RunDirectory, *, known: NewestCheckpoint = NO_CHECKPOINT) -> NewestCheckpoint:
        steps.append(known.step)
        return NewestCheckpoint(step=steps[0])

    monkeypatch.setattr(group_module, "newest_checkpoint", asked)
    return steps


def of_boards(run: RunDirectory, hosts: str, **more) -> tuple[GroupSupervisor, list]:
    made = boards(run.path / "board", *hosts.split())
    return GroupSupervisor(run, made[0], job="x", say=lambda line: None, **more), made


def test_a_start_waits_half_a_minute_for_spares_once_enough_launchers_have_come(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, newest: list[int]
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(group_module.time, "monotonic", lambda: clock[0])
    size = GroupSize(nodes=3, needed=2, ranks=5)
    leader, (board, _) = of_boards(run, "n1 n2", size=size, join_timeout_s=60.0)
    monkeypatch.setattr(board, "living", lambda: ["n1"] if clock[0] < 1050.0 else ["n1", "n2"])
    newest[0] = 40
    for clock[0] in (1000.0, 1059.0, 1062.0, 1088.0):
        leader._lead()
        assert leader._decision is None
    clock[0] = 1090.0
    leader._lead()
    decision = leader._decision
    assert decision is not None and decision.status is None
    assert (decision.number, decision.hosts, decision.ranks, decision.newest.step) == (1, ("n1", "n2"), 5, 40)
    (attempt,) = told(run, "attempt")
    assert (attempt["step"], attempt["ranks"], attempt["host"]) == (40, 10, "n1")


def test_launchers_that_are_missing_are_waited_for_until_the_time_is_over(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(group_module.time, "monotonic", lambda: clock[0])
    leader, (board, _) = of_boards(
        run, "n1 n2", size=GroupSize(nodes=3, needed=3, ranks=1), join_timeout_s=60.0
    )
    monkeypatch.setattr(board, "living", lambda: ["n1", "n2"])
    for clock[0] in (1000.0, 1060.0):
        leader._lead()
        assert leader._decision is None
    clock[0] = 1061.0
    leader._lead()
    assert leader._decision is not None and leader._decision.status == 3
    why = f"1 of 3 nodes did not come within 61 s: only n1, n2 did (do all see one {leader._rundir.path}?)"
    assert why in leader._decision.why
    clock[0] = 2000.0
    leader._lead()
    assert board.get("decision-000002") is None and told(run, "attempt", "attempt_end") == [], "it has ended"


def test_ranks_meet_at_the_address_of_the_first_host(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "port_for_ranks", lambda *, is_here: 11 if is_here else 22)
    group = Group(run)
    decision = group.concludes(FIRST, result("n1", 3), result("n2", -9))
    assert (decision.meeting, decision.ranks) == ("127.0.0.1:11", 1)
    card = LauncherCard(host="n3", address="10.0.0.3", ranks=1, pid=1)
    JobBoard(run.path / "board", card, nodes=3).beat()
    decision = group.concludes(decision, result("n1", 1, kernel=(XID,)), result("n2", 3))
    assert (decision.hosts, decision.meeting) == (("n3", "n2"), "10.0.0.3:22")


@pytest.mark.parametrize(
    ("statuses", "asked", "departs", "status", "why"),
    [
        ((0, 143), 0, "", 143, ""),
        ((143, 0), 0, "", 143, ""),
        ((143, 143), 0, "maintenance: soon", 0, "saved and stopped: maintenance: soon"),
        ((1, 1), 15, "", 143, ""),
        ((0, 1), 2, "maintenance: soon", 130, ""),
        ((0, 1), 0, "maintenance: soon", GAVE_UP, "not started again: maintenance: soon"),
    ],
)
def test_a_job_ends_as_its_launchers_were_asked_to(
    run: RunDirectory, statuses: tuple[int, int], asked: int, departs: str, status: int, why: str
) -> None:
    """The launcher that was asked is not the one that leads."""
    _, other = boards(run.path / "board", "n1", "n2")
    group = Group(run)
    other.beat(asked=asked, departs=departs)
    end = group.concludes(FIRST, *map(result, ("n1", "n2"), statuses))
    assert (end.status, end.why, end.hosts) == (status, why, ())
    (ended,) = told(run, "attempt_end")
    assert (ended["status"], ended["attempt"], ended["left"]) == (max(statuses), "x-1", departs)
    assert [event["gives_up"] for event in told(run, "diagnosis")] == (
        [departs] if why.startswith("not") else []
    )


def test_an_attempt_of_which_one_node_failed_has_failed(run: RunDirectory) -> None:
    following = Group(run).concludes(FIRST, result("n1", 0), result("n2", -9))
    assert following.status is None and told(run, "diagnosis")[0]["cause"] == "killed"


def test_a_hang_that_all_ranks_left_well_is_a_hang(run: RunDirectory) -> None:
    ending = {"kind": HANG, "why": "it hung"}
    following = Group(run).concludes(FIRST, result("n1", 143), result("n2", 143), ending=ending)
    assert following.status is None and following.in_all == 1


@pytest.mark.parametrize(("saved", "in_a_row"), [(7, 1), (3, 3), (2, 3)])
def test_a_newer_checkpoint_begins_the_count_of_restarts_anew(
    run: RunDirectory, newest: list[int], saved: int, in_a_row: int
) -> None:
    newest[0] = saved
    before = replace(FIRST, newest=NewestCheckpoint(step=3), in_a_row=2, in_all=5, bad=("n8", "n9"))
    following = Group(run).concludes(before, result("n1", 3), result("n2", -9))
    assert (following.in_a_row, following.in_all, following.newest.step) == (in_a_row, 6, saved)
    assert following.bad == ("n8", "n9") and newest[1] == 3
    events = told(run, "attempt_end", "diagnosis", "attempt")
    assert [event["step"] for event in events] == [saved] * 3


def test_a_job_that_was_started_again_often_enough_ends(run: RunDirectory) -> None:
    group = Group(run, budget=RestartBudget(without_progress=9, in_all=2))
    decision = group.concludes(replace(FIRST, in_all=1), result("n1", 3), result("n2", -9))
    end = group.concludes(decision, result("n1", 3), result("n2", -9))
    assert (end.status, end.why) == (GAVE_UP, "not started again: it has been restarted 2 times")


def test_the_turns_that_were_measured_outlive_their_attempt_and_nothing_else_does(run: RunDirectory) -> None:
    group = Group(run)
    group.leader._adopt(FIRST)
    beat = RankBeat(rank=0, world=2, pid=7, activity=SAVING, longest_s={SAVING: 4.0}, attempt="x-1")
    group.leader._progress.look({0: beat}, {})
    before = replace(FIRST, measured_s={SAVING: 3.0, "loading": 9.0})
    following = group.concludes(before, result("n1", 3), result("n2", -9))
    assert following.measured_s == {SAVING: 4.0, "loading": 9.0}
    assert group.leader._progress.longest_turns({}) == {}, "of the attempt that begins nothing is known"


def test_a_gpu_whose_memory_something_else_holds_is_told_and_its_node_may_be_used_again(
    run: RunDirectory,
) -> None:
    text = "torch.OutOfMemoryError: CUDA out of memory. Process 9 has 77.11 GiB memory in use."
    group = Group(run)
    end = RankEnd(rank=1, host="n2", status=1, log=text)
    full = ShareResult(host="n2", status=1, ends=(end,))
    following = group.concludes(FIRST, result("n1", 3), full)
    assert (following.hosts, following.bad) == (("n1", "n2"), ())
    assert [(one.cause, one.culprit.host) for one in group.bad] == [(Cause.GPU_MEMORY_AT_START, "n2")]


def test_the_machine_that_the_journal_blames_for_wrong_bits_is_left_out(run: RunDirectory) -> None:
    faulty(run, (1, "n2", True), (1, "n2", True))
    end = RankEnd(rank=0, host="n1", status=1, log=words_of_the_guard(1))
    stopped = ShareResult(host="n1", status=1, ends=(end,))
    following = Group(run).concludes(FIRST, stopped, result("n2", 3))
    assert (following.hosts, following.bad) == (("n1", "n3"), ("n2",))


def test_a_launcher_gives_the_stacks_of_its_own_ranks_once_an_attempt(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[list[int]] = []

    def take(beats: dict[int, RankBeat]) -> dict[int, RankStack]:
        taken.append(sorted(beats))
        return {rank: RankStack(rank=rank, state="S") for rank in beats}

    monkeypatch.setattr(group_module, "take_stacks", take)
    leader, (board, _) = of_boards(run, "n1 n2", size=GroupSize(nodes=2, needed=2, ranks=2))
    for rank in range(4):
        beat = RankBeat(rank=rank, world=4, attempt="x-0" if rank == 1 else "x-1")
        run.heartbeat(rank=rank).write_text(json.dumps(asdict(beat)))
    leader._adopt(Decision(number=1, hosts=("n2", "n1"), ranks=2))
    leader._follow()
    assert taken == [], "nobody asked"
    board.put("ask-1", {})
    for _ in range(2):
        leader._follow()
    record = board.get("stacks-1-n1")
    assert record is not None and [stack["rank"] for stack in record["stacks"]] == [2, 3]
    leader._adopt(Decision(number=2, hosts=("n1", "n2"), ranks=2))
    board.put("ask-2", {})
    leader._follow()
    assert taken == [[2, 3], []], "the heartbeats are those of the attempt before"


def test_what_a_launcher_saw_of_its_ranks_is_its_result(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = [["old"], ["old", XID]]
    monkeypatch.setattr(group_module, "free_share", lambda path: 0.25 if path == Path("/dev/shm") else 0.0)
    monkeypatch.setattr(group_module, "free_gib", lambda path: 7.5 if path == Path("/dev/shm") else 0.0)
    monkeypatch.setattr(share_log, "kernel_lines", lambda: kernel.pop(0) if len(kernel) > 1 else kernel[0])
    leader, (board, other) = of_boards(
        run,
        "n1 n2",
        size=GroupSize(nodes=2, needed=2, ranks=1),
        departure=SimpleNamespace(reason="maintenance: soon"),
    )

    def attempt(decision: Decision, watch: ShareWatch) -> int:
        assert watch.why_to_stop() == "maintenance: soon" and watch.name == "x-3"
        other.put("ending-3", {"kind": HANG, "why": "no rank has moved"})
        leader._tick()
        assert watch.why_to_end() == "no rank has moved"
        watch.signalled(15)
        watch.ended({0: 143}, killed=())
        return 143

    leader._run_share(Decision(number=3, hosts=("n1", "n2"), ranks=1), attempt)
    record = board.get("result-3-n1")
    assert record is not None
    found = ShareResult.from_json(record)
    assert (found.status, found.kernel, [end.status for end in found.ends]) == (143, (XID,), [143])
    assert (found.shm_free, found.shm_free_gib) == (0.25, 7.5)
    card = other.card("n1")
    assert card is not None and (card.asked, card.departs) == (15, "maintenance: soon")
    assert leader._watch is None


def test_the_facts_of_a_node_are_there_before_its_first_heartbeat(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats: list[int] = []

    def gather(rundir: RunDirectory, host: str) -> NodeFacts:
        card = json.loads((run.path / "board" / f"{host}.json").read_text())
        beats.append(card["beats"])
        return NodeFacts(host=host, disk_gb=7.0)

    check = SimpleNamespace(gather=gather, unfit_hosts=lambda *_, **__: [])
    statuses, _ = launch(run, "n1", lambda *_: 0, monkeypatch, needed=1, check=check)  # type: ignore[arg-type]
    record = json.loads((run.path / "board" / "facts-0-n1.json").read_text())
    assert statuses == [0] and beats == [1] and record["disk_gb"] == 7.0


def test_the_evidence_of_an_attempt_is_what_all_hosts_tell_of_it() -> None:
    finding = {"culprits": [1], "hosts": ["n2"], "summary": "stands", "evidence": ["x"], "sure": True}
    ending = {"kind": HANG, "why": "it hung", "finding": finding}
    results = {"n1": result("n1", 3, kernel=("a",)), "n2": result("n2", -9, kernel=("b", "c"))}
    evidence = evidence_of(replace(FIRST, newest=NewestCheckpoint(step=7)), results, ending=ending)
    assert (evidence.kernel, evidence.first_step) == ({"n1": ("a",), "n2": ("b", "c")}, 7)
    assert evidence.hang is not None and (evidence.hang.culprits, evidence.hang.hosts) == ((1,), ("n2",))
    lost = evidence_of(FIRST, {"n1": results["n1"]}, ending=ending)
    assert (lost.hang, lost.silent_hosts, lost.first_step) == (None, ["n2"], 0)
    assert [(end.rank, end.host, end.status) for end in lost.ranks] == [(0, "n1", 3), (1, "n2", None)]
    assert ShareResult.from_json(results["n2"].to_json()) == results["n2"]


@pytest.mark.parametrize("is_left_behind", [True, False])
def test_a_result_that_a_disk_refuses_is_told_until_others_go_on_or_no_longer_wait(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, is_left_behind: bool
) -> None:
    clock, tries = [1000.0], list[float]()

    def sleep(seconds: float) -> None:
        clock[0] += 40 * seconds

    def refuse(name: str, record: dict) -> bool:
        tries.append(clock[0])
        if is_left_behind and len(tries) == 3:
            member._decision = Decision(number=5)
        raise StorageError("the disk is full")

    monkeypatch.setattr(group_module, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    member, (board,) = of_boards(run, "n1", size=GroupSize(nodes=1, needed=1, ranks=1))
    member._decision = Decision(number=4)
    monkeypatch.setattr(board, "put", refuse)
    ended = ShareResult(host="n1", status=1, ends=())
    if is_left_behind:
        member._report(4, ended)
        assert len(tries) == 3
        return
    with pytest.raises(StorageError, match="the disk is full"):
        member._report(4, ended)
    assert tries == [1000.0, 1010.0, 1020.0, 1030.0, 1040.0, 1050.0]


@pytest.mark.parametrize("needed", [2, 3])
def test_a_start_leaves_out_the_nodes_that_are_unfit_and_ends_where_too_few_are_left(
    run: RunDirectory, needed: int
) -> None:
    check = SimpleNamespace(unfit_hosts=lambda rundir, facts, *, say, reactions: ["n1"])
    size = GroupSize(nodes=3, needed=needed, ranks=1)
    leader, made = of_boards(run, "n1 n2 n3", size=size, check=check)
    for board in made:
        board.beat()
    leader._begin()
    decision = leader._decision
    assert decision is not None
    if needed == 2:
        assert (decision.hosts, decision.bad, decision.status) == (("n2", "n3"), ("n1",), None)
    else:
        assert (decision.status, decision.hosts) == (67, ())
        assert decision.why == "n1 must not be used: 2 of 3 nodes are left"


def test_a_failure_is_said_with_what_helps(run: RunDirectory) -> None:
    said: list[str] = []
    (board,) = boards(run.path / "board", "n1")
    leader = GroupSupervisor(run, board, job="x", say=said.append, size=GroupSize(nodes=1, needed=1, ranks=1))
    log = "Traceback (most recent call last):\nKeyError: 'a'\n"
    ended = ShareResult(host="n1", status=1, ends=(RankEnd(rank=0, host="n1", status=1, log=log),))
    leader._conclude(Decision(number=1, hosts=("n1",), ranks=1), {"n1": ended}, None)
    assert said == [f"exception: n1, rank 0: KeyError: 'a', sure\n  {REMEDIES[Cause.EXCEPTION]}"]


def test_stacks_of_a_launcher_that_is_lost_are_not_waited_for(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(group_module, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    leader, _ = of_boards(run, "n1", size=GroupSize(nodes=2, needed=2, ranks=1))
    leader._decision = Decision(number=1, hosts=("n1", "n2"), ranks=1)
    assert leader._all_stacks(leader._decision) == {} and clock[0] < 1001.0


def test_what_hinders_a_leader_is_logged_once_until_it_changes(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    leader, _ = of_boards(run, "n1", size=GroupSize(nodes=1, needed=1, ranks=1))
    for error in (KeyError("a"), KeyError("a"), ValueError("b")):
        leader._warn_once(error)
    assert [message.rpartition("after: ")[2] for message in caplog.messages] == [
        "KeyError: 'a'",
        "ValueError: b",
    ]


def test_ranks_that_fell_silent_are_suspects_of_a_hang_beside_all_stacks_and_measured_turns(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[dict, tuple[int, ...]]] = []
    finding = HangFinding(culprits=(3,), hosts=("n2",), summary="rank 3 stands", evidence=(), sure=False)

    def find(beats: dict, stacks: dict, *, silent: tuple[int, ...]) -> HangFinding:
        asked.append((stacks, silent))
        return finding

    monkeypatch.setattr(group_module, "find_hang", find)
    leader, (board,) = of_boards(run, "n1", size=GroupSize(nodes=1, needed=1, ranks=1))
    measured_s, stacks = {SAVING: 4.0}, {3: RankStack(rank=3, state="S")}
    monkeypatch.setattr(leader, "_all_stacks", lambda decision: stacks)

    def look(beats: dict, measured: dict) -> SimpleNamespace | None:
        return SimpleNamespace(silent=(3,)) if measured == measured_s else None

    leader._progress = SimpleNamespace(look=look)
    leader._look_for_hang(Decision(number=1, hosts=("n1",), ranks=1, measured_s=measured_s))
    ending = board.get("ending-1")
    assert asked == [(stacks, (3,))] and ending is not None
    assert (ending["kind"], ending["finding"]["culprits"]) == (HANG, [3])


@pytest.mark.parametrize(
    ("error", "has_ranks", "is_raised"),
    [
        (KeyError("a"), True, False),
        (KeyError("a"), False, True),
        (SystemExit("x"), True, True),
        (StorageError("the disk is full"), False, False),
    ],
)
def test_an_error_of_a_launchers_thread_ends_it_unless_it_watches_ranks_or_a_disk_hangs(
    run: RunDirectory, error: BaseException, has_ranks: bool, is_raised: bool
) -> None:
    leader, _ = of_boards(run, "n1", size=GroupSize(nodes=1, needed=1, ranks=1))
    leader._watch = object() if has_ranks else None
    calls: list[int] = []

    def step() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise error
        leader._closed.set()

    leader._repeat(step, 0.0)
    assert leader._error is (error if is_raised else None) and len(calls) == (1 if is_raised else 2)
