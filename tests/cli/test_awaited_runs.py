"""`bloomery sync --beside` says what it waits for, and refuses what never comes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.in_process import status_of

from bloomery.cli import sync
from bloomery.events.run_directory import RunDirectory


@pytest.fixture
def place(tmp_path: Path) -> str:
    return (tmp_path / "place").as_uri()


def test_a_run_that_has_not_begun_is_named(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sync, "_repeat", lambda *given: 0)
    run = tmp_path / "no-such-directory" / "run"
    assert status_of("sync", str(run), place, "--beside") == 0
    assert capsys.readouterr().out == f"waits until a run begins in {run}\n"
    assert status_of("sync", str(run), place, "--beside", "--json") == 0
    said = capsys.readouterr()
    assert said.out == "" and said.err == f"waits until a run begins in {run}\n"
    assert not run.parent.exists()
    begun = RunDirectory(tmp_path / "begun").create()
    begun.recipe.write_text(json.dumps({}))
    assert status_of("sync", str(begun.path), place, "--beside") == 0
    assert capsys.readouterr().out == ""


def test_a_file_is_refused_and_so_is_a_single_look_that_waits(
    tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.toml"
    file.touch()
    assert status_of("sync", str(file), place, "--beside") == 1
    assert f"{file} is no directory" in capsys.readouterr().err
    assert status_of("sync", str(tmp_path / "run"), place, "--beside", "--once") == 2
    assert "--beside" in capsys.readouterr().err
