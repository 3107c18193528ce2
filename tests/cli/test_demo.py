"""The demo keeps to its time on a machine that becomes slower than it was measured at the start."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.guard.reports import report

from bloomery.cli import demo
from bloomery.cli.demo_steps import TOKEN_UNIT, Fitted, refitted
from bloomery.config.load import load_recipe
from bloomery.errors import TrainingFailed
from bloomery.events.journal import Journal
from bloomery.events.run_directory import RunDirectory

TOKENS = 100 * TOKEN_UNIT
# A shell starts what it runs in the background with SIGINT ignored, which children inherit.
WAITS = (
    "import signal, time; signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
    "print('ready', flush=True); time.sleep(600)"
)


@pytest.fixture
def rundir(tmp_path: Path) -> RunDirectory:
    """A run that made twenty steps of 2,048 tokens, a hundred tokens a second."""
    rundir = RunDirectory(tmp_path / "run").create()
    with Journal(rundir.journal()) as journal:
        for step in range(1, 21):
            reported = report(step).to_json() | {"consumed_tokens": step * 2048, "tokens_per_s": 100.0}
            journal.write("step", incarnation=1, **reported)
    return rundir


def test_a_run_is_shortened_to_what_fits_into_the_time_that_is_left(rundir: RunDirectory) -> None:
    loaded = load_recipe("demo-small", [f"train.tokens={TOKENS}"])
    fitted = Fitted(loaded=loaded, name="demo-small", overrides=[f"train.tokens={TOKENS}"], summary="")
    done = 20 * 2048
    enough_s = (TOKENS - done) / 100
    assert refitted(fitted, rundir, left_s=enough_s) is fitted
    shorter = refitted(fitted, rundir, left_s=enough_s / 2)
    assert 0 <= done + 100 * enough_s / 2 - shorter.tokens < TOKEN_UNIT
    assert shorter.overrides == [f"train.tokens={shorter.tokens}"]
    assert done < refitted(fitted, rundir, left_s=0.0).tokens <= done + TOKEN_UNIT


def test_a_training_that_takes_too_long_is_asked_to_save_and_stop(capsys: pytest.CaptureFixture[str]) -> None:
    printer = demo._StepPrinter(quiet=False)
    with subprocess.Popen(
        [sys.executable, "-c", WAITS], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as slow:
        assert slow.stdout is not None and slow.stdout.readline()
        demo._wait(slow, printer, ends=time.monotonic())
        assert slow.returncode == -signal.SIGINT
    assert "goes on with what it has" in capsys.readouterr().out
    with (
        subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"]) as failed,
        pytest.raises(TrainingFailed),
    ):
        demo._wait(failed, printer, ends=time.monotonic() + 600)
