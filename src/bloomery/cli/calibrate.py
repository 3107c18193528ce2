"""`bloomery calibrate`: measures this machine and writes the hardware file that `bloomery plan` reads."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from bloomery.cli.arguments import parser
from bloomery.cli.json_output import json_text
from bloomery.cli.plan import OWN_MACHINE
from bloomery.errors import BloomeryError, StorageError, storage_error

EXAMPLES = """\
bloomery calibrate                        write this-machine.toml, which `bloomery plan` then uses by default
bloomery plan demo                        predict how long the demo's recipe takes here
OMP_NUM_THREADS=1 bloomery calibrate --to one-thread.toml
"""


def run(arguments: list[str]) -> int:
    """Measure this machine and write its hardware file, and return the exit status."""
    options = parser(
        "calibrate",
        "Measure matmuls, memory, links between processes and the disk of this machine, for about a\n"
        "minute, and write the file that `bloomery plan --hardware` reads. Run it while nothing else runs.",
        examples=EXAMPLES,
    )
    options.add_argument(
        "--to",
        metavar="PATH",
        type=Path,
        default=Path(OWN_MACHINE),
        help=f"the file to write (default: {OWN_MACHINE})",
    )
    options.add_argument(
        "--disk",
        metavar="DIR",
        type=Path,
        default=Path(),
        help="measure the disk that holds this directory (default: the current one)",
    )
    options.add_argument("--json", action="store_true", help="print the figures as one JSON object too")
    options.add_argument("--quiet", action="store_true", help="do not print what is being measured")
    chosen = options.parse_args(arguments)
    _refuse_other_file(chosen.to)
    for directory in (chosen.disk, chosen.to.parent):
        if not directory.is_dir() or not os.access(directory, os.W_OK):
            remedy = "Give a directory that exists and can be written."
            raise StorageError(f"{directory} cannot be written", remedy=remedy)
    from bloomery.cli.train import MALLOC, PREPARED

    if PREPARED not in os.environ:
        environment = os.environ | {name: os.environ.get(name, value) for name, value in MALLOC.items()}
        environment[PREPARED] = "1"
        # malloc reads its settings when a process starts, so this one starts again, as training does.
        os.execve(sys.executable, [sys.executable, "-m", "bloomery", "calibrate", *arguments], environment)
    from bloomery import durable
    from bloomery.calibrate.machine import measure_machine
    from bloomery.plan.hardware import dump_hardware

    hardware = measure_machine(chosen.disk, say=_say_nothing if chosen.quiet else _say)
    try:
        durable.write_whole(chosen.to, dump_hardware(hardware))
    except OSError as error:
        raise storage_error(error, path=chosen.to, doing="Writing the hardware file") from error
    if chosen.json:
        print(json_text({"wrote": str(chosen.to), **asdict(hardware)}))
        return 0
    print(f"wrote {chosen.to}: bloomery plan RECIPE --hardware {shlex.quote(str(chosen.to))}")
    return 0


def _refuse_other_file(path: Path) -> None:
    """Raise BloomeryError where `path` is a directory, or a file that does not describe a machine."""
    if path.is_dir():
        raise BloomeryError(f"{path} is a directory.", remedy="Name a file that ends in .toml: --to FILE.")
    if path.exists() and b"[accelerator]" not in path.read_bytes():
        raise BloomeryError(
            f"{path} is there already and describes no machine.", remedy="Name another file: --to FILE."
        )


def _say(line: str) -> None:
    print(f"measuring {line} …", file=sys.stderr, flush=True)


def _say_nothing(line: str) -> None:
    """Print nothing, for --quiet."""
