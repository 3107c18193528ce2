"""Holds a run's steps as columns of numbers, and which rows still count after rewinds and crashes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from bloomery.events.incarnation import Base, visibility

Number = float | str | None
"""NaN and infinities are texts in a journal."""
_MOST_DATASETS, _MOST_ACTIVITIES = 64, 24
_FIRST_ROWS = 1024


class StepLine(msgspec.Struct):
    """The fields of a journal's `step` event that are drawn. Any other event has its name and no more."""

    event: str
    step: int = -1
    incarnation: int = 0
    time: float = 0.0
    consumed_tokens: int = 0
    consumed_samples: int = 0
    loss: Number = None
    z_loss: Number = None
    loss_scale: Number = None
    gradient_norm: Number = None
    learning_rate: Number = None
    seconds: Number = None
    global_batch: Number = None
    tokens_per_s: Number = None
    model_tflops: Number = None
    hardware_tflops: Number = None
    mfu: Number = None
    memory_bytes: Number = None
    data_queue: Number = None
    data_wait_s: Number = None
    refused_updates: Number = None
    peers: Number = None
    held_out_loss: Number = None
    held_out_by_dataset: dict[str, Number] | None = None
    update_applied: bool = True
    refused_in_a_row: int = 0
    spent: dict[str, Number] | None = None


FIGURES = (
    "loss",
    "z_loss",
    "loss_scale",
    "gradient_norm",
    "learning_rate",
    "seconds",
    "global_batch",
    "tokens_per_s",
    "model_tflops",
    "hardware_tflops",
    "mfu",
    "memory_bytes",
    "data_queue",
    "data_wait_s",
    "refused_updates",
    "peers",
)
SPENT = "spent/"
HELD_OUT = "held_out"
"""Name of the column of the held-out loss; that of a dataset is `held_out/NAME`."""
AXES = ("step", "tokens", "samples", "time")


class GrowingArray:
    """A NumPy array that grows at its end. `values` is a view that the next `extend` may detach."""

    def __init__(self, dtype: type[np.generic], *, fill: int = 0, value: float = 0.0) -> None:
        """Make an array that holds `value` `fill` times."""
        self._data: NDArray[Any] = np.empty(max(_FIRST_ROWS, fill), dtype)
        self._data[:fill] = value
        self._count = fill

    def __len__(self) -> int:
        return self._count

    @property
    def values(self) -> NDArray[Any]:
        """The numbers so far."""
        return self._data[: self._count]

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers so far; the reserve beyond them is not touched, so it takes no memory."""
        return self._count * self._data.itemsize

    def extend(self, numbers: Sequence[Any] | NDArray[Any]) -> None:
        """Append numbers; None and the texts of non-finite numbers are accepted."""
        end = self._count + len(numbers)
        if end > len(self._data):
            larger = np.empty(max(end, 2 * len(self._data)), self._data.dtype)
            larger[: self._count] = self.values
            self._data = larger
        self._data[self._count : end] = _as_array(numbers, self._data.dtype)
        self._count = end


@dataclass(frozen=True, kw_only=True)
class RowRange:
    """Rows [begin, end) that one process wrote one after the other, with ascending steps."""

    begin: int
    end: int
    incarnation: int


class StepColumns:
    """The columns of one rank's journal. Not safe for threads: its owner holds a lock.

    A row is a `step` event, in the order written. `kept` are the rows that are part of the run, `discarded`
    those that a rewind or a crash left behind.
    """

    def __init__(self) -> None:
        self.axes = {name: GrowingArray(np.float64) for name in AXES}
        self.figures: dict[str, GrowingArray] = {}
        self.sparse: dict[str, tuple[GrowingArray, GrowingArray]] = {}
        self._segments: list[RowRange] = []
        self._incarnations: Mapping[int, Base | None] = {}
        self._kept: tuple[RowRange, ...] | None = None
        self._discarded: tuple[RowRange, ...] = ()

    def __len__(self) -> int:
        return len(self.axes["step"])

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        arrays = [
            *self.axes.values(),
            *self.figures.values(),
            *(a for pair in self.sparse.values() for a in pair),
        ]
        return sum(array.nbytes for array in arrays)

    @property
    def names(self) -> list[str]:
        """The names of the columns that hold a number at least once."""
        return sorted([*self.figures, *self.sparse])

    def set_incarnations(self, incarnations: Mapping[int, Base | None]) -> None:
        """Take in the base of each incarnation, which decides which rows are part of the run."""
        if incarnations != self._incarnations:
            self._incarnations, self._kept = dict(incarnations), None

    def extend(self, lines: Sequence[StepLine]) -> None:
        """Append steps in the order written."""
        if not lines:
            return
        begin = len(self)
        self._add_segments(lines, begin)
        self.axes["step"].extend([line.step for line in lines])
        self.axes["tokens"].extend([line.consumed_tokens for line in lines])
        self.axes["samples"].extend([line.consumed_samples for line in lines])
        self.axes["time"].extend([line.time for line in lines])
        for name in FIGURES:
            self._extend_figure(name, [getattr(line, name) for line in lines], begin)
        activities = {f"{SPENT}{activity}" for line in lines for activity in line.spent or ()}
        for name in sorted(activities.union(name for name in self.figures if name.startswith(SPENT))):
            key = name.removeprefix(SPENT)
            self._extend_figure(name, [(line.spent or {}).get(key, 0.0) for line in lines], begin)
        self._extend_sparse(lines, begin)
        self._kept = None

    def add_held_out(self, loss: float, by_dataset: Mapping[str, Number]) -> None:
        """Add a held-out loss that was measured after the newest step, apart from its record."""
        row = len(self) - 1
        self._add_sparse(HELD_OUT, row, loss)
        for dataset, own in by_dataset.items():
            self._add_sparse(f"{HELD_OUT}/{dataset}", row, own)

    @property
    def kept(self) -> tuple[RowRange, ...]:
        """The rows that are part of the run, in order of steps."""
        if self._kept is None:
            self._judge()
        assert self._kept is not None
        return self._kept

    @property
    def discarded(self) -> tuple[RowRange, ...]:
        """The rows that are no part of the run, one range for each branch, oldest first."""
        if self._kept is None:
            self._judge()
        return self._discarded

    def numbers(self, name: str, ranges: Iterable[RowRange]) -> NDArray[Any]:
        """Return a column, or an axis, over ranges of rows. It may be a view: copy what outlives the lock."""
        array = self.axes[name] if name in self.axes else self.figures[name]
        parts = [array.values[part.begin : part.end] for part in ranges]
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0)

    def sparse_numbers(self, name: str, axis: str) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return (x, y) of a column that few rows have, over the rows that are part of the run."""
        rows, values = (array.values for array in self.sparse[name])
        inside = np.zeros(len(rows), bool)
        for part in self.kept:
            inside |= (rows >= part.begin) & (rows < part.end)
        order = np.argsort(self.axes["step"].values[rows[inside]], kind="stable")
        return self.axes[axis].values[rows[inside]][order], values[inside][order]

    def last(self, name: str) -> float | None:
        """Return a figure of the newest step of the run; None where there is none."""
        if not self.kept or (name not in self.axes and name not in self.figures):
            return None
        array = self.axes[name] if name in self.axes else self.figures[name]
        return float(array.values[self.kept[-1].end - 1])

    def _extend_figure(self, name: str, numbers: list[Number], begin: int) -> None:
        missing = (
            0.0 if name.startswith(SPENT) else np.nan
        )  # a step that names no activity spent nothing on it
        if name not in self.figures:
            is_full = (
                name.startswith(SPENT) and sum(n.startswith(SPENT) for n in self.figures) >= _MOST_ACTIVITIES
            )
            if is_full or all(number is None for number in numbers):
                return
            self.figures[name] = GrowingArray(np.float32, fill=begin, value=missing)
        self.figures[name].extend(numbers)

    def _extend_sparse(self, lines: Sequence[StepLine], begin: int) -> None:
        for row, line in enumerate(lines, begin):
            if line.held_out_loss is not None:
                self._add_sparse(HELD_OUT, row, line.held_out_loss)
            for dataset, loss in (line.held_out_by_dataset or {}).items():
                self._add_sparse(f"{HELD_OUT}/{dataset}", row, loss)

    def _add_sparse(self, name: str, row: int, value: Number) -> None:
        if name not in self.sparse:
            if len(self.sparse) >= _MOST_DATASETS:
                return
            self.sparse[name] = GrowingArray(np.int64), GrowingArray(np.float32)
        rows, values = self.sparse[name]
        rows.extend([row])
        values.extend([value])

    def _add_segments(self, lines: Sequence[StepLine], begin: int) -> None:
        for row, line in enumerate(lines, begin):
            last = self._segments[-1] if self._segments else None
            before = lines[row - begin - 1].step if row > begin else self._last_step()
            if last is not None and last.incarnation == line.incarnation and line.step > before:
                self._segments[-1] = RowRange(begin=last.begin, end=row + 1, incarnation=last.incarnation)
            else:
                self._segments.append(RowRange(begin=row, end=row + 1, incarnation=line.incarnation))

    def _last_step(self) -> float:
        steps = self.axes["step"].values
        return float(steps[-1]) if len(steps) else -1.0

    def _judge(self) -> None:
        """Split each segment into the rows that are part of the run, which come first, and the others.

        Where two segments hold the same steps, the later one counts.
        """
        is_visible = visibility(self._incarnations)
        steps = self.axes["step"].values
        kept: list[RowRange] = []
        hidden: list[RowRange] = []
        limit = np.inf
        for part in sorted(self._segments, key=lambda part: (part.incarnation, part.begin), reverse=True):
            own = steps[part.begin : part.end]
            seen = _visible_count(own, part.incarnation, is_visible)
            seen = min(seen, int(np.searchsorted(own, limit)))
            if seen:
                kept.append(RowRange(begin=part.begin, end=part.begin + seen, incarnation=part.incarnation))
                limit = min(limit, float(own[0]))
            if seen < len(own):
                hidden.append(RowRange(begin=part.begin + seen, end=part.end, incarnation=part.incarnation))
        self._kept = tuple(reversed(kept))
        self._discarded = tuple(sorted(hidden, key=lambda part: part.begin))


def _visible_count(steps: NDArray[Any], incarnation: int, is_visible: Any) -> int:  # Any: of `visibility`
    """Return how many of the ascending steps are visible, by bisection: the visible ones come first."""
    low, high = 0, len(steps)
    while low < high:
        middle = (low + high) // 2
        if is_visible((int(steps[middle]), incarnation)):
            low = middle + 1
        else:
            high = middle
    return low


def _as_array(numbers: Sequence[Any] | NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        try:
            return np.array(numbers, dtype)
        except (ValueError, TypeError, OverflowError):  # a text that is no number, of another version
            return np.array([_as_number(number) for number in numbers], dtype)


def _as_number(number: Any) -> float:
    try:
        return float(number)
    except (ValueError, TypeError, OverflowError):
        return float("nan")
