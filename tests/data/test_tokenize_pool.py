"""The workers that tokenise: what they say is heard, and none is left when their work ends."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bloomery.data import tokenize_pool
from bloomery.data.readers import SourceFile
from bloomery.data.tokenize_worker import TextPiece
from bloomery.errors import DataError


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


def test_half_a_message_of_a_killed_worker_is_told_as_its_death(caplog: pytest.LogCaptureFixture) -> None:
    worker = subprocess.Popen(
        ["sh", "-c", """read piece; echo '{"batch": [1, 2]}'; printf '{"ba%0900d' 1; kill -9 $$"""],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )
    piece = TextPiece(number=7, files=(SourceFile(key="a.txt", path=Path("a.txt")),), size_bytes=1)
    waiting, messages = queue.SimpleQueue[TextPiece](), queue.SimpleQueue[dict[str, object]]()
    waiting.put(piece)
    try:
        tokenize_pool._tend(worker, waiting, messages, {})
        assert messages.get_nowait() == {"batch": [1, 2]}
        assert "was killed by signal 9 while it tokenised a.txt" in str(messages.get_nowait())
        (told,) = caplog.messages
        assert "no message: '{\"ba000" in told and len(told) < 300
    finally:
        tokenize_pool._end(worker)


def test_what_a_library_prints_in_a_worker_is_no_message() -> None:
    code = (
        "import os; from bloomery.data.tokenize_worker import output_for_messages;"
        "messages = output_for_messages(); print('a banner', flush=True); os.write(1, b'of C');"
        "print('{}', file=messages, flush=True)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("{}\n", "a banner\nof C")


def test_a_worker_that_computes_without_a_word_is_waited_for_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One document may take any time; this process computes in the place of its worker."""
    silences = iter([0.05, 0.05])

    class Messages:
        def get(self, timeout: float) -> dict[str, int]:
            until = time.process_time() + next(silences, 0.0)
            if time.process_time() >= until:
                return {"done": 3}
            while time.process_time() < until:
                pass
            raise queue.Empty

    files = (SourceFile(key="a", path=Path("long.jsonl")),)
    messages: Any = Messages()
    at_work = {os.getpid(): TextPiece(number=3, files=files, size_bytes=9)}
    assert tokenize_pool._next(messages, at_work, silence_s=0.5) == {"done": 3}
    assert len(caplog.messages) == 2 and f"process {os.getpid()} at long.jsonl" in caplog.text


def test_workers_that_computed_before_and_do_no_more_are_given_up() -> None:
    silences = iter([0.3, 0.0])

    class Messages:
        def get(self, timeout: float) -> dict[str, int]:
            until = time.process_time() + next(silences)  # StopIteration: it would wait for ever
            while time.process_time() < until:
                pass
            raise queue.Empty

    files = (SourceFile(key="a", path=Path("hangs.jsonl")),)
    messages: Any = Messages()
    with pytest.raises(DataError, match=r"at hangs\.jsonl"):
        tokenize_pool._next(
            messages, {os.getpid(): TextPiece(number=3, files=files, size_bytes=9)}, silence_s=0.5
        )
