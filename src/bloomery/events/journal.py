"""The journal: what happened in a run, one JSON object a line, appended and never changed."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from bloomery.events.incarnation import Base, read_incarnations, visible
from bloomery.events.numbers import as_float, as_json
from bloomery.events.rundir import RunDir
from bloomery.events.storage import storage_error

log = logging.getLogger(__name__)


class Journal:
    """Appends events to a file. Each is one line and one write, so that a crash tears at most the last.

    A torn line that an earlier writer left is closed by starting this one's on a new line.
    Not-finite floats become texts (see `numbers`). Raises StorageError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise storage_error(error, path=path, doing="Opening the journal") from error
        self._close_torn_line()

    def write(self, event: str, *, incarnation: int, step: int, **fields: object) -> None:
        """Append one event with the time of now."""
        record = {
            "event": event,
            "time": round(time.time(), 3),
            "incarnation": incarnation,
            "step": step,
            **fields,
        }
        self._append(json.dumps(as_json(record), allow_nan=False, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Close the file. What was written is the operating system's to keep from each line on."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _close_torn_line(self) -> None:
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            self._append("\n")

    def _append(self, text: str) -> None:
        remaining = memoryview(text.encode())
        try:
            while remaining:  # a full disk may take half a line first
                remaining = remaining[os.write(self._file, remaining) :]
        except OSError as error:
            raise storage_error(error, path=self.path, doing="Writing the journal") from error


def read_journal(path: Path) -> Iterator[dict[str, Any]]:  # Any: the fields of an event are its writer's
    """Yield the events of a journal in the order written; lines that a crash tore are left out.

    A journal that does not exist is an empty one.
    """
    if not path.exists():
        return
    torn = 0
    with path.open("rb") as file:
        for line in file:
            event = _parsed(line)
            if event is not None:
                yield event
            elif line.strip():
                torn += 1
    if torn:
        log.info("%s: %d torn lines were left out", path, torn)


def loss_curve(rundir: RunDir, *, peer: str = "0", rank: int = 0) -> list[tuple[int, float]]:
    """Return (step, loss) of each step as its last incarnation recorded it, sorted by step.

    Steps that were abandoned (by a crash or a rewind) and not trained again are not part of the run.
    """
    losses: dict[Base, float] = {}
    for event in read_journal(rundir.journal(peer=peer, rank=rank)):
        if event["event"] == "step":
            losses[event["step"], event["incarnation"]] = as_float(event["loss"])
    kept = sorted(visible(losses, read_incarnations(rundir)))
    newest = {step: losses[step, incarnation] for step, incarnation in kept}  # the last one of a step wins
    return sorted(newest.items())


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None
