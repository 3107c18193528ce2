"""What `train.recompute = "auto"` becomes: the quickest choice whose planned memory fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bloomery.config.load import LoadedRecipe, load_recipe
from bloomery.config.parallel import RECOMPUTATIONS
from bloomery.config.recipe import Recipe
from bloomery.plan.block_cost import Workload
from bloomery.plan.hardware import GIB, load_hardware
from bloomery.plan.layout import layout_of
from bloomery.plan.overview import base_workload, make_plan, shape_of
from bloomery.plan.recomputation import LEFT_FREE, choose_recomputation, peak_bytes, resolved
from bloomery.plan.request import Request
from bloomery.plan.step_time import step_time

MODES = tuple(mode for mode in RECOMPUTATIONS if mode != "selective")  # attention is fused there
EIGHT = (
    "model.layers=32", "model.hidden=4096", "model.heads=32", "model.kv_heads=8", "model.ffn=14336",
    "model.vocabulary=128256", "data.sequence_length=4096", "train.global_batch=4", "train.ramp_up=[]",
    "train.micro_batch=1", "train.precision=bf16", "train.compile=on", "parallel.working=by-block",
    "train.recompute=auto", "model.embedding_init=normal", "model.tied=false", "optim.name=adamw",
)  # fmt: skip


def loaded(*settings: str) -> LoadedRecipe:
    return load_recipe("demo", [*EIGHT, *settings])


def work_of(recipe: Recipe) -> Workload:
    hardware = load_hardware("h200")
    layout = layout_of(recipe, accelerators=recipe.parallel.pipeline, per_node=8, vocabulary=128_256)
    given = LoadedRecipe(recipe=recipe, sources={})
    return base_workload(Request(loaded=given, hardware=hardware), layout)


def peak(recipe: Recipe, mode: str) -> int:
    return peak_bytes(replace(recipe, train=replace(recipe.train, recompute=mode)), work_of(recipe))


def test_the_choices_keep_less_the_longer_their_step_takes() -> None:
    recipe = loaded().recipe
    work = work_of(recipe)
    parameters = make_plan(Request(loaded=loaded(), hardware=work.hardware)).draft.parameters
    seconds = [step_time(work, parameters, global_batch=4, recompute=mode).seconds for mode in MODES]
    peaks = [peak(recipe, mode) for mode in MODES]
    assert seconds == sorted(seconds) and peaks == sorted(peaks, reverse=True)
    assert len({*seconds}) == len({*peaks}) == len(MODES)


@pytest.mark.parametrize("mode", MODES)
def test_the_quickest_that_fits_is_chosen_and_what_is_too_large_is_told(mode: str) -> None:
    recipe = loaded().recipe
    room = peak(recipe, mode) / (1 - LEFT_FREE["gpu"]) + 1
    choice = choose_recomputation(recipe, work_of(recipe), room_bytes=room)
    assert choice.mode == mode and choice.fits
    before = MODES[: MODES.index(mode)]
    for larger in before:
        assert f"{larger} needs {peak(recipe, larger) / GIB:.1f}" in choice.why
    wanted = f"GiB of {room / GIB:.1f}, of which 2% are left free"
    assert choice.why.endswith(wanted) if before else choice.why == "all activations fit"
    assert choose_recomputation(recipe, work_of(recipe), room_bytes=room) == choice, (
        "each start decides alike"
    )


def test_where_nothing_fits_the_least_is_taken_and_said_not_to_fit() -> None:
    recipe = loaded().recipe
    known, choice = resolved(recipe, work_of(recipe), room_bytes=20 * GIB)
    assert (choice.mode, choice.fits) == ("full", False)
    assert choice.why.count(" needs ") == len(MODES)
    assert known == replace(recipe, train=replace(recipe.train, recompute="full"))


def test_what_the_recipe_says_is_not_chosen_anew() -> None:
    recipe = loaded("train.recompute=elementwise").recipe
    choice = choose_recomputation(recipe, work_of(recipe), room_bytes=1)
    assert (choice.mode, choice.why) == ("elementwise", "")
    by_stage = loaded('parallel.recompute_per_stage=["full"]').recipe
    choice = choose_recomputation(by_stage, work_of(by_stage), room_bytes=1)
    assert choice.mode == "none" and "recompute_per_stage" in choice.why


@pytest.mark.parametrize(("schedule", "is_split"), [("1f1b", False), ("zero-bubble", True)])
def test_a_split_backward_chooses_among_what_it_allows(schedule: str, is_split: bool) -> None:
    recipe = loaded("parallel.pipeline=2", f"parallel.schedule={schedule}", "parallel.working=kept").recipe
    choice = choose_recomputation(recipe, work_of(recipe), room_bytes=GIB)
    assert ("elementwise needs" in choice.why) is not is_split
    assert ("mlp needs" in choice.why) is not is_split and "full needs" in choice.why


def test_a_plan_takes_the_choice_for_its_machine_and_says_so() -> None:
    hardware = load_hardware("h200")
    plan = make_plan(Request(loaded=loaded(), hardware=hardware, accelerators=1))
    chosen = plan.draft.request.recipe.train.recompute
    room = hardware.accelerator.memory_gib * GIB
    assert chosen in ("elementwise", "mlp", "full") and plan.draft.peak_bytes <= 0.98 * room < peak(
        loaded().recipe, "none"
    )
    (told,) = plan.assumptions
    assert told.startswith(f"train.recompute = auto is {chosen}: none needs ")


def test_a_plan_without_a_number_of_accelerators_takes_the_fewest_on_which_any_choice_fits() -> None:
    hardware = load_hardware("h100-80g")
    settings = ("parallel.zero=1", "parallel.working=kept", "train.global_batch=64")
    asked = Request(loaded=loaded(*settings), hardware=hardware)
    some = make_plan(asked)
    plain = make_plan(replace(asked, loaded=loaded(*settings, "train.recompute=none")))
    assert some.draft.work.layout.data <= plain.draft.work.layout.data and some.fits


def test_what_is_sent_is_that_of_the_chosen_recomputation() -> None:
    split = ("parallel.tensor=2", "parallel.sequence=true", "parallel.working=kept", "train.global_batch=64")
    hardware = load_hardware("h200")
    accelerator = replace(hardware.accelerator, memory_gib=80.0)
    hardware = replace(hardware, accelerator=accelerator)
    plan = make_plan(Request(loaded=loaded(*split), hardware=hardware, accelerators=2))
    chosen = plan.draft.request.recipe.train.recompute
    assert chosen == shape_of(plan.draft).phase.recompute == "mlp"
    told = make_plan(
        Request(loaded=loaded(*split, f"train.recompute={chosen}"), hardware=hardware, accelerators=2)
    )
    none = make_plan(
        Request(loaded=loaded(*split, "train.recompute=none"), hardware=hardware, accelerators=2)
    )
    assert plan.traffic == told.traffic
    assert plan.traffic.tensor_calls > none.traffic.tensor_calls
