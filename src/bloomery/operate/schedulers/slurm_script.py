"""Writes the batch script of a job of SLURM."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from bloomery.operate.schedulers.interface import SIGNAL, JobRequest, SchedulerError

WAIT_S = 120
"""Seconds that launchers may take to end once the first has ended, before srun kills them."""


def batch_script(request: JobRequest) -> str:
    """Return the batch script: options, then one launcher on each node, whose exit status is the job's."""
    return "\n".join([*_head(request), *_body(request)]) + "\n"


def marker(request: JobRequest) -> str:
    """Return the comment by which the jobs of a run directory are found again."""
    return f"bloomery:{request.run}"


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
