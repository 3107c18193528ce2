import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from bloomery.checkpoint.format.catalogue import CommittedCheckpoint
from bloomery.checkpoint.format.retention import held_out_losses, reasons_to_keep, steps_to_keep
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.config.checkpoint import CheckpointSection


def kept(
    steps, *, length=None, intact="newest", epoch_ends=(), not_backed_up=(), reach_steps=(), **section
) -> list[int]:
    newest = max(steps, default=None) if intact == "newest" else intact
    settings = CheckpointSection(**{"keep_tenths": False, "keep_last": 1, **section})
    return sorted(
        steps_to_keep(
            steps,
            section=settings,
            run_length_steps=length,
            newest_intact=newest,
            epoch_ends=epoch_ends,
            not_backed_up=not_backed_up,
            reach_steps=reach_steps,
        )
    )


def test_the_newest_are_kept():
    assert kept([10, 20, 30, 40], keep_last=2) == [30, 40]


def test_multiples_are_kept_for_good():
    assert kept([10, 20, 30, 40, 50], keep_every_steps=20) == [20, 40, 50]


def test_each_tenth_of_the_run_keeps_its_first():
    assert kept([5, 10, 11, 15, 20, 95, 97], keep_tenths=True, length=100) == [5, 11, 95, 97]


def test_the_newest_intact_one_is_kept_whatever_its_age():
    assert kept([10, 20, 30, 40], intact=10) == [10, 40]


def test_nothing_goes_while_nothing_is_known_to_be_intact():
    assert kept([10, 20, 30], intact=None) == [10, 20, 30]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(1, 4))
def test_pruning_after_each_save_leaves_one_in_every_tenth_that_had_one(gaps: list[int], keep_last: int):
    section = CheckpointSection(keep_last=keep_last, keep_tenths=True)
    step, left, all_steps = 0, set[int](), []
    length = sum(gaps)
    for gap in gaps:
        step += gap
        all_steps.append(step)
        left = steps_to_keep(left | {step}, section=section, run_length_steps=length, newest_intact=step)
    tenths = {-(-one * 10 // length) for one in all_steps}
    assert {-(-one * 10 // length) for one in left} == tenths
    assert set(all_steps[-keep_last:]) <= left
    assert len(left) <= 10 + keep_last


def why(steps, **more) -> dict[int, tuple[str, ...]]:
    section = CheckpointSection(keep_last=1, keep_tenths=more.get("run_length_steps") is not None)
    given = {"run_length_steps": None, "newest_intact": max(steps), **more}
    return reasons_to_keep(steps, section=section, **given)


def test_what_is_not_backed_up_stays_until_it_is():
    assert why([10, 20, 30], not_backed_up={10})[10] == ("not backed up",)
    assert why([10, 20, 30])[10] == ()


def test_the_last_before_the_end_of_an_epoch_stays():
    assert why([10, 20, 30, 40], epoch_ends={20}) == {
        10: (),
        20: ("first epoch's end",),
        30: (),
        40: ("last 1", "newest intact"),
    }


def test_each_reason_is_told():
    assert why([10, 20, 95], run_length_steps=100) == {
        10: ("tenth 1",),
        20: ("tenth 2",),
        95: ("last 1", "tenth 10", "newest intact"),
    }


@given(st.lists(st.integers(1, 60), min_size=1, max_size=80), st.integers(1, 3), st.integers(1, 150))
def test_a_rewind_finds_a_checkpoint_early_enough_after_each_save(
    gaps: list[int], keep_last: int, reach: int
):
    section = CheckpointSection(keep_last=keep_last, keep_tenths=False)
    step, left = 0, set[int]()
    first = gaps[0]
    for gap in gaps:
        step += gap
        left = steps_to_keep(
            left | {step}, section=section, run_length_steps=None, newest_intact=step, reach_steps=(reach,)
        )
        early = [one for one in left if one <= step - reach]
        assert early or step - reach < first, "once the run is long enough, one is there"
        if early:
            assert max(early) >= max(first, step - 2 * reach - max(gaps) * keep_last)
        assert len(left) <= keep_last + 2


def test_what_is_kept_for_a_rewind_is_told_with_its_reason():
    assert why([10, 20, 90, 150, 200], reach_steps=(100,)) == {
        10: (),
        20: (),
        90: ("for a rewind",),
        150: ("for a rewind",),
        200: ("last 1", "newest intact"),
    }


def test_each_reason_counts_for_what_is_kept():
    assert kept([10, 20, 30, 40], epoch_ends={20}) == [20, 40]
    assert kept([10, 20, 30, 40], not_backed_up={10}) == [10, 40]
    assert kept([10, 90, 150, 200], reach_steps=(100,)) == [90, 150, 200]
    assert why([10, 20, 30], held_out={10: 2.0, 20: 1.0, 5: 0.5})[20] == ("best",)


def test_who_may_go_back_exactly_as_far_as_a_checkpoint_lies_finds_it():
    assert why([10, 100, 200], reach_steps=(100,)) == {
        10: (),
        100: ("for a rewind",),
        200: ("last 1", "for a rewind", "newest intact"),
    }
    assert kept([10, 100, 200], reach_steps=(0,)) == [200]


def test_an_intact_one_that_is_not_among_those_asked_about_gives_nobody_a_reason():
    assert why([10, 20], newest_intact=15) == {10: (), 20: ("last 1",)}


def test_a_rewind_that_goes_nowhere_and_a_run_of_no_length_are_no_reasons():
    assert why([10, 20], reach_steps=(0,), run_length_steps=0) == {10: (), 20: ("last 1", "newest intact")}
    assert kept([], intact=10, reach_steps=(5,)) == []


def test_a_held_out_loss_that_is_no_number_makes_no_checkpoint_the_best(tmp_path: Path) -> None:
    committed = []
    for step, loss in ((10, 2.5), (20, math.nan), (30, -math.inf), (40, None)):
        about = {} if loss is None else {"held_out_loss": loss}
        directory = save_checkpoint(tmp_path, [], step=step, incarnation=1, about=about)
        committed.append(CommittedCheckpoint(step=step, incarnation=1, directory=directory))
    assert held_out_losses(committed) == {10: 2.5}
