"""What a peer's agent does at each look at its run, and how its part in the run ends."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.agent.agent_parts import LIMITS, SETTINGS, SHARED, Led, listed, run_at
from tests.protocol import example

from bloomery.agent.admission import fingerprint
from bloomery.agent.agent import PeerOutcome
from bloomery.agent.state_sync import Behind, SyncedState
from bloomery.coordination.decide import Ended, Propose, Wait
from bloomery.coordination.offer_limits import OfferLimits
from bloomery.coordination.snapshot import RunSnapshot
from bloomery.data.position import Position
from bloomery.errors import CoordinatorError
from bloomery.protocol.encoding import decode, encode_settings
from bloomery.protocol.keys import Keys
from bloomery.protocol.rank_messages import (
    Committed,
    CopyState,
    Hello,
    Moving,
    StartRound,
    StateRefused,
)
from bloomery.protocol.records import Commit
from bloomery.transport.connection import Contact


@pytest.fixture
def led(monkeypatch) -> Led:
    return Led(monkeypatch, SETTINGS)


def test_an_agent_is_made_with_the_limits_of_its_peer_and_what_it_remembers(monkeypatch) -> None:
    limits = OfferLimits(tokens_per_sample=8, steps=4, batch=2)
    led = Led(monkeypatch, replace(SETTINGS, rounds=replace(SETTINGS.rounds, limits=limits)))
    made = dict(led.made["membership"])
    put = made.pop("failed")
    assert put == led.agent._mailbox.put
    assert made == {"lease_s": LIMITS.lease_s, "heartbeat_s": LIMITS.heartbeat_s}
    view = {"idle_s": LIMITS.coordinator_silence_s, "remembered": None, "limits": limits}
    assert led.made["view"] == view
    assert led.agent.path == Path("/nowhere/parent")
    led.agent.open()
    assert led.notes == [("view started", {"deadline_s": LIMITS.coordinator_start_s})]


def test_the_parts_of_an_agent_share_its_averages_its_way_to_others_and_its_list_of_relays(
    monkeypatch,
) -> None:
    averages: Any = object()
    relays: list[Contact] = []
    led = Led(monkeypatch, SETTINGS, relays=relays, averages=averages)
    agent: Any = led.agent
    assert agent._round_driver._averages is agent._state_sync._averages is averages
    agent._admission._refuse("refused")
    assert agent._mailbox.get_nowait() == "refused"
    led.begin()
    led.step(RunSnapshot(members={"r": listed("r", relays=True, addresses=("r:1",))}))
    assert relays == [Contact(peer="r", incarnation="r1", addresses=("r:1",))]


def test_nothing_is_done_before_all_ranks_are_here_and_have_said_what_they_hold(led: Led) -> None:
    assert led.step(run_at(0, "d0"), now=10.0) == 11.0
    led.begin(world=2)
    led.hear(1, StateRefused(why="not yet"))
    assert not led.writer.jobs and not led.ranks.sent


def test_a_run_begins_where_the_state_of_its_first_peer_stands(led: Led) -> None:
    led.begin()
    led.step(RunSnapshot(members={"a": listed("a")}))
    ((_, operations),) = led.transactions
    commit = decode(operations[0].value, Commit)
    assert (commit.round, commit.digest, commit.position) == (0, "d0", Position(consumed=40))
    assert led.writer.jobs[-1] == "decision once"


def test_a_peer_is_listed_with_what_its_ranks_hold_once_its_settings_are_written(led: Led) -> None:
    led.begin(world=2, round=0, digest="d0")
    led.step(RunSnapshot(own_highest=6, commit_revision=9))
    assert led.writer.jobs == ["settings", "the list of members"]
    assert led.listing.kept == [(Keys("r").settings("a"), encode_settings(SHARED))]
    assert led.listing.listed == [
        example.member(
            peer="a",
            incarnation="a1",
            addresses=("a:1",),
            serves=("http://a:2",),
            round=0,
            digest="d0",
            ranks=2,
            recipe=fingerprint(SHARED),
            samples=4,
            relays=False,
            epoch=6,
            overtaken=0,
            backed_up=None,
            saves=(0, 3),
            copies=(),
            wants="",
        )
    ]
    led.step(RunSnapshot(own_highest=7, commit_revision=9))
    assert len(led.listing.listed) == 1  # an epoch alone is no news
    led.step(RunSnapshot(own_highest=7, commit_revision=10))
    assert [member.epoch for member in led.listing.listed] == [6, 7]
    assert led.writer.jobs.count("settings") == 1


def test_the_list_names_copies_wishes_overtaking_rounds_relaying_and_backups(monkeypatch) -> None:
    looks: list[RunSnapshot] = []
    backups: Any = SimpleNamespace(round=5, update=looks.append)
    led = Led(monkeypatch, replace(SETTINGS, relays=True), backups=backups)
    led.begin()
    agent: Any = led.agent
    monkeypatch.setattr(agent._copies, "update", lambda snapshot: None)  # nobody wants the copy
    agent._copies.made, agent._state_sync.wants, agent._round_driver.overtaken = ("d0",), "d7", 2
    snapshot = RunSnapshot()
    led.step(snapshot)
    (member,) = led.listing.listed
    assert (member.copies, member.wants, member.overtaken) == (("d0",), "d7", 2)
    assert (member.relays, member.backed_up) == (True, 5) and looks == [snapshot]
    agent._state_sync.is_failing = True  # no round need wait for it
    led.step(snapshot)
    assert led.listing.listed[-1].overtaken == 0
    assert agent._next_moment(Wait(why="x"), 50.0) == pytest.approx(80.001)
    agent._state_sync.wants = "d8"
    assert agent._next_moment(Wait(why="x"), 50.0) == pytest.approx(50.001)  # it is to be listed with it


def test_ranks_that_hold_the_newest_state_are_started_on_the_round_and_those_without_are_not(
    led: Led,
) -> None:
    led.begin(round=3, digest="d3")
    led.step(run_at(3, "d3", consumed=8))
    (told,) = [message for _, message in led.ranks.sent if isinstance(message, StartRound)]
    assert told == StartRound(
        round=4,
        position=Position(consumed=8, holes=(range(8, 24),)),
        live=1,
        samples=(range(8, 24),),
        number=1,
    )
    assert ("go", {"round": 4, "newcomer": False}) in led.events


def test_a_coordinator_that_lost_its_data_changes_nothing_for_the_ranks(led: Led) -> None:
    follows: list[tuple[RunSnapshot, Any, bool]] = []
    agent: Any = led.agent
    agent._recovery.follow = lambda snapshot, holding, is_listed: follows.append(
        (snapshot, holding and holding.digest, is_listed)
    )
    led.begin(round=3, digest="d3")
    lost = run_at(1, "d1", forgotten=True)
    led.step(lost)
    assert not [message for _, message in led.ranks.sent if isinstance(message, StartRound | Committed)]
    assert agent._round_driver.seen == -1
    assert follows == [(lost, "d3", True)]
    led.step(run_at(1, "d1", members={}))
    assert follows[-1][1:] == ("d3", False)


def test_a_peer_is_listed_with_the_state_that_a_commit_gave_its_ranks_since_they_told_of_one(
    led: Led,
) -> None:
    led.begin(round=3, digest="d3")
    led.step(run_at(3, "d3"))
    led.agent._round_driver.held = (4, "d4")
    led.step(run_at(4, "d4"))
    assert [(member.round, member.digest) for member in led.listing.listed] == [(3, "d3"), (4, "d4")]


def test_a_process_decides_nothing_while_the_former_one_of_its_peer_is_listed(led: Led) -> None:
    led.begin()
    led.step(RunSnapshot(members={"a": listed("a", incarnation="a0")}))
    assert led.transactions == [] and led.writer.jobs == ["settings", "the list of members"]


def test_ranks_are_told_to_copy_their_state_for_a_newcomer_that_wants_it(led: Led) -> None:
    led.begin(round=3, digest="d3")
    holder = listed("a", digest="d3", serves=("http://a:2",))
    led.step(run_at(3, "d3", members={"a": holder, "n": listed("n", life=2, digest="own", wants="d3")}))
    copies = [message for _, message in led.ranks.sent if isinstance(message, CopyState)]
    assert copies == [CopyState(keep=(), makes="d3")]


class Sync:
    """Stands for what fetches states: gives what it is told to, and notes what it is asked for."""

    def __init__(self) -> None:
        self.wants, self.needs_no_waiting, self.is_fetching = "", False, False
        self.gives: SyncedState | None = None
        self.asked: list[Behind | None] = []
        self.refused: list[SyncedState] = []
        self.stops = 0

    def fetch(self, snapshot: RunSnapshot, *, now: float, behind: Behind | None = None) -> SyncedState | None:
        self.asked.append(behind)
        return self.gives

    def refuse(self, synced: SyncedState) -> None:
        self.refused.append(synced)

    def stop(self) -> None:
        self.stops += 1

    def next_moment(self) -> float | None:
        return None


def behind_by_two(led: Led) -> tuple[Sync, RunSnapshot, SyncedState]:
    """Its ranks hold round 3, the run stands at round 5, and two rounds went by meanwhile."""
    sync = Sync()
    agent: Any = led.agent
    agent._state_sync = sync
    led.begin(round=3, digest="d3")
    led.step(run_at(3, "d3"))
    led.ranks.sent.clear()
    led.events.clear()
    newest = run_at(5, "d5")
    fetched = SyncedState(
        commit=newest.commit or example.commit(), directory=Path("/got"), sources=("b", "c"), seconds=2.5
    )
    return sync, newest, fetched


def test_ranks_that_are_behind_are_given_what_was_fetched_and_then_count_as_at_work(led: Led) -> None:
    sync, newest, fetched = behind_by_two(led)
    for rank in range(2):
        led.hear(rank, Moving(activity="wait", step=3))
    led.agent._local.progress.satisfied()
    led.step(newest)
    assert sync.asked == [Behind(round=3, digest="d3", overtaken=2, ranks=2)]
    assert led.agent._local.progress.next_deadline() is None
    handed: list[tuple[Any, int, str]] = []
    sync.gives = SimpleNamespace(  # type: ignore[assignment]
        commit=fetched.commit,
        sources=fetched.sources,
        seconds=2.5,
        is_average=False,
        hand_over=lambda ranks, *, count, why: handed.append((ranks, count, why)),
    )
    given_s = time.monotonic()
    led.step(newest, now=given_s)
    assert handed == [(led.ranks, 2, "this peer held round 3, the run stands at round 5")]
    assert ("replaced", {"round": 5, "held": 3, "seconds": 2.5}) in led.events
    assert led.agent._local.progress.next_deadline() == given_s + LIMITS.step_s
    led.step(newest)
    assert len(sync.asked) == 2, "nothing is fetched while the ranks load"
    led.hold(round=5, digest="d5")
    sync.stops = 0
    loaded_s = time.monotonic()
    led.step(newest)
    assert led.listing.listed[-1].digest == "d5" and sync.stops == 1
    deadline_s = led.agent._local.progress.next_deadline()
    assert deadline_s is not None and deadline_s >= loaded_s + LIMITS.step_s, "the round is new work"
    assert led.agent._replacing is None


def test_no_link_is_measured_until_the_ranks_hold_a_state_nor_while_one_is_fetched(led: Led) -> None:
    busy: list[bool] = []
    agent: Any = led.agent
    agent._bandwidths = SimpleNamespace(update=lambda snapshot, *, is_busy, now: busy.append(is_busy))
    sync, newest, _ = behind_by_two(led)
    sync.is_fetching = True
    led.step(newest)
    sync.is_fetching = False
    led.step(newest)
    agent._holding, agent._take_holding = None, lambda: None
    led.step(newest)
    assert busy == [False, True, False, True]


def test_an_average_that_was_fetched_is_told_from_a_state(led: Led) -> None:
    sync, newest, fetched = behind_by_two(led)
    sync.gives = replace(fetched, is_average=True)
    led.step(newest)
    assert ("caught_up", {"round": 5, "held": 3, "seconds": 2.5}) in led.events
    assert [rank for rank, message in led.ranks.sent if not isinstance(message, Committed)][-2:] == [0, 1]


def test_a_state_that_all_ranks_refuse_is_not_fetched_from_there_again(led: Led, caplog) -> None:
    sync, newest, fetched = behind_by_two(led)
    sync.gives = fetched
    led.step(newest)
    for rank in range(2):
        led.hear(rank, StateRefused(why="other tensors"))
        led.hear(rank, example.state_held(round=3, digest="d3", position=Position(consumed=40)))
    sync.gives = None
    led.step(newest)
    assert sync.refused == [fetched]
    assert "the state of round 5 from 'b, c': other tensors" in caplog.text
    assert ("refused", {"round": 5, "whom": "b, c", "why": "other tensors"}) in led.events
    assert led.agent._round_driver.held == (3, "d3") and led.agent._replacing is None
    assert sync.asked[-1] == Behind(round=3, digest="d3", overtaken=2, ranks=2)
    assert led.writer.jobs.count("settings") == 2, "what the ranks read may be another by now"


def test_ranks_without_progress_take_their_peer_off_the_list_until_they_make_some(led: Led, caplog) -> None:
    led.begin(round=3, digest="d3")
    snapshot = run_at(3, "d3")
    led.step(snapshot)
    stuck_s = time.monotonic() + 2000.0
    stopped: list[str] = []
    agent: Any = led.agent
    agent._round_driver.stop = lambda: stopped.append("stopped")
    agent._local.progress.stuck = lambda now: {1: "step 7 for 61 s"} if now > stuck_s else {}
    listings = len(led.listing.listed)
    led.events.clear()
    assert led.step(snapshot, now=stuck_s + 1.0) == stuck_s + 2.0
    led.step(snapshot, now=stuck_s + 2.0)
    assert led.events == [("evicted", {"round": 4, "why": "rank 1: step 7 for 61 s"})]
    assert led.writer.jobs[-1] == "the list of members first" and stopped == ["stopped"]
    assert led.listing.withdrawn == 1 and len(led.listing.listed) == listings
    led.events.clear()
    led.step(snapshot, now=stuck_s - 1.0)
    assert led.events[0] == ("back", {"round": 4}) and len(led.listing.listed) == listings + 1
    assert "make no progress (rank 1: step 7 for 61 s): the peer is unlisted" in caplog.text


def test_a_peer_whose_settings_are_not_those_of_the_first_member_is_not_listed(led: Led) -> None:
    led.begin()
    led.step(RunSnapshot(members={"b": listed("b", recipe="another")}))
    assert not led.listing.listed and led.writer.jobs[-1] == "the settings of the run"


def test_a_peer_whose_ranks_hold_no_state_yet_compares_no_settings(led: Led) -> None:
    for rank in range(2):
        led.hear(rank, Hello(rank=rank, world=2, process=1))
    led.step(RunSnapshot(members={"b": listed("b", recipe="another")}))
    assert not led.writer.jobs


def test_ranks_that_hold_no_state_yet_are_told_of_no_commit_and_those_that_load_one_are(led: Led) -> None:
    for rank in range(2):
        led.hear(rank, Hello(rank=rank, world=2, process=1))
    led.step(run_at(3, "d3"))
    assert led.ranks.sent == [] and led.agent._round_driver.seen == -1
    sync, newest, fetched = behind_by_two(led)
    sync.gives = fetched
    led.step(newest)
    led.step(run_at(6, "d6"))
    told = [message.commit.round for _, message in led.ranks.sent if isinstance(message, Committed)]
    assert told == [5, 6] and led.agent._round_driver.held is None


def test_connections_are_kept_for_the_present_members_only_when_these_have_changed(led: Led) -> None:
    led.begin()
    members = {"a": listed("a")}
    for _ in range(3):
        led.step(RunSnapshot(members=members))
    led.step(RunSnapshot(members={}))
    assert led.pool_kept == [{("a", "a1")}, set()]


def test_the_next_look_is_when_something_is_due_and_half_a_minute_later_at_the_latest(led: Led) -> None:
    agent: Any = led.agent
    agent._state_sync = sync = Sync()

    def after(decision: Any) -> float:
        return round(agent._next_moment(decision, 100.0) - 100.0, 3)

    ended = Ended(commit=example.commit())
    assert after(Wait(why="x")) == after(Wait(why="x", until_s=500.0)) == after(ended) == 30.001
    assert after(Wait(why="x", until_s=107.0)) == 7.001
    assert after(Wait(why="x", until_s=5.0)) == 0.0
    assert after(Propose(tried=None, offers={})) == 0.501  # type: ignore[arg-type]
    sync.next_moment = lambda: 103.0  # type: ignore[method-assign]
    assert after(ended) == 3.001
    agent._local.progress.next_deadline = lambda: 102.0
    assert after(ended) == 2.001


def test_the_last_snapshot_counts_where_the_view_has_ended_by_an_error_which_ends_the_peer(led: Led) -> None:
    led.view.snapshot = first = RunSnapshot(version=1)
    assert led.agent._newest() is first

    class Broken:
        @property
        def snapshot(self) -> RunSnapshot:
            raise CoordinatorError("refused")

    led.agent._view = Broken()  # type: ignore[assignment]
    assert led.agent._newest() is first
    assert led.agent._ending == PeerOutcome(why="refused", failed=True)
