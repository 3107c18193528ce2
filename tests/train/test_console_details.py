"""Each figure that a training shows, where it stands, and when it is shown."""

from __future__ import annotations

import gzip
import io
import logging
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.train.test_console import REPORT

from bloomery.config.checkpoint import LogSection
from bloomery.errors import BloomeryError
from bloomery.events.run_directory import RunDirectory
from bloomery.guard.verdict import CarryOn, Stop
from bloomery.train import console, observers
from bloomery.train.console import (
    JsonLines,
    LogLines,
    NotebookBar,
    ProgressBar,
    TimeLeft,
    bar_text,
    described,
    notebook_display,
    short_line,
)
from bloomery.train.observers import Observers, SlowDataWarning, StepProfiler, TensorBoard, build_observers
from bloomery.train.settings import StartOptions
from bloomery.train.trackers import TrackedRun

PLAIN = replace(REPORT, step=20, held_out_loss=None, update_applied=True)
ON = CarryOn(judged_step=1)
STOP = Stop(judged_step=1, failed=True, reason="enough")


def test_a_short_line_has_every_figure_in_the_order_of_what_matters() -> None:
    whole = short_line(REPORT, total_steps=200_000, left_s=5400.0, columns=200)
    assert whole == (
        "step 123456/200000 | loss 3.4567 | UPDATE REFUSED | held-out 3.5000 | 90 min left | "
        "1,211,900 tokens/s | norm 0.51 | lr 1.2e-03 | batch 2048"
    )
    assert short_line(PLAIN, total_steps=None, left_s=None, columns=26) == "step 20 | loss 3.4567"
    assert short_line(PLAIN, total_steps=None, left_s=0.0, columns=33) == "step 20 | loss 3.4567 | 0 s left"
    assert short_line(PLAIN, total_steps=None, left_s=None, columns=34) == (
        "step 20 | loss 3.4567 | norm 0.51"
    ), "what does not fit is passed over"


def test_a_bar_has_every_figure_in_the_order_of_what_matters() -> None:
    assert bar_text(PLAIN, held_out=3.25, total_steps=60, left_s=70.0, columns=99) == (
        "20/60 | loss 3.457 | 70 s left | held-out 3.250 | 1,211,900 tokens/s | lr 1.2e-03"
    )
    assert bar_text(PLAIN, held_out=None, total_steps=None, left_s=None, columns=22) == "20 | loss 3.457"
    ended = bar_text(PLAIN, held_out=None, total_steps=20, left_s=0.0, columns=29)
    assert ended == "20/20 | loss 3.457 | 0 s left"


def test_the_time_left_is_that_of_the_newest_fifty_steps_and_unknown_without_an_end() -> None:
    now = [0.0]
    left = TimeLeft(1000, clock=lambda: now[0])
    for step in range(1, 101):
        now[0] += 100.0 if step <= 51 else 2.0
        told = left.after(replace(PLAIN, step=step))
    assert told == 900 * 2.0
    assert left.after(replace(PLAIN, step=2000)) == 0.0, "a run that was made shorter has nothing left"
    endless = TimeLeft(None, clock=lambda: now[0])
    assert endless.after(replace(PLAIN, step=1)) is endless.after(replace(PLAIN, step=2)) is None


def test_everybody_shows_the_last_step_as_each_report_tells_it() -> None:
    """Peers that leave make the run longer for the others."""
    told: dict[str, Any] = {"total_steps": 60, "last_step": lambda report: 10 * report.step}
    screen = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    said: list[str] = []
    objects: list[Any] = []
    drawn: list[str] = []
    handle = SimpleNamespace(update=lambda shown, raw: drawn.append(shown["text/plain"]))
    bar = ProgressBar(first_step=0, console=screen, **told)
    notebook = NotebookBar(display=lambda shown, **how: handle, **told)
    for shown in (
        LogLines(every_steps=1, say=said.append, full=True, **told),
        LogLines(every_steps=1, say=said.append, full=False, **told),
        JsonLines(every_steps=1, emit=objects.append, **told),
        bar,
        notebook,
    ):
        shown.tell(replace(PLAIN, step=20), ON)
    bar.close()
    notebook.close()
    assert "20/200" in said[-1] and "200" in said[0] and objects[0]["total_steps"] == 200
    task = bar._progress.tasks[0]
    assert task.total == 200 and task.fields["text"].startswith("20/200")
    assert "20/200" in drawn[-1] and drawn[-1].count("█") == 2


@pytest.mark.parametrize("full", [True, False])
def test_a_line_comes_at_each_multiple_and_where_something_happened(full: bool) -> None:
    said: list[str] = []
    lines = LogLines(every_steps=10, total_steps=60, say=said.append, full=full, columns=40)
    for step, changed in (
        (1, {}),
        (2, {}),
        (10, {}),
        (11, {"held_out_loss": 2.5}),
        (12, {"update_applied": False}),
        (13, {}),
    ):
        lines.tell(replace(PLAIN, step=step, **changed), ON)
    steps = [int(re.findall(r"step +(\d+)", line)[0]) for line in said]
    assert steps == ([10, 11, 12] if full else [1, 10, 11, 12])
    assert full or all(len(line) <= 40 for line in said)


def test_short_lines_do_not_tell_how_long_the_first_step_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "time", SimpleNamespace(perf_counter=lambda: 5.0, monotonic=lambda: 5.0))
    said: list[str] = []
    for full, started in ((False, 1.0), (True, 0.0)):
        LogLines(every_steps=9, total_steps=9, say=said.append, full=full, started=started).tell(PLAIN, ON)
    assert not any("after the start" in line for line in said)


def test_time_left_begins_anew_after_a_rewind_in_lines_and_objects() -> None:
    emitted: list[dict[str, Any]] = []
    lines = JsonLines(every_steps=1, total_steps=30, emit=lambda event: emitted.append(dict(event)))
    clock = iter([0.0, 2.0, 9.0, 10.0])
    lines._left = TimeLeft(30, clock=lambda: next(clock))
    for step in (19, 20):
        lines.tell(replace(PLAIN, step=step), ON)
    lines.rewound(18)
    for step in (19, 20):
        lines.tell(replace(PLAIN, step=step), ON)
    assert [event["left_s"] for event in emitted if event["event"] == "step"] == [None, 20.0, None, 10.0]
    assert emitted[2] == {"event": "rewound", "step": 18}


def test_objects_come_at_each_multiple_and_where_something_happened() -> None:
    emitted: list[Any] = []
    lines = JsonLines(every_steps=10, total_steps=60, emit=emitted.append)
    for step, changed in ((9, {}), (10, {}), (11, {"held_out_loss": 2.5}), (12, {"update_applied": False})):
        lines.tell(replace(PLAIN, step=step, **changed), ON)
    lines.tell(replace(PLAIN, step=13), STOP)
    assert [event["step"] for event in emitted] == [10, 11, 12, 13]
    figures = replace(PLAIN, step=10).to_json()
    left_s = emitted[0].pop("left_s")
    assert emitted[0] == {**figures, "event": "step", "total_steps": 60} and left_s is not None
    assert emitted[-1] == {"event": "verdict", "step": 13, "kind": "stop", "reason": "enough"}
    assert described(STOP) == "stop: enough" and described(ON) == "carryon: "


def test_a_bar_keeps_the_newest_held_out_loss_and_goes_back_at_a_rewind() -> None:
    now = iter(range(100))
    screen = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    bar = ProgressBar(total_steps=60, first_step=12, console=screen, clock=lambda: float(next(now)))
    task = bar._progress.tasks[0]
    assert (task.completed, task.total) == (12, 60)
    bar.tell(replace(PLAIN, step=18, held_out_loss=3.25), ON)
    bar.tell(replace(PLAIN, step=20), ON)
    assert task.completed == 20 and "held-out 3.250" in task.fields["text"]
    assert "40 s left" in task.fields["text"]
    bar.rewound(15)
    assert task.completed == 15
    bar.tell(replace(PLAIN, step=16), ON)
    assert "left" not in task.fields["text"]
    bar.close()
    assert bar._progress.live.is_started is False


@pytest.mark.parametrize(("width", "bar", "text"), [(30, 8, 20), (80, 16, 62), (300, 40, 258)])
def test_a_fifth_of_a_terminal_is_the_bar_within_limits(width: int, bar: int, text: int) -> None:
    screen = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    shown = ProgressBar(total_steps=60, first_step=0, console=screen)
    shown.close()
    assert shown._text_columns == text
    assert shown._progress.columns[0].bar_width == bar  # type: ignore[attr-defined]


def test_a_notebook_is_drawn_twice_a_second_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now, drawn = [100.0], list[str]()
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now[0]))
    handle = SimpleNamespace(update=lambda shown, raw: drawn.append(shown["text/plain"]))
    bar = NotebookBar(total_steps=40, display=lambda shown, **told: handle)
    bar._left = SimpleNamespace(total=40, after=lambda report: None)
    for seconds, step in ((0.0, 10), (0.4, 11), (0.1, 12), (0.4, 13)):
        now[0] += seconds
        bar.tell(replace(PLAIN, step=step, held_out_loss=2.5 if step == 10 else None), ON)
    assert [line.split()[1] for line in drawn] == ["10/40", "12/40"]
    assert drawn[1].startswith("██████░░░░░░░░░░░░░░ 12/40 | loss 3.457 | held-out 2.500")
    bar.close()
    assert drawn[2].split()[1] == "13/40"
    endless = NotebookBar(total_steps=None, display=lambda shown, **told: handle)
    endless.close()
    assert len(drawn) == 3, "nothing was told yet"
    endless.tell(PLAIN, ON)
    assert drawn[3].startswith("░" * 20 + " 20 | loss")


def test_the_time_left_in_a_notebook_begins_anew_after_a_rewind() -> None:
    bar = NotebookBar(total_steps=9, display=lambda *shown, **told: None)
    assert bar._left.after(replace(PLAIN, step=4)) is None
    assert bar._left.after(replace(PLAIN, step=5)) is not None
    bar.rewound(3)
    assert bar._left.after(replace(PLAIN, step=4)) is None


def test_a_notebook_is_known_by_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    class ZMQInteractiveShell:
        """What runs the cells of a notebook."""

    class TerminalInteractiveShell:
        """What runs IPython in a terminal."""

    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert notebook_display() is None
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display="display"))
    for shell, found in (
        (ZMQInteractiveShell(), "display"),
        (TerminalInteractiveShell(), None),
        (None, None),
    ):
        ipython = SimpleNamespace(get_ipython=lambda shell=shell: shell)
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        assert notebook_display() == found


LAST = lambda report: 60  # noqa: E731
TRACKED = TrackedRun(name="mine", identity="id", settings={})


def observers_of(
    tmp_path: Path, section: LogSection, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> list[Any]:
    monkeypatch.setattr(observers, "trackers", lambda services, run: [(services, run)] if services else [])
    return build_observers(
        section,
        StartOptions(say=print, started=5.0, columns=77, **options),
        first_step=3,
        total_steps=60,
        last_step=LAST,
        rundir=RunDirectory(tmp_path),
        device=torch.device("cpu"),
        tracked=TRACKED,
    )


def test_a_run_has_the_observers_that_its_recipe_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observers, "TensorBoard", lambda directory, *, first_step: (directory, first_step))
    monkeypatch.setattr(observers, "StepProfiler", lambda directory, **told: (directory, told))
    section = LogSection(tensorboard=True, profile_steps=(5, 7), trackers=("wandb",), form="full")
    warning, lines, board, profiler, tracker = observers_of(tmp_path, section, monkeypatch)
    rundir = RunDirectory(tmp_path)
    assert isinstance(warning, SlowDataWarning) and isinstance(lines, LogLines)
    assert board == (rundir.tensorboard, 3) and tracker == (("wandb",), TRACKED)
    assert profiler == (
        rundir.profiles,
        {"first": 5, "last": 7, "completed": 3, "device": torch.device("cpu"), "say": print},
    )
    plain = LogSection(tensorboard=False, profile_steps=(), trackers=(), form="short")
    assert [type(one) for one in observers_of(tmp_path, plain, monkeypatch)] == [SlowDataWarning, LogLines]


def test_no_bar_holds_the_terminal_of_a_run_whose_other_observers_cannot_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(directory: Path, *, first_step: int) -> None:
        raise TypeError("another protobuf")

    monkeypatch.setattr(observers, "TensorBoard", broken)
    monkeypatch.setattr(observers, "_console", lambda *given, **told: pytest.fail("a bar was begun"))
    with pytest.raises(TypeError, match="another protobuf"):
        observers_of(tmp_path, LogSection(tensorboard=True), monkeypatch, form="bar")


@pytest.mark.parametrize(("form", "full"), [("full", True), ("short", False)])
def test_lines_are_as_the_start_asks_or_else_as_the_recipe_says(
    form: str, full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(observers, "LogLines", lambda **told: given.append(told))
    section = LogSection(form="json", every_steps=4, tensorboard=False)
    observers_of(tmp_path, section, monkeypatch, form=form)
    assert given == [
        {
            "every_steps": 4,
            "total_steps": 60,
            "last_step": LAST,
            "say": print,
            "started": 5.0,
            "full": full,
            "columns": 77,
        }
    ]


def test_objects_bars_and_notebooks_are_made_where_they_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("JsonLines", "ProgressBar", "NotebookBar"):
        monkeypatch.setattr(observers, name, lambda name=name, **told: (name, told))
    emit = lambda event: None  # noqa: E731
    section = LogSection(form="json", every_steps=4, tensorboard=False)
    assert observers_of(tmp_path, section, monkeypatch, emit=emit)[1] == (
        "JsonLines",
        {"every_steps": 4, "total_steps": 60, "last_step": LAST, "emit": emit},
    )
    for display, made in (
        (None, ("ProgressBar", {"total_steps": 60, "first_step": 3, "last_step": LAST})),
        ("display", ("NotebookBar", {"total_steps": 60, "last_step": LAST, "display": "display"})),
    ):
        monkeypatch.setattr(observers, "notebook_display", lambda display=display: display)
        assert observers_of(tmp_path, section, monkeypatch, form="bar")[1] == made


class Watching:
    """An observer that raises once."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[Any] = []
        self._error = error

    def note(self, *call: Any) -> None:
        self.calls.append(call)
        if self._error is not None:
            raise self._error

    def tell(self, report: Any, verdict: Any) -> None:
        self.note("tell", report, verdict)

    def rewound(self, step: int) -> None:
        self.note("rewound", step)

    def close(self) -> None:
        self.note("close")


def test_an_observer_that_raises_is_dropped_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    refused, broken = Watching(BloomeryError("no room", remedy="")), Watching(ValueError("a mistake"))
    first, last = Watching(), Watching()
    all_of_them = Observers([first, refused])
    all_of_them.join([broken, last])
    all_of_them.tell("report", "verdict")  # type: ignore[arg-type]
    all_of_them.rewound(3)
    all_of_them.close()
    whole = [("tell", "report", "verdict"), ("rewound", 3), ("close",)]
    assert first.calls == last.calls == whole and refused.calls == broken.calls == whole[:1]
    told = [(one.levelno, one.getMessage(), bool(one.exc_info)) for one in caplog.records]
    assert told == [
        (logging.WARNING, "Watching no longer watches this run: no room", False),
        (logging.ERROR, "Watching failed and no longer watches this run", True),
    ]


def test_a_curve_goes_on_behind_the_steps_that_a_start_or_a_rewind_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []

    def writer(directory: str, **told: Any) -> Any:
        calls.append((directory, told))
        return SimpleNamespace(close=lambda: calls.append("closed"))

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", SimpleNamespace(SummaryWriter=writer))
    board = TensorBoard(Path("there"), first_step=4)
    board.rewound(2)
    board.close()
    assert calls == [
        ("there", {"purge_step": 5, "flush_secs": 20}),
        "closed",
        ("there", {"purge_step": 3, "flush_secs": 20}),
        "closed",
    ]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_profile_records_the_device_that_computes_and_drops_what_a_rewind_discards(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    class Profile:
        def __init__(self, *, activities: Any, record_shapes: bool) -> None:
            calls.append(([one.name for one in activities], record_shapes))

        def start(self) -> None:
            calls.append("start")

        def stop(self) -> None:
            calls.append("stop")

        def export_chrome_trace(self, path: str) -> None:
            calls.append(Path(path).name)
            Path(path).write_bytes(gzip.compress(b'{"traceEvents": []}'))

        def key_averages(self) -> Any:
            return SimpleNamespace(table=lambda **told: calls.append(told) or "the table")

    monkeypatch.setattr(observers, "profile", Profile)
    profiler = StepProfiler(
        tmp_path, first=5, last=6, completed=3, device=torch.device(device), say=calls.append
    )
    profiler.tell(replace(PLAIN, step=4), ON)
    profiler.tell(replace(PLAIN, step=5), ON)
    profiler.rewound(4)
    begun = (["CPU", "CUDA"] if device == "cuda" else ["CPU"], True)
    assert calls == [begun, "start", "stop", begun, "start"]
    calls.clear()
    profiler.tell(replace(PLAIN, step=5), ON)
    profiler.tell(replace(PLAIN, step=6), ON)
    profiler.tell(replace(PLAIN, step=7), ON)
    by = {"cpu": "self_cpu_time_total", "cuda": "self_cuda_time_total"}[device]
    stop, trace, table, told = calls
    assert (stop, trace, table) == (
        "stop",
        "steps-5-6.trace.json.gz",
        {"sort_by": by, "row_limit": 40},
    )
    assert told.startswith(f"steps 5 to 6 were profiled: {tmp_path}/steps-5-6.trace.json.gz is for")
    assert (tmp_path / "steps-5-6.txt").read_text().endswith("\nthe table")
    calls.clear()
    profiler.rewound(8)
    profiler.close()
    assert calls == [], "nothing is recorded"


def test_a_notebook_has_a_line_of_75_columns_beside_its_bar() -> None:
    drawn: list[str] = []
    handle = SimpleNamespace(update=lambda shown, raw: drawn.append(shown["text/plain"]))
    bar = NotebookBar(total_steps=200_000, display=lambda shown, **told: handle)
    bar._left = SimpleNamespace(total=200_000, after=lambda report: None)
    bar.tell(replace(REPORT, held_out_loss=3.5), ON)
    text = drawn[0].partition(" ")[2]
    assert text == "123456/200000 | loss 3.457 | held-out 3.500 | 1,211,900 tokens/s"
    bar.tell(replace(REPORT, step=1234, held_out_loss=None), ON)
    bar.close()
    assert drawn[1].endswith(" | lr 1.2e-03") and len(drawn[1].partition(" ")[2]) == 75
