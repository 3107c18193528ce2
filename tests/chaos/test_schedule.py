"""Faults by seed: repeatable, and of every kind."""

import pytest

from bloomery.chaos.faults import ENDING, KINDS, schedule

PEERS = ("a", "b", "c")


def test_a_seed_gives_the_same_faults_again_and_another_seed_others() -> None:
    one = schedule(seed=1, peers=PEERS, faults=50, mean_gap_s=1.0, longest_s=5.0)
    assert one == schedule(seed=1, peers=PEERS, faults=50, mean_gap_s=1.0, longest_s=5.0)
    assert one != schedule(seed=2, peers=PEERS, faults=50, mean_gap_s=1.0, longest_s=5.0)


def test_every_kind_and_every_peer_comes_up_and_gaps_have_their_mean() -> None:
    drawn = schedule(seed=1, peers=PEERS, faults=2000, mean_gap_s=2.0, longest_s=5.0)
    assert {fault.kind for fault in drawn} == set(KINDS)
    assert {fault.peer for fault in drawn} == {*PEERS, ""}
    assert 1.8 < sum(fault.after_s for fault in drawn) / len(drawn) < 2.2


def test_only_what_lasts_has_a_length() -> None:
    drawn = schedule(seed=1, peers=PEERS, faults=500, mean_gap_s=1.0, longest_s=5.0)
    assert all(0.0 < fault.seconds <= 5.0 for fault in drawn if fault.kind in ("cut", "slow", "stop-rank"))
    assert all(fault.seconds == 0.0 for fault in drawn if fault.kind in ENDING)


def test_a_kind_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="flood"):
        schedule(seed=1, peers=PEERS, faults=1, mean_gap_s=1.0, longest_s=1.0, kinds=("flood",))
