"""Collects what `bloomery status` shows of a run: state, progress, time left, losses, last save, jobs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bloomery.checkpoint.format.catalogue import checkpoints
from bloomery.checkpoint.format.manifest import read_manifest
from bloomery.config.load import load_recipe
from bloomery.config.recipe import Recipe
from bloomery.errors import BloomeryError, CheckpointError, ConfigError
from bloomery.events.journal import read_tail
from bloomery.events.run_directory import RunDirectory
from bloomery.events.switches import switch_places, waiting_requests
from bloomery.operate.exclusions import Exclusions
from bloomery.operate.ledger.figures import duration
from bloomery.operate.ledger.operations import finite
from bloomery.operate.node_shm import NodeShm, shm_of_nodes, shm_warning
from bloomery.operate.run_state import RunObservation, RunVerdict, judge_state, observe_run
from bloomery.operate.schedulers.interface import QueuedJob
from bloomery.operate.standstill import StandstillLimits, peers_awaited_s
from bloomery.operate.submission import jobs_of_run, was_submitted
from bloomery.operate.watch.disk import directory_bytes, does_not_fit, sample_disk
from bloomery.plan.schedule import steps_left, total_samples

_MEASURED_STEPS = 50
_SAVES_BYTES = 1 << 28
"""How much of the journal's end is searched for a save where its last steps show none."""
_LIMITS = StandstillLimits(silence_s=15.0)
"""Longer limits than a watcher's: one reading cannot tell a late heartbeat from a missing one as surely."""


@dataclass(frozen=True, kw_only=True)
class RunOverview:
    """What `bloomery status` shows of a run.

    done: the share of its samples that were used; None before the first step.
    step: the last step. step_s: the median seconds of the last steps; None where none was made.
    left_s: the seconds that are left at this speed; None where that is unknown.
    loss, held_out_loss: the newest; None where there is none.
    saved: when the last checkpoint was saved, in seconds since 1970, and saved_step its step; None: never.
    warnings: what a person should know, one sentence each.
    jobs: the jobs of the scheduler that wait, run, or have ended lately.
    excluded: the nodes in quarantine, and why.
    shm: the space of /dev/shm on each node where a rank lives.
    """

    run: str
    name: str
    verdict: RunVerdict
    done: float | None = None
    step: int = 0
    step_s: float | None = None
    left_s: float | None = None
    loss: float | None = None
    held_out_loss: float | None = None
    saved: float | None = None
    saved_step: int | None = None
    warnings: tuple[str, ...] = ()
    jobs: tuple[QueuedJob, ...] = ()
    excluded: tuple[str, ...] = ()
    shm: tuple[NodeShm, ...] = ()


def runs_under(directory: Path) -> list[RunDirectory]:
    """Return the runs in a directory, those first that were written last.

    Directories that this user may not look into, as others of a group may have them, are left out.
    """
    runs = [RunDirectory(path) for path in directory.iterdir()]
    return sorted(filter(_is_run, runs), key=_written, reverse=True)


def overview(rundir: RunDirectory) -> RunOverview:
    """Return what is known of a run. A scheduler that does not answer is a warning, no error."""
    warnings: list[str] = []
    recipe = _recipe(rundir, warnings)
    jobs: Sequence[QueuedJob] = ()
    excluded: tuple[str, ...] = ()
    switches: list[Path] = []
    silent = ""
    if recipe is not None:
        try:
            excluded = tuple(str(node) for node in Exclusions.of(rundir, recipe.submit).nodes().values())
        except BloomeryError as damage:
            warnings.append(damage.message)
        jobs, silent = jobs_of_run(rundir, recipe)
        warnings += [silent] if silent else []
        switches = switch_places(recipe.control.directory)
    seen = observe_run(rundir, jobs, switches=switches, silent=silent)
    shm = shm_of_nodes(seen)
    little_shm = shm_warning(shm)
    warnings += [little_shm] if little_shm else []
    if awaited_s := peers_awaited_s(seen.ranks, now=seen.now):
        warnings.append(f"all ranks have waited for other peers for {duration(awaited_s)}")
    progress = _progress(rundir, recipe, warnings)
    progress |= _save_on_disk(rundir, after=progress.get("saved_step", -1))
    warnings += _disk_warnings(rundir, seen, journalled_step=progress.get("step", 0))
    warnings += [f"{waits}: the run {does} after its next step" for waits, does in waiting_requests(rundir)]
    return RunOverview(
        run=str(rundir.path),
        name=recipe.run.name if recipe else rundir.name,
        verdict=judge_state(seen, limits=_LIMITS),
        jobs=tuple(jobs),
        shm=shm,
        excluded=excluded,
        **progress,
        warnings=tuple(warnings),
    )


def last_losses(rundir: RunDirectory) -> dict[str, float | str | None]:
    """Return `loss` and `held_out_loss` of a run's last steps; None where there is none, 'nan' as text."""
    facts = _progress(rundir, None, [])
    return {name: facts.get(name) for name in ("loss", "held_out_loss")}


def _progress(rundir: RunDirectory, recipe: Recipe | None, warnings: list[str]) -> dict[str, Any]:
    """Return the fields that the journal gives; adds warnings."""
    facts: dict[str, Any] = {}
    steps: list[dict[str, Any]] = []
    failed_save = ""
    rewinds = 0
    for event in read_tail(rundir.journal()):
        match event["event"]:
            case "step" if _is_whole_step(event):
                steps.append(event)
                if _is_loss(event.get("held_out_loss")):
                    facts["held_out_loss"] = event["held_out_loss"]
            case "evaluation" if _is_loss(event.get("held_out_loss")):
                facts["held_out_loss"] = event["held_out_loss"]
            case "checkpoint" if _are_numbers(event, "time", "step"):
                facts |= _save(event)
                failed_save = ""
            case "checkpoint_failed":
                failed_save = f"no checkpoint at step {event.get('step')}: {event.get('why', '')}"
            case "rewind":
                rewinds += 1
    warnings += [failed_save] if failed_save else []
    warnings += [f"rewound {rewinds} times"] if rewinds else []
    facts = facts if "saved" in facts else facts | _older_save(rundir)
    if not steps:
        return facts
    last = steps[-1]
    recent = [step["seconds"] for step in steps[-_MEASURED_STEPS:]]
    facts |= {"step": last["step"], "loss": last["loss"], "step_s": median(recent)}
    if isinstance(last["loss"], str):
        warnings.append(f"the last loss is {last['loss']}")
    if last.get("refused_in_a_row"):
        warnings.append(f"the last {last['refused_in_a_row']} updates were refused")
    return facts | _left(recipe, last, facts["step_s"])


def _disk_warnings(rundir: RunDirectory, seen: RunObservation, *, journalled_step: int) -> list[str]:
    """Return warnings of a disk that takes no lines of the journal, or has no room for the next checkpoint.

    A heartbeat is written also on a full disk. It names a step just before the journal does.
    """
    warnings = []
    first = seen.ranks.get(0)
    if first is not None and first.beat.step > journalled_step + 1:
        warnings.append(
            f"rank 0 has made step {first.beat.step}, and the journal ends at step {journalled_step}: the "
            "disk takes no more lines, or the journal was cut or removed"
        )
    with suppress(OSError, CheckpointError):
        newest = checkpoints(rundir)[-1:]
        save_bytes = directory_bytes(newest[0].directory) if newest else 0
        disk = sample_disk(rundir.path, now=seen.now)
        if does_not_fit(disk, save_bytes):
            warnings.append(
                f"the next checkpoint does not fit: the last one has {save_bytes / 1e6:,.1f} MB, and "
                f"{disk.free_bytes / 1e6:,.1f} MB are free"
            )
    return warnings


def _left(recipe: Recipe | None, last: dict[str, Any], step_s: float) -> dict[str, float]:
    """Return the share of the samples that were used, and the seconds that are left; {} without a recipe."""
    if recipe is None:
        return {}
    length = recipe.data.sequence_length
    consumed, peers = int(last["consumed_samples"]), max(1, int(finite(last.get("peers")) or 1))
    left = steps_left(recipe.train, sequence_length=length, consumed=consumed, peers=peers)
    done = min(1.0, consumed / total_samples(recipe.train, sequence_length=length))
    return {"done": done, "left_s": left * step_s}


def _is_whole_step(event: dict[str, Any]) -> bool:
    """Whether an event is a step whose numbers can be used; those of a damaged line may be anything."""
    names = ("step", "seconds", "consumed_samples")
    return event["event"] == "step" and _are_numbers(event, *names) and _is_loss(event.get("loss"))


def _are_numbers(event: dict[str, Any], *names: str) -> bool:
    return all(finite(event.get(name)) is not None for name in names)


def _is_loss(value: object) -> bool:
    return finite(value) is not None or value in ("NaN", "Infinity", "-Infinity")


def _older_save(rundir: RunDirectory) -> dict[str, Any]:
    """Return the last save of a run that has made thousands of steps since; {} where there is none."""
    saves = list(read_tail(rundir.journal(), most_bytes=_SAVES_BYTES, named=("checkpoint",)))
    return next((_save(event) for event in reversed(saves) if _are_numbers(event, "time", "step")), {})


def _save_on_disk(rundir: RunDirectory, *, after: int) -> dict[str, Any]:
    """Return the newest checkpoint as the last save, where a journal that was cut ends before; else {}."""
    with suppress(OSError, CheckpointError):
        for newest in checkpoints(rundir)[-1:]:
            if newest.step > after:
                return {"saved": read_manifest(newest.directory).time, "saved_step": newest.step}
    return {}


def _save(event: dict[str, Any]) -> dict[str, Any]:
    return {"saved": event["time"], "saved_step": event["step"]}


def _recipe(rundir: RunDirectory, warnings: list[str]) -> Recipe | None:
    from bloomery.operate.submission import kept_submission

    try:
        if rundir.recipe.exists():
            return load_recipe(str(rundir.recipe)).recipe
        return kept_submission(rundir).load().recipe
    except ConfigError as damage:
        warnings.append(f"the recipe cannot be read: {damage.mistakes[0].problem}")
    except BloomeryError:
        pass  # a run of an earlier version, or a peer's directory: its journal speaks for it
    return None


def _is_run(rundir: RunDirectory) -> bool:
    with suppress(PermissionError):
        return rundir.path.is_dir() and (rundir.exists() or was_submitted(rundir))
    return False


def _written(rundir: RunDirectory) -> float:
    for path in (rundir.heartbeat(), rundir.journal(), rundir.path):
        try:
            return path.stat().st_mtime
        except OSError:
            continue
    return time.time()
