"""What a training shows: lines and bars that fit, objects for programs, and what it says of its data."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from bloomery.cli.train import Screen
from bloomery.config.load import LoadedRecipe
from bloomery.events.journal import read_journal
from bloomery.events.records import StepReport
from bloomery.events.run_directory import RunDirectory
from bloomery.guard.verdict import CarryOn, Stop
from bloomery.train.console import (
    JsonLines,
    LogLines,
    NotebookBar,
    ProgressBar,
    TimeLeft,
    duration,
    short_line,
)
from bloomery.train.loop import train
from bloomery.train.settings import StartOptions

Start = Callable[..., tuple[LoadedRecipe, Path]]

REPORT = StepReport(
    step=123_456,
    consumed_samples=1200,
    consumed_tokens=307_200,
    cursor=1200,
    seconds=0.215,
    learning_rate=1.2e-3,
    global_batch=2048,
    loss=3.45671234567,
    z_loss=1e-4,
    loss_scale=None,
    gradient_norm=0.512,
    zero_gradients=17,
    update_applied=False,
    refused_updates=2,
    refused_in_a_row=0,
    nan_losses=1,
    samples_per_s=46.5,
    tokens_per_s=1_211_900.0,
    hardware_tflops=0.45,
    model_tflops=0.42,
    mfu=0.31,
    held_out_loss=3.5,
)


@pytest.mark.parametrize("columns", [71, 91, 191])
def test_a_short_line_fits_and_leaves_out_what_matters_least(columns: int) -> None:
    line = short_line(REPORT, total_steps=9_500_000, left_s=86_400.0 * 90, columns=columns)
    assert len(line) <= columns
    assert line.startswith("step 123456/9500000 | loss 3.4567 | UPDATE REFUSED | held-out 3.5000")
    assert ("batch 2048" in line) == (columns == 191)
    assert ("90 days left" in line) == (columns > 80)


def test_the_time_left_follows_from_the_newest_steps_and_starts_anew_after_a_rewind() -> None:
    now = iter([0.0, 10.0, 12.0, 100.0, 101.0])
    left = TimeLeft(12, clock=lambda: next(now))
    assert left.after(replace(REPORT, step=1)) is None
    assert left.after(replace(REPORT, step=2)) == 100.0
    assert left.after(replace(REPORT, step=3)) == 9 * 6.0
    left.restart()
    assert left.after(replace(REPORT, step=2)) is None
    assert left.after(replace(REPORT, step=3)) == 9.0
    assert [duration(seconds) for seconds in (0.2, 99, 600, 7000, 400_000)] == [
        *("0 s", "99 s", "10 min", "1.9 h", "5 days")
    ]


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_a_bar_fits_the_terminal_and_says_what_happened(columns: int) -> None:
    screen = io.StringIO()
    console = Console(
        file=screen, width=columns, force_terminal=True, color_system=None, legacy_windows=False
    )
    now = iter([0.0, 0.5])
    bar = ProgressBar(total_steps=950_000, first_step=0, console=console, clock=lambda: next(now))
    bar.tell(replace(REPORT, step=123_455), CarryOn(judged_step=1))
    bar.tell(REPORT, Stop(judged_step=123_456, failed=True, reason="the loss is [bold]nan[/bold]"))
    bar.close()
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    lines = [line.strip("\r") for line in drawn.splitlines() if "123456/950000" in line]
    assert "step 123456: stop: the loss is [bold]nan[/bold]" in drawn
    assert "loss 3.457" in lines[-1] and "left" in lines[-1]
    assert ("tokens/s" in lines[-1]) == (columns > 80)
    assert all(len(line) <= columns for line in lines)


def test_short_lines_begin_with_the_first_step_and_full_ones_hold_every_figure() -> None:
    said: list[str] = []
    LogLines(every_steps=10, total_steps=20, say=said.append, full=False).tell(
        replace(REPORT, step=1, held_out_loss=None, update_applied=True), CarryOn(judged_step=1)
    )
    LogLines(every_steps=1, total_steps=20, say=said.append).tell(REPORT, CarryOn(judged_step=1))
    assert said[0].startswith("step 1/20 | loss 3.4567 | 1,211,900 tokens/s")
    assert "TFLOPs 0.420 model 0.450 hardware" in said[1]


def test_full_lines_tell_once_how_long_the_first_step_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bloomery.train.console.time", SimpleNamespace(perf_counter=lambda: 107.25))
    said: list[str] = []
    lines = LogLines(every_steps=10, total_steps=20, say=said.append, started=100.0)
    report = replace(REPORT, held_out_loss=None, update_applied=True)
    for step in (1, 2, 10):
        lines.tell(replace(report, step=step), CarryOn(judged_step=step))
    assert said[0] == "first step done 7.2 s after the start"
    assert len(said) == 2 and said[1].startswith("step 10/20")
    lines.rewound(4)
    lines.tell(replace(report, step=5), Stop(judged_step=5, failed=True, reason="enough"))
    assert said[2:] == ["rewound to step 4", "step 5 | stop: enough"]


def test_objects_for_programs_hold_steps_and_verdicts() -> None:
    emitted: list[dict] = []
    lines = JsonLines(every_steps=1, total_steps=20, emit=lambda event: emitted.append(dict(event)))
    lines.tell(replace(REPORT, loss=float("nan")), Stop(judged_step=3, failed=True, reason="enough"))
    lines.rewound(2)
    step, verdict, rewound = json.loads(json.dumps(emitted, allow_nan=False))
    assert (step["event"], step["loss"], step["total_steps"]) == ("step", "NaN", 20)
    assert (verdict["kind"], verdict["reason"], rewound["step"]) == ("stop", "enough", 2)


def test_a_notebook_has_one_output_that_is_replaced() -> None:
    outputs: list[str] = []

    def text_of(shown: dict[str, str], *, raw: bool) -> str:
        return shown["text/plain"] if raw else repr(shown)

    class Handle:
        def update(self, shown: dict[str, str], *, raw: bool = False) -> None:
            outputs[-1] = text_of(shown, raw=raw)

    def display(shown: dict[str, str], *, raw: bool = False, display_id: bool = False) -> Handle | None:
        outputs.append(text_of(shown, raw=raw))
        return Handle() if display_id else None  # as IPython does

    bar = NotebookBar(total_steps=164_608, display=display)
    assert outputs == ["the first step is under way"]
    bar.tell(REPORT, CarryOn(judged_step=1))
    bar.tell(replace(REPORT, loss=2.0), CarryOn(judged_step=1))
    bar.close()
    assert len(outputs) == 1
    assert outputs[0].startswith("███████████████░░░░░ 123456/164608 | loss 2.000")


def test_a_notebook_shows_verdicts_and_rewinds_below_the_bar() -> None:
    outputs: list[str] = []

    class Handle:
        def update(self, shown: dict[str, str], *, raw: bool = False) -> None:
            pass

    def display(shown: dict[str, str], *, raw: bool = False, display_id: bool = False) -> Handle | None:
        outputs.append(shown["text/plain"])
        return Handle() if display_id else None

    bar = NotebookBar(total_steps=164_608, display=display)
    bar.tell(REPORT, Stop(judged_step=3, failed=True, reason="enough"))
    bar.rewound(2)
    assert outputs[1:] == [f"step {REPORT.step}: stop: enough", "rewound to step 2"]


def test_a_run_says_what_its_data_are_and_warns_of_text_that_is_read_often(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded, path = start("train.samples=40000", "guard.stop_at_step=2", "data.held_out_every=0", name="small")
    said: list[str] = []
    train(loaded, RunDirectory(path), StartOptions(say=said.append, form="short"))
    text = "\n".join(said)
    (data,) = [event for event in read_journal(RunDirectory(path).journal()) if event["event"] == "data"]
    assert f"{data['parameters']:,} parameters" in text and f"{data['tokens']:,} tokens to train on" in text
    assert "128 to 256 tokens per step" in text  # ramp_up from 4 to 8 samples of 32 tokens
    assert data["epochs"] == pytest.approx(40000 * 32 / data["tokens"])
    assert data["epochs"] > 4 and "beyond 4 times, more reading hardly helps" in text
    assert "warning: There is no held-out text" in text

    screen = Screen("json")
    emitted: list[str] = []
    options = StartOptions(say=screen.say, emit=screen.emit, form="json")
    train(loaded, RunDirectory(path), options)
    screen.conclude(RunDirectory(path), hints=True)
    emitted = capsys.readouterr().out.splitlines()
    kinds = [json.loads(line)["event"] for line in emitted]
    assert kinds[:2] == ["message", "data"] and kinds[-1] == "finished"
    assert {key: json.loads(emitted[1])[key] for key in ("tokens", "warnings")} == {
        key: data[key] for key in ("tokens", "warnings")
    }


@pytest.mark.parametrize(("device", "why"), [("", "Broken pipe"), ("/dev/full", "No space left")])
def test_an_output_that_takes_no_lines_ends_them_and_not_the_training(
    device: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(os.open(device, os.O_WRONLY) if device else os.dup(writer), "w") as output:
        monkeypatch.setattr("sys.stdout", output)
        Screen("short").say("control/set: checkpoint.every_steps = 50")
        screen = Screen("json")
        screen.emit({"event": "step"})
        screen.say("finished")
    os.close(writer)
    (told,) = capsys.readouterr().err.splitlines()
    assert why in told and "it goes on" in told


def test_messages_are_broken_to_a_terminal_and_stay_whole_in_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    long = " ".join(["word"] * 60)
    Screen("short").say(long)
    assert len(capsys.readouterr().out.splitlines()) == 1
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    Screen("short").say(long)
    assert all(len(line) <= 80 for line in capsys.readouterr().out.splitlines())
    Screen("full").say(long)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_the_time_left_in_short_lines_begins_anew_after_a_rewind() -> None:
    said: list[str] = []
    lines = LogLines(every_steps=1, total_steps=30, say=said.append, full=False)
    clock = iter([0.0, 2.0, 9.0, 10.0])
    lines._left = TimeLeft(30, clock=lambda: next(clock))
    report = replace(REPORT, held_out_loss=None, update_applied=True)
    for step in (19, 20):
        lines.tell(replace(report, step=step), CarryOn(judged_step=1))
    lines.rewound(18)
    for step in (19, 20):
        lines.tell(replace(report, step=step), CarryOn(judged_step=1))
    assert [" s left" in line for line in said] == [False, True, False, False, True]
    assert "| 20 s left |" in said[1] and "| 10 s left |" in said[4]
