"""Reads journals and Megatron-style logs into columns of numbers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from functools import cached_property
from math import nan
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO

import numpy as np

from bloomery.config.setting import LARGEST_COUNT
from bloomery.errors import StorageError
from bloomery.events.records import Facts, StepReport, as_float
from bloomery.guard.log_lines import (
    FIELDS,
    Numbers,
    loss_in_no_field,
    other_names_of_losses,
    parsed_lines,
)

CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The reports of a log, one number a line in each column; NaN where the line lacks it.

    resumed: 1 at the first line of a process that resumed the run, else 0.
    """

    step: Numbers
    loss: Numbers
    learning_rate: Numbers
    global_batch: Numbers
    loss_scale: Numbers
    gradient_norm: Numbers
    shared_seconds: Numbers
    consumed_samples: Numbers
    cursor: Numbers
    refused: Numbers
    """How many updates were refused in the steps that the line covers."""
    peers: Numbers
    resumed: Numbers

    def __len__(self) -> int:
        return len(self.step)

    def report(self, index: int) -> StepReport:
        """Return one line as a report for the guards."""
        step, scale = int(self.step[index]), float(self.loss_scale[index])
        seconds, before = float(self.shared_seconds[index]), int(self.step[index - 1]) if index else 0
        covered = step - before if 0 < step - before <= 1000 else 1
        refused = self.refused[index]
        return StepReport(
            step=step,
            consumed_samples=_whole(self.consumed_samples[index]),
            consumed_tokens=0,
            cursor=_whole(self.cursor[index]),
            seconds=seconds,
            learning_rate=_number(self.learning_rate[index]),
            global_batch=_whole(self.global_batch[index]),
            loss=float(self.loss[index]),
            z_loss=0.0,
            loss_scale=None if np.isnan(scale) else scale,
            gradient_norm=_number(self.gradient_norm[index]),
            zero_gradients=0,
            update_applied=bool(refused < covered),
            refused_updates=0,
            refused_in_a_row=int(self._refused_in_a_row[index]),
            nan_losses=0,
            samples_per_s=0.0,
            tokens_per_s=0.0,
            hardware_tflops=0.0,
            model_tflops=0.0,
            mfu=None,
            peers=_whole(self.peers[index]) or 1,
            shared_seconds=None if np.isnan(seconds) else seconds,
            facts=Facts(),
        )

    @cached_property  # counted once, since a report of each line of a long row is asked for
    def _refused_in_a_row(self) -> Numbers:
        """Of each line: the updates that were refused without a loss since the last line that has neither."""
        is_of_row = (self.refused > 0) & np.isnan(self.loss)
        total = np.cumsum(np.where(is_of_row, np.trunc(self.refused), 0.0))
        before: Numbers = np.maximum.accumulate(np.where(is_of_row, 0.0, total))
        return total - before


def read_columns(path: Path, *, workers: int | None = None, may_be_empty: bool = False) -> Columns:
    """Read a journal or a Megatron-style log on several cores, without an unfinished last line.

    workers: the number of processes; None: one for each core.
    may_be_empty: whether a file without a line of a training is as good, as at the beginning of a run.
    Raises StorageError when the file cannot be read or has no line of a training.
    """
    return LogReader(path, workers=workers).columns(may_be_empty=may_be_empty)


class LogReader:
    """Reads a log that grows: of its lines, each call reads those that were added since the one before.

    A log that was replaced, or no longer has the lines that were read last, is read from its beginning again.
    workers: as for `read_columns`.
    """

    def __init__(self, path: Path, *, workers: int | None = None) -> None:
        self._path, self._workers = path, workers or os.cpu_count() or 1
        self._log: tuple[int, bool] | None = None  # its inode, and whether it is a journal
        self._tables: list[Numbers] = []
        self._read_bytes, self._last_read = 0, b""

    def columns(self, *, may_be_empty: bool = False) -> Columns:
        """Return the columns of all lines, like `read_columns`."""
        try:
            with self._path.open("rb") as file:
                head = file.read(_HEAD_BYTES)
                _refuse_other_encodings(self._path, head)
                is_journal = head.lstrip()[:1] == b"{" and b'"event"' in head
                self._begin_anew_if_replaced(file, is_journal=is_journal)
                end = _end_of_lines(file, self._read_bytes)
                file.seek(max(self._read_bytes, end - _COMPARED_BYTES))
                self._last_read = file.read(end - file.tell()) or self._last_read
        except OSError as error:
            raise StorageError(
                f"{self._path} cannot be read: {error.strerror}", remedy="Check the path."
            ) from error
        self._take(end, is_journal=is_journal)
        columns = _joined(self._tables, is_journal=is_journal)
        _refuse_no_losses(self._path, columns, head, is_journal=is_journal, may_be_empty=may_be_empty)
        return columns

    def _begin_anew_if_replaced(self, file: BinaryIO, *, is_journal: bool) -> None:
        log = (os.fstat(file.fileno()).st_ino, is_journal)
        file.seek(self._read_bytes - len(self._last_read))
        if log != self._log or file.read(len(self._last_read)) != self._last_read:
            self._log, self._tables, self._read_bytes, self._last_read = log, [], 0, b""

    def _take(self, end: int, *, is_journal: bool) -> None:
        """Parse the whole lines up to `end` that were not read yet."""
        read = _journal_part if is_journal else _megatron_part
        starts = range(self._read_bytes, end, CHUNK_BYTES)
        parts = [(str(self._path), start, min(start + CHUNK_BYTES, end)) for start in starts]
        count = min(self._workers, len(parts))
        if count <= 1:
            self._tables += [read(*part) for part in parts]
        else:
            with ProcessPoolExecutor(count) as pool:
                self._tables += pool.map(read, *zip(*parts, strict=True))
        self._read_bytes = end


_HEAD_BYTES = 1 << 16
_COMPARED_BYTES = 4096


def _end_of_lines(file: BinaryIO, begin: int) -> int:
    """Return where the last whole line of a file ends; `begin` where none ends after it."""
    end = file.seek(0, os.SEEK_END)
    while end > begin:
        start = max(begin, end - _HEAD_BYTES)
        file.seek(start)
        place = file.read(end - start).rfind(b"\n")
        if place >= 0:
            return start + place + 1
        end = start
    return begin


def _refuse_no_losses(
    path: Path, columns: Columns, head: bytes, *, is_journal: bool, may_be_empty: bool
) -> None:
    """Raise StorageError for a log without a line of a training, and for one whose losses are not known."""
    if not len(columns) and not may_be_empty:
        raise StorageError(
            f"{path} holds no line of a training: no `step` event of a journal, no `iteration …| lm loss: …`",
            remedy="Give a run directory, its journal, or the log of a Megatron-style run.",
        )
    if not is_journal and len(columns) and np.isnan(columns.loss).all():
        others = other_names_of_losses(head)
        if others:
            raise StorageError(
                f"{path} has lines of a training and no loss by a known name, but "
                f"{', '.join(name[:-1].rstrip() for name in others)}",
                remedy="Rename the one that the training minimises to `lm loss`: "
                f"sed {_renaming(others[0])} {quote(str(path))} > renamed.log",
            )
        loose = loss_in_no_field(head)
        if loose:
            raise StorageError(
                f"{path} has lines of a training whose loss is no field of its own: {loose[:80]}",
                remedy="Put `|` or commas between the fields, and `:` or `=` after each name: "
                "iteration 5 | lm loss: 3.2 | grad norm: 0.5",
            )


def _renaming(name: str) -> str:
    """Return what makes `sed` rename a field to `lm loss`. name: as written, with the sign behind it."""
    pattern = re.sub(r"([\\/.*^$\[\]])", r"\\\1", name)
    return quote(f"s/{pattern}/lm loss{name[-1]}/")


def _refuse_other_encodings(path: Path, head: bytes) -> None:
    """Raise StorageError with the command that makes text of a file that is compressed or UTF-16."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise StorageError(
            f"{path} is UTF-16",
            remedy=f"Convert it: iconv -f utf-16 -t utf-8 {quote(str(path))} > converted.log",
        )
    if head.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
        command = "gunzip -c" if head[:1] == b"\x1f" else "zstd -dc"
        raise StorageError(
            f"{path} is compressed", remedy=f"Unpack it: {command} {quote(str(path))} > unpacked.log"
        )


_NAMES = tuple(field.name for field in fields(Columns))
_PLACES = {name: place for place, name in enumerate(_NAMES)}
_ABSENT = tuple(1.0 if name == "peers" else 0.0 if name in ("refused", "resumed") else nan for name in _NAMES)


def _text(path: str, start: int, end: int) -> bytes:
    """Return the lines that begin in [start, end), without the unfinished last line of a growing file."""
    with Path(path).open("rb") as file:
        if start:
            file.seek(start - 1)
            file.readline()
        at = file.tell()
        text = file.read(max(end - at, 0))
        if text and not text.endswith(b"\n"):
            text += file.readline()
    return text if text.endswith(b"\n") else text[: text.rfind(b"\n") + 1]


def _megatron_part(path: str, start: int, end: int) -> Numbers:
    numbers = parsed_lines(_text(path, start, end))
    table = np.tile(np.array(_ABSENT), (len(numbers), 1))
    for place, name in enumerate(FIELDS):
        is_given = ~np.isnan(numbers[:, place])
        table[is_given, _PLACES[name]] = numbers[is_given, place]
    return table


def _journal_part(path: str, start: int, end: int) -> Numbers:
    rows: list[tuple[float, ...]] = []
    resumed = 0.0
    for line in _text(path, start, end).split(b"\n"):
        if b'"event": "step"' in line:
            row = _row(line, resumed)
            if row is not None:
                rows.append(row)
                resumed = 0.0
        elif b'"event": "start"' in line:
            resumed = 1.0
    if resumed:  # the first step of the next part is the first after it
        rows.append((nan,) * len(_NAMES))
    return np.array(rows, dtype=np.float64).reshape(-1, len(_NAMES))


def _row(line: bytes, resumed: float) -> tuple[float, ...] | None:
    """Return the numbers of a step; None for a line that is damaged."""
    record, row = _record(line), [*_ABSENT]
    if record is None:
        return None
    try:
        for name in _NAMES:
            value = record.get(name)
            if value is not None:
                row[_PLACES[name]] = as_float(value)
    except (ValueError, OverflowError):
        return None  # a text, or a number of hundreds of digits
    if np.isnan(row[_PLACES["step"]]):
        return None
    row[_PLACES["refused"]] = 0.0 if record.get("update_applied", True) else 1.0
    row[_PLACES["resumed"]] = resumed
    return tuple(row)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None  # torn by a crash
    return record if isinstance(record, dict) and "step" in record else None


def _joined(tables: Sequence[Numbers], *, is_journal: bool) -> Columns:
    table = _with_counts(np.concatenate([*tables, np.empty((0, len(_NAMES)))]))
    step, resumed = table[:, _PLACES["step"]], table[:, _PLACES["resumed"]]
    marks = np.isnan(step)  # of starts whose first step lies in the next part
    if marks.any():
        after = np.flatnonzero(marks) + 1
        resumed[after[after < len(step)]] = 1.0
        table = table[~marks]
    if not is_journal:
        table = _without_repeats(table)
    columns = {name: table[:, place].copy() for name, place in _PLACES.items()}
    if not is_journal and len(table):
        columns["resumed"][1:] = np.diff(columns["step"]) <= 0
    if len(table):
        columns["resumed"][0] = 0.0
    if np.isnan(columns["cursor"]).all():
        columns["cursor"] = columns["consumed_samples"]
    if np.isnan(columns["global_batch"]).all() and len(table) > 1:
        steps = np.diff(columns["step"])
        batches = np.diff(columns["consumed_samples"])[steps > 0] / steps[steps > 0]
        columns["global_batch"][:] = np.median(batches) if len(batches) else nan
    return Columns(**columns)


def _with_counts(table: Numbers) -> Numbers:
    """Return the table without lines whose step is no count, and with NaN for other counts that are none.

    A line that was torn and joined with another may have any number.
    """

    def is_none(column: Numbers) -> Any:  # Any: an array of truth values
        return (column < 0) | (column > LARGEST_COUNT)  # False for NaN: it is absent

    table = table[~is_none(table[:, _PLACES["step"]])]
    for name in ("global_batch", "consumed_samples", "cursor", "refused", "peers"):
        column = table[:, _PLACES[name]]
        column[is_none(column)] = _ABSENT[_PLACES[name]]
    return table


def _without_repeats(table: Numbers) -> Numbers:
    """Return the table without lines that repeat the step and the loss of the line before.

    Several ranks print the same line into one log, or a line is collected twice.
    """
    step, loss = table[1:, _PLACES["step"]], table[1:, _PLACES["loss"]]
    loss_before = table[:-1, _PLACES["loss"]]
    is_same = (loss == loss_before) | (np.isnan(loss) & np.isnan(loss_before))
    is_repeat = (step == table[:-1, _PLACES["step"]]) & is_same
    repeats = np.flatnonzero(is_repeat) + 1
    return np.delete(table, repeats, axis=0) if len(repeats) else table


def _number(value: float) -> float:
    return 0.0 if value != value else float(value)


def _whole(value: float) -> int:
    return 0 if value != value else int(value)
