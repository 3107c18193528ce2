"""Reads how much of a disk quota is left, from what `quota` and `lfs quota` print."""

from __future__ import annotations

import grp
import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloomery.operate.watch.disk import DiskSample

_TIMEOUT_S = 10.0
_NONE = -1
_LINE = re.compile(
    r"(?P<place>\S+)\s+\[?(?P<kib>\d+)\]?\*?\s+(?P<kib_soft>\d+)\s+(?P<kib_hard>\d+)\s+\S+"
    r"\s+\[?(?P<files>\d+)\]?\*?\s+(?P<files_soft>\d+)\s+(?P<files_hard>\d+)\s+\S+"
)
"""One file system: its name, then KiB used, quota, limit and grace, and the same of files. `lfs quota` writes
"-" for no grace and `quota -p` a number, so no column is ever empty; a long name has a line of its own."""
_UNSURE = re.compile(r"\[\d+\]")


@dataclass(frozen=True, kw_only=True)
class MountedAt:
    """The file system that a directory lies on.

    kind: such as "lustre" or "xfs". place, source: where it is mounted, and what is mounted there.
    """

    kind: str
    place: str
    source: str


def sample_quotas(path: Path, *, now: float) -> dict[str, DiskSample]:
    """Return what is left of each quota that the files of `path` count for; {} where there are none.

    The keys are "user NAME" for this process's user and "group NAME" for the directory's group. A limit of
    which there is none is -1 in the sample.
    """
    mount = mounted_at(path)
    if mount is None:
        return {}
    samples = {}
    for flag, name, number in _owners(path):
        text = _asked(mount, flag, number)
        sample = parse_quota(text, mount, now=now) if text else None
        if sample is not None:
            samples[f"{'user' if flag == '-u' else 'group'} {name}"] = sample
    return samples


def parse_quota(text: str, mount: MountedAt, *, now: float) -> DiskSample | None:
    """Return what is left by the output of `quota -w -p` or `lfs quota`; None where nothing is limited.

    The hard limit counts, and the soft one where there is no other. What a server did not answer for (in
    brackets) is not counted at all.
    """
    for match in _LINE.finditer(text):
        if match["place"] not in (mount.place, mount.source) or _UNSURE.search(match[0]):
            continue
        free_kib = _left(match["kib"], match["kib_soft"], match["kib_hard"])
        free_files = _left(match["files"], match["files_soft"], match["files_hard"])
        if (free_kib, free_files) != (_NONE, _NONE):
            return DiskSample(now, _NONE if free_kib == _NONE else free_kib << 10, free_files)
    return None


def mounted_at(path: Path) -> MountedAt | None:
    """Return the file system that a path lies on, by proc_pid_mountinfo(5); None where that does not say."""
    try:
        device, path = path.stat().st_dev, path.resolve()
        lines = os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).split("\n")
    except OSError:
        return None
    mounts = []
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, of_kind = before.split(" "), after.split(" ")
        is_here = len(fields) > 4 and fields[2] == f"{os.major(device)}:{os.minor(device)}"
        if is_here and len(of_kind) > 1 and path.is_relative_to(_unescaped(fields[4])):
            mounts.append(
                MountedAt(kind=of_kind[0], place=_unescaped(fields[4]), source=_unescaped(of_kind[1]))
            )
    return max(mounts, key=lambda mount: len(mount.place), default=None)


def _owners(path: Path) -> Iterator[tuple[str, str, int]]:
    user, group = os.geteuid(), 0
    with suppress(OSError):
        group = path.stat().st_gid
    if user:  # nobody limits root
        yield "-u", _name(pwd.getpwuid, user), user
    if group:
        yield "-g", _name(grp.getgrgid, group), group


def _asked(mount: MountedAt, flag: str, number: int) -> str:
    """Return what the command of the file system prints; "" where it is not there or does not answer."""
    if mount.kind == "lustre":
        command = ["lfs", "quota", "-q", flag, str(number), mount.place]
    else:
        command = ["quota", "-w", "-p", flag, *([] if flag == "-u" else [str(number)])]
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return os.fsdecode(done.stdout)  # its status is 1 for a quota that is used up


def _left(used: str, soft: str, hard: str) -> int:
    limit = int(hard) or int(soft)
    return max(0, limit - int(used)) if limit else _NONE


def _name(lookup: Callable[[int], Sequence[Any]], number: int) -> str:
    try:
        return str(lookup(number)[0])
    except KeyError:  # a container need not know the names
        return str(number)


def _unescaped(name: str) -> str:
    return re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), name)
