"""The fields of single lines of logs, and which lines are parsed together or not at all."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from bloomery.guard.log_lines import (
    FIELDS,
    _all_alike,
    _by_shape,
    _Field,
    _field,
    _fields,
    _table,
    other_names_of_losses,
    parsed_lines,
)


def rows(text: str) -> list[dict[str, float]]:
    """What each line is parsed as, without what it lacks."""
    return [
        {name: value for name, value in zip(FIELDS, row, strict=True) if not math.isnan(value)}
        for row in parsed_lines(text.encode()).tolist()
    ]


@pytest.mark.parametrize(
    ("name", "column", "seconds"),
    [
        ("lm loss", "loss", 2.5),
        ("LM_loss", "loss", 2.5),
        ("learning rate", "learning_rate", 2.5),
        ("lr", "learning_rate", 2.5),
        ("global batch size", "global_batch", 2.5),
        ("loss scale", "loss_scale", 2.5),
        ("grad norm", "gradient_norm", 2.5),
        ("gradient-norm", "gradient_norm", 2.5),
        ("elapsed time per iteration (ms)", "shared_seconds", 0.0025),
        ("elapsed_time_per_iteration_ms", "shared_seconds", 0.0025),
        ("time per iteration ms", "shared_seconds", 0.0025),
        ("elapsed time per iteration (s)", "shared_seconds", 2.5),
        ("consumed samples", "consumed_samples", 2.5),
        ("consumed train samples", "consumed_samples", 2.5),
        ("number of skipped iterations", "refused", 2.5),
    ],
)
def test_each_name_of_a_field_has_its_column_and_unit(name: str, column: str, seconds: float) -> None:
    (row,) = rows(f" iteration 7/ 90 | x: 1 | {name}: 2.5 |\n")
    assert row == pytest.approx({"step": 7.0, column: seconds})


@pytest.mark.parametrize(
    ("text", "value", "factor", "is_number"),
    [
        (b" 2.5E+00 ", 2.5, 1.0, True),
        (b"-3", -3.0, 1.0, True),
        (b" 1.5K", 1500.0, 1e3, True),
        (b"1.5 M ", 1.5e6, 1e6, True),
        (b"2B", 2e9, 1e9, True),
        (b"2G", 2e9, 1e9, True),
        (b"2T", 2e12, 1e12, True),
        (b" inf", math.inf, 1.0, False),
        (b" 2.5x", math.nan, 1.0, False),
        (b" none", math.nan, 1.0, False),
        (b" 125ms", math.nan, 1.0, False),  # and not 12
        (b" 1.5Ki", math.nan, 1.0, False),
    ],
)
def test_values_may_have_exponents_and_thousands_and_be_words(
    text: bytes, value: float, factor: float, is_number: bool
) -> None:
    found = _field("grad norm", text, token=4)
    assert (found.name, found.column) == ("grad norm", "gradient_norm")
    assert found.token == (4 if is_number else None) and found.factor == factor
    assert found.value == pytest.approx(value, nan_ok=True)
    assert _field("z loss", b"1", token=2) == _Field(name="z loss", column="", token=2, value=1.0, factor=1.0)


def test_units_and_thousands_are_multiplied() -> None:
    found = _field("elapsed time per iteration (ms)", b" 12.5K", token=1)
    assert (found.value, found.factor) == (12.5, 1.0)


@pytest.mark.parametrize(
    ("line", "loss"),
    [
        ("| total loss: 4 | training loss: 3 | train loss: 2 | loss: 1 |", 1.0),
        ("| total loss: 4 | training loss: 3 | train loss: 2 |", 2.0),
        ("| total loss: 4 | training loss: 3 |", 3.0),
        ("| total loss: 4 | aux loss: 9 |", 4.0),
        ("| loss: 9 | lm loss: 5 |", 5.0),
        ("| lm loss: 5 | lm loss: 6 |", 5.0),
        ("| mtp_1 loss: 9 | lm loss 2: 8 | lm loss: 7 |", 7.0),
        (", lm loss: 7, lr: 3", 7.0),
        ("; lm loss = 7; lr = 3", 7.0),
        ("\tlm loss: 7\tlr: 3", 7.0),
    ],
)
@pytest.mark.parametrize("lines", [1, 7, 8, 9])
def test_the_loss_of_a_line_is_the_best_known_name_in_few_lines_and_in_many(
    line: str, loss: float, lines: int
) -> None:
    text = "".join(f"iteration {step}/ 90 {line}\n" for step in range(1, lines + 1))
    found = rows(text)
    assert [(row["step"], row["loss"]) for row in found] == [(step, loss) for step in range(1, lines + 1)]
    mixed = rows(text.replace("iteration 1/", "[2024-01-01 9:00:00] x iteration 1/"))
    assert mixed == found


def table(text: str, *, count: int, before: int = 0) -> Any:
    fields = [
        _Field(name="", column="step", token=0, value=0.0, factor=1.0),
        _Field(name="a", column="loss", token=1, value=0.0, factor=2.0),
        _Field(name="b", column="loss", token=0, value=0.0, factor=1.0),
        _Field(name="c", column="refused", token=None, value=5.0, factor=3.0),
        _Field(name="d", column="", token=1, value=5.0, factor=3.0),
    ]
    found = _table(text.encode(), fields, count=count, before=before)
    if found is None:
        return None
    assert np.isnan(found[:, 2:-1]).all() and (found[:, -1] == 5.0).all()
    return found[:, :2].tolist()


@pytest.mark.parametrize(
    ("text", "count", "found"),
    [
        (" 1 2\n 3 4\n", 2, [[1.0, 4.0], [3.0, 8.0]]),
        (" 1 2.5E+01 9\n 3 -4 9\n", 2, [[1.0, 50.0], [3.0, -8.0]]),
        (" 1 2 3\n 4\n", 2, None),  # as many numbers, in other lines
        (" 1\n 2 3 4\n", 2, None),
        (" 1 2 3\n 4 5\n", 2, None),
        (" 1 2\n 3 4", 2, None),
        (" 1 2\n 3 4\n\n", 2, None),
        (" 1 -\n 3 4\n", 2, None),
        (" 1 2.5.5\n 3 4\n", 2, None),
    ],
)
def test_lines_are_parsed_together_where_their_numbers_lie_alike(
    text: str, count: int, found: list[list[float]] | None
) -> None:
    assert table(text, count=count) == found


@pytest.mark.parametrize("lines", [1, 20])
def test_a_tab_may_stand_between_the_word_iteration_and_its_number(lines: int) -> None:
    text = "".join(f"iteration\t{step}\tlm loss: 3.5\tgrad norm: 0.5\n" for step in range(1, lines + 1))
    assert rows(text) == [{"step": step, "loss": 3.5, "gradient_norm": 0.5} for step in range(1, lines + 1)]


def test_numbers_before_the_step_are_passed_over() -> None:
    assert table(" 9 1 2\n 8 3 4\n", count=2, before=1) == [[1.0, 4.0], [3.0, 8.0]]


ABOUT = ("at", "from", "to", "of", "After", "before", "for", "UNTIL", "per", "each", "every", "in", "since")
LINE = " iteration 1/ 9 | lm loss: 2.5 | lr: 1.0 |\n"


@pytest.mark.parametrize(
    ("text", "is_alike"),
    [
        (LINE * 3, True),
        (f"[12 5]{LINE}" * 2, True),
        (LINE * 2 + LINE.rstrip(), False),  # unfinished
        (LINE + LINE.replace("| lr: 1.0 ", ""), False),
        (LINE + "saving\n", False),
        (f"saved at{LINE}" * 2, False),
        ("starting\n" + LINE, False),
        (LINE.replace("2.5", "2.5e+00") * 2, False),
        ("\x1b[1m" + LINE, False),
    ],
)
def test_only_whole_lines_of_one_shape_are_parsed_at_once(text: str, is_alike: bool) -> None:
    found = _all_alike(text.encode())
    assert (found is not None) is is_alike
    if found is not None:
        np.testing.assert_array_equal(found, _by_shape(text.encode()))


@pytest.mark.parametrize(
    ("line", "is_one"),
    [
        ("iteration 5 | x: 1", True),
        ("Iteration: 5, loss: 1", True),
        ("rank0: iteration = 5 loss: 1", True),
        ("iteration 5 begins", False),
        ("iteration | loss: 1", False),
        ("iterations 5 | loss: 1", False),
        *((f"{word} iteration 5 | loss: 1", False) for word in ABOUT),
        ("of. iteration 5 | loss: 1", True),
    ],
)
def test_a_line_of_a_training_says_its_iteration_and_a_figure(line: str, is_one: bool) -> None:
    assert [row["step"] for row in rows(f"starting\n{line}\n")] == ([5.0] if is_one else [])


@pytest.mark.parametrize("exponent", ["e+01", "e-01"])
@pytest.mark.parametrize("count", [1, 9])
def test_a_small_exponent_of_either_sign_is_one(exponent: str, count: int) -> None:
    found = rows(LINE.replace("2.5", f"2.5{exponent}") * count)
    assert [row["loss"] for row in found] == [float(f"2.5{exponent}")] * count


def test_a_name_in_another_encoding_is_that_of_a_field_that_nobody_knows() -> None:
    (row,) = parsed_lines(b"iteration 5 | lm loss: 2.5 | verst\xe4rkt: 1 |\n").tolist()
    assert row[: FIELDS.index("loss") + 1] == [5.0, 2.5]


def test_a_line_that_is_drawn_over_the_one_before_is_another_one() -> None:
    lines = [LINE.replace("iteration 1", f"iteration {step}").strip() for step in (1, 2, 3)]
    assert [row["step"] for row in rows("\r".join(lines) + "\n")] == [1.0, 2.0, 3.0]


def test_lines_that_end_otherwise_than_most_count_where_they_have_a_loss_and_a_bar() -> None:
    usual = "".join(f"iteration {step} | lm loss: 2.5 | lr: 1 |\n" for step in range(1, 8))
    odd = {
        "iteration 8 | lm loss: 2.5 | other: 1 |\n": 8,
        "iteration 8 | lm loss: 2.5 | oth\n": None,  # cut off
        "iteration 8 | other: 1 |\n": None,  # torn
    }
    for line, step in odd.items():
        found = [row["step"] for row in rows(usual + line)]
        assert found == [*map(float, range(1, 8)), *([float(step)] if step else [])]
    few = "iteration 1 | lm loss: 2.5 | lr: 1 |\niteration 2 | other: 1 |\n"
    assert [row["step"] for row in rows(few)] == [1.0, 2.0], "no make is that of most lines"
    bare = "".join(f"iteration {step}, lm loss: 2.5, lr: 1\n" for step in range(1, 8))
    assert len(rows(bare + "iteration 8, lm loss: 2.5, oth\n")) == 8, "these have no bars"


def test_other_names_of_a_loss_are_those_of_lines_without_a_known_one() -> None:
    text = (
        "iteration 1 | MoE_loss: 1 | lr: 2 | loss scale: 4 |\n"
        "iteration 2 | lm loss: 1 | aux loss: 3 |\n"
        "iteration 3 | denoising-loss: nan | grad norm: 3 |\n"
    )
    assert other_names_of_losses(text.encode()) == ["MoE_loss:", "denoising-loss:"]


def test_the_fields_of_a_line_know_their_places_among_its_numbers() -> None:
    found = _fields(b"iteration 5/ 90 | 2 gpus x4: 7 | lm loss 1: 8 | lm loss: 9 | word | lr: 3 |")
    assert [(field.name, field.column, field.token, field.value) for field in found] == [
        ("", "step", 0, 5.0), ("2 gpus x4", "", 4, 7.0), ("lm loss 1", "", 6, 8.0),
        ("lm loss", "loss", 7, 9.0),
        ("lr", "learning_rate", 8, 3.0),
    ]  # fmt: skip
