"""One run that cannot be read keeps `bloomery watch --once` from no other run."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.cli import watch
from bloomery.errors import StorageError


def watcher(path: str, broken: Exception | None = None) -> Any:
    def check() -> None:
        if broken is not None:
            raise broken

    return SimpleNamespace(check=check, incidents={}, state="running", rundir=SimpleNamespace(path=path))


@pytest.mark.parametrize(
    "broken", [StorageError("It is gone.", remedy="Look."), OSError(5, "I/O"), KeyError()]
)
def test_a_run_that_cannot_be_read_is_no_success_and_the_others_are_looked_at(
    broken: Exception, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    watchers = [watcher("runs/a", broken), watcher("runs/b")]
    assert watch._once(watchers, Namespace(json=False, ping=None)) == 1
    assert capsys.readouterr().out == "runs/b: running\n"
    assert [record.getMessage().split()[0].rstrip(":") for record in caplog.records] == ["runs/a"]
