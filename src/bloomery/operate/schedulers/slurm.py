"""SLURM as a scheduler, by its commands and batch scripts; any version that has job arrays."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bloomery.operate.schedulers.interface import (
    SIGNAL,
    JobRequest,
    JobState,
    QueuedJob,
    SchedulerError,
    SchedulerNode,
    SchedulerSilent,
)

_ANSWER_S = 60.0
_COMMENT = "bloomery:"
_SEPARATOR = "\x1f"
_FIELDS = {
    "id": "%A",
    "array": "%F",
    "index": "%K",
    "state": "%T",
    "reason": "%r",
    "user": "%u",
    "nodes": "%N",
    "start": "%S",
    "end": "%e",
    "submit": "%V",
    "comment": "%k",
}
_HELD_WORDS = {"REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
_QUEUED = {"PENDING", "REQUEUED", "CONFIGURING", "REQUEUE_FED"} | _HELD_WORDS
_RUNNING = {"RUNNING", "STAGE_OUT", "SIGNALING", "RESIZING"}
_WELL = {"COMPLETED", "CANCELLED", "PREEMPTED", "REVOKED"}
_HELD = ("JobHeldUser", "JobHeldAdmin", "JobHoldMaxRequeue", "launch failed requeued held")


class Slurm:
    """Speaks to SLURM through sbatch, squeue, scontrol, scancel and sinfo.

    environment: the environment of these commands; None: that of this process.
    """

    name = "slurm"

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        # Variables of the job in which this runs would become options of the job that it submits.
        own = os.environ if environment is None else environment
        self._environment = {
            name: value
            for name, value in own.items()
            if name == "SLURM_CONF" or not name.startswith(("SLURM", "SBATCH", "SQUEUE", "SINFO"))
        }

    @staticmethod
    def is_here() -> bool:
        """Return whether this machine has SLURM's commands."""
        return shutil.which("sbatch") is not None

    def script(self, request: JobRequest) -> str:
        """Return the batch script."""
        return batch_script(request)

    def submit(self, request: JobRequest) -> list[str]:
        """Submit one array, or one job; returns its number."""
        output = self._run("sbatch", "--parsable", given=batch_script(request))
        return [output.strip().partition(";")[0]]

    def jobs(self, *, name: str, run: Path) -> list[QueuedJob]:
        """Return the jobs of a run of all users, with those that ended while SLURM still knows them."""
        form = _SEPARATOR.join(_FIELDS.values())
        output = self._run(
            "squeue", "--noheader", "--all", "--states=all", f"--name={job_name(name)}", f"--format={form}"
        )
        jobs = [parse_job(line) for line in output.splitlines() if line.strip()]
        return [job for job, comment in jobs if _is_of(comment, run)]

    def cancel(self, jobs: Sequence[str]) -> None:
        """Cancel the jobs."""
        if jobs:
            self._run("scancel", "--quiet", *jobs)

    def exclude(self, jobs: Sequence[str], nodes: Sequence[str]) -> None:
        """Replace the exclusions of jobs that wait."""
        for job in jobs:
            try:
                self._run("scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(nodes)}")
            except SchedulerError as refused:
                # One that has just started cannot be told; its launcher reads the list itself.
                if "no longer pending" not in refused.message:
                    raise

    def nodes(self) -> list[SchedulerNode]:
        """Return the nodes of all partitions."""
        output = self._run("sinfo", "--noheader", "--Node", "--format=%N|%T|%E")
        nodes = {}
        for line in output.splitlines():
            name, state, reason = (part.strip() for part in line.split("|", 2))
            shown = "" if reason in ("none", "(null)") else reason
            nodes[name] = SchedulerNode(name=name, state=state.rstrip("*~#!%$@^-"), reason=shown)
        return list(nodes.values())

    def end_of_job(self, job: str) -> float | None:
        """Return when SLURM will end a job, in seconds since 1970; None where the job has no limit."""
        output = self._run("scontrol", "--oneliner", "show", "job", job)
        match = re.search(r"\bEndTime=(\S+)", output)
        return _seconds(match[1]) if match else None

    def reservations(self) -> list[tuple[str, float, tuple[str, ...]]]:
        """Return (name, start in seconds since 1970, nodes) of the reservations for maintenance to come."""
        output = self._run("scontrol", "--oneliner", "show", "reservation")
        reservations = []
        for line in output.splitlines():
            fields = dict(word.partition("=")[::2] for word in line.split())
            start = _seconds(fields.get("StartTime", ""))
            if start is not None and "MAINT" in fields.get("Flags", ""):
                nodes = fields.get("Nodes", "")
                reservations.append((fields.get("ReservationName", "?"), start, self.expanded(nodes)))
        return reservations

    def expanded(self, nodes: str) -> tuple[str, ...]:
        """Return the names in SLURM's short form of a list of nodes, such as `iam[01-03]`."""
        if not nodes or nodes == "(null)":
            return ()
        if "[" not in nodes:
            return tuple(nodes.split(","))
        return tuple(self._run("scontrol", "show", "hostnames", nodes).split())

    def _run(self, *command: str, given: str | None = None) -> str:
        try:
            done = subprocess.run(
                command,
                input=given,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_ANSWER_S,
                check=False,
                env=self._environment,
            )
        except FileNotFoundError as missing:
            raise SchedulerError(
                f"{command[0]} is not on this machine, so SLURM cannot be asked.",
                remedy="Log in to a node of the cluster, or write submit.scheduler=machine.",
            ) from missing
        except subprocess.TimeoutExpired as late:
            raise SchedulerSilent(
                f"SLURM has not answered {command[0]} for {_ANSWER_S:.0f} s.",
                remedy="Look whether slurmctld is up: scontrol ping.",
            ) from late
        if done.returncode:
            error_text = (done.stderr.strip() or done.stdout.strip()).replace("\n", "; ")
            kind = SchedulerSilent if "timed out" in error_text else SchedulerError
            raise kind(f"SLURM refused {command[0]}: {error_text}", remedy=_remedy(command[0], error_text))
        return done.stdout


def parse_job(line: str) -> tuple[QueuedJob, str]:
    """Return a job and its comment from a line of squeue in the form that this module asks for."""
    fields = dict(zip(_FIELDS, line.split(_SEPARATOR), strict=True))
    index, word, reason = fields["index"].strip(), fields["state"].strip(), fields["reason"].strip()
    state = state_of(word, reason)
    job = QueuedJob(
        job=fields["id"] if index in ("", "N/A") else f"{fields['array']}_{_index(index)}",
        state=state,
        state_text=word,
        reason="" if reason in ("None", "(null)") else reason,
        user=fields["user"],
        nodes=_names(fields["nodes"].strip()),
        tasks=_count(index),
        expected_start=_seconds(fields["start"]) if state.is_queued else None,
        started=None if state.is_queued else _seconds(fields["start"]),
        ends=_seconds(fields["end"]),
        submitted=_seconds(fields["submit"]) or 0.0,
    )
    return job, fields["comment"].strip()


def _is_of(comment: str, run: Path) -> bool:
    """Return whether a job is of a run directory, also where links lead there from the path it was given."""
    place = comment.removeprefix(_COMMENT)
    if place == comment:
        return False
    return place == str(run) or os.path.realpath(place) == os.path.realpath(run)


def state_of(word: str, reason: str) -> JobState:
    """Return what SLURM's state and reason mean."""
    if word in _QUEUED:
        if reason == "DependencyNeverSatisfied":
            return JobState.NEVER
        return JobState.HELD if reason in _HELD or word in _HELD_WORDS else JobState.PENDING
    if word in _RUNNING:
        return JobState.RUNNING
    if word in ("SUSPENDED", "STOPPED"):
        return JobState.SUSPENDED
    if word == "COMPLETING":
        return JobState.COMPLETING
    return JobState.ENDED if word in _WELL else JobState.FAILED


def _index(index: str) -> str:
    """Return the index of an array's tasks as scancel takes it: `[2-5]` for `2-5%1`."""
    plain = index.partition("%")[0]
    return plain if plain.isdecimal() else f"[{plain}]"


def _count(index: str) -> int:
    """Return the number of tasks in `2-5,7%1`; 1 where it is no range."""
    count = 0
    for part in index.partition("%")[0].split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal():
            return 1
        count += (int(last) - int(first) + 1) if last.isdecimal() else 1
    return max(1, count)


def _names(nodes: str) -> tuple[str, ...]:
    """Return the names in `iam[07-09,11],login`, each part of it with at most one pair of brackets."""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes):
        match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part)
        if match is None:
            names.append(part)
            continue
        for item in match[2].split(","):
            first, _, last = item.partition("-")
            numbers = range(int(first), int(last or first) + 1) if first.isdecimal() else ()
            names += [f"{match[1]}{number:0{len(first)}}{match[3]}" for number in numbers]
    return tuple(names)


def _seconds(text: str) -> float | None:
    """Return SLURM's local time in seconds since 1970; None for Unknown, N/A and NONE.

    In the hour that comes twice when summer time ends it is the earlier moment: a job must not leave late.
    """
    try:
        parts = time.strptime(text.strip(), "%Y-%m-%dT%H:%M:%S")
    except ValueError:
        return None
    moments = [time.mktime((*parts[:8], is_summer)) for is_summer in (1, 0, -1)]
    return min((moment for moment in moments if time.localtime(moment)[:6] == parts[:6]), default=moments[-1])


_UNREACHED = re.compile(r"configuration source|slurm controller|[Tt]imed out|onnection refused")
"""Texts in errors of SLURM's commands where the cluster did not hear them."""


def _remedy(command: str, error_text: str) -> str:
    if "Invalid account" in error_text:
        return "Name an account that you may use: submit.account=…; sacctmgr show associations lists them."
    if "invalid partition" in error_text.lower():
        return "Name a partition of this cluster: submit.partition=…; sinfo lists them."
    if "Invalid job id" in error_text:
        return "The job has ended; `bloomery status` shows what is there."
    if command != "sbatch" or _UNREACHED.search(error_text):
        return "Look from this machine whether SLURM's controller can be reached: scontrol ping."
    return "Correct what it names in [submit]; `--dry-run` prints the script."


WAIT_S = 120
"""Seconds that launchers may take to end once the first has ended, before srun kills them."""


def batch_script(request: JobRequest) -> str:
    """Return the batch script: options, then one launcher on each node, whose exit status is the job's."""
    return "\n".join([*_head(request), *_body(request)]) + "\n"


def marker(request: JobRequest) -> str:
    """Return the comment by which the jobs of a run directory are found again."""
    return f"{_COMMENT}{request.run}"


def job_name(name: str) -> str:
    """Return the name that the jobs of a run have in the scheduler's queue."""
    return f"bloomery-{name}"


def _head(request: JobRequest) -> Iterator[str]:
    section = request.section
    yield "#!/bin/bash"
    tasks = f"1-{request.tasks}%1" if request.tasks > 1 else ""
    exclude = ",".join(dict.fromkeys((*section.exclude, *request.exclude)))
    log = "job-%A_%a.log" if tasks else "job-%j.log"
    options = {
        "job-name": job_name(request.name),
        "comment": marker(request),
        "chdir": str(request.directory),
        "nodes": str(request.nodes),
        "ntasks-per-node": "1",
        "time": _minutes(section.minutes),
        "array": tasks,
        "dependency": f"afterany:{request.after}" if request.after else "",
        "signal": f"{SIGNAL}@{section.signal_before_s}",
        "output": f"{request.run}/logs/{log}",
        "gpus-per-node": str(section.gpus_per_node or ""),
        "cpus-per-task": str(section.cpus_per_node or ""),
        "mem": section.memory_per_node,
        "partition": section.partition,
        "account": section.account,
        "qos": section.qos,
        "reservation": section.reservation,
        "constraint": section.constraint,
        "nice": str(section.nice or ""),
        "exclude": exclude,
    }
    for name, value in options.items():
        if value:
            yield f"#SBATCH --{name}={_option(value)}"
    # A task of an array that is requeued starts long after the next one (the credential must expire first).
    yield "#SBATCH --no-requeue"
    yield "#SBATCH --open-mode=append"
    if section.spares:
        yield "#SBATCH --no-kill"
    for more in section.more:
        if not more.isprintable():
            raise SchedulerError(
                f"submit.more has {more!r}, which is more than a line.", remedy="Write one option each."
            )
        yield f"#SBATCH {more}"


def _body(request: JobRequest) -> Iterator[str]:
    section = request.section
    yield ""
    yield "set -euo pipefail"
    yield "umask 002"
    yield 'echo "$(date +%FT%T) job $SLURM_JOB_ID begins on $SLURM_JOB_NODELIST"'
    if section.setup:
        yield "set +u  # what sets an environment up, such as conda, reads variables that nobody has set"
        yield from section.setup
        yield "set -u"
    if request.top_up:
        yield "# A queue that cannot be filled ends no training."
        yield f'{shlex.join(request.top_up)} || echo "the queue could not be filled"'
    # What SLURM signals before the launcher has its handlers must not end it.
    task = f"trap '' {SIGNAL}; exec {shlex.join(request.command)}"
    log = f"{request.run}/logs/job-%j-%N-%t.log"
    # With spares a lost node ends nothing: the launchers of the others go on.
    ends_together = ["--no-kill"] if section.spares else ["--kill-on-bad-exit=1", f"--wait={WAIT_S}"]
    srun = ["srun", "--ntasks-per-node=1", *ends_together, f"--output={log}", "bash", "-c", task]
    yield "status=0"
    yield f"{shlex.join(srun)} || status=$?"
    yield 'echo "$(date +%FT%T) job $SLURM_JOB_ID ends with status $status"'
    yield 'exit "$status"'


def _minutes(minutes: float) -> str:
    """Return a time limit as SLURM writes it, in whole minutes, rounded up: [DAYS-]HOURS:MINUTES:00."""
    whole = -int(-minutes // 1)
    days, rest = divmod(whole, 24 * 60)
    hours, rest = divmod(rest, 60)
    return f"{days}-{hours:02}:{rest:02}:00" if days else f"{hours:02}:{rest:02}:00"


def _option(value: str) -> str:
    """Return the value of an option, quoted where sbatch would split it. Raises SchedulerError."""
    if not value.isprintable() or '"' in value:
        raise SchedulerError(
            f"{value!r} cannot stand in a batch script: it has a quote, or a character that is not printed.",
            remedy="Correct it in [submit], in the list of nodes in quarantine, or in the path of the run.",
        )
    return f'"{value}"' if any(character.isspace() for character in value) else value
