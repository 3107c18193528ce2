"""Commands whose standard streams are closed, full, or of a locale that lacks characters."""

from __future__ import annotations

import errno
import io
import os
import sys

import pytest

from bloomery.cli import main
from bloomery.cli.standard_output import open_streams
from bloomery.cli.train import Screen


class Full(io.TextIOWrapper):
    """A stream on a full disk, which keeps nothing in a buffer."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8")
        self.refused = 0

    def write(self, text: str) -> int:
        self.refused += 1
        raise OSError(errno.ENOSPC, "No space left on device")

    def fileno(self) -> int:
        raise OSError("it has no descriptor")


def test_a_command_whose_output_cannot_be_written_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout", Full())
    assert main(["config", "show", "demo", "--json"]) == 1
    assert "cannot be written: No space left on device\n  Free space" in capsys.readouterr().err


def test_what_a_training_says_never_ends_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = Full()
    monkeypatch.setattr("sys.stdout", full)
    for screen in (Screen("short"), Screen("json")):
        screen.say("step 1 of 2")
        screen.say("step 2 of 2")
    assert full.refused == 2, "each screen asked once"
    said = capsys.readouterr().err
    assert said.count("no longer shown (No space left on device)") == 2 and "bloomery status" in said


def test_a_character_that_the_locale_lacks_is_a_question_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(printed, encoding="latin-1"))
    open_streams()
    print("é × ─", flush=True)
    assert printed.getvalue() == "é × ?\n".encode("latin-1")


def test_closed_streams_are_opened_before_a_file_could_take_their_numbers() -> None:
    """In a child process, which is forked because the descriptors of a test are pytest's."""
    child = os.fork()
    if child == 0:
        os.closerange(0, 3)
        sys.stdout = sys.stderr = None
        status = 2
        try:
            open_streams()
            print("into nowhere")
            first_file = os.open("/dev/null", os.O_RDONLY)
            status = 0 if first_file > 2 and os.get_inheritable(1) and os.get_inheritable(2) else 1
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
