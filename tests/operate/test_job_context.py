"""The job in which a launcher runs, and what it asks SLURM, for which a script stands here."""

from __future__ import annotations

import shlex
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bloomery.cli import main
from bloomery.config.load import dump_recipe, load_recipe
from bloomery.events.run_directory import RunDirectory
from bloomery.operate import job_context as job_context_module
from bloomery.operate.diagnosis import Cause, Culprit, Diagnosis
from bloomery.operate.exclusions import Exclusions, QuarantinedNode
from bloomery.operate.job_context import (
    JobContext,
    NodeInQuarantine,
    departure_of,
    job_context,
    reactions_of,
    refuse_quarantined,
)
from bloomery.operate.schedulers import kubernetes_manifest
from bloomery.operate.schedulers.interface import JobState
from bloomery.operate.schedulers.machine_queue import END, JOB

SLURM = JobContext(scheduler="slurm", job="7", nodes="node[1-2]")
OFFLINE = ["control.metadata=none"]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An scontrol whose job ends in an hour and whose reservation for node2 begins in ten minutes."""
    words = lambda s: time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + s))  # noqa: E731
    (tmp_path / "scontrol").write_text(
        f"""#!/bin/sh
echo "$*" >> {tmp_path}/asked
case "$*" in
  *job*) echo "JobId=7 EndTime={words(3600)} Deadline=N/A" ;;
  *hostnames*) printf 'node1\\nnode2\\n' ;;
  *) echo "ReservationName=repair StartTime={words(600)} Nodes=node2 Flags=MAINT,SPEC_NODES" ;;
esac
"""
    )
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path / "asked"


def test_one_launcher_for_all_asks_slurm_for_the_maintenance_of_the_jobs_nodes(
    slurm: Path, tmp_path: Path
) -> None:
    run, loaded = RunDirectory(tmp_path / "run").create(), load_recipe("demo", OFFLINE)
    assert departure_of(SLURM, "node1", run, loaded, asks_scheduler=False).check() == ""
    assert "reservation" not in slurm.read_text()
    asks = departure_of(SLURM, "node1", run, loaded, asks_scheduler=True)
    assert asks.check() == "maintenance: reservation repair of node2"


def test_the_reservation_for_maintenance_in_which_a_job_runs_itself_does_not_end_it(
    slurm: Path, tmp_path: Path
) -> None:
    run, loaded = RunDirectory(tmp_path / "run").create(), load_recipe("demo", OFFLINE)
    for own, why in (("repair", ""), ("other", "maintenance: reservation repair of node2")):
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_RESERVATION": own}
        assert departure_of(job_context(job), "node1", run, loaded, asks_scheduler=True).check() == why


def test_a_launcher_of_no_slurm_job_asks_no_slurm(slurm: Path, tmp_path: Path) -> None:
    run, loaded = RunDirectory(tmp_path / "run").create(), load_recipe("demo", OFFLINE)
    pod = JobContext(scheduler="kubernetes", job="7")
    for context in (None, pod):
        assert departure_of(context, "node1", run, loaded, asks_scheduler=True).check() == ""
    assert not slurm.exists()


def test_when_a_job_ends_is_asked_of_slurm_and_read_from_the_environment_elsewhere(slurm: Path) -> None:
    assert SLURM.end() == pytest.approx(time.time() + 3600, abs=30)
    machine = job_context({JOB: "3", END: "5000.5"})
    assert machine == JobContext(scheduler="machine", job="3", ends=5000.5)
    assert machine.end() == pytest.approx(5000.5, abs=0.1)
    assert job_context({JOB: "3"}) == JobContext(scheduler="machine", job="3")
    assert job_context({kubernetes_manifest.JOB_VARIABLE: "a-0"}) == JobContext(
        scheduler="kubernetes", job="a-0"
    )
    assert job_context({}) is None


def test_a_clock_that_is_set_leaves_a_job_as_much_time_as_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = time.time
    machine = job_context({JOB: "3", END: f"{clock() + 600:.3f}"})
    monkeypatch.setattr(time, "time", lambda: clock() + 7200.0)
    end = machine.end() if machine is not None else None
    assert end is not None and end - time.time() == pytest.approx(600.0, abs=30.0)


def test_all_nodes_of_a_job_give_it_one_name_that_no_other_step_and_no_requeued_job_has() -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]"}
    again = {**job, "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "1"}
    made = [
        job_context(one) for one in (job, {**job, "SLURM_STEP_ID": "0"}, {**job, "SLURM_STEP_ID": "1"}, again)
    ]
    names = [context.name for context in made if context is not None]
    assert len(set(names)) == 4 and all(name.startswith("slurm-7") for name in names)
    first = job_context({**job, "SLURM_RESTART_COUNT": "0", "SLURM_STEP_ID": "0"})
    assert first is not None and first.name == names[1] == "slurm-7.0" and first.nodes == "node[1-2]"


def bad_gpu(host: str) -> Diagnosis:
    return Diagnosis(
        cause=Cause.BAD_GPU,
        culprit=Culprit(host=host),
        summary="a GPU is bad",
        evidence=("NVRM: Xid 79",),
        sure=True,
    )


def test_a_bad_node_is_in_quarantine_though_the_queue_cannot_be_told(tmp_path: Path) -> None:
    run, said = RunDirectory(tmp_path / "run").create(), list[str]()
    loaded = load_recipe("demo", ["submit.scheduler=slurm"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        reactions_of(run, loaded, say=said.append).on_bad_node(bad_gpu("node1"))
    (node,) = Exclusions.of(run, loaded.recipe.submit).nodes().values()
    assert (node.host, node.cause, node.evidence) == ("node1", str(Cause.BAD_GPU), "NVRM: Xid 79")
    assert node.run == str(run.path) and abs(node.since - time.time()) < 60
    assert len(said) == 2 and "in quarantine" in said[0] and "queue could not be told" in said[1]


def test_a_failure_of_no_known_node_puts_none_into_quarantine(tmp_path: Path) -> None:
    run, loaded = RunDirectory(tmp_path / "run").create(), load_recipe("demo")
    reactions_of(run, loaded, say=pytest.fail).on_bad_node(bad_gpu(""))
    assert Exclusions.of(run, loaded.recipe.submit).nodes() == {}


def test_a_failure_that_would_repeat_arms_the_switch_and_tells_where_it_cannot(tmp_path: Path) -> None:
    run, said = RunDirectory(tmp_path / "run").create(), list[str]()
    repeats = Diagnosis(
        cause=Cause.EXCEPTION, culprit=Culprit(), summary="KeyError: 'tokens'", evidence=(), sure=True
    )
    reactions = reactions_of(run, load_recipe("demo"), say=said.append)
    reactions.on_repeating(repeats)
    assert "KeyError" in run.control("stop").read_text() and "is armed" in said[0]
    run.control("stop").unlink()
    run.control("stop").mkdir()
    reactions.on_repeating(repeats)
    assert "could not be armed" in said[1] and len(said) == 2


def test_a_job_leaves_as_long_before_its_end_as_its_recipe_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "switches"
    settings = ["control.maintenance_minutes=7", "submit.signal_before_s=123", *OFFLINE]
    monkeypatch.setenv("HOME", str(tmp_path))
    settings += ["control.directory=~/switches"]
    run, loaded = RunDirectory(tmp_path / "run").create(), load_recipe("demo", settings)
    monkeypatch.setattr(job_context_module, "Departure", lambda rundir, **more: SimpleNamespace(**more))
    job = JobContext(scheduler="machine", job="3", ends=time.time() + 60.0)
    for context, end in ((job, job.ends), (None, None)):
        made = departure_of(context, "n1", run, loaded, asks_scheduler=True)
        assert (made.ahead_s, made.unmeasured_s, len(made.notices)) == (420.0, 123.0, 2)  # type: ignore[attr-defined]
        ends = made.end_of_job()  # type: ignore[attr-defined]
        assert ends == (None if end is None else pytest.approx(end, abs=5.0))
    file = run.control_dir / "maintenance"
    file.write_text("2001-02-03T04:05\n")
    assert made.notices[1]() == [], "it was over before this job began"  # type: ignore[attr-defined]
    file.write_text("")
    assert len(made.notices[1]()) == 1  # type: ignore[attr-defined]
    elsewhere.mkdir()
    (elsewhere / "maintenance").touch()
    assert len(made.notices[1]()) == 2  # type: ignore[attr-defined]


def test_slurm_is_asked_for_the_node_itself_where_the_job_does_not_list_its_nodes(
    slurm: Path, tmp_path: Path
) -> None:
    run, loaded = RunDirectory(tmp_path / "run").create(), load_recipe("demo", OFFLINE)
    alone = JobContext(scheduler="slurm", job="7")
    assert departure_of(alone, "node2", run, loaded, asks_scheduler=True).check().startswith("maintenance: ")
    assert departure_of(alone, "node1", run, loaded, asks_scheduler=True).check() == ""


def test_a_node_in_quarantine_starts_nothing_and_others_do(tmp_path: Path) -> None:
    run, loaded = RunDirectory(tmp_path / "my run").create(), load_recipe("demo")
    exclusions = Exclusions.of(run, loaded.recipe.submit)
    exclusions.add(QuarantinedNode(host="node1", cause="bad GPU", since=1e9))
    refuse_quarantined("node2", run, loaded)
    with pytest.raises(NodeInQuarantine, match="bad GPU") as refused:
        refuse_quarantined("node1", run, loaded)
    assert refused.value.exit_status == 67
    assert f"`bloomery preflight RECIPE --run '{run.path}' --long` there" in refused.value.remedy
    run.recipe.write_text(dump_recipe(loaded.recipe))
    with pytest.raises(NodeInQuarantine) as refused:
        refuse_quarantined("node1", run, loaded)
    _, long, _, release, _ = refused.value.remedy.split("`")
    assert shlex.split(long) == ["bloomery", "preflight", str(run.path), "--long"]
    assert main(shlex.split(release)[1:]) == 0 and exclusions.nodes() == {}


def test_the_queue_is_told_of_all_nodes_in_quarantine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, loaded, said = RunDirectory(tmp_path / "run").create(), load_recipe("demo"), list[str]()
    told: list[tuple[list[str], list[str]]] = []
    queue = SimpleNamespace(
        jobs=lambda *, name, run: [SimpleNamespace(job="8", state=JobState.PENDING)],
        exclude=lambda jobs, nodes: told.append((list(jobs), list(nodes))),
    )
    monkeypatch.setattr(job_context_module, "scheduler_of", lambda section, path: queue)
    reactions = reactions_of(run, loaded, say=said.append)
    for host in ("node2", "node1"):
        reactions.on_bad_node(bad_gpu(host))
    assert told == [(["8"], ["node2"]), (["8"], ["node1", "node2"])]
    assert said[-1] == "node1, node2 excluded from 8"


def test_a_record_of_quarantine_has_the_beginning_of_a_long_line_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, loaded, said = RunDirectory(tmp_path / "run").create(), load_recipe("demo"), list[str]()
    queue = SimpleNamespace(jobs=lambda *, name, run: [], exclude=pytest.fail)
    monkeypatch.setattr(job_context_module, "scheduler_of", lambda section, path: queue)
    reactions = reactions_of(run, loaded, say=said.append)
    reactions.on_bad_node(replace(bad_gpu("node1"), evidence=("x" * 300, "y")))
    reactions.on_bad_node(replace(bad_gpu("node2"), evidence=()))
    nodes = Exclusions.of(run, loaded.recipe.submit).nodes()
    assert (nodes["node1"].evidence, nodes["node2"].evidence) == ("x" * 200, "")
    assert len(said) == 2, "no waiting job is told of"


def test_the_switch_that_stops_a_queue_says_why_in_a_line_and_is_left_alone_by_a_second_start(
    tmp_path: Path,
) -> None:
    run, said = RunDirectory(tmp_path / "run").create(), list[str]()
    reactions = reactions_of(run, load_recipe("demo"), say=said.append)
    reactions.on_repeating(replace(bad_gpu(""), cause=Cause.RUN_BUSY))
    assert not run.control("stop").exists() and said == []
    reactions.on_repeating(replace(bad_gpu(""), cause=Cause.EXCEPTION, summary="y" * 300))
    written = run.control("stop").read_text()
    assert "exception: yyy" in written and "y" * 109 in written and "y" * 110 not in written


def test_the_run_of_a_bad_node_is_named_wherever_its_launcher_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, asked = RunDirectory(tmp_path / "run").create(), list[tuple[str, Path]]()
    queue = SimpleNamespace(jobs=lambda *, name, run: asked.append((name, run)) or [])
    monkeypatch.setattr(
        job_context_module,
        "scheduler_of",
        lambda section, path: asked.append((section.exclusions, path)) or queue,
    )
    monkeypatch.chdir(tmp_path)
    shared = tmp_path / "shared.json"
    loaded = load_recipe("demo", [f'submit.exclusions="{shared}"'])
    reactions_of(RunDirectory(Path("run")), loaded, say=lambda line: None).on_bad_node(bad_gpu("node1"))
    assert Exclusions(shared).nodes()["node1"].run == str(run.path)
    assert asked == [(str(shared), run.path), ("demo", run.path)]
    with pytest.raises(NodeInQuarantine):
        refuse_quarantined("node1", RunDirectory(tmp_path / "another"), loaded)
