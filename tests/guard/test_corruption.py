"""Which rank digests name, and what the guard asks for then."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.guard.reports import report

from bloomery.guard.corruption import SilentCorruption
from bloomery.guard.digests import (
    RankDigests,
    computation_faults,
    digests_from_json,
    disputed_micro_batches,
    held_faults,
    is_not_deterministic,
    settled_by_repetition,
)
from bloomery.guard.verdict import CarryOn, Rewind, Rung, Stop

RIGHT, WRONG = 7, 99


def ranks(count: int, **held: int) -> list[RankDigests]:
    """A row of replicas that agree; each computed its own micro-batch twice and its neighbour's once."""
    return [
        RankDigests(
            rank=rank,
            host=f"host{rank}",
            device="cpu",
            kind="cpu",
            data=rank,
            place=(0, 0),
            held={"weights": RIGHT, "gradients": RIGHT, **held},
            computed={rank: (RIGHT + rank, RIGHT + rank)}
            | ({(rank + 1) % count: (RIGHT + (rank + 1) % count,)} if count > 1 else {}),
        )
        for rank in range(count)
    ]


def repeating(row: list[RankDigests], data: int, **results: int) -> list[RankDigests]:
    """Return the row after everybody computed one micro-batch, with the results of single ranks (r0, r1)."""
    return [
        replace(
            rank,
            computed={
                **rank.computed,
                data: (*rank.computed.get(data, ()), results.get(f"r{rank.rank}", RIGHT + data)),
            },
        )
        for rank in row
    ]


def computing(row: list[RankDigests], rank: int, data: int, *digests: int) -> list[RankDigests]:
    """The row with other results of one rank."""
    changed = replace(row[rank], computed={**row[rank].computed, data: digests})
    return [*row[:rank], changed, *row[rank + 1 :]]


def holding(row: list[RankDigests], rank: int, **held: int) -> list[RankDigests]:
    """The row with one rank that holds something else."""
    return [*row[:rank], replace(row[rank], held={**row[rank].held, **held}), *row[rank + 1 :]]


def test_replicas_that_agree_give_no_fault() -> None:
    row = ranks(4)
    assert held_faults(row) == [] and disputed_micro_batches(row) == () and computation_faults(row) == []
    assert not is_not_deterministic(row)
    row[0] = replace(row[0], shard=3, place=(2, 1), not_finite=("model.a",))
    assert [digests_from_json(json.loads(json.dumps(rank.to_json()))) for rank in row] == row


def test_the_replica_that_holds_other_bits_than_the_majority_is_named() -> None:
    (fault,) = held_faults(holding(ranks(3), 2, weights=WRONG, gradients=WRONG))
    assert (fault.what, fault.ranks, fault.is_certain) == ("weights", (2,), True)
    assert "rank 2 (cpu of host2)" in fault.reason


def test_weights_that_are_not_finite_are_wrong_whatever_other_replicas_hold() -> None:
    spoilt = replace(holding(ranks(2), 1, weights=WRONG)[1], not_finite=("model.a", "model.b"))
    (fault,) = held_faults([ranks(2)[0], spoilt])
    assert (fault.what, fault.ranks, fault.is_certain) == ("weights", (1,), True)
    assert fault.reason == "rank 1 (cpu of host1) holds weights that are not finite, in model.a, model.b"
    everywhere = [replace(rank, not_finite=("model.a",)) for rank in ranks(2)]
    (fault,) = held_faults(everywhere)
    assert (fault.ranks, fault.is_certain) == ((0, 1), False), "all replicas got it from somewhere"
    first, second = held_faults([replace(rank, shard=rank.rank) for rank in everywhere])
    assert (first.ranks, second.ranks) == ((0,), (1,)), "each holds another shard"


def test_of_two_replicas_that_differ_both_are_told_until_the_steps_are_made_again() -> None:
    row = holding(ranks(2), 1, weights=WRONG)
    (fault,) = held_faults(row)
    assert fault.ranks == (0, 1) and not fault.is_certain
    before = {rank.rank: dict(rank.held) for rank in row}
    assert settled_by_repetition(before, ranks(2)) == (1,)
    assert settled_by_repetition(before, row) == ()  # they differ again


def test_shards_of_zero_are_not_taken_for_copies_of_one_another() -> None:
    row = [replace(rank, shard=rank.rank) for rank in ranks(2)]
    assert held_faults(holding(row, 1, weights=WRONG)) == []
    (fault,) = held_faults([replace(rank, held={"working weights": rank.rank}) for rank in row])
    assert fault.what == "weights"
    assert held_faults(holding(row, 1, gradients=WRONG)) == []


def test_ranks_that_are_known_to_be_wrong_are_not_also_said_to_be_undecided() -> None:
    results = [{0: (1,), 1: (WRONG,)}, {0: (2,), 1: (WRONG,)}, *[{1: (RIGHT,)}] * 3]
    row = [replace(rank, computed=own) for rank, own in zip(ranks(5), results, strict=True)]
    assert [(fault.ranks, fault.is_certain) for fault in computation_faults(row)] == [((0, 1), True)]


def test_two_computations_of_one_replica_do_not_show_that_kernels_are_not_deterministic() -> None:
    (alone,) = ranks(1)
    assert not is_not_deterministic([replace(alone, computed={0: (1, 2)})])
    assert not is_not_deterministic([replace(alone, computed={0: (1, 2, 1)})])
    assert is_not_deterministic([replace(alone, computed={0: (1, 2, 3)})])


@pytest.mark.parametrize("apart", [{"shard": 1}, {"kind": "another"}, {"place": (1, 0)}], ids=str)
def test_ranks_that_hold_other_parts_need_not_agree_after_a_repetition(apart: dict[str, Any]) -> None:
    first, second = ranks(2)
    second = replace(second, held={"weights": RIGHT + 1}, **apart)
    before = {0: first.held, 1: {"weights": WRONG}}
    assert settled_by_repetition(before, [first, second]) == (1,)


def test_ranks_of_other_hardware_are_not_compared() -> None:
    row = holding(ranks(2), 1, weights=WRONG)
    assert held_faults([row[0], replace(row[1], kind="another processor")]) == []


@pytest.mark.parametrize("count", [2, 4])
def test_an_error_that_comes_once_is_named_from_any_of_the_three_computations(count: int) -> None:
    trained = computing(ranks(count), 1, 1, WRONG, RIGHT + 1)
    again = computing(ranks(count), 1, 1, RIGHT + 1, WRONG)
    assert disputed_micro_batches(trained) == disputed_micro_batches(again) == (1,)
    for row in (trained, again):
        (fault,) = computation_faults(repeating(row, 1))
        assert fault.ranks == (1,) and fault.is_certain
    of_other = computing(ranks(count), 1, (1 + 1) % count, WRONG)
    (data,) = disputed_micro_batches(of_other)
    (fault,) = computation_faults(repeating(of_other, data))
    assert fault.ranks == (1,)


def test_a_rank_that_always_computes_wrongly_is_outvoted_by_three_others_and_not_by_one() -> None:
    row = computing(computing(ranks(4), 1, 1, WRONG, WRONG), 1, 2, WRONG)
    assert disputed_micro_batches(row) == (1, 2)
    row = repeating(repeating(row, 1, r1=WRONG), 2, r1=WRONG)
    (fault,) = computation_faults(row)
    assert fault.ranks == (1,) and fault.is_certain
    pair = computing(ranks(2), 1, 1, WRONG, WRONG)
    (fault,) = computation_faults(repeating(pair, 1, r1=WRONG))
    assert fault.ranks == (0, 1) and not fault.is_certain


def test_one_replica_finds_what_does_not_repeat_and_knows_kernels_that_never_do() -> None:
    row = computing(ranks(1), 0, 0, WRONG, RIGHT)
    assert disputed_micro_batches(row) == (0,)
    (fault,) = computation_faults(repeating(row, 0))
    assert fault.ranks == (0,)
    assert not is_not_deterministic(repeating(row, 0))
    assert is_not_deterministic(repeating(row, 0, r0=98))
    unsteady = [replace(rank, computed={rank.rank: (1, 2)}) for rank in ranks(4)]
    assert is_not_deterministic(unsteady)


def test_the_guard_goes_back_to_the_last_clean_step_and_stops_at_the_second_fault_of_a_rank() -> None:
    guard = SilentCorruption(faults=2, forget_steps=100)
    begun, verdict = guard.judge(guard.fresh(), report(step=1))
    history, verdict = guard.judge(begun, report(step=5))
    assert isinstance(verdict, CarryOn)
    history, verdict = guard.judge(history, report(step=9, corruption_checked=True))
    assert isinstance(verdict, CarryOn)
    found = {"corruption_checked": True, "corruption": "rank 2 is odd", "corrupt_ranks": (2,)}
    history, verdict = guard.judge(history, report(step=13, **found))
    assert isinstance(verdict, Rewind) and verdict.to_step == 8 and not verdict.skip
    assert not verdict.may_start_anew and "rank 2 is odd" in verdict.reason
    kept = guard.rewound(history, begun, rung=Rung.WATCH)
    other = {**found, "corrupt_ranks": (1,)}
    _, verdict = guard.judge(kept, report(step=13, **other))
    assert isinstance(verdict, Rewind) and verdict.to_step == 0 and verdict.may_start_anew
    _, verdict = guard.judge(kept, report(step=20, **found))
    assert isinstance(verdict, Stop) and verdict.failed and "Rank 2" in verdict.reason
    _, verdict = guard.judge(kept, report(step=113, **found))  # the first is forgotten
    assert isinstance(verdict, Rewind)


def test_a_fault_is_remembered_through_clean_checks_and_only_checked_steps_are_clean() -> None:
    guard = SilentCorruption(faults=2, forget_steps=100)
    found = {"corruption_checked": True, "corruption": "rank 2 is odd", "corrupt_ranks": (2,)}
    history: Any = None  # of before there was the guard
    for one in (report(step=5), report(step=7, **found), report(step=9, corruption_checked=True)):
        history, _ = guard.judge(history, one)
    assert history == {"clean": 8, "named": [[7, 2]], "undecided": []}
    assert guard.judge(history, report(step=12))[0] == history, "nothing was looked at"
    history, verdict = guard.judge(history, report(step=13, **found))
    assert isinstance(verdict, Stop) and history["undecided"] == [], "somebody was named"


def test_a_run_that_began_without_the_guard_goes_back_to_where_it_was_resumed() -> None:
    guard = SilentCorruption(faults=2, forget_steps=100)
    found = {"corruption_checked": True, "corruption": "rank 2 is odd", "corrupt_ranks": (2,)}
    history, _ = guard.judge(guard.resumed(guard.fresh()), report(step=501))
    _, verdict = guard.judge(history, report(step=510, **found))
    assert isinstance(verdict, Rewind) and verdict.to_step == 500 and not verdict.may_start_anew
    _, verdict = guard.judge(
        guard.rewound(history, guard.fresh(), rung=Rung.WATCH), report(step=401, **found)
    )
    assert isinstance(verdict, Rewind) and verdict.to_step == 400 and not verdict.may_start_anew


def test_differences_that_nobody_can_decide_do_not_send_a_run_back_for_ever() -> None:
    guard = SilentCorruption(faults=2, forget_steps=100)
    found = {"corruption_checked": True, "corruption": "rank 0, rank 1 differ"}
    restored, _ = guard.judge(guard.fresh(), report(step=1))
    history = restored
    for _ in range(2):
        history, verdict = guard.judge(history, report(step=13, **found))
        assert isinstance(verdict, Rewind)
        history = guard.rewound(history, restored, rung=Rung.WATCH)
    _, verdict = guard.judge(history, report(step=113, **found))  # the others are forgotten
    assert isinstance(verdict, Rewind)
    _, verdict = guard.judge(history, report(step=13, **found))
    assert isinstance(verdict, Stop) and verdict.failed and "rank 0, rank 1" in verdict.reason
    of_earlier_version = {"clean": 8, "named": [[3, 1]]}
    kept, verdict = guard.judge(of_earlier_version, report(step=13, **found))
    assert isinstance(verdict, Rewind) and kept == {**of_earlier_version, "undecided": [13]}
    _, verdict = SilentCorruption(faults=1, forget_steps=100).judge(restored, report(step=13, **found))
    assert isinstance(verdict, Rewind), "no rank was named"


def test_ranks_are_looked_at_once_however_many_places_they_have() -> None:
    class Counted(tuple[RankDigests, ...]):
        looks = 0

        def __iter__(self) -> Iterator[RankDigests]:
            self.looks += 1
            return super().__iter__()

    grid = Counted(
        replace(
            rank,
            rank=8 * place + rank.rank,
            place=(place, 0),
            computed={rank.data: (1, 1)},
            held={"weights": 1},
        )
        for place in range(16)
        for rank in ranks(8)
    )
    assert disputed_micro_batches(grid) == () and computation_faults(grid) == []
    before = {rank.rank: dict(rank.held) for rank in tuple(grid)}
    assert settled_by_repetition({**before, 9: {"weights": 2}}, grid) == (9,)
    assert grid.looks <= 4


def test_where_nobody_held_the_bits_of_now_a_repetition_names_nobody() -> None:
    before = {rank: {"weights": WRONG + rank, "gradients": RIGHT} for rank in range(2)}
    assert settled_by_repetition(before, ranks(2)) == ()


def test_of_many_ranks_four_are_named_and_the_rest_are_counted_in_their_order() -> None:
    row = [replace(rank, held={"weights": RIGHT if rank.rank < 10 else rank.rank}) for rank in ranks(17)]
    (fault,) = held_faults(row)
    assert fault.ranks == tuple(range(10, 17)) and fault.is_certain
    assert "rank 13 (cpu of host13) and 3 more holds other weights than the 10 replicas" in fault.reason
    assert "rank 14" not in fault.reason
    half = [replace(rank, held={"weights": rank.rank % 2}) for rank in ranks(4)]
    (fault,) = held_faults(half)
    assert fault.ranks == (0, 1, 2, 3) and not fault.is_certain and "none has a majority" in fault.reason


def test_other_gradients_are_told_beside_other_weights_of_other_ranks_alone() -> None:
    row = holding(holding(ranks(5), 1, weights=WRONG, gradients=WRONG), 3, gradients=WRONG + 1)
    weights, gradients = held_faults(row)
    assert (weights.what, weights.ranks) == ("weights", (1,))
    assert (gradients.what, gradients.ranks) == ("gradients", (1, 3))
    alone = held_faults(holding(ranks(5), 1, weights=WRONG, gradients=WRONG))
    assert [(fault.what, fault.ranks) for fault in alone] == [("weights", (1,))]


def test_computations_that_nobody_can_decide_are_told_beside_those_that_are_certain() -> None:
    row = computing(ranks(4), 1, 1, WRONG, WRONG)
    row = repeating(row, 1)
    row = [replace(rank, computed={**rank.computed, 9: (100 + rank.rank,)}) for rank in row]
    certain, unclear = computation_faults(row)
    assert (certain.ranks, certain.is_certain) == ((1,), True)
    assert (unclear.ranks, unclear.is_certain) == ((0, 1, 2, 3), False)
    assert "none has a majority" in unclear.reason and disputed_micro_batches(row) == (1, 9)


def test_ranks_and_micro_batches_are_told_in_ascending_order() -> None:
    row = ranks(10)
    for rank in (8, 1):
        row = computing(row, rank, rank, WRONG, RIGHT + rank)
    assert disputed_micro_batches(row) == (1, 8)
    (fault,) = computation_faults(row)
    assert fault.is_certain and fault.ranks == (1, 8)
    (open_question,) = computation_faults(
        [replace(one, computed={3: (one.rank,)}) for one in row if one.rank in (1, 8)]
    )
    assert not open_question.is_certain and open_question.ranks == (1, 8)
    before = {rank.rank: dict(rank.held) for rank in row} | {8: {"weights": WRONG}, 1: {"weights": WRONG}}
    assert settled_by_repetition(before, row) == (1, 8)


def test_nothing_is_settled_while_ranks_differ_still() -> None:
    before = {rank.rank: dict(rank.held) for rank in holding(ranks(3), 2, weights=WRONG)}
    assert settled_by_repetition(before, ranks(3)) == (2,)
    assert settled_by_repetition(before, holding(ranks(3), 1, weights=WRONG)) == ()


def test_kernels_are_not_deterministic_where_more_than_half_of_the_replicas_differ_from_themselves() -> None:
    one_of_two = computing(ranks(2), 1, 1, WRONG, RIGHT + 1)
    assert not is_not_deterministic(one_of_two)
    assert is_not_deterministic(computing(one_of_two, 0, 0, WRONG, RIGHT))


@pytest.mark.parametrize("apart", [{"kind": "another"}, {"place": (1, 0)}], ids=str)
def test_bits_of_ranks_of_another_kind_or_place_are_not_compared(apart: dict[str, Any]) -> None:
    first, second = ranks(2)
    for alike in ({}, apart):
        held = [first, replace(second, held={"weights": WRONG, "gradients": WRONG}, **alike)]
        computed = [first, replace(second, computed={0: (WRONG,), 1: (WRONG, WRONG)}, **alike)]
        assert (held_faults(held) == []) is bool(alike)
        assert disputed_micro_batches(computed) == (() if alike else (0, 1))
        assert (computation_faults(computed) == []) is bool(alike)
