"""Which differences between a peer's settings and the run's keep it out."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from tests.coordination.round_world import World
from tests.protocol import example

from bloomery.agent.admission import Admission, SettingsMismatch, differences, fingerprint
from bloomery.agent.rank_server import RankSent
from bloomery.agent.rank_state import LocalRanks, RankProgress
from bloomery.agent.registration import BandwidthReports, Registration, links_to_measure
from bloomery.agent.round_driver import RoundDriver
from bloomery.agent.timeouts import timeouts_of
from bloomery.config.elastic import ElasticSection
from bloomery.coordination.decide import Propose, RequestFlush, TakeShare, Wait, decide
from bloomery.coordination.eligibility import RoundSettings
from bloomery.coordination.snapshot import ListedMember, RunSnapshot
from bloomery.data.position import RULE_KEY
from bloomery.protocol.encoding import encode_settings
from bloomery.protocol.rank_messages import Hello, RankReady, Reduce
from bloomery.protocol.records import ProposedAttempt


def judged(
    theirs: dict[str, str], mine: dict[str, str], *, commits: dict[int, str], leaves: bool = False
) -> tuple[bool, list[SettingsMismatch]]:
    """Whether a member with the settings `theirs` is taken for another run's in the end, and the refusals.

    leaves: whether its settings are gone, with its lease, when they are first asked for.
    """
    refused: list[Any] = []
    found = [False, leaves]
    published = SimpleNamespace(value=encode_settings(theirs))
    context: Any = SimpleNamespace(
        me="new",
        settings=SimpleNamespace(settings={}, incarnation="new1"),
        keys=SimpleNamespace(settings=lambda name: f"settings/{name}"),
        etcd=SimpleNamespace(get=lambda key: None if found.pop() else published),
        writer=SimpleNamespace(write=lambda what, work: work()),
    )
    membership: Any = SimpleNamespace(keep=lambda key, text: None)
    admission = Admission(context, membership, refuse=refused.append)
    admission.publish(mine)
    listed = SimpleNamespace(life=1, member=SimpleNamespace(recipe=fingerprint(theirs), incarnation="old1"))
    snapshot: Any = SimpleNamespace(members={"old": listed}, commits=commits)
    admission.is_other(snapshot)
    return admission.is_other(snapshot), refused


@pytest.mark.parametrize("commits", [{}, {3: "a commit"}])
def test_a_peer_of_other_settings_is_refused_at_any_time(commits: dict[int, str]) -> None:
    is_other, refused = judged({"run.seed": "1"}, {"run.seed": "2"}, commits=commits)
    assert is_other and "run.seed is 1 there and 2 here" in str(refused[0])


def test_a_member_that_left_before_its_settings_were_compared_is_no_reason_to_refuse() -> None:
    alike = {"run.seed": "1", "data": "d"}
    assert judged(alike | {"data": "e"}, alike, commits={}, leaves=True)[1], "the next look compares again"
    assert not judged(alike, alike, commits={}, leaves=True)[1]


def test_another_rule_of_the_mixture_is_refused_until_a_state_says_which_one_the_run_follows() -> None:
    theirs, mine = {"run.seed": "1"}, {"run.seed": "1", RULE_KEY: "3"}
    is_other, refused = judged(theirs, mine, commits={})
    assert is_other and f"{RULE_KEY} is unknown there and 3 here" in str(refused[0])
    assert judged(theirs, mine, commits={3: "a commit"}) == (False, [])
    assert judged(mine, mine, commits={}) == (False, [])


@pytest.mark.parametrize("text", ["\u3000", "\xa0", "x" * 2001])
def test_settings_that_are_shown_otherwise_than_they_are_do_not_differ(text: str) -> None:
    mine = {"run.seed": "1", "data.separator": text, RULE_KEY: "3"}
    assert judged({**mine, RULE_KEY: "2"}, mine, commits={3: "a commit"}) == (False, [])
    is_other, (refused, *_) = judged({**mine, "run.seed": "2"}, mine, commits={})
    assert is_other and "separator" not in str(refused) and "run.seed is 2 there" in str(refused)
    assert judged({**mine, "data.separator": text + "y"}, mine, commits={})[0]


def process_of(incarnation: str, *, peer: str) -> Registration:
    """The registration of one process of a peer that wants to be listed."""
    settings = SimpleNamespace(incarnation=incarnation)
    context: Any = SimpleNamespace(
        me=peer, settings=settings, writer=SimpleNamespace(write=lambda *job, **how: None)
    )
    unused: Any = SimpleNamespace(withdraw=None)
    registration = Registration(context, unused)
    registration.publish(example.member(peer=peer, incarnation=incarnation), after=0)
    return registration


def test_a_process_does_not_decide_in_the_name_of_its_peers_former_life() -> None:
    """Between a kill and the end of the lease its former process is still listed, with share and offer."""
    world = World({"a": 2, "b": 3}, RoundSettings(inner_steps=4, total_samples=1000, peers=2, patience_s=1.0))
    a, b = world.peers["a"], world.peers["b"]
    for peer in (a, b):
        peer.see()
    a.act()
    for peer in (a, b):
        peer.see()

    def decided(snapshot: RunSnapshot) -> object:
        world.now += 10.0  # it is everybody's turn
        return decide(snapshot, me="a", settings=world.settings, now=world.now)

    listed = a.snapshot.members["a"].member.incarnation
    former, new = process_of(listed, peer="a"), process_of("started again", peer="a")
    b.work(4)
    a.look()
    assert isinstance(decided(former.own_view(a.snapshot)), RequestFlush)
    assert isinstance(decided(new.own_view(a.snapshot)), Wait)
    a.work(4)
    a.look()
    assert isinstance(decided(former.own_view(a.snapshot)), Propose)
    assert isinstance(decided(new.own_view(a.snapshot)), Wait)
    b.die()
    a.look()
    assert not isinstance(decided(new.own_view(a.snapshot)), Propose | TakeShare)
    former.unlist()  # as when its ranks make no progress: what is listed is no longer meant
    assert isinstance(decided(former.own_view(a.snapshot)), Wait)


def test_links_that_peers_measure_grow_with_the_peers_and_make_a_ring() -> None:
    for count in (2, 20, 25, 64, 500):
        names = [f"p{number:03d}" for number in range(count)]
        for place, name in enumerate(names):
            links = links_to_measure(names, name)
            assert len(set(links)) == len(links) == min(count - 1, 24) and name not in links
            assert links[0] == names[(place + 1) % count]  # so the order of names is a ring of measured links
    names = [f"p{number:03d}" for number in range(49)]
    far = [names[number] for number in range(13, 49, 3)]
    assert links_to_measure(names, "p000") == [*names[1:13], *far], "those further on at even distances"


def test_measured_links_are_published_together() -> None:
    puts: list[str] = []
    names = [f"p{number:02d}" for number in range(20)]
    links = SimpleNamespace(probe=lambda *asked, **named: SimpleNamespace(mbit_s=100.0, rtt_ms=1.0))
    context: Any = SimpleNamespace(
        me="p00",
        settings=SimpleNamespace(timeouts=SimpleNamespace(connect_s=1.0), streams=1),
        keys=SimpleNamespace(rate=lambda name: f"rates/{name}"),
        writer=SimpleNamespace(write=lambda what, work: work()),
        connection_manager=links,
        wake=lambda: None,
    )
    membership: Any = SimpleNamespace(keep=lambda key, text: puts.append(text))
    members = {
        name: SimpleNamespace(member=example.member(peer=name, addresses=("127.0.0.1:1",))) for name in names
    }
    reports, snapshot = BandwidthReports(context, membership), RunSnapshot(members=members)  # type: ignore[arg-type]
    for second in range(25):
        reports.update(snapshot, is_busy=False, now=float(second))
        if reports._thread is not None:
            reports._thread.join()
    assert len(json.loads(puts[-1])) == 19
    assert len(puts) <= 4  # the first, one each ten seconds, and the last


def test_rounds_that_were_committed_between_two_looks_are_all_counted_as_missed() -> None:
    context: Any = SimpleNamespace(
        me="a",
        events=SimpleNamespace(write=lambda *told, **fields: None),
        rank_server=SimpleNamespace(send=lambda message: None),
    )
    driver = RoundDriver(context, registration=None, membership=None)  # type: ignore[arg-type]
    commits = {round: example.commit(round=round, members=("b", "c")) for round in range(3, 8)}
    for newest, missed in ((3, 0), (4, 1), (7, 4)):
        driver.follow(RunSnapshot(commits={round: commits[round] for round in range(3, newest + 1)}))
        assert driver.overtaken == missed


def test_an_attempt_is_begun_once_however_often_its_snapshot_is_looked_at() -> None:
    limits, told = timeouts_of(ElasticSection()), list[Reduce]()
    local = LocalRanks(RankProgress(limits))
    local.take(RankSent(rank=0, message=Hello(rank=0, world=1, process=1)), now=0.0)
    local.take(RankSent(rank=0, message=RankReady(ready=example.ready(round=1), number=0)), now=0.0)
    context: Any = SimpleNamespace(
        me="a",
        local=local,
        settings=SimpleNamespace(timeouts=limits, streams=1),
        connection_manager=SimpleNamespace(pool=None),  # a ring of one needs no connection
        rank_server=SimpleNamespace(send=lambda reduce, rank: told.append(reduce)),
        wake=lambda: None,
    )
    driver = RoundDriver(context, registration=None, membership=None)  # type: ignore[arg-type]
    member = ListedMember(member=example.member(peer="a"), life=1, modified=1, seen_s=0.0, said_s=0.0)
    attempt = example.attempt(round=1, epoch=1, members=("a",))
    tried = ProposedAttempt(attempt=attempt, lives=(1,), offers=(1,))
    for _ in range(3):
        driver.ring(RunSnapshot(members={"a": member}, tried=tried))
        for thread in threading.enumerate():
            if thread.name == "connect":
                thread.join()
    assert [reduce.attempt.epoch for reduce in told] == [1] and driver.is_ringing


def test_a_refusal_names_five_differing_settings_and_how_many_more_there_are() -> None:
    mine = {f"k{number}": "1" for number in range(7)}
    told = differences({**mine, "k1": "2", "other": "3"}, mine)
    assert told == ["k1 is 2 there and 1 here", "other is 3 there and unknown here"]
    message = str(SettingsMismatch("b", [f"k{number} differs" for number in range(7)]).message)
    assert "k4 differs; and 2 more" in message and "k5" not in message
    assert "in what it differs" in str(SettingsMismatch("b", []).message)
    assert fingerprint({"a": "1", "b": "2"}) == fingerprint({"b": "2", "a": "1"}) != fingerprint({"a": "12"})
