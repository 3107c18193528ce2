"""No member makes the position of a run so large that the coordinator takes no commit any more."""

from __future__ import annotations

import pytest
from tests.protocol import example

from bloomery.coordination.commits import SKIP_END_AT_MOST, SKIPS_AT_MOST, position_after
from bloomery.coordination.eligibility import PIECES_MORE, unusable_offers
from bloomery.coordination.etcd_watch import KeyValue, WatchEvent
from bloomery.coordination.snapshot import ListedShares, RunSnapshot
from bloomery.coordination.snapshot_builder import SnapshotBuilder
from bloomery.data.position import Position, Ranges, fewer, total, within
from bloomery.protocol.encoding import FEW_RANGES_AT_MOST, ProtocolError, decode, encode_text
from bloomery.protocol.keys import Keys
from bloomery.protocol.rank_messages import Committed, StartRound, encode_local
from bloomery.protocol.records import ProposedAttempt, Ready, RoundShares

FAR = 1 << 60
ETCD_REQUEST_BYTES = 3 << 19  # etcd's default of --max-request-bytes


def scattered(count: int, *, first: int = FAR) -> Ranges:
    return tuple(range(first + 2 * place, first + 2 * place + 1) for place in range(count))


def test_an_offer_that_asks_to_skip_thousands_of_ranges_is_no_offer() -> None:
    assert decode(encode_text(example.ready(skip=scattered(FEW_RANGES_AT_MOST))), Ready).skip
    with pytest.raises(ProtocolError):
        decode(encode_text(example.ready(skip=scattered(FEW_RANGES_AT_MOST + 1))), Ready)


def test_requests_to_skip_are_followed_until_the_position_is_as_large_as_a_commit_can_hold() -> None:
    position = Position()
    for round in range(30):
        skip = scattered(FEW_RANGES_AT_MOST, first=SKIP_END_AT_MOST - 10_000 * (30 - round))
        position = position_after(position, [example.ready(spent=(), skip=skip)])
    assert len(position.skips) == SKIPS_AT_MOST
    wider = range(position.skips[0].start, position.skips[-1].stop)
    assert position_after(position, [example.ready(spent=(), skip=(wider,))]).skips == (wider,)
    commit, shares = (
        example.commit(position=position),
        RoundShares(round=2, position=position, shares={}, live=1),
    )
    # One transaction holds both, in base64.
    assert 4 / 3 * (len(encode_text(commit)) + len(encode_text(shares))) < ETCD_REQUEST_BYTES


def test_ranks_are_told_of_the_largest_position_among_many_peers_with_long_names() -> None:
    names = tuple(f"{number:063d}" for number in range(100))
    position = Position(consumed=4 * len(names), skips=scattered(SKIPS_AT_MOST, first=1 << 61))
    position = position.giving_out([range(4 * len(names), 8 * len(names))])
    left_out = dict.fromkeys(names[::2], "its part's norm is 1.23e+04 after 100 steps, and too large")
    commit = example.commit(position=position, members=names, sources=names, left_out=left_out)
    start = StartRound(round=2, position=position, live=100, samples=position.holes, number=1)
    for message in (Committed(commit=commit, included=True), start):
        encode_local(message)  # it refuses what is too long for the socket


def test_a_record_that_is_too_long_for_ranks_counts_as_absent(caplog: pytest.LogCaptureFixture) -> None:
    keys, builder = Keys("r"), SnapshotBuilder(Keys("r"), clock=lambda: 0.0)
    vast = Position(skips=scattered(5_000))
    names = tuple(f"{number:063d}" for number in range(4_000))
    attempt = example.attempt(round=2, epoch=3, left_out=dict.fromkeys(names, "it is slow"))
    ones = (1,) * len(attempt.members)
    written = {
        keys.commit(1): example.commit(round=1, members=(), position=vast),
        keys.shares(2): RoundShares(round=2, position=vast, shares={}, live=1),
        keys.attempt(2, 3): ProposedAttempt(attempt=attempt, lives=ones, offers=ones),
    }
    for number, (key, record) in enumerate(written.items(), 7):
        item = KeyValue(key=key, value=encode_text(record), created=number, modified=number)
        builder.take(WatchEvent(key=key, item=item))
    snapshot = builder.snapshot(changed=True)
    assert not snapshot.commits and not builder._standing and not builder._tried
    assert "the commit of round 1, written at revision 7, is refused: a message of 2" in caplog.text
    assert caplog.text.count(" fit") == 3


def test_a_part_that_leaves_thousands_of_holes_in_its_share_is_left_out() -> None:
    share = (range(0, 1000), range(5000, 6000))
    shares = RoundShares(round=1, position=Position(), shares={"a": share, "b": share}, live=2)
    snapshot = RunSnapshot(standing=ListedShares(shares=shares, modified=1))
    honest = example.ready(peer="a", spent=(range(0, 1000), range(5000, 5200)))
    hostile = example.ready(peer="b", spent=scattered(3 + PIECES_MORE, first=0))
    reasons = unusable_offers(snapshot, {"a": honest, "b": hostile})
    assert list(reasons) == ["b"] and "too many pieces" in reasons["b"]


def test_fewer_ranges_hold_all_samples_and_those_of_the_smallest_gaps() -> None:
    ranges = (range(0, 10), range(12, 20), range(100, 110), range(111, 120), range(500, 501))
    assert fewer(ranges, 5) == ranges
    assert fewer(ranges, 3) == (range(0, 20), range(100, 120), range(500, 501))
    assert fewer(ranges, 1) == (range(0, 501),)
    many = scattered(5_000)
    assert len(fewer(many, 256)) == 256 and total(within(fewer(many, 256), many)) == total(many)
