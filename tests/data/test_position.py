"""Positions and leases, against sets of samples kept by hand."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.data.order import Order
from bloomery.data.position import (
    EVERYTHING,
    Position,
    SampleShare,
    first,
    lease,
    merged,
    next_samples,
    total,
    within,
    without,
)
from bloomery.errors import DataError


def indices(ranges: tuple[range, ...]) -> list[int]:
    return [index for piece in ranges for index in piece]


some_ranges = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda pair: range(pair[0], pair[0] + pair[1])),
    max_size=6,
)


@settings(max_examples=50, deadline=None)
@given(some_ranges, some_ranges, st.integers(0, 80))
def test_range_arithmetic_is_set_arithmetic(some: list[range], others: list[range], count: int) -> None:
    one, two = merged(some), merged(others)
    left, right = set(indices(tuple(some))), set(indices(tuple(others)))
    assert indices(one) == sorted(left) and total(one) == len(left)
    assert indices(within(one, two)) == sorted(left & right)
    assert indices(without(one, two)) == sorted(left - right)
    assert indices(first(one, count)) == sorted(left)[:count]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_in_any_history_no_sample_is_used_twice_and_none_is_missed_but_the_skipped(
    data: st.DataObject,
) -> None:
    position, used, skipped = Position(), set(), set()
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(("train", "skip", "lease", "return", "restart")))
        if action == "train":
            span = position.next_samples(data.draw(st.integers(1, 9)))
            assert not used & set(indices(span)) and not skipped & set(indices(span))
            used |= set(indices(span))
            position = position.after(span)
        elif action == "skip":
            start = data.draw(st.integers(0, 120))
            samples = range(start, start + data.draw(st.integers(0, 15)))
            position = position.skipping(samples)
            skipped |= set(samples) - used
        elif action == "lease":
            position = position.giving_out(position.next_samples(data.draw(st.integers(1, 12))))
        elif action == "return" and used:
            back = data.draw(st.sampled_from(sorted(used)))
            position = position.returning((range(back, back + 1),))
            used.remove(back)
        else:
            position = Position.from_json(json.loads(json.dumps(position.to_json())))
        assert position.consumed == len(used)
        below = set(range(position.cursor))
        holes = set(indices(position.holes))
        assert below == used | holes | (skipped & below) and not holes & (used | skipped)
    span = position.next_samples(200)
    reached = max(indices(span)) + 1
    assert used | set(indices(span)) | skipped >= set(range(reached))


def test_holes_are_served_before_the_cursor_moves() -> None:
    position = Position().after((range(0, 10),)).giving_out((range(10, 14),)).after((range(14, 20),))
    assert position.cursor == 20
    assert position.next_samples(6) == (range(10, 14), range(20, 22))


def test_a_skip_keeps_what_already_trained_the_model() -> None:
    position = Position(consumed=10).skipping(range(5, 15))
    assert position.skips == (range(10, 15),)
    assert position.consumed == 10 and position.cursor == 15
    assert position.next_samples(2) == (range(15, 17),)


@pytest.mark.parametrize(
    "span", [(range(4, 8),), (range(11, 12),), (range(10, 13), range(11, 12)), (range(10, 32),)]
)
def test_a_span_that_could_not_come_next_is_refused(span: tuple[range, ...]) -> None:
    with pytest.raises(ValueError, match="not what comes next"):
        Position(consumed=10, skips=(range(30, 40),)).after(span)


def test_the_whole_state_stays_under_a_kilobyte_with_sixteen_ranges() -> None:
    base = 10**12
    skips = tuple(range(base + 1000 * i, base + 1000 * i + 500) for i in range(16))
    position = Position(consumed=5 * 10**12, skips=skips)
    stored = json.dumps(position.to_json())
    assert len(stored) < 1000 and Position.from_json(json.loads(stored)) == position


def test_another_batch_size_goes_on_with_the_very_next_sample() -> None:
    order = Order([50], [1.0], 3)
    position = Position().skipping(range(20, 25))
    seen: list[int] = []
    for size in (4, 4, 7, 1, 16, 2):
        span = order.next_span(position, size, EVERYTHING)
        seen += indices(span)
        position = position.after(span)
    assert seen == [index for index in range(39) if not 20 <= index < 25]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_with_peers_killed_at_random_every_sample_of_a_committed_round_counts_once(
    data: st.DataObject,
) -> None:
    batch, steps = data.draw(st.integers(1, 4)), 3
    order, position, counted = Order([1000], [1.0], 1), Position(), []
    for _ in range(data.draw(st.integers(1, 8))):
        peers = data.draw(st.integers(1, 4))
        shares, opened = lease(position, samples=[batch * steps] * peers)
        committed = opened
        for share in shares:
            survives = data.draw(st.booleans())
            local, taken = opened, []
            for _ in range(data.draw(st.integers(0, steps)) if not survives else steps):
                span = order.next_span(local, batch, share)
                local = local.after(span)
                taken.append(span)
            if survives:
                for span in taken:
                    committed = committed.after(span)
                    counted += indices(span)
        position = committed
    assert len(counted) == len(set(counted)) == position.consumed
    holes = set(indices(position.holes))
    assert set(counted) | holes == set(range(position.cursor)) and not holes & set(counted)


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_hundreds_of_kills_in_overlapping_rounds_lose_and_repeat_nothing(seed: int) -> None:
    """Peers come, are killed in the middle of a round, or finish late, while others' leases still run."""
    draw = random.Random(seed)
    batch, order, position = 3, Order([10_000], [1.0], 1), Position()
    running: dict[int, SampleShare] = {}
    counted: list[int] = []
    kills = peer = 0
    while kills < 300:
        if len(running) < 6 and draw.random() < 0.6:
            wanted = batch * draw.randint(1, 5)
            (running[peer],), position = lease(
                position, samples=[wanted], outstanding=tuple(running.values())
            )
            peer += 1
            continue
        if not running:
            continue
        share = running.pop(draw.choice(sorted(running)))
        local, taken = position, []
        rounds = total(share.lease or ()) // batch
        survives = draw.random() < 0.5
        for _ in range(rounds if survives else draw.randint(0, rounds)):
            span = order.next_span(local, batch, share)
            local, taken = local.after(span), [*taken, *span]
        if survives:
            position = position.after(taken)
            counted += indices(tuple(taken))
        kills += not survives
        if draw.random() < 0.05:  # the coordinator itself restarts from its JSON
            position = Position.from_json(json.loads(json.dumps(position.to_json())))
        waiting = set(indices(position.holes))
        assert len(counted) == len(set(counted)) == position.consumed
        assert set(counted) | waiting == set(range(position.cursor)) and not waiting & set(counted)
    while position.holes:  # what the killed left is served first, once
        (share,), position = lease(position, samples=[batch], outstanding=())
        position = position.after(share.lease or ())
        counted += indices(share.lease or ())
    assert sorted(counted) == list(range(position.cursor))


def test_leases_that_still_run_are_not_given_out_again() -> None:
    running, position = lease(Position(), samples=[4, 4])
    (late,), position = lease(position, samples=[6], outstanding=running)
    assert late == SampleShare(lease=(range(8, 14),))
    assert position.holes == (range(0, 14),)


def test_a_lease_that_runs_out_is_named() -> None:
    (share,), position = lease(Position(), samples=[3])
    with pytest.raises(DataError, match="3 samples left, and the batch takes 4"):
        next_samples(position, 4, share)


@pytest.mark.parametrize(
    "stored",
    [
        {"consumed": -1, "skips": [], "holes": []},
        {"consumed": 0, "skips": [[0, 5]], "holes": [[3, 4]]},
        {"consumed": 0, "skips": [], "holes": [[7, 9]]},
    ],
)
def test_a_position_that_contradicts_itself_is_refused(stored: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"position|samples|hole"):
        Position.from_json(stored)
