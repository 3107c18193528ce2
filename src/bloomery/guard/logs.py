"""Reads journals and Megatron-style logs into columns of numbers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from itertools import chain
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bloomery.errors import StorageError
from bloomery.events.records import Facts, StepReport, as_float

CHUNK_BYTES = 32 << 20
_FEW = 16

Numbers = NDArray[np.float64]


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
            refused_in_a_row=self._refused_in_a_row(index),
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

    def _refused_in_a_row(self, index: int) -> int:
        total = 0
        while index >= 0 and self.refused[index] > 0 and np.isnan(self.loss[index]):
            total += int(self.refused[index])
            index -= 1
        return total


def read_columns(path: Path, *, workers: int | None = None, may_be_empty: bool = False) -> Columns:
    """Read a journal or a Megatron-style log on several cores, without an unfinished last line.

    workers: the number of processes; None: one for each core.
    may_be_empty: whether a file without a line of a training is as good, as at the beginning of a run.
    Raises StorageError when the file cannot be read or has no line of a training.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(1 << 16)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}", remedy="Check the path.") from error
    is_journal = head.lstrip()[:1] == b"{"
    read = _journal_part if is_journal else _megatron_part
    parts = [(str(path), start, min(start + CHUNK_BYTES, size)) for start in range(0, size, CHUNK_BYTES)]
    count = min(workers or os.cpu_count() or 1, len(parts))
    if count <= 1:
        tables = [read(*part) for part in parts]
    else:
        with ProcessPoolExecutor(count) as pool:
            tables = list(pool.map(read, *zip(*parts, strict=True)))
    columns = _joined(tables, is_journal=is_journal)
    if not len(columns) and not may_be_empty:
        raise StorageError(
            f"{path} holds no line of a training: no `step` event of a journal, no `iteration …| lm loss: …`",
            remedy="Give a run directory, its journal, or the log of a Megatron-style run.",
        )
    return columns


_NAMES = tuple(field.name for field in fields(Columns))
_PLACES = {name: place for place, name in enumerate(_NAMES)}
_MEGATRON = {
    b"consumed samples": ("consumed_samples", 1.0),
    b"elapsed time per iteration (ms)": ("shared_seconds", 1e-3),
    b"elapsed time per iteration (s)": ("shared_seconds", 1.0),
    b"learning rate": ("learning_rate", 1.0),
    b"global batch size": ("global_batch", 1.0),
    b"lm loss": ("loss", 1.0),
    b"loss scale": ("loss_scale", 1.0),
    b"grad norm": ("gradient_norm", 1.0),
    b"number of skipped iterations": ("refused", 1.0),
}
_ABSENT = tuple(1.0 if name == "peers" else 0.0 if name in ("refused", "resumed") else nan for name in _NAMES)


def _lines(path: str, start: int, end: int) -> Iterable[bytes]:
    """Return the lines that begin in [start, end), without the unfinished last line of a growing file."""
    with Path(path).open("rb") as file:
        if start:
            file.seek(start - 1)
            file.readline()
        at = file.tell()
        text = file.read(max(end - at, 0))
        if text and not text.endswith(b"\n"):
            text += file.readline()
    lines = text.split(b"\n")
    lines.pop()
    return lines


def _megatron_part(path: str, start: int, end: int) -> Numbers:
    lines = [line for line in _lines(path, start, end) if b"iteration" in line and b"|" in line]
    return _parsed(lines)


def _parsed(lines: Sequence[bytes]) -> Numbers:
    """Parse lines of equal layout at once; others are halved until they are equal or few."""
    alike = _all_alike(lines)
    if alike is not None:
        return alike
    if len(lines) < _FEW:
        return _one_by_one(lines)
    half = len(lines) // 2
    return np.concatenate([_parsed(lines[:half]), _parsed(lines[half:])])


def _all_alike(lines: Sequence[bytes]) -> Numbers | None:
    """Parse all lines at once; None where one lacks the fields of the first."""
    if not lines or _iteration(lines[0].split(b"|")[0]) is None:
        return None
    parts = lines[0].split(b"|")
    layout = _layout(parts)
    values = {at: re.escape(name) + rb" *([^|\s]*)[^|\n]*" for at, name, _, _ in layout}
    fields = [values.get(at, _any_value(part)) for at, part in enumerate(parts) if at]
    pattern = re.compile(rb"^[^|\n]*iteration[ :]*(\d+)[^|\n]*\|" + rb"\|".join(fields) + rb"$", re.MULTILINE)
    matches = pattern.findall(b"\n".join(lines))
    if len(matches) != len(lines):
        return None
    try:
        # This is several times as fast as converting an array of texts.
        text = b" ".join(chain.from_iterable(matches)).decode("ascii", "replace")
        numbers = np.fromstring(text, sep=" ", dtype=np.float64).reshape(len(lines), -1)
    except (ValueError, DeprecationWarning):
        return None  # an empty value, or a word
    if numbers.shape[1] != len(layout) + 1:
        return None
    table = np.tile(np.array(_ABSENT), (len(lines), 1))
    table[:, 0] = numbers[:, 0]
    for column, (_, _, place, unit) in enumerate(layout, 1):
        table[:, place] = numbers[:, column] * unit
    return table


def _any_value(part: bytes) -> bytes:
    """Return a pattern for any value of the same field; for a field without a name, one for any text."""
    name, colon, _ = part.partition(b":")
    return (re.escape(name + colon) if colon else b"") + rb"[^|\n]*"


def _one_by_one(lines: Sequence[bytes]) -> Numbers:
    rows: list[list[float]] = []
    for line in lines:
        parts = line.split(b"|")
        step = _iteration(parts[0])
        if step is None:
            continue
        row = [*_ABSENT]
        row[0] = step
        for at, name, place, unit in _layout(parts):
            row[place] = _float(parts[at][len(name) :]) * unit
        rows.append(row)
    return np.array(rows, dtype=np.float64).reshape(-1, len(_NAMES))


def _layout(parts: Sequence[bytes]) -> tuple[tuple[int, bytes, int, float], ...]:
    """Return (index of the part, its text before the value, column, unit) for each known field of a line."""
    layout = []
    for at, part in enumerate(parts):
        name, colon, _ = part.partition(b":")
        column = _MEGATRON.get(name.strip())
        if colon and column is not None:
            layout.append((at, name + colon, _PLACES[column[0]], column[1]))
    return tuple(layout)


def _iteration(part: bytes) -> float | None:
    """Return 29020 of `iteration   29020/  311541`, after any text; None for other parts."""
    _, keyword, rest = part.partition(b"iteration")
    number = rest.partition(b"/")[0].strip(b" :\t")
    return float(number) if keyword and number.isdigit() else None


def _journal_part(path: str, start: int, end: int) -> Numbers:
    rows: list[tuple[float, ...]] = []
    resumed = 0.0
    for line in _lines(path, start, end):
        if b'"event": "step"' in line:
            record = _record(line)
            if record is not None:
                rows.append(_row(record, resumed))
                resumed = 0.0
        elif b'"event": "start"' in line:
            resumed = 1.0
    if resumed:  # the first step of the next part is the first after it
        rows.append((nan,) * len(_NAMES))
    return np.array(rows, dtype=np.float64).reshape(-1, len(_NAMES))


def _row(record: dict[str, Any], resumed: float) -> tuple[float, ...]:  # Any: a line of the journal
    row = [*_ABSENT]
    for name in _NAMES:
        value = record.get(name)
        if value is not None:
            row[_PLACES[name]] = as_float(value)
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
    table = np.concatenate([*tables, np.empty((0, len(_NAMES)))])
    step, resumed = table[:, _PLACES["step"]], table[:, _PLACES["resumed"]]
    marks = np.isnan(step)  # of starts whose first step lies in the next part
    if marks.any():
        after = np.flatnonzero(marks) + 1
        resumed[after[after < len(step)]] = 1.0
        table = table[~marks]
    columns = {name: table[:, place].copy() for name, place in _PLACES.items()}
    if not is_journal and len(table):
        columns["resumed"][1:] = np.diff(columns["step"]) <= 0
    if len(table):
        columns["resumed"][0] = 0.0
    if np.isnan(columns["cursor"]).all():
        columns["cursor"] = columns["consumed_samples"]
    return Columns(**columns)


def _float(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return nan


def _number(value: float) -> float:
    return 0.0 if value != value else float(value)


def _whole(value: float) -> int:
    return 0 if value != value else int(value)
