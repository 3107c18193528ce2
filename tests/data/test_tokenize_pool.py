"""The workers that tokenise: none is left when their work ends."""

from __future__ import annotations

import signal
import subprocess

import pytest

from bloomery.data import tokenize_pool


@pytest.mark.parametrize(("trap", "by"), [("", signal.SIGTERM), ("trap '' TERM; ", signal.SIGKILL)])
def test_a_worker_is_gone_when_it_was_ended_whether_it_heeds_that_or_not(
    monkeypatch: pytest.MonkeyPatch, trap: str, by: signal.Signals
) -> None:
    if by == signal.SIGKILL:
        monkeypatch.setattr(tokenize_pool, "_ENDING_S", 0.1)
    worker = subprocess.Popen(
        ["sh", "-c", f"{trap}echo ready; exec sleep 600"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )
    try:
        assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
        tokenize_pool._end(worker)
        assert worker.returncode == -by
    finally:
        worker.kill()
