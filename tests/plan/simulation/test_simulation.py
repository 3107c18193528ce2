"""The simulator against closed forms, against what was published, and against its own books."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.config.load import load_recipe
from bloomery.errors import ConfigError
from bloomery.plan.checkpoint_plan import best_interval_s
from bloomery.plan.hardware import load_hardware
from bloomery.plan.overview import make_plan
from bloomery.plan.request import Request
from bloomery.plan.simulate import forecast
from bloomery.plan.simulate.cluster import simulate_cluster
from bloomery.plan.simulate.peers import RING, all_reduce_s, ring_s, simulate_peers, speeds_of, stages_s
from bloomery.plan.simulate.scenario import (
    TRAINING,
    ScenarioPeers,
    load_scenario,
    scenario_of,
    shipped_scenarios,
)

FAILURE = {"name": "GPU", "count": 1.0, "days": 1.0, "gpus": 8, "takes_node": False, "detection_s": 0.0}


def bare(*, days: float, every_minutes: float, blocking_s: float, restart_s: float, per_day: float):
    """A cluster with nothing but crashes, saves and restarts: what Daly's formula describes."""
    return scenario_of(
        {
            "run": {"name": "bare", "days": days},
            "cluster": {"gpus": 8},
            "checkpoint": {
                "every_minutes": every_minutes,
                "blocking_s": blocking_s,
                "durable_s": blocking_s,
                "restart_s": restart_s,
                "load_s": 0.0,
            },
            "failures": [FAILURE | {"count": per_day}],
        },
        label="test",
    )


@pytest.mark.parametrize(("every_minutes", "per_day"), [(10.0, 2.0), (30.0, 6.0), (60.0, 24.0), (120.0, 4.0)])
def test_goodput_agrees_with_dalys_formula(every_minutes: float, per_day: float) -> None:
    scenario = bare(days=150, every_minutes=every_minutes, blocking_s=60, restart_s=300, per_day=per_day)
    found = forecast(scenario, lives=12)
    # Daly (2006), equation 13: M·exp(R/M)·(exp((τ+δ)/M) − 1) seconds for each interval of work τ.
    every_s, mean_s = every_minutes * 60, 86_400 / per_day
    expected = every_s / (mean_s * math.exp(300 / mean_s) * math.expm1((every_s + 60) / mean_s))
    assert found.low - 0.003 < expected < found.high + 0.003
    assert found.goodput == pytest.approx(expected, rel=0.02)


RECIPES = {
    "tr11-176b": ("a100-80g", None),
    "tr1-13b": ("v100-32g", 128),
    "llmjp-172b": ("h100-80g", None),
    "tr11-176b checkpoint.background=off": ("a100-80g", None),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("per_week", [1.0, 7.0, 56.0])
def test_the_plan_and_the_simulator_agree_on_the_time_that_is_lost(recipe: str, per_week: float) -> None:
    hardware, accelerators = RECIPES[recipe]
    name, *overrides = recipe.split()
    plan = make_plan(
        Request(
            loaded=load_recipe(name, overrides),
            hardware=load_hardware(hardware),
            accelerators=accelerators,
            failures_per_week=per_week,
        )
    )
    kept = plan.draft.checkpoints
    operation = load_hardware(hardware).operation
    scenario = scenario_of(
        {
            "run": {"name": name, "days": 700 / per_week},
            "cluster": {"gpus": 8},
            "checkpoint": {
                "every_minutes": kept.interval_s / 60,
                "blocking_s": kept.blocking_s,
                "durable_s": kept.save_s,
                "restart_s": operation.restart_s,
                "load_s": kept.load_s,
            },
            "failures": [FAILURE | {"count": per_week / 7, "detection_s": operation.detection_s}],
        },
        label="test",
    )
    simulated = 1 - forecast(scenario, lives=24).goodput
    assert kept.lost_share == pytest.approx(simulated, rel=0.1)


def test_the_best_interval_of_a_sweep_is_youngs() -> None:
    best = best_interval_s(save_s=40, mean_time_between_failures_s=86_400 / 3)
    goodputs = {
        factor: forecast(
            bare(days=150, every_minutes=factor * best / 60, blocking_s=40, restart_s=60, per_day=3.0),
            lives=8,
        ).goodput
        for factor in (0.25, 1.0, 4.0)
    }
    assert max(goodputs, key=lambda factor: goodputs[factor]) == 1.0


def test_a_crash_costs_half_an_interval_of_work_on_average() -> None:
    """BLOOM: a checkpoint each three hours, about one and a half lost with a GPU."""
    found = forecast(load_scenario("bloom-176b", ["run.days=1500", "cluster.job_hours=0"]), lives=8)
    lost = found.hours["lost work"] / found.events["failures"]
    assert lost == pytest.approx(1.5, rel=0.1)


def test_without_failures_every_announced_stop_costs_its_save_and_one_restart() -> None:
    saving, durable, restart, load, away, found_after, slowdown = 36.0, 72.0, 150.0, 210.0, 5.0, 2.0, 1.25
    scenario = scenario_of(
        {
            "run": {"name": "announced", "days": 200.0},
            "cluster": {
                "gpus": 8,
                "spare_nodes": 1000,
                "job_hours": 100.0,
                "queue_hours": 1.0,
                "maintenance_every_days": 10.0,
                "maintenance_hours": away,
                "straggler_every_days": 4.0,
                "straggler_found_hours": found_after,
                "straggler_slowdown": slowdown,
            },
            "checkpoint": {
                "every_minutes": 60.0,
                "blocking_s": saving,
                "durable_s": durable,
                "restart_s": restart,
                "load_s": load,
            },
            "failures": [FAILURE | {"count": 0.0}],
        },
        label="test",
    )
    life = simulate_cluster(scenario, seed=3)
    events, hours = life.events, life.hours
    assert min(events["stragglers"], events["maintenances"], events["jobs"]) > 10
    stops = round(hours["restart and load"] / ((restart + load) / 3600))
    assert hours["restart and load"] == pytest.approx(stops * (restart + load) / 3600)
    replaced = stops - events["maintenances"] - events["jobs"]
    assert 0.8 * events["stragglers"] < replaced <= events["stragglers"], "others go at another stop"
    periodic = events["saves"] - stops
    assert hours["saving"] == pytest.approx((periodic * saving + stops * durable) / 3600)
    assert hours["maintenance"] == pytest.approx(events["maintenances"] * away)
    slow = found_after * (1 - 1 / slowdown)
    assert replaced * slow <= hours["slowed by a straggler"] <= events["stragglers"] * slow
    assert hours["waiting in the queue"] == pytest.approx(events["jobs"], rel=0.5)
    assert "lost work" not in hours and "failures" not in events and "waits for a node" not in events
    assert sum(hours.values()) == pytest.approx(200 * 24)


def test_llama_3_has_its_interruptions_and_over_nine_tenths_of_the_time() -> None:
    found = forecast(load_scenario("llama3-405b"), lives=16)
    assert found.events["failures"] == pytest.approx(419, rel=0.06)
    assert 0.88 < found.goodput < 0.95


@pytest.mark.parametrize(
    ("name", "published", "all_reduce"),
    [
        ("intellect1-usa", 0.957, 103),
        ("intellect1-europe", 0.856, 382),
        ("intellect1-global", 0.830, 469),
    ],
)
def test_compute_utilisation_of_intellect_1(name: str, published: float, all_reduce: float) -> None:
    scenario = load_scenario(name)
    assert scenario.elastic is not None
    assert all_reduce_s(scenario.elastic, peers=scenario.elastic.peers) == pytest.approx(all_reduce, rel=0.01)
    assert forecast(scenario, lives=2).goodput == pytest.approx(published, abs=0.005)


def test_the_ring_time_is_that_of_its_bytes_and_hops() -> None:
    assert ring_s(64e6, ranks=2, bits=8, bandwidth_mbit_s=200) == pytest.approx(2.56)
    assert ring_s(1e6, ranks=1, bits=32, bandwidth_mbit_s=1) == 0.0
    # n times the fragments pay n times the hops, and the same bytes.
    assert ring_s(4e6, ranks=4, bits=32, bandwidth_mbit_s=100, latency_ms=50) == pytest.approx(1.92 + 0.3)


rates = st.floats(0.0, 40.0)


@settings(max_examples=60)
@given(
    per_day=rates,
    every=st.floats(1.0, 600.0),
    blocking=st.floats(0.0, 900.0),
    durable=st.floats(0.0, 20_000.0),
    spares=st.integers(0, 3),
    job=st.sampled_from([0.0, 5.0, 20.0]),
    maintenance=st.sampled_from([0.0, 0.5, 7.0]),
    straggler=st.sampled_from([0.0, 0.3, 5.0]),
    seed=st.integers(0, 5),
)
def test_every_hour_of_a_cluster_has_one_cause(
    per_day: float,
    every: float,
    blocking: float,
    durable: float,
    spares: int,
    job: float,
    maintenance: float,
    straggler: float,
    seed: int,
) -> None:
    scenario = scenario_of(
        {
            "run": {"name": "any", "days": 20.0},
            "cluster": {
                "gpus": 64,
                "spare_nodes": spares,
                "job_hours": job,
                "queue_hours": 2.0,
                "maintenance_every_days": maintenance,
                "straggler_every_days": straggler,
            },
            "checkpoint": {"every_minutes": every, "blocking_s": blocking, "durable_s": durable},
            "failures": [FAILURE | {"count": per_day, "gpus": 64, "takes_node": True, "detection_s": 120.0}],
        },
        label="test",
    )
    life = simulate_cluster(scenario, seed=seed)
    assert sum(life.hours.values()) == pytest.approx(480.0)
    assert all(hours > -1e-9 for hours in life.hours.values())
    assert life.spans[0][0] == 0.0 and life.spans[-1][1] == pytest.approx(480.0)
    assert all(one[1] == other[0] for one, other in zip(life.spans, life.spans[1:], strict=False))


def test_rings_of_rings_send_the_same_bytes_in_fewer_hops_and_a_crash_repeats_one_stage() -> None:
    base = load_scenario("internet-elastic", ["elastic.peers=64", "elastic.latency_ms=50"]).elastic
    assert base is not None
    grouped = replace(base, groups=8)
    reduce, meet, gather = stages_s(grouped, peers=64)
    whole_s = base.parameters * base.bits / (base.bandwidth_mbit_s * 1e6)
    assert reduce == gather == pytest.approx(7 / 8 * whole_s + 7 * 0.05)
    assert meet == pytest.approx(2 * 7 / 8 * whole_s / 8 + 14 * 0.05)
    (flat,) = stages_s(base, peers=64)
    assert flat - all_reduce_s(grouped, peers=64) == pytest.approx((126 - 28) * 0.05)
    assert stages_s(grouped, peers=1) == (0.0,) and len(stages_s(grouped, peers=8)) == 1


@settings(max_examples=40)
@given(
    peers=st.integers(1, 9),
    groups=st.integers(1, 4),
    crashes=st.floats(0.0, 20.0),
    leaves=st.floats(0.0, 20.0),
    spread=st.floats(0.0, 0.5),
    blocks=st.booleans(),
    overlap=st.booleans(),
)
def test_every_hour_between_peers_has_one_cause(
    peers: int, groups: int, crashes: float, leaves: float, spread: float, blocks: bool, overlap: bool
) -> None:
    scenario = scenario_of(
        {
            "run": {"name": "any", "days": 10.0},
            "elastic": {
                "peers": peers,
                "groups": groups,
                "step_s": 5.0,
                "parameters": 1e9,
                "bandwidth_mbit_s": 300.0,
                "crashes_per_peer_day": crashes,
                "leaves_per_peer_day": leaves,
                "speed_spread": spread,
                "absent_hours": 3.0,
                "join_s": 600.0,
                "join_blocks": blocks,
                "overlap": overlap,
                "fragments": 4,
            },
        },
        label="test",
    )
    life = simulate_peers(scenario, seed=1)
    assert sum(life.hours.values()) == pytest.approx(240.0)
    assert all(hours >= 0.0 for hours in life.hours.values())


def test_smaller_codecs_overlap_and_faster_links_never_lower_the_goodput() -> None:
    base = load_scenario(
        "internet-elastic", ["elastic.crashes_per_peer_day=0", "elastic.leaves_per_peer_day=0"]
    )
    assert base.elastic is not None

    def goodput(**changed: object) -> float:
        assert base.elastic is not None
        return simulate_peers(replace(base, elastic=replace(base.elastic, **changed)), seed=0).goodput

    assert goodput(bits=4.0) > goodput(bits=8.0) > goodput(bits=32.0)
    assert goodput(overlap=True) > goodput(overlap=False)
    assert goodput(bandwidth_mbit_s=1000.0) > goodput(bandwidth_mbit_s=500.0)


def test_the_same_seed_gives_the_same_life_and_another_seed_another() -> None:
    scenario = load_scenario("bloom-176b")
    assert simulate_cluster(scenario, seed=3) == simulate_cluster(scenario, seed=3)
    assert simulate_cluster(scenario, seed=3) != simulate_cluster(scenario, seed=4)


def test_every_shipped_scenario_lives() -> None:
    assert len(shipped_scenarios()) >= 6
    for name in shipped_scenarios():
        assert 0.3 < forecast(load_scenario(name, ["run.days=10"]), lives=1).goodput <= 1.0


def test_failures_while_the_run_comes_back_are_counted_among_those_of_their_kind() -> None:
    scenario = scenario_of(
        {
            "run": {"name": "any", "days": 20.0},
            "cluster": {"gpus": 8, "job_hours": 1.0, "queue_hours": 0.1},
            "checkpoint": {"every_minutes": 10.0, "blocking_s": 1.0, "durable_s": 1.0, "restart_s": 1800.0},
            "failures": [FAILURE | {"count": 40.0}],
        },
        label="test",
    )
    events = simulate_cluster(scenario, seed=0).events
    assert events["jobs"] > 10 and events["failures"] == events["GPU"] > 100


def test_without_a_spare_each_failure_that_takes_a_node_waits_for_another() -> None:
    scenario = scenario_of(
        {
            "run": {"name": "any", "days": 20.0},
            "cluster": {"gpus": 8, "spare_nodes": 0, "replacement_hours": 1.0},
            "checkpoint": {"every_minutes": 10.0, "blocking_s": 1.0, "durable_s": 1.0},
            "failures": [FAILURE | {"takes_node": True}],
        },
        label="test",
    )
    events = simulate_cluster(scenario, seed=0).events
    assert events["waits for a node"] == events["failures"] > 5


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        load_scenario(
            "bloom-176b",
            ["cluster.gpus=0", "checkpoint.every_minutes=-3", "failures.GPU.count=-1", "cluster.nods=7"],
        )
    told = str(refused.value)
    assert told.startswith("4 mistakes")
    assert "Did you mean" not in told or "nods" in told


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["cluster.gpus=7"], "no whole number of nodes"),
        (["failures.Moon.count=1"], "no such kind of failure"),
        (["nonsense"], "is not a setting"),
        (["elastic.peers=3"], "either [cluster] or [elastic]"),
    ],
)
def test_nonsense_gets_a_remedy(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("[", r"\[").replace("]", r"\]")):
        load_scenario("bloom-176b", overrides)


def test_a_scenario_whose_name_is_misspelt_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'bloom-176b'"):
        load_scenario("blom-176b")


def test_a_round_has_at_least_one_step() -> None:
    (name, *_) = [name for name in shipped_scenarios() if load_scenario(name).elastic is not None]
    with pytest.raises(ConfigError, match=r"elastic\.inner_steps"):
        load_scenario(name, ["elastic.inner_steps=0"])


@pytest.mark.parametrize(("peers", "speeds"), [(1, (1.0,)), (2, (0.6, 1.4)), (5, (0.6, 0.8, 1.0, 1.2, 1.4))])
def test_the_speeds_of_peers_lie_evenly_from_the_slowest_to_the_fastest(peers, speeds):
    elastic = ScenarioPeers(peers=peers, step_s=1.0, speed_spread=0.4, parameters=1e9, bandwidth_mbit_s=100.0)
    assert speeds_of(elastic) == pytest.approx(speeds)


def test_what_a_round_computes_hides_as_much_of_all_stages_of_an_all_reduce_together() -> None:
    calm = ["elastic.crashes_per_peer_day=0", "elastic.leaves_per_peer_day=0", "elastic.speed_spread=0"]
    scenario = load_scenario("internet-elastic", [*calm, "elastic.peers=64"])
    assert scenario.elastic is not None
    grouped = replace(scenario.elastic, groups=8, overlap=True)
    stages = stages_s(grouped, peers=64)
    hidden_s = 1.5 * stages[0]
    elastic = replace(grouped, step_s=hidden_s / grouped.inner_steps)
    life = simulate_peers(replace(scenario, elastic=elastic), seed=0)
    shown_s = life.hours[RING] / life.hours[TRAINING] * hidden_s
    assert shown_s == pytest.approx(sum(stages) - hidden_s, rel=0.02)
