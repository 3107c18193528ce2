"""The journal of a run: appends each event as a line of JSON, and reads the run's history from it."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from bloomery import durable
from bloomery.errors import StorageError, storage_error
from bloomery.events.incarnation import Base, read_incarnations, visibility
from bloomery.events.records import as_float, as_json
from bloomery.events.run_directory import RunDirectory

log = logging.getLogger(__name__)

Event = Mapping[str, Any]  # Any: the fields of an event are its writer's

_MOST_WAITING = 100_000
"""The most lines that are kept in memory while the disk refuses them: about 100 MB."""
_LOOK_S = 10.0
"""Seconds between two looks whether the file at the journal's path is still the one that is written."""
_TAIL_BYTES = 1 << 16
_LOCK_S = 2.0


class Journal:
    """Appends events to a file. Each event is one line and one write, so a crash tears at most the last line.

    When an earlier writer left a torn line, this one starts on a new line. Non-finite floats become texts
    (see `as_json`). Opening raises StorageError. A disk that refuses a line later does not end the
    training: that is logged once, lines wait in memory, and each new line tries again. Where the file was
    removed or replaced meanwhile, a new one is begun; where the run directory was moved, the file goes along.

    is_shared: others append to the file too, perhaps from other nodes. On NFS two appends at once may be
        written over each other, so the file is locked for each.
    is_needed: closing raises StorageError where the disk has not taken a line, for that is no training.
    """

    def __init__(self, path: Path, *, is_shared: bool = False, is_needed: bool = False) -> None:
        self.path, self._is_needed = path, is_needed
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise storage_error(error, path=path, doing="Opening the journal") from error
        self._is_shared = is_shared
        self._waiting: deque[bytes] = deque()
        self._dropped, self._is_refused = 0, False
        self._refusal: StorageError | None = None
        self._looked = time.monotonic()
        self._close_torn_line()

    @property
    def is_refused(self) -> bool:
        """Whether lines wait because the disk has not taken them."""
        return bool(self._waiting)

    def write(self, event: str, *, incarnation: int, step: int, **fields: object) -> dict[str, Any]:
        """Append one event with the present time, and return it as a reader finds it."""
        record = as_json(
            {
                "event": event,
                "time": round(time.time(), 3),
                "incarnation": incarnation,
                "step": step,
                **fields,
            }
        )
        assert isinstance(record, dict)
        self._append(json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n")
        return record

    def close(self) -> None:
        """Close the file without a sync, for the operating system has had each line since its write."""
        if self._file >= 0:
            self._write_waiting()
            if self._waiting and not self._is_needed:
                log.warning(
                    "%s: the last %d lines could not be written and are lost", self.path, len(self._waiting)
                )
            os.close(self._file)
            self._file = -1
            if self._waiting and self._is_needed and self._refusal is not None:
                raise self._refusal

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
        self._waiting.append(text.encode(errors="replace"))  # a path in it may be no UTF-8
        if len(self._waiting) > _MOST_WAITING:
            del self._waiting[1]  # the first may be half written
            self._dropped += 1
        self._write_waiting()

    def _write_waiting(self) -> None:
        """Write the waiting lines in order, as far as the disk accepts them."""
        if time.monotonic() - self._looked >= _LOOK_S:
            self._looked = time.monotonic()
            self._follow_path()
        with self._locked():
            self._try_to_write()

    def _follow_path(self) -> None:
        """Write to the file at the path from now on, where that is another one, or none, by now."""
        try:
            with suppress(FileNotFoundError):
                if os.path.samestat(self.path.stat(), os.fstat(self._file)):
                    return
            self.path.parent.mkdir(exist_ok=True)  # not the run directory, which may have been moved
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError:
            return
        os.close(self._file)
        self._file = file
        log.warning(
            "%s was removed or replaced while it was written: its lines go on in a new file", self.path
        )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of a shared file; without locks, or if somebody keeps it, lines are written too."""
        is_held = False
        if self._is_shared:
            with suppress(OSError):
                is_held = durable.wait_for_lock(self._file, timeout_s=_LOCK_S)
        try:
            yield
        finally:
            if is_held:
                durable.unlock(self._file)

    def _try_to_write(self) -> None:
        """Write the waiting lines; the first refusal of the disk is logged, and the end of the refusals."""
        try:
            while self._waiting:  # a disk that becomes full may accept half a line
                line = self._waiting[0]
                self._waiting[0] = line[os.write(self._file, line) :]
                if not self._waiting[0]:
                    self._waiting.popleft()
        except OSError as error:
            self._refusal = storage_error(error, path=self.path, doing="Writing the journal")
            if not self._is_refused and not self._is_needed:
                told = "%s\n  Training goes on; the lines are kept in memory until it works."
                log.warning(told, self._refusal)
            self._is_refused = True
            return
        if self._is_refused:
            log.warning("%s is written again; %d lines were lost", self.path, self._dropped)
        self._is_refused, self._dropped = False, 0


def last_step(path: Path) -> int:
    """Return the last step of a journal, 0 where it has none; reads the journal from its end."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        end, count = file.seek(0, os.SEEK_END), _TAIL_BYTES
        while True:
            begin = max(0, end - count)
            file.seek(begin)
            lines = file.read().splitlines()
            events = map(_parsed, reversed(lines if begin == 0 else lines[1:]))
            made = (event["step"] for event in events if event and is_step(event, {"step"}))
            step = next((step for step in made if isinstance(step, int)), None)
            if step is not None or begin == 0:
                return step or 0
            count *= 4


def read_tail(
    path: Path, *, most_bytes: int = 8 << 20, named: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Yield the events in the last `most_bytes` of a journal, in the order written.

    A journal that does not exist counts as empty.
    named: the events that are wanted, () for all; of the lines without such a name none is parsed.
    """
    if not path.exists():
        return
    names = [json.dumps(name).encode() for name in named]
    with path.open("rb") as file:
        begin = max(0, file.seek(0, os.SEEK_END) - most_bytes)
        file.seek(begin)
        if begin:
            file.readline()
        for line in file:
            if names and not any(name in line for name in names):
                continue
            event = _parsed(line)
            if event is not None and (not named or event["event"] in named):
                yield event


def read_journal(path: Path) -> Iterator[dict[str, Any]]:  # Any: the fields of an event are its writer's
    """Yield the events of a journal in the order written, without lines that a crash tore.

    A journal that does not exist counts as empty.
    """
    return (event for _, event in read_numbered(path))


def read_numbered(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield what `read_journal` yields, each event with the number of its line, from 0 on."""
    if not path.exists():
        return
    torn = 0
    with path.open("rb") as file:
        for number, line in enumerate(file):
            event = _parsed(line)
            if event is not None:
                yield number, event
            elif line.strip():
                torn += 1
    if torn:
        log.info("%s: %d torn lines were left out", path, torn)


def kept_steps(
    events: Iterable[Event], is_kept: Callable[[Base], bool], *, needed: Set[str]
) -> Iterator[Event]:
    """Yield the `step` events that are part of a run in the order of their steps, each step once.

    A step that was written again, by the same incarnation or a later one, is yielded as written last. A line
    of a step before those is left out: only a damaged journal, or one without its records of incarnations,
    has such lines.

    events: a journal in the order written.
    is_kept: says of a (step, incarnation) whether it is part of the run; see `visibility`.
    needed: the fields without which a line counts as damaged.
    """
    newest: Event | None = None
    known = {"step", "incarnation", *needed}
    for event in events:
        if not is_step(event, known) or not is_kept((event["step"], event["incarnation"])):
            continue
        if newest is not None and event["step"] > newest["step"]:
            yield newest
        if newest is None or event["step"] >= newest["step"]:
            newest = event
    if newest is not None:
        yield newest


def loss_curve(rundir: RunDirectory, *, peer: str = "0", rank: int = 0) -> list[tuple[int, float]]:
    """Return (step, loss) of each step as its last incarnation recorded it, sorted by step.

    Steps that were abandoned (by a crash or a rewind) and not trained again are not part of the run.
    """
    events = read_journal(rundir.journal(peer=peer, rank=rank))
    steps = kept_steps(events, visibility(read_incarnations(rundir)), needed={"loss"})
    return [(event["step"], as_float(event["loss"])) for event in steps]


def is_step(event: Mapping[str, Any], needed: Set[str]) -> bool:
    """Whether an event is a step with the fields that a reader needs, which a damaged line may lack."""
    return event["event"] == "step" and event.keys() >= needed


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):  # torn, or damage that reads as lists in lists without end
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None
