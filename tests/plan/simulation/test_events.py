"""Single events of simulated runs, by hand: what each costs, and what its ledger says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from bloomery.plan.simulate import cluster as cluster_module
from bloomery.plan.simulate import forecast
from bloomery.plan.simulate.cluster import (
    DETECTION,
    LOST,
    NODES,
    RESTART,
    SAVING,
    SLOW,
    _ClusterState,
    simulate_cluster,
)
from bloomery.plan.simulate.peers import DETECTION as UNNOTICED
from bloomery.plan.simulate.peers import (
    JOINING,
    NOBODY,
    OUTER,
    RING,
    SLOWER,
    _PeersState,
    ring_s,
    simulate_peers,
    stages_s,
)
from bloomery.plan.simulate.scenario import TRAINING, HoursLedger, Life, Scenario, scenario_of

FAILURE = {"name": "GPU", "count": 0.0, "days": 1.0, "gpus": 8, "takes_node": True, "detection_s": 360.0}


class Even:
    """Draws that are all alike: each wait is its mean, and each chance comes at one half."""

    def expovariate(self, rate: float) -> float:
        return 1.0 / rate

    def random(self) -> float:
        return 0.5

    def choices(self, of: Sequence[Any], *, weights: Sequence[float]) -> list[Any]:
        return [of[weights.index(max(weights))]]


def cluster(days: float = 1.0, **sections: Any) -> Scenario:
    given = {
        "run": {"name": "any", "days": days},
        "cluster": {"gpus": 8, **sections.get("cluster", {})},
        "checkpoint": {
            "every_minutes": 60.0, "blocking_s": 36.0, "durable_s": 720.0,
            "restart_s": 1080.0, "load_s": 720.0,
            **sections.get("checkpoint", {}),
        },
        "failures": [FAILURE | sections.get("failures", {})],
    }  # fmt: skip
    return scenario_of(given, label="test")


def state_of(scenario: Scenario) -> _ClusterState:
    assert scenario.cluster is not None and scenario.checkpoint is not None
    return _ClusterState(scenario, scenario.cluster, scenario.checkpoint, Even())  # type: ignore[arg-type]


def test_a_ledger_ends_with_its_time_and_joins_neighbours_of_one_cause() -> None:
    account = HoursLedger(end=10.0)
    assert account.spend(3.0, "one") == 3.0 and account.spend(2.0, "one") == 2.0
    assert account.spend_until(4.0, "two") == 0.0, "it is later already"
    assert account.spend(1.5, "two") == 1.5
    account.move(1.0, cause="one", to="three")
    assert not account.is_over and account.spend(100.0, "one") == 3.5 and account.is_over
    account.count("stop")
    account.count("stop")
    life = account.close()
    assert life.hours == {"one": 7.5, "two": 1.5, "three": 1.0} and life.events == {"stop": 2}
    assert life.spans == ((0.0, 5.0, "one"), (5.0, 6.5, "two"), (6.5, 10.0, "one"))


def test_a_failure_loses_what_no_durable_save_holds_and_begins_again_from_there() -> None:
    """Saves begin each hour and take 36 s of the training; they are durable after 12 minutes."""
    state = state_of(cluster(failures={"count": 24 / 3.15}))  # one failure in 3.15 hours
    for _ in range(4):
        state.train_to_next_event()  # three saves, at 1.00, 2.01 and 3.02, then the failure at 3.15
    hours, events = state.account.hours, state.account.events
    assert events == {"saves": 3, "GPU": 1, "failures": 1, "waits for a node": 1}
    assert hours[SAVING] == pytest.approx(0.03)
    # The third save was not durable: all since the second began is lost.
    assert hours[LOST] == pytest.approx(1.0 + 3.15 - 3.03)
    assert hours[TRAINING] == pytest.approx(2.0)
    assert hours[DETECTION] == pytest.approx(0.1)
    assert hours[NODES] == pytest.approx(4.0) and hours[RESTART] == pytest.approx(0.5)
    # What breaks while the machine waits is replaced with the rest, and the next hour of work begins anew.
    assert state._failure == pytest.approx(3.15 + 0.1 + 4.0 + 3.15)
    assert state._next_save == pytest.approx(3.15 + 0.1 + 4.0 + 0.5 + 1.0)


def test_a_failure_while_the_run_comes_back_begins_its_recovery_again() -> None:
    state = state_of(cluster(failures={"count": 24 / 0.3, "takes_node": False}))
    state._failure = 0.45
    state._come_back()  # half an hour, in which another failure comes, and 0.1 hours until it is noticed
    assert state.account.events["failures"] == state.account.events["GPU"] > 10
    assert state.account.is_over, "with failures each 0.3 hours it never comes back"
    # 0.45 hours until the first, then 78 times 0.1 to notice and 0.2 of the restart, and the day is over.
    assert state.account.hours == pytest.approx({RESTART: 0.45 + 78 * 0.2 + 0.05, DETECTION: 79 * 0.1})
    calm = state_of(cluster(failures={"count": 1.0, "takes_node": False}))
    calm._failure = 0.45
    calm._come_back()
    assert calm.account.events == {"failures": 1, "GPU": 1}
    assert calm.account.hours == pytest.approx({RESTART: 0.45 + 0.5, DETECTION: 0.1})


def test_a_save_that_is_durable_protects_what_came_before_it() -> None:
    state = state_of(cluster(failures={"count": 24 / 3.5}))
    for _ in range(4):
        state.train_to_next_event()
    assert state.account.hours[LOST] == pytest.approx(3.5 - 3.02 - 0.01)


def test_a_failure_in_the_middle_of_a_save_ends_it() -> None:
    state = state_of(cluster())
    state._failure = 1.005
    state.train_to_next_event()
    assert state.account.now == 1.005 and state.account.hours[SAVING] == pytest.approx(0.005)
    state.train_to_next_event()
    assert state.account.events["failures"] == 1 and state.account.hours[LOST] == pytest.approx(1.0)


def test_a_node_comes_from_the_spares_then_from_repair_then_from_elsewhere() -> None:
    state = state_of(
        cluster(days=9.0, cluster={"spare_nodes": 1, "repair_hours": 50.0, "replacement_hours": 30.0})
    )
    state._take_node()
    assert state.account.now == 0.0 and state._repaired == [50.0]
    state._take_node()  # 30 hours until another comes, 50 until the first is repaired
    assert state.account.hours == {NODES: 30.0} and state.account.events == {"waits for a node": 1}
    state._take_node()
    assert state.account.hours[NODES] == 50.0, "the repaired one comes first"
    assert state._repaired == [80.0, 100.0]
    state.account.spend(31.0, TRAINING)
    state._take_node()
    assert state.account.hours[NODES] == 50.0, "it was repaired meanwhile"
    assert state.account.events["waits for a node"] == 2


def test_nodes_that_no_spares_were_kept_for_are_not_waited_for_when_they_are_repaired() -> None:
    state = state_of(cluster(days=9.0, cluster={"repair_hours": 1.0, "replacement_hours": 30.0}))
    state._take_node()
    state._take_node()
    assert state.account.hours == {NODES: 60.0} and state._repaired == []


def test_a_straggler_slows_steps_until_it_is_found_and_replaced() -> None:
    slow = {
        "straggler_every_days": 0.25,
        "straggler_slowdown": 1.25,
        "straggler_found_hours": 2.0,
        "spare_nodes": 5,
    }
    state = state_of(cluster(cluster=slow, checkpoint={"every_minutes": 6000.0}))
    for _ in range(2):
        state.train_to_next_event()  # slow from hour 6 on, found at hour 8
    hours = state.account.hours
    assert hours[TRAINING] == pytest.approx(6.0 + 2.0 / 1.25) and hours[SLOW] == pytest.approx(0.4)
    assert hours[SAVING] == pytest.approx(0.2) and hours[RESTART] == pytest.approx(0.5)
    assert state.account.events == {"stragglers": 1, "saves": 1}
    assert state._straggler == pytest.approx(8.0 + 6.0) and state._slow_until <= state.account.now
    assert state._next_save == pytest.approx(8.7 + 100.0)


def test_a_restart_is_without_the_straggler_of_before() -> None:
    state = state_of(cluster())
    state._slow_until = 9.0
    assert not state._restart_is_hit()
    assert state._slow_until == state.account.now == 0.5


@pytest.mark.parametrize(
    ("planned", "event", "cause", "away", "following"),
    [
        (
            {"maintenance_every_days": 0.25, "maintenance_hours": 5.0},
            "maintenances",
            "maintenance",
            5.0,
            17.2,
        ),
        ({"job_hours": 6.0, "queue_hours": 3.0}, "jobs", "waiting in the queue", 3.0, 15.7),
    ],
)
def test_an_announced_stop_saves_first_and_comes_again_after_its_time(
    planned: dict[str, float], event: str, cause: str, away: float, following: float
) -> None:
    state = state_of(cluster(cluster=planned, checkpoint={"every_minutes": 6000.0}))
    state.train_to_next_event()
    assert state.account.events == {event: 1, "saves": 1}
    spent = {why: hours for why, hours in state.account.hours.items() if hours}
    assert spent == pytest.approx({TRAINING: 6.0, SAVING: 0.2, cause: away, RESTART: 0.5})
    assert LOST not in state.account.hours
    following_event = state._maintenance if event == "maintenances" else state._job_end
    assert following_event == pytest.approx(following)


def peers_of(**elastic: Any) -> _PeersState:
    scenario = scenario_of(
        {
            "run": {"name": "any", "days": 1.0},
            "elastic": {
                "peers": 4, "inner_steps": 90, "step_s": 40.0, "parameters": 1e9, "bits": 8.0,
                "bandwidth_mbit_s": 100.0, "outer_s": 36.0, **elastic,
            },
        },
        label="test",
    )  # fmt: skip
    assert scenario.elastic is not None
    return _PeersState(scenario, scenario.elastic, Even())  # type: ignore[arg-type]


RING_S = 2 * 3 / 4 * 1e9 * 8 / 100e6  # 120 seconds


def test_a_round_waits_for_the_slowest_then_averages_then_steps() -> None:
    state = peers_of(speed_spread=0.5)
    state.make_round()
    speeds = (0.5, 1 - 0.5 / 3, 1 + 0.5 / 3, 1.5)
    mean, slowest = sum(1 / speed for speed in speeds) / 4, 2.0  # hours, for 90 steps of 40 seconds
    assert state.account.hours == pytest.approx(
        {TRAINING: mean, SLOWER: slowest - mean, RING: RING_S / 3600, OUTER: 0.01}
    )
    assert state.account.events == {"rounds": 1}


@pytest.mark.parametrize(
    ("overlap", "step_s", "shown_s"), [(True, 1.0, RING_S - 90), (True, 40.0, 0.0), (False, 1.0, RING_S)]
)
def test_what_a_round_computes_hides_its_averaging(overlap: bool, step_s: float, shown_s: float) -> None:
    state = peers_of(overlap=overlap, step_s=step_s)
    state.make_round()
    assert state.account.hours.get(RING, 0.0) == pytest.approx(shown_s / 3600)


def test_what_the_slowest_peer_computes_is_the_time_of_a_round() -> None:
    """The speeds are 0.5 and 1.5: of 90 seconds of steps 180 pass, and 120 are those of the mean peer."""
    state = peers_of(peers=2, overlap=True, step_s=1.0, speed_spread=0.5, parameters=3e9)
    lost: list[tuple[float, bool]] = []
    state._lose_some = lambda hours, *, in_ring: bool(lost.append((hours, in_ring)))  # type: ignore[method-assign,func-returns-value]
    state.make_round()
    assert lost == [(180 / 3600, False), (240 / 3600, True)]
    assert state.account.hours == pytest.approx(
        {TRAINING: 120 / 3600, SLOWER: 60 / 3600, RING: 60 / 3600, OUTER: 0.01}
    )


def test_peers_that_left_or_crashed_are_counted_apart_and_come_back_with_the_state() -> None:
    state = peers_of(
        leaves_per_peer_day=24 * 0.7, absent_hours=5.0, join_s=1800.0
    )  # in an hour: half of them
    assert not state._lose_some(1.0, in_ring=True), "who leaves in order waits for the ring"
    assert state._present == {0, 1, 2, 3}
    assert not state._lose_some(1.0, in_ring=False)
    assert state.account.events == {"leaves": 4} and not state._present
    assert state._back == dict.fromkeys(range(4), 6.0)
    state.make_round()
    assert state.account.hours == {NOBODY: 6.5}, "an absence, and the time to fetch the state"
    state._take_joiners()
    assert state._present == {0, 1, 2, 3} and state.account.events["joins"] == 4
    crashing = peers_of(crashes_per_peer_day=24 * 0.7)
    crashing.account.spend(2.0, TRAINING)
    assert not crashing._lose_some(0.5, in_ring=True), "in half an hour it is less than half of them"
    assert crashing._lose_some(1.0, in_ring=True) and crashing.account.events == {"crashes": 4}
    assert crashing._back == dict.fromkeys(range(4), 2.0 + 1.0 + 12.0)
    assert not peers_of(crashes_per_peer_day=24 * 0.68)._lose_some(1.0, in_ring=True), "less than half"


def test_while_nobody_is_there_the_first_to_come_back_is_waited_for() -> None:
    state = peers_of(join_s=1800.0)
    state._present.clear()
    state._back = {0: 9.0, 2: 6.0}
    state.make_round()
    assert state.account.hours == {NOBODY: 6.5} and state.account.events == {}
    state._take_joiners()
    assert state._present == {2} and state._back == {0: 9.0}


def test_a_crash_repeats_the_stage_that_it_came_in_once_it_is_noticed() -> None:
    state = peers_of(peers=9, groups=3, detection_s=360.0)
    crashes = iter([False, True, False, False])
    state._lose_some = lambda hours, *, in_ring: next(crashes)  # type: ignore[method-assign]
    half, meet, again = stages_s(state._elastic, peers=9)
    state._average(hidden_s=half / 2)
    shown_s = half / 2 + 0.5 * meet + meet + again
    assert state.account.hours == pytest.approx({RING: shown_s / 3600, UNNOTICED: 0.1})
    assert state.account.events == {"rings begun again": 1}


def test_a_crash_is_one_whoever_else_stays_or_leaves() -> None:
    state = peers_of(crashes_per_peer_day=1.0)
    draws = iter([0.0, 0.99, 0.99, 0.99])
    state._random.random = lambda: next(draws)  # type: ignore[method-assign]
    assert state._lose_some(1.0, in_ring=True) and state._present == {1, 2, 3}


def test_rings_of_rings_have_room_for_all_peers() -> None:
    state = peers_of(peers=10, groups=4, latency_ms=50.0)
    # Rings of 3, then of 4: a third of the bytes goes over the second.
    half, meet, again = stages_s(state._elastic, peers=10)
    whole_s = 1e9 * 8 / 100e6
    assert half == again == pytest.approx(2 / 3 * whole_s + 2 * 0.05)
    assert meet == pytest.approx(2 * 3 / 4 * whole_s / 3 + 6 * 0.05)
    assert len(stages_s(state._elastic, peers=4)) == 1 and len(stages_s(state._elastic, peers=8)) == 3
    assert ring_s(3e6, ranks=4, bits=8, bandwidth_mbit_s=1e9, latency_ms=50) == pytest.approx(6 * 0.05)


def test_others_wait_for_a_joiner_only_where_it_blocks() -> None:
    for blocks in (True, False):
        state = peers_of(join_s=1800.0, join_blocks=blocks)
        state._present.discard(2)
        state._back[2] = 1.0
        state.account.spend(1.0, TRAINING)
        state._take_joiners()
        assert (2 in state._present) is blocks, "it fetched nothing before where it blocks"
        assert state.account.hours.get(JOINING, 0.0) == (0.5 if blocks else 0.0)
    alone = peers_of(join_s=1800.0, join_blocks=True, peers=1)
    alone._present.clear()
    alone._back[0] = 0.0
    alone._take_joiners()
    assert JOINING not in alone.account.hours, "nobody is there to wait"


def test_a_forecast_is_the_mean_of_its_lives_within_their_error() -> None:
    scenario = cluster(days=30.0, failures={"count": 2.0})
    told: list[None] = []
    found = forecast(scenario, lives=5, seed=7, done=lambda: told.append(None))
    lives = [simulate_cluster(scenario, seed=seed) for seed in range(7, 12)]
    shares = [life.goodput for life in lives]
    mean = sum(shares) / 5
    error = math.sqrt(sum((share - mean) ** 2 for share in shares) / 4 / 5)
    assert found.goodput == pytest.approx(mean) and found.first == lives[0] and len(told) == 5
    assert (found.low, found.high) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error))
    assert found.events["failures"] == sum(life.events["failures"] for life in lives) / 5
    assert found.hours[LOST] == pytest.approx(sum(life.hours[LOST] for life in lives) / 5)
    assert sum(found.hours.values()) == pytest.approx(30 * 24)
    one = forecast(scenario, lives=1)
    assert math.isnan(one.low) or one.low == 0.0
    peers = scenario_of(
        {
            "run": {"name": "any", "days": 1.0},
            "elastic": {"peers": 2, "step_s": 1.0, "parameters": 1e6, "bandwidth_mbit_s": 100.0},
        },
        label="test",
    )
    between = forecast(peers, lives=2)
    assert (
        between.first == simulate_peers(peers, seed=0)
        and RING in between.hours
        and SAVING not in between.hours
    )


def test_the_interval_of_a_forecast_lies_between_nothing_and_all_and_a_rare_event_counts_in_all_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, lost = {TRAINING: 1.0}, {TRAINING: 0.2, LOST: 0.8}
    lives = [
        Life(hours=kept, events={}, spans=()),
        Life(hours=lost, events={"saves": 3, "jobs": 4, "GPU": 2, "NIC": 4}, spans=()),
    ]
    monkeypatch.setattr(cluster_module, "simulate_cluster", lambda scenario, *, seed: lives[seed])
    found = forecast(cluster(), lives=2)
    assert (found.low, found.goodput, found.high) == (0.0, pytest.approx(0.6), 1.0)
    assert list(found.events.items()) == [("GPU", 1.0), ("NIC", 2.0), ("jobs", 2.0), ("saves", 1.5)]
    assert found.hours[LOST] == pytest.approx(0.4) and found.hours[SAVING] == 0.0
