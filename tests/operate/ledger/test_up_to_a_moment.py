"""What the history of a run says of it up to a moment, and how its processes ended."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.operate.ledger.test_ledger import T0, operation, start, step

from bloomery.operate.ledger.run_history import RunHistory, read_run_history


def history(events: list[dict[str, Any]], *, until: float = math.inf) -> RunHistory:
    return read_run_history(events, [], is_visible=lambda base: True, until=T0 + until)


def test_what_comes_at_the_moment_itself_is_part_of_the_history_and_what_comes_later_is_not() -> None:
    events = [
        start(0),
        step(10, 1, compute=1.0),
        operation(20, "rewind", to_step=1, reason="spike"),
        operation(30, "setting", key="x", value=1),
        operation(40, "checkpoint_failed", why="full"),
        operation(50, "checkpoint_failed", why="full"),
        step(60, 2, compute=1.0),
    ]
    seen = [history(events, until=until) for until in (9.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0)]
    assert [
        (told.kept_steps, len(told.changes), [incident.times for incident in told.incidents]) for told in seen
    ] == [(0, 0, []), (1, 0, []), (1, 0, [1]), (1, 1, [1]), (1, 1, [1, 1]), (1, 1, [1, 2]), (2, 1, [1, 2])]
    assert {told.last_s for told in seen} == {T0 + 60}


def test_a_process_that_was_stopped_and_one_that_failed_are_changes_and_one_that_finished_is_none() -> None:
    ends = [
        operation(10, "end", finished=False, reason="stop switch"),
        operation(20, "end", finished=False, failed=True, reason="KeyError"),
        operation(30, "end", finished=True, reason="its samples are done"),
    ]
    assert history([start(0), *ends]).changes == (
        (T0 + 10, "stopped: stop switch"),
        (T0 + 20, "failed: KeyError"),
    )
    assert [history([start(0), end]).is_over for end in ends] == [True, False, True]
    assert [history([start(0), end]).is_finished for end in ends] == [False, False, True]


def test_a_run_began_with_its_first_process_and_has_the_ranks_of_each() -> None:
    told = history([start(5, starting=2.0), start(50, 2, at=1, ranks=4, starting=3.0, loading=1.0)])
    assert (told.began_s, told.members) == (T0 + 3, ((T0 + 3, 1), (T0 + 46, 4)))


@pytest.mark.parametrize(
    ("fields", "tokens"), [({"global_batch": 8, "consumed_samples": 8008}, 180), ({}, 100)]
)
def test_the_tokens_of_the_run_that_a_fork_was_made_from_are_not_its_own(
    fields: dict[str, Any], tokens: int
) -> None:
    first = step(6, 1001, compute=1.0) | {"consumed_tokens": 80_080} | fields
    second = step(7, 1002, compute=1.0) | {"consumed_tokens": 80_180}
    seen = history([start(4, at=1000), first, second])
    assert (seen.kept_steps, seen.kept_tokens, seen.step) == (2, tokens, 1002)
    again = history([start(4), first, start(9, 2, at=1001), second])
    assert again.kept_tokens == 80_180, "it began by itself, and was started again"
