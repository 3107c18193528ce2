"""What becomes of ranks' lines where they cannot be kept or shown: the ranks go on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
