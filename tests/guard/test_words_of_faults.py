"""What is said of corrupt bits, broken resumes and bad steps, to the letter, and the numbers behind it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.guard.reports import report

from bloomery.guard.basic_guards import NotFinite
from bloomery.guard.corruption import SilentCorruption
from bloomery.guard.digests import RankDigests, computation_faults, held_faults
from bloomery.guard.parity import ResumeParity, _error, _was_moving
from bloomery.guard.restraint import Restraint, restraint_at, restraints_from_json, smallest_limit
from bloomery.guard.verdict import Anomaly, Rewind, Stop, Watch

MAD = 1.4826


def rank(number: int, *, held: dict[str, int] | None = None, **more: Any) -> RankDigests:
    return RankDigests(
        rank=number, host="h", device=f"cuda:{number}", kind="k", data=number, place=(0, 1),
        held=held or {}, **more,
    )  # fmt: skip


def test_digests_are_stored_with_all_that_they_compare() -> None:
    one = rank(3, held={"weights": 5}, shard=2, computed={3: (7, 8), 4: (9,)})
    assert one.to_json() == {
        "rank": 3, "host": "h", "device": "cuda:3", "kind": "k", "data": 3, "place": (0, 1), "shard": 2,
        "held": {"weights": 5}, "computed": {"3": [7, 8], "4": [9]}, "not_finite": (),
    }  # fmt: skip
    assert one.name == "rank 3 (cuda:3 of h)"


@pytest.mark.parametrize(
    ("held", "what", "ranks", "certain", "reason"),
    [
        (
            [1, 1, 2], "weights", (2,), True,
            "rank 2 (cuda:2 of h) holds other weights than the 2 replicas that agree",
        ),
        (
            [1, 2, 1, 3], "weights", (0, 1, 2, 3), False,
            "the weights of rank 0 (cuda:0 of h), rank 1 (cuda:1 of h), rank 2 (cuda:2 of h), rank 3 (cuda:3 "
            "of h) have to be equal and are not, and none has a majority",
        ),
    ],
)  # fmt: skip
def test_ranks_that_hold_other_bits_are_named_with_how_many_agree(
    held: list[int], what: str, ranks: tuple[int, ...], certain: bool, reason: str
) -> None:
    (fault,) = held_faults([rank(number, held={"weights": bits}) for number, bits in enumerate(held)])
    assert (fault.what, fault.ranks, fault.is_certain, fault.reason) == (what, ranks, certain, reason)


@pytest.mark.parametrize("name", ["working weights", "gradients"])
def test_working_weights_and_gradients_are_compared_by_their_names(name: str) -> None:
    (fault,) = held_faults([rank(number, held={name: bits}) for number, bits in enumerate([4, 4, 5])])
    assert fault.what == ("gradients" if name == "gradients" else "weights")
    assert fault.reason.startswith(f"rank 2 (cuda:2 of h) holds other {name} than the 2 ")


def test_wrong_computations_are_told_of_the_rank_that_made_them() -> None:
    computed = [{0: (1, 1)}, {0: (1,)}, {0: (2,)}]
    (fault,) = computation_faults([rank(number, computed=of) for number, of in enumerate(computed)])
    assert (fault.ranks, fault.is_certain, fault.reason) == (
        (2,),
        True,
        "rank 2 (cuda:2 of h) computed a micro-batch with other bits than its repetition and other ranks",
    )
    (fault,) = computation_faults([rank(0, computed={0: (1,)}), rank(1, computed={0: (2,)})])
    assert (fault.ranks, fault.is_certain, fault.reason) == (
        (0, 1),
        False,
        "a micro-batch has other bits on each of rank 0 (cuda:0 of h), rank 1 (cuda:1 of h), and none has a "
        "majority",
    )


def found(step: int, *ranks: int) -> Any:
    return report(step, corruption_checked=True, corruption="odd bits", corrupt_ranks=ranks)


FOUND = "silent corruption at step 60: odd bits. Its update was refused"


def test_what_is_done_about_corruption_is_told_with_its_step_and_ranks() -> None:
    guard = SilentCorruption(faults=2, forget_steps=50)
    clean = {"clean": 40, "named": [], "undecided": []}
    assert guard.judge(clean, found(60, 3))[1] == Rewind(
        judged_step=60, to_step=40, skip=range(0),
        reason=f"{FOUND}. The run goes back to step 40, the last that was found clean, or before",
        numbers={"faults of rank 3": 1.0, "clean step": 40.0},
    )  # fmt: skip
    _, verdict = guard.judge({**clean, "named": [[11, 3], [11, 4], [10, 5]]}, found(60, 4, 3, 5))
    assert verdict == Stop(
        judged_step=60, failed=True,
        reason=f"{FOUND}. Rank 3, 4 was named 2 times: take its machine out of the run",
        numbers={
            "faults of rank 3": 2.0, "faults of rank 4": 2.0, "faults of rank 5": 1.0, "clean step": 40.0,
        },
    )  # fmt: skip
    history, verdict = guard.judge({**clean, "undecided": [10, 11, 12]}, found(60))
    assert history == {**clean, "undecided": [11, 12, 60]} and verdict == Stop(
        judged_step=60, failed=True,
        reason=f"{FOUND}. That happened 3 times within 50 steps: test the machines of these ranks, or "
        "replace them (the journal's `corruption` records name all)",
        numbers={"clean step": 40.0},
    )  # fmt: skip
    _, verdict = guard.judge({**clean, "undecided": [11]}, found(60))
    assert isinstance(verdict, Rewind), "as often as one rank may be named is not too often"
    _, verdict = guard.judge({**clean, "clean": 75}, found(60))
    assert isinstance(verdict, Rewind) and verdict.to_step == 59, "a step that was made again"


def test_bad_losses_and_updates_are_told_with_the_first_of_them() -> None:
    guard = NotFinite(losses=2, updates=3)
    history, told = guard.judge(guard.fresh(), report(300, math.inf))
    assert told == Watch(
        judged_step=300, kind="not finite", reason="the loss of step 300 is inf",
        numbers={"losses_in_a_row": 1.0, "refused_in_a_row": 0.0},
    )  # fmt: skip
    assert guard.judge(history, report(301, math.nan))[1] == Anomaly(
        judged_step=301, first_bad=300, reason="2 losses in a row were not finite, from step 300 on",
        numbers={"losses_in_a_row": 2.0, "refused_in_a_row": 0.0},
    )  # fmt: skip
    history, _ = guard.judge(guard.fresh(), report(300, update_applied=False, refused_in_a_row=2))
    assert guard.judge(history, report(301, update_applied=False, refused_in_a_row=3))[1] == Anomaly(
        judged_step=301, first_bad=300, reason="3 updates in a row were not finite, from step 300 on",
        numbers={"losses_in_a_row": 0.0, "refused_in_a_row": 3.0},
    )  # fmt: skip


def test_the_error_of_a_median_is_that_of_its_deviations_and_a_twentieth_of_a_percent_at_least() -> None:
    # Deviations of 0, 1, 1, 2 and 4 from 10: their median is 1.
    assert _error([10.0, 11.0, 9.0, 12.0, 6.0], 10.0) == pytest.approx(
        1.25 * MAD * (1 + 4 / 5) / math.sqrt(5)
    )
    assert _error([2.0] * 4, 2.0) == 0.001 and _error([-2.0] * 4, -2.0) == 0.001


@pytest.mark.parametrize(
    ("losses", "moving"),
    [
        ([2.0] * 4, True),  # too few to tell
        ([2.0] * 5, False),
        ([2.0] * 5 + [2.015], False),  # less than a percent
        ([2.0] * 5 + [2.03], True),
        ([2.0] * 5 + [1.0], False),  # low
        ([9.0] * 30 + [2.0] * 20, False),  # only the newest twenty count
        ([1.9, 2.1] * 10 + [2.5], False),  # within three spreads of 0.148 from 2.1
        ([1.9, 2.1] * 10 + [2.6], True),
    ],
)
def test_a_loss_that_is_high_before_a_resume_is_no_measure(losses: list[float], moving: bool) -> None:
    assert _was_moving(losses) is moving


def resumed(losses: list[float], after: list[float]) -> tuple[Any, Any]:
    guard = ResumeParity()
    history = {
        **guard.fresh(),  # type: ignore[dict-item]
        "losses": losses, "step": 100, "consumed": 1000, "about": "10  1 0", "rate": 1e-3, "after": after,
    }  # fmt: skip
    return guard.judge(history, report(101, 2.25))


def test_a_resume_that_lost_something_is_told_by_its_medians() -> None:
    losses = [1.98, 2.0, 2.02] * 10
    history, verdict = resumed(losses, [2.25] * 4)
    # Twenty losses before it: deviations of 0.02, but for a third; and no deviation after it.
    before = 1.25 * MAD * 0.02 * (1 + 4 / 20) / math.sqrt(20)
    error = math.hypot(before, 0.0005 * 2.25)
    assert isinstance(verdict, Stop) and verdict.numbers == {
        "after": 2.25, "before": 2.0, "rise": 0.125, "standard_error": pytest.approx(error),
    }  # fmt: skip
    assert verdict.reason == (
        "resume parity: the first 5 losses after the resume have the median 2.2500, +12.5% over 2.0000 "
        f"before it ({0.25 / error:.1f} standard errors). Weights, optimizer state or data are not those "
        "that were saved"
    )
    assert history == {
        "losses": [*losses, *[2.25] * 5], "step": 101, "consumed": 1010, "about": "10  1 0", "rate": 1e-3,
        "after": None, "most_peers": 1,
    }  # fmt: skip


def test_the_first_step_of_a_resume_is_told_by_its_samples() -> None:
    guard = ResumeParity()
    history = {**guard.fresh(), "step": 100, "consumed": 12_000, "after": []}  # type: ignore[dict-item]
    _, verdict = guard.judge(history, report(101, consumed_samples=12_345))
    assert (
        isinstance(verdict, Stop)
        and verdict.failed
        and verdict.reason
        == (
            "resume parity: step 101 ends at 12,345 samples, but the checkpoint says 12,010. The resumed run "
            "reads other data than it should"
        )
    )


def test_restraints_of_before_there_were_clamps_have_none() -> None:
    old = {"start": 5, "stop": 9, "rate": 0.5, "clip": 0.25}
    assert restraints_from_json([old]) == (Restraint(start=5, stop=9, rate=0.5, clip=0.25),)
    whole = Restraint(start=5, stop=9, rate=0.5, clip=0.25, z_score=2.5, qk_clip=100.0)
    assert whole.to_json() == {**old, "z_score": 2.5, "qk_clip": 100.0}
    assert smallest_limit([0.0, 3.0, 2.0]) == 2.0 and smallest_limit([0.0]) == smallest_limit([]) == 0.0


def test_of_several_restraints_each_limit_is_the_smallest_that_is_one() -> None:
    first = Restraint(start=0, stop=100, rate=0.5, clip=1.0, z_score=0.0, qk_clip=30.0)
    second = Restraint(start=50, stop=80, rate=0.8, clip=0.3, z_score=2.5, qk_clip=0.0)
    together = Restraint(start=50, stop=80, rate=0.5, clip=0.3, z_score=2.5, qk_clip=30.0)
    assert restraint_at((first, second), 60) == restraint_at((second, first), 60) == together
    assert restraint_at((first, second), 80) == first
