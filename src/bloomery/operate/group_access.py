"""Makes a run directory writable for its group, so that colleagues can stop, save and go on with a run."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bloomery.errors import BloomeryError

_DIRECTORY = stat.S_IRGRP | stat.S_IWGRP | stat.S_IXGRP | stat.S_ISGID
_FILE = stat.S_IRGRP | stat.S_IWGRP


@dataclass(frozen=True, kw_only=True)
class AccessRepair:
    """What was changed in a run directory.

    repaired: the number of files and directories whose group or mode was changed.
    refused: the paths that belong to others and are not writable for the group, by owner.
    """

    repaired: int
    refused: dict[str, tuple[Path, ...]]


def share_with_group(run: Path, *, group: str = "") -> AccessRepair:
    """Make everything in a run directory writable for its group; directories pass their group on.

    group: the name of the group; "" keeps the group of the run directory itself.
    Raises BloomeryError where there is no such group. What belongs to others is left as it is and reported.
    """
    number = _number_of(group) if group else run.stat().st_gid
    repaired, refused = 0, dict[str, list[Path]]()
    for path in _everything(run):
        try:
            repaired += _repair(path, number)
        except FileNotFoundError:  # a training that goes on has removed it
            continue
        except PermissionError:
            refused.setdefault(_owner(path), []).append(path)
    return AccessRepair(repaired=repaired, refused={owner: tuple(paths) for owner, paths in refused.items()})


def _everything(run: Path) -> Iterator[Path]:
    yield run.resolve() if run.is_symlink() else run  # a link has no mode of its own
    for directory, directories, files in os.walk(run):
        yield from (Path(directory) / name for name in (*directories, *files))


def _repair(path: Path, group: int) -> bool:
    facts = path.lstat()
    if stat.S_ISLNK(facts.st_mode):
        return False
    wanted = facts.st_mode | (_DIRECTORY if stat.S_ISDIR(facts.st_mode) else _FILE)
    if facts.st_mode == wanted and facts.st_gid == group:
        return False
    if facts.st_gid != group:
        os.chown(path, -1, group)  # this may clear the bit that directories pass their group on by
    path.chmod(stat.S_IMODE(wanted))
    return True


def _number_of(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as unknown:
        raise BloomeryError(
            f"There is no group {group!r} on this machine.", remedy="Name one of `id -Gn` in submit.group."
        ) from unknown


def _owner(path: Path) -> str:
    try:
        number = path.lstat().st_uid
        return pwd.getpwuid(number).pw_name
    except FileNotFoundError:
        return "nobody"
    except KeyError:
        return str(number)
