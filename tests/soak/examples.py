"""The examples and the first page of the documentation: every command of their blocks runs as it is written.

The time from nothing to a model of one's own text of 1 MB is measured, and how much of it is no training.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.documented_commands import ROOT, DocumentedCommand, documented_commands

from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory

pytestmark = pytest.mark.slow
PLACES = ("examples/README.md", "docs/index.md")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what a clone has, and a text of one's own."""
    clone = tmp_path_factory.mktemp("clone")
    for name in ("docs", "examples", "src"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(ROOT / "README.md", clone)
    own_text(clone / "notes.txt")
    return clone


def own_text(file: Path) -> None:
    """Write a text of 1 MB, as real as a machine has."""
    library = sorted(Path(os.__file__).parent.glob("*.py"))
    text = "\n\n".join(source.read_text(errors="replace") for source in library)
    file.write_text(text[:1_000_000])


def bloomery(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as a user does."""
    command = [sys.executable, "-m", "bloomery", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=3000, check=False)


@pytest.mark.parametrize(
    "command",
    [shown for shown in documented_commands() if shown.whole and shown.place in PLACES],
    ids=lambda shown: f"{shown.place}: {shown.text[:60]}",
)
def test_a_command_runs_as_it_is_written(command: DocumentedCommand, clone: Path) -> None:
    ended = bloomery(*command.words, cwd=clone)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "Traceback" not in ended.stdout + ended.stderr


def test_two_commands_make_a_model_of_ones_own_megabyte(tmp_path: Path) -> None:
    own_text(tmp_path / "notes.txt")
    page = (ROOT / "docs/index.md").read_text()
    first, second = page.split("```\n")[1].strip().splitlines()
    began = time.time()
    for line in (first, second):
        ended = bloomery(*shlex.split(line)[1:], cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
    whole_s = time.time() - began
    steps = [
        event
        for event in read_journal(RunDirectory(tmp_path / "runs/notes").journal())
        if event["event"] == "step"
    ]
    training_s = steps[-1]["time"] - steps[0]["time"] + steps[0]["seconds"]
    print(json.dumps({"minutes": whole_s / 60, "minutes_not_training": (whole_s - training_s) / 60}))
    assert len(steps) > 100 and ended.stdout.strip()
