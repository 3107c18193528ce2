"""The log that an etcd process writes: keeps it short, and reads how the last start went."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from pathlib import Path

log = logging.getLogger(__name__)

NAME = "etcd.log"
BYTES_AT_MOST = 64 << 20
_READ_BYTES = 1 << 20
_BEGINNING = re.compile(rb"\n\n(?!goroutine )")
"""Each start begins with an empty line; another one stands before the stack of a Go program that panics."""
_ENDINGS = ('{"level":"fatal"', '{"level":"panic"', "panic: ", "fatal error: ")
_SHOWN = 400


def shorten(path: Path) -> None:
    """Move what a log holds to a file beside it, once that is much. An etcd that appends to it goes on so.

    It runs for months, and where the disk is slow it warns of each request.
    """
    if not path.exists() or path.stat().st_size <= BYTES_AT_MOST:
        return
    try:
        shutil.copyfile(path, path.with_suffix(".log.1"))
    except OSError as error:  # a full disk, for instance, which needs the room all the more
        log.warning("what %s held is not kept: %s", path, error)
    os.truncate(path, 0)


def of_last_start(path: Path) -> bytes:
    """Return what the present process has written to its log."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _READ_BYTES))
        return _BEGINNING.split(file.read())[-1]


def last_words(output: bytes) -> str:
    """Return why an etcd ended: the line that says so, or else the last one.

    Of a record in JSON its message and error are returned, without the stack.
    """
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    if not lines:
        return "its log is empty"
    line = next((line for line in lines if line.startswith(_ENDINGS)), lines[-1])
    try:
        record = json.loads(line)
        return f"{record['msg']}: {record['error']}"[:_SHOWN]
    except (ValueError, TypeError, KeyError, RecursionError):
        return line[-_SHOWN:]
