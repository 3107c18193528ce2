"""Each resume is proved by a receipt, and one that does not keep its checkpoint's promise is refused."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.train.real_ranks import train_on_ranks
from tests.train.test_loop import Start, events, go

from bloomery.checkpoint.format.state import Box, StateEntry
from bloomery.cli import main
from bloomery.errors import CheckpointError
from bloomery.guard.receipt import Promise, RankEvidence, broken_promises
from bloomery.guard.verdict import Rewind
from bloomery.train import loop
from bloomery.train.checkpoint_store import Store
from bloomery.train.receipts import Receipts, _digest
from bloomery.train.settings import RunSettings
from bloomery.train.state import TrainState

SETTINGS = ("train.samples=0", "train.steps=8", "train.ramp_up=[]", "checkpoint.every_steps=3")
CRASH = ("guard.stop_at_step=5", "checkpoint.at_end=false")
PROMISE = Promise(first=24, count=8, samples="5a", learning_rate=0.01, settings="5e", optimizer="09")


@pytest.fixture
def crashed(start: Start) -> Path:
    """A run that made five steps and has a checkpoint of the third."""
    loaded, path = start(*SETTINGS, *CRASH)
    go(loaded, path)
    return path


def receipts(path: Path) -> list[dict]:
    return events(path, "receipt")


def test_a_resume_is_proved_with_the_bits_that_its_first_step_had_before(crashed, start: Start, capsys):
    go(*start(*SETTINGS))
    (receipt,) = receipts(crashed)
    assert receipt["kept"] and receipt["same_bits"] is True and receipt["step"] == 4
    assert receipt["checkpoint"] == "step-000003.i001" and receipt["batch_checked"]
    assert receipt["promised_by"] == "journal and checkpoint"
    (saved, *_) = events(crashed, "checkpoint")
    assert receipt["promise"] == saved["promise"] and saved["promise"]["first"] == 24
    again = [r for r in events(crashed, "step") if r["incarnation"] == 2]
    assert again[0]["learning_rate"] == receipt["promise"]["learning_rate"]
    assert main(["ckpt", "show", str(crashed / "checkpoints" / "step-000003.i001")]) == 0
    out = capsys.readouterr().out
    assert "on 1 rank: same next samples, same optimizer state" in out and "as when the step was made" in out


def test_a_checkpoint_that_was_being_saved_when_the_run_went_back_to_it_keeps_its_own_promise(
    start: Start, monkeypatch
):
    judge, take, reaches = loop.judge, Store.take_save_results, Store.reaches_back_to
    went_back = []

    def judged(guards, report):
        usual = judge(guards, report)
        if report.step != 3 or went_back:
            return usual
        return Rewind(judged_step=3, to_step=2, skip=range(16, 32), reason="planned")

    def reaches_back_to(store, step):
        went_back.append(step)
        return reaches(store, step)

    monkeypatch.setattr(loop, "judge", judged)
    monkeypatch.setattr(Store, "reaches_back_to", reaches_back_to)
    monkeypatch.setattr(Store, "take_save_results", lambda store: take(store) if went_back else [])
    settings = (*SETTINGS, "checkpoint.every_steps=2", "checkpoint.at_end=false")
    loaded, path = start(*settings, "guard.stop_at_step=3")
    go(loaded, path)
    before, after = events(path, "checkpoint")
    assert (before["path"], after["path"]) == ("step-000002.i001", "step-000002.i002")
    assert (before["promise"]["first"], after["promise"]["first"]) == (16, 32)
    shutil.rmtree(path / "checkpoints" / "step-000002.i002")  # as if its save had failed
    go(*start(*settings, "guard.stop_at_step=3"))
    assert receipts(path)[-1]["checkpoint"] == "step-000002.i001" and receipts(path)[-1]["kept"]


def shifted(restore):
    return lambda *args, **kwargs: (
        lambda state: replace(state, position=replace(state.position, consumed=state.position.consumed + 8))
    )(restore(*args, **kwargs))


def test_a_wrong_position_is_refused_before_anything_is_trained(crashed, start: Start, monkeypatch, capsys):
    monkeypatch.setattr(TrainState, "from_json", shifted(TrainState.from_json))
    with pytest.raises(CheckpointError, match="the stream is at another place") as refused:
        go(*start(*SETTINGS))
    assert "other samples come next" in refused.value.message
    assert {r["incarnation"] for r in events(crashed, "step")} == {1}
    (receipt,) = receipts(crashed)
    assert not receipt["kept"] and len(receipt["broken"]) == 3
    assert main(["ckpt", "show", str(crashed)]) == 0
    assert "REFUSED, other samples come next on its only rank" in capsys.readouterr().out


def test_a_learning_rate_that_changed_without_a_setting_is_refused(crashed, start: Start, monkeypatch):
    real = RunSettings.learning_rate
    monkeypatch.setattr(RunSettings, "learning_rate", lambda self, state: 1.0001 * real(self, state))
    with pytest.raises(CheckpointError, match="though no setting changed"):
        go(*start(*SETTINGS))


def test_a_learning_rate_that_a_setting_changed_is_told_and_right(crashed, start: Start):
    go(*start(*SETTINGS, "optim.learning_rate=0.005"))
    (receipt,) = receipts(crashed)
    assert receipt["kept"] and receipt["settings_changed"] and receipt["same_bits"] is True  # of its loss


def test_another_optimizer_state_is_refused(crashed, start: Start, monkeypatch):
    from bloomery.parallel.optimizers import Optimizers

    def flip(self, values):
        entry = next(iter(self.state_entries()))
        entry.tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1)

    monkeypatch.setattr(Optimizers, "load_state_values", flip)
    with pytest.raises(CheckpointError, match="the optimizer state is another on its only rank"):
        go(*start(*SETTINGS))


def test_a_checkpoint_without_a_promise_is_resumed_as_before(crashed, start: Start, monkeypatch):
    monkeypatch.setattr("bloomery.train.receipts.promise_from_json", lambda values: None)
    assert go(*start(*SETTINGS)).finished and receipts(crashed) == []


def shift_all_but_the_first(rank: int) -> None:
    if rank:
        TrainState.from_json = shifted(TrainState.from_json)


def test_ranks_at_the_wrong_data_are_named_and_another_layout_is_proved(corpus, prepared, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(prepared, path / "data")
    recipe = (f"data.sources={corpus}", *SETTINGS, "optim.name=adamw")
    assert len(set(train_on_ranks(1, path, *recipe, *CRASH))) == 1
    wide = (*recipe, "parallel.data=2", "parallel.zero=1")
    told = train_on_ranks(2, path, *wide, plant=shift_all_but_the_first)
    assert all("other samples come next on 1 of 2 ranks (1)" in each for each in told), told
    told = train_on_ranks(2, path, *wide, "guard.stop_at_step=7")
    assert told == ["guard.stop_at_step = 7"] * 2, told[0]
    refused, kept = receipts(path)
    assert not refused["kept"] and kept["kept"] and kept["ranks"] == 2  # what one rank promised


def test_a_rank_that_reads_anothers_samples_is_named():
    right = [RankEvidence(promise=PROMISE, part=part, given=(part,)) for part in (0, 1)]
    shares = {0: [0], 1: [1]}
    assert broken_promises(PROMISE, right, shares=shares) == []
    wrong = [right[0], replace(right[1], given=(0,))]
    assert broken_promises(PROMISE, wrong, shares=shares) == [
        "the first batch has another rank's samples on 1 of 2 ranks (1)"
    ]


def test_another_mixture_explains_other_samples_and_other_settings_another_rate():
    other = replace(PROMISE, samples="00")
    ranks = [RankEvidence(promise=other, part=0)]
    assert broken_promises(PROMISE, ranks, shares={}, other_mixture=True) == []
    assert len(broken_promises(PROMISE, ranks, shares={})) == 1
    faster = replace(PROMISE, learning_rate=0.02)
    assert len(broken_promises(PROMISE, [RankEvidence(promise=faster, part=0)], shares={})) == 1
    other_machine = replace(PROMISE, learning_rate=math.nextafter(PROMISE.learning_rate, 1.0))
    assert broken_promises(PROMISE, [RankEvidence(promise=other_machine, part=0)], shares={}) == []
    told = RankEvidence(promise=replace(faster, settings="00"), part=0)
    assert broken_promises(PROMISE, [told], shares={}) == []


def entry(values: torch.Tensor, box: Box, shape: tuple[int, ...]) -> StateEntry:
    return StateEntry(name="optim.a", global_shape=shape, dtype="float32", box=box, tensor=values)


@given(st.integers(0, 6), st.integers(0, 5), st.integers(0, 29))
def test_the_digest_of_a_tensor_is_that_of_its_parts_and_any_bit_changes_it(row: int, column: int, at: int):
    values = torch.arange(35, dtype=torch.float32).reshape(7, 5).sin()
    whole = _digest(entry(values, Box((0, 0), (7, 5)), (7, 5)))
    boxes = [((0, 0), (row, column)), ((0, column), (row, 5 - column)), ((row, 0), (7 - row, 5))]
    parts = [_digest(entry(values[Box(*box).window], Box(*box), (7, 5))) for box in boxes if 0 not in box[1]]
    assert sum(parts) % (1 << 64) == whole
    flipped = values.clone()
    flipped.view(-1)[at : at + 1].view(torch.int32).bitwise_xor_(1 << (at % 31))
    assert _digest(entry(flipped, Box((0, 0), (7, 5)), (7, 5))) != whole
    swapped = values.clone()
    swapped[0], swapped[1] = values[1], values[0]
    assert _digest(entry(swapped, Box((0, 0), (7, 5)), (7, 5))) != whole


def test_a_receipt_is_of_the_checkpoint_that_was_resumed_last(crashed, start: Start, monkeypatch):
    check = Receipts.check

    def check_two(self, restored, state, **more):
        check(self, restored, state, **more)
        check(self, replace(restored, about={}), state, **more)

    monkeypatch.setattr(Receipts, "check", check_two)
    assert go(*start(*SETTINGS)).finished and receipts(crashed) == []
