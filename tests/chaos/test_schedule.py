"""Faults by seed: repeatable, and of every kind."""

import pytest

from bloomery.chaos.faults import ENDING, KINDS, Fault, schedule

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


def test_a_fault_lasts_a_fifth_of_the_longest_at_least_and_has_no_length_where_nothing_lasts() -> None:
    drawn = schedule(seed=1, peers=PEERS, faults=500, mean_gap_s=1.0, longest_s=5.0)
    lasting = [fault.seconds for fault in drawn if fault.seconds]
    assert 1.0 <= min(lasting) < 1.2 and 4.8 < max(lasting) <= 5.0
    assert {fault.kind for fault in drawn if not fault.seconds} == ENDING | {"sever", "corrupt"}
    assert {fault.peer for fault in drawn if fault.kind == "kill-coordinator"} == {""}
    assert "" not in {fault.peer for fault in drawn if fault.kind != "kill-coordinator"}


@pytest.mark.parametrize(
    "wrong", [{"peers": ()}, {"faults": -1}, {"mean_gap_s": 0.0}, {"longest_s": 0.0}, {"mean_gap_s": -1.0}]
)
def test_a_schedule_that_makes_no_sense_is_refused(wrong: dict) -> None:
    usual = {"seed": 1, "peers": PEERS, "faults": 1, "mean_gap_s": 1.0, "longest_s": 1.0}
    assert len(schedule(**usual)) == 1 and schedule(**usual | {"faults": 0}) == ()
    with pytest.raises(ValueError, match="no such schedule"):
        schedule(**usual | wrong)


def test_a_fault_is_told_with_its_peer_and_its_length() -> None:
    assert str(Fault(after_s=1.0, kind="cut", peer="a", seconds=2.25)) == "cut of a for 2.2 s"
    assert str(Fault(after_s=1.0, kind="kill-coordinator", peer="")) == "kill-coordinator"
