"""What a training model is built with, and what it does where phase, text or initial values change."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.parallel.small import CPU, LENGTH, VOCABULARY

from bloomery.checkpoint.format.state import Box
from bloomery.config.model import ModelSection
from bloomery.config.optim import LossSection, OptimSection
from bloomery.config.parallel import ParallelSection
from bloomery.data_loader.batches import MicroBatch
from bloomery.evaluate.scoring import Entropy
from bloomery.model.initial_filling import InitialBox
from bloomery.model.initial_values import bigram_factors
from bloomery.model.loss import IGNORED, LossSums
from bloomery.model.shape import logical_shapes
from bloomery.parallel import build as built
from bloomery.parallel import local_loss
from bloomery.parallel.axis import SINGLE_RANK_AXIS, Axis
from bloomery.parallel.build import SettingsInForce, TrainingModel, build_training_model
from bloomery.parallel.flat import WeightStorage
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.precision import MasterWeights
from bloomery.parallel.tensor import split_decoder as tensor_split

ALONE = Mesh(device=CPU)
LLAMA = ModelSection(layers=4, hidden=16, heads=4, ffn=24)


class Calls:
    """Notes each call with its arguments, by name or by place, and answers it with what it was given."""

    def __init__(self, **answers: Any) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self._answers = answers

    def of(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.seen.append((name, *arguments, *([named] if named else [])))
            return self._answers.get(name)

        return call


def model_of(
    model: ModelSection = LLAMA, *, mesh: Mesh = ALONE, compiled: bool = False, **changed: Any
) -> TrainingModel:
    given: dict[str, Any] = dict(
        vocabulary=VOCABULARY,
        sequence_length=LENGTH,
        optim=OptimSection(learning_rate=0.01),
        loss=LossSection(z_loss=0.5),
        loss_chunk=7,
        seed=3,
        parallel=ParallelSection(),
    )
    return build_training_model(model, mesh=mesh, compiled=compiled, **given | changed)


@pytest.mark.parametrize(
    ("parallel", "storage", "bucket_bytes", "overlaps", "prefetch_blocks"),
    [
        (ParallelSection(overlap=False, bucket_mb=2.5), WeightStorage(), 2_500_000, False, 2),
        (ParallelSection(offload="cpu", zero=1), WeightStorage(zero=1, offload=True), 25_000_000, True, 2),
        (
            ParallelSection(working="by-block", prefetch_blocks=3),
            WeightStorage(rounds_by_block=True),
            25_000_000,
            True,
            3,
        ),
    ],
)
def test_masters_are_stored_and_summed_as_the_recipe_says(
    parallel: ParallelSection,
    storage: WeightStorage,
    bucket_bytes: int,
    overlaps: bool,
    prefetch_blocks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, Any] = {}

    def noted(module: Any, layouts: Any, working: Any, **named: Any) -> MasterWeights:
        given.update(named, working=working)
        return MasterWeights(module, layouts, working, **named)

    monkeypatch.setattr(built, "MasterWeights", noted)
    model = model_of(parallel=parallel, precision="fp16")
    assert given == {
        "mesh": ALONE,
        "storage": storage,
        "names": tuple(logical_shapes(model.decoder.model)),
        "bucket_bytes": bucket_bytes,
        "overlaps": overlaps,
        "prefetch_blocks": prefetch_blocks,
        "working": torch.float16,
    }


@pytest.mark.parametrize(
    ("zero", "shards", "working", "by_block"),
    [
        (0, 2, "kept", False),
        (1, 2, "kept", False),
        (2, 2, "kept", True),
        (3, 2, "kept", True),
        (3, 1, "kept", False),
        (0, 1, "by-block", True),
    ],
)
def test_weights_lie_block_by_block_where_blocks_are_gathered_or_rounded_one_at_a_time(
    zero: int, shards: int, working: str, by_block: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = replace(ALONE, shard=Axis(index=shards - 1, ranks=tuple(range(shards))))
    asked: dict[str, Any] = {}

    def lay_out(shapes: Any, pieces: Any, optim: Any, **named: Any) -> Any:
        asked.update(named)
        raise InterruptedError

    monkeypatch.setattr(built, "lay_out", lay_out)
    with pytest.raises(InterruptedError):
        model_of(mesh=mesh, parallel=ParallelSection(zero=zero, working=working))
    assert asked == {"shards": shards, "shard": shards - 1, "by_block": by_block}


def test_the_working_weights_of_the_first_precision_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.dtype] = []
    real = MasterWeights.set_working_dtype
    monkeypatch.setattr(
        MasterWeights, "set_working_dtype", lambda self, dtype: made.append(dtype) or real(self, dtype)
    )
    model = model_of(precision="bf16", resets_positions=True)
    assert made == [torch.bfloat16]
    assert model.current == SettingsInForce(precision="bf16", recompute="none")
    assert model.decoder.resets_positions and not model_of().decoder.resets_positions


@pytest.mark.parametrize(
    ("parallel", "tensor", "whole", "loss_alone", "by_block"),
    [
        (ParallelSection(), 1, 1, 0, False),
        (ParallelSection(working="by-block"), 1, 0, 1, True),
        (ParallelSection(tensor=2, sequence=True), 2, 0, 0, True),
    ],
)
def test_forward_and_loss_are_compiled_together_or_the_loss_beside_blocks_or_blocks_alone(
    parallel: ParallelSection,
    tensor: int,
    whole: int,
    loss_alone: int,
    by_block: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(
        local_loss, "compiled_function", lambda function, *, device: compiled.append(function) or function
    )
    monkeypatch.setattr("bloomery.parallel.recompute.compiled_function", lambda function, *, device: function)
    monkeypatch.setattr("bloomery.parallel.recompute.allow_compilations", lambda count: None)
    split: list[Any] = []

    def split_decoder(
        decoder: Any, axis: Axis, *, sequence: bool, device: torch.device, overlaps: bool
    ) -> Any:
        assert not overlaps, "these are CPUs"
        split.append((axis.degree, sequence, device))
        return tensor_split(decoder, SINGLE_RANK_AXIS, sequence=False, device=device)

    monkeypatch.setattr(built, "split_decoder", split_decoder)
    mesh = replace(ALONE, tensor=Axis(ranks=tuple(range(tensor))))
    sizes: dict[str, Any] = {}
    monkeypatch.setattr(built, "InnerSizes", lambda *parts, **named: sizes.update(named))
    model = model_of(mesh=mesh, parallel=parallel, compiled=True)
    assert model.compiled and model.compiles_blocks is by_block
    is_loss = [function == model.decoder.loss for function in compiled]
    assert (is_loss.count(False), is_loss.count(True)) == (whole, loss_alone)
    assert split == [(tensor, parallel.sequence, CPU)]
    assert sizes == {"mesh": mesh, "sequence_length": LENGTH, "stays_on": True}
    compiled.clear()
    eager = model_of(mesh=mesh, parallel=parallel)
    assert compiled == [] and not eager.compiled and not eager.compiles_blocks and not sizes["stays_on"]


@pytest.mark.parametrize(
    ("dropouts", "seed"),
    [({}, None), ({"hidden_dropout": 0.1}, 3), ({"attention_dropout": 0.1}, 3)],
)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_stage_computes_its_own_blocks_as_the_recipe_says(
    dropouts: dict[str, float], seed: int | None, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(built, "StageComputation", lambda *parts, **named: given.append((parts, named)))
    monkeypatch.setattr(built, "Pipeline", lambda *parts, **named: given.append((parts, named)) or "pipeline")
    mesh = replace(ALONE, rank=1, world=2, pipeline=Axis(index=1, ranks=(0, 1)))
    parallel = ParallelSection(
        pipeline=2, blocks_per_stage=(3, 1), schedule=schedule, recompute_per_stage=("none", "full")
    )
    model = model_of(replace(LLAMA, **dropouts), mesh=mesh, parallel=parallel)  # type: ignore[arg-type]
    ((decoder, weights, own), computed), ((of_mesh, stages), led) = given
    assert decoder is model.decoder and weights is model.weights and of_mesh is mesh
    assert [stage.blocks for stage in own] == [range(3, 4)]
    assert [stage.blocks for stage in stages] == [range(3), range(3, 4)]
    assert computed == {"z_loss": 0.5, "chunk": 7, "dropout_seed": seed, "compiled": False}
    assert led == {"schedule": schedule, "computation": None}
    assert model.pipeline == "pipeline" and model.recompute == {3: "full"}
    assert model.splits_backward is (schedule == "zero-bubble")
    assert not model_of(parallel=ParallelSection(schedule=schedule)).splits_backward


def test_heads_are_rescaled_unless_their_queries_and_keys_are_normed() -> None:
    assert model_of(replace(LLAMA, qk_norm=True)).query_key_clip is None
    assert model_of().query_key_clip is not None


def parts_of(calls: Calls, **changed: Any) -> TrainingModel:
    weights = SimpleNamespace(
        dtype=torch.float32, gathers_weights=False, set_working_dtype=calls.of("working dtype")
    )
    decoder = SimpleNamespace(
        device=CPU,
        blocks="the blocks",
        finishes=True,
        sequence_degree=2,
        model=SimpleNamespace(section=SimpleNamespace(layers=3)),
    )
    given: dict[str, Any] = dict(
        decoder=decoder,
        weights=weights,
        fp8_weights=SimpleNamespace(use=calls.of("8-bit weights")),
        loss=None,
        mesh=SimpleNamespace(all_gather_object=lambda own: [3, own], wait_for_device=lambda: None),
        recompute={1: "full"},
        splits_backward=False,
        pipeline=None,
        query_key_clip=None,
        inner_sizes=None,
        compiled=False,
        compiles_blocks=True,
    )
    return TrainingModel(**given | changed)


def test_a_phase_changes_what_it_says_and_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    model = parts_of(calls)
    for name in ("set_matmul_mode", "use_fp8_matmuls", "set_recompute"):
        monkeypatch.setattr(built, name, calls.of(name))
    monkeypatch.setattr(built, "matmul_mode_for", lambda device, dtype: (device, dtype))
    modes = {0: "selective", 1: "full", 2: "selective"}
    model.set_phase(precision="bf16", recompute="selective")
    assert calls.seen == [
        ("working dtype", torch.bfloat16),
        ("set_matmul_mode", model.decoder, (CPU, torch.bfloat16)),
        ("8-bit weights", {"wanted": False}),
        ("set_recompute", model.decoder, modes, {"splits_backward": False, "compiles": True}),
    ]
    assert model.current == SettingsInForce(precision="bf16", recompute="selective")
    calls.seen.clear()
    model.set_phase(precision="bf16", recompute="selective")
    assert calls.seen == []
    model.weights.dtype = torch.bfloat16
    model.set_phase(precision="fp8", recompute="selective")
    assert calls.seen == [
        ("set_matmul_mode", model.decoder, (CPU, torch.bfloat16)),
        ("use_fp8_matmuls", "the blocks", "tensor"),
        ("8-bit weights", {"wanted": True}),
    ]
    assert model.current == SettingsInForce(precision="fp8", recompute="selective")


def test_what_is_asked_of_parts_that_a_model_lacks_is_nothing_and_else_is_passed_on() -> None:
    lacking, calls = parts_of(Calls()), Calls()
    clip = SimpleNamespace(clamp=calls.of("clamp"), apply=calls.of("apply"))
    whole = parts_of(calls, query_key_clip=clip, inner_sizes=SimpleNamespace(begin=calls.of("begin")))
    for model in (lacking, whole):
        model.clip_queries(30.0)
        model.begin_sizes(wanted=False, later=True)
        model.after_update(SimpleNamespace(applies="whether it applies"))  # type: ignore[arg-type]
    assert calls.seen == [
        ("clamp", 30.0),
        ("begin", {"wanted": False, "later": True}),
        ("apply", "whether it applies"),
    ]


def batch_of(*targets: int) -> MicroBatch:
    tokens = torch.tensor([targets])
    return MicroBatch(
        tokens=tokens.clamp(min=0), targets=tokens, documents=None, samples=torch.zeros(1, dtype=torch.int64)
    )


def test_ranks_that_gather_weights_run_as_many_forwards_as_the_one_with_the_most_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evaluated: list[list[MicroBatch]] = []
    monkeypatch.setattr(built, "entropy", lambda decoder, batches, **told: evaluated.append([*batches]))
    own = [batch_of(1, 2)]
    parts_of(Calls()).entropy(own)
    gathering = parts_of(Calls())
    gathering.weights.gathers_weights = True  # type: ignore[misc]
    gathering.entropy(own)
    alone, together = evaluated
    assert alone == own and len(together) == 3 and together[0] is own[0]
    for empty in together[1:]:
        assert empty.tokens.tolist() == [[0, 0]] and empty.targets.tolist() == [[IGNORED] * 2]
        assert empty.documents is None and empty.samples.tolist() == [0]


@pytest.mark.parametrize("finishes", [True, False])
def test_the_last_stage_of_a_pipeline_counts_the_targets_of_an_evaluation(finishes: bool) -> None:
    progress = lambda: None  # noqa: E731
    calls = Calls(evaluate=torch.tensor(2.5))
    model = parts_of(calls, pipeline=SimpleNamespace(evaluate=calls.of("evaluate")))
    model.decoder.finishes = finishes
    batches = [batch_of(1, IGNORED, 3), batch_of(4, 5, 6)]
    assert model.entropy(batches, report_progress=progress) == Entropy(nats=2.5, tokens=5 if finishes else 0)
    ((_, moved, told),) = calls.seen
    assert told is progress and [one.tokens.tolist() for one in moved] == [[[1, 0, 3]], [[4, 5, 6]]]


def test_the_terms_of_a_loss_are_those_of_all_micro_batches_and_each_is_weighted_for_its_gradients() -> None:
    leaf = torch.tensor(1.0, requires_grad=True)
    asked: list[int] = []

    def loss(batch: Any, step: int) -> LossSums:
        asked.append(step)
        return LossSums(leaf * batch, torch.tensor(10.0 * batch), torch.tensor(0.5 * batch))

    calls = Calls()
    model = parts_of(calls, loss=loss)
    model.weights.begin_accumulation = calls.of("begin")  # type: ignore[method-assign]
    model.weights.end_accumulation = calls.of("end")  # type: ignore[method-assign]
    cross_entropy, z = model.accumulate([1, 2, 4], 9, weight=0.25)  # type: ignore[list-item]
    assert (float(cross_entropy), float(z)) == (70.0, 3.5) and float(leaf.grad or 0) == 7 / 4
    assert asked == [9, 9, 9] and calls.seen == [("begin", {"backwards": 3}), ("end",)]


@pytest.mark.parametrize("init", ["normal", "bigram"])
def test_each_box_is_filled_by_its_logical_name_and_place_and_then_the_weights_are_rounded(
    init: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls()
    model = parts_of(calls)
    model.decoder.model.section.embedding_init = init  # type: ignore[misc]
    entries = [
        SimpleNamespace(name=f"model.{name}", tensor=name, global_shape=(8, 4), box=Box((at, 0), (2, 4)))
        for name, at in (("embedding.weight", 4), ("blocks.1.mlp.down.weight", 2), ("head.weight", 6))
    ]
    model.weights.state_entries = lambda: entries  # type: ignore[method-assign, assignment, return-value]
    model.weights.copy_masters_to_working = calls.of("rounded")  # type: ignore[method-assign]
    monkeypatch.setattr(
        built, "fill_initial", lambda boxes, **more: calls.seen.append(("filled", list(boxes), more))
    )
    monkeypatch.setattr(built, "processors_of_a_rank", lambda: 2.7)
    monkeypatch.setattr(
        TrainingModel, "_fill_from_bigrams", lambda self, names, make: calls.seen.append(names)
    )
    model.initialise(seed=5, bigrams=lambda: pytest.fail("what counts them calls it"))
    wanted = [
        InitialBox(tensor=e.tensor, name=e.tensor, global_shape=(8, 4), offset=e.box.offset) for e in entries
    ]
    counted = ("embedding.weight", "head.weight")
    boxes = wanted[1:2] if init == "bigram" else wanted
    filled = ("filled", boxes, {"model": model.decoder.model, "seed": 5, "threads": 3})
    rest: list[Any] = [counted] if init == "bigram" else []
    assert calls.seen == [filled, *rest, ("rounded",)]


def test_a_micro_batch_that_is_computed_once_more_leaves_its_digest_alone() -> None:
    calls = Calls(tapped=nullcontext(SimpleNamespace(digest=77)))
    model = parts_of(
        calls, loss=lambda batch, step: calls.seen.append((batch, step)) or LossSums(*[leaf] * 3)
    )
    model.weights.tapped = calls.of("tapped")  # type: ignore[method-assign]
    leaf = torch.tensor(2.0, requires_grad=True)
    assert model.digest_gradients("a batch", 9, weight=0.25) == 77  # type: ignore[arg-type]
    assert calls.seen == [("tapped", {"discards": True}), ("a batch", 9)] and float(leaf.grad or 0) == 0.25


def test_an_embedding_from_bigrams_gets_its_own_factor_and_rows_beyond_the_tokenizer_stay_zero() -> None:
    section = replace(LLAMA, layers=1, vocabulary=VOCABULARY + 3, embedding_init="bigram")
    counts = (torch.arange(VOCABULARY**2) * 7 % 11).reshape(VOCABULARY, VOCABULARY)
    model = model_of(section)
    model.initialise(seed=5, bigrams=lambda: counts)
    held = {entry.name: entry.tensor for entry in model.weights.state_entries()}
    factors = bigram_factors(counts, hidden=16, seed=5)
    for name, factor in zip(("model.embedding.weight", "model.head.weight"), factors, strict=True):
        assert torch.equal(held[name][:VOCABULARY], factor) and not held[name][VOCABULARY:].any()
    assert held["model.blocks.0.mlp.down.weight"].any()
    assert torch.equal(model.decoder.head_weight, held["model.head.weight"])


def test_a_rank_that_counts_no_bigrams_takes_what_the_first_one_computed() -> None:
    class Later(Mesh):
        def run_on_rank_zero(self, task: Any, *, doing: str) -> None:
            assert doing == "counting bigrams for the initial embedding"

        def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
            assert not tensor.any() and tensor.shape == (VOCABULARY, 16)
            return tensor.fill_(4.0)

    section = replace(LLAMA, layers=1, embedding_init="bigram")
    model = model_of(section, mesh=Later(device=CPU))
    model.initialise(seed=5, bigrams=lambda: pytest.fail("it is the first rank's"))
    held = {entry.name: entry.tensor for entry in model.weights.state_entries()}
    assert (held["model.embedding.weight"] == 4.0).all() and (held["model.head.weight"] == 4.0).all()
    assert not (held["model.blocks.0.mlp.down.weight"] == 4.0).any()
