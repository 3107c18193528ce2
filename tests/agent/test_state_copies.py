"""Which peers copy the state for a newcomer, and how long they keep it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from tests.protocol import example

from bloomery.agent.state_serving import SOURCES, CopyKeeper, copies_wanted
from bloomery.coordination.snapshot import ListedMember, RunSnapshot
from bloomery.protocol.encoding import COUNT_AT_MOST
from bloomery.protocol.rank_messages import CopyState, StateCopied

HOLDERS = tuple(f"p{number:02d}" for number in range(64))


def listed(name: str, **fields) -> ListedMember:
    member = example.member(peer=name, round=5, **{"digest": "d5", "serves": ("http://h",)} | fields)
    return ListedMember(member=member, life=1, modified=1, seen_s=0.0, said_s=0.0)


def run(*newcomers: ListedMember, newest: str = "d5", holders: tuple[str, ...] = HOLDERS) -> RunSnapshot:
    """64 peers that hold the newest state, and newcomers."""
    members = {name: listed(name, digest=newest) for name in holders}
    members |= {newcomer.member.peer: newcomer for newcomer in newcomers}
    return RunSnapshot(members=members, commits={5: example.commit(round=5, digest=newest)})


def makers(snapshot: RunSnapshot) -> list[str]:
    return [name for name in HOLDERS if copies_wanted(snapshot, me=name, made=()).makes]


def test_nobody_copies_anything_while_nobody_wants_a_state():
    assert makers(run()) == [] == makers(run(listed("new", digest="own")))
    assert copies_wanted(run(), me="p00", made=("d4", "d5")) == CopyState(keep=(), makes="")


def test_few_peers_copy_for_a_newcomer_and_more_if_they_do_not_bring_it_in():
    """What others say that they serve is no reason to make none: it may not be true."""
    wanting = listed("p10x", digest="own", wants="d5")
    assert makers(run(wanting)) == ["p11", "p12", "p13", "p14"] and SOURCES == 4
    without = run(wanting, holders=tuple(name for name in HOLDERS if name != "p12"))
    assert makers(without) == ["p11", "p13", "p14", "p15"]
    behind_nat = {name: listed(name, serves=()) for name in ("p11", "p12")}
    reachable = replace(without, members={**run(wanting).members, **behind_nat})
    assert makers(reachable) == ["p13", "p14", "p15", "p16"]
    relayed = {name: listed(name, serves=("relay:",)) for name in HOLDERS if name not in ("p09", "p12")}
    assert makers(run(wanting, *relayed.values())) == ["p09", "p11", "p12", "p13"]
    liar = replace(wanting, member=example.member(peer="liar", round=5, digest="d5", copies=("d5",)))
    assert len(makers(run(wanting, liar))) in (3, 4)
    for overtaken, count in ((1, 8), (3, 32), (9, 64), (COUNT_AT_MOST, 64)):
        later = listed("p10x", digest="own", wants="d5", overtaken=overtaken)
        assert len(makers(run(later))) == count


def test_a_copy_stays_while_somebody_wants_it_and_two_at_most():
    slow, other = listed("s", digest="own", wants="d4"), listed("t", digest="own", wants="d5", overtaken=9)
    assert copies_wanted(run(slow), me="p00", made=("d3", "d4")) == CopyState(keep=("d4",), makes="")
    assert copies_wanted(run(slow, other), me="p00", made=("d4",)) == CopyState(keep=("d4",), makes="d5")
    third = listed("u", digest="own", wants="d3")
    full = copies_wanted(run(slow, other, third), me="p00", made=("d3", "d4"))
    assert full == CopyState(keep=("d3", "d4"), makes="")
    unread = copies_wanted(run(other), me="p00", made=("d4",))
    assert "d4" in unread.keep, "the copy that came out may be of another state than was asked for"


def test_copies_are_asked_for_once_served_and_no_longer_served_when_nobody_wants_them(tmp_path: Path):
    told, served, kept, reported = [], [], [], []
    server = SimpleNamespace(
        offer=lambda directory, *, round, digest: served.append((directory, round, digest)), keep=kept.append
    )
    local = SimpleNamespace(take_copies=lambda: [reported.pop()] if reported else [])
    keeper = CopyKeeper(server, SimpleNamespace(send=told.append), local, me="p00")
    wanting = run(listed("new", digest="own", wants="d5", overtaken=9))
    for _ in range(3):
        keeper.update(wanting)
    assert told == [CopyState(keep=(), makes="d5")]
    reported.append(StateCopied(round=5, digest="d5", directory=None))
    keeper.update(wanting)
    assert (keeper.made, served, len(told)) == ((), [], 1), "there was no room, and it is not tried at once"
    reported.append(StateCopied(round=5, digest="d5", directory=tmp_path))
    keeper.update(wanting)
    assert keeper.made == ("d5",) and served == [(tmp_path, 5, "d5")]
    keeper.update(run())
    assert keeper.made == () and kept == [()]
    assert told[-1] == CopyState(keep=(), makes="")


def test_a_copy_that_comes_when_nobody_wants_it_any_more_is_not_served(tmp_path: Path):
    """A server holds its files open, and so the memory of a copy that the ranks have removed by then."""
    told, served, reported = [], {}, []
    server = SimpleNamespace(
        offer=lambda directory, *, round, digest: served.update({digest: directory}),
        keep=lambda digests: [served.pop(digest) for digest in set(served) - set(digests)],
    )
    local = SimpleNamespace(take_copies=lambda: [reported.pop()] if reported else [])
    keeper = CopyKeeper(server, SimpleNamespace(send=told.append), local, me="p00")
    keeper.update(run(listed("new", digest="own", wants="d5", overtaken=9)))
    keeper.update(run())
    reported.append(StateCopied(round=5, digest="d5", directory=tmp_path))
    keeper.update(run())
    assert (keeper.made, served) == ((), {})
    assert told == [CopyState(keep=(), makes="d5"), CopyState(keep=(), makes="")]
