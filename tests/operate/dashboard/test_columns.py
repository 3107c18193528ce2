"""The columns of a journal and the curves of them, as whole values of a few rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bloomery.operate.dashboard.curves import (
    DrawnCurve,
    curves,
    downsampled,
    rows_between,
)
from bloomery.operate.dashboard.run_reader import RunReader
from bloomery.operate.dashboard.step_columns import (
    AXES,
    FIGURES,
    GrowingArray,
    RowRange,
    StepColumns,
    StepLine,
)

NAN = float("nan")


def line(step: int, incarnation: int = 1, **fields: Any) -> StepLine:
    return StepLine(event="step", step=step, incarnation=incarnation, **fields)


def column(columns: StepColumns, name: str) -> list[float | None]:
    """Return all rows of a column, with None in place of NaN."""
    values = columns.numbers(name, [RowRange(begin=0, end=len(columns), incarnation=1)]).tolist()
    return [None if value != value else value for value in values]


def ranges(parts: tuple[RowRange, ...]) -> list[tuple[int, int, int]]:
    return [(part.begin, part.end, part.incarnation) for part in parts]


def test_each_field_of_a_step_is_the_column_of_its_name() -> None:
    columns = StepColumns()
    told = {name: 10.0 + place for place, name in enumerate(FIGURES)}
    columns.extend([line(7, consumed_tokens=2, consumed_samples=3, time=4.0, **told)])
    assert {name: column(columns, name) for name in (*AXES, *FIGURES)} == {
        "step": [7.0], "tokens": [2.0], "samples": [3.0], "time": [4.0],
        **{name: [value] for name, value in told.items()},
    }  # fmt: skip
    assert columns.names == sorted(FIGURES)
    assert columns.nbytes == 4 * 8 + len(FIGURES) * 4
    assert columns.last("loss") == told["loss"] and columns.last("samples") == 3.0


def test_a_column_that_comes_later_is_empty_before_and_an_activity_took_no_time() -> None:
    columns = StepColumns()
    columns.extend([line(1, loss=1.0, spent={"computing": 0.5}), line(2, loss="NaN")])
    columns.extend([line(3, loss="-Infinity", mfu=0.25, spent={"saving": 2.0, "computing": "many"})])
    columns.extend([line(4, loss="x", spent={})])
    columns.extend([])
    assert {name: column(columns, name) for name in columns.names} == {
        "loss": [1.0, None, -np.inf, None],
        "mfu": [None, None, 0.25, None],
        "spent/computing": [0.5, 0.0, None, 0.0],
        "spent/saving": [0.0, 0.0, 2.0, 0.0],
    }


def test_losses_of_data_sets_are_at_the_rows_that_have_them() -> None:
    columns = StepColumns()
    columns.extend([line(1, held_out_loss=5.0, held_out_by_dataset={"code": 4.0}), line(2), line(3)])
    columns.add_held_out(3.0, {"code": 2.0, "prose": "NaN"})
    columns.extend([line(4)])
    assert {name: [part.values.tolist() for part in pair] for name, pair in columns.sparse.items()} == {
        "held_out": [[0, 2], [5.0, 3.0]],
        "held_out/code": [[0, 2], [4.0, 2.0]],
        "held_out/prose": [[2], [pytest.approx(NAN, nan_ok=True)]],
    }
    assert columns.names == ["held_out", "held_out/code", "held_out/prose"]
    assert columns.nbytes == 4 * 4 * 8 + 5 * (8 + 4)


def test_the_columns_of_data_sets_and_activities_are_bounded() -> None:
    columns = StepColumns()
    many = {f"n{number:03}": 1.0 for number in range(80)}
    columns.extend([line(1, held_out_by_dataset=many, spent=many, loss=1.0)])
    columns.extend([line(2, held_out_by_dataset=many, spent={"z": 1.0}, loss=2.0)])
    assert sorted(columns.sparse) == [f"held_out/n{number:03}" for number in range(64)]
    assert sorted(columns.figures) == ["loss", *(f"spent/n{number:03}" for number in range(24))]
    assert len(columns.sparse["held_out/n063"][0]) == 2 and len(columns.figures["spent/n023"]) == 2


def test_an_array_keeps_its_numbers_when_it_grows() -> None:
    array = GrowingArray(np.float32, fill=1000, value=7.0)
    for begin in range(0, 5000, 100):
        array.extend(list(range(begin, begin + 100)))
    array.extend([None, "Infinity", "x", 10**400])
    assert len(array) == 6004 and array.nbytes == 6004 * 4
    assert array.values[:6000].tolist() == [7.0] * 1000 + [float(number) for number in range(5000)]
    assert np.isnan(array.values[[6000, 6002, 6003]]).all() and array.values[6001] == np.inf


def test_a_step_that_is_written_twice_counts_once_and_as_it_was_last() -> None:
    columns = StepColumns()
    columns.set_incarnations({1: None, 2: (3, 1)})
    columns.extend([line(step, time=float(step)) for step in (1, 2, 3, 3, 4, 5)])
    columns.extend([line(4, 2, time=9.0)])
    columns.extend([line(5, 2, time=10.0)])
    assert ranges(columns.kept) == [(0, 2, 1), (3, 4, 1), (6, 8, 2)]
    assert ranges(columns.discarded) == [(2, 3, 1), (4, 6, 1)]
    assert columns.numbers("time", columns.kept).tolist() == [1.0, 2.0, 3.0, 9.0, 10.0]
    assert columns.numbers("time", []).tolist() == [] and columns.last("time") == 10.0
    columns.set_incarnations({1: None, 2: (3, 1), 3: (4, 2)})
    columns.extend([line(9, 3, time=11.0)])
    assert ranges(columns.kept)[-2:] == [(6, 7, 2), (8, 9, 3)] and columns.last("step") == 9.0


def test_a_step_that_is_written_again_in_the_next_part_of_a_journal_counts_once() -> None:
    columns = StepColumns()
    columns.set_incarnations({1: None})
    columns.extend([line(step) for step in (1, 2, 3)])
    columns.extend([line(3)])
    columns.extend([line(step) for step in range(4, 5000)])
    assert ranges(columns.kept) == [(0, 2, 1), (3, 5000, 1)] and ranges(columns.discarded) == [(2, 3, 1)]
    assert columns.last("step") == 4999.0


def reader_of(tmp_path: Path, *lines: StepLine) -> RunReader:
    reader = RunReader(tmp_path)
    reader.columns.set_incarnations({1: None, 2: (3, 1)})
    reader.columns.extend(lines)
    return reader


def test_a_curve_has_three_decimals_of_its_axis_and_six_digits_of_its_figure(tmp_path: Path) -> None:
    values = [123456.7, 0.000123456789, -2.5, 0.0, "NaN", "Infinity"]
    steps = [line(4 + n, 2, loss=value, time=1.23456 * n) for n, value in enumerate(values)]
    (drawn,) = curves(reader_of(tmp_path, *steps), ["loss"], axis="time")
    assert (drawn.name, drawn.incarnation) == ("loss", None)
    assert drawn.x == [0.0, 1.235, 2.469, 3.704, 4.938, 6.173]
    assert drawn.y[:4] == [123457.0, 0.000123457, -2.5, 0.0] and np.isnan(drawn.y[4:]).all()


def test_curves_come_in_the_order_asked_for_with_each_branch_and_a_range(tmp_path: Path) -> None:
    steps = [line(step, loss=10.0 + step, consumed_tokens=100 * step) for step in range(1, 7)]
    steps += [line(4, 2, loss=24.0, consumed_tokens=400), line(5, 2, loss=25.0, consumed_tokens=500)]
    steps[1].held_out_loss, steps[7].held_out_loss = 7.0, 6.0
    reader = reader_of(tmp_path, *steps)
    names = ["loss!", "held_out", "nothing", "nothing!", "loss", "loss~"]
    smooth = [11.0, 11.5, 12.0, 15.0, 17.0]
    assert curves(reader, names, axis="tokens") == [
        DrawnCurve(name="loss!", x=[400.0, 500.0, 600.0], y=[14.0, 15.0, 16.0], incarnation=1),
        DrawnCurve(name="held_out", x=[200.0, 500.0], y=[7.0, 6.0]),
        DrawnCurve(name="loss", x=[100.0, 200.0, 300.0, 400.0, 500.0], y=[11.0, 12.0, 13.0, 24.0, 25.0]),
        DrawnCurve(name="loss~", x=[100.0, 200.0, 300.0, 400.0, 500.0], y=smooth),
    ]
    assert curves(reader, ["loss!", "held_out", "loss"], axis="tokens", begin=450.0, end=450.0) == [
        DrawnCurve(name="loss!", x=[400.0, 500.0], y=[14.0, 15.0], incarnation=1),
        DrawnCurve(name="held_out", x=[200.0, 500.0], y=[7.0, 6.0]),
        DrawnCurve(name="loss", x=[400.0, 500.0], y=[24.0, 25.0]),
    ]
    assert curves(reader, ["loss!"], begin=6.0) != [] and curves(reader, ["loss!"], begin=6.5) == []
    assert curves(reader, ["loss!"], end=4.0) != [] and curves(reader, ["loss!"], end=3.5) == []


def test_the_newest_branches_are_drawn_with_a_tenth_of_the_points(tmp_path: Path) -> None:
    reader = RunReader(tmp_path)
    length = 400
    reader.columns.set_incarnations({number: None for number in range(1, 31)})
    for number in range(1, 31):
        reader.columns.extend([line(step, number, loss=float(step % 7)) for step in range(1, length + 1)])
    drawn = curves(reader, ["loss!"], points=1000)
    assert [curve.incarnation for curve in drawn] == list(range(29, 5, -1))
    few = curves(reader, ["loss!"], points=20)
    assert 50 <= len(few[0].x) <= 54 and 100 <= len(drawn[0].x) <= 104
    assert len(curves(reader, ["loss"], points=20)[0].x) <= 24


def test_the_lowest_and_the_highest_of_each_bucket_are_kept_and_the_ends() -> None:
    y = np.array([5.0, 1.0, 9.0, 5.0, 5.0, 2.0, 2.0, 8.0, np.nan, np.inf, 3.0])
    few = downsampled(np.arange(11.0) * 10, y, points=6)
    assert few.x.tolist() == [0.0, 10.0, 20.0, 50.0, 70.0, 100.0]
    assert few.y.tolist() == [5.0, 1.0, 9.0, 2.0, 8.0, 3.0]
    assert rows_between(np.array([]), 1.0, 2.0) == slice(0, 0)


def test_a_clock_that_goes_back_moves_no_held_out_loss_to_the_left(tmp_path: Path) -> None:
    steps = [
        line(step, held_out_loss=7.0 - step, time=time) for step, time in ((1, 50.0), (2, 40.0), (3, 60.0))
    ]
    (drawn,) = curves(reader_of(tmp_path, *steps), ["held_out"], axis="time")
    assert (drawn.x, drawn.y) == ([50.0, 50.0, 60.0], [6.0, 5.0, 4.0])
