"""What a run computes for people and services beside its steps: figures, warnings, shares, decisions."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.operate.dashboard.written_run import WrittenRun

from bloomery.config.checkpoint import EvaluateSection
from bloomery.data.position import Position
from bloomery.diloco.outer import UnderWay
from bloomery.guard.verdict import CarryOn
from bloomery.parallel.axis import Axis
from bloomery.plan.memory import StageMemory
from bloomery.train import step as step_module
from bloomery.train.console import duration
from bloomery.train.data_summary import DatasetSummary, DataSummary
from bloomery.train.held_out import HeldOutBatch, HeldOutLoss, _shares
from bloomery.train.observers import SlowDataWarning
from bloomery.train.rank_diagnostics import _comparison, progress_with_ticks
from bloomery.train.receipts import _digest
from bloomery.train.settings import RunSettings
from bloomery.train.state import Goal, TrainState
from bloomery.train.step import decide_compilation
from bloomery.train.trackers import scalars_of

STATE = TrainState(goal=Goal(samples=100), step=6, position=Position(consumed=40))


def test_services_are_sent_each_figure_under_its_own_name(tmp_path) -> None:
    report = replace(
        WrittenRun(tmp_path / "run").report(2.5),
        z_loss=0.01,
        learning_rate=0.002,
        gradient_norm=1.5,
        refused_updates=3,
        global_batch=16,
        consumed_samples=640,
        consumed_tokens=5120,
        tokens_per_s=123.0,
        model_tflops=4.5,
        held_out_loss=2.75,
        held_out_by_dataset={"web": 2.5, "code": 3.0},
        loss_scale=1024.0,
        mfu=0.25,
        data_queue=6.0,
        data_wait_s=0.125,
    )
    assert scalars_of(report) == {
        "loss/train": 2.5,
        "loss/z": 0.01,
        "optimizer/learning_rate": 0.002,
        "optimizer/gradient_norm": 1.5,
        "optimizer/refused_updates": 3,
        "progress/global_batch": 16,
        "progress/consumed_samples": 640,
        "progress/consumed_tokens": 5120,
        "speed/tokens_per_s": 123.0,
        "speed/model_tflops": 4.5,
        "loss/held_out": 2.75,
        "held_out/web": 2.5,
        "held_out/code": 3.0,
        "optimizer/loss_scale": 1024.0,
        "speed/mfu": 0.25,
        "data/queue": 6.0,
        "data/wait_s": 0.125,
    }
    none = replace(report, z_loss=0.0, refused_updates=0, consumed_samples=0, data_queue=0.0, data_wait_s=0.0)
    found = scalars_of(none)
    assert [found[name] for name in ("loss/z", "optimizer/refused_updates", "data/queue", "data/wait_s")] == [
        0.0
    ] * 4
    plain = replace(report, held_out_loss=None, held_out_by_dataset=None, loss_scale=None, mfu=None)
    assert not {"loss/held_out", "held_out/web", "optimizer/loss_scale", "speed/mfu"} & set(scalars_of(plain))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (99.4, "99 s"),
        (99.6, "2 min"),
        (99.4 * 60, "99 min"),
        (99.6 * 60, "1.7 h"),
        (71.9 * 3600, "71.9 h"),
        (72 * 3600, "3 days"),
    ],
)
def test_a_duration_is_told_in_the_unit_that_fits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_warning_of_slow_data_comes_once_a_stretch_of_twenty_steps_waited_for_a_tenth(tmp_path) -> None:
    said: list[str] = []
    run, warning = WrittenRun(tmp_path / "run"), SlowDataWarning(said.append)

    def steps(count: int, *, wait: float) -> int:
        for _ in range(count):
            report = replace(run.report(2.0), data_wait_s=wait, seconds=9.0, data_queue=1.5)
            warning.tell(report, CarryOn(judged_step=report.step))
        return len(said)

    assert steps(20, wait=1.0) == 0  # a tenth is not more than a tenth
    assert steps(1, wait=1.1) == 1  # of the last twenty
    said.clear()
    assert steps(19, wait=5.0) == 0 and steps(1, wait=5.0) == 1
    assert "100.0 of 280.0 s" in said[0] and "1.5 batches" in said[0]
    said.clear()
    steps(15, wait=5.0)
    warning.rewound(3)
    assert steps(19, wait=5.0) == 0 and steps(1, wait=5.0) == 1


@pytest.mark.parametrize(
    ("choice", "device", "flops", "lacks", "is_on"),
    [
        ("off", "cuda", 1e30, "", False),
        ("on", "cpu", 0.0, "", True),
        ("on", "cpu", 1e30, "no C++ compiler", False),
        ("auto", "cpu", 2e13, "", True),
        ("auto", "cpu", 1.9e13, "", False),
        ("auto", "cuda", 1.9e16, "", False),
        ("auto", "cuda", 2e16, "", True),
        ("auto", "cuda", 1e30, "no headers", False),
    ],
)
def test_a_run_is_compiled_where_that_pays_and_can_be_done(
    choice, device, flops, lacks, is_on, monkeypatch
) -> None:
    monkeypatch.setattr(step_module, "lacking_toolchain", lambda: lacks)
    decided = decide_compilation(choice, device=torch.device(device), run_flops=flops)
    assert decided.on is is_on
    assert not lacks or decided.why.startswith(lacks)


def summary(**changed: Any) -> DataSummary:
    web = DatasetSummary(name="web", documents=30, tokens=1_000, epochs=3.0)
    given = dict(
        parameters=1234567,
        vocabulary=5000,
        sequence_length=64,
        batch_tokens=(512, 2048),
        warmup_tokens=4_000,
        documents=40,
        tokens=1_500,
        planned_tokens=6_000,
        held_out_documents=3,
        held_out_tokens=90,
        datasets=(web,),
        notes=(),
    )
    return DataSummary(**given | changed)


def test_a_summary_tells_sizes_and_what_is_read_too_often() -> None:
    usual = summary()
    assert usual.epochs == 4.0 and usual.warnings == ()
    assert usual.lines() == [
        "model: 1,234,567 parameters, vocabulary 5,000, context 64 tokens, 512 to 2,048 tokens per step",
        "data: 40 documents, 1,500 tokens to train on; 3 documents, 90 tokens held out",
        "plan: 6,000 tokens, 4.0 times through the text",
    ]
    assert "512 tokens per step" in summary(batch_tokens=(512, 512)).lines()[0]
    told = usual.to_json()
    assert (told["documents"], told["tokens"], told["planned_tokens"], told["epochs"]) == (
        40,
        1500,
        6000,
        4.0,
    )
    assert (told["held_out_documents"], told["held_out_tokens"], told["batch_tokens"]) == (3, 90, [512, 2048])
    assert (told["parameters"], told["vocabulary"], told["sequence_length"]) == (1234567, 5000, 64)
    assert told["datasets"] == [{"name": "web", "documents": 30, "tokens": 1000, "epochs": 3.0}]
    assert summary(tokens=0).epochs == 6_000.0


def test_a_summary_warns_of_each_dataset_that_is_read_more_than_four_times_and_of_missing_held_out_text() -> (
    None
):
    web = DatasetSummary(name="web", documents=30, tokens=1_000, epochs=4.1)
    code = DatasetSummary(name="code", documents=10, tokens=500, epochs=4.0)
    (alone,) = summary(datasets=(web,)).warnings
    assert alone.startswith("The text is read 4.1 times") and "train.tokens=4_000" in alone
    (short,) = summary(datasets=(web,), warmup_tokens=4_001).warnings
    assert short.endswith("Give more text."), "a run that is shorter than its warm-up is refused"
    (one,) = summary(datasets=(web, code)).warnings
    assert one.startswith("The dataset 'web' is read 4.1 times")
    assert "train.tokens=6_000" in summary(planned_tokens=6_150, datasets=(web, code)).warnings[0]
    often = replace(web, epochs=11.6)
    assert "12 times" in summary(datasets=(often,)).warnings[0]
    assert "no held-out text" in summary(held_out_documents=0).warnings[0]
    noted = summary(held_out_documents=0, notes=("there is no held-out loss, for …",))
    assert noted.warnings == ("there is no held-out loss, for …",)


def test_windows_are_spread_by_weight_and_each_dataset_has_one() -> None:
    assert _shares([3.0, 1.0], 8) == [6, 2] and _shares([3.0, 1.0], 9) == [7, 3]
    assert _shares([1000.0, 1.0], 5) == [5, 1] and _shares([0.0, 0.0], 4) == [1, 1]


def held_out(*, every: int = 3, at_end: bool = True) -> HeldOutLoss:
    batch = SimpleNamespace()
    return HeldOutLoss(
        EvaluateSection(every_steps=every, at_end=at_end),
        [HeldOutBatch(dataset="web", batch=batch)],  # type: ignore[arg-type]
        model=None,  # type: ignore[arg-type]
        mesh=SimpleNamespace(data=Axis()),  # type: ignore[arg-type]
        report_progress=lambda: None,
    )


def test_a_run_is_evaluated_at_each_multiple_and_at_its_end() -> None:
    end = replace(STATE, step=7, position=Position(consumed=100))
    assert held_out().due(STATE) and not held_out().due(replace(STATE, step=7))
    assert held_out().due(end) and not held_out(at_end=False).due(end)
    assert not held_out(every=0).due(STATE) and held_out(every=0).due(end)
    assert held_out(every=1).due(STATE), "after each step"
    within = replace(end, under_way=UnderWay(committed=90, live=2))
    assert not held_out().due(within)


def test_a_run_that_was_evaluated_where_it_ends_owes_no_evaluation() -> None:
    loss = held_out()
    assert loss.is_owed(STATE)
    loss._seen = (STATE.step, STATE.position, STATE.under_way)
    assert not loss.is_owed(STATE)
    assert loss.is_owed(replace(STATE, position=Position(consumed=41)))
    assert loss.is_owed(replace(STATE, under_way=UnderWay(committed=1, live=2)))
    assert not loss.is_owed(replace(STATE, step=7))  # which is not due


def test_each_tick_is_called_with_the_progress() -> None:
    called: list[object] = []
    both = progress_with_ticks(
        lambda *told: called.append(told), lambda: called.append("one"), lambda: called.append("two")
    )
    both("reading", 3, 9, "bytes", "a note")
    assert called == ["one", "two", ("reading", 3, 9, "bytes", "a note")]


def test_what_a_device_held_is_told_in_gibibytes_beside_the_plan() -> None:
    gib = 1 << 30
    fields = {name: 0.0 for name in StageMemory.__dataclass_fields__}
    names = list(fields)
    planned = StageMemory(**fields | {names[0]: 1.5 * gib, names[1]: 3.0 * gib})
    used = {"allocated_bytes.all.peak": 5 * gib, "reserved_bytes.all.current": 6 * gib}
    told = _comparison(planned, used)
    assert told.startswith(f"Planned: 4.50 GiB ({names[1]} 3.00, {names[0]} 1.50")
    assert told.endswith("Held at most: 5.00 GiB; the allocator keeps 6.00 GiB.")
    assert _comparison(None, {}) == ""


def entry(
    tensor: torch.Tensor, shape: tuple[int, ...], offset: tuple[int, ...], name: str = "model.x"
) -> Any:
    box = SimpleNamespace(offset=offset, shape=tuple(tensor.shape))
    return SimpleNamespace(name=name, global_shape=shape, box=box, tensor=tensor)


def test_the_digest_of_a_tensor_is_the_sum_of_those_of_its_boxes_however_it_is_cut() -> None:
    whole = torch.arange(1, 61, dtype=torch.float32).mul_(0.73).reshape(3, 4, 5)
    full = _digest(entry(whole, (3, 4, 5), (0, 0, 0)))
    for dim, cut in ((0, 1), (1, 3), (2, 2)):
        parts = torch.split(whole, [cut, whole.shape[dim] - cut], dim=dim)
        offsets = [(0, 0, 0), tuple(cut * (axis == dim) for axis in range(3))]
        boxes = [entry(part, (3, 4, 5), at) for part, at in zip(parts, offsets, strict=True)]
        assert sum(map(_digest, boxes)) % (1 << 64) == full, dim
    assert _digest(entry(whole, (3, 4, 5), (0, 0, 0), name="model.y")) != full
    for first, second in (((0, 0, 0), (0, 0, 1)), ((0, 0, 0), (0, 1, 0)), ((0, 0, 0), (1, 0, 0))):
        changed = whole.clone()
        changed[first], changed[second] = whole[second], whole[first]
        assert _digest(entry(changed, (3, 4, 5), (0, 0, 0))) != full, (first, second)
    scalar = torch.tensor(7.0)
    assert _digest(entry(scalar, (), ())) != _digest(entry(scalar + 1, (), ()))


def test_a_restraint_lasts_by_the_samples_that_all_peers_take_in_a_step() -> None:
    asked: list[dict[str, int]] = []
    ladder = SimpleNamespace(restraint=lambda rung, **told: asked.append(told))

    def restrained(*, inner_steps: int) -> dict[str, int]:
        settings = object.__new__(RunSettings)
        settings.recipe = SimpleNamespace(  # type: ignore[assignment]
            elastic=SimpleNamespace(inner_steps=inner_steps, peers=3)
        )
        settings.guards = SimpleNamespace(ladder=ladder)  # type: ignore[assignment]
        settings.phase = lambda state: SimpleNamespace(global_batch=8)  # type: ignore[method-assign,assignment]
        before = replace(STATE, under_way=UnderWay(committed=50, live=5))
        settings.restraint(None, STATE, before=before)  # type: ignore[arg-type]
        return asked[-1]

    assert restrained(inner_steps=4) == {"consumed": 40, "problem": 50, "samples_per_step": 24}
    assert restrained(inner_steps=0) == {"consumed": 40, "problem": 50, "samples_per_step": 8}


def test_a_run_ends_later_in_the_stream_by_what_its_cursor_has_skipped() -> None:
    run = SimpleNamespace(_total_samples=100)
    assert RunSettings.stream_end(run, cursor=55, consumed=40) == 115  # type: ignore[arg-type]
