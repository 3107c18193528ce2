"""A run that goes back to its initial values, and one that does not find its checkpoints where it looks."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.train.test_loop import events, go

from bloomery.config.load import LoadedRecipe
from bloomery.errors import CheckpointError, DataError
from bloomery.events.incarnation import read_incarnations
from bloomery.events.journal import loss_curve
from bloomery.events.run_directory import RunDirectory
from bloomery.guard.verdict import Rewind
from bloomery.parallel.loss_scale import LossScale
from bloomery.train import loop
from bloomery.train.control import SIGNALS

Start = Callable[..., tuple[LoadedRecipe, Path]]
FEW_STEPS = ("checkpoint.every_steps=0", "checkpoint.every_minutes=0", "evaluate.every_steps=0")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_machine_that_erred_before_the_first_checkpoint_begins_the_run_anew(
    start: Start, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    real, asked, known = loop.judge, list[int](), []

    def judge(guards, report):
        if report.step == 1:
            known.append({name: past for name, past in guards.state_values().items() if name != "memory"})
        usual = real(guards, report)
        if report.step != 2 or asked:
            return usual
        asked.append(report.step)
        return Rewind(judged_step=2, to_step=0, skip=range(0), reason="wrong bits", may_start_anew=True)

    adapt = LossScale.update

    def overflow(scale, finite):  # until the run begins anew
        adapt(scale, finite & bool(asked))

    curves = []
    for name, found, update in (("clean", real, adapt), ("erring", judge, overflow)):
        monkeypatch.setattr(loop, "judge", found)
        monkeypatch.setattr(LossScale, "update", update)
        loaded, path = start(*FEW_STEPS, "guard.stop_at_step=4", f"train.precision={precision}", name=name)
        assert go(loaded, path).step == 4
        curves.append(loss_curve(RunDirectory(path)))
    assert read_incarnations(RunDirectory(path)) == {1: None, 2: None}
    assert len(known) == 2 and known[0] == known[1], "of the steps no guard knows"
    assert [event["to_step"] for event in events(path, "rewind")] == [0]
    scales = [event["loss_scale"] for event in events(path, "step") if event["incarnation"] == 2]
    assert scales[0] == (LossScale.FIRST if precision == "fp16" else None)
    assert len(curves[0]) == 4 and curves[0] == curves[1], "from the same values, on the same samples"


def test_an_embedding_from_more_bigrams_than_memory_holds_is_refused_with_the_numbers(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, path = start("model.embedding_init=bigram", "model.tied=false", "guard.stop_at_step=1")
    with monkeypatch.context() as large:
        large.setattr("bloomery.train.data_stream.BIGRAM_BYTES", 1 << 40)
        with pytest.raises(
            DataError, match=r"takes 92,160,000 GiB with a vocabulary of 300, and this machine"
        ):
            go(loaded, path)
    assert events(path, "step") == []
    assert go(loaded, path).step == 1


def test_a_run_whose_checkpoints_are_at_another_place_is_refused_before_it_trains(
    start: Start, tmp_path: Path
) -> None:
    before = [signal.signal(number, signal.default_int_handler) for number in SIGNALS]
    loaded, path = start(*FEW_STEPS, "guard.stop_at_step=1")
    try:
        go(loaded, path)
        assert all(signal.getsignal(number) is signal.default_int_handler for number in SIGNALS), "it goes on"
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)
    loaded, path = start(*FEW_STEPS, "guard.stop_at_step=2", f"checkpoint.url=file://{tmp_path}/store")
    with pytest.raises(CheckpointError, match=r"which checkpoint\.url does not say"):
        go(loaded, path)
    assert len(events(path, "step")) == 1 and not (tmp_path / "store").exists()
