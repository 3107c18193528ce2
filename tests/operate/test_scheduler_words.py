"""What SLURM is told and asked, word by word, by commands that stand in for its own."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from bloomery.config.submit import SubmitSection
from bloomery.operate.schedulers.interface import (
    JobRequest,
    JobState,
    SchedulerError,
    SchedulerNode,
)
from bloomery.operate.schedulers.kubernetes import Kubernetes
from bloomery.operate.schedulers.slurm import Slurm, batch_script, state_of
from bloomery.operate.schedulers.slurm import parse_job as parse_line

RUN = Path("/shared/my runs/seven")


class Commands:
    """Commands in a directory of their own, each of which notes how it was called and prints an answer."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.path = f"{place}:{os.environ['PATH']}"

    def answers(self, name: str, text: str, *, error: str = "", status: int = 0) -> None:
        (self.place / f"{name}.answer").write_text(text)
        script = f"""#!/bin/sh
case "$*" in *--parsable*|*" -f -"*) cat > {self.place}/given ;; esac
echo "{name} $*" >> {self.place}/called
env > {self.place}/environment
cat {self.place}/{name}.answer
echo {shlex.quote(error)} >&2
exit {status}
"""
        (self.place / name).write_text(script)
        (self.place / name).chmod(0o755)

    def called(self) -> list[str]:
        """Return the calls since the last look."""
        path = self.place / "called"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    made = Commands(tmp_path)
    monkeypatch.setenv("PATH", made.path)
    return made


def asked(**more: Any) -> JobRequest:
    section = SubmitSection(**more.pop("section", {}))
    given = {
        "name": "seven",
        "run": RUN,
        "directory": Path("/home/ann"),
        "command": ("bloomery", "launch", "a b"),
    }
    return JobRequest(**given | {"nodes": 3, "section": section} | more)


def options(request: JobRequest) -> dict[str, str]:
    lines = [line for line in batch_script(request).splitlines() if line.startswith("#SBATCH --")]
    return {name: value for name, _, value in (line[len("#SBATCH --") :].partition("=") for line in lines)}


def test_each_setting_is_the_option_of_its_name() -> None:
    section = {
        "gpus_per_node": 8, "cpus_per_node": 96, "memory_per_node": "400G", "partition": "long",
        "account": "llm", "qos": "high", "reservation": "ours", "constraint": "a100", "nice": 7,
        "minutes": 90.5, "signal_before_s": 444, "exclude": ("bad1", "bad2"), "more": ("--mail-user=ann",),
    }  # fmt: skip
    told = options(asked(section=section, exclude=("bad2", "bad3"), after="712"))
    assert told == {
        "job-name": "bloomery-seven", "comment": '"bloomery:/shared/my runs/seven"', "chdir": "/home/ann",
        "nodes": "3", "ntasks-per-node": "1", "time": "01:31:00", "dependency": "afterany:712",
        "signal": "USR1@444", "output": '"/shared/my runs/seven/logs/job-%j.log"', "gpus-per-node": "8",
        "cpus-per-task": "96", "mem": "400G", "partition": "long", "account": "llm", "qos": "high",
        "reservation": "ours", "constraint": "a100", "nice": "7", "exclude": "bad1,bad2,bad3",
        "no-requeue": "", "open-mode": "append", "mail-user": "ann",
    }  # fmt: skip
    several = options(asked(tasks=4))
    assert (several["array"], several["output"]) == ("1-4%1", '"/shared/my runs/seven/logs/job-%A_%a.log"')
    assert not several.keys() & {
        "gpus-per-node",
        "mem",
        "partition",
        "exclude",
        "dependency",
        "nice",
        "no-kill",
    }


@pytest.mark.parametrize(
    ("minutes", "text"),
    [(60.0, "01:00:00"), (1439.1, "1-00:00:00"), (0.5, "00:01:00"), (2 * 1440 + 61, "2-01:01:00")],
)
def test_a_limit_is_whole_minutes_and_no_less_than_was_asked(minutes: float, text: str) -> None:
    assert options(asked(section={"minutes": minutes}))["time"] == text


def test_an_option_of_several_lines_is_refused() -> None:
    with pytest.raises(SchedulerError, match="more than a line"):
        batch_script(asked(section={"more": ("--a\nrm -r x",)}))


@pytest.mark.parametrize("spares", [0, 1])
def test_a_lost_node_ends_a_job_that_has_no_spare(spares: int) -> None:
    lines = batch_script(asked(section={"spares": spares})).splitlines()
    (srun,) = (shlex.split(line) for line in lines if line.startswith("srun "))
    ends = ["--kill-on-bad-exit=1", "--wait=120"] if not spares else ["--no-kill"]
    log = f"--output={RUN}/logs/job-%j-%N-%t.log"
    task = "trap '' USR1; exec bloomery launch 'a b'"
    assert srun == ["srun", "--ntasks-per-node=1", *ends, log, "bash", "-c", task, "||", "status=$?"]
    assert ("#SBATCH --no-kill" in lines) == bool(spares)


def test_a_queue_that_cannot_be_filled_ends_no_training() -> None:
    lines = batch_script(asked(top_up=("false", "a b"), section={"setup": ("module load x",)})).splitlines()
    assert "false 'a b' || echo \"the queue could not be filled\"" in lines
    (unset,) = (place for place, line in enumerate(lines) if line.startswith("set +u"))
    assert lines[unset + 1 : unset + 3] == ["module load x", "set -u"]


def test_slurm_is_asked_without_the_variables_of_the_job_in_which_this_runs(commands: Commands) -> None:
    own = {"SLURM_CONF": "/etc/ours", "SLURM_JOB_ID": "7", "SBATCH_ACCOUNT": "x", "SQUEUE_FORMAT": "y"}
    commands.answers("sbatch", "4711;cluster2\n")
    slurm = Slurm({"PATH": commands.path, "SINFO_FORMAT": "z", "HOME": "/h", **own})
    assert slurm.submit(asked()) == ["4711"]
    assert (commands.place / "given").read_text() == batch_script(asked())
    seen = dict(
        line.partition("=")[::2] for line in (commands.place / "environment").read_text().splitlines()
    )
    assert {name: seen.get(name) for name in ("SLURM_CONF", "HOME")} == {
        "SLURM_CONF": "/etc/ours",
        "HOME": "/h",
    }
    assert not {"SLURM_JOB_ID", "SBATCH_ACCOUNT", "SQUEUE_FORMAT", "SINFO_FORMAT"} & set(seen)


def line(number: str, comment: str, **changed: str) -> str:
    fields = {
        "id": number, "array": number, "index": "N/A", "state": "RUNNING", "reason": "None", "user": "ann",
        "nodes": "n1", "start": "2031-05-06T07:08:09", "end": "2031-05-06T19:00:00",
        "submit": "2031-05-05T00:00:00", "comment": comment,
    }  # fmt: skip
    return "\x1f".join((fields | changed).values())


def test_the_jobs_of_a_run_are_those_with_its_directory_in_their_comment(commands: Commands) -> None:
    others = [line("2", "bloomery:/r/seven2"), line("3", ""), line("4", "bloomery:/r")]
    commands.answers("squeue", "\n".join([line("1", "bloomery:/r/seven"), *others, ""]))
    jobs = Slurm().jobs(name="seven", run=Path("/r/seven"))
    assert [found.job for found in jobs] == ["1"]
    (call,) = commands.called()
    assert "--name=bloomery-seven" in call and "--states=all" in call and "--all" in call


def test_the_times_of_a_job_are_its_own() -> None:
    def at(text: str) -> float:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))

    runs, comment = parse_line(line("7", " bloomery:/r "))
    assert comment == "bloomery:/r" and (runs.reason, runs.nodes, runs.user) == ("", ("n1",), "ann")
    assert (runs.started, runs.expected_start) == (at("2031-05-06T07:08:09"), None)
    assert (runs.ends, runs.submitted) == (at("2031-05-06T19:00:00"), at("2031-05-05T00:00:00"))
    waits, _ = parse_line(line("7", "", state="PENDING", reason="Priority", nodes="", end="N/A"))
    assert (waits.started, waits.expected_start) == (None, at("2031-05-06T07:08:09"))
    assert (waits.ends, waits.reason, waits.nodes) == (None, "Priority", ())
    assert parse_line(line("7", "", submit="N/A"))[0].submitted == 0.0


@pytest.mark.parametrize(
    ("word", "reason", "state"),
    [
        ("REQUEUE_HOLD", "None", JobState.HELD),
        ("PENDING", "JobHeldAdmin", JobState.HELD),
        ("PENDING", "launch failed requeued held", JobState.HELD),
        ("CONFIGURING", "None", JobState.PENDING),
        ("STAGE_OUT", "None", JobState.RUNNING),
        ("STOPPED", "None", JobState.SUSPENDED),
        ("PREEMPTED", "None", JobState.ENDED),
        ("OUT_OF_MEMORY", "None", JobState.FAILED),
    ],
)
def test_rarer_states_of_slurm_mean_what_they_say(word: str, reason: str, state: JobState) -> None:
    assert state_of(word, reason) == state


def test_a_job_that_has_started_cannot_be_told_of_nodes_and_the_others_are(commands: Commands) -> None:
    commands.answers("scontrol", "", error="Job is no longer pending execution for job 7", status=1)
    Slurm().exclude(["7", "8"], ["n1", "n2"])
    assert commands.called() == [f"scontrol update JobId={number} ExcNodeList=n1,n2" for number in (7, 8)]
    commands.answers("scontrol", "", error="Access/permission denied", status=1)
    with pytest.raises(SchedulerError, match="Access/permission denied"):
        Slurm().exclude(["7", "8"], ["n1"])


def test_cancelling_no_job_asks_nobody(commands: Commands) -> None:
    commands.answers("scancel", "")
    commands.answers("kubectl", "")
    for scheduler in (Slurm(), Kubernetes()):
        scheduler.cancel([])
    assert commands.called() == []
    Slurm().cancel(["7", "8_[2-5]"])
    Kubernetes("ours").cancel(["a", "b"])
    assert commands.called() == [
        "scancel --quiet 7 8_[2-5]",
        "kubectl --namespace ours delete job --ignore-not-found --wait=false a b",
    ]


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("Invalid account or account/partition combination", "submit.account"),
        ("invalid partition specified: x", "submit.partition"),
        ("Invalid job id specified", "The job has ended"),
        ("Memory specification can not be satisfied", "--dry-run"),
    ],
)
def test_what_slurm_refuses_comes_with_what_helps(commands: Commands, said: str, remedy: str) -> None:
    commands.answers("sbatch", "", error=said, status=1)
    with pytest.raises(SchedulerError) as refused:
        Slurm().submit(asked())
    assert said in refused.value.message and remedy in refused.value.remedy


def test_a_scheduler_is_waited_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(command: list[str], **more: Any) -> None:
        limits.append(more["timeout"])
        raise subprocess.TimeoutExpired(command, more["timeout"])

    limits: list[float] = []
    monkeypatch.setattr(subprocess, "run", late)
    for scheduler in (Slurm(), Kubernetes()):
        with pytest.raises(SchedulerError, match="has not answered"):
            scheduler.nodes()
    assert limits == [60.0, 60.0]


def test_nodes_and_reservations_are_read_as_slurm_writes_them(commands: Commands) -> None:
    commands.answers("sinfo", "n1|down*|Not responding|x\nn2|idle|none\nn3|mixed-|(null)\nn2|idle|none\n")
    assert Slurm().nodes() == [
        SchedulerNode(name="n1", state="down", reason="Not responding|x"),
        SchedulerNode(name="n2", state="idle"),
        SchedulerNode(name="n3", state="mixed"),
    ]
    when = "StartTime=2031-05-06T07:08:09"
    commands.answers(
        "scontrol",
        f"ReservationName=repair {when} Nodes=n1,n2 Flags=MAINT,SPEC_NODES\n"
        f"ReservationName=course {when} Nodes=n3 Flags=SPEC_NODES\n"
        "ReservationName=odd StartTime=Unknown Nodes=n4 Flags=MAINT\n"
        f"ReservationName=none {when} Nodes=(null) Flags=MAINT\n",
    )
    start = time.mktime((2031, 5, 6, 7, 8, 9, 0, 0, -1))
    assert Slurm().reservations() == [("repair", start, ("n1", "n2")), ("none", start, ())]


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        ("JobId=7 EndTime=2031-05-06T07:08:09 X=1", True),
        ("JobId=7 EndTime=Unknown", False),
        ("JobId=7", False),
    ],
)
def test_a_job_without_a_limit_has_no_end(commands: Commands, answer: str, end: bool) -> None:
    commands.answers("scontrol", answer)
    when = time.mktime((2031, 5, 6, 7, 8, 9, 0, 0, -1))
    assert Slurm().end_of_job("7") == (when if end else None)
    assert commands.called() == ["scontrol --oneliner show job 7"]


@pytest.mark.parametrize(
    ("zone", "told", "utc"),
    [
        ("Europe/Berlin", "2026-10-25T01:30:00", 1792884600.0),
        ("Europe/Berlin", "2026-10-25T02:30:00", 1792888200.0),  # it comes twice: the earlier one
        ("Europe/Berlin", "2026-10-25T03:30:00", 1792895400.0),
        ("Europe/Berlin", "2026-03-29T02:30:00", 1774747800.0),  # it never comes
        ("Asia/Tokyo", "2026-10-25T02:30:00", 1792863000.0),
    ],
)
def test_an_end_in_the_night_when_clocks_change_is_not_taken_for_a_later_one(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, zone: str, told: str, utc: float
) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        time.mktime((2026, 12, 25, 0, 0, 0, 0, 0, -1))  # the C library guesses what it met last
        commands.answers("scontrol", f"JobId=7 EndTime={told} X=1")
        assert Slurm().end_of_job("7") == utc
    finally:
        monkeypatch.undo()
        time.tzset()
