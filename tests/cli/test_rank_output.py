"""What becomes of ranks' lines where they cannot be kept or shown: the ranks go on."""

from __future__ import annotations

import errno
import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

LINES = 20_000
"""Far more than a pipe holds: a rank that nobody reads would never end."""
TALKER = f"import sys\nfor number in range({LINES}): print('line', number)"
LAUNCHER = f"""
import subprocess, sys
from pathlib import Path
from bloomery.cli.rank_output import RankOutput
output = RankOutput(lambda rank: Path(sys.argv[1]))
rank = subprocess.Popen([sys.executable, "-c", {TALKER!r}], stdout=subprocess.PIPE)
output.follow(3, rank)
sys.exit(rank.wait() or output.finish())
"""


def launch(log: Path, *, stdout: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(log)], stdout=stdout, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("log", ["/dev/full", "/dev/null/logs/3.log"])
def test_a_rank_goes_on_and_is_shown_where_its_log_takes_nothing(log: str) -> None:
    launcher = launch(Path(log), stdout=subprocess.PIPE)
    out, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 0
    assert out.splitlines() == [f"[rank 3] line {number}" for number in range(LINES)]
    assert err.count("cannot be written") == 1 and log in err


def test_a_rank_goes_on_and_is_kept_where_nobody_reads_what_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "host-3.log"
    launcher = launch(log, stdout=subprocess.PIPE)
    assert launcher.stdout is not None and launcher.stdout.readline() == "[rank 3] line 0\n"
    launcher.stdout.close()
    assert launcher.stderr is not None
    err = launcher.stderr.read()
    assert launcher.wait(timeout=120) == 0
    assert log.read_text().splitlines() == [f"line {number}" for number in range(LINES)]
    assert err.count("no longer shown (Broken pipe)") == 1 and "Traceback" not in err
    launcher.stderr.close()


def test_a_log_says_how_many_lines_the_disk_did_not_take(tmp_path: Path) -> None:
    from bloomery.cli.rank_output import _RankLog

    path = tmp_path / "logs" / "3.log"
    path.parent.write_text("a file where a directory should be")
    kept = _RankLog(path)
    kept.write(b"one\n")
    kept.write(b"two\n")
    path.parent.unlink()
    kept.write(b"three\n")
    kept.write(b"four\n")
    kept.close()
    assert path.read_text() == "[2 lines are missing here]\nthree\nfour\n"


def test_a_log_goes_on_where_one_of_an_earlier_attempt_ended(tmp_path: Path) -> None:
    from bloomery.cli.rank_output import _RankLog

    path = tmp_path / "3.log"
    path.write_text("of the first attempt\n")
    kept = _RankLog(path)
    kept.write(b"of the second\n")
    kept.close()
    assert path.read_text() == "of the first attempt\nof the second\n"


def test_a_line_is_shown_at_once_and_a_screen_that_refused_one_is_asked_for_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from bloomery.cli.rank_output import _lost
    from bloomery.cli.standard_output import LastingOutput

    class Terminal(io.StringIO):
        shown, refused = "", 0

        def flush(self) -> None:
            if self.getvalue() != "one\n":
                self.refused += 1
                raise OSError(errno.EPIPE, "Broken pipe")
            self.shown = self.getvalue()

        def fileno(self) -> int:
            return place.fileno()

    with (tmp_path / "terminal").open("wb") as place:
        terminal, screen = Terminal(), LastingOutput(_lost)
        monkeypatch.setattr("sys.stdout", terminal)
        screen.write("one\n")
        assert terminal.shown == "one\n"
        for line in ("two\n", "three\n"):
            screen.write(line)
    assert terminal.refused == 1 and "three" not in terminal.getvalue()
    assert capfd.readouterr().err.count("no longer shown (Broken pipe)") == 1


def test_a_rank_that_says_nothing_has_a_log_too(tmp_path: Path) -> None:
    from bloomery.cli.rank_output import RankOutput

    output = RankOutput(lambda rank: tmp_path / "logs" / f"{rank}.log")
    with subprocess.Popen(["true"], stdout=subprocess.PIPE) as rank:
        output.follow(3, rank)
        output.finish()
    assert (tmp_path / "logs" / "3.log").read_bytes() == b""


def test_each_time_that_a_disk_refuses_lines_is_told_once_and_no_line_that_was_not_there_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bloomery.cli import rank_output

    def refused(file: object, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    kept, path = rank_output._RankLog(tmp_path / "3.log"), tmp_path / "3.log"
    for line in (b"", b"one\n"):
        with monkeypatch.context() as full:
            full.setattr(rank_output, "_write", refused)
            kept.write(b"")
            kept.write(b"")
        kept.write(line)
    kept.close()
    assert path.read_bytes() == b"one\n"
    assert capsys.readouterr().err.count("cannot be written (No space left on device)") == 2


def test_a_line_that_the_system_takes_in_parts_is_kept_whole() -> None:
    from bloomery.cli.rank_output import _write

    class InParts(io.BytesIO):
        def write(self, content: bytes) -> int:
            return super().write(content[:2])

    file = InParts()
    _write(file, b"a line\n")
    assert file.getvalue() == b"a line\n"


def test_lines_that_a_log_does_not_take_are_passed_on() -> None:
    from bloomery.cli.rank_output import RankOutput

    unlogged: list[tuple[int, str]] = []
    output = RankOutput(lambda rank: Path("/dev/full"), on_unlogged=lambda *line: unlogged.append(line))
    with subprocess.Popen(["printf", "no space\\nleft\\n"], stdout=subprocess.PIPE) as rank:
        output.follow(3, rank)
        output.finish()
    assert unlogged == [(3, "no space\n"), (3, "left\n")]


def test_bytes_that_are_no_text_are_kept_as_they_are_and_shown_with_what_follows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from bloomery.cli.rank_output import RankOutput

    output = RankOutput(lambda rank: tmp_path / "3.log")
    with subprocess.Popen(["printf", r"\377\nafter\n"], stdout=subprocess.PIPE) as rank:
        output.follow(3, rank)
        output.finish()
    assert (tmp_path / "3.log").read_bytes() == b"\xff\nafter\n"
    assert capsys.readouterr().out == "[rank 3] \ufffd\n[rank 3] after\n"


def test_a_rank_goes_on_where_what_it_prints_cannot_be_shown_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from bloomery.cli.rank_output import RankOutput

    closed = io.StringIO()
    closed.close()
    for name, screen in (("ascii", io.TextIOWrapper(io.BytesIO(), "ascii")), ("closed", closed)):
        monkeypatch.setattr("sys.stdout", screen)
        output = RankOutput(lambda rank, name=name: tmp_path / name)
        with subprocess.Popen(["printf", r"caf\303\251\nafter\n"], stdout=subprocess.PIPE) as rank:
            output.follow(3, rank)
            output.finish()
        assert (tmp_path / name).read_text() == "café\nafter\n"
    told = capfd.readouterr().err
    assert told.count("no longer shown") == 2 and "Traceback" not in told


def test_pipes_that_stay_open_are_waited_for_once_and_not_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bloomery.cli import rank_output

    clock, waits_s = [100.0], list[float]()

    def join(timeout_s: float) -> None:
        waits_s.append(timeout_s)
        clock[0] += timeout_s

    monkeypatch.setattr(rank_output, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    output = rank_output.RankOutput(lambda rank: tmp_path / "log")
    output._threads = [SimpleNamespace(join=join)] * 3  # type: ignore[list-item]
    output.finish()
    assert waits_s == [10.0, 0.0, 0.0]


def test_a_line_without_an_end_is_kept_in_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from bloomery.cli.rank_output import RankOutput

    class Pipe(io.BytesIO):
        longest = 0

        def readline(self, size: int | None = -1, /) -> bytes:
            line = super().readline(size)
            self.longest = max(self.longest, len(line))
            return line

        def __next__(self) -> bytes:
            self.longest = len(self.getvalue())
            return super().__next__()

    pipe, output = Pipe(b"10%\r" * 100_000 + b"done\n"), RankOutput(lambda rank: tmp_path / "3.log")
    output.follow(3, SimpleNamespace(stdout=pipe))  # type: ignore[arg-type]
    output.finish()
    assert (tmp_path / "3.log").read_bytes() == b"10%\r" * 100_000 + b"done\n"
    assert pipe.longest < 100_000
