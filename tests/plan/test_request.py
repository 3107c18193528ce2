import json
from dataclasses import replace

import pytest

from bloomery.config.load import load_recipe
from bloomery.errors import ConfigError
from bloomery.plan.hardware import load_hardware
from bloomery.plan.overview import make_plan
from bloomery.plan.request import (
    MOST_ACCELERATORS,
    Request,
    data_degrees,
    refuse_impossible,
    vocabulary_of,
    with_local_vocabulary,
)
from bloomery.plan.search import search_layouts


def refused(recipe="tr11-176b", *overrides, hardware="a100-80g", plan=make_plan, **options):
    request = Request(loaded=load_recipe(recipe, overrides), hardware=load_hardware(hardware), **options)
    with pytest.raises(ConfigError) as told:
        plan(request)
    return told.value


def test_no_gpus_are_refused_with_what_would_do():
    one = refused(accelerators=0)
    assert [mistake.key for mistake in one.mistakes] == ["--gpus"]
    assert "at least 48" in str(one)


def test_seven_gpus_are_no_replica():
    one = refused(accelerators=7)
    assert "tensor 4 × pipeline 12" in str(one)
    assert one.mistakes[0].remedy.startswith("48 would do")


def test_everything_wrong_is_told_at_once():
    one = refused(
        "tr11-176b",
        "model.heads=100",
        "schedule.floor=1.0",
        accelerators=0,
        failures_per_week=-2.0,
        hours_per_day=25.0,
        data_tokens=0.0,
        price_per_accelerator_hour=-1.0,
    )
    keys = {mistake.key for mistake in one.mistakes}
    assert keys >= {
        "--gpus", "--failures-per-week", "--hours-per-day", "--data-tokens", "--price", "model.heads",
        "schedule.floor",
    }  # fmt: skip
    assert str(one).startswith(f"{len(one.mistakes)} mistakes in the plan:")
    assert all(mistake.remedy for mistake in one.mistakes)


def test_sizes_that_do_not_divide_by_the_tensor_degree_are_named():
    one = refused(
        "demo", "model.hidden=270", "model.heads=3", "model.ffn=701", "parallel.tensor=2", accelerators=2
    )
    told = str(one)
    assert "model.heads" in told or "parallel.tensor" in told
    assert "701" in told
    assert "700 or 702 would do" in told
    apart = ["model.heads=2", "model.head_dim=16", "model.ffn=700", "parallel.tensor=2"]
    mistakes = refused("demo", "model.hidden=271", *apart, accelerators=2).mistakes
    (hidden,) = [one for one in mistakes if one.problem == "does not divide by parallel.tensor = 2"]
    assert (hidden.key, hidden.value, hidden.remedy) == ("model.hidden", 271, "270 or 272 would do.")


def test_96_nodes_of_four_do_not_divide_the_13b_runs_batch():
    one = refused("tr1-13b", "train.ramp_up=[]", hardware="v100-32g", accelerators=96 * 4)
    told = str(one)
    assert "1024" in told
    # The chronicle's own list: 64, 128 or 256 nodes.
    assert "64, 128" in told


def test_what_is_just_possible_is_not_refused():
    request = Request(loaded=load_recipe("tr1-13b"), hardware=load_hardware("v100-32g"), accelerators=128)
    refuse_impossible(
        replace(
            request,
            failures_per_week=0.0,
            hours_per_day=24.0,
            data_tokens=1.0,
            price_per_accelerator_hour=0.0,
        )
    )
    refuse_impossible(replace(request, loaded=load_recipe("tr1-13b", ["train.precision=auto"])))
    most = refused("demo", accelerators=MOST_ACCELERATORS)
    assert "--gpus" not in {mistake.key for mistake in most.mistakes}, "and its batch is another matter"


def test_batches_of_a_ramp_up_that_is_over_need_not_fit_the_accelerators():
    told = {"hardware": "v100-32g", "accelerators": 256}
    assert "train.ramp_up" in {mistake.key for mistake in refused("tr1-13b", **told).mistakes}
    request = Request(loaded=load_recipe("tr1-13b"), hardware=load_hardware("v100-32g"), accelerators=256)
    refuse_impossible(replace(request, consumed=10_000_000))


def test_a_tensor_parallel_group_may_be_as_large_as_a_node():
    request = Request(
        loaded=load_recipe("tr11-176b", ["parallel.tensor=8"]), hardware=load_hardware("a100-80g")
    )
    refuse_impossible(request)
    one = refused("tr11-176b", "parallel.tensor=16")
    assert "parallel.tensor" in {mistake.key for mistake in one.mistakes} and "at most 8" in str(one)


def test_a_precision_without_units_is_refused():
    one = refused("tr11-176b", hardware="v100-32g", accelerators=384)
    assert "v100-32g has no units for bf16" in str(one)
    later = refused("tr1-13b", "train.precision_changes=[[96,'bf16']]", hardware="v100-32g", accelerators=128)
    assert "v100-32g has no units for bf16" in str(later)
    assert "fp16" in str(one)


@pytest.mark.parametrize("plan", [make_plan, search_layouts])
@pytest.mark.parametrize(
    ("peak", "remedy"), [(125.0, "It has fp16; or"), (0.0, "Give its file accelerator.bf16_teraflops; or")]
)
def test_a_machine_without_units_for_what_auto_means_is_refused(plan, peak, remedy):
    machine = load_hardware("v100-32g")
    accelerator = replace(machine.accelerator, fp32_teraflops=0.0, fp16_teraflops=peak)
    request = Request(
        loaded=load_recipe("demo"), hardware=replace(machine, accelerator=accelerator), accelerators=1
    )
    with pytest.raises(ConfigError, match="v100-32g has no units for bf16 or fp32") as told:
        plan(request)
    assert told.value.mistakes[0].remedy == f"{remedy} choose another --hardware."


def test_a_vocabulary_that_only_the_tokenizer_knows_is_asked_for():
    one = refused("tr1-13b", "model.vocabulary='auto'", hardware="v100-32g")
    assert "model.vocabulary=50257" in str(one)
    one = refused("demo", "data.tokenizer=hf:gpt2")
    assert "is that of hf:gpt2, which is not fetched for this" in str(one)


def test_the_vocabulary_of_a_tokenizers_file_is_read_only_where_nothing_else_knows_it(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 700}}}), encoding="utf-8")
    named = [f"data.tokenizer={file}"]
    loaded = with_local_vocabulary(load_recipe("demo", named))
    assert vocabulary_of(loaded.recipe) == 701 and loaded.recipe.data.tokenizer == str(file)
    plans = [
        make_plan(Request(loaded=recipe, hardware=load_hardware("h200"), accelerators=1)).draft.parameters
        for recipe in (loaded, load_recipe("demo", [*named, "model.vocabulary=701"]))
    ]
    assert plans[0] == plans[1]
    file.unlink()
    for told in ([*named, "model.vocabulary=512"], ["data.tokenizer=train"], named):
        recipe = load_recipe("demo", told)
        assert with_local_vocabulary(recipe) is recipe


def test_a_search_refuses_the_same_nonsense():
    one = refused(accelerators=0, failures_per_week=-1.0, plan=search_layouts)
    assert {mistake.key for mistake in one.mistakes} == {"--gpus", "--failures-per-week"}
    one = refused(accelerators=10**30, plan=search_layouts)
    assert [mistake.problem for mistake in one.mistakes] == ["is no machine"]


def test_data_degrees_divide_every_batch_of_the_run():
    recipe = load_recipe("tr1-13b").recipe
    assert data_degrees(recipe) == [1, 2, 4, 8, 16]
    assert 128 in data_degrees(load_recipe("tr1-13b", ["train.ramp_up=[]"]).recipe)


def test_data_degrees_leave_whole_micro_batches_and_a_wrong_ramp_up_leaves_one():
    def degrees(*told):
        return data_degrees(load_recipe("demo", ["train.global_batch=24", *told]).recipe)

    assert degrees("train.ramp_up=[]", "train.micro_batch=2") == [1, 2, 3, 4, 6, 12]
    assert degrees("train.ramp_up=[]", "train.micro_batch=5") == []
    assert degrees("train.ramp_up=[32,8,100]", "train.micro_batch=2") == [1]
