"""Commands in this process, beside those of `commands` in processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.commands import Said

from bloomery.cli import main


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Said]:
    """Runs a command in this process, which has imported torch already: the same code, seconds sooner."""
    monkeypatch.setenv("BLOOMERY_ENVIRONMENT", "1")

    def run(*arguments: str | Path) -> Said:
        capfd.readouterr()
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as ended:  # argparse, where the words themselves are wrong
            status = int(ended.code or 0)
        out, err = capfd.readouterr()
        return Said(status=status, out=out, err=err)

    return run
