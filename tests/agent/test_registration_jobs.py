"""When a peer is listed, changed and unlisted; which links it measures; and when it compares settings."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from tests.agent.agent_parts import SETTINGS, Listing, listed
from tests.agent.test_ring_attempt import no_thread
from tests.protocol import example

from bloomery.agent import registration as registration_module
from bloomery.agent.admission import Admission, fingerprint
from bloomery.agent.registration import BandwidthReports, Registration
from bloomery.coordination.snapshot import RunSnapshot
from bloomery.data.position import RULE_KEY
from bloomery.protocol.encoding import encode_settings
from bloomery.protocol.keys import Keys
from bloomery.transport.bandwidth_probe import ProbeSizes
from bloomery.transport.connection import Contact
from bloomery.transport.trust import PeerRefused

KEYS = Keys("r")


class Later:
    """A writer that runs its jobs when it is told to."""

    def __init__(self) -> None:
        self.jobs: list[tuple[str, Callable[[], None], bool]] = []

    def write(self, name: str, run: Callable[[], None], *, first: bool = False) -> None:
        self.jobs.append((name, run, first))

    def run(self) -> None:
        while self.jobs:
            self.jobs.pop(0)[1]()


def registered() -> tuple[Registration, Listing, Later]:
    writer, membership = Later(), Listing(None, KEYS)
    context: Any = SimpleNamespace(me="a", settings=SETTINGS, writer=writer)
    return Registration(context, membership), membership, writer  # type: ignore[arg-type]


ENTRY = example.member(peer="a", incarnation="a1", epoch=3)


def test_an_entry_is_written_where_it_says_something_new_or_answers_a_new_commit() -> None:
    registration, membership, writer = registered()
    later = structs.replace(ENTRY, epoch=4)
    moved = structs.replace(later, round=9)
    for member, after in ((ENTRY, 5), (later, 5), (later, 6), (moved, 6), (moved, 6)):
        registration.publish(member, after=after)
        writer.run()
    assert membership.listed == [ENTRY, later, moved]
    assert registration.generation == 1


def test_a_peer_that_was_unlisted_is_listed_anew_and_what_waits_for_that_is_dropped() -> None:
    registration, membership, writer = registered()
    registration.unlist()
    assert writer.jobs == [], "it was not listed"
    registration.publish(ENTRY, after=5)
    registration.publish(structs.replace(ENTRY, round=4), after=5)
    (_, join, _), (name, update, _) = writer.jobs
    assert name == "the list of members"
    update()  # it took the place of the first listing, which has not run
    assert membership.lease == 77 and [member.round for member in membership.listed] == [4]
    writer.jobs.clear()
    registration.unlist()
    registration.unlist()
    ((_, withdraw, is_first),) = writer.jobs
    assert is_first
    withdraw()
    join()
    update()
    assert len(membership.listed) == 1 and membership.withdrawn == 1
    registration.publish(ENTRY, after=5)
    assert registration.generation == 2


def test_a_peer_is_listed_while_it_wants_that_and_its_present_process_is() -> None:
    registration, _, _ = registered()
    here = RunSnapshot(members={"a": listed("a")})
    assert not registration.is_listed(here)
    registration.publish(ENTRY, after=0)
    assert registration.is_listed(here) and not registration.is_listed(RunSnapshot())
    assert not registration.is_listed(RunSnapshot(members={"a": listed("a", incarnation="a0")}))
    assert not registration.is_listed(RunSnapshot(members={"b": listed("b", incarnation="a1")}))
    assert registration.own_view(here) is here
    registration.unlist()
    assert registration.own_view(here).members == {}


class Probing:
    """Peer 'a' with links of given rates; measurements end at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[Any] = []
        self.rates: dict[str, float | Exception] = {}
        self.published: list[str] = []
        self.wakes = 0
        self.now = 1000.0
        monkeypatch.setattr(registration_module.time, "monotonic", lambda: self.now)
        context: Any = SimpleNamespace(
            me="a",
            settings=SETTINGS,
            keys=KEYS,
            writer=SimpleNamespace(write=lambda name, run: run()),
            connection_manager=SimpleNamespace(probe=self._probe),
            wake=self._wake,
        )
        membership: Any = SimpleNamespace(keep=self._keep)
        self.reports = BandwidthReports(context, membership)

    def update(self, *names: str, is_busy: bool = False, **fields: Any) -> list[str]:
        """Look at a run of these members; return whose links have been measured so far."""
        members = {
            name: listed(name, **{"addresses": (f"{name}:1",)} | fields.get(name, {})) for name in names
        }
        self.reports.update(RunSnapshot(members=members), is_busy=is_busy, now=self.now)
        if self.reports._thread is not None:
            self.reports._thread.join()
        return [contact.peer for contact, _, _ in self.asked]

    def _probe(self, contact: Contact, *, sizes: ProbeSizes, deadline_s: float) -> Any:
        self.asked.append((contact, sizes, deadline_s))
        rate = self.rates.get(contact.peer, 100.04)
        if isinstance(rate, Exception):
            raise rate
        return SimpleNamespace(mbit_s=rate, rtt_ms=2.0)

    def _keep(self, key: str, text: str) -> None:
        assert key == KEYS.rate("a")
        self.published.append(text)

    def _wake(self) -> None:
        self.wakes += 1


@pytest.fixture
def probing(monkeypatch) -> Probing:
    return Probing(monkeypatch)


def test_links_are_measured_one_after_the_other_where_there_is_a_choice_and_no_ring(probing: Probing) -> None:
    assert probing.update("a", "b") == []
    assert probing.update("a", "b", "c", is_busy=True) == []
    assert probing.update("a", "b", "c") == ["b"]
    probing.reports._thread = SimpleNamespace(is_alive=lambda: True, join=lambda: None)  # type: ignore[assignment]
    assert probing.update("a", "b", "c") == ["b"]
    probing.reports._thread = None
    assert probing.update("a", "b", "c") == ["b", "c"] == probing.update("a", "b", "c")
    assert probing.asked[1] == (
        Contact(peer="c", incarnation="c1", addresses=("c:1",)),
        ProbeSizes(streams=3, most=4 << 20),
        SETTINGS.timeouts.connect_s,
    )
    assert probing.wakes == 2
    assert probing.update("a", "b", "c", c={"incarnation": "c2"}) == ["b", "c", "c"]
    assert probing.update("a", "b", "d", d={"addresses": ()}) == ["b", "c", "c"]


def test_a_link_to_a_peer_that_fetches_a_state_is_measured_afterwards(probing: Probing) -> None:
    assert probing.update("a", "b", "c", b={"wants": "ab12"}) == ["c"]
    assert probing.update("a", "b", "c", b={"wants": "ab12"}) == ["c"]
    assert probing.update("a", "b", "c") == ["c", "b"]


def test_what_was_measured_is_published_when_all_is_or_ten_seconds_after_the_last(probing: Probing) -> None:
    probing.rates = {"b": 12.34, "c": 50.0, "d": 7.0}
    names = ("a", "b", "c", "d")
    probing.update(*names)
    assert probing.published == []
    probing.now = 1001.0
    probing.update(*names)  # the first is published before the second is measured
    assert probing.published == ['{"b": 12.3}']
    probing.now = 1011.0
    probing.update(*names)
    assert len(probing.published) == 1
    probing.update(*names)
    probing.update(*names)
    assert probing.published[1:] == ['{"b": 12.3, "c": 50.0, "d": 7.0}']


@pytest.mark.parametrize("kind", [OSError, PeerRefused, RuntimeError])
def test_a_link_that_could_not_be_measured_is_tried_again_a_minute_later(
    probing: Probing, caplog, kind: type[Exception]
) -> None:
    caplog.set_level("INFO")
    probing.rates["b"] = kind("out of reach")
    assert probing.update("a", "b", "c") == ["b"]
    assert probing.update("a", "b", "c") == ["b", "c"]
    assert caplog.messages == [
        "the link to 'b' was not measured: out of reach",
        "to 'c': 100 Mbit/s, 2.0 ms",
    ]
    probing.now = 1059.9
    assert probing.update("a", "b", "c") == ["b", "c"]
    assert probing.update("a", "b", "c", b={"incarnation": "b2"}) == ["b", "c", "b"]
    probing.now = 1060.0
    assert probing.update("a", "b", "c") == ["b", "c", "b", "b"]


def test_a_link_for_whose_measurement_no_thread_is_left_is_measured_later(
    probing: Probing, monkeypatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", no_thread)
        assert probing.update("a", "b", "c") == [] and probing.reports._thread is None
    assert probing.update("a", "b", "c") == ["c"]
    probing.now = 1060.0
    assert probing.update("a", "b", "c") == ["c", "b"]


def test_a_link_is_measured_again_after_an_hour_and_told_if_it_has_changed(probing: Probing) -> None:
    assert probing.update("a", "b", "c") == ["b"]
    probing.now += 10.0
    assert probing.update("a", "b", "c") == ["b", "c"] == probing.update("a", "b", "c")
    assert probing.published[-1] == '{"b": 100.0, "c": 100.0}'
    probing.published.clear()
    probing.now = 1000.0 + 3599.9
    assert probing.update("a", "b", "c") == ["b", "c"]
    probing.rates |= {"b": 80.0, "c": 4.0}
    probing.now = 1000.0 + 3600.0
    assert probing.update("a", "b", "c") == ["b", "c", "b"] == probing.update("a", "b", "c")
    assert probing.published == [], "a rate that is alike is no news"
    probing.now += 10.0
    assert probing.update("a", "b", "c", "d") == ["b", "c", "b", "d"], "who is not known comes first"
    assert probing.update("a", "b", "c", "d") == ["b", "c", "b", "d", "c"]
    probing.update("a", "b", "c", "d")
    assert probing.published[-1] == '{"b": 100.0, "c": 4.0, "d": 100.0}'


MINE, THEIRS = {"k": "1", "data": "x"}, {"k": "2", "data": "x"}


class Admitted:
    """Peer 'a', whose settings are known, and the members whose settings the coordinator has."""

    def __init__(self, **published: dict[str, str]) -> None:
        self.published, self.asked, self.writer = published, list[str](), Later()
        self.refused: list[Any] = []
        self.kept: list[tuple[str, str]] = []
        context: Any = SimpleNamespace(
            me="a",
            settings=replace(SETTINGS, settings={"k": "1"}),
            keys=KEYS,
            writer=self.writer,
            etcd=SimpleNamespace(get=self._get),
        )
        membership: Any = SimpleNamespace(keep=lambda key, text: self.kept.append((key, text)))
        self.admission = Admission(context, membership, refuse=self.refused.append)
        self.admission.publish({"data": "x"})
        self.writer.run()

    def is_other(self, **members: Any) -> bool:
        return self.admission.is_other(RunSnapshot(members=members))

    def _get(self, key: str) -> Any:
        self.asked.append(key)
        for name, settings in self.published.items():
            if key == KEYS.settings(name):
                return SimpleNamespace(value=encode_settings(settings))
        return None


def of(name: str, settings: dict[str, str], *, life: int, **fields: Any) -> Any:
    return listed(name, life=life, recipe=fingerprint(settings), **fields)


def test_settings_are_published_with_those_of_the_stream_of_samples() -> None:
    admitted = Admitted()
    assert admitted.admission.settings == MINE and admitted.admission.fingerprint == fingerprint(MINE)
    assert admitted.kept == [(KEYS.settings("a"), encode_settings(MINE))]


def test_only_the_member_that_was_listed_first_is_compared_with_and_only_by_who_came_after_it() -> None:
    admitted = Admitted(b=THEIRS)
    assert not admitted.is_other() and not admitted.is_other(a=of("a", THEIRS, life=1))
    assert not admitted.is_other(b=of("b", MINE, life=1))
    assert not admitted.is_other(b=of("b", THEIRS, life=5), c=of("c", MINE, life=4))
    assert not admitted.is_other(b=of("b", THEIRS, life=5), a=of("a", MINE, life=4))
    assert not admitted.is_other(b=of("b", THEIRS, life=3), a=of("a", MINE, life=4)), "it was admitted"
    assert admitted.is_other(b=of("b", THEIRS, life=3), a=of("a", MINE, life=6))
    former = of("a", MINE, life=4, incarnation="a0")
    assert admitted.is_other(b=of("b", THEIRS, life=5), a=former), "its former life does not count"
    assert admitted.asked == []


def test_one_member_of_several_keeps_no_other_out() -> None:
    admitted = Admitted(b=THEIRS)
    odd, usual = of("b", THEIRS, life=1, ranks=7), {name: of(name, MINE, life=2) for name in "cd"}
    me = of("a", MINE, life=9)
    assert admitted.is_other(b=odd, a=me), "of one it is not known who is right"
    assert not admitted.is_other(b=odd, **usual, a=me)
    assert admitted.admission.wrong_ranks(RunSnapshot(members={"b": odd, **usual, "a": me})) == ""
    late = {name: of(name, THEIRS, life=20, ranks=7) for name in "efgh"}
    assert (
        admitted.admission.wrong_ranks(RunSnapshot(members={**usual, **late, "a": replace(me, life=8)})) == ""
    )
    again = replace(me, life=10)
    assert "'b'" in admitted.admission.wrong_ranks(RunSnapshot(members={"b": odd, "a": again}))
    assert admitted.is_other(b=odd, c=of("c", THEIRS, life=3), d=of("d", MINE, life=2), a=again)


def test_settings_are_asked_for_once_and_a_difference_is_refused_with_who_has_it() -> None:
    admitted = Admitted(b=THEIRS)
    for _ in range(3):
        assert admitted.is_other(b=of("b", THEIRS, life=1))
    admitted.writer.run()
    assert admitted.asked == [KEYS.settings("b")]
    (refusal,) = admitted.refused
    assert refusal.message == "'b', who was there before, trains another run: k is 2 there and 1 here"
    assert "all peers the same data and settings" in refusal.remedy


def test_a_member_that_does_not_say_what_its_fingerprint_is_of_is_refused() -> None:
    admitted = Admitted(b=MINE)
    assert admitted.is_other(b=of("b", THEIRS, life=1))
    admitted.writer.run()
    assert "it does not say in what it differs" in admitted.refused[0].message


def test_settings_that_were_found_alike_once_are_not_asked_for_again() -> None:
    ruled = {name: {**MINE, RULE_KEY: name} for name in "bc"}
    admitted = Admitted(**ruled)
    snapshots = [
        RunSnapshot(commits={0: example.commit(round=0)}, members={name: of(name, ruled[name], life=1)})
        for name in "bcb"
    ]
    for snapshot in snapshots[:2]:
        assert admitted.admission.is_other(snapshot)
        admitted.writer.run()
    assert not admitted.admission.is_other(snapshots[2]) and admitted.refused == []
    assert admitted.asked == [KEYS.settings("b"), KEYS.settings("c")]
