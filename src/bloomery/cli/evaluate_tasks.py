"""Scores checkpoints on tasks of `lm-eval`: one, or each new one beside the training, which never waits."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from bloomery.checkpoint.format.catalogue import checkpoints
from bloomery.checkpoint.format.manifest import MANIFEST
from bloomery.cli.run_inputs import load_saved, run_directory
from bloomery.cli.tables import table_text
from bloomery.errors import BloomeryError, CheckpointError, StorageError
from bloomery.events.journal import Journal, read_journal, read_tail
from bloomery.events.run_directory import RunDirectory

EVENT = "tasks"
_POLL_S = 2.0


def score_once(args: Namespace) -> int:
    """Score one checkpoint, record the scores in its run and print them; returns the exit status."""
    record = _score(args, args.path)
    _print([record], args)
    return 0


def follow(args: Namespace) -> int:
    """Score the newest checkpoint again and again until the run has ended; returns the exit status.

    It runs in a process of its own and only reads what the training has committed. Where it is slower than
    the training saves, it leaves out what lies between. Checkpoints that were scored before are left out.
    """
    from bloomery.evaluate.harness import refuse_without_lm_eval

    refuse_without_lm_eval()
    rundir = run_directory(args.path)
    waited_since = time.monotonic()
    while True:
        has_ended = _has_ended(rundir)  # asked first, so that a last checkpoint cannot be overlooked
        directory = _next(rundir, args)
        if directory is not None:
            try:
                _print([_score(args, directory)], args)
            except (CheckpointError, StorageError):
                if directory.exists():  # otherwise it was pruned while it was read
                    raise
            waited_since = time.monotonic()
        elif has_ended:
            return 0
        elif time.monotonic() - waited_since > 60 * args.patience:
            raise BloomeryError(
                f"{rundir.path} has saved no checkpoint for {args.patience} minutes.",
                remedy="Look whether it still trains, or wait longer (--patience).",
            )
        else:
            time.sleep(_POLL_S)


def show_table(args: Namespace) -> int:
    """Print what was scored so far, a line for each checkpoint; returns the exit status."""
    rundir = run_directory(args.path)
    records = [record for record in read_journal(rundir.evaluations) if record["event"] == EVENT]
    if not records and not args.json:
        print(f"{args.path} has no scores yet: bloomery evaluate {args.path} --tasks …")
        return 0
    _print(sorted(records, key=lambda record: (record["step"], record["time"])), args)
    return 0


def _score(args: Namespace, path: Path) -> dict[str, Any]:
    """Score a checkpoint and return the record that its run's evaluations now hold."""
    from bloomery.evaluate.harness import refuse_without_lm_eval, score_tasks

    refuse_without_lm_eval()
    loaded = load_saved(path, dtype=args.dtype, by_layer=args.by_layer)
    scores = score_tasks(
        loaded.saved,
        loaded.decoder,
        _names(args),
        batch=args.batch,
        limit=args.limit,
        shots=args.shots,
        include=args.include,
    )
    directory = loaded.saved.checkpoint
    rundir = RunDirectory(directory.parent.parent)
    checkpoint = {item.name: item for item in checkpoints(rundir)}.get(directory.name)
    step, incarnation = (checkpoint.step, checkpoint.incarnation) if checkpoint else (0, 0)
    with Journal(rundir.evaluations) as journal:
        journal.write(
            EVENT,
            incarnation=incarnation,
            step=step,
            checkpoint=directory.name,
            limit=args.limit,
            shots=args.shots,
            scores=[score.to_json() for score in scores],
        )
    return [record for record in read_tail(rundir.evaluations) if record["event"] == EVENT][-1]


def _next(rundir: RunDirectory, args: Namespace) -> Path | None:
    """Return the newest checkpoint if it is to be scored."""
    committed = checkpoints(rundir)
    if not committed:
        return None
    tasks = set(_names(args))
    done = [
        record
        for record in read_journal(rundir.evaluations)
        if record["event"] == EVENT and tasks <= {score["task"] for score in record["scores"]}
    ]
    newest = committed[-1]
    if any(record["checkpoint"] == newest.name for record in done):
        return None
    last = max((record["step"] for record in done if record["step"] < newest.step), default=None)
    is_last = _has_ended(rundir)
    if last is not None and newest.step - last < args.every_steps and not is_last:
        return None
    return newest.directory if (newest.directory / MANIFEST).is_file() else None


def _has_ended(rundir: RunDirectory) -> bool:
    """Whether the first rank's journal ends with the end of the run, not only of a job of it."""
    has_ended = False
    for event in read_tail(rundir.journal()):
        if event["event"] in ("start", "step", "end"):
            has_ended = event["event"] == "end" and bool(event.get("finished", True))
    return has_ended


def _names(args: Namespace) -> list[str]:
    return [name for name in args.tasks.split(",") if name]


def _print(records: list[dict[str, Any]], args: Namespace) -> None:
    if args.json:
        for record in records:
            print(json.dumps(record, ensure_ascii=False), flush=True)
        return
    rows = [("step", "checkpoint", "task", "samples", "scores")]
    for record in records:
        for score in record["scores"]:
            metrics = {
                name: value
                for name, value in score.items()
                if isinstance(value, float) and not name.endswith("_stderr")
            }
            metrics_text = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            rows.append(
                (
                    f"{record['step']:,}",
                    record["checkpoint"],
                    score["task"],
                    str(score["samples"]),
                    metrics_text,
                )
            )
    print(table_text(rows, left=(1, 2, 4)), flush=True)
