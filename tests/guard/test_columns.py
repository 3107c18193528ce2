"""Lines of logs as columns: what one is reported as, what is joined, and which lines a replay looks at."""

from __future__ import annotations

import io
import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bloomery.errors import StorageError
from bloomery.events.records import StepReport
from bloomery.guard import logs
from bloomery.guard.logs import (
    Columns,
    LogReader,
    _end_of_lines,
    _joined,
    _refuse_other_encodings,
    _text,
    read_columns,
)
from bloomery.guard.replay import (
    _around,
    _blocks_at_once,
    _Breaks,
    _scale_changes,
)

NAMES = (
    "step", "loss", "learning_rate", "global_batch", "loss_scale", "gradient_norm", "shared_seconds",
    "consumed_samples", "cursor", "refused", "peers", "resumed",
)  # fmt: skip
ABSENT = {name: nan for name in NAMES} | {"peers": 1.0, "refused": 0.0, "resumed": 0.0}


def table(*rows: dict[str, float]) -> Any:
    return np.array([[{**ABSENT, **row}[name] for name in NAMES] for row in rows]).reshape(-1, len(NAMES))


def columns(*rows: dict[str, float]) -> Columns:
    return Columns(**{name: table(*rows)[:, place] for place, name in enumerate(NAMES)})


def test_a_line_is_reported_with_all_that_it_has_and_what_it_lacks_is_zero_or_unknown() -> None:
    whole = {
        "step": 7, "loss": 2.5, "learning_rate": 1e-3, "global_batch": 8, "loss_scale": 64.0,
        "gradient_norm": 0.5, "shared_seconds": 1.5, "consumed_samples": 56, "cursor": 60, "refused": 1,
        "peers": 3,
    }  # fmt: skip
    usual: dict[str, Any] = {
        "consumed_tokens": 0, "z_loss": 0.0, "zero_gradients": 0, "refused_updates": 0, "nan_losses": 0,
        "samples_per_s": 0.0, "tokens_per_s": 0.0, "hardware_tflops": 0.0, "model_tflops": 0.0, "mfu": None,
    }  # fmt: skip
    assert columns({"step": 5}, whole).report(1) == StepReport(
        step=7, consumed_samples=56, cursor=60, seconds=1.5, learning_rate=1e-3, global_batch=8, loss=2.5,
        loss_scale=64.0, gradient_norm=0.5, update_applied=True, refused_in_a_row=0, peers=3,
        shared_seconds=1.5, **usual,
    )  # fmt: skip
    bare = columns({"step": 5, "peers": nan}).report(0)
    assert isnan(bare.loss) and isnan(bare.seconds)
    assert (bare.consumed_samples, bare.cursor, bare.learning_rate, bare.global_batch) == (0, 0, 0.0, 0)
    assert (bare.loss_scale, bare.gradient_norm, bare.shared_seconds, bare.peers) == (None, 0.0, None, 1)
    assert bare.update_applied


@pytest.mark.parametrize(
    ("before", "step", "refused", "applied"),
    [
        (5, 6, 0, True),
        (5, 6, 1, False),
        (5, 8, 2, True),  # one of the three steps that the line covers was not refused
        (5, 8, 3, False),
        (5, 1005, 999, True),
        (5, 1006, 1, False),  # a gap: the line covers one step
        (5, 5, 1, False),  # made again
        (5, 3, 1, False),
    ],
)
def test_an_update_was_applied_where_not_all_steps_of_a_line_were_refused(
    before: int, step: int, refused: int, applied: bool
) -> None:
    assert columns({"step": before}, {"step": step, "refused": refused}).report(1).update_applied is applied


def test_refused_updates_in_a_row_are_those_of_lines_without_a_loss() -> None:
    rows = columns(
        {"step": 1, "refused": 9},
        {"step": 2, "refused": 9, "loss": 2.0},
        {"step": 3, "refused": 2},
        {"step": 5, "refused": 3},
        {"step": 6, "loss": 2.0},
        {"step": 7, "refused": 1},
    )
    assert [rows.report(index).refused_in_a_row for index in range(6)] == [9, 0, 2, 5, 0, 1]


def test_refusals_in_a_row_are_counted_once_for_all_lines() -> None:
    rows = columns(*[{"step": step, "refused": 1, "loss": nan} for step in range(1, 9)])
    assert [rows.report(index).refused_in_a_row for index in range(8)] == list(range(1, 9))
    assert rows._refused_in_a_row is rows._refused_in_a_row  # a long row would be gone through for each line


def test_a_journal_is_joined_with_the_starts_between_its_parts() -> None:
    first, second = table({"step": 1, "cursor": 5}, {}), table({"step": 2}, {"step": 3, "resumed": 1}, {})
    joined = _joined([first, second], is_journal=True)
    assert joined.step.tolist() == [1.0, 2.0, 3.0] and joined.resumed.tolist() == [0.0, 1.0, 1.0]
    assert joined.cursor[0] == 5.0 and isnan(joined.cursor[1])
    assert len(_joined([], is_journal=True)) == len(_joined([], is_journal=False)) == 0
    assert _joined([table({"step": 4, "resumed": 1})], is_journal=True).resumed.tolist() == [0.0]


def test_a_log_restarts_where_its_steps_do_not_rise_and_has_the_batch_of_its_samples() -> None:
    rows = [(1, 10), (2, 20), (2, 21), (4, 40), (1, 10), (3, 50)]
    joined = _joined(
        [table(*({"step": step, "consumed_samples": samples, "loss": step} for step, samples in rows))],
        is_journal=False,
    )
    assert joined.step.tolist() == [1.0, 2.0, 4.0, 1.0, 3.0], "a line twice is one"
    assert joined.resumed.tolist() == [0.0, 0.0, 0.0, 1.0, 0.0]
    assert joined.consumed_samples.tolist() == joined.cursor.tolist() == [10.0, 20.0, 40.0, 10.0, 50.0]
    assert joined.global_batch.tolist() == [10.0] * 5, "the median of 10, 10 and 20 samples a step"
    other = _joined(
        [table({"step": 2, "loss": 2.0}, {"step": 2, "loss": 2.5}, {"step": 2})], is_journal=False
    )
    assert other.resumed.tolist() == [0.0, 1.0, 1.0]
    same = _joined([table({"step": 2}, {"step": 2})], is_journal=False)
    assert len(same) == 1 and isnan(same.global_batch[0])


def test_parts_of_a_file_hold_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"one\ntwo\nthree\nunfinished")
    assert _text(str(path), 0, 24) == b"one\ntwo\nthree\n"
    assert _text(str(path), 0, 24) == b"".join(_text(str(path), at, at + 1) for at in range(24))
    assert [_text(str(path), start, end) for start, end in ((0, 4), (4, 5), (5, 8), (1, 4))] == [
        b"one\n",
        b"two\n",
        b"",
        b"",
    ]


def test_a_journal_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    events: list[dict[str, Any]] = [
        {"event": "start"},
        {"event": "step", "step": 1, "loss": "Infinity", "update_applied": False, "peers": 2, "mfu": 1},
        {"event": "step", "loss": 2.0},
        {"event": "note", "text": "step"},
        {"event": "start"},
        {"event": "step", "step": 2, "loss": 2.0, "cursor": None},
    ]
    path.write_text("".join(json.dumps(event) + "\n" for event in events) + '{"event": "step", "st')
    found = read_columns(path)
    assert (found.step.tolist(), found.loss.tolist()) == ([1.0, 2.0], [inf, 2.0])
    assert (found.refused.tolist(), found.resumed.tolist()) == ([1.0, 0.0], [0.0, 1.0])
    assert found.peers.tolist() == [2.0, 1.0]


def test_what_is_no_log_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    for head, message, remedy in (
        (b"\xff\xfea", "is UTF-16", f"Convert it: iconv -f utf-16 -t utf-8 {path} > converted.log"),
        (b"\xfe\xffa", "is UTF-16", f"Convert it: iconv -f utf-16 -t utf-8 {path} > converted.log"),
        (b"\x1f\x8b\x08", "is compressed", f"Unpack it: gunzip -c {path} > unpacked.log"),
        (b"\x28\xb5\x2f\xfd", "is compressed", f"Unpack it: zstd -dc {path} > unpacked.log"),
    ):
        with pytest.raises(StorageError) as refused:
            _refuse_other_encodings(path, head)
        assert (refused.value.message, refused.value.remedy) == (f"{path} {message}", remedy)
    path.write_text("")
    assert len(read_columns(path, may_be_empty=True)) == 0
    with pytest.raises(StorageError, match="holds no line of a training"):
        read_columns(path)
    path.write_text("iteration 1/ 9 | moe loss: 2.5 | aux loss: 1.0 |\n")
    with pytest.raises(StorageError) as refused:
        read_columns(path)
    assert refused.value.message.endswith("no loss by a known name, but aux loss, moe loss")
    assert refused.value.remedy == (
        "Rename the one that the training minimises to `lm loss`: "
        f"sed 's/aux loss:/lm loss:/' {path} > renamed.log"
    )


def test_bad_lines_are_looked_at_with_the_one_after_them() -> None:
    assert _around(np.array([False, True, True, False, False, True])) == [1, 2, 3, 5]
    assert _around(np.array([True, False, False])) == [0, 1] and _around(np.array([False])) == []


def test_changes_of_the_loss_scale_are_looked_at_with_the_line_before_and_one_in_many_steps() -> None:
    scales = [4.0, 4.0, 4.0, 2.0, 2.0, nan, nan, 2.0, 2.0, 2.0, 2.0]
    rows = columns(*({"step": step, "loss_scale": scale} for step, scale in enumerate(scales, 1)))
    assert _scale_changes(rows, interval_steps=100) == [0, 2, 3, 6, 7]
    assert _scale_changes(rows, interval_steps=5) == [0, 2, 3, 4, 6, 7, 9]
    assert _scale_changes(columns(), interval_steps=5) == []


def test_as_many_blocks_again_are_asked_for_as_were_calm() -> None:
    assert [_blocks_at_once(asked, calm) for asked, calm in ((1, 0), (1, 1), (2, 2), (4, 3), (64, 64))] == [
        1, 2, 4, 4, 64,
    ]  # fmt: skip


def test_blocks_end_before_a_line_that_does_not_continue_the_one_before() -> None:
    rows = [{"step": step, "loss": 2.0, "global_batch": 8.0} for step in range(1, 201)]

    def whole(line: int, first: int, most: int, **odd: float) -> int:
        changed = [row | odd if index == 120 else row for index, row in enumerate(rows)]
        found = columns(*changed)
        return _Breaks(found, found.loss).whole_blocks(line, first, most=most)

    assert whole(0, 10, 1) == 10 and whole(0, 10, 3) == 74
    assert whole(0, 10, 99) == 10 + 5 * 32 and whole(190, 10, 9) == 10 and whole(191, 10, 9) == 0
    for odd in ({"loss": nan}, {"refused": 1.0}, {"resumed": 1.0}, {"global_batch": 9.0}, {"peers": 2.0}):
        assert whole(0, 10, 99, **odd) == 106 and whole(100, 20, 9, **odd) == 20
        assert whole(100, 21, 9, **odd) == 0 and whole(121, 1, 1, **odd) == 0
    assert whole(122, 10, 9, loss=nan) == 10 + 2 * 32
    assert whole(0, 10, 99, step=120.0) == 106, "a step that was made again"


def test_a_loss_that_is_missing_without_a_refusal_ends_the_refusals_before_it() -> None:
    rows = columns({"step": 1, "refused": 2}, {"step": 2}, {"step": 3, "refused": 1})
    assert rows.report(2).refused_in_a_row == 1


def test_what_is_no_log_or_not_there_is_told_with_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be read: No such file") as missing:
        read_columns(tmp_path / "none")
    assert missing.value.remedy == "Check the path."
    (tmp_path / "empty").touch()
    with pytest.raises(StorageError) as empty:
        read_columns(tmp_path / "empty")
    assert "Give a run directory, its journal, or the log" in empty.value.remedy


@pytest.mark.parametrize("first", ['{"rank": 0}', 'the "event" loop'])
def test_a_log_that_only_looks_like_a_journal_is_read_as_a_log(first: str, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(f"{first}\niteration 5/ 10 | lm loss: 2.5 |\n")
    found = read_columns(tmp_path / "a.log")
    assert (found.step.tolist(), found.loss.tolist()) == ([5.0], [2.5])


def test_a_start_at_the_end_of_a_part_belongs_to_the_first_step_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        json.dumps({"event": event, "step": step, "loss": 2.0}) + "\n"
        for event, step in (("step", 1), ("start", 1), ("step", 2), ("step", 3))
    ]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    monkeypatch.setattr(logs, "CHUNK_BYTES", len("".join(lines[:2])))
    assert read_columns(tmp_path / "a.jsonl", workers=1).resumed.tolist() == [0.0, 1.0, 0.0]


def test_damaged_lines_of_a_journal_are_no_steps_and_no_starts(tmp_path: Path) -> None:
    step = '{"event": "step", "step": 1, "loss": 2.0}'
    odd = ['["step", {"event": "step"}]', '{"event": "step", "loss": 2.0}', '{"event": "step", "st']
    text = "\n".join([step, *odd, step.replace('"step": 1', '"step": 2')]) + "\n"
    (tmp_path / "a.jsonl").write_text(text)
    found = read_columns(tmp_path / "a.jsonl")
    assert (found.step.tolist(), found.resumed.tolist()) == ([1.0, 2.0], [0.0, 0.0])


@pytest.mark.parametrize("number", ['"a few"', "[1]", "1" + "0" * 400])
def test_a_step_with_something_else_than_a_number_is_left_out(number: str, tmp_path: Path) -> None:
    step = '{"event": "step", "step": %s, "loss": %s}\n'
    text = (
        step % (1, 2.0) + step % (2, number) + step % (number, 2.0) + step % ("null", 2.0) + step % (3, 2.0)
    )
    (tmp_path / "a.jsonl").write_text(text)
    found = read_columns(tmp_path / "a.jsonl")
    assert (found.step.tolist(), found.resumed.tolist()) == ([1.0, 3.0], [0.0, 0.0])


@pytest.mark.parametrize("number", [inf, -1.0, 1e300])
def test_numbers_that_are_no_counts_count_as_absent_and_steps_that_are_none_as_no_lines(
    number: float,
) -> None:
    names = ("global_batch", "consumed_samples", "cursor", "refused", "peers")
    odd = {"step": 2.0, "loss": 2.0} | dict.fromkeys(names, number)
    found = _joined([table({"step": 1.0}, {"step": number}, odd)], is_journal=True)
    assert found.step.tolist() == [1.0, 2.0]
    report = found.report(1)
    assert (report.global_batch, report.consumed_samples, report.cursor, report.peers) == (0, 0, 0, 1)
    assert report.update_applied and report.refused_in_a_row == 0


@pytest.mark.parametrize("field", ["Reduced_Train-Loss: ", "loss/train (a.b) = ", "my * [loss]$ : "])
def test_what_renames_a_loss_that_is_not_known_does_so_when_it_is_typed(field: str, tmp_path: Path) -> None:
    path = tmp_path / "my log.txt"
    path.write_text(f" iteration 1/ 9 | lr: 1.0 | {field}2.5 |\n iteration 2/ 9 | lr: 1.0 | {field}2.25 |\n")
    with pytest.raises(StorageError) as refused:
        read_columns(path)
    command = refused.value.remedy.partition("`lm loss`: ")[2]
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    assert read_columns(tmp_path / "renamed.log").loss.tolist() == [2.5, 2.25]


STEPS = {
    "journal": lambda step, loss: json.dumps({"event": "step", "step": step, "loss": loss}) + "\n",
    "log": lambda step, loss: f"iteration {step}/ 99 | lm loss: {loss} |\n",
}


@pytest.mark.parametrize("kind", STEPS)
def test_of_a_log_that_grows_the_lines_that_were_added_are_parsed_and_no_others(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, parsed = tmp_path / "a", list[int]()
    for name in ("_journal_part", "_megatron_part"):
        part = getattr(logs, name)
        monkeypatch.setattr(
            logs, name, lambda *of, part=part: (table := part(*of), parsed.append(len(table)))[0]
        )
    monkeypatch.setattr(logs, "CHUNK_BYTES", 200)
    path.touch()
    reader = LogReader(path, workers=1)
    assert len(reader.columns(may_be_empty=True)) == 0
    text = "".join(STEPS[kind](step, 2.0 + step / 8) for step in range(1, 31))
    text += '{"event": "start"}\n' if kind == "journal" else STEPS[kind](31, 9.0)
    text += "".join(STEPS[kind](step, 2.0 + step / 8) for step in range(29, 40))
    for count in (1, 90, 91, 400, 401, 900, len(text) - 3, len(text)):
        path.write_text(text[:count])  # in place, as a writer appends
        columns = reader.columns(may_be_empty=True)
        assert vars(columns).keys() == {field.name for field in fields(Columns)}
        for name, expected in vars(read_columns_of(tmp_path, text[:count])).items():
            np.testing.assert_array_equal(getattr(columns, name), expected, err_msg=name)
    parsed.clear()
    path.write_text(text + STEPS[kind](40, 3.0))
    assert reader.columns().step[-1] == 40 and parsed == [1]


def read_columns_of(directory: Path, text: str) -> Columns:
    (directory / "whole").write_text(text)
    return LogReader(directory / "whole", workers=1).columns(may_be_empty=True)


def test_a_log_that_was_replaced_is_read_from_its_beginning(tmp_path: Path) -> None:
    path, line = tmp_path / "a.log", STEPS["log"]
    path.write_text(line(1, 2.0) + line(2, 3.0))
    reader = LogReader(path, workers=1)
    assert reader.columns().loss.tolist() == [2.0, 3.0]
    for text, losses in (
        (line(1, 5.0), [5.0]),
        (line(1, 6.0) + line(2, 7.0) + line(3, 8.0), [6.0, 7.0, 8.0]),
        (STEPS["journal"](1, 4.0) * 9, [4.0] * 9),
        (line(1, 2.0) * 9 + line(2, 3.0), [2.0, 3.0]),
    ):
        path.write_text(text)
        assert reader.columns().loss.tolist() == losses
    (tmp_path / "b.log").write_text(line(1, 1.0) * 9 + line(2, 3.0))
    (tmp_path / "b.log").replace(path)
    assert reader.columns().loss.tolist() == [1.0, 3.0]


def test_as_many_processes_read_as_were_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.log"
    path.write_text("".join(f"iteration {step}/ 9 | lm loss: 2.5 |\n" for step in range(1, 7)))
    monkeypatch.setattr(logs, "CHUNK_BYTES", 40)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    started: list[int] = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, count: int) -> None:
            started.append(count)
            super().__init__(count)

    monkeypatch.setattr(logs, "ProcessPoolExecutor", Pool)
    assert read_columns(path, workers=1).step.tolist() == [1, 2, 3, 4, 5, 6] and started == []
    assert len(read_columns(path, workers=3)) == len(read_columns(path)) == 6
    assert started == [3, 4]


def test_a_line_without_a_known_loss_among_others_is_one_without_a_number(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("iteration 1/ 9 | lm loss: 2.5 |\niteration 2/ 9 | moe loss: 1.0 |\n")
    assert isnan(read_columns(tmp_path / "a.log").loss[1])


def test_a_journal_after_a_blank_line_is_one_and_only_its_starts_resume(tmp_path: Path) -> None:
    step = '{{"event": "step", "step": {}, "loss": 2.0}}\n'
    other = '{"event": "save", "why": "start"}\n'
    (tmp_path / "a.jsonl").write_text("\n" + step.format(1) + other + step.format(2))
    found = read_columns(tmp_path / "a.jsonl")
    assert (found.step.tolist(), found.resumed.tolist()) == ([1.0, 2.0], [0.0, 0.0])


def test_a_log_without_lines_has_none_whose_loss_scale_changed() -> None:
    assert _scale_changes(columns(), interval_steps=5) == []


@pytest.mark.parametrize("content", [b"", b"none", b"one\n", b"one\ntwo", b"one\n" + b"x" * 30, b"\n\n"])
def test_the_last_whole_line_ends_where_its_sign_is_however_long_the_rest(
    content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_HEAD_BYTES", 4)
    for begin in range(len(content) + 1):
        ends = content.rfind(b"\n", begin) + 1
        assert _end_of_lines(io.BytesIO(content), begin) == max(ends, begin), begin
