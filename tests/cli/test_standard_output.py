"""Commands whose standard streams are closed, full, or of a locale that lacks characters."""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path

import pytest

from bloomery.cli import main
from bloomery.cli.standard_output import LastingOutput, _lasting, discard_output, open_streams, tell
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
    printed = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(printed, encoding="ascii", errors="xmlcharrefreplace"))
    open_streams()
    print("×", flush=True)
    assert printed.getvalue() == b"&#215;\n", "what the environment chose is kept"


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
            numbers = [sys.stdout.fileno(), sys.stderr.fileno()]
            is_inherited = all(os.get_inheritable(number) for number in range(3))
            status = 0 if first_file > 2 and numbers == [1, 2] and is_inherited else 1
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_line_that_standard_error_does_not_take_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    full, closed = Full(), io.StringIO()
    closed.close()
    for stream in (full, closed):
        monkeypatch.setattr("sys.stderr", stream)
        tell("a line")
    assert full.refused == 1


def test_an_output_that_is_closed_is_told_once_by_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    closed, told = io.StringIO(), list[str]()
    closed.close()
    monkeypatch.setattr("sys.stdout", closed)
    output = LastingOutput(told.append)
    for line in ("one\n", "two\n"):
        output.write(line)
    assert told == ["I/O operation on closed file"]


def test_what_is_printed_after_a_refusal_goes_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "output").open("w") as output:
        monkeypatch.setattr("sys.stdout", output)
        output.write("it waits in a buffer")
        discard_output()
        print("later", flush=True)
    assert (tmp_path / "output").read_text() == ""
    monkeypatch.setattr("sys.stdout", output)
    discard_output()


def test_an_output_that_ends_nothing_writes_as_the_one_before_it() -> None:
    for line_buffering in (True, False):
        read, write = os.pipe()
        with open(write, "wb", buffering=0) as file:  # noqa: PTH123 — a descriptor
            before = io.TextIOWrapper(
                io.BufferedWriter(file), "latin-1", "backslashreplace", line_buffering=line_buffering
            )
            stream = _lasting(before)
            assert (stream.encoding, stream.errors) == ("latin-1", "backslashreplace")
            assert (stream.line_buffering, stream.write_through) == (line_buffering, False)
            stream.write("é\n")
            os.set_blocking(read, False)
            if line_buffering:
                assert os.read(read, 9) == b"\xe9\n", "at once"
            else:
                with pytest.raises(BlockingIOError):
                    os.read(read, 9)
            stream.detach().detach()
            before.detach().detach()
        os.close(read)
