"""Which layouts a search tries, what it says of each, and its result as JSON."""

from __future__ import annotations

from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.config.findings import divisors
from bloomery.config.load import load_recipe
from bloomery.errors import ConfigError
from bloomery.plan import search
from bloomery.plan.hardware import load_hardware
from bloomery.plan.layout import Layout
from bloomery.plan.request import Request
from bloomery.plan.search import (
    Candidate,
    SearchResult,
    _accelerators,
    _layouts,
    _nearest,
    _reason,
    _would_be_refused,
    _zero_stages,
    as_rows,
    search_layouts,
)
from bloomery.plan.step_time import StepTime

GIB = 2**30
PARTS = {
    "compute_s": 4.0, "memory_s": 2.0, "tensor_s": 1.0, "pipeline_bubble_s": 1.0, "pipeline_transfer_s": 0.5,
    "data_parallel_s": 0.5, "update_s": 0.5, "waiting_s": 0.25, "data_s": 0.25,
}  # fmt: skip


def candidate(*, recompute: str = "none", memory_bytes: int = 3 * GIB, **changed: float) -> Candidate:
    return Candidate(
        layout=Layout(tensor=2, pipeline=3, data=4, zero=1),
        micro_batch=2,
        recompute=recompute,
        step=StepTime(**{**PARTS, **changed}),
        mfu=0.25,
        memory_bytes=memory_bytes,
    )


COSTS = {
    name: SimpleNamespace(hardware=cost) for name, cost in (("none", 10), ("selective", 10), ("full", 13))
}
SETTING: Any = SimpleNamespace(costs=COSTS, room_bytes=2 * GIB)
BEST = candidate()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"compute_s": 5.0}, "compute +1.00 s (+10%)"),
        ({"memory_s": 2.5, "update_s": 0.75}, "memory passes +0.50 s (+8%)"),
        ({"tensor_s": 2.0}, "TP traffic +1.00 s (+10%)"),
        ({"pipeline_bubble_s": 3.0}, "bubble +2.00 s (+20%)"),
        ({"pipeline_transfer_s": 1.0}, "PP messages +0.50 s (+5%)"),
        ({"data_parallel_s": 1.0}, "DP traffic +0.50 s (+5%)"),
        ({"update_s": 1.0}, "update +0.50 s (+5%)"),
        ({"waiting_s": 0.5}, "waiting +0.25 s (+2%)"),
        ({"data_s": 1.25}, "data +1.00 s (+10%)"),
        ({"data_s": 1.25, "tensor_s": 0.5}, "data +1.00 s (+5%)"),
        ({"compute_s": 5.0, "recompute": "full"}, "recomputation +1.00 s (+10%)"),
        ({"compute_s": 5.0, "recompute": "selective"}, "compute +1.00 s (+10%)"),
        ({"tensor_s": 2.0, "recompute": "full"}, "TP traffic +1.00 s (+10%)"),
        ({"memory_bytes": 4 * GIB}, "memory: as quick, but fuller"),
        ({"data_s": 1.25, "compute_s": 3.0}, "memory: as quick, but fuller"),
    ],
)
def test_a_layout_says_on_what_it_spends_most_more_than_the_best(changed: Any, reason: str) -> None:
    assert _reason(SETTING, candidate(**changed), BEST) == reason


def test_the_best_is_called_so() -> None:
    assert _reason(SETTING, BEST, BEST) == "the best"


def test_where_nothing_fits_the_nearest_says_what_it_lacks() -> None:
    assert _nearest(SETTING, candidate(recompute="full")) == (
        "Nothing fits. Nearest: TP2·PP3·DP4·Z1, micro-batch 2, recompute full, lacks 1.0 GiB of 3.0. Use "
        "more accelerators, or accelerators with more memory."
    )


def test_a_result_as_json_has_each_layout_with_its_step() -> None:
    result = SearchResult(
        recipe="demo", hardware="h200", accelerators=24, ranked=(replace(BEST, reason="the best"),),
        too_large=3, indivisible=5, nearest="",
    )  # fmt: skip
    assert as_rows(result) == {
        "recipe": "demo", "hardware": "h200", "accelerators": 24, "too_large": 3, "indivisible": 5,
        "nearest": "",
        "ranked": [
            {
                **asdict(BEST.layout), "micro_batch": 2, "recompute": "none", "step_s": 10.0,
                "step_low_s": pytest.approx(8.3), "step_high_s": pytest.approx(12.0), "mfu": 0.25,
                "memory_bytes": 3 * GIB, "reason": "the best",
            }
        ],
    }  # fmt: skip


def tried(count: int, *, per_node: int = 4, overlap: bool = True, **model: Any) -> list[str]:
    shape = load_recipe("demo", [f"model.{key}={value}" for key, value in model.items()]).recipe.model
    parallel = SimpleNamespace(overlap=overlap, prefetch_blocks=3, async_tensor=overlap)
    recipe: Any = SimpleNamespace(model=shape, parallel=parallel)
    work = SimpleNamespace(layout=Layout(per_node=per_node))
    found = list(_layouts(SimpleNamespace(recipe=recipe, accelerators=count, work=work)))  # type: ignore[arg-type]
    for layout in found:
        assert layout.world == count and layout.per_node == per_node and layout.overlaps is overlap
        assert layout.sequence is (layout.tensor > 1)
        assert layout.async_tensor is (overlap and layout.tensor > 1)
        assert layout.schedule == ("interleaved" if layout.chunks > 1 else "1f1b")
    return [str(layout) for layout in found]


SHAPE = {"heads": 4, "kv_heads": 4, "hidden": 64, "ffn": 64}


def test_divisors_are_all_that_divide_ascending() -> None:
    assert [divisors(number) for number in (1, 2, 12, 36)] == [
        [1], [1, 2], [1, 2, 3, 4, 6, 12], [1, 2, 3, 4, 6, 9, 12, 18, 36],
    ]  # fmt: skip
    assert len(divisors(10**12)) == 169


def test_every_division_of_four_accelerators_is_tried_with_its_chunks_and_shards() -> None:
    assert tried(8, per_node=4, layers=1, **{**SHAPE, "heads": 8, "kv_heads": 8})[-1] == "TP4·PP1·DP2·Z3"
    assert tried(4, layers=4, overlap=False, **SHAPE) == [
        "TP1·PP1·DP4·Z0", "TP1·PP1·DP4·Z1", "TP1·PP1·DP4·Z3",
        "TP1·PP2·DP2·Z0", "TP1·PP2·DP2·Z1", "TP1·PP2×2·DP2·Z0", "TP1·PP2×2·DP2·Z1",
        "TP1·PP4·DP1·Z0",
        "TP2·PP1·DP2·Z0", "TP2·PP1·DP2·Z1", "TP2·PP1·DP2·Z3",
        "TP2·PP2·DP1·Z0", "TP2·PP2×2·DP1·Z0",
        "TP4·PP1·DP1·Z0",
    ]  # fmt: skip


def test_no_stage_is_without_a_block_and_there_are_no_more_than_64() -> None:
    assert not [one for one in tried(4, layers=3, **SHAPE) if "PP4" in one or "×" in one]
    deep = {int(one.split("PP")[1].split("·")[0].split("×")[0]) for one in tried(256, layers=128, **SHAPE)}
    assert max(deep) == 64
    assert {"TP1·PP2×4·DP1·Z0", "TP1·PP2×8·DP1·Z0"} & {*tried(2, layers=8, **SHAPE)} == {"TP1·PP2×4·DP1·Z0"}


@pytest.mark.parametrize(
    ("changed", "tensor"),
    [
        ({}, {1, 2, 4}),
        ({"heads": 6, "kv_heads": 6, "hidden": 96}, {1, 2}),
        ({"kv_heads": 2}, {1, 2}),
        ({"ffn": 66}, {1, 2}),
        ({"per_node": 2}, {1, 2}),
        ({"per_node": 6}, {1, 2}),
        ({"per_node": 8}, {1, 2, 4, 8}),
    ],
)
def test_a_tensor_parallel_group_divides_its_node_and_every_side(changed: Any, tensor: set[int]) -> None:
    shape = {"heads": 8, "kv_heads": 8, "hidden": 64, "ffn": 64, **changed}
    assert {int(one[2]) for one in tried(8, layers=1, **shape)} == tensor


@pytest.mark.parametrize(
    ("data", "pipeline", "stages"), [(1, 1, (0,)), (1, 4, (0,)), (2, 1, (0, 1, 3)), (2, 2, (0, 1))]
)
def test_zero_3_is_tried_without_a_pipeline_alone(data: int, pipeline: int, stages: tuple[int, ...]) -> None:
    assert _zero_stages(data, pipeline) == stages


def test_the_recipes_own_degrees_are_the_number_where_none_is_given() -> None:
    machine = load_hardware("a100-80g")
    own = ["parallel.tensor=2", "parallel.pipeline=3", "model.layers=6"]
    auto = Request(loaded=load_recipe("demo", own), hardware=machine)
    assert _accelerators(auto) == 6
    assert _accelerators(replace(auto, accelerators=7)) == 7, "the search does not keep to the degrees"
    fixed = [*own, "parallel.data=4", "train.global_batch=64"]
    assert _accelerators(replace(auto, loaded=load_recipe("demo", fixed))) == 24
    with pytest.raises(ConfigError, match="at least one accelerator"):
        _accelerators(replace(auto, accelerators=0))


def test_a_layout_that_training_would_refuse_is_left_out() -> None:
    recipe = load_recipe("demo", ["train.global_batch=16", "train.ramp_up=[]", "optim.name=adamw"]).recipe

    def refused(micro_batch: int, **layout: Any) -> bool:
        work: Any = SimpleNamespace(layout=Layout(**layout), micro_batch=micro_batch)
        return _would_be_refused(recipe, work)

    assert not refused(4, data=4) and refused(8, data=4) and refused(1, data=32)
    assert not refused(1, tensor=2, data=4, sequence=True) and refused(1, tensor=3, data=4, per_node=3)
    assert not refused(1, pipeline=2) and refused(1, pipeline=recipe.model.layers + 1)
    interleaved = {"pipeline": 2, "chunks": 2, "schedule": "interleaved"}
    assert not refused(1, **interleaved) and refused(1, **{**interleaved, "schedule": "1f1b"})


def test_degrees_that_would_split_a_block_with_one_scale_are_left_out() -> None:
    sizes = ("model.hidden=256", "model.heads=4", "model.kv_heads=4", "model.ffn=512", "optim.name=adamw")
    for scaling, fitting in (("block", {1, 2}), ("mx", {1, 2, 4}), ("row", {1, 2, 4})):
        recipe = load_recipe("demo", [*sizes, "train.precision=fp8", f"train.fp8_scaling={scaling}"]).recipe
        works: Any = {
            tensor: SimpleNamespace(layout=Layout(tensor=tensor, per_node=4), micro_batch=1)
            for tensor in (1, 2, 4)
        }
        assert {tensor for tensor, work in works.items() if not _would_be_refused(recipe, work)} == fitting


OWN = (
    "parallel.data=6", "parallel.tensor=2", "parallel.pipeline=3", "parallel.schedule=zbv",
    "parallel.chunks=2", "parallel.blocks_per_stage=[1,2]", 'parallel.recompute_per_stage=["full"]',
    "parallel.sequence=true", "parallel.zero=2", "parallel.shard_degree=3", "parallel.ranks_per_node=2",
    "parallel.async_tensor=true", "parallel.offload=cpu",
    "train.micro_batch=4", "train.micro_batch_changes=[[9,2]]",
)  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (
            {"data": 5, "tensor": 4, "pipeline": 7, "schedule": "interleaved", "chunks": 8, "zero": 3,
             "sequence": True, "async_tensor": True, "rounds_by_block": True, "per_node": 16},
            {"data": 5, "tensor": 4, "pipeline": 7, "schedule": "interleaved", "chunks": 8, "zero": 3,
             "sequence": True, "async_tensor": True, "working": "by-block", "ranks_per_node": 16},
        ),
        (
            {"data": 5, "per_node": 16},
            {"data": 5, "tensor": 1, "pipeline": 1, "schedule": "1f1b", "chunks": 1, "zero": 0,
             "sequence": False, "async_tensor": False, "working": "kept", "ranks_per_node": "auto"},
        ),
    ],
)  # fmt: skip
def test_training_is_asked_about_the_layout_and_not_about_the_recipes_own(
    layout: dict[str, Any], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe("demo", OWN).recipe
    parallel = replace(
        recipe.parallel, blocks_per_stage=(), recompute_per_stage=(), shard_degree="auto", **expected
    )
    train = replace(recipe.train, micro_batch=3, micro_batch_changes=())
    chosen = replace(recipe, parallel=parallel, train=train)
    calls = {
        "batch_mistakes": (train, parallel),
        "layout_mistakes": (chosen,),
        "sharding_mistakes": (chosen,),
        "pipeline_mistakes": (parallel, recipe.model, train),
    }
    asked: list[str] = []
    wrong: list[str] = []
    for name, arguments in calls.items():

        def check(*given: Any, name: str = name, arguments: Any = arguments, **more: Any) -> list[str]:
            assert given == arguments and more == ({} if name == "layout_mistakes" else {"data_degree": 5})
            asked.append(name)
            return [name] * (name in wrong)

        monkeypatch.setattr(search, name, check)
    work: Any = SimpleNamespace(layout=Layout(**layout), micro_batch=3)
    assert not _would_be_refused(recipe, work) and asked == list(calls)
    for name in calls:
        wrong[:] = [name]
        assert _would_be_refused(recipe, work)


@pytest.mark.parametrize(("given", "count", "refused"), [(None, 36, None), (1, 1, None), (0, 0, 0)])
def test_only_the_count_of_accelerators_is_refused_for_a_search(
    given: int | None, count: int, refused: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(loaded=load_recipe("demo", OWN), hardware=load_hardware("h200"), accelerators=given)
    asked: list[Request] = []
    monkeypatch.setattr(search, "refuse_impossible", asked.append)
    assert _accelerators(request) == count
    parallel = replace(
        request.recipe.parallel, tensor=1, pipeline=1, data="auto", sequence=False, async_tensor=False
    )
    loaded = replace(request.loaded, recipe=replace(request.recipe, parallel=parallel))
    assert asked == [replace(request, loaded=loaded, accelerators=refused)]


def searched(
    monkeypatch: pytest.MonkeyPatch, *, needed: list[int], refused: tuple[int, ...] = ()
) -> tuple[SearchResult, list[int]]:
    """A search of one work for each number of bytes, of which 100 fit; seconds fall with the number."""
    asked: list[int] = []
    works: list[Any] = [SimpleNamespace(layout=number, micro_batch=1) for number in range(len(needed))]
    request: Any = SimpleNamespace(hardware=SimpleNamespace(name="h200"))
    setting = SimpleNamespace(
        recipe=SimpleNamespace(run=SimpleNamespace(name="demo")), room_bytes=100, costs=COSTS
    )

    def would_be_refused(recipe: Any, work: Any) -> bool:
        asked.append(work.layout)
        return work.layout in refused

    def timed(setting: Any, work: Any, recompute: str, memory: int) -> Candidate:
        made = candidate(recompute=recompute, memory_bytes=memory, compute_s=9.0 - work.layout // 2)
        return replace(made, micro_batch=work.layout)

    monkeypatch.setattr(search, "_accelerators", lambda request: 8)
    monkeypatch.setattr(search, "_setting", lambda request, accelerators: setting)
    both = [(work, ("none", "full")) for work in works]
    monkeypatch.setattr(search, "_choices", lambda setting: both)
    monkeypatch.setattr(search, "_would_be_refused", would_be_refused)
    monkeypatch.setattr(
        search, "_peak", lambda setting, work, how: needed[work.layout] - 10 * (how == "full")
    )
    monkeypatch.setattr(search, "_timed", timed)
    return search_layouts(request), asked


def test_those_that_fit_are_ranked_by_seconds_and_then_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    result, asked = searched(monkeypatch, needed=[50, 100, 101, 90, 30], refused=(4,))
    found = [(one.micro_batch, one.recompute, one.memory_bytes) for one in result.ranked]
    assert found == [
        (3, "full", 80), (3, "none", 90), (2, "full", 91), (0, "full", 40), (0, "none", 50), (1, "full", 90),
        (1, "none", 100),
    ]  # fmt: skip
    assert (result.too_large, result.indivisible, result.nearest) == (1, 2, "")
    assert (result.recipe, result.hardware, result.accelerators) == ("demo", "h200", 8)
    assert asked == [0, 1, 2, 3, 4], "once for each layout and micro-batch"
    assert [one.reason for one in result.ranked][:2] == ["the best", "memory: as quick, but fuller"]


def test_of_those_that_do_not_fit_the_smallest_is_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = searched(monkeypatch, needed=[300, 150, 200])
    assert result.ranked == () and result.too_large == 6
    assert "micro-batch 1, recompute full" in result.nearest
    assert searched(monkeypatch, needed=[50], refused=(0,))[0].nearest == ""


def test_what_is_computed_again_is_no_use_of_the_machine() -> None:
    request = Request(loaded=load_recipe("demo"), hardware=load_hardware("a100-80g"), accelerators=1)
    setting = search._setting(request, 1)
    once, twice = (search._timed(setting, setting.work, recompute, 0) for recompute in ("none", "full"))
    assert twice.step.seconds > once.step.seconds
    assert twice.mfu * twice.step.seconds == pytest.approx(once.mfu * once.step.seconds)
    assert setting.room_bytes == 80 * GIB
    tokens = setting.recipe.train.global_batch * setting.work.sequence_length
    possible = setting.work.hardware.peak_flops(setting.work.precision) * once.step.seconds
    assert once.mfu == pytest.approx(setting.costs["none"].model * tokens / possible)


@pytest.mark.parametrize(("compiled", "fused"), [("off", False), ("auto", True)])
def test_memory_is_asked_for_as_the_recipe_trains(
    compiled: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [f"train.compile={compiled}", "train.loss_chunk=64", "train.global_batch=96", "optim.name=adamw"]
    recipe = load_recipe("demo", told)
    request = Request(loaded=recipe, hardware=load_hardware("a100-80g"), accelerators=1)
    asked: list[Any] = []

    def memory(work: Any, parameters: Any, stages: Any, index: int, training: Any) -> Any:
        asked.append(training)
        return SimpleNamespace(total=7)

    monkeypatch.setattr(search, "stage_memory", memory)
    setting = search._setting(request, 1)
    work = replace(setting.work, layout=Layout(data=4), micro_batch=3)
    assert search._peak(setting, work, "full") == 7
    (training,) = asked
    assert (training.fused, training.loss_chunk, training.recompute) == (fused, 64, "full")
    assert (training.micro_batches, training.optimizer) == (8, "adamw")


@pytest.mark.parametrize(
    ("blocks", "indices"), [([4], {0}), ([2, 2], {0, 1}), ([3, 3, 2, 4, 4, 1, 2, 1], {0, 1, 3, 6, 7})]
)
def test_of_stages_with_equal_blocks_the_first_is_asked_and_the_largest_counts(
    blocks: list[int], indices: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(loaded=load_recipe("demo"), hardware=load_hardware("a100-80g"), accelerators=1)
    setting = search._setting(request, 1)
    asked: set[int] = set()

    def memory(work: Any, parameters: Any, stages: Any, index: int, training: Any) -> Any:
        asked.add(index)
        return SimpleNamespace(total=100 - index)

    monkeypatch.setattr(search, "stages_for", lambda *told: [SimpleNamespace(blocks=each) for each in blocks])
    monkeypatch.setattr(search, "stage_memory", memory)
    assert search._peak(setting, setting.work, "none") == 100 and asked == indices
