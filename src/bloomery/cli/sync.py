"""`bloomery sync` uploads a run's logs and checkpoints; `bloomery follow` shows what arrives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from argparse import ArgumentTypeError, Namespace
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.cli.argument_values import not_negative, positive
from bloomery.cli.arguments import parser
from bloomery.cli.end_signal import EndSignal
from bloomery.cli.json_output import json_text
from bloomery.cli.run_inputs import existing_run
from bloomery.cli.standard_output import let_output_end_nothing
from bloomery.cli.tables import size_words
from bloomery.config.data import HUB_PREFIX
from bloomery.errors import BloomeryError, CheckpointError, StorageError, UsageError
from bloomery.events.run_directory import RunDirectory

if TYPE_CHECKING:
    from bloomery.operate.sync.published import CheckpointPublisher
    from bloomery.operate.sync.run_sync import RunSync


_SYNC_EXAMPLES = """\
bloomery sync runs/mine s3://bucket/logs/mine            every hour what is new, until Ctrl-C
bloomery sync runs/mine hf:OWNER/NAME --checkpoints      to the Hub; each checkpoint on a branch of its own
bloomery sync runs/mine s3://bucket/logs/mine --once     once, for cron
bloomery follow hf:OWNER/NAME                            elsewhere: what the run does

A run under `bloomery launch --supervise` does it by itself where its recipe says sync.place.
"""
_TICK_S, _AGAIN_S = 5.0, 300.0
_EVERY_MINUTES = 60.0


def sync(arguments: list[str]) -> int:
    """Send what is new until SIGINT or SIGTERM, or once, and return the exit status."""
    options = _parse(arguments)
    from bloomery.operate.sync.hub import HubRepository
    from bloomery.operate.sync.places import open_place
    from bloomery.operate.sync.published import CheckpointPublisher
    from bloomery.operate.sync.run_sync import RunSync

    rundir = _awaited_run(options) if options.beside else existing_run(options.run)
    if options.checkpoints and not options.place.startswith(HUB_PREFIX):
        raise UsageError(
            f"--checkpoints publishes branches, and {options.place} is no repository of the Hub.",
            remedy="Give hf:OWNER/NAME; to a store they go with backup.url or `bloomery ckpt copy`.",
        )
    place = open_place(options.place, is_public=options.public)
    publisher = None
    if options.checkpoints:
        assert isinstance(place, HubRepository)  # it was refused otherwise
        publisher = CheckpointPublisher(rundir, place, export=_export)
    sync = RunSync(rundir, place)
    if options.once:
        _look(sync, publisher, options)
        return 0
    return _repeat(rundir, sync, publisher, options)


def _awaited_run(options: Namespace) -> RunDirectory:
    """Return the run directory that may not be there yet, and say what is waited for.

    Raises StorageError where none can come.
    """
    rundir = RunDirectory(options.run)
    if rundir.path.exists() and not rundir.path.is_dir():
        raise StorageError(f"{rundir.path} is no directory.", remedy="Give the directory of the run.")
    if not rundir.exists():
        # A launcher shows standard error alone, and knows that it makes the directory.
        to = sys.stderr if options.json else sys.stdout
        print(f"waits until a run begins in {rundir.path}", file=to, flush=True)
    return rundir


def _repeat(
    rundir: RunDirectory, sync: RunSync, publisher: CheckpointPublisher | None, options: Namespace
) -> int:
    """Upload repeatedly; the last upload follows the signal that ends the command, or the parent's end.

    The exit status is that of the last upload: 1 where it failed.

    Checkpoints do not wait for the logs' time: they are published as soon as they are held. Of those that
    the launchers of several machines start for one run, one sends, and the others wait for its end.
    """
    from bloomery.operate.sync.keeper import SyncTurn

    let_output_end_nothing()
    ended, parent, due = EndSignal(), os.getppid(), time.monotonic()
    again = due
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # a launcher starts this with it held back
    turn, holder = SyncTurn(rundir) if options.beside else None, publisher
    while True:
        is_last = ended.wait(0.0 if time.monotonic() >= due else _TICK_S)
        is_last = is_last or (options.beside and os.getppid() != parent)
        status = 0
        try:
            if rundir.exists() and (turn is None or turn.is_ours()):
                if holder is not None:  # an export may take as long as several saves, each pruned soon
                    threading.Thread(target=_hold, args=(rundir, holder), daemon=True).start()
                    holder = None
                if is_last or time.monotonic() >= due:
                    due = time.monotonic() + 60.0 * options.every
                    _look(sync, publisher, options)
                elif publisher is not None and publisher.is_waiting and time.monotonic() >= again:
                    _look(None, publisher, options)
            elif time.monotonic() >= due:
                due = time.monotonic() + _TICK_S
        except (BloomeryError, OSError) as error:  # what was not sent is sent later, also by a later call
            status, due = 1, time.monotonic() + min(_AGAIN_S, 60.0 * options.every)
            again = due
            print(f"bloomery sync: {error}", file=sys.stderr, flush=True)
        if is_last:
            return status


def _hold(rundir: RunDirectory, publisher: CheckpointPublisher) -> None:
    """Hold checkpoints as they come, for as long as this process lives."""
    while True:
        try:
            if rundir.exists():
                publisher.hold()
        except (BloomeryError, OSError) as error:
            print(f"bloomery sync: {error}", file=sys.stderr, flush=True)
        time.sleep(_TICK_S)


def _look(sync: RunSync | None, publisher: CheckpointPublisher | None, options: Namespace) -> None:
    """Send what is new of the logs (`sync`), publish the checkpoints that are held, and print what went."""
    count, size, published = 0, 0, []
    if sync is not None:
        sent = sync.send_new()
        count, size = sent.count, sent.bytes
    if publisher is not None:
        publisher.hold()
        published = publisher.publish_held()
    if options.json:
        print(json_text({"files": count, "bytes": size, "published": published}), flush=True)
        return
    branches = f"; published {', '.join(published)}" if published else ""
    if count or published or options.once:
        words = f"{size_words(float(size))} in {count} files"
        print(f"{time.strftime('%H:%M:%S')} {options.place}: {words}{branches}", flush=True)


def _export(checkpoint: Path, target: Path) -> None:
    """Export for transformers in a process of its own, which gives the memory of torch back. See `Export`."""
    command = [sys.executable, "-m", "bloomery", "ckpt", "export", str(checkpoint), str(target), "--json"]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise CheckpointError(
            f"{checkpoint.name} could not be exported: {' '.join(lines)[-600:]}",
            remedy=f"Try it by hand: bloomery ckpt export {checkpoint} TARGET",
        )


def _parse(arguments: list[str]) -> Namespace:
    options = parser(
        "sync",
        "Send what a run writes elsewhere while it trains: journals, logs, TensorBoard files, chronicle.\n"
        "Only what is new is sent, in pieces that end with whole lines and records, so that TensorBoard and\n"
        "`bloomery follow` read them there. A new repository of the Hub is private.",
        examples=_SYNC_EXAMPLES,
    )
    options.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    options.add_argument(
        "place", metavar="PLACE", nargs="?", default="", help="a URL, or hf:OWNER/NAME (default: sync.place)"
    )
    options.add_argument(
        "--every",
        type=_minutes,
        metavar="MIN",
        help="minutes between two uploads (without a PLACE sync.every_minutes, else 60)",
    )
    options.add_argument("--once", action="store_true", help="send once, for cron")
    options.add_argument(
        "--checkpoints", action="store_true", help="publish each checkpoint on a branch of its own of the Hub"
    )
    options.add_argument("--public", action="store_true", help="let everybody read a repository that is made")
    options.add_argument(
        "--beside",
        action="store_true",
        help="wait until the run directory exists, and exit when the parent process does",
    )
    options.add_argument("--json", action="store_true", help="print one JSON object per upload")
    chosen = options.parse_intermixed_args(arguments)
    if chosen.beside and chosen.once:
        options.error("--once does not wait, so it does not go with --beside")
    if not chosen.place:
        _take_place_of_recipe(chosen)
    chosen.every = chosen.every or _EVERY_MINUTES
    return chosen


def _take_place_of_recipe(options: Namespace) -> None:
    """Fill in the options that were not given from `[sync]` of the run's recipe.

    Raises StorageError where it names no place.
    """
    from bloomery.config.load import load_recipe

    rundir = existing_run(options.run)
    section = load_recipe(str(rundir.recipe)).recipe.sync if rundir.recipe.exists() else None
    if section is None or not section.place:
        raise StorageError(
            f"Nobody says where the logs of {rundir.path} go.",
            remedy="Give a place: bloomery sync RUN s3://bucket/path, or hf:OWNER/NAME; or set sync.place.",
        )
    options.place, options.checkpoints = section.place, options.checkpoints or section.checkpoints
    options.every = options.every or section.every_minutes


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0.0 < minutes < 1e6:
        raise ArgumentTypeError(f"{text!r} is no number of minutes above 0")
    return minutes


_FOLLOW_EXAMPLES = """\
bloomery follow hf:OWNER/NAME                       what `bloomery sync` sends to the Hub, as it comes
bloomery follow s3://bucket/logs/mine               the same from a store
bloomery follow s3://bucket/logs/mine --into mine   keep what is fetched: bloomery dashboard mine, tensorboard
bloomery follow runs/mine                           a run directory of this machine, or of a shared disk
"""
_HERE_S, _ELSEWHERE_S = 2, 60


def follow(arguments: list[str]) -> int:
    """Print what is new until SIGINT or SIGTERM, or once, and return the exit status."""
    options = _follow_options(arguments)
    from bloomery.operate.sync.mirror import RunMirror
    from bloomery.operate.sync.places import open_place
    from bloomery.operate.sync.tail import RunTail

    with ExitStack() as stack:
        mirror = None
        if "://" in options.source or options.source.startswith(HUB_PREFIX):
            place = open_place(options.source, create=False)
            into = options.into or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="followed-")))
            _refuse_run_of_its_own(into)
            rundir, mirror = RunDirectory(into), RunMirror(place, into)
            mirror.fetch()
        else:
            rundir = existing_run(options.source)
        tail = RunTail(rundir, every_steps=options.steps)
        for line in deque(tail.new_lines(), maxlen=options.lines or None):
            print(line, flush=True)
        if not options.once:
            _follow_on(mirror, tail, interval_s=options.interval or (_ELSEWHERE_S if mirror else _HERE_S))
    return 0


def _follow_on(mirror: object, tail: object, *, interval_s: float) -> None:
    from bloomery.operate.sync.mirror import RunMirror
    from bloomery.operate.sync.tail import RunTail

    assert isinstance(tail, RunTail)
    ended = EndSignal()
    while not ended.wait(interval_s):
        try:
            if isinstance(mirror, RunMirror):
                mirror.fetch()
        except BloomeryError as error:  # the place may answer again
            print(f"bloomery follow: {error.message}", flush=True)
        for line in tail.new_lines():
            print(line, flush=True)


def _refuse_run_of_its_own(directory: Path) -> None:
    """Raise StorageError where a directory holds a run that trained there, whose files would be replaced."""
    if (directory / "checkpoints").is_dir():
        raise StorageError(
            f"{directory} holds a run of its own.", remedy="Give --into a new directory, or one of a follow."
        )


def _follow_options(arguments: list[str]) -> Namespace:
    options = parser(
        "follow",
        "Tell what a run does: its steps, saves, rewinds, failures and alerts, from a run directory or from\n"
        "where `bloomery sync` sends its logs.",
        examples=_FOLLOW_EXAMPLES,
    )
    options.add_argument("source", metavar="URL|DIR", help="a run directory, a URL, or hf:OWNER/NAME")
    options.add_argument("--into", type=Path, metavar="DIR", help="keep what is fetched from a URL there")
    options.add_argument(
        "--interval",
        type=positive,
        metavar="S",
        help=f"seconds between looks ({_HERE_S}; URL: {_ELSEWHERE_S})",
    )
    options.add_argument(
        "--lines",
        type=not_negative,
        default=20,
        metavar="N",
        help="lines of the past to begin with (20; 0: all)",
    )
    options.add_argument("--steps", type=positive, default=10, metavar="N", help="show every Nth step (10)")
    options.add_argument("--once", action="store_true", help="show what is there, and exit")
    return options.parse_args(arguments)
