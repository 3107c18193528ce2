"""Runs as files for others: a page that needs no server, and pictures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.operate.dashboard.written_run import healed_run

from bloomery.cli import main


def test_a_report_is_one_file_that_loads_nothing_and_holds_the_curves(tmp_path: Path) -> None:
    run = healed_run(tmp_path / "run")
    run.operation("note", text="</script><script>alert(1)</script>", by="<!--")
    file = tmp_path / "run.html"
    assert main(["report", str(run.rundir.path), "--html", str(file)]) == 0
    page = file.read_text()
    assert not re.search(r'(src|href)="(?!#|data:)', page) and page.count("<script>alert") == 0
    assert "default-src 'none'" in page and "unsafe" not in page.partition("</head>")[0]
    data = re.search(r'<script type="application/json" id="recorded">(.*?)</script>', page, re.S)
    assert data is not None
    recorded = json.loads(data[1])
    curves = {curve["name"]: curve for curve in recorded["curves"][0]["step"]}
    assert curves["loss"]["x"] == list(range(1, 92)) and curves["loss!"]["y"][-1] == 9.5
    assert recorded["runs"][0]["step"] == 91
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


def test_what_cannot_be_drawn_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(healed_run(tmp_path / "run").rundir.path)
    assert main(["plot", run, "--columns", "los"]) == 2
    assert "There are" in capsys.readouterr().err
    assert main(["plot", str(tmp_path / "nothing")]) == 1
    assert main(["plot", run, "--output", str(tmp_path / "no" / "such.png")]) == 1
