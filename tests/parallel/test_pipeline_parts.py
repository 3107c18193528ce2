"""What a pipeline asks of its stages and its messages, action by action."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bloomery.config.model import ModelSection
from bloomery.data_loader.batches import MicroBatch
from bloomery.model.decoder import build
from bloomery.model.dropout import DropoutAddress
from bloomery.model.loss import LossSums
from bloomery.parallel import pipeline as pipeline_module
from bloomery.parallel.axis import Axis
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.pipeline import Pipeline, StageComputation, _BatchPass
from bloomery.parallel.pipeline_schedule import (
    Action,
    forwards_only,
    pipeline_order,
)
from bloomery.parallel.stage_p2p import MessageOrder, StageMessage
from bloomery.plan.pipeline_stages import PipelineStage

CPU = torch.device("cpu")
STAGES = tuple(
    PipelineStage(
        index=index,
        rank=index,
        blocks=range(2 * index, 2 * index + 2),
        embeds=index == 0,
        finishes=index == 2,
    )
    for index in range(3)
)
BATCH = MicroBatch(
    tokens=torch.arange(6).reshape(2, 3),
    targets=torch.arange(6).reshape(2, 3) + 1,
    documents=torch.zeros(2, 3),
    samples=torch.tensor([7, 9]),
)


def pipeline_of(*, index: int = 2, tensor: Axis | None = None, schedule: str = "1f1b") -> Pipeline:
    mesh = Mesh(device=CPU, pipeline=Axis(index=index, ranks=(0, 1, 2)), tensor=tensor or Axis())
    return Pipeline(mesh, STAGES, schedule=schedule, computation=None)  # type: ignore[arg-type]


def sums(number: float) -> LossSums:
    return LossSums(torch.tensor(0.0), torch.tensor(number), torch.tensor(number / 4))


def test_losses_of_micro_batches_are_added_up_on_the_first_tensor_parallel_rank() -> None:
    asked: list[Any] = []
    for tensor, expected in ((Axis(), (7.0, 1.75)), (Axis(index=1, ranks=(0, 1)), (0.0, 0.0))):
        pipeline = pipeline_of(tensor=tensor)
        pipeline._run = lambda batches, **told: asked.append((batches, told)) or map(sums, (1.0, 2.0, 4.0))  # type: ignore[method-assign,misc]
        found = pipeline.accumulate([BATCH], 5, weight=0.5)
        assert tuple(float(term) for term in found) == expected
        assert asked.pop() == ([BATCH], {"step": 5, "weight": 0.5}) and not asked


def test_an_evaluation_goes_on_by_two_micro_batches_for_each_stage_and_tells_of_each() -> None:
    pipeline, asked, moves = pipeline_of(), list[Any](), list[int]()

    def run(batches: Any, **told: Any) -> Any:
        assert not torch.is_grad_enabled()
        asked.append((len(batches), told))
        yield from map(sums, [1.0] * len(batches))

    pipeline._run = run  # type: ignore[method-assign]
    nats = pipeline.evaluate([BATCH] * 13, lambda: moves.append(len(asked)))
    assert nats.dtype == torch.float64 and float(nats) == 13.0
    assert asked == [(count, {"step": None, "weight": 1.0}) for count in (6, 6, 1)] and moves == [1, 2, 3]


def test_the_order_of_a_batch_is_that_of_its_schedule_and_of_an_evaluation_forwards_alone() -> None:
    pipeline = pipeline_of(schedule="gpipe")
    training = pipeline._message_order(4, trains=True)
    assert training.order == pipeline_order("gpipe", pipeline=3, chunks=1, micro_batches=4)
    assert (training.own, training.ranks) == (2, [0, 1, 2])
    evaluating = pipeline._message_order(4, trains=False)
    assert evaluating.order == forwards_only([0, 1, 2], micro_batches=4)
    assert pipeline._message_order(4, trains=True) is training
    assert pipeline._message_order(5, trains=True) is not training
    assert pipeline._message_order(4, trains=False) is evaluating


@pytest.mark.parametrize("trains", [True, False])
def test_a_pass_does_its_own_actions_in_order_and_lets_its_messages_go_at_the_end(
    trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[Any] = []

    class Messenger:
        def __init__(self, mesh: Mesh, messages: MessageOrder, *, shapes: Any) -> None:
            notes.append((mesh, messages.own, shapes))

        def post_receives(self, place: int) -> None:
            notes.append(place)

        def finish(self) -> None:
            notes.append("finished")

    def run(one: _BatchPass, action: Action) -> LossSums | None:
        passes.append((one.stages, one.computation, one.micro_batches, one.step, one.weight))
        notes.append(action)
        return sums(action.micro_batch) if action.kind == "forward" else None

    passes: list[Any] = []
    monkeypatch.setattr(pipeline_module, "StageMessenger", Messenger)
    monkeypatch.setattr(_BatchPass, "run", run)
    pipeline = pipeline_of()
    pipeline._computation = SimpleNamespace(activation_like=lambda batch: ("like", batch))  # type: ignore[assignment]
    batches: Any = ["first", "second"]
    with torch.set_grad_enabled(trains):
        found = [float(term.z) for term in pipeline._run(batches, step=5, weight=0.5)]
    assert found == [0.0, 0.25]
    order = (
        pipeline_order("1f1b", pipeline=3, chunks=1, micro_batches=2)
        if trains
        else forwards_only([0, 1, 2], micro_batches=2)
    )
    shapes = [("like", "first"), ("like", "second")]
    actions = [note for numbered in enumerate(order[2]) for note in numbered]
    assert notes == [(pipeline._mesh, 2, shapes), *actions, "finished"]
    assert all(one == (STAGES, pipeline._computation, batches, 5, 0.5) for one in passes)


def computation(seed: int | None = None, *, compiled: bool = False) -> StageComputation:
    section = ModelSection(
        layers=6, hidden=8, heads=2, ffn=8, norm="layernorm", position="learned", tied=True
    )
    section = ModelSection(**{**vars(section), "embedding_norm": True, "bias": True})
    decoder = build(section, vocabulary=11, sequence_length=3)
    weights: Any = SimpleNamespace(dtype=torch.bfloat16, accumulate_gradients=lambda parameters: None)
    return StageComputation(
        decoder, weights, STAGES, z_loss=0.5, chunk=7, dropout_seed=seed, compiled=compiled
    )


def test_each_stage_has_the_parameters_of_its_blocks_and_of_the_ends_that_it_has() -> None:
    made = computation()
    names = {parameter: name for name, parameter in made._decoder.named_parameters()}
    found = [{names[parameter] for parameter in made.parameters(stage)} for stage in STAGES]
    ends = [
        {"embedding.weight", "positions.weight", "embedding_norm.weight", "embedding_norm.bias"},
        set(),
        {"final_norm.weight", "final_norm.bias", "embedding.weight"},
    ]
    for stage, own, of_end in zip(STAGES, found, ends, strict=True):
        blocks = {name for name in own if name.startswith("blocks.")}
        assert own - blocks == of_end
        assert blocks == {
            name for name in names.values() if name.startswith(tuple(f"blocks.{b}." for b in stage.blocks))
        }
    given: list[Any] = []
    made._weights.accumulate_gradients = given.append  # type: ignore[method-assign]
    made.accumulate_gradients(STAGES[1])
    assert given == [made.parameters(STAGES[1])]


def test_a_head_of_its_own_is_a_parameter_of_the_last_stage_alone() -> None:
    section = ModelSection(layers=6, hidden=8, heads=2, ffn=8, norm="rmsnorm", position="rope", tied=False)
    decoder = build(section, vocabulary=11, sequence_length=3)
    names = {parameter: name for name, parameter in decoder.named_parameters()}
    found = [
        {names[parameter] for parameter in pipeline_module._stage_parameters(decoder, stage)}
        for stage in STAGES
    ]
    ends = [{name for name in own if not name.startswith("blocks.")} for own in found]
    assert ends == [{"embedding.weight"}, set(), {"final_norm.weight", "head.weight"}]


def test_what_a_stage_sends_has_the_shape_of_its_part_of_the_sequence_in_the_working_precision() -> None:
    made = computation()
    batch = MicroBatch(tokens=torch.zeros(2, 6), targets=BATCH.targets, documents=None, samples=BATCH.samples)
    made._decoder.sequence_degree = 2
    like = made.activation_like(batch)
    assert (tuple(like.shape), like.dtype, like.device.type) == ((2, 3, 8), torch.bfloat16, "meta")


def test_a_stage_drops_by_step_sample_and_position_and_not_in_an_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        pipeline_module, "dropout_address", lambda **told: asked.append(told) or SimpleNamespace(rows="rows")
    )
    seen: list[Any] = []
    for seed, step, rows in ((3, 5, "rows"), (3, None, None), (None, 5, None), (0, 0, "rows")):
        made = computation(seed)
        made._functions[STAGES[1]] = lambda *told: seen.append(told) or "hidden"  # type: ignore[assignment,func-returns-value]
        assert made.forward(STAGES[1], BATCH, step=step, hidden="before") == "hidden"  # type: ignore[arg-type,comparison-overlap]
        assert seen.pop() == (BATCH.tokens, BATCH.targets, BATCH.documents, rows, "before")
    usual = {"samples": BATCH.samples, "positions": range(3)}
    assert asked == [{**usual, "seed": 3, "step": 5}, {**usual, "seed": 0, "step": 0}]


def test_a_stage_runs_its_blocks_and_the_last_one_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Decoded:
        def __call__(self, tokens: Any, **told: Any) -> str:
            calls.append((tokens, told))
            return "hidden"

        def loss(self, *told: Any, **more: Any) -> str:
            calls.append((told, more))
            return "sums"

    decoder: Any = Decoded()
    results = []
    for stage in STAGES[1:]:
        function = pipeline_module._stage_function(decoder, stage, z_loss=0.5, chunk=7)
        results.append(function("tokens", "targets", "documents", None, "before"))  # type: ignore[arg-type]
    usual = {"documents": "documents", "address": None, "hidden": "before"}
    assert results == ["hidden", "sums"]  # type: ignore[comparison-overlap]
    assert calls == [
        ("tokens", {**usual, "blocks": range(2, 4)}),
        ("tokens", {**usual, "blocks": range(4, 6)}),
        (("hidden", "targets"), {"z_loss": 0.5, "chunk": 7}),
    ]
    calls.clear()
    pipeline_module._stage_function(decoder, STAGES[1], z_loss=0.5, chunk=7)(
        "tokens",
        "targets",
        None,
        "rows",
        "before",  # type: ignore[arg-type]
    )
    address = DropoutAddress(rows="rows")  # type: ignore[arg-type]
    assert calls == [("tokens", {**usual, "documents": None, "address": address, "blocks": range(2, 4)})]
    compiled: list[Any] = []
    monkeypatch.setattr(pipeline_module, "compiled_function", lambda f, *, device: compiled.append(f) or f)
    computation()
    assert compiled == []
    computation(compiled=True)
    assert len(compiled) == 3


class Post:
    """Messages of a pass: what arrives is 3.0 everywhere."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def receive(self, message: StageMessage) -> torch.Tensor:
        self.calls.append(("received", message))
        return torch.full((2,), 3.0)

    def send(self, message: StageMessage, tensor: torch.Tensor) -> None:
        assert not tensor.requires_grad
        self.calls.append(("sent", message, tensor.tolist()))


class Scales:
    """Stages with one weight of 2.0 that multiplies; the last one sums up."""

    def __init__(self) -> None:
        self.weights = [nn.Parameter(torch.tensor(2.0)) for _ in STAGES]
        self.accumulated: list[int] = []

    def forward(self, stage: PipelineStage, batch: Any, *, step: Any, hidden: Any) -> Any:
        start = torch.ones(2) if hidden is None else hidden
        result = start * self.weights[stage.index]
        return LossSums(result.sum(), result.sum(), torch.tensor(0.5)) if stage.finishes else result

    def parameters(self, stage: PipelineStage) -> list[nn.Parameter]:
        return [self.weights[stage.index]]

    def accumulate_gradients(self, stage: PipelineStage) -> None:
        self.accumulated.append(stage.index)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_stage_receives_computes_and_sends_for_each_action(stage: int, split: bool) -> None:
    post, scales = Post(), Scales()
    batches: Any = ["zero", "one", "two"]
    one = _BatchPass(
        stages=STAGES,
        computation=scales,
        messenger=post,
        micro_batches=batches,
        step=5,
        weight=0.5,  # type: ignore[arg-type]
    )
    result = one.run(Action("forward", stage, 1))
    if stage == 2:
        assert result is not None and [float(term) for term in result] == [12.0, 12.0, 0.5]
        assert not any(term.requires_grad for term in result)
    else:
        assert result is None
    back, onward = StageMessage(stage - 1, stage, 1), StageMessage(stage, stage + 1, 1)
    made = [2.0, 2.0] if stage == 0 else [6.0, 6.0]
    forward = [("received", back)] * (stage > 0) + [("sent", onward, made)] * (stage < 2)
    assert post.calls == forward
    post.calls.clear()
    assert one.run(Action("backward_input" if split else "backward", stage, 1)) is None
    gradient = [1.0, 1.0] if stage == 2 else [6.0, 6.0]  # × weight: 0.5 of the loss, or what arrived
    expected: list[Any] = [("received", StageMessage(stage + 1, stage, 1))] * (stage < 2)
    expected += [("sent", StageMessage(stage, stage - 1, 1), gradient)] * (stage > 0)
    assert post.calls == expected
    weight = scales.weights[stage]
    if split:
        assert weight.grad is None and scales.accumulated == []
        one.run(Action("backward_weight", stage, 1))
        assert scales.accumulated == [stage]
    assert weight.grad is not None and float(weight.grad) == {0: 6.0, 1: 18.0, 2: 3.0}[stage]
    assert not one.roots and not one.inputs and not one.weight_backwards


def test_an_evaluation_keeps_nothing_for_a_backward() -> None:
    post = Post()
    with torch.no_grad():
        one = _BatchPass(
            stages=STAGES,
            computation=Scales(),  # type: ignore[arg-type]
            messenger=post,  # type: ignore[arg-type]
            micro_batches=["zero"],  # type: ignore[list-item]
            step=None,
            weight=1.0,
        )
        one.run(Action("forward", 1, 0))
    assert not one.roots and not one.inputs
