"""The launchers of a job: who leads, who is lost, and who takes whose place."""

from __future__ import annotations

import errno
import itertools
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from bloomery import durable
from bloomery.errors import StorageError, TrainingFailed
from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate import job_board
from bloomery.operate.blame import diagnose
from bloomery.operate.decision import Decision, ShareResult, evidence_of
from bloomery.operate.diagnosis import Cause, Diagnosis
from bloomery.operate.failure_evidence import RankEnd
from bloomery.operate.group_supervisor import GroupSize, GroupSupervisor
from bloomery.operate.job_board import JobBoard, LauncherCard, assign_hosts
from bloomery.operate.node_facts import GpuFacts, NodeFacts
from bloomery.operate.share_watch import ShareWatch
from bloomery.operate.stacks import RankStack
from bloomery.operate.standstill import read_beats
from bloomery.operate.start_check import StartCheck
from bloomery.operate.supervise import JobReactions


def boards(place: Path, *hosts: str) -> list[JobBoard]:
    made = []
    for host in hosts:
        card = LauncherCard(host=host, address="127.0.0.1", ranks=2, pid=1)
        made.append(JobBoard(place, card, nodes=len(hosts)))
        made[-1].beat()
    return made


def test_the_first_host_in_natural_order_leads_and_the_next_one_when_its_card_stays_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenth, second, first = boards(tmp_path, "n10", "n2", "n1")
    assert [board.leads() for board in (first, second, tenth)] == [True, False, False]
    assert first.living() == ["n1", "n2", "n10"]
    clock = itertools.count(time.monotonic())
    now = [next(clock)]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for _ in range(int(second.silence_s) + 1):
        now[0] = next(clock)
        tenth.beat()
        second.living()
    assert second.leads() and second.living() == ["n2", "n10"], "the first one's card has not changed"
    first.beat()
    assert not second.leads(), "it was only slow"


def test_launchers_that_stood_still_together_take_none_of_them_for_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their machine was frozen, or the server of the run directory was away, for an hour."""
    first, second = boards(tmp_path, "n1", "n2")
    assert first.living() == second.living() == ["n1", "n2"]
    frozen = time.monotonic() + 3600.0
    monkeypatch.setattr(time, "monotonic", lambda: frozen)
    assert first.living() == ["n1", "n2"] and not second.leads(), "no card was written since"


def test_of_two_leaders_one_decides(tmp_path: Path) -> None:
    one, other = boards(tmp_path, "n1", "n2")
    ours = Decision(number=1, hosts=("n1",), ranks=2, meeting="a:1", measured_s={"saving": 2.0})
    theirs = Decision(number=1, hosts=("n2",), ranks=2)
    assert one.put("decision-000001", ours.to_json()) and not other.put("decision-000001", theirs.to_json())
    record = other.get("decision-000001")
    assert record is not None and Decision.from_json(record) == ours and one.hosts() == ["n1", "n2"]


def test_a_decision_that_was_left_empty_is_taken_again_after_the_allowed_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a leader leaves it that dies while it creates it, on a file system without hard links."""
    (board,) = boards(tmp_path, "n2")
    name, record = "decision-000002", {"number": 2}
    (tmp_path / f"{name}.json").touch()
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    puts = []
    for _ in range(9):
        puts.append(board.put(name, record))
        now[0] += 0.9
    assert puts == [False] * 8 + [True] and board.get(name) == record
    assert not any(board.put(name, {}) for _ in range(3)) and board.hosts() == ["n2"]


def test_the_name_of_a_job_is_refused_where_it_was_used_before(tmp_path: Path) -> None:
    (first,) = boards(tmp_path, "n1")
    first.take_part()
    newcomers = [
        JobBoard(tmp_path, LauncherCard(host=host, address="a", ranks=2, pid=2), nodes=3)
        for host in ("n2", "n3")
    ]
    newcomers[0].take_part()
    again = JobBoard(tmp_path, LauncherCard(host="n1", address="a", ranks=2, pid=3), nodes=2)
    with pytest.raises(TrainingFailed, match=r"n1 has used the name .*\(process 1\)") as told:
        again.take_part()
    assert "--job TEXT" in told.value.remedy
    first.put("decision-000001", Decision(number=1, hosts=("n1",)).to_json())
    first.put("decision-000002", Decision(number=2, status=0).to_json())
    with pytest.raises(TrainingFailed, match="has ended"):
        newcomers[1].take_part()
    assert first.hosts() == ["n1"], "a claim is no card"


def test_of_two_machines_with_one_host_name_the_second_is_told_what_tells_them_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both come in the same moment, before either has written its card."""
    first, second = (
        JobBoard(tmp_path, LauncherCard(host="node", address="node", ranks=1, pid=pid), nodes=2)
        for pid in (7, 9)
    )
    identities = ["node/boot/pid:[1]/5", *2 * ["node/boot/pid:[1]/9"], "node/another boot/pid:[1]/5"]
    identities.append(identities[-1])
    monkeypatch.setattr(job_board, "process_identity", lambda pid: identities.pop(0))
    first.take_part()
    with pytest.raises(TrainingFailed, match="A launcher on node has used the name"):
        second.take_part()
    with pytest.raises(TrainingFailed, match="Another machine with the host name node takes part") as told:
        second.take_part()
    assert "BLOOMERY_HOST" in told.value.remedy and "(process 7)" in told.value.message


def test_a_host_without_a_result_is_the_culprit_and_its_ranks_are_named(tmp_path: Path) -> None:
    decision = Decision(number=1, hosts=("n1", "n2"), ranks=2)
    assert [list(decision.share(host)) for host in ("n1", "n2", "n3")] == [[0, 1], [2, 3], []]
    ends = tuple(RankEnd(rank=rank, host="n1", status=3) for rank in (0, 1))
    result = ShareResult(host="n1", status=3, ends=ends, kernel=("x",))
    assert ShareResult.from_json(result.to_json()) == result
    evidence = evidence_of(decision, {"n1": result}, ending=None)
    assert [end.rank for end in evidence.ranks] == [0, 1, 2, 3]
    diagnosis = diagnose(evidence)
    assert (diagnosis.cause, diagnosis.culprit.host) == (Cause.NODE_LOST, "n2")


def test_a_launcher_that_waits_counts_cards_and_not_what_else_lies_there(tmp_path: Path) -> None:
    (board,) = boards(RunDirectory(tmp_path).path / "launchers", "n1")
    for name in ("ending-1", "ask-1", "result-1-n2", "stacks-1-n2", "decision-000001"):
        assert board.put(name, {})
    assert board.hosts() == ["n1"]


@pytest.mark.parametrize(
    ("living", "bad", "expected"),
    [
        ("a b c d", "", "a b c"),
        ("a c d", "", "a d c"),
        ("a b c d", "b", "a d c"),
        ("a c", "", "a c"),
        ("d e", "", "d e"),
    ],
)
def test_spares_take_the_places_of_the_lost(living: str, bad: str, expected: str) -> None:
    assert assign_hosts("abc", living=living.split(), bad=bad.split(), wanted=3) == expected.split()


def started(place: Path, *, needed: int, **wrong: dict) -> tuple[Decision, RunDirectory, list[Diagnosis]]:
    """Return what the leader of three nodes decides first, and the diagnoses that put nodes into quarantine.

    wrong: by host, what its facts say that those of the others do not.
    """
    run = RunDirectory(place / "run").create()
    hosts = boards(run.path / "launchers" / "x", "n1", "n2", "n3")
    for board in hosts:
        usual = {"versions": {"torch": "2.11"}, "disk_gb": 9.0}
        board.put_facts(NodeFacts(host=board.host, **usual | wrong.get(board.host, {})))
    unfit: list[Diagnosis] = []
    group = GroupSupervisor(
        run,
        hosts[0],
        job="x",
        size=GroupSize(nodes=3, needed=needed, ranks=2),
        say=lambda line: None,
        reactions=JobReactions(on_bad_node=unfit.append, on_repeating=unfit.append),
        check=StartCheck(gpus=0, disk_gb=1.0, environment={}),
    )
    group._lead()
    assert group._decision is not None
    return group._decision, run, unfit


def test_an_unfit_node_is_left_out_before_any_rank_starts_and_all_versions_are_journalled(
    tmp_path: Path,
) -> None:
    broken = {"gpus": (GpuFacts(index="3", name="A100", used_mib=0.0, total_mib=1.0, uncorrected=2),)}
    decision, run, unfit = started(tmp_path, needed=1, n1=broken, n3={"versions": {"torch": "2.12"}})
    assert (decision.number, decision.hosts, decision.bad) == (1, ("n2",), ("n1", "n3"))
    assert {(reason.cause, reason.culprit.host) for reason in unfit} == {
        (Cause.UNFIT_NODE, "n1"),
        (Cause.UNFIT_NODE, "n3"),
    }
    (record,) = [event for event in read_journal(run.operations) if event["event"] == "preflight"]
    assert (record["versions"], record["differ"]) == ({"torch": "2.11"}, {"n3": {"torch": "2.12"}})
    assert "GPU 3 has 2 uncorrected" in record["findings"][0]["what"]


def test_too_few_nodes_that_are_fit_end_the_job_at_once(tmp_path: Path) -> None:
    decision, run, _ = started(tmp_path, needed=3, n2={"is_exact": False})
    assert (decision.status, decision.hosts) == (67, ())
    assert "n2 must not be used: 2 of 3 nodes are left" in decision.why
    assert not any(event["event"] == "attempt" for event in read_journal(run.operations))


def test_a_heartbeat_that_cannot_be_read_for_a_moment_ends_no_watch(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path).create()
    run.heartbeat().mkdir()  # opening it raises OSError, as a file does that NFS has just replaced
    assert read_beats(run, ranks=range(2), attempt="") == {}


def test_a_disk_that_refuses_for_a_moment_ends_no_launcher(tmp_path: Path) -> None:
    (board,) = boards(tmp_path / "board", "n1")
    size = GroupSize(nodes=1, needed=1, ranks=1)
    group = GroupSupervisor(RunDirectory(tmp_path), board, job="x", size=size, say=print)
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 1:
            raise OSError(errno.ESTALE, "Stale file handle")
        group._closed.set()

    group._repeat(look, 0.0)
    assert (len(looks), group._error) == (2, None)


def test_an_error_while_ranks_run_leaves_their_watch_alive(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (board,) = boards(tmp_path / "board", "n1")
    size = GroupSize(nodes=1, needed=1, ranks=1)
    group = GroupSupervisor(RunDirectory(tmp_path), board, job="x", size=size, say=print)
    decision, share = Decision(number=1, hosts=("n1",), ranks=1), SimpleNamespace()
    group._watch = ShareWatch(board, decision, share, name="x-1")  # type: ignore[arg-type]
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 4:
            group._watch = None
        raise RuntimeError("can't start new thread")

    group._repeat(look, 0.0)
    assert len(looks) == 4 and isinstance(group._error, RuntimeError), "raised where no rank runs any more"
    assert caplog.text.count("can't start new thread") == 1


@pytest.mark.parametrize("name", ["write_whole_unsynced", "create"])
def test_a_disk_that_refuses_for_a_moment_hides_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (board,) = boards(tmp_path / "board", "n1")
    size = GroupSize(nodes=1, needed=1, ranks=1)
    group = GroupSupervisor(RunDirectory(tmp_path), board, job="x", size=size, say=print)
    write, refusals = getattr(durable, name), [errno.ESTALE, errno.EIO]

    def refused(*content: object) -> None:
        if refusals:
            raise OSError(refusals.pop(), "no")
        write(*content)

    monkeypatch.setattr(durable, name, refused)
    group._asked = 15
    group._report(3, ShareResult(host="n1", status=1, ends=()))
    assert board.get("result-3-n1") is not None and refusals == []
    card = board.card("n1")
    assert card is not None and card.asked == 15
    refusals += [errno.EIO] * 2
    monkeypatch.setattr("bloomery.operate.group_supervisor._RESULTS_S", 0.0)
    with pytest.raises(StorageError):
        group._report(4, ShareResult(host="n1", status=1, ends=()))
    group._adopt(Decision(number=5))
    group._report(4, ShareResult(host="n1", status=1, ends=()))
    assert board.get("result-4-n1") is None and refusals == [], "the others have gone on without it"


@pytest.mark.parametrize(("asked", "status", "ends_with"), [(15, 1, 143), (15, 0, 0), (0, 0, 0)])
def test_a_job_that_was_asked_to_end_ends_with_the_status_of_its_ranks_or_of_the_signal(
    tmp_path: Path, asked: int, status: int, ends_with: int
) -> None:
    run = RunDirectory(tmp_path).create()
    (board,) = boards(tmp_path / "board", "n1")
    size = GroupSize(nodes=1, needed=1, ranks=1)
    group = GroupSupervisor(run, board, job="x", size=size, say=print)
    decided: list[Decision] = []
    group._asked, group._decide = asked, decided.append  # type: ignore[method-assign]  — collects them
    decision = Decision(number=3, hosts=("n1",), ranks=1)
    group._conclude(decision, {"n1": ShareResult(host="n1", status=status, ends=())}, None)
    (end,) = decided
    assert (end.number, end.hosts, end.status, end.why) == (4, (), ends_with, "")


def test_stacks_of_a_host_that_lives_are_waited_for_and_those_of_a_dead_one_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path).create()
    board, _ = boards(tmp_path / "board", "n1", "n2")
    group = GroupSupervisor(run, board, job="x", size=GroupSize(nodes=2, needed=2, ranks=1), say=print)
    looks: list[str] = []

    def get(name: str) -> dict | None:
        looks.append(name)
        came = name == "stacks-3-n2" and looks.count(name) == 2
        return {"stacks": [RankStack(rank=1).to_json()]} if came else None

    monkeypatch.setattr(group, "_follow", lambda: None)
    monkeypatch.setattr(board, "get", get)
    monkeypatch.setattr(board, "is_alive", lambda host: host == "n2")
    monkeypatch.setattr("bloomery.operate.group_supervisor._STACKS_S", 60.0)
    assert group._all_stacks(Decision(number=3, hosts=("n1", "n2"), ranks=1)) == {1: RankStack(rank=1)}
    assert looks == ["stacks-3-n1", "stacks-3-n2", "stacks-3-n2"]
