"""Carries out what a viewer with the token asks for: to save, to stop, to skip samples, to exclude a node."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from bloomery.config.load import load_recipe
from bloomery.config.setting import LARGEST_COUNT
from bloomery.errors import BloomeryError, storage_error
from bloomery.events.journal import Journal
from bloomery.events.run_directory import RunDirectory
from bloomery.events.switches import arm, write_request
from bloomery.operate.exclusions import Exclusions, QuarantinedNode, exclude_in_queue
from bloomery.operate.submission import scheduler_of, was_submitted

_LONGEST = 300


class ActionRequest(msgspec.Struct, forbid_unknown_fields=True):
    """What a viewer asks for.

    action: "save", "stop", "skip" or "exclude". what: samples FIRST:END for `skip`, a node for `exclude`.
    why: the viewer's reason, which is recorded.
    """

    run: int
    action: str
    what: str = ""
    why: str = ""


def carry_out(rundir: RunDirectory, request: ActionRequest, *, by: str) -> str:
    """Ask the run for it, record that, and return what was done as a sentence.

    by: who asked, for the record. Raises BloomeryError where the request makes no sense.
    """
    if request.action not in _ACTIONS:
        raise BloomeryError(
            f"There is no action {request.action[:40]!r}.", remedy=f"There are {', '.join(_ACTIONS)}."
        )
    if not rundir.exists():
        raise BloomeryError(f"{rundir.path} is no run directory.", remedy="Look at the messages above.")
    what, why = request.what.strip()[:_LONGEST], " ".join(request.why.split())[:_LONGEST]
    answer = _ACTIONS[request.action](rundir, what, why)
    with Journal(rundir.operations, is_shared=True) as journal:
        journal.write("request", incarnation=0, step=0, action=request.action, what=what, why=why, by=by)
    return answer


def _save(rundir: RunDirectory, what: str, why: str) -> str:
    _arm(rundir, "save", why)
    return "The run saves after its present step."


def _stop(rundir: RunDirectory, what: str, why: str) -> str:
    _arm(rundir, "stop", why)
    return "The run saves and stops after its present step. `bloomery stop RUN --disarm` lets it start again."


def _skip(rundir: RunDirectory, what: str, why: str) -> str:
    first, colon, end = what.replace("_", "").replace(",", "").partition(":")
    if not (colon and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise BloomeryError(
            f"{what[:40]!r} is not FIRST:END with FIRST below END.", remedy="Give sample numbers."
        )
    if int(end) > LARGEST_COUNT:
        raise BloomeryError(
            f"{end[:40]} is too much: at most {LARGEST_COUNT:,}.",
            remedy="Give numbers of samples of this run.",
        )
    write_request(rundir, "skip", f"{int(first)}:{int(end)}", keep=True)
    return f"The run leaves the samples {int(first):,} to {int(end) - 1:,} out from its next step on."


def _exclude(rundir: RunDirectory, what: str, why: str) -> str:
    if not what or not all(sign.isalnum() or sign in "-_." for sign in what):
        raise BloomeryError(f"{what[:40]!r} is not the name of a node.", remedy="Give its host name.")
    recipe = load_recipe(str(rundir.recipe)).recipe
    node = QuarantinedNode(
        host=what, cause="excluded by a person", since=time.time(), run=recipe.run.name, evidence=why
    )
    exclusions = Exclusions.of(rundir, recipe.submit)
    exclusions.add(node)
    if not was_submitted(rundir):
        return f"{what} takes no further job of this run."
    scheduler = scheduler_of(recipe.submit, rundir.path.absolute())
    try:
        jobs = exclude_in_queue(
            scheduler, rundir, name=recipe.run.name, section=recipe.submit, nodes=list(exclusions.nodes())
        )
    except BloomeryError as silent:  # the list is right all the same, and jobs that start read it
        return f"{what} takes no further job of this run; the queue could not be told: {silent.message}"
    return f"{what} takes no further job of this run; {len(jobs)} waiting jobs were told."


def _arm(rundir: RunDirectory, name: str, why: str) -> None:
    path: Path = rundir.control(name)
    try:
        arm(path, why=why)
    except OSError as refused:
        raise storage_error(refused, path=path, doing="Arming the switch") from refused


_ACTIONS = {"save": _save, "stop": _stop, "skip": _skip, "exclude": _exclude}
