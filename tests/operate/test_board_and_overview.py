"""The files by which launchers meet, the overview of a run, and what is found of its nodes."""

from __future__ import annotations

import errno
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.guard.reports import report
from tests.operate.test_group import boards

from bloomery import durable
from bloomery.config.load import dump_recipe, load_recipe, override
from bloomery.errors import BloomeryError, StorageError
from bloomery.events.heartbeat import Heartbeat
from bloomery.events.journal import Journal, read_journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate import job_board as board_module
from bloomery.operate import overview as overview_module
from bloomery.operate import submission
from bloomery.operate.diagnosis import Cause, Culprit, Diagnosis
from bloomery.operate.job_board import JobBoard, LauncherCard, assign_hosts, natural_sort_key
from bloomery.operate.node_checks import NodeFinding, judge_nodes
from bloomery.operate.node_facts import GpuFacts, NodeFacts
from bloomery.operate.overview import RunOverview, overview, runs_under
from bloomery.operate.run_state import RunObservation, RunStatus, RunVerdict
from bloomery.operate.start_check import StartCheck
from bloomery.operate.submission import keep_submission, submission_of
from bloomery.operate.supervise import JobReactions


def test_a_card_says_how_often_it_was_written_and_who_was_asked(tmp_path: Path) -> None:
    first, second = boards(tmp_path, "n1", "n2")
    first.beat(asked=15, departs="maintenance")
    assert json.loads((tmp_path / "n1.json").read_text()) == {
        "host": "n1", "address": "127.0.0.1", "ranks": 2, "pid": 1, "beats": 2, "asked": 15,
        "departs": "maintenance",
    }  # fmt: skip
    assert second.asked(["n2", "n1", "n9"]) == 15 and second.departs(["n2", "n1"]) == "maintenance"
    assert second.asked([]) == 0 and second.departs(["n2"]) == "" and second.card("n9") is None
    (tmp_path / "n1.json").write_text("{")
    kept = second.card("n1")
    assert kept is not None and kept.asked == 15, "the newest that could be read"
    first.beat()
    assert second.asked(["n1"]) == 0


@pytest.mark.parametrize(
    ("nodes", "interval_s", "silence_s"),
    [(1, 1.0, 6.0), (100, 1.0, 6.0), (200, 2.0, 6.0), (300, 3.0, 9.0)],
)
def test_launchers_of_many_nodes_write_and_are_missed_more_rarely(
    tmp_path: Path, nodes: int, interval_s: float, silence_s: float
) -> None:
    board = JobBoard(tmp_path, LauncherCard(host="n1", address="a", ranks=1, pid=1), nodes=nodes)
    assert (board.interval_s, board.silence_s) == (interval_s, silence_s)


def test_a_launcher_is_alive_up_to_the_allowed_silence_and_one_without_a_card_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("bloomery.operate.progress_watch.time.monotonic", lambda: clock[0])
    first, second = boards(tmp_path, "n1", "n2")
    assert second.is_alive("n1") and not second.is_alive("n9")
    for clock[0] in (102.0, 104.0, 106.0):
        assert second.is_alive("n1") and not second.leads()
    clock[0] = 106.5
    assert not second.is_alive("n1") and second.leads() and second.is_alive("n2")
    assert second.living() == ["n2"] and first.leads()


def test_the_time_in_which_a_leader_reads_no_other_card_counts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("bloomery.operate.progress_watch.time.monotonic", lambda: clock[0])
    first, _ = boards(tmp_path, "n1", "n2")
    assert first.is_alive("n2")
    for _ in range(8):
        clock[0] += 1.0
        assert first.leads()
    assert not first.is_alive("n2")


def test_a_record_that_is_no_object_or_torn_is_none(tmp_path: Path) -> None:
    (board,) = boards(tmp_path, "n1")
    for name, text in (("ask-1", "[1]"), ("ask-2", '{"a"'), ("decision-000001", '{"x"')):
        (tmp_path / f"{name}.json").write_text(text)
        assert board.get(name) is None and board.has(name)
    assert not board.has("ask-3") and board.get("ask-3") is None
    newcomer = JobBoard(tmp_path, LauncherCard(host="n2", address="a", ranks=1, pid=1), nodes=2)
    newcomer.take_part()
    assert board.put("ask-4", {"name": "é"}) and "é" in (tmp_path / "ask-4.json").read_text()
    assert not board.put("ask-4", {}) and board.get("ask-4") == {"name": "é"}


def test_a_disk_that_refuses_a_card_or_a_record_is_told_by_what_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (board,) = boards(tmp_path, "n1")

    def refuse(*words: Any) -> None:
        raise OSError(28, "No space left on device")

    for name in ("refresh", "create", "make_directory"):
        monkeypatch.setattr(board_module.durable, name, refuse)
    with pytest.raises(StorageError, match="Writing this launcher's heartbeat"):
        board.beat()
    with pytest.raises(StorageError, match="Deciding with the other launchers"):
        board.put("ask-1", {})
    with pytest.raises(StorageError, match="Meeting the other launchers"):
        JobBoard(tmp_path, LauncherCard(host="n1", address="a", ranks=1, pid=1), nodes=1)


def test_a_record_that_was_written_in_the_moment_it_was_taken_away_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (board,) = boards(tmp_path, "n1")
    path, clock, replace = tmp_path / "decision-000001.json", [100.0], durable.replace
    monkeypatch.setattr("bloomery.operate.progress_watch.time.monotonic", lambda: clock[0])
    path.touch()

    def written_meanwhile(source: Path, target: Path) -> None:
        if target != path:
            source.write_text('{"number": 1}')
        replace(source, target)

    monkeypatch.setattr(board_module.durable, "replace", written_meanwhile)
    for _ in range(8):
        assert not board.put("decision-000001", {"number": 2})
        clock[0] += 1.0
    assert board.get("decision-000001") == {"number": 1} and board.hosts() == ["n1"]


def test_a_record_counts_as_left_empty_only_from_when_it_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (board,) = boards(tmp_path, "n1")
    path, clock = tmp_path / "decision-000001.json", [100.0]
    monkeypatch.setattr("bloomery.operate.progress_watch.time.monotonic", lambda: clock[0])
    for text in ["", *8 * ['{"number": 1}'], ""]:
        path.write_text(text)
        assert not board.put("decision-000001", {"number": 2})
        clock[0] += 1.0
    assert path.exists()


def test_a_record_that_another_launcher_took_away_meanwhile_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (board,) = boards(tmp_path, "n1")

    def there_a_moment_ago(*words: Any) -> None:
        raise FileExistsError

    monkeypatch.setattr(board_module.durable, "create", there_a_moment_ago)
    assert not board.put("decision-000001", {"number": 2}) and not board.has("decision-000001")


def test_facts_are_of_the_nodes_that_have_written_them(tmp_path: Path) -> None:
    first, second = boards(tmp_path, "n1", "n2")
    gpu = GpuFacts(index="0", name="A", used_mib=1.0, total_mib=2.0)
    facts = NodeFacts(host="n1", cores=5, interfaces=("eth0",), gpus=(gpu,))
    first.put_facts(facts)
    assert second.facts(["n1", "n2"]) == {"n1": facts} and second.hosts() == ["n1", "n2"]


def test_hosts_are_in_natural_order_and_spares_fill_the_first_free_places() -> None:
    names = ["node-10", "node-2", "a10b2", "a9b10", "a9b9", "b", "10", "9"]
    assert sorted(names, key=natural_sort_key) == [
        "9", "10", "a9b9", "a9b10", "a10b2", "b", "node-2", "node-10",
    ]  # fmt: skip
    assert assign_hosts("abcd", living="axcyz", bad="y", wanted=4) == ["a", "x", "c", "z"]
    assert assign_hosts("ab", living="abx", bad="", wanted=3) == ["a", "b", "x"]
    assert assign_hosts("", living="ab", bad="a", wanted=1) == ["b"]


def test_an_overview_is_all_that_is_known_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path / "mine").create()
    recipe = override(load_recipe("demo").recipe, ["train.samples=1000", "train.ramp_up=[]",
                                                   "train.global_batch=10"])  # fmt: skip
    run.recipe.write_text(dump_recipe(recipe))
    job: Any = SimpleNamespace(job="7")
    asked: list[Any] = []

    def observed(rundir: Any, jobs: Any, *, switches: Any, silent: str) -> RunObservation:
        asked.append((rundir, list(jobs), list(switches), silent))
        return RunObservation()

    verdict = RunVerdict(state=RunStatus.RUNNING, why="job 7")
    queue = SimpleNamespace(jobs=lambda *, name, run: asked.append((name, run)) or [job])
    monkeypatch.setattr(submission, "scheduler_of", lambda section, path: queue)
    monkeypatch.setattr(overview_module, "observe_run", observed)
    silence_s: list[float] = []
    monkeypatch.setattr(
        overview_module, "judge_state", lambda seen, *, limits: silence_s.append(limits.silence_s) or verdict
    )
    with Journal(run.journal()) as journal:
        for step in (24, 25):
            told = report(step, loss=2.5, seconds=2.0, held_out_loss=3.5 if step == 24 else None).to_json()
            journal.write("step", incarnation=1, **told)
        journal.write("checkpoint", incarnation=1, step=24, path="x")
    (saved,) = (event["time"] for event in read_journal(run.journal()) if event["event"] == "checkpoint")
    assert overview(run) == RunOverview(
        run=str(run.path), name="demo", verdict=verdict, done=0.25, step=25, step_s=2.0, left_s=150.0,
        loss=2.5, held_out_loss=3.5, saved=saved, saved_step=24, warnings=(), jobs=(job,), excluded=(),
    )  # fmt: skip
    assert asked == [("demo", run.path), (run, [job], [], "")] and silence_s == [15.0]
    run.recipe.unlink()
    bare = overview(run)
    assert (bare.name, bare.jobs, bare.done, bare.left_s, bare.step) == ("mine", (), None, None, 25)
    assert asked[2:] == [(run, [], [], "")]
    keep_submission(run, submission_of("demo", ["run.name=other"], nproc=None))
    assert overview(run).name == "other", "it has not begun, and was submitted"
    run.recipe.write_text("[run]\nname = 5\n")
    (warning,) = overview(run).warnings
    assert warning.startswith("the recipe cannot be read: ")


def test_a_scheduler_that_is_silent_is_a_warning_where_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path / "mine").create()
    silent_of: list[str] = []

    def refuse(section: Any, path: Path) -> Any:
        raise BloomeryError("squeue is down", remedy="")

    def observed(rundir: Any, jobs: Any, *, switches: Any, silent: str) -> RunObservation:
        silent_of.append(silent)
        return RunObservation()

    monkeypatch.setattr(submission, "scheduler_of", refuse)
    monkeypatch.setattr(overview_module, "observe_run", observed)
    monkeypatch.setattr(
        overview_module, "judge_state", lambda seen, *, limits: RunVerdict(state=RunStatus.NEW)
    )
    for setting, warnings in (("auto", ()), ("slurm", ("squeue is down",))):
        recipe = override(load_recipe("demo").recipe, [f"submit.scheduler={setting}"])
        run.recipe.write_text(dump_recipe(recipe))
        assert overview(run).warnings == warnings
    assert silent_of == ["", "squeue is down"]


def test_a_disk_that_takes_no_more_is_a_warning_of_a_run_that_goes_on(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "mine").create()
    with Journal(run.journal()) as journal:
        journal.write("step", incarnation=1, **report(66, loss=2.5).to_json())
    beat = Heartbeat(run.heartbeat())
    beat.at(step=67, memory_bytes=0.0)
    beat.write()
    assert overview(run).warnings == (), "the journal has the step in a moment"
    beat.at(step=120, memory_bytes=0.0)
    beat.write()
    (behind,) = overview(run).warnings
    assert behind.startswith(
        "rank 0 has made step 120, and the journal ends at step 66: the disk takes no more"
    )
    saved = run.checkpoints / "step-000050.i000"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text("{}")
    with (saved / "model").open("wb") as sparse:
        sparse.truncate(1 << 42)
    assert (
        overview(run)
        .warnings[-1]
        .startswith("the next checkpoint does not fit: the last one has 4,398,046.5 MB")
    )


def test_requests_that_wait_are_warnings_of_a_run_that_does_not_take_them(tmp_path: Path) -> None:
    rundir = RunDirectory(tmp_path / "run")
    rundir.create()
    assert overview(rundir).warnings == ()
    rundir.control("rewind").write_text("400\n")
    rundir.control("skip").write_text("8:16\n24:32\n")
    back, skips = overview(rundir).warnings
    assert back.startswith("control/rewind (400) waits since 2") and back.endswith(
        "goes back after its next step"
    )
    assert (
        skips.startswith("control/skip (8:16 24:32) waits since ") and "the run leaves samples out" in skips
    )


def test_runs_are_those_that_hold_something_or_were_submitted(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run").create()
    run.incarnation(1).write_text('{"base": null}')
    (tmp_path / "submitted").mkdir()
    (tmp_path / "submitted" / "submission.json").write_text("{}")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "file").touch()
    assert {found.path.name for found in runs_under(tmp_path)} == {"run", "submitted"}


def test_a_directory_that_a_user_may_not_look_into_hides_no_run_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine", "private"):
        RunDirectory(tmp_path / name).create()
    stat = Path.stat

    def refused(path: Path, **how: Any) -> os.stat_result:
        if path.parent.name == "private":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **how)

    monkeypatch.setattr(Path, "stat", refused)
    assert [found.path.name for found in runs_under(tmp_path)] == ["mine"]


GPU = GpuFacts(index="3", name="A", used_mib=11.0, total_mib=100.0, uncorrected=2)


def test_each_finding_says_what_is_wrong_and_what_helps() -> None:
    usual = {
        "disk_gb": 9.0,
        "inodes": 50_000,
        "shm_share": 0.9,
        "teraflops": 100.0,
        "all_reduce_gb_per_s": 10.0,
    }
    facts = {host: NodeFacts(host=host, versions={"torch": "2.11"}, **usual) for host in "abc"}  # type: ignore[arg-type]
    facts["b"] = NodeFacts(
        host="b", versions={"torch": "2.12"}, gpus=(GPU,), disk_gb=4.0, inodes=9, shm_share=0.04, clock_s=7.0,
        teraflops=80.0, all_reduce_gb_per_s=8.0, is_exact=False, interfaces=("lo",), infiniband_ports=0,
    )  # fmt: skip
    facts["a"], facts["c"] = (
        NodeFacts(**{**asdict(facts[host]), "infiniband_ports": 1, "interfaces": ("eth0",)}) for host in "ac"
    )
    environment = {"NCCL_NET": "IB", "NCCL_SOCKET_IFNAME": "eth"}
    found = judge_nodes(facts, disk_gb=5.0, gpus=0, environment=environment)
    told = [(one.what, one.remedy, one.is_bad) for one in found]
    assert {one.host for one in found} == {"b"} and told == [
        ("GPU 3 has 2 uncorrected ECC errors", "Reset the GPU, or have it replaced.", True),
        ("11 of 100 MiB of GPU 3 are held by something",
         "End what an earlier job left (nvidia-smi names it).", True),
        ("4.0 GB are free for the run, 5.0 GB are needed",
         "Free space, or lower checkpoint.keep_last.", False),
        ("9 inodes are free", "Remove files that nobody needs.", False),
        ("/dev/shm is 96% full", "Remove what earlier jobs left there.", True),
        ("equal matmuls differ: it computes wrongly", "Have the node tested.", True),
        ("an active InfiniBand port is not there", "Have its link looked at.", True),
        ("an interface eth, which NCCL_SOCKET_IFNAME names, is not there", "Have its link looked at.", True),
        ("torch is 2.12, and 2.11 on most nodes", "Install the same everywhere.", True),
        ("its clock is +7.0 s off that of the others", "Let chrony or ntpd set it.", False),
        ("matmuls reach 80 TFLOP/s, and 100 on the median node",
         "Look at its clocks, temperature and links, or leave it out.", True),
        ("all-reduce reach 8 GB/s, and 10 on the median node",
         "Look at its clocks, temperature and links, or leave it out.", True),
    ]  # fmt: skip
    assert str(found[0]) == "b: GPU 3 has 2 uncorrected ECC errors"
    bare = NodeFacts(host="a", gpus=(GpuFacts(index="0", name="A", used_mib=10.0, total_mib=100.0),))
    assert judge_nodes({"a": bare}) == [] and judge_nodes({}) == []
    assert judge_nodes({"a": bare}, gpus=2) == [
        NodeFinding(
            host="a", what="1 of 2 GPUs are there", remedy="Report the node: a GPU is lost.", is_bad=True
        )
    ]


def test_what_a_start_finds_of_its_nodes_is_said_journalled_and_handed_on(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run").create()
    facts = {
        "a": NodeFacts(host="a", versions={"torch": "1", "git": "x"}, disk_gb=9.0),
        "b": NodeFacts(host="b", versions={"torch": "1"}, disk_gb=1.0, is_exact=False, shm_share=0.0),
        "c": NodeFacts(host="c", versions={"torch": "1", "git": "x"}, disk_gb=9.0),
    }
    said: list[str] = []
    told: list[Diagnosis] = []
    reactions = JobReactions(on_bad_node=told.append, on_repeating=told.append)
    check = StartCheck(gpus=0, disk_gb=5.0, environment={})
    assert check.unfit_hosts(run, facts, say=said.append, reactions=reactions) == ["b"]
    room = "1.0 GB are free for the run, 5.0 GB are needed"
    wrong, full = "equal matmuls differ: it computes wrongly", "/dev/shm is 100% full"
    version = "git is missing, and x on most nodes"
    assert said[0] == f"preflight: b: {room}\n  Free space, or lower checkpoint.keep_last." and len(said) == 4
    assert told == [
        Diagnosis(
            cause=Cause.UNFIT_NODE, culprit=Culprit(host="b"), sure=True,
            summary=f"b is not fit to train: {full}; {wrong}; {version}",
            evidence=tuple(f"preflight: {what}" for what in (full, wrong, version)),
        )
    ]  # fmt: skip
    (record,) = read_journal(run.operations)
    names = ("event", "incarnation", "step", "hosts", "versions", "differ")
    assert {name: record[name] for name in names} == {
        "event": "preflight", "incarnation": 0, "step": 0, "hosts": ["a", "b", "c"],
        "versions": {"git": "x", "torch": "1"}, "differ": {"b": {"git": "missing", "torch": "1"}},
    }  # fmt: skip
    assert record["findings"] == [
        {"host": "b", "what": what, "is_bad": what != room} for what in (room, full, wrong, version)
    ]
    assert abs(record["time"] - time.time()) < 60.0
    assert check.unfit_hosts(run, facts, say=said.append, reactions=None) == ["b"] and len(told) == 1


def test_a_card_of_a_launcher_of_another_version_is_read_for_what_is_known(tmp_path: Path) -> None:
    (board,) = boards(tmp_path, "n1")
    record = asdict(LauncherCard(host="n2", address="a", ranks=2, pid=1)) | {"colour": "red"}
    (tmp_path / "n2.json").write_text(json.dumps(record))
    assert board.card("n2") == LauncherCard(host="n2", address="a", ranks=2, pid=1)
