"""How long an agent waits for its next event, and what it does about some of them."""

from __future__ import annotations

import queue
import time
from types import SimpleNamespace

import pytest

from bloomery.agent.agent import Agent
from bloomery.agent.rank_server import RankGone
from bloomery.agent.rank_state import LocalRanks, RankProgress
from bloomery.agent.timeouts import timeouts_of
from bloomery.config.elastic import ElasticSection
from bloomery.coordination.decide import NEEDS_SOMEBODY, RequestFlush, Wait
from bloomery.coordination.run_view import SnapshotListener
from bloomery.protocol.rank_messages import StopTraining


class Mailbox:
    """Holds some events; notes how long it was waited for the first one."""

    def __init__(self, *events: str) -> None:
        self.events, self.waits = list(events), list[float]()

    def get(self, timeout: float) -> str:
        self.waits.append(timeout)
        return self.get_nowait()

    def get_nowait(self) -> str:
        if not self.events:
            raise queue.Empty
        return self.events.pop(0)


@pytest.mark.parametrize(("ahead_s", "waits_s"), [(50.0, 50.0), (0.0, 0.0), (-50.0, 0.0)])
def test_it_waits_until_the_moment_that_it_was_given_and_takes_all_that_came(
    ahead_s: float, waits_s: float
) -> None:
    mailbox, taken = Mailbox("one", "two", "three"), list[str]()
    Agent._take_events(
        SimpleNamespace(_mailbox=mailbox, _take=taken.append),
        time.monotonic() + ahead_s,
    )
    assert taken == ["one", "two", "three"]
    (waited,) = mailbox.waits
    assert waited == pytest.approx(waits_s, abs=25.0) and waited <= waits_s


class ViewOfManyWriters:
    """A view in which another key changes each time that one looks, and which tells how long was paused."""

    def __init__(self, changes: int) -> None:
        self.version, self.left, self.news = 0, changes, None

    def wait(self, since: int, *, timeout_s: float) -> int:
        self.left -= 1
        if not self.left:
            self.news.close()
        self.version += 1
        return self.version


def test_looks_at_a_run_in_which_much_happens_take_a_part_of_a_core_alone(monkeypatch) -> None:
    view, paused, woken = ViewOfManyWriters(50), list[float](), list[int]()
    view.news = news = SnapshotListener(view, wake=lambda: woken.append(view.version), failed=pytest.fail)
    monkeypatch.setattr(news._ended, "wait", paused.append)
    news.note_cost(0.02)
    news._bring(0)
    assert len(woken) == 50
    assert paused == [pytest.approx(0.18)] * 50  # a look of 20 ms, then 180 ms without one


def test_whom_a_peer_waits_for_is_logged_now_and_then_and_at_once_what_only_somebody_can_end(caplog) -> None:
    caplog.set_level("INFO")
    agent = SimpleNamespace(_logged_s=1000.0, _needs="")

    def logged(decision: object, now: float) -> list[str]:
        caplog.clear()
        Agent._log_wait(agent, decision, now)
        return caplog.messages

    waits, needs = Wait(why="others train", whom=("b", "c")), Wait(why=NEEDS_SOMEBODY[0])
    assert logged(waits, 1000.1) == []
    assert logged(RequestFlush(round=3), 2000.0) == []
    assert logged(waits, 2000.1) == [], "what was looked at just now was no wait"
    assert logged(waits, 3000.0) == ["waiting: others train (b, c)"]
    assert logged(waits, 3000.1) == []
    assert logged(needs, 3000.2) == [f"waiting: {NEEDS_SOMEBODY[0]}"]
    assert logged(needs, 3000.3) == []
    assert logged(waits, 3000.4) == [] == logged(RequestFlush(round=3), 3000.5)
    assert logged(needs, 3000.6) == [f"waiting: {NEEDS_SOMEBODY[0]}"]


@pytest.mark.parametrize("is_finished", [False, True])
def test_a_rank_that_is_gone_ends_its_peer_and_that_is_a_failure_unless_the_run_is_over(
    is_finished: bool,
) -> None:
    ended, gone = list[tuple[str, bool]](), RankGone(rank=1, why="it was killed")
    agent = SimpleNamespace(
        _ending=None,
        _local=LocalRanks(RankProgress(timeouts_of(ElasticSection()))),
        _registration=SimpleNamespace(unlist=lambda: ended.append(("unlisted", False))),
        _is_finished=lambda: is_finished,
        _end=lambda why, failed: ended.append((why, failed)),
    )
    Agent._take(agent, gone)
    reason = ("the samples are done", False) if is_finished else ("rank 1 is gone: it was killed", True)
    assert ended == [("unlisted", False), reason] and agent._local.gone == {1: "it was killed"}
    agent._ending = reason
    Agent._take(agent, gone)
    assert len(ended) == 2, "a peer that ends already has no other reason"


def test_a_peer_that_finds_another_run_under_its_name_ends_and_its_ranks_save() -> None:
    ended, unlisted = list[tuple[str, bool, bool]](), list[str]()

    def end(why: str, *, failed: bool, saves: bool = False) -> None:
        ended.append((why, failed, saves))

    agent = SimpleNamespace(
        _ending=None,
        _local=SimpleNamespace(are_here=True),
        _check_progress=lambda snapshot, now: None,
        _take_holding=lambda: None,
        _holding=None,
        _recovery=SimpleNamespace(contradiction=lambda snapshot, holding: "another run"),
        _registration=SimpleNamespace(unlist=lambda: unlisted.append("unlisted")),
        _end=end,
    )
    Agent._step(agent, SimpleNamespace(), 0.0)
    assert ended == [("another run", True, True)] and unlisted == ["unlisted"]


@pytest.mark.parametrize(("failed", "saves", "told"), [(True, True, False), (True, False, True)])
def test_ranks_whose_state_is_right_are_not_told_that_they_failed(
    failed: bool, saves: bool, told: bool
) -> None:
    sent = list[StopTraining]()
    agent = SimpleNamespace(
        _ending=None,
        _round_driver=SimpleNamespace(stop=lambda: None),
        _rank_server=SimpleNamespace(send=sent.append),
    )
    Agent._end(agent, "it ends", failed=failed, saves=saves)
    assert [message.failed for message in sent] == [told] and agent._ending.failed is failed


def test_connections_of_revoked_certificates_are_closed_though_the_members_are_the_same() -> None:
    revoked = list[frozenset[str]]()
    agent = SimpleNamespace(_connection_manager=SimpleNamespace(revoke=revoked.append), _members={})
    Agent._note_members(agent, SimpleNamespace(revoked=frozenset({"77"}), members={}))
    assert revoked == [{"77"}]
