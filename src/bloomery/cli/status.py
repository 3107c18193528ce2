"""`bloomery status` and `bloomery cancel`: show what runs are doing, and end their jobs."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.cli.arguments import parser
from bloomery.cli.json_output import json_text
from bloomery.cli.tables import table_text
from bloomery.errors import BloomeryError
from bloomery.events.run_directory import RunDirectory

if TYPE_CHECKING:
    from bloomery.operate.overview import RunOverview

_EXAMPLES = """\
bloomery status                        all runs under runs/
bloomery status runs/mine              one run: its state, jobs, progress, warnings, nodes in quarantine
bloomery status --under /group/runs    all runs under another directory
bloomery status runs/mine --nodes      with the nodes of the cluster
"""
_CANCEL = """\
bloomery cancel runs/mine              end all jobs of a run, those that wait first
bloomery cancel runs/mine --queued     only those that wait
"""
_BAD = 1


def run(arguments: list[str]) -> int:
    """Print what one run does, or all; returns 1 where a person should look at one of them, else 0."""
    options = parser("status", "Show what one run or all runs are doing.", examples=_EXAMPLES)
    options.add_argument("run", metavar="RUN", nargs="?", type=Path, help="a run directory (default: all)")
    options.add_argument(
        "--under", metavar="DIR", type=Path, default=Path("runs"), help="where all runs are (default: runs)"
    )
    options.add_argument(
        "--nodes", action="store_true", help="list the scheduler's nodes, and /dev/shm of those of runs"
    )
    options.add_argument("--json", action="store_true", help="print JSON")
    chosen = options.parse_args(arguments)
    from bloomery.operate.overview import overview, runs_under
    from bloomery.operate.submission import refuse_missing_run

    if chosen.run is not None:
        refuse_missing_run(RunDirectory(chosen.run))
        views = [overview(RunDirectory(chosen.run))]
    else:
        if not chosen.under.is_dir():
            raise BloomeryError(f"There is no directory {chosen.under}.", remedy="Give --under, or a run.")
        views = [overview(rundir) for rundir in runs_under(chosen.under)]
    nodes = _nodes(views) if chosen.nodes else []
    if chosen.json:
        shown = [asdict(view) for view in views]
        print(json_text({"runs": shown, "nodes": nodes} if chosen.nodes else {"runs": shown}, indent=1))
    elif chosen.run is not None:
        print("\n".join(_page(views[0])))
    else:
        print(_table(views) if views else f"no runs under {chosen.under}")
    if nodes and not chosen.json:
        print(table_text([("node", "state", "why"), *(tuple(node) for node in nodes)], left=(0, 1, 2)))
    if chosen.nodes and not chosen.json and any(view.shm for view in views):
        print(_shm_table(views))
    return _BAD if any(view.verdict.state.is_bad for view in views) else 0


def cancel(arguments: list[str]) -> int:
    """End the jobs of a run, and return the exit status."""
    options = parser(
        "cancel",
        "End the jobs of a run. Its ranks save before they end, if they are given the time: to be sure, use\n"
        "`bloomery stop`.",
        examples=_CANCEL,
    )
    options.add_argument("run", metavar="RUN", type=Path, help="the run directory")
    options.add_argument("--queued", action="store_true", help="leave the job that runs")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = options.parse_args(arguments)
    from bloomery.operate.submission import note_cancelled, recipe_of_run, refuse_missing_run, scheduler_of

    rundir = RunDirectory(chosen.run)
    refuse_missing_run(rundir)
    recipe, path = recipe_of_run(rundir), rundir.path.absolute()
    scheduler = scheduler_of(recipe.submit, path)
    known = scheduler.jobs(name=recipe.run.name, run=path)  # a scheduler that is silent has cancelled nothing
    waiting = [job.job for job in known if job.state.is_queued]
    running = [job.job for job in known if not job.state.is_queued and not job.state.is_over]
    # Those that wait go first, so that none of them starts when the running one ends.
    jobs = [*waiting, *([] if chosen.queued else running)]
    for group in (waiting, [] if chosen.queued else running):
        scheduler.cancel(group)
    if jobs:
        note_cancelled(rundir, jobs)
    if chosen.json:
        print(json_text({"run": str(rundir.path), "cancelled": jobs}))
        return 0
    print(f"cancelled {', '.join(jobs)}" if jobs else f"no job of {rundir.path} is in the queue")
    return 0


def _page(view: RunOverview) -> list[str]:
    verdict = view.verdict
    lines = [f"{view.name}: {verdict.state}" + (f" ({verdict.why})" if verdict.why else "")]
    if verdict.remedy and verdict.state.is_bad:
        lines.append(f"  what helps: {verdict.remedy}")
    facts = {
        "done": _done(view),
        "speed": f"{view.step_s:.3g} s/step" if view.step_s else "",
        "time left": _duration(view.left_s) if view.left_s is not None else "",
        "loss": f"{_loss(view.loss)}, held-out {_loss(view.held_out_loss)}" if view.loss is not None else "",
        "last save": f"step {view.saved_step}, {_ago(view.saved)}" if view.saved else "none",
    }
    lines += [f"  {name:<10} {value}" for name, value in facts.items() if value]
    lines += [f"  warning    {warning}" for warning in view.warnings]
    lines += [f"  quarantine {node}" for node in view.excluded]
    if view.jobs:
        rows = [("job", "state", "by", "on", "starts or ends", "why")]
        rows += [
            (
                job.job,
                str(job.state),
                job.user,
                ",".join(job.nodes[:2]) + ("…" if len(job.nodes) > 2 else ""),
                _moment(job.expected_start if job.state.is_queued else job.ends),
                job.reason if not job.tasks > 1 else f"{job.tasks} tasks: {job.reason}",
            )
            for job in view.jobs
        ]
        lines += ["", table_text(rows, left=range(6))]
    return lines


def _table(views: list[RunOverview]) -> str:
    rows = [("run", "state", "done", "s/step", "left", "loss", "held out", "saved", "warnings")]
    for view in views:
        warnings = [*view.warnings, *([view.verdict.why] if view.verdict.state.is_bad else [])]
        rows.append(
            (
                view.name[:20],
                str(view.verdict.state).removeprefix("dependency "),
                "-" if view.done is None else f"{view.done:.1%}",
                "-" if view.step_s is None else f"{view.step_s:.3g}",
                "-" if view.left_s is None else _duration(view.left_s),
                _loss(view.loss),
                _loss(view.held_out_loss),
                "-" if view.saved is None else _ago(view.saved),
                "; ".join(warnings),
            )
        )
    return table_text(rows, left=(0, 1, 8))


def _nodes(views: list[RunOverview]) -> list[list[str]]:
    """Return (name, state, reason) of the nodes of the scheduler of the first run that was submitted."""
    from bloomery.operate.submission import recipe_of_run, scheduler_of, was_submitted

    for view in views:
        rundir = RunDirectory(Path(view.run))
        if not was_submitted(rundir):
            continue
        scheduler = scheduler_of(recipe_of_run(rundir).submit, rundir.path.absolute())
        return [[node.name, node.state, node.reason] for node in scheduler.nodes()]
    print("bloomery status: no run was submitted, so there is no scheduler to ask for nodes", file=sys.stderr)
    return []


def _shm_table(views: list[RunOverview]) -> str:
    """Return /dev/shm of the nodes on which ranks live."""
    rows = [("node", "run", "/dev/shm free", "of GiB", "used", "")]
    for view in views:
        for node in view.shm:
            free, total = f"{node.free_bytes / 2**30:.2f}", f"{node.total_bytes / 2**30:.2f}"
            what = "nearly full: remove what earlier jobs left, or enlarge it" if node.is_nearly_full else ""
            rows.append((node.host, view.name[:20], free, total, f"{node.used_share:.0%}", what))
    return table_text(rows, left=(0, 1, 5))


def _done(view: RunOverview) -> str:
    return f"step {view.step}" + (f", {view.done:.1%} of the samples" if view.done is not None else "")


def _loss(loss: float | str | None) -> str:
    return f"{loss:.4f}" if isinstance(loss, (int, float)) else "-" if loss is None else str(loss)


def _ago(moment: float) -> str:
    return f"{_duration(max(0.0, time.time() - moment))} ago"


def _duration(seconds: float) -> str:
    """Return seconds as `42 s`, `17 min`, `5.3 h` or `12 d`."""
    for length_s, unit, form in ((86400.0, "d", ".1f"), (3600.0, "h", ".1f"), (60.0, "min", ".0f")):
        if seconds >= 2 * length_s or (unit != "min" and seconds >= length_s):
            return f"{seconds / length_s:{form}} {unit}"
    return f"{seconds:.0f} s"


def _moment(moment: float | None) -> str:
    if moment is None:
        return ""
    form = "%H:%M:%S" if time.localtime(moment)[:3] == time.localtime()[:3] else "%m-%d %H:%M"
    return time.strftime(form, time.localtime(moment))
