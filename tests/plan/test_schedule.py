import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.config.elastic import ElasticSection
from bloomery.config.load import load_recipe
from bloomery.config.optim import OptimSection, ScheduleSection
from bloomery.config.recipe import TrainSection
from bloomery.plan.schedule import (
    Phase,
    consumed_after,
    consumed_at_end,
    is_done,
    learning_rate,
    length_in_unit,
    phase_at,
    phases,
    progress,
    steps_at_end,
    steps_left,
    steps_of_peer,
    steps_of_run,
    steps_until,
    total_samples,
)

BLOOM_PLANNED = TrainSection(samples=220_000_000, global_batch=2048, ramp_up=(16, 16, 9_765_625))


def walk(train, samples):
    """(step, consumed, global batch) before each step of a run of so many samples: the slow way."""
    step = consumed = 0
    while consumed < samples:
        batch = phase_at(train, consumed).global_batch
        yield step, consumed, batch
        step, consumed = step + 1, consumed + batch
    yield step, consumed, 0


def test_the_planned_ramp_up_of_bloom_has_127_intervals():
    changes = phases(BLOOM_PLANNED)
    assert [phase.global_batch for _, phase in changes] == list(range(16, 2049, 16))
    assert len(changes) == 127 + 1
    assert round(9_765_625 / 127, 2) == 76_894.69
    assert [at for at, _ in changes[:3]] == [0, math.ceil(9_765_625 / 127), math.ceil(2 * 9_765_625 / 127)]
    assert changes[-1][0] == 9_765_625


def test_a_simulation_of_the_planned_run_first_has_384_at_iteration_17948():
    step, consumed = next((step, at) for step, at, batch in walk(BLOOM_PLANNED, 2_000_000) if batch == 384)
    assert (step, consumed) == (17_948, 1_768_736)
    assert consumed_after(BLOOM_PLANNED, 17_948) == 1_768_736
    assert steps_until(BLOOM_PLANNED, 1_768_736) == 17_948


@pytest.mark.parametrize(
    ("recipe", "iteration", "consumed"),
    [
        ("tr1-13b", 29_020, 10_698_064),
        ("tr1-13b", 33_240, 15_019_344),
        ("tr1-13b", 43_680, 25_709_904),
        ("tr11-176b", 85_376, 158_692_272),
    ],
)
def test_consumed_samples_are_those_in_the_published_logs(recipe, iteration, consumed):
    assert consumed_after(load_recipe(recipe).recipe.train, iteration) == consumed


def test_the_learning_rate_is_the_one_in_blooms_log():
    recipe = load_recipe("tr11-176b").recipe
    rate = learning_rate(recipe.optim, recipe.schedule, at=158_692_272, length=220_000_000)
    assert f"{rate:.3E}" == "1.150E-05"
    rate = learning_rate(recipe.optim, recipe.schedule, at=59_312, length=220_000_000)
    assert f"{rate:.3E}" == "1.944E-05"


@settings(max_examples=150, deadline=None)
@given(
    start=st.integers(1, 20),
    increment=st.integers(1, 7),
    intervals=st.integers(0, 12),
    ramp=st.integers(1, 900),
    samples=st.integers(1, 1500),
    changes=st.lists(st.integers(1, 1200), max_size=3, unique=True).map(sorted),
)
def test_the_closed_form_of_the_run_is_the_walk(start, increment, intervals, ramp, samples, changes):
    train = TrainSection(
        samples=samples,
        global_batch=start + increment * intervals,
        ramp_up=(start, increment, ramp),
        micro_batch_changes=tuple((at, 1 + index) for index, at in enumerate(changes)),
    )
    walked = list(walk(train, samples))
    steps, consumed, _ = walked[-1]
    assert steps_of_run(train, sequence_length=8) == steps
    assert consumed_after(train, steps) == consumed
    for step, at, _ in walked[:: max(1, len(walked) // 7)]:
        assert consumed_after(train, step) == at
        assert steps_until(train, at) == step
    listed = phases(train)
    for at in range(0, samples, 13):
        assert phase_at(train, at) == [phase for begin, phase in listed if begin <= at][-1]


def test_a_phase_changes_with_the_sample_it_names_and_can_key_a_table():
    train = TrainSection(
        samples=100,
        global_batch=4,
        micro_batch_changes=((10, 2), (20, 4)),
        precision_changes=((15, "bf16"),),
        precision="fp32",
    )
    assert [phase_at(train, at).micro_batch for at in (0, 9, 10, 19, 20, 99)] == [1, 1, 2, 2, 4, 4]
    assert [phase_at(train, at).precision for at in (14, 15)] == ["fp32", "bf16"]
    same = Phase(global_batch=4, micro_batch=1, precision="fp32", recompute="none")
    assert {phase_at(train, 0): "step"}[same] == "step"


def test_lengths_in_samples_tokens_and_steps():
    by_tokens = TrainSection(tokens=1001, global_batch=3)
    assert total_samples(by_tokens, sequence_length=10) == 101
    assert steps_of_run(by_tokens, sequence_length=10) == 34
    by_steps = TrainSection(steps=7, global_batch=3)
    assert total_samples(by_steps, sequence_length=10) == 21
    assert steps_of_run(by_steps, sequence_length=10) == 7


def test_a_run_counted_in_steps_ends_by_steps_and_others_by_samples():
    by_steps = TrainSection(steps=7, global_batch=3)
    assert not is_done(by_steps, step=6, consumed=10**6, sequence_length=10)
    assert is_done(by_steps, step=7, consumed=0, sequence_length=10)
    by_samples = TrainSection(samples=20, global_batch=3)
    assert not is_done(by_samples, step=10**6, consumed=19, sequence_length=10)
    assert is_done(by_samples, step=7, consumed=21, sequence_length=10)


@pytest.mark.parametrize(
    ("unit", "length", "at"), [("samples", 100, 40), ("tokens", 800, 320), ("steps", 25, 10)]
)
def test_length_and_progress_share_the_schedules_unit(unit, length, at):
    schedule = ScheduleSection(unit=unit)
    train = TrainSection(samples=100, global_batch=4)
    assert length_in_unit(train, schedule, sequence_length=8) == length
    assert progress(schedule, step=10, consumed=40, sequence_length=8) == at


OPTIM = OptimSection(learning_rate=1.0)


def rates(schedule, *at, length=1000):
    return [learning_rate(OPTIM, schedule, at=one, length=length) for one in at]


@pytest.mark.parametrize("shape", ["cosine", "linear", "wsd", "constant"])
def test_the_warm_up_is_linear_to_the_peak(shape):
    schedule = ScheduleSection(shape=shape, warmup=100, floor=0.1)
    assert rates(schedule, 1, 50, 100) == pytest.approx([0.01, 0.5, 1.0])


@pytest.mark.parametrize("shape", ["cosine", "linear", "wsd"])
def test_the_floor_is_reached_at_the_decays_end_and_held(shape):
    schedule = ScheduleSection(shape=shape, warmup=100, floor=0.1, decay=600)
    assert rates(schedule, 600, 700, 1000, 5000) == [0.1] * 4
    assert rates(replace(schedule, decay="auto"), 1000) == [0.1]


def test_the_cosine_is_halfway_down_in_the_middle_of_the_decay():
    schedule = ScheduleSection(shape="cosine", warmup=200, floor=0.2)
    assert rates(schedule, 600) == pytest.approx([0.6])
    assert rates(schedule, 400) == pytest.approx([0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4))])


def test_the_linear_decay_is_a_straight_line():
    assert rates(ScheduleSection(shape="linear", floor=0.0), 0, 250, 750) == pytest.approx([1.0, 0.75, 0.25])


def test_wsd_holds_the_peak_and_cools_down_over_its_share():
    schedule = ScheduleSection(shape="wsd", warmup=100, cooldown_share=0.2, cooldown_shape="sqrt")
    assert rates(schedule, 101, 500, 800) == [1.0] * 3
    assert rates(schedule, 850, 900, 950) == pytest.approx([1 - math.sqrt(x) for x in (0.25, 0.5, 0.75)])
    linear = replace(schedule, cooldown_shape="linear")
    assert rates(linear, 850, 900) == pytest.approx([0.75, 0.5])


def test_a_cooldown_never_begins_inside_the_warm_up():
    schedule = ScheduleSection(shape="wsd", warmup=900, cooldown_share=1.0, cooldown_shape="linear")
    assert rates(schedule, 450, 900, 950) == pytest.approx([0.5, 1.0, 0.5])


def test_a_cooldown_is_a_share_of_the_decay_where_that_ends_before_the_run():
    schedule = ScheduleSection(shape="wsd", decay=500, cooldown_share=0.2, cooldown_shape="linear", floor=0.0)
    assert rates(schedule, 399, 400, 450, 499, 500, 999) == pytest.approx([1.0, 1.0, 0.5, 0.01, 0.0, 0.0])


def test_a_constant_rate_stays_at_its_peak():
    assert rates(ScheduleSection(shape="constant"), 0, 500, 10_000) == [1.0] * 3


@settings(max_examples=100, deadline=None)
@given(
    shape=st.sampled_from(["cosine", "linear", "wsd"]),
    warmup=st.integers(0, 50),
    decay=st.integers(50, 400),
    floor=st.floats(0.0, 1.0),
)
def test_after_the_warm_up_the_rate_never_rises_and_stays_above_the_floor(shape, warmup, decay, floor):
    schedule = ScheduleSection(shape=shape, warmup=warmup, decay=decay, floor=floor)
    curve = rates(schedule, *range(warmup, 450))
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(curve))
    assert all(floor - 1e-12 <= rate <= 1.0 + 1e-12 for rate in curve)


@pytest.mark.parametrize(("consumed", "peers", "left"), [(0, 1, 10), (0, 3, 4), (95, 3, 1), (100, 3, 0)])
def test_each_of_some_peers_makes_its_part_of_the_steps_that_are_left_rounded_up(
    consumed: int, peers: int, left: int
):
    train = TrainSection(samples=100, global_batch=10)
    assert steps_left(train, sequence_length=8, consumed=consumed, peers=peers) == left


@pytest.mark.parametrize("step", [0, 7, 20, 25])
def test_a_run_counted_in_steps_makes_only_those_that_are_left(step: int):
    train = TrainSection(steps=20, samples=0, tokens=0, global_batch=10)
    end = consumed_at_end(train, sequence_length=8, step=step, consumed=10 * step)
    assert end == 10 * max(step, 20)


@pytest.mark.parametrize(("length", "begin"), [(1000, 800), (1001, 800), (1004, 803), (1005, 804)])
def test_a_cooldown_of_a_share_that_is_no_whole_number_begins_earlier(length: int, begin: int):
    schedule = ScheduleSection(shape="wsd", cooldown_share=0.2, cooldown_shape="linear")
    at = rates(schedule, begin - 1, begin, begin + 1, length=length)
    assert at == pytest.approx([1.0, 1.0, 1.0 - 1.0 / (length - begin)])


def test_steps_that_are_left_may_be_counted_from_within_a_ramp_up():
    train = TrainSection(samples=100, global_batch=10, ramp_up=(5, 5, 20))
    assert steps_left(train, sequence_length=8, consumed=10, peers=1) == 2 + 8
    assert steps_left(train, sequence_length=8, consumed=20, peers=2) == 4
    assert steps_left(train, sequence_length=8, consumed=101, peers=2) == 0
    assert consumed_after(train, 3, start=10) == 10 + 5 + 5 + 10
    assert consumed_at_end(train, sequence_length=8, consumed=15) == 100


@pytest.mark.parametrize(
    ("train", "peers", "last"),
    [
        (TrainSection(samples=100, global_batch=10), 1, 30 + 8),
        (TrainSection(samples=100, global_batch=10), 2, 30 + 4),
        (TrainSection(samples=100, global_batch=20), 1, 30 + 4),
        (TrainSection(samples=20, global_batch=10), 1, 30),
        (TrainSection(steps=33, samples=0, tokens=0, global_batch=10), 1, 33),
        (TrainSection(steps=7, samples=0, tokens=0, global_batch=10), 1, 30),
    ],
)
def test_the_last_step_of_a_run_counts_those_that_it_made_with_other_batches(
    train: TrainSection, peers: int, last: int
):
    at = {"step": 30, "consumed": 20, "peers": peers}
    assert steps_at_end(train, sequence_length=8, **at) == last


@pytest.mark.parametrize(("inner_steps", "steps"), [(0, 101), (5, 34)])
def test_a_peer_makes_its_part_of_the_steps_and_a_run_alone_makes_all_of_them(inner_steps: int, steps: int):
    train, elastic = (
        TrainSection(tokens=8080, global_batch=10),
        ElasticSection(inner_steps=inner_steps, peers=3),
    )
    assert steps_of_peer(train, elastic, sequence_length=8) == steps
