"""The thread that writes an agent's records to the coordinator, one after the other."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

import pytest

from bloomery.agent import agent_context
from bloomery.agent.agent_context import CoordinatorWriter
from bloomery.errors import CoordinatorAway, CoordinatorError, ThreadEnded

DEADLINE_S = 60.0


class Writing:
    """A writer whose first job holds it until `release`, and what it wrote, in order."""

    def __init__(self) -> None:
        self.written, self.away = list[str](), set[str]()
        self.failures, self.wakes = list[CoordinatorError](), queue.SimpleQueue[None]()
        self._begun, self._released = threading.Event(), threading.Event()
        self.writer = CoordinatorWriter(wake=lambda: self.wakes.put(None), failed=self.failures.append)
        self.writer.write("first", self._hold)
        assert self._begun.wait(DEADLINE_S)

    def write(self, name: str, what: str = "", **how: bool) -> None:
        self.writer.write(name, lambda: self._write(what or name), **how)

    def release(self) -> list[str]:
        """Let the writer run, and return what it wrote until it had nothing more to do."""
        self._released.set()
        self.writer.close(within_s=DEADLINE_S)
        return self.written

    def _hold(self) -> None:
        self._begun.set()
        self._released.wait(DEADLINE_S)

    def _write(self, what: str) -> None:
        if what in self.away:
            self.away.remove(what)
            raise CoordinatorAway("nobody answers")
        self.written.append(what)


@pytest.fixture
def writing() -> Iterator[Writing]:
    made = Writing()
    yield made
    made.release()


def test_jobs_run_in_order_but_for_the_one_that_is_to_be_first_and_only_the_newest_of_a_name(
    writing: Writing,
) -> None:
    for name in ("ready", "done", "rates"):
        writing.write(name)
    writing.write("ready", "ready again")
    writing.write("withdrawal", first=True)
    assert writing.release() == ["withdrawal", "done", "rates", "ready again"]


def test_a_job_that_waits_or_runs_is_known_by_its_name_and_only_one_that_waits_can_be_dropped(
    writing: Writing,
) -> None:
    writer = writing.writer
    for name in ("ready", "done"):
        writing.write(name)
    assert [writer.is_at(name) for name in ("first", "ready", "done", "rates")] == [True, True, True, False]
    for name in ("first", "ready"):
        writer.forget(name)
    assert [writer.is_at(name) for name in ("first", "ready", "done")] == [True, False, True]
    assert writing.release() == ["done"]
    assert not any(writer.is_at(name) for name in ("first", "ready", "done"))


def test_each_job_wakes_the_agent_once_it_is_over(writing: Writing) -> None:
    writing.write("ready")
    assert writing.wakes.empty()
    writing.release()
    assert writing.wakes.qsize() == 2


def outcome_while_away(writing: Writing, monkeypatch: pytest.MonkeyPatch, **how: bool) -> list[str]:
    """What is written by two jobs of which the first finds no coordinator at first."""
    paused = queue.SimpleQueue[None]()
    monkeypatch.setattr(writing.writer, "_changed_pause", lambda: paused.put(None))
    writing.away.add("ready")
    writing.write("ready", **how)
    writing.write("done")
    writing._released.set()
    wakes = 0
    while "done" not in writing.written:
        writing.wakes.get(timeout=DEADLINE_S)
        wakes += 1
    assert paused.qsize() == 1
    written = writing.release()
    assert wakes + writing.wakes.qsize() == 2 + len(written), "the vain one wakes too"
    return written


def test_what_the_coordinator_did_not_hear_is_written_after_a_pause_and_before_all_else(
    writing: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert outcome_while_away(writing, monkeypatch) == ["ready", "done"]


def test_what_was_replaced_while_the_coordinator_was_away_is_not_written(
    writing: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing.writer, "_changed_pause", lambda: None)

    tries: list[None] = []

    def replaced() -> None:
        tries.append(None)
        if len(tries) == 1:
            writing.write("ready", "ready again")
            raise CoordinatorAway("nobody answers")

    writing.writer.write("ready", replaced)
    writing._released.set()
    while "ready again" not in writing.written:
        writing.wakes.get(timeout=DEADLINE_S)
    assert len(tries) == 1


def test_what_is_tried_once_alone_is_not_written_again(
    writing: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert outcome_while_away(writing, monkeypatch, repeats=False) == ["done"]


def test_a_pause_while_the_coordinator_is_away_is_not_ended_by_the_jobs_that_wait(
    writing: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_context, "_PAUSE_S", 0.02)
    writing.write("ready")
    began_s = time.monotonic()
    writing.writer._changed_pause()
    assert time.monotonic() - began_s >= 0.02


def test_an_error_that_trying_again_does_not_mend_is_told_and_the_next_job_runs(writing: Writing) -> None:
    def refused() -> None:
        raise CoordinatorError("no such right")

    writing.writer.write("ready", refused)
    writing.write("done")
    assert writing.release() == ["done"]
    assert [failure.message for failure in writing.failures] == ["no such right"]


def test_an_error_that_nobody_foresaw_ends_the_thread_and_is_told(writing: Writing) -> None:
    def broken() -> None:
        raise ZeroDivisionError("odd")

    writing.writer.write("ready", broken)
    writing.write("done")
    assert writing.release() == []
    assert [type(failure) for failure in writing.failures] == [ThreadEnded]


def test_a_writer_that_closes_while_the_coordinator_is_away_does_not_try_for_ever() -> None:
    tries = queue.SimpleQueue[None]()

    def away() -> None:
        tries.put(None)
        raise CoordinatorAway("nobody answers")

    writer = CoordinatorWriter(wake=lambda: None, failed=pytest.fail)
    writer.write("ready", away)
    tries.get(timeout=DEADLINE_S)
    writer.close(within_s=DEADLINE_S)
    assert not writer._thread.is_alive()
