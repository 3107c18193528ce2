"""The data of a run: what is trained on and held out, how far the stream goes, and what is told of it."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.guard.reports import report

from bloomery.config.data import DataSection
from bloomery.config.load import load_recipe
from bloomery.data.dataset_shares import Claim, Demand
from bloomery.data.position import EVERYTHING, Position
from bloomery.errors import DataError
from bloomery.events.history import EvenSteps
from bloomery.events.journal import Journal
from bloomery.events.run_directory import RunDirectory
from bloomery.parallel.axis import Axis
from bloomery.parallel.mesh import Mesh
from bloomery.train import data_stream
from bloomery.train.data_stream import (
    DataForecast,
    DataStream,
    build_data_stream,
    data_forecast,
    demand_of,
    held_out_documents,
    indices_left,
    training_bigrams,
)
from bloomery.train.state import Goal, TrainState

CPU = torch.device("cpu")
PLAIN = ("train.global_batch=8", "train.ramp_up=[]", "train.samples=80", "data.sequence_length=32")


def source(name: str, weight: float = 1.0, prefix: str = "") -> Any:
    return SimpleNamespace(name=name, weight=weight, prefix=prefix or name)


class Documents:
    """A dataset of some documents, of ten tokens each."""

    def __init__(self, prefix: str, documents: range = range(10)) -> None:
        self.prefix, self.documents = prefix, documents
        self.document_count, self.token_count = len(documents), 10 * len(documents)

    def part(self, documents: range) -> Documents:
        return Documents(self.prefix, documents)

    def window_count(self, length: int) -> int:
        return max(0, self.token_count - 1) // length


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Datasets are opened as `Documents`."""
    monkeypatch.setattr(data_stream, "IndexedDataset", Documents)


def prepared_of(*train: Any, held_out: tuple[Any, ...] = (), **more: Any) -> Any:
    return SimpleNamespace(train=train, held_out=held_out, **more)


def test_text_is_held_out_from_datasets_for_it_and_from_the_validation_part_of_the_others(
    opened: None,
) -> None:
    section = DataSection(split=(8, 2), sequence_length=32)
    prepared = prepared_of(
        source("web", 3.0), source("code", 2.0), held_out=(source("web", 5.0, "held"), source("law", 1.0))
    )
    parts = held_out_documents(section, prepared)
    told = [(part.name, part.weight, part.documents.prefix, part.documents.documents) for part in parts]
    assert told == [
        ("web", 5.0, "held", range(10)),
        ("law", 1.0, "law", range(10)),
        ("web (validation)", 3.0, "web", range(8, 10)),
        ("code", 2.0, "code", range(8, 10)),
    ]
    whole = held_out_documents(replace(section, split=()), prepared)
    assert [part.name for part in whole] == ["web", "law"]
    assert held_out_documents(replace(section, split=(10, 0)), prepared_of(source("web"))) == []


def test_ratios_for_validation_weigh_a_dataset_and_its_validation_part_and_leave_others_out(
    opened: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ratios: dict[str, float] = {"web": 0.25, "law": 0.0}
    monkeypatch.setattr(data_stream, "held_out_weights", lambda section: ratios)
    section = DataSection(split=(8, 2), sequence_length=32)
    prepared = prepared_of(source("web"), source("code"), held_out=(source("web"), source("law")))
    parts = held_out_documents(section, prepared)
    assert [(part.name, part.weight) for part in parts] == [("web", 0.125), ("web (validation)", 0.125)]
    ratios["missing"] = 0.5
    with pytest.raises(DataError, match="validates on 'missing', which has no held-out documents") as refused:
        held_out_documents(section, prepared)
    assert "Give data.split a part for validation" in refused.value.remedy


def test_training_sees_its_part_and_a_part_too_small_for_a_sample_is_refused(opened: None) -> None:
    section = DataSection(split=(8, 2), sequence_length=32)
    (documents,) = data_stream.training_documents(section, [source("web")])
    assert documents.documents == range(8)  # type: ignore[attr-defined]
    exact = replace(section, sequence_length=79)
    assert len(data_stream.training_documents(exact, [source("web")])) == 1
    with pytest.raises(
        DataError, match=r"leaves 80 tokens of the dataset 'web' .* one sample takes 81"
    ) as refused:
        data_stream.training_documents(replace(section, sequence_length=80), [source("web")])
    assert refused.value.remedy == "Give training a larger part, or the dataset more text."
    (whole,) = data_stream.training_documents(replace(section, split=()), [source("web")])
    assert whole.documents == range(10)  # type: ignore[attr-defined]
    long = replace(section, split=(), sequence_length=800)
    assert data_stream.training_documents(long, [source("web")]), "the stream says what lacks there"


def of_sequences(monkeypatch: pytest.MonkeyPatch, *edges: int) -> None:
    class Sequences(Documents):
        sequence_count, document_indices = edges[-1], np.array(edges)

    monkeypatch.setattr(data_stream, "IndexedDataset", Sequences)


def test_megatrons_split_counts_sequences_and_refuses_to_cut_a_document(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    section = DataSection(split=(8, 2), sequence_length=32, order="megatron")

    def trained_on() -> range:
        (part,) = data_stream.training_documents(section, [source("web")])
        return part.documents  # type: ignore[attr-defined,no-any-return]

    of_sequences(monkeypatch, *range(11))
    assert trained_on() == range(8)
    of_sequences(monkeypatch, 0, 3, 6, 9, 12, 16, 17, 18, 18, 19, 20)
    assert trained_on() == range(5), "sixteen of twenty sequences"
    of_sequences(monkeypatch, 0, 3, 6, 9, 12, 15, 17, 18, 18, 19, 20)
    with pytest.raises(DataError, match=r"'web' within a document: it has 20 sequences in 10 doc") as cut:
        trained_on()
    assert "one sequence a document, or set data.order = 'bloomery'" in cut.value.remedy


def test_a_run_of_steps_makes_those_that_are_left_whatever_the_batch_was_before() -> None:
    recipe = load_recipe("demo", [*PLAIN, "train.samples=0", "train.steps=10"]).recipe
    assert indices_left(recipe, step=2, position=Position(consumed=64)) == 64
    assert indices_left(recipe, step=8, position=Position(consumed=16)) == 16


def test_a_recipe_asks_for_its_samples_with_room_for_a_batch_and_a_sample_of_each_dataset() -> None:
    claims = (
        Claim(name="web", samples=0, weight=Fraction(1)),
        Claim(name="code", samples=3, weight=Fraction(0)),
    )
    recipe = load_recipe("demo", [*PLAIN, "train.samples=81"]).recipe
    assert demand_of(recipe, claims) == Demand(claims=claims, samples=88, slack=10, sequence_length=32)


@pytest.mark.parametrize(
    ("consumed", "skips", "left"),
    [(0, (), 80), (24, (), 56), (24, (range(30, 35), range(90, 99)), 61), (80, (), 0), (88, (), 0)],
)
def test_what_is_left_of_a_stream_counts_the_indices_that_are_skipped_on_the_way(
    consumed: int, skips: tuple[range, ...], left: int
) -> None:
    recipe = load_recipe("demo", PLAIN).recipe
    position = Position(consumed=consumed, skips=skips)
    assert indices_left(recipe, step=consumed // 8, position=position) == left


def stream_of(batches: Any = None, **fields: Any) -> DataStream:
    given = dict(
        stream=SimpleNamespace(order=SimpleNamespace(), mixtures=["first"]),
        batches=batches,
        names=("web", "code"),
        fingerprint="f1",
        is_tokenised_here=True,
    )
    return DataStream(**{**given, **fields})


class Followed:
    """Batches that note which order they follow."""

    prefetch = 3

    def __init__(self) -> None:
        self.orders: list[Any] = []
        self.expected: list[Any] = []

    def follow(self, order: Any) -> None:
        self.orders.append(order)

    def expect(self, span: Any, micro_batch: int) -> None:
        self.expected.append((span, micro_batch))


def mixture(at: int, *shares: int) -> Any:
    return SimpleNamespace(at=at, shares=shares)


def test_another_mixture_is_told_with_its_shares_and_followed_by_the_batches() -> None:
    batches, order = Followed(), SimpleNamespace()
    asked: list[Any] = []
    new = SimpleNamespace(order="new", mixtures=[mixture(0, 1, 1), mixture(16, 3, 1)])
    old = SimpleNamespace(
        order=order,
        mixtures=[mixture(0, 1, 1)],
        demanding=lambda demand, **told: asked.append((demand, told)) or new,
    )
    data = stream_of(batches, stream=old)
    assert data.demand("demand", at=16, left=64) == {"at": 16, "shares": {"web": 0.75, "code": 0.25}}  # type: ignore[arg-type]
    assert asked == [("demand", {"at": 16, "left": 64})]
    assert batches.orders == ["new"] and data.stream is new and data.order == "new"
    new.demanding = lambda demand, **told: new
    assert data.demand("demand", at=24, left=56) is None and batches.orders == ["new"]  # type: ignore[arg-type]


def test_a_resume_follows_the_order_of_its_checkpoint_and_tells_only_of_a_mixture_that_is_new() -> None:
    batches, asked = Followed(), list[Any]()
    same = SimpleNamespace(order="same", mixtures=[mixture(0, 1, 1)])

    def following(stored: Any, **told: Any) -> Any:
        asked.append((stored, told))
        return same

    stream = SimpleNamespace(order="today's", mixtures=[mixture(0, 1, 1)], following=following)
    data = stream_of(batches, stream=stream)
    stored = {"fingerprint": "f1", "mixtures": [{}]}
    assert data.follow(stored, "step-000004", at=16, left=64) is None
    assert asked == [(stored, {"at": 16, "left": 64})] and batches.orders == ["same"]
    data._epoch_ends = lambda below: ((0, 12), (1, 20))  # type: ignore[method-assign]
    assert data.epochs_ended(24, below=80) == [{"dataset": "code", "sample": 20}], "what came before is told"
    other = {"fingerprint": "f2", "mixtures": [{}]}
    with pytest.raises(DataError, match="step-000004 was trained on other text") as refused:
        stream_of(stream=stream).follow(other, "step-000004", at=16, left=64)
    assert "Bring the old files back" in refused.value.remedy
    given = stream_of(batches, stream=stream, is_tokenised_here=False)
    assert given.follow({**other, "mixtures": []}, "step-000004", at=16, left=64) == {
        "at": 0,
        "shares": {"web": 0.5, "code": 0.5},
    }, "datasets that were given may become more"


def test_as_many_steps_are_read_ahead_as_are_known() -> None:
    batches = Followed()
    spans: list[Any] = []

    def next_span(position: Position, count: int, share: Any) -> Any:
        assert share is EVERYTHING
        if position.consumed >= 36:
            raise DataError("the order ends here", remedy="")
        spans.append((position.consumed, count))
        return position.next_samples(count)

    data = stream_of(batches, stream=SimpleNamespace(order=SimpleNamespace(next_span=next_span), mixtures=[]))
    phase = SimpleNamespace(global_batch=4, micro_batch=2)

    def ahead(consumed: int, goal: int) -> list[int]:
        spans.clear()
        batches.expected.clear()
        state = TrainState(goal=Goal(samples=goal), position=Position(consumed=consumed))
        data.prefetch(state, phase_of=lambda state: phase, share=EVERYTHING)  # type: ignore[arg-type,return-value]
        assert [micro for _, micro in batches.expected] == [2] * len(spans)
        return [first for first, _ in spans]

    assert ahead(8, 100) == [8, 12, 16]
    assert ahead(8, 16) == [8, 12] and ahead(32, 100) == [32] and ahead(36, 100) == []


def test_the_ends_of_epochs_are_computed_once_for_a_stream_and_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        data_stream, "epoch_ends", lambda order, *, below: asked.append((order, below)) or ((0, below - 1),)
    )
    data = stream_of(stream=SimpleNamespace(order="a"))
    assert [data._epoch_ends(below) for below in (80, 80, 90)] == [((0, 79),), ((0, 79),), ((0, 89),)]
    data.stream = SimpleNamespace(order="b")  # type: ignore[assignment]
    data._epoch_ends(90)
    assert asked == [("a", 80), ("a", 90), ("b", 90)]


def test_what_a_checkpoint_keeps_and_another_machine_must_read_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_stream, "stream_identity", lambda *told, **more: (told, more))
    stream = SimpleNamespace(to_json=lambda: {"mixtures": [1]})
    data = stream_of(SimpleNamespace(datasets=["d0", "d1"]), stream=stream)
    assert data.to_json() == {"fingerprint": "f1", "mixtures": [1]}
    assert data.identity() == ((stream, {"web": "d0", "code": "d1"}), {"text": "f1"})


def test_a_rank_reads_its_own_samples_as_the_recipe_says(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    stream = SimpleNamespace(order="order", layouts="layouts")
    monkeypatch.setattr(
        data_stream, "training_documents", lambda section, train: ("documents", section, train)
    )
    monkeypatch.setattr(data_stream, "stream_of_run", lambda *told: given.append(told) or stream)
    monkeypatch.setattr(data_stream, "Batches", lambda *told, **more: (told, more))
    settings = ["data.mask_documents=true", "data.prefetch=5", "data.read_threads=2"]
    recipe = load_recipe("demo", [*PLAIN, *settings]).recipe
    prepared = prepared_of(source("web"), end_of_document_id=9, vocabulary_size=300, fingerprint="f1")
    mesh = Mesh(device=CPU, rank=3, world=4, data=Axis(index=1, ranks=(1, 3)))
    built = build_data_stream(recipe, prepared, mesh)
    documents = ("documents", recipe.data, prepared.train)
    assert given == [(recipe, prepared.train, documents)] and built.stream is stream  # type: ignore[comparison-overlap]
    assert (built.names, built.fingerprint, built.is_tokenised_here) == (("web",), "f1", True)
    told, more = built.batches  # type: ignore[misc]
    assert told == ("order", documents)
    assert more == {
        "sequence_length": 32,
        "mask_documents": True,
        "answers_alone": False,
        "rank": 1,
        "degree": 2,
        "eod": 9,
        "prefetch": 5,
        "threads": 2,
        "vocabulary_size": 300,
        "layouts": "layouts",
        "device": CPU,
    }
    named = ['data.datasets=[{name = "web", path = "a"}]', "data.sources=[]"]
    chat = ["data.prompt_field=question", "data.mask_documents=false"]
    recipe = load_recipe("demo", [*PLAIN, *named, *chat]).recipe
    built = build_data_stream(recipe, prepared, mesh)
    assert not built.is_tokenised_here
    more = built.batches[1]  # type: ignore[index]
    assert (more["answers_alone"], more["mask_documents"]) == (True, False)


def test_bigrams_that_do_not_fit_into_memory_are_refused_and_else_counted_in_the_text_of_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data_stream, "training_documents", lambda section, train: ("documents", train))
    monkeypatch.setattr(
        data_stream, "count_bigrams", lambda datasets, size: torch.full((size, size), 2).numpy()
    )
    recipe, prepared = load_recipe("demo").recipe, prepared_of(source("web"), vocabulary_size=4)
    needed = data_stream.BIGRAM_BYTES * 16 / 2**30
    monkeypatch.setattr(data_stream, "main_memory_gib", lambda: needed)
    assert training_bigrams(recipe, prepared).equal(torch.full((4, 4), 2))
    monkeypatch.setattr(data_stream, "main_memory_gib", lambda: 0.99 * needed)
    with pytest.raises(DataError, match="with a vocabulary of 4, and this machine has"):
        training_bigrams(recipe, prepared)


def test_a_forecast_goes_on_from_the_newest_checkpoint_with_the_steps_that_led_to_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = load_recipe("demo", PLAIN).recipe
    fresh: Any = SimpleNamespace(following=lambda stored, **told: (stored, told))
    assert data_forecast(recipe, fresh, None) == DataForecast(
        stream=fresh, samples=80, step=0, position=Position(), past=(), recipe=recipe
    )
    position = Position(consumed=24, skips=(range(3, 8), range(30, 35)))  # it stands at index 29
    values = {"train": {"step": 3, "position": position.to_json()}, "data": "stored"}
    saved = [SimpleNamespace(directory=name) for name in ("older", "newest")]
    monkeypatch.setattr(data_stream, "checkpoints", lambda run: tuple(saved))
    monkeypatch.setattr(
        data_stream, "read_manifest", lambda directory: {"newest": SimpleNamespace(values=values)}[directory]
    )
    with Journal(RunDirectory(tmp_path).create().journal()) as journal:
        for step in (1, 2, 3, 4):
            journal.write("step", incarnation=1, **report(step, cursor=8 * step).to_json())
    assert data_forecast(recipe, fresh, tmp_path) == DataForecast(
        stream=("stored", {"at": 29, "left": 61}),  # type: ignore[arg-type]
        samples=90,
        step=3,
        position=position,
        past=(EvenSteps(first=1, cursor=8, each=8, count=3),),
        recipe=recipe,
    )
    saved.clear()
    assert data_forecast(recipe, fresh, tmp_path).step == 0


@pytest.mark.parametrize(
    ("settings", "seed", "samples"),
    [(("run.seed=5",), 5, 80), (("run.seed=5", "data.order_seed=7", "data.order_samples=99"), 7, 99)],
)
def test_a_stream_begins_with_the_seed_and_the_claims_of_its_recipe(
    settings: tuple[str, ...], seed: int, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    for name, answer in (
        (
            "layouts_of",
            [SimpleNamespace(sample_count=3, length=8), SimpleNamespace(sample_count=4, length=8)],
        ),
        ("claims", ("claimed",)),
        ("begin_stream", "stream"),
    ):
        monkeypatch.setattr(
            data_stream,
            name,
            lambda *told, name=name, answer=answer, **more: calls.append((name, told, more)) or answer,
        )
    sources, datasets = [source("web", 3.0), source("code")], [Documents("web"), Documents("code", range(3))]
    recipe = load_recipe("demo", [*PLAIN, *settings]).recipe
    assert data_stream.stream_of_run(recipe, sources, datasets) == "stream"  # type: ignore[arg-type,comparison-overlap]
    (_, told, more), (_, begun, given) = calls
    assert told == (recipe.data, datasets) and more == {"seed": seed}
    own = (
        Claim(name="web", samples=0, weight=Fraction(3)),
        Claim(name="code", samples=0, weight=Fraction(1)),
    )
    assert begun == (recipe.data, datasets, demand_of(recipe, own))
    assert given == {"seed": seed, "layouts": data_stream.layouts_of(), "samples": samples}  # type: ignore[call-arg]
    calls.clear()
    named = ['data.datasets=[{name = "web", path = "a"}, {name = "code", path = "b"}]', "data.sources=[]"]
    recipe = load_recipe("demo", [*PLAIN, *settings, *named]).recipe
    data_stream.stream_of_run(recipe, sources, datasets)  # type: ignore[arg-type]
    _, (_, asked, _), (_, begun, _) = calls
    extents = [(each.name, each.tokens, each.windows) for each in asked[1]]
    assert asked[0] is recipe.data and extents == [("web", 100, 3), ("code", 30, 4)]
    assert begun[2].claims == ("claimed",)
