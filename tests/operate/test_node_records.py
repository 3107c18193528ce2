"""What launchers write down of their ranks and nodes, and what a start makes of it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.operate.test_group import boards
from tests.operate.test_preflight import nodes

from bloomery.config.load import load_recipe
from bloomery.errors import StorageError, TrainingFailed
from bloomery.events.heartbeat import RankBeat
from bloomery.events.run_directory import RunDirectory
from bloomery.operate import node_facts, share_log, start_check
from bloomery.operate.diagnosis import Diagnosis
from bloomery.operate.exclusions import Exclusions, QuarantinedNode
from bloomery.operate.job_board import JobBoard, LauncherCard, assign_hosts
from bloomery.operate.node_checks import judge_nodes
from bloomery.operate.node_facts import GpuFacts, NodeFacts, gather_facts, parse_smi
from bloomery.operate.share_log import ShareLog
from bloomery.operate.start_check import StartCheck, checkpoint_bytes, start_check_of
from bloomery.operate.supervise import JobReactions


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run").create()


def printed(run: RunDirectory, rank: int, text: str) -> None:
    path = run.log(host="n1", rank=rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as log:
        log.write(text)


def test_how_a_rank_ended_is_told_by_its_own_attempt(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share_log, "_TAIL_BYTES", 20)
    printed(run, 2, "of the attempt before\n")
    printed(run, 3, "x" * 50)
    share = ShareLog(run, ranks=range(2, 4), host="n1")
    for rank, attempt, error in ((2, "now", "KeyError: 'a'"), (3, "before", "ValueError")):
        beat = RankBeat(
            rank=rank, device=f"cuda:{rank}", bus="0000:3b:00", step=7, error=error, attempt=attempt
        )
        run.heartbeat(rank=rank).write_text(json.dumps(asdict(beat)))
    printed(run, 2, "short\n")
    printed(run, 3, "a line that is too long to be kept\nthe newest words\n")
    share.started({2: 22, 3: 33})
    share.ended({3: -9, 2: 1}, killed=[3])
    first, second = share.ends(attempt="now")
    assert (first.rank, first.host, first.pid, first.status, first.is_killed_here) == (2, "n1", 22, 1, False)
    assert (first.device, first.bus, first.step, first.error) == ("cuda:2", "0000:3b:00", 7, "KeyError: 'a'")
    assert (first.gpu, first.log) == ("2", "short\n")
    assert (second.rank, second.pid, second.status, second.is_killed_here) == (3, 33, -9, True)
    assert (second.device, second.step, second.error) == ("", 0, ""), "that heartbeat is of another attempt"
    assert second.log == "ept\nthe newest words\n"[-20:]


def test_a_dump_of_the_attempt_before_is_no_evidence(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, float]] = []
    monkeypatch.setattr(
        share_log, "read_flight", lambda place, rank, *, since: asked.append((rank, since)) or {"g": (1, "x")}
    )
    before = time.time()
    share = ShareLog(run, ranks=range(1), host="n1")
    share.ended({0: 1}, killed=())
    (end,) = share.ends(attempt="")
    assert end.flight == {"g": (1, "x")} and asked[0][0] == 0 and before <= asked[0][1] <= time.time()


def test_of_the_processes_of_a_rank_the_newest_are_kept(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share_log, "_CHILDREN_AT_MOST", 3)
    monkeypatch.setattr(share_log, "sees_kernel_pids", lambda: True)
    living = [[1, 2], [2, 3, 4], [5]]
    monkeypatch.setattr(share_log, "descendants", lambda pid: living.pop(0))
    share = ShareLog(run, ranks=range(1), host="n1")
    share.started({0: 10})
    for _ in range(3):
        share.note_children()
    share.ended({0: 0}, killed=())
    assert share.ends(attempt="")[0].children == (3, 4, 5)


def test_the_kernels_new_lines_are_those_that_came_since(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = ["a", "b"]
    monkeypatch.setattr(share_log, "kernel_lines", lambda: list(said))
    share = ShareLog(run, ranks=range(1), host="n1")
    said += ["c", "b", "d"]
    assert share.kernel() == ["c", "d"]


@pytest.mark.parametrize(
    ("script", "lines"),
    [("echo one; echo two", ["one", "two"]), ("echo one; exit 1", []), ("exit 127", [])],
)
def test_a_kernel_log_that_may_not_be_read_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, lines: list[str]
) -> None:
    (tmp_path / "dmesg").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "dmesg").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert share_log.kernel_lines() == lines

    def late(command: list[str], **more: Any) -> None:
        raise subprocess.TimeoutExpired(command, more["timeout"])

    monkeypatch.setattr(subprocess, "run", late)
    assert share_log.kernel_lines() == []


FILE_SYSTEM = SimpleNamespace(
    f_bsize=1 << 20, f_frsize=4096, f_blocks=8_000_000, f_bfree=3_000_000, f_bavail=2_000_000, f_favail=77,
    f_files=100,
)  # fmt: skip


def test_free_is_what_this_user_may_take_of_a_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: FILE_SYSTEM)
    assert share_log.free_share(tmp_path) == 0.25
    assert share_log.free_gib(tmp_path) == pytest.approx(2_000_000 * 4096 / 2**30)
    facts = gather_facts(tmp_path, host="n1")
    assert (facts.disk_gb, facts.inodes, facts.shm_share) == (pytest.approx(8.192), 77, 0.25)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(**{**vars(FILE_SYSTEM), "f_files": 0}))
    assert gather_facts(tmp_path, host="n1").inodes is None

    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(**{**vars(FILE_SYSTEM), "f_blocks": 0}))
    assert share_log.free_share(tmp_path) is None, "a file system that counts no blocks"

    def gone(path: Path) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(os, "statvfs", gone)
    assert share_log.free_share(tmp_path) is None and share_log.free_gib(tmp_path) is None


def test_the_facts_of_a_node_are_each_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho '3, H200, 570.1, 12, 143771, 2'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(node_facts, "_interfaces", lambda: ("eth0",))
    monkeypatch.setattr(node_facts, "_infiniband_ports", lambda: 8)
    monkeypatch.setattr(node_facts, "free_share", lambda path: 0.25 if path == Path("/dev/shm") else 0.75)
    monkeypatch.setattr(node_facts.metadata, "version", lambda name: f"{name} 1")
    facts = gather_facts(tmp_path, host="n1")
    names = (
        "bloomery",
        "torch",
        "numpy",
        "transformers",
        "safetensors",
        "nvidia-nccl-cu12",
        "nvidia-nccl-cu13",
    )
    assert {name: facts.versions.get(name) for name in names} == {name: f"{name} 1" for name in names}
    assert facts.shm_share == 0.25 and NodeFacts.from_json(facts.to_json()) == facts
    assert NodeFacts.from_json(NodeFacts(host="n1").to_json()) == NodeFacts(host="n1")
    assert facts.gpus == (GpuFacts(index="3", name="H200", used_mib=12.0, total_mib=143771.0, uncorrected=2),)
    assert (facts.versions["driver"], facts.host) == ("570.1", "n1")
    assert (facts.interfaces, facts.infiniband_ports, facts.cores) == (("eth0",), 8, os.cpu_count())
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho '3, H200, 570.1, 12, 143771, 2'; exit 9\n")
    assert "driver" not in gather_facts(tmp_path, host="n1").versions


def test_what_smi_does_not_know_counts_as_nothing() -> None:
    (gpu,), _ = parse_smi("0, A, 1, [N/A], [N/A], [N/A]\nbroken line\n")
    assert (gpu.used_mib, gpu.total_mib, gpu.uncorrected) == (0.0, 0.0, 0)
    (finding,) = judge_nodes(
        {"a": NodeFacts(host="a", gpus=(GpuFacts(index="0", name="A", used_mib=5.0, total_mib=10.0),))}
    )
    assert finding.is_bad
    unknown = GpuFacts(index="0", name="A", used_mib=5.0, total_mib=0.0)
    assert judge_nodes({"a": NodeFacts(host="a", gpus=(unknown,))}) == []


def test_links_and_ports_are_read_as_the_system_tells_them(tmp_path: Path) -> None:
    assert node_facts._interfaces(tmp_path) is None and node_facts._infiniband_ports(tmp_path) is None
    for name, state in (("eth0", "up"), ("lo", "unknown"), ("eth1", "down")):
        place = tmp_path / "class/net" / name
        place.mkdir(parents=True)
        (place / "operstate").write_text(f"{state}\n")
    (tmp_path / "class/net/ib0").mkdir()
    assert node_facts._interfaces(tmp_path) == ("eth0", "ib0", "lo")
    for number, state in enumerate(("4: ACTIVE", "1: DOWN", "4: ACTIVE")):
        place = tmp_path / f"class/infiniband/mlx5_{number}/ports/1"
        place.mkdir(parents=True)
        (place / "state").write_text(f"{state}\n")
    assert node_facts._infiniband_ports(tmp_path) == 2


@pytest.mark.parametrize(("written", "ahead_s"), [(1000.0, 0.0), (1001.5, 0.0), (1003.0, -1.0), (996.0, 4.0)])
def test_a_clock_is_compared_with_that_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: float, ahead_s: float
) -> None:
    times = iter([1000.0, 1002.0])
    monkeypatch.setattr(time, "time", lambda: next(times))
    monkeypatch.setattr(Path, "stat", lambda self: SimpleNamespace(st_mtime=written))
    assert node_facts._clock_s(tmp_path, "n1") == ahead_s
    assert list(tmp_path.iterdir()) == []


def test_memory_is_told_in_gibibytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: "MemTotal: 9 kB\nMemAvailable:  3145728 kB\n")
    assert node_facts._memory_gib() == 3.0


def test_a_node_with_a_finding_is_looked_at_again(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [NodeFacts(host="n1", is_exact=False), NodeFacts(host="n1", disk_gb=1.0)]
    waits: list[float] = []
    monkeypatch.setattr(start_check, "gather_facts", lambda path, *, host: looks.pop(0))
    monkeypatch.setattr(start_check, "time", SimpleNamespace(sleep=waits.append))
    check = StartCheck(gpus=0, disk_gb=9.0, environment={})
    assert check.gather(run, "n1") == NodeFacts(host="n1", disk_gb=1.0) and waits == [5.0]
    looks += [NodeFacts(host="n1", disk_gb=2.0)]
    assert check.gather(run, "n1").disk_gb == 2.0 and waits == [5.0], "it is not bad"


def test_a_node_is_looked_at_before_its_run_has_a_directory(tmp_path: Path) -> None:
    facts = StartCheck(gpus=0, disk_gb=0.0, environment={}).gather(RunDirectory(tmp_path / "new"), "n1")
    assert facts.host == "n1" and facts.disk_gb > 0.0 and (tmp_path / "new").is_dir()


def test_a_start_wants_what_its_recipe_says_and_tells_why_a_node_is_not_fit(run: RunDirectory) -> None:
    environment = {"NCCL_NET": "IB"}
    check, bad = StartCheck(gpus=2, disk_gb=5.0, environment=environment), list[Diagnosis]()
    facts = nodes(
        a={"infiniband_ports": 1}, b={"disk_gb": 3.0}, c={"gpus": (), "inodes": 5, "infiniband_ports": 1}
    )
    findings = {(finding.host, finding.what.split()[0], finding.is_bad) for finding in check.judge(facts)}
    assert {("a", "1", True), ("b", "3.0", False), ("b", "an", True), ("c", "5", False)} <= findings
    reactions = JobReactions(on_bad_node=bad.append, on_repeating=bad.append)
    check = StartCheck(gpus=1, disk_gb=5.0, environment={})
    facts = facts | {"d": replace(facts["d"], is_exact=False)}
    assert check.unfit_hosts(run, facts, say=lambda line: None, reactions=reactions) == ["c", "d"]
    assert [diagnosis.summary for diagnosis in bad] == [
        "c is not fit to train: 0 of 1 GPUs are there",
        "d is not fit to train: equal matmuls differ: it computes wrongly",
    ]


def test_the_room_for_one_checkpoint_more_than_are_kept_must_be_free() -> None:
    loaded = load_recipe(
        "demo", ["checkpoint.keep_last=3", "submit.gpus_per_node=5", "environment.variables=['A=b']"]
    )
    check = start_check_of(loaded)
    assert check is not None and check.disk_gb == pytest.approx(4 * checkpoint_bytes(loaded) / 1e9)
    assert check.gpus == 5 and check.environment["A"] == "b"
    parameters = checkpoint_bytes(loaded) / 12
    assert 9e6 < parameters < 12e6, "the demo has about 10 million parameters"
    assert start_check_of(load_recipe("demo", ["control.preflight=false"])) is None


def test_a_vocabulary_that_only_a_tokenizer_elsewhere_knows_counts_as_one_that_is_trained(
    tmp_path: Path,
) -> None:
    trained, elsewhere = (
        load_recipe("demo", [f"data.tokenizer={json.dumps(tokenizer)}", "data.tokenizer_vocabulary=5000"])
        for tokenizer in ("train", str(tmp_path / "tokenizer.json"))
    )
    assert checkpoint_bytes(elsewhere) == checkpoint_bytes(trained)


def test_a_node_keeps_its_first_cause_and_is_let_back_alone(run: RunDirectory, tmp_path: Path) -> None:
    section = load_recipe(
        "demo", [f"submit.exclusions={json.dumps(str(tmp_path / 'shared.json'))}"]
    ).recipe.submit
    shared = Exclusions.of(run, section)
    assert shared.path == tmp_path / "shared.json"
    for host, cause in (("n2", "bad GPU"), ("n1", "hang"), ("n2", "node lost")):
        shared.add(QuarantinedNode(host=host, cause=cause, since=5.0))
    assert {host: node.cause for host, node in shared.nodes().items()} == {"n1": "hang", "n2": "bad GPU"}
    released = shared.release("n2")
    assert released is not None and released.cause == "bad GPU" and set(shared.nodes()) == {"n1"}
    assert shared.release("n2") is None


@pytest.mark.parametrize(
    "damage",
    [
        "{",
        "[]",
        '{"n1": 5}',
        '{"n1": {"since": 1.0}}',
        '{"n1": {"cause": "by hand", "since": "2026-11-30"}}',
        '{"n1": {"cause": "by hand", "since": 1e300}}',
    ],
)
def test_a_damaged_list_of_nodes_lets_none_of_them_back(run: RunDirectory, damage: str) -> None:
    exclusions = Exclusions(run.path / "exclusions.json")
    exclusions.path.write_text(damage)
    for use in (exclusions.nodes, lambda: exclusions.add(QuarantinedNode(host="n2", cause="x", since=1.0))):
        with pytest.raises(TrainingFailed, match="is damaged") as refused:
            use()
        assert "remove it to let all nodes back" in refused.value.remedy
    assert exclusions.path.read_text() == damage


def test_the_list_of_nodes_is_locked_while_it_is_changed(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bloomery import durable

    exclusions = Exclusions(run.path / "exclusions.json")
    write, held = durable.write_whole, list[bool]()

    def written(path: Path, text: str) -> None:
        with pytest.raises(durable.LockHeld), durable.locked(
            path.with_name("exclusions.json.lock"), owner="another", timeout_s=0.0
        ):  # fmt: skip
            pass
        held.append(True)
        write(path, text)

    monkeypatch.setattr(durable, "write_whole", written)
    exclusions.add(QuarantinedNode(host="n1", cause="x", since=1.0))
    assert held == [True]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EIO])
def test_a_file_system_without_locks_keeps_no_node_from_its_quarantine(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(file: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    exclusions = Exclusions(run.path / "exclusions.json")
    monkeypatch.setattr("fcntl.flock", refuse)
    told = nullcontext() if number == errno.ENOSYS else pytest.raises(StorageError, match="Input/output")
    with told:
        exclusions.add(QuarantinedNode(host="n1", cause="x", since=1.0))
        assert list(exclusions.nodes()) == ["n1"]


@pytest.mark.parametrize(
    ("count", "interval_s", "silence_s"), [(4, 1.0, 6.0), (150, 1.5, 6.0), (400, 4.0, 12.0)]
)
def test_many_launchers_write_and_are_missed_less_often(
    tmp_path: Path, count: int, interval_s: float, silence_s: float
) -> None:
    board = JobBoard(tmp_path, LauncherCard(host="n1", address="a", ranks=1, pid=1), nodes=count)
    assert (board.interval_s, board.silence_s) == (interval_s, silence_s)


def test_a_card_that_cannot_be_read_for_a_moment_is_the_one_before_it(tmp_path: Path) -> None:
    first, second = boards(tmp_path, "n1", "n2")
    second.beat(asked=15, departs="maintenance: soon")
    assert (first.asked(["n1", "n2"]), first.departs(["n2"])) == (15, "maintenance: soon")
    (tmp_path / "n2.json").write_text("{")
    card = first.card("n2")
    assert card is not None and (card.asked, card.beats) == (15, 2) and first.is_alive("n2")
    (tmp_path / "n2.json").write_text("[]")
    assert first.card("n2") == card and first.get("n2") is None and first.card("n3") is None


def test_a_launcher_is_lost_after_the_allowed_silence_from_its_last_new_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = boards(tmp_path, "n1", "n2")
    clock = [0.0]
    monkeypatch.setattr(first, "now", lambda: clock[0])
    for clock[0], is_alive in ((0.0, True), (5.0, True), (6.0, True), (6.1, False)):
        assert first.is_alive("n2") == is_alive
    second.beat()
    assert first.is_alive("n2")
    clock[0] = 12.1
    assert first.is_alive("n2")
    clock[0] = 12.2
    assert not first.is_alive("n2") and first.is_alive("n1")


def test_a_record_that_is_written_while_it_is_taken_for_empty_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bloomery import durable

    (board,) = boards(tmp_path, "n2")
    path = tmp_path / "decision-000002.json"
    path.touch()
    clock, move = [0.0], durable.replace
    monkeypatch.setattr(board, "now", lambda: clock[0])
    assert not board.put("decision-000002", {"of": "us"})
    clock[0] = 7.0

    def replaced(source: Path, target: Path) -> None:
        if source == path:
            path.write_text('{"of": "them"}')
        move(source, target)

    monkeypatch.setattr(durable, "replace", replaced)
    assert not board.put("decision-000002", {"of": "us"})
    assert board.get("decision-000002") == {"of": "them"}


def test_old_places_are_kept_and_no_host_has_two() -> None:
    assert assign_hosts("abc", living="cdbe", bad=[], wanted=3) == ["d", "b", "c"]
    assert assign_hosts("ab", living="abcd", bad=["a"], wanted=3) == ["c", "b", "d"]
    assert assign_hosts("", living="abcd", bad=["b"], wanted=2) == ["a", "c"]


def test_the_list_of_nodes_is_in_their_order_and_its_names_are_those_of_the_nodes(run: RunDirectory) -> None:
    exclusions = Exclusions(run.path / "exclusions.json")
    for host in ("n2", "n1", "n3"):
        exclusions.add(QuarantinedNode(host=host, cause="x", since=1.0))
    assert list(json.loads(exclusions.path.read_text())) == ["n1", "n2", "n3"]
    exclusions.path.write_text('{"n5": {"host": "n9", "cause": "x", "since": 1.0}}')
    assert [node.host for node in exclusions.nodes().values()] == ["n5"]
