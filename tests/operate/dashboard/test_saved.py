"""Runs as files for others: a page that needs no server, and pictures."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from rich.cells import cell_len
from tests.operate.dashboard.written_run import BATCH, LENGTH, healed_run, wait_until

from bloomery.cli import main, plot
from bloomery.cli.top import sparkline


def test_a_report_is_one_file_that_loads_nothing_and_holds_the_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = healed_run(tmp_path / "run")
    run.operation("note", text="</script><script>alert(1)</script>", by="<!--")
    file = tmp_path / "run.html"
    plan = tmp_path / "plan.json"
    planned = {"tokens": 10**6, "days": 2.0, "training_days": 1.8}
    plan.write_text(json.dumps({"run": planned, "speed": {"tokens_per_s": 5000.0}}))
    assert main(["report", str(run.rundir.path), "--html", str(file), "--plan", str(plan)]) == 0
    assert capsys.readouterr().out.endswith(f"wrote {file}\n")
    page = file.read_text()
    assert not re.search(r'(src|href)="(?!#|data:)', page) and page.count("<script>alert") == 0
    assert "default-src 'none'" in page and "unsafe" not in page.partition("</head>")[0]
    data = re.search(r'<script type="application/json" id="recorded">(.*?)</script>', page, re.S)
    assert data is not None
    recorded = json.loads(data[1])
    curves = {curve["name"]: curve for curve in recorded["curves"][0]["step"]}
    assert curves["loss"]["x"] == list(range(1, 92)) and curves["loss!"]["y"][-1] == 9.5
    assert recorded["runs"][0]["step"] == 91
    assert recorded["panels"][0]["goodput"]["plan"]["planned_tokens_per_s"] == 5000.0
    assert any("</script>" in event["text"] for event in recorded["panels"][0]["events"])


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_curves_of_two_runs_become_a_picture(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(healed_run(tmp_path / name).rundir.path) for name in ("first", "second")]
    file = tmp_path / f"both.{suffix}"
    assert main(["plot", *runs, "--columns", "loss", "--against", "tokens", "--output", str(file)]) == 0
    assert capsys.readouterr().out.strip() == str(file)
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == "png" else b"<?xml") and len(content) > 5000


def test_up_to_seven_runs_have_colours_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [str(healed_run(tmp_path / str(number)).rundir.path) for number in range(7)]
    colours: list[str] = []
    monkeypatch.setattr(plot, "_draw_run", lambda *words, **_: colours.append(words[3]))
    assert main(["plot", *runs, "--columns", "loss", "--output", str(tmp_path / "seven.svg")]) == 0
    assert len(set(colours)) == 7


def test_a_planned_column_is_not_smoothed_and_held_out_losses_have_their_datasets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = healed_run(tmp_path / "run")
    file = tmp_path / "one.svg"
    columns = ["--columns", "loss", "learning_rate", "--against", "time"]
    assert main(["plot", str(run.rundir.path), *columns, "--output", str(file)]) == 0
    texts = re.findall(r"<!-- (.*?) -->", file.read_text())
    assert "held out code" in texts and "held out prose" in texts and "time" in texts
    assert texts.count("smoothed") == 1 and "each step" in texts


def test_what_went_wrong_is_a_line_at_its_place_on_each_axis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = healed_run(tmp_path / "run")
    drawn: list[float] = []
    monkeypatch.setattr(Axes, "axvline", lambda axes, x, **style: drawn.append(x))
    at: dict[str, list[float]] = {}
    for axis in ("step", "tokens"):
        words = ["--columns", "loss", "--against", axis, "--output", str(tmp_path / f"{axis}.svg")]
        assert main(["plot", str(run.rundir.path), *words]) == 0
        at[axis] = drawn.copy()
        drawn.clear()
    assert at["step"] == [60]
    assert at["tokens"] == [60 * BATCH * LENGTH]


def test_top_fits_into_its_columns_and_no_text_of_a_journal_commands_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = healed_run(tmp_path / "run")
    run.operation("note", text="\x1b[2J\x1b]0;title\x07 and \u202ebackwards [bold]" * 9, by="\x9b31m")
    other = healed_run(tmp_path / "\x1b[7mname")
    for each in (run, other):
        each.event("end", reason="the samples are done", finished=True, failed=False)
    runs = [str(run.rundir.path), str(other.rundir.path)]
    for columns in (80, 100):
        assert main(["top", *runs, "--once", "--columns", str(columns)]) == 0
        text = capsys.readouterr().out
        assert max(map(cell_len, text.splitlines())) <= columns
        assert not any(sign in text for sign in "\x1b\x07\x9b\u202e") and "and backwards [bold]" in text
        assert text.count("loss ") >= 2 and "the samples are done" in text
    assert main(["top", str(tmp_path / "nothing"), "--once"]) == 1
    assert "does not exist" in " ".join(capsys.readouterr().out.split())


def test_top_follows_a_run_in_a_terminal_until_it_is_interrupted(tmp_path: Path) -> None:
    run = healed_run(tmp_path / "run")
    main_end, terminal = pty.openpty()
    command = [sys.executable, "-m", "bloomery", "top", str(run.rundir.path), "--interval", "0.1"]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown = b""

    def shows(words: bytes) -> bool:
        nonlocal shown
        if select.select([main_end], [], [], 0.1)[0]:
            shown += os.read(main_end, 65536)
        return words in shown

    try:
        wait_until(lambda: shows(b"step 91,"))
        run.steps(2)
        wait_until(lambda: shows(b"step 93,"))
        process.send_signal(signal.SIGINT)
        wait_until(lambda: shows(b"\x1b[?1049l"))  # the screen of before is back
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(main_end)


def test_a_sparkline_goes_from_the_lowest_to_the_highest_and_leaves_gaps() -> None:
    assert sparkline([0.0, 7.0, float("nan"), 3.5]) == "▁█ ▅"
    assert sparkline([2.0, 2.0]) == "▁▁" and sparkline([]) == ""


def test_what_cannot_be_drawn_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(healed_run(tmp_path / "run").rundir.path)
    assert main(["plot", run, "--columns", "los"]) == 2
    assert "There are" in capsys.readouterr().err
    assert main(["plot", str(tmp_path / "nothing")]) == 1
    with pytest.raises(SystemExit, match="2"):
        main(["plot", run, "--output", str(tmp_path / "no" / "such.png")])
