"""The switches of a run: files `stop` and `save` in the run directory, and in one of the user's choice.

`stop` stays until somebody disarms it: the training saves and stops, and every start ends at once. The
training removes `save`, saves once and goes on.
"""

from __future__ import annotations

import errno
import getpass
import logging
import os
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bloomery import durable
from bloomery.errors import storage_error
from bloomery.events.run_directory import RunDirectory

log = logging.getLogger(__name__)

SWITCHES = ("stop", "save")
_LONGEST_NOTE = 200


class Switches:
    """The switches in some directories, as one process sees them.

    A directory that cannot be read counts as one without an armed switch; that is logged once.

    directories: where the switches are; a directory that does not exist has none.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        self.directories = tuple(directories)
        self._taken: dict[Path, tuple[int, int]] = {}
        self._refused: set[Path] = set()

    @classmethod
    def of_run(cls, rundir: RunDirectory, directory: str) -> Switches:
        """Return the switches of a run. directory: where more are (`control.directory`); "": nowhere."""
        return cls([rundir.control_dir, *switch_places(directory)])

    def armed(self, name: str) -> Path | None:
        """Return the first file of a switch that was not taken; None where the switch is not armed."""
        for directory in self.directories:
            path = directory / name
            identity = self._identity(path)
            if identity is not None and self._taken.get(path) != identity:
                return path
        return None

    def take(self, name: str) -> None:
        """Remove a switch, so that it counts once; one that cannot be removed counts again when touched."""
        while path := self.armed(name):
            identity = self._identity(path)
            if identity is not None:
                self._taken[path] = identity
            try:
                path.unlink(missing_ok=True)
            except OSError as refused:
                log.warning("%s cannot be removed (%s): touch it to ask again", path, refused.strerror)

    def _identity(self, path: Path) -> tuple[int, int] | None:
        try:
            facts = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as refused:
            if path not in self._refused:
                log.warning("the switch %s cannot be looked at: %s", path, refused.strerror)
            self._refused.add(path)
            return None
        return facts.st_ino, facts.st_mtime_ns


def switch_places(directory: str) -> list[Path]:
    """Return where a run's recipe has more switches (`control.directory`), `~` replaced; [] for nowhere."""
    return [Path(os.path.expanduser(directory))] if directory else []  # noqa: PTH111  — it raises no error


def disarming(armed: Path, rundir: RunDirectory) -> str:
    """Return the command that disarms a switch of a run, which may be there for several runs."""
    of = rundir.as_word() if armed.parent == rundir.control_dir else f"--at {shlex.quote(str(armed.parent))}"
    return f"bloomery {armed.name} {of} --disarm"


def arm(path: Path, *, why: str = "") -> None:
    """Write the file of a switch, which says who armed it, when, and why. Raises OSError."""
    who = os.environ.get("USER") or _user()
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    line = f"armed by {who} on {os.uname().nodename} at {when}{f': {why}' if why else ''}\n"
    try:
        durable.write_whole(path, line)
    except OSError as refused:
        if refused.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        path.touch()  # a full disk, for which runs are stopped, has room for a file without content


def write_request(rundir: RunDirectory, request: str, line: str, *, keep: bool) -> None:
    """Write a control file in one piece. Raises StorageError.

    keep: add the line to waiting ones; False: replace the file.
    """
    path = rundir.control(request)
    try:
        durable.make_directory(path.parent)
        waiting = _waiting(path) if keep else ""
        durable.write_whole(path, f"{waiting}{line}\n")
    except OSError as error:
        raise storage_error(error, path=path, doing="Asking the run") from error


def waiting_requests(rundir: RunDirectory) -> list[tuple[str, str]]:
    """Return (beginning of a sentence, what the run does) of each request that waits and changes its samples.

    It may be of long ago: a run that is finished, or that nobody starts, takes none.
    """
    found = []
    for name, does in (("rewind", "goes back"), ("skip", "leaves samples out")):
        path = rundir.control(name)
        with suppress(OSError):
            words = " ".join(path.read_text(encoding="utf-8", errors="replace").split())[:_LONGEST_NOTE]
            written = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
            found.append((f"control/{name} ({words}) waits since {written}", does))
    return found


def _waiting(path: Path) -> str:
    """Return the lines that wait in a control file, the last one ended; "" where the run has taken them."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    return text if not text or text.endswith("\n") else f"{text}\n"  # people write files without an end


def note_of(path: Path) -> str:
    """Return the line of a switch's file that says who armed it; "" where it is empty or cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_LONGEST_NOTE).partition("\n")[0].strip()
    except OSError:
        return ""


def _user() -> str:
    with suppress(KeyError, OSError):  # accounts have no name in some containers
        return getpass.getuser()
    return str(os.getuid())
