import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.config.load import load_recipe
from bloomery.config.validate import check_recipe
from bloomery.plan.hardware import load_hardware
from bloomery.plan.request import Request
from bloomery.plan.search import as_rows, search_layouts

GIB = 2**30


def found(recipe, *, gpus, hardware=None, memory_gib=None):
    loaded = load_recipe(recipe)
    machine = load_hardware(hardware or loaded.recipe.run.hardware or "a100-80g")
    if memory_gib is not None:
        machine = replace(machine, accelerator=replace(machine.accelerator, memory_gib=memory_gib))
    return search_layouts(Request(loaded=loaded, hardware=machine, accelerators=gpus))


@pytest.fixture(scope="module")
def bloom():
    return found("tr11-176b", gpus=384)


def key(one):
    return (one.layout, one.micro_batch, one.recompute)


def test_ranked_layouts_fit_divide_and_use_every_accelerator(bloom):
    seconds = [one.step.seconds for one in bloom.ranked]
    assert seconds == sorted(seconds)
    for one in bloom.ranked:
        assert one.memory_bytes <= 80 * GIB
        assert one.layout.world == 384
        assert 2048 % (one.micro_batch * one.layout.data) == 0
        assert 112 % one.layout.tensor == 0
    assert len(set(map(key, bloom.ranked))) == len(bloom.ranked)


def test_every_layout_but_the_first_says_what_it_loses_by(bloom):
    assert bloom.ranked[0].reason == "the best"
    assert all(one.reason and one.reason != "the best" for one in bloom.ranked[1:])
    reasons = {one.reason.split(" +")[0] for one in bloom.ranked}
    assert {"DP traffic", "recomputation"} <= reasons


def test_blooms_own_degrees_are_among_the_quickest(bloom):
    # TP 4, PP 12, DP 8 was chosen by trying: the search must not think otherwise.
    degrees = [(one.layout.tensor, one.layout.pipeline) for one in bloom.ranked]
    assert (4, 12) in degrees[: len(degrees) // 10]


def test_a_prime_number_of_accelerators_is_searched_too():
    few = found("demo", gpus=7)
    assert few.ranked == () or all(one.layout.world == 7 for one in few.ranked)


@pytest.mark.parametrize(
    ("recipe", "gpus"), [("tr11-176b", 384), ("llmjp-172b", 512), ("tr1-13b", 48), ("demo", 12)]
)
def test_a_training_takes_every_layout_that_is_offered(recipe, gpus):
    loaded = load_recipe(recipe)
    ranked = found(recipe, gpus=gpus, memory_gib=1e4).ranked
    assert ranked
    different = {(one.layout, one.micro_batch): one for one in ranked}.values()
    for one in list(different)[:: max(1, len(different) // 40)]:
        layout = one.layout
        chosen = [
            f"parallel.{name}={getattr(layout, name)}"
            for name in ("tensor", "pipeline", "data", "zero", "schedule", "chunks")
        ]
        chosen += [f"parallel.sequence={str(layout.sequence).lower()}", "parallel.blocks_per_stage=[]"]
        chosen += [f"train.micro_batch={one.micro_batch}", "train.micro_batch_changes=[]"]
        recipe_as_offered = load_recipe(recipe, chosen).recipe
        check_recipe(recipe_as_offered, loaded.sources, data_degree=layout.data)


def test_where_nothing_fits_the_nearest_is_told():
    none = found("tr11-176b", gpus=8)
    assert none.ranked == ()
    assert "Nothing fits. Nearest:" in none.nearest
    lacking, of = map(float, re.search(r"lacks ([\d.]+) GiB of ([\d.]+)\. ", none.nearest).groups())
    room = load_hardware("a100-80g").accelerator.memory_gib
    assert of - lacking == pytest.approx(room, rel=0.1), (
        "what it lacks is what it needs beyond the room there is"
    )
    assert as_rows(none)["ranked"] == []


def test_the_counts_add_up_to_every_layout_that_was_tried(bloom):
    roomy = found("tr11-176b", gpus=384, memory_gib=1e6)
    tried = len(bloom.ranked) + bloom.too_large + bloom.indivisible
    assert len(roomy.ranked) + roomy.too_large + roomy.indivisible == tried
    assert roomy.too_large == 0


@settings(max_examples=7, deadline=None)
@given(
    small=st.floats(6.0, 120.0),
    more=st.floats(0.0, 60.0),
    case=st.sampled_from([("tr1-13b", 64), ("intellect1-10b", 16), ("demo", 8)]),
)
def test_more_memory_never_makes_fewer_layouts_fit(small, more, case):
    recipe, gpus = case
    less = {key(one) for one in found(recipe, gpus=gpus, memory_gib=small).ranked}
    larger = {key(one) for one in found(recipe, gpus=gpus, memory_gib=small + more).ranked}
    assert less <= larger


@pytest.mark.parametrize(
    ("dropout", "kind", "selective"), [(0.0, "cpu", False), (0.1, "cpu", True), (0.1, "gpu", False)]
)
def test_selective_recomputation_is_tried_where_attention_forms_scores(
    dropout: float, kind: str, selective: bool
):
    loaded = load_recipe("demo", [f"model.attention_dropout={dropout}"])
    machine = load_hardware("a100-80g")
    machine = replace(machine, accelerator=replace(machine.accelerator, kind=kind))
    ranked = search_layouts(Request(loaded=loaded, hardware=machine, accelerators=2)).ranked
    tried = {one.recompute for one in ranked}
    assert {"none", "full"} <= tried and ("selective" in tried) == selective


def test_layouts_are_those_of_the_full_batch_in_the_precision_that_it_has():
    changes = ["train.precision=fp32", "train.precision_changes=[[96,'bf16']]", "train.micro_batch=1"]
    plain, changed = (
        search_layouts(
            Request(loaded=load_recipe("demo", given), hardware=load_hardware("a100-80g"), accelerators=4)
        )
        for given in (["train.precision=bf16"], changes)
    )
    assert changed.ranked[0].step == plain.ranked[0].step and changed.ranked[0].mfu == plain.ranked[0].mfu
