"""`bloomery follow`: tells what a run does that trains elsewhere, or here."""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections import deque
from contextlib import ExitStack
from pathlib import Path

from bloomery.cli.argument_values import not_negative, positive
from bloomery.cli.arguments import parser
from bloomery.cli.end_signal import EndSignal
from bloomery.cli.run_inputs import existing_run
from bloomery.config.data import HUB_PREFIX
from bloomery.errors import BloomeryError, StorageError
from bloomery.events.run_directory import RunDirectory

EXAMPLES = """\
bloomery follow hf:OWNER/NAME                       what `bloomery sync` sends to the Hub, as it comes
bloomery follow s3://bucket/logs/mine               the same from a store
bloomery follow s3://bucket/logs/mine --into mine   keep what is fetched: bloomery dashboard mine, tensorboard
bloomery follow runs/mine                           a run directory of this machine, or of a shared disk
"""
_HERE_S, _ELSEWHERE_S = 2, 60


def run(arguments: list[str]) -> int:
    """Print what is new until SIGINT or SIGTERM, or once; returns the exit status."""
    options = _parse(arguments)
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
            _repeat(mirror, tail, interval_s=options.interval or (_ELSEWHERE_S if mirror else _HERE_S))
    return 0


def _repeat(mirror: object, tail: object, *, interval_s: float) -> None:
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


def _parse(arguments: list[str]) -> Namespace:
    options = parser(
        "follow",
        "Tell what a run does: its steps, saves, rewinds, failures and alerts, from a run directory or from\n"
        "where `bloomery sync` sends its logs.",
        examples=EXAMPLES,
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
    options.add_argument("--steps", type=positive, default=10, metavar="N", help="tell each N-th step (10)")
    options.add_argument("--once", action="store_true", help="tell what is there, and end")
    return options.parse_args(arguments)
