"""What a rank with several stages, or with a part of the tensors, is built with and filled with."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.parallel.small import CPU
from tests.parallel.test_building import ALONE, LLAMA, Calls, model_of, parts_of

from bloomery.checkpoint.format.state import Box
from bloomery.config.parallel import ParallelSection
from bloomery.parallel import build as built
from bloomery.parallel.axis import SINGLE_RANK_AXIS, Axis
from bloomery.parallel.tensor import split_decoder

CHUNKED = ParallelSection(
    pipeline=2, schedule="interleaved", chunks=2, recompute_per_stage=("none", "full", "none", "selective")
)


@pytest.mark.parametrize(
    ("index", "recompute"), [(0, {0: "none", 2: "none"}), (1, {1: "full", 3: "selective"})]
)
def test_a_rank_of_two_stages_holds_the_blocks_of_both_each_with_what_its_stage_computes_again(
    index: int, recompute: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own: list[range] = []
    monkeypatch.setattr(
        built,
        "StageComputation",
        lambda decoder, weights, stages, **told: own.extend(s.blocks for s in stages),
    )
    monkeypatch.setattr(built, "Pipeline", lambda *told, **more: None)
    mesh = replace(ALONE, rank=index, world=2, pipeline=Axis(index=index, ranks=(0, 1)))
    model = model_of(mesh=mesh, parallel=CHUNKED)
    assert own == [range(index, index + 1), range(index + 2, index + 3)]
    assert [block.index for block in model.decoder.blocks] == [index, index + 2]
    assert model.recompute == recompute


@pytest.mark.parametrize(("written", "counted"), [("auto", 11), (24, 24)])
def test_stages_are_cut_by_the_vocabulary_that_the_model_has(
    written: Any, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    real = built.stages_of
    monkeypatch.setattr(built, "stages_of", lambda *told, **more: asked.append(more) or real(*told, **more))
    model_of(replace(LLAMA, vocabulary=written), vocabulary=11, sequence_length=8)
    assert asked == [{"vocabulary": counted, "sequence_length": 8}]


@pytest.mark.parametrize("index", [0, 1])
def test_the_first_tensor_parallel_rank_of_each_stage_reports_the_terms_of_a_loss(
    index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[bool] = []
    monkeypatch.setattr(
        built, "micro_batch_loss", lambda loss, *, dropout_seed, reports: said.append(reports)
    )

    def split(decoder: Any, axis: Axis, **told: Any) -> Any:
        return split_decoder(decoder, SINGLE_RANK_AXIS, sequence=False, device=CPU)

    monkeypatch.setattr(built, "split_decoder", split)
    monkeypatch.setattr(built, "InnerSizes", lambda *told, **more: None)
    model_of(mesh=replace(ALONE, tensor=Axis(index=index, ranks=(0, 1))))
    assert said == [index == 0]


def test_a_box_of_an_embedding_from_bigrams_gets_its_own_rows_and_columns() -> None:
    factors = [torch.arange(24.0).reshape(6, 4), -torch.arange(24.0).reshape(6, 4)]
    model = parts_of(Calls())
    mesh: Any = model.mesh
    mesh.run_on_rank_zero, mesh.broadcast = lambda factorise, doing: factors, lambda whole: whole
    model.decoder.model.vocabulary, model.decoder.model.section.hidden = 7, 4  # type: ignore[misc]
    entries = [
        SimpleNamespace(name=f"model.{name}", box=Box((3, 1), (4, 2)), tensor=torch.full((4, 2), 9.0))
        for name in ("embedding.weight", "head.weight")
    ]
    model.weights.state_entries = lambda: entries  # type: ignore[method-assign, assignment, return-value]
    model._fill_from_bigrams(("embedding.weight", "head.weight"), lambda report_progress: factors)
    for entry, factor in zip(entries, factors, strict=True):
        assert torch.equal(entry.tensor[:3], factor[3:, 1:3]) and not entry.tensor[3].any()


def test_the_inner_sizes_of_a_stage_stand_at_the_places_of_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(built, "StageComputation", lambda *told, **more: None)
    monkeypatch.setattr(built, "Pipeline", lambda *told, **more: None)
    mesh = replace(ALONE, rank=1, world=2, pipeline=Axis(index=1, ranks=(0, 1)))
    model = model_of(mesh=mesh, parallel=CHUNKED)
    sizes = model.inner_sizes
    assert sizes is not None and [block.index for block in model.decoder.blocks] == [1, 3]
    sizes._mesh = model.weights._mesh = ALONE
    for master in model.weights.master:
        master.fill_(2.0)
    sizes.begin(wanted=True)
    for number in range(2):
        sizes._logits[number].fill_(number + 5.0)
        sizes._hidden[number].fill_(number + 7.0)
    found = sizes.collect()
    assert found.tolist() == [[0.0, 5.0, 0.0, 6.0], [0.0, 7.0, 0.0, 8.0], [0.0, 2.0, 0.0, 2.0]]
    sizes._logits[0].fill_(torch.inf)
    sizes._hidden[1].fill_(torch.nan)
    assert sizes.collect()[:2].tolist() == [[0.0, torch.inf, 0.0, 0.0], [0.0, 0.0, 0.0, torch.inf]]
