"""The held-out loss: which windows each replica takes, how datasets are weighed, and what has no loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bloomery.config.checkpoint import EvaluateSection
from bloomery.config.load import load_recipe
from bloomery.data_loader.packs import IGNORED
from bloomery.evaluate.scoring import Entropy
from bloomery.parallel.axis import Axis
from bloomery.parallel.mesh import Mesh
from bloomery.train import data_summary, held_out
from bloomery.train.data_summary import DatasetSummary, summarise_data
from bloomery.train.held_out import HeldOutBatch, HeldOutLoss, build_held_out
from bloomery.train.state import Goal, TrainState

CPU = torch.device("cpu")
STATE = TrainState(goal=Goal(steps=9), step=4)
NATS = {"w0": (4.0, 2), "w1": (6.0, 2), "c0": (9.0, 3), "c1": (1.0, 1), "wide": (2.0**24, 2**24 + 1)}


def beside(*others: tuple[float, float], index: int = 0) -> Axis:
    """An axis of two ranks, of which the other one has these nats and tokens of each dataset."""

    class Adding(Axis):
        def all_reduce(self, tensor: torch.Tensor, *, maximum: bool = False) -> torch.Tensor:
            return tensor.add_(torch.tensor(others, dtype=tensor.dtype))

    return Adding(index=index, ranks=(0, 1))


class Model:
    """A model whose entropy of a batch is written in `NATS`."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def entropy(self, batches: list[str], *, report_progress: Any) -> Entropy:
        self.asked.append((batches, report_progress))
        found = [NATS[name] for name in batches]
        return Entropy(nats=sum(nats for nats, _ in found), tokens=sum(tokens for _, tokens in found))


def loss_of(
    model: Model, data: Axis, *names: str, ratios: Any = None, pipeline: Axis | None = None
) -> HeldOutLoss:
    mesh = Mesh(device=CPU, data=data, **({"pipeline": pipeline} if pipeline else {}))
    batches: Any = [
        HeldOutBatch(dataset={"w": "web", "c": "code"}[name[0]], batch=name)  # type: ignore[arg-type]
        for name in names
    ]
    return HeldOutLoss(
        EvaluateSection(),
        batches,
        model=model,  # type: ignore[arg-type]
        mesh=mesh,
        ratios=ratios,
        report_progress=print,
    )


def test_each_token_counts_alike_or_each_dataset_by_its_ratio() -> None:
    model = Model()
    told = loss_of(model, Axis(), "w0", "w1", "c0", "c1").run(STATE)
    by_dataset = {"web": 10.0 / 4, "code": 10.0 / 4}
    assert told == {"held_out_loss": 20.0 / 8, "held_out_by_dataset": by_dataset}
    assert model.asked == [(["w0", "w1"], print), (["c0", "c1"], print)]
    ratios = {"web": 3.0, "code": 1.0, "law": 4.0}
    told = loss_of(model, Axis(), "w0", "c0", ratios=ratios).run(STATE)
    assert told["held_out_loss"] == pytest.approx((3.0 * 2.0 + 1.0 * 3.0) / 4.0)
    alone = loss_of(model, Axis(), "w1").run(STATE)
    assert alone == {"held_out_loss": 3.0, "held_out_by_dataset": None}
    many = loss_of(model, Axis(), "wide").run(STATE)
    assert many["held_out_loss"] == 2**24 / (2**24 + 1), "each of many tokens counts"


def test_replicas_take_windows_in_turn_and_stages_of_a_pipeline_add_up() -> None:
    model = Model()
    axis, stages = beside((1.0, 1.0), (0.0, 1.0), index=1), beside((3.0, 1.0), (2.0, 2.0))
    told = loss_of(model, axis, "w0", "w1", "c0", "c1", pipeline=stages).run(STATE)
    assert [batches for batches, _ in model.asked] == [["w1"], ["c1"]]
    assert told["held_out_by_dataset"] == {"web": 10.0 / 4, "code": 3.0 / 4}
    assert told["held_out_loss"] == 13.0 / 8


def test_an_evaluation_is_remembered_by_where_it_was_made() -> None:
    loss = loss_of(Model(), Axis(), "w0")
    loss.section = EvaluateSection(every_steps=4)
    assert loss.is_owed(STATE)
    loss.run(STATE)
    assert not loss.is_owed(STATE)


def built(
    parts: list[tuple[str, float]], targets: dict[str, int], monkeypatch: pytest.MonkeyPatch, **given: Any
) -> tuple[HeldOutLoss | None, list[Any]]:
    """The loss of parts by name and weight, whose targets are as given, and what was asked for windows."""
    asked: list[Any] = []
    documents = [SimpleNamespace(name=name, weight=weight, documents=name) for name, weight in parts]

    def batches(name: str, **told: Any) -> list[Any]:
        asked.append((name, told))
        if name not in targets:
            return []
        return [SimpleNamespace(name=name, targets=torch.tensor([[targets[name]]]))] * told["limit"]

    monkeypatch.setattr(held_out, "held_out_documents", lambda section, prepared: documents)
    monkeypatch.setattr(held_out, "held_out_batches", batches)
    monkeypatch.setattr(held_out, "held_out_weights", lambda section: given.get("ratios"))
    mesh = Mesh(device=CPU, rank=given.get("rank", 0))
    settings = [f"evaluate.samples={given.get('samples', 4)}", *given.get("settings", ())]
    recipe = load_recipe("demo", settings).recipe
    loss = build_held_out(
        recipe,
        SimpleNamespace(end_of_document_id=9),  # type: ignore[arg-type]
        SimpleNamespace(decoder=SimpleNamespace(sequence_degree=2)),  # type: ignore[arg-type]
        mesh,
        report_progress=print,
    )
    return loss, [*asked, recipe]


def test_windows_of_each_dataset_are_taken_by_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, asked = built([("web", 3.0), ("code", 1.0)], {"web": 5, "code": 7}, monkeypatch)
    recipe = asked.pop()
    usual = {
        "sequence_length": recipe.data.sequence_length,
        "eod": 9,
        "answers_alone": False,
        "divisor": 2,
    }
    assert asked == [
        ("web", {**usual, "rows": 4, "limit": 3}),
        ("code", {**usual, "rows": 4, "limit": 1}),
    ]
    assert loss is not None and loss.section is recipe.evaluate and loss._report_progress is print
    assert [one.dataset for one in loss._batches] == ["web"] * 3 + ["code"] and loss._ratios is None
    _, asked = built([("web", 1.0)], {"web": 5}, monkeypatch, samples=20)
    assert asked[0][1]["rows"] == 8, "a batch has so many rows at most"
    _, asked = built([("web", 1.0)], {"web": 5}, monkeypatch, settings=["data.prompt_field=question"])
    assert asked[0][1]["answers_alone"] is True
    loss, _ = built([("web", 3.0), ("law", 1.0)], {"web": 5, "law": 5}, monkeypatch, ratios={"web": 3.0})
    assert loss is not None and loss._ratios == {"web": 3.0, "law": 1.0}


def test_a_dataset_without_a_target_is_named_by_the_first_rank_and_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parts, targets = [("web", 1.0), ("chat", 1.0)], {"web": 5, "chat": IGNORED}
    for rank in (0, 1):
        loss, _ = built(parts, targets, monkeypatch, rank=rank)
        assert loss is not None and {one.dataset for one in loss._batches} == {"web"}
    assert len(caplog.records) == 1 and "no loss of 'chat' is measured" in caplog.text
    assert "Raise evaluate.samples or data.sequence_length." in caplog.text
    loss, _ = built([*parts, ("empty", 1.0)], targets, monkeypatch)
    assert loss is not None and "empty" not in caplog.text, "no prompt is to blame where there is no text"
    assert built(parts[1:], targets, monkeypatch)[0] is None and built([], {}, monkeypatch)[0] is None


def test_a_start_counts_what_its_run_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["train.global_batch=8", "train.ramp_up=[4,4,24]", "train.samples=80"]
    recipe = load_recipe("demo", [*settings, "data.sequence_length=32"]).recipe
    held = [
        SimpleNamespace(documents=SimpleNamespace(document_count=count, token_count=10 * count))
        for count in (3, 4)
    ]
    monkeypatch.setattr(data_summary, "held_out_documents", lambda section, prepared: held)
    monkeypatch.setattr(
        data_summary, "count_parameters", lambda model, **told: SimpleNamespace(total=1000, told=told)
    )
    datasets = [
        SimpleNamespace(document_count=5, token_count=640),
        SimpleNamespace(document_count=7, token_count=0),
    ]
    stream: Any = SimpleNamespace(
        names=("web", "code"),
        batches=SimpleNamespace(datasets=datasets),
        stream=SimpleNamespace(
            mixtures=[SimpleNamespace(shares=(1, 1)), SimpleNamespace(shares=(3, 1))],
            sample_tokens=lambda number, tokens: (32, 20)[number],  # the second is packed
        ),
    )
    found = summarise_data(recipe, SimpleNamespace(vocabulary_size=300, notes=("a note",)), stream)  # type: ignore[arg-type]
    assert (found.parameters, found.vocabulary, found.sequence_length) == (1000, 300, 32)
    assert (found.batch_tokens, found.planned_tokens) == ((128, 256), 60 * 32 + 20 * 20)
    assert (found.documents, found.tokens, found.notes) == (12, 640, ("a note",))
    assert (found.held_out_documents, found.held_out_tokens) == (7, 70)
    assert found.datasets == (
        DatasetSummary(name="web", documents=5, tokens=640, epochs=60 * 32 / 640),
        DatasetSummary(name="code", documents=7, tokens=0, epochs=20.0 * 20),
    )


def test_a_dataset_of_which_a_few_tokens_count_is_measured_in_all_its_windows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    part = SimpleNamespace(name="chat", weight=1.0, documents="chat")
    windows = [SimpleNamespace(targets=torch.tensor([[IGNORED, last]])) for last in (IGNORED, 5, IGNORED)]
    monkeypatch.setattr(held_out, "held_out_documents", lambda section, prepared: [part])
    monkeypatch.setattr(held_out, "held_out_batches", lambda name, **told: windows)
    loss = build_held_out(
        load_recipe("demo").recipe,
        SimpleNamespace(end_of_document_id=9),  # type: ignore[arg-type]
        SimpleNamespace(decoder=SimpleNamespace(sequence_degree=1)),  # type: ignore[arg-type]
        Mesh(device=CPU),
        report_progress=print,
    )
    assert loss is not None and [one.batch for one in loss._batches] == windows
    assert caplog.records == []
