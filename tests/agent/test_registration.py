"""Which differences between a peer's settings and the run's keep it out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.coordination.round_world import World
from tests.protocol import example

from bloomery.agent.registration import Admission, OtherRun, Registration, fingerprint
from bloomery.coordination.decide import Propose, RequestFlush, TakeShare, Wait, decide
from bloomery.coordination.eligibility import RoundSettings
from bloomery.coordination.snapshot import RunSnapshot
from bloomery.data.position import RULE_KEY
from bloomery.protocol.encoding import encode_settings


def judged(
    theirs: dict[str, str], mine: dict[str, str], *, commits: dict[int, str]
) -> tuple[bool, list[OtherRun]]:
    """Whether a member with the settings `theirs` is taken for another run's in the end, and the refusals."""
    refused: list[Any] = []
    published = SimpleNamespace(value=encode_settings(theirs))
    context: Any = SimpleNamespace(
        me="new",
        settings=SimpleNamespace(settings={}, incarnation="new1"),
        keys=SimpleNamespace(settings=lambda name: f"settings/{name}"),
        etcd=SimpleNamespace(put=lambda key, text: None, get=lambda key: published),
        writer=SimpleNamespace(write=lambda what, work: work()),
    )
    admission = Admission(context, refuse=refused.append)
    admission.publish(mine)
    listed = SimpleNamespace(life=1, member=SimpleNamespace(recipe=fingerprint(theirs), incarnation="old1"))
    snapshot: Any = SimpleNamespace(members={"old": listed}, commits=commits)
    admission.is_other(snapshot)
    return admission.is_other(snapshot), refused


@pytest.mark.parametrize("commits", [{}, {3: "a commit"}])
def test_a_peer_of_other_settings_is_refused_at_any_time(commits: dict[int, str]) -> None:
    is_other, refused = judged({"run.seed": "1"}, {"run.seed": "2"}, commits=commits)
    assert is_other and "run.seed is 1 there and 2 here" in str(refused[0])


def test_another_rule_of_the_mixture_is_refused_until_a_state_says_which_one_the_run_follows() -> None:
    theirs, mine = {"run.seed": "1"}, {"run.seed": "1", RULE_KEY: "3"}
    is_other, refused = judged(theirs, mine, commits={})
    assert is_other and f"{RULE_KEY} is unknown there and 3 here" in str(refused[0])
    assert judged(theirs, mine, commits={3: "a commit"}) == (False, [])
    assert judged(mine, mine, commits={}) == (False, [])


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
