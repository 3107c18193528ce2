"""The orders of ranks: complete, free of circular waits, and as idle as the papers say."""

from __future__ import annotations

from collections import Counter

import pytest

from bloomery.config.validate_layout import rounds_fit
from bloomery.parallel.pipeline_schedule import PipelineOrder, bubble_fraction, forwards_only, pipeline_order

SCHEDULES = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 3), ("zero-bubble", 1)]
SCHEDULES += [("zero-bubble", 2), ("zbv", 2)]
COUNTS = (1, 2, 3, 4, 5, 8, 12, 13)


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("pipeline", [2, 3, 4])
def test_each_micro_batch_passes_each_stage_once_each_way_and_no_rank_waits_in_a_circle(
    schedule: str, chunks: int, pipeline: int
) -> None:
    tried = 0
    for count in COUNTS:
        if schedule in ("interleaved", "zero-bubble") and not rounds_fit(count, pipeline=pipeline):
            continue
        tried += 1
        table = pipeline_order(schedule, pipeline=pipeline, chunks=chunks, micro_batches=count)
        passed = passes(table)
        every = {(stage, number) for stage in range(pipeline * chunks) for number in range(count)}
        assert set(passed["forward"]) == every and set(passed["forward"].values()) == {1}
        whole, split = passed["backward"], passed["backward_input"]
        assert whole + split == passed["forward"]
        assert split == passed["backward_weight"]
        assert 0.0 <= bubble_fraction(table) < 1.0  # simulated to the end
    assert tried >= 4


def passes(table: PipelineOrder) -> dict[str, Counter[tuple[int, int]]]:
    found: dict[str, Counter[tuple[int, int]]] = {
        kind: Counter() for kind in ("forward", "backward", "backward_input", "backward_weight")
    }
    for actions in table:
        for action in actions:
            found[action.kind][action.stage, action.micro_batch] += 1
    return found


@pytest.mark.parametrize(("pipeline", "count"), [(2, 4), (4, 8), (4, 16), (8, 8)])
def test_the_bubble_is_what_the_papers_say(pipeline: int, count: int) -> None:
    def idle(schedule: str, chunks: int) -> float:
        return bubble_fraction(
            pipeline_order(schedule, pipeline=pipeline, chunks=chunks, micro_batches=count)
        )

    waits = pipeline - 1  # of (p − 1)/v forwards and backwards for m micro-batches
    for schedule, chunks, share in [("1f1b", 1, 1.0), ("gpipe", 1, 1.0), ("interleaved", 2, 1 / 2)]:
        assert idle(schedule, chunks) == pytest.approx(waits * share / (count + waits * share)), schedule
    assert idle("zero-bubble", 1) == pytest.approx(waits / 3 / (count + waits / 3))
    assert idle("zbv", 2) <= idle("zero-bubble", 1)


def test_one_forward_one_backward_keeps_no_more_micro_batches_than_there_are_stages() -> None:
    for rank, actions in enumerate(pipeline_order("1f1b", pipeline=4, chunks=1, micro_batches=16)):
        kept = most = 0
        for action in actions:
            kept += 1 if action.kind == "forward" else -1
            most = max(most, kept)
        assert (most, kept) == (4 - rank, 0)


def test_an_evaluation_only_goes_forward() -> None:
    table = forwards_only([0, 1, 1, 0], micro_batches=2)
    assert [[(a.stage, a.micro_batch) for a in actions] for actions in table] == [
        [(0, 0), (0, 1), (3, 0), (3, 1)],
        [(1, 0), (1, 1), (2, 0), (2, 1)],
    ]
