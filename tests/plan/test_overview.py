import re
from dataclasses import asdict, replace
from datetime import date, timedelta
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.cli.plan_figures import as_figures
from bloomery.cli.plan_tables import plan_text
from bloomery.config.load import load_recipe
from bloomery.diloco.outer_update import PIECE
from bloomery.plan.checkpoint_plan import MOST_LOST
from bloomery.plan.hardware import load_hardware
from bloomery.plan.layout import even_stages
from bloomery.plan.overview import make_plan
from bloomery.plan.parameters import count_parameters
from bloomery.plan.peer_round import RING_PIECE
from bloomery.plan.request import Request
from bloomery.plan.schedule import phase_at, steps_until
from bloomery.plan.timeline import seconds_at_step, step_at_sample, total_seconds, total_steps

NO_CADENCE = ["checkpoint.every_steps=0", "checkpoint.every_minutes=0"]

COUNTS = """
accelerators nodes total embedding positions embedding_norm blocks layers head final_norm without_embeddings
attention_norm query_key_norm attention mlp_norm mlp matrices saves first_step first_sample steps
global_batch micro_batch
micro_batches samples tokens step sample peak_stage rank_parameters kept_at_end interval_steps
best_interval_steps failures head_rank tensor pipeline data zero shard chunks per_node model_flops cost
prefetch_blocks
"""
UNITS = """
ratio
_calls
_s seconds _bytes _share _teraflops teraflops_range mfu hfu days _hours _mwh _accelerator days_low days_high
"""
NAMES = ["tr1-13b", "tr11-176b", "llmjp-172b", "intellect1-10b", "demo", "tr11-176b-tiny"]


def planned(recipe, *overrides, hardware=None, gpus=None, **options):
    loaded = load_recipe(recipe, overrides)
    machine = load_hardware(hardware or loaded.recipe.run.hardware or "a100-80g")
    return make_plan(Request(loaded=loaded, hardware=machine, accelerators=gpus, **options))


@pytest.fixture(scope="module")
def bloom():
    return planned("tr11-176b", data_tokens=341e9)


@pytest.mark.parametrize("name", NAMES)
def test_parts_sum_to_wholes(name):
    plan = planned(name)
    figures = as_figures(plan)
    parameters = figures["parameters"]
    parts = ("embedding", "positions", "embedding_norm", "blocks", "final_norm", "head")
    assert sum(parameters[part] for part in parts) == parameters["total"]
    for stage in figures["memory"]["stages"]:
        kinds = (
            "weights",
            "gradients",
            "master",
            "optimizer",
            "activations",
            "logits",
            "buffers",
            "reserved",
        )
        assert sum(stage[kind] for kind in kinds) == stage["total"]
    assert sum(stage["blocks"] for stage in figures["memory"]["stages"]) == parameters["layers"]
    step = figures["step"]
    named = [key for key in step if key.endswith("_s") and key not in ("low_s", "high_s")]
    assert sum(step[key] for key in named) == pytest.approx(step["seconds"])
    assert sum(one["steps"] for one in figures["ramp"]) == figures["run"]["steps"]
    traffic = figures["traffic"]
    axes = ("tensor", "pipeline", "data", "embedding", "world")
    assert sum(traffic[f"all_{axis}_bytes"] for axis in axes) == pytest.approx(traffic["total_bytes"])


def test_ranks_of_a_model_hold_it_once_and_a_tied_head_twice(bloom):
    held = sum(stage["rank_parameters"] for stage in as_figures(bloom)["memory"]["stages"]) * 4
    count = bloom.draft.parameters
    norms = 3 * count.layers * (count.block.attention_norm + count.block.mlp_norm)
    norms += 3 * (count.embedding_norm + count.final_norm)
    assert held == pytest.approx(count.total + count.embedding + norms)


def test_the_ramp_up_is_what_training_takes_step_by_step():
    plan = planned("tr11-176b-tiny")
    recipe = plan.draft.request.recipe
    walked, consumed, step = [], 0, 0
    while consumed < recipe.train.samples:
        phase = phase_at(recipe.train, consumed)
        walked.append((phase.global_batch, phase.micro_batch))
        consumed, step = consumed + phase.global_batch, step + 1
    course = plan.draft.course
    told = [(one.global_batch, one.micro_batch) for one in course for _ in range(one.steps)]
    assert told == walked
    assert total_steps(course) == step
    assert course[-1].end_sample == consumed
    assert seconds_at_step(course, step) == pytest.approx(total_seconds(course))


def test_blooms_calendar(bloom):
    events = {one.what: one for one in bloom.calendar}
    assert events["warm-up ends"].sample >= 183_105
    assert events["full batch of 2,048"].sample - 9_765_625 < 2048
    assert events["micro-batch becomes 2"].sample - 3_114_898 < 784
    assert events["epoch 1 ends"].tokens == pytest.approx(341e9, rel=1e-4)
    assert events["learning rate reaches its floor"].sample == pytest.approx(200e6, rel=1e-4)
    days = [one.days for one in bloom.calendar]
    assert days == sorted(days)
    assert bloom.calendar[-1].what == "the run ends"
    assert bloom.calendar[-1].days == pytest.approx(bloom.whole.days)


def test_blooms_first_epoch_ended_at_the_iteration_of_its_log():
    course = planned("tr11-176b").draft.course
    assert step_at_sample(course, 158_692_272) == 85_376


def test_the_precision_switch_of_llmjp_is_step_7000():
    events = {one.what: one for one in planned("llmjp-172b").calendar}
    assert events["precision becomes fp8"].step == 7000
    assert events["precision becomes fp8"].tokens == pytest.approx(50e9, rel=0.02)
    assert events["warm-up ends"].step == 2000


def test_the_calendar_knows_hours_of_allocation():
    whole, part = planned("demo").whole, planned("demo", hours_per_day=20).whole
    assert part.days == pytest.approx(whole.days * 24 / 20)
    assert part.accelerator_hours == whole.accelerator_hours


def test_every_warning_of_a_careless_plan():
    plan = planned(
        "tr11-176b",
        "parallel.pipeline=24",
        "parallel.tensor=2",
        "train.global_batch=192",
        "train.ramp_up=[]",
        "train.micro_batch_changes=[]",
        "model.init_std=0.02",
        "model.vocabulary=250_680",
        "checkpoint.every_minutes=0.0",
        "checkpoint.every_steps=5000",
        gpus=384,
    )
    told = "\n".join(plan.warnings)
    for words in (
        "pipeline idles",
        "init_std = 0.02 is large",
        "should be padded to 250,752",
        "Saving every",
    ):
        assert words in told, words


def test_dropout_of_attention_is_warned_of_where_no_kernel_drops_weights_on_the_chip():
    machine = load_hardware("a100-80g")
    for kind, warned in (("cpu", True), ("gpu", False)):
        accelerator = replace(machine.accelerator, kind=kind)
        request = Request(
            loaded=load_recipe("tr11-176b"),
            hardware=replace(machine, accelerator=accelerator),
            accelerators=384,
        )
        assert any(warning.startswith("Dropout") for warning in make_plan(request).warnings) == warned


def test_shards_that_no_longer_fit_fewer_nodes_are_foretold():
    assert any("On 48 accelerators" in warning for warning in planned("tr11-176b").warnings)


def test_a_plan_that_does_not_fit_says_which_stage_lacks_what():
    plan = planned("tr11-176b", "parallel.pipeline=2", "parallel.tensor=4", gpus=64)
    assert not plan.fits
    assert "It does not fit: stage" in plan.warnings[0]


def test_peers_share_the_samples():
    plan = planned("intellect1-10b")
    assert plan.between_peers.peers == 14
    assert plan.between_peers.quantisation_error == pytest.approx(0.0206, abs=1e-3)
    assert "by each peer; rounding loses 2.1%" in plan_text(plan)
    assert "of each peer" in plan_text(plan)
    elements = plan.between_peers.host_bytes / 8
    assert plan.between_peers.payload_bytes == pytest.approx(elements, rel=0.01)
    buffers = 4 * PIECE
    assert plan.between_peers.host_peak_bytes - buffers == pytest.approx(9 * elements, rel=0.001)
    # Weights, moments, base and momentum in the copy; and the own weights apart from the committed ones.
    assert plan.between_peers.copy_bytes == pytest.approx(24 * elements)
    assert "more of four peers while one joins" in plan_text(plan)
    assert buffers == 4 * RING_PIECE  # of the outer optimizer, which the planner may not import
    many = planned("intellect1-10b", "elastic.peers=64", "elastic.codec='int4'").between_peers
    assert (many.reduce_codec, many.quantisation_error) == ("int8", pytest.approx(0.125, abs=1e-3))
    assert many.sent_bytes == pytest.approx(3 * many.payload_bytes * 63 / 64)
    assert plan.whole.tokens == pytest.approx(1e12, rel=1e-4)
    assert plan.whole.steps == -(-122_070_313 // (14 * 128))
    alone = planned("intellect1-10b", "elastic.inner_steps=0")
    assert alone.between_peers is None
    assert alone.whole.steps == pytest.approx(14 * plan.whole.steps, rel=1e-4)


def test_assumptions_are_told():
    plan = planned("llmjp-172b", "parallel.data=auto")
    assert "the fewest that fit and divide" in plan.assumptions[0]
    assert not planned("tr11-176b").assumptions


@pytest.mark.parametrize("pipeline", [1, 2, 3, 5, 7, 11, 16])
@pytest.mark.parametrize("end", [0.0, 0.4, 1.5, 3.0])
def test_stages_hold_every_block_once(pipeline, end):
    model = load_recipe("tr1-13b").recipe.model
    for layers in range(pipeline, pipeline + 40, 3):
        shape = replace(model, layers=layers)
        stages = even_stages(count_parameters(shape, vocabulary=99, sequence_length=8), pipeline, end)
        assert sum(stage.blocks for stage in stages) == layers
        assert min(stage.blocks for stage in stages) >= 1
        assert (stages[0].has_embedding, stages[-1].has_head) == (True, True)
        middle = [stage.blocks for stage in stages[1:-1]]
        assert not middle or max(middle) - min(middle) <= 1


@settings(max_examples=15, deadline=None)
@given(
    factor=st.floats(1.1, 8.0),
    which=st.sampled_from(["memory_gb_per_s", "bf16_teraflops", "matmul_efficiency"]),
)
def test_a_better_machine_is_never_slower(factor, which):
    loaded = load_recipe("llmjp-172b")
    machine = load_hardware("h100-80g")
    value = getattr(machine.accelerator, which) * factor
    better = replace(
        machine,
        accelerator=replace(
            machine.accelerator, **{which: min(value, 1.0) if which.endswith("efficiency") else value}
        ),
    )
    plans = [make_plan(Request(loaded=loaded, hardware=one, accelerators=768)) for one in (machine, better)]
    assert plans[1].speed.step_s <= plans[0].speed.step_s + 1e-12


@settings(max_examples=25, deadline=None)
@given(samples=st.integers(1, 220_000_000))
def test_positions_and_steps_of_the_course_agree(bloom, samples):
    train = bloom.draft.request.recipe.train
    assert step_at_sample(bloom.draft.course, samples) == steps_until(train, samples)


def test_json_says_every_unit(bloom):
    def numbers(value, path):
        if isinstance(value, dict):
            for key, one in value.items():
                yield from numbers(one, (*path, key))
        elif isinstance(value, list | tuple):
            for one in value:
                yield from numbers(one, path)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield path

    counts, units = set(COUNTS.split()), tuple(UNITS.split())
    inside_memory = {
        "weights",
        "gradients",
        "master",
        "optimizer",
        "activations",
        "logits",
        "buffers",
        "reserved",
    }
    for path in numbers(as_figures(bloom), ()):
        key = path[-1]
        assert key in counts or key.endswith(units) or (path[0] == "memory" and key in inside_memory), path


def test_a_page_and_a_text_hold_the_plan(bloom):
    from bloomery.cli.plan_page import page
    from bloomery.cli.plan_tables import plan_text

    text = plan_text(bloom, start="2022-03-11")
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "176,247,271,424" in text
    html = page(bloom, start="2022-03-11")
    assert html.count("<svg") == 2
    for fetched in ("http://", "https://", "src=", "@import", "<script", "url("):
        assert fetched not in html
    largest = bloom.draft.course[-1].global_batch
    assert [f">{batch:,.0f}</text>" in html for batch in (0, largest / 2, largest)] == [True] * 3
    assert asdict(bloom.speed)


def test_a_page_draws_what_every_stage_holds_and_dates_the_calendar(bloom):
    from bloomery.cli.plan_page import page

    html = page(bloom, start="2022-03-11")
    for index, (stage, memory) in enumerate(zip(bloom.draft.stages, bloom.draft.memory, strict=True)):
        bar = html[html.index(f">{index}: {stage.blocks} blocks</text>") :]
        parts = [f"{name}: {value / 2**30:.2f} GiB" for name, value in asdict(memory).items()]
        assert re.findall(r"<title>(.*?)</title>", bar)[: len(parts)] == parts
        assert re.findall(r">([\d.]+)</text>", bar)[0] == f"{memory.total / 2**30:.1f}"
        boxes = re.findall(r'<rect x="([\d.]+)".*? width="([\d.]+)"', bar)[: len(parts)]
        for (x, wide), (following, _) in pairwise(boxes):
            assert float(following) == pytest.approx(float(x) + float(wide), abs=0.2)
    for event in bloom.calendar:
        assert f"<td>{date(2022, 3, 11) + timedelta(days=event.days)}</td>" in html
    (points,) = re.findall(r'points="(.*?)"', html)
    across = [float(point.split(",")[0]) for point in points.split()]
    assert across == sorted(across) and len(set(across)) > 2


def test_shards_within_a_node_hold_more_and_send_less_across_nodes_than_shards_over_all():
    settings = ("parallel.zero=1", "parallel.data=64", "train.global_batch=256", "train.ramp_up=[]")
    everyone = planned("intellect1-10b", *settings, gpus=64)
    node = planned("intellect1-10b", *settings, "parallel.shard_degree=8", gpus=64)
    assert str(node.draft.work.layout) == "TP1·PP1·DP64·Z1/8"
    for part in ("master", "optimizer"):
        held, apart = (getattr(plan.draft.memory[0], part) for plan in (node, everyone))
        assert held == pytest.approx(8 * apart, rel=1e-6)
    assert node.draft.memory[0].weights == everyone.draft.memory[0].weights
    # 4 bytes of each gradient to the shards and 2 of each weight from there; an eighth twice across nodes.
    parameters = node.draft.parameters.total
    assert node.traffic.data_bytes == pytest.approx(parameters * (7 / 8 * (4 + 2) + 2 * 7 / 8 * 4 / 8))
    assert everyone.traffic.data_bytes == pytest.approx(parameters * 63 / 64 * (4 + 2))
    assert node.draft.course[-1].step.data_parallel_s != everyone.draft.course[-1].step.data_parallel_s


def test_what_is_offloaded_takes_no_room_on_the_device_and_longer_to_update():
    settings = ("parallel.zero=1", "train.ramp_up=[]", "train.global_batch=256")
    here, there = (
        planned("intellect1-10b", *settings, f"parallel.offload={where}", gpus=64)
        for where in ("none", "cpu")
    )
    one, other = here.draft.memory[0], there.draft.memory[0]
    assert one.master > 0 and one.optimizer > 0 and (other.master, other.optimizer) == (0, 0)
    more = other.buffers - one.buffers
    assert one.total - other.total == one.master + one.optimizer - more
    assert more == 2**26, "a piece of the masters on its way"
    assert there.draft.course[-1].step.update_s > 10 * here.draft.course[-1].step.update_s
    assert str(there.draft.work.layout).endswith("Z1+CPU")


@pytest.mark.parametrize(("zero", "gradients", "weights"), [(0, 2, 0), (1, 1, 1), (2, 16, 1), (3, 16, 32)])
def test_zero_2_reduces_each_micro_batch_and_zero_3_gathers_blocks_twice_for_each(zero, gradients, weights):
    plan = planned(
        "intellect1-10b", f"parallel.zero={zero}", "train.micro_batch=1", "train.micro_batch_changes=[]",
        "train.ramp_up=[]", "train.global_batch=128", gpus=8,
    )  # fmt: skip
    count = plan.draft.parameters
    blocks = count.layers * count.block.total
    # Embedding, last norm and head are gathered once a step. Buffers are a little larger than their contents.
    sent = 7 / 8 * (4 * gradients * count.total + 2 * weights * blocks)
    sent += 7 / 8 * 2 * min(weights, 1) * (count.total - blocks)
    assert sent <= plan.traffic.data_bytes <= sent * (1 + 1e-5)


def test_what_each_stage_computes_again_counts_for_it_alone():
    stages = ", ".join(['"full"'] * 6 + ['"none"'] * 6)
    plans = {
        how: planned("tr11-176b", setting, gpus=384)
        for how, setting in [
            ("none", "train.recompute=none"),
            ("full", "train.recompute=full"),
            ("both", f"parallel.recompute_per_stage=[{stages}]"),
        ]
    }
    kept = {how: [one.activations for one in plan.draft.memory] for how, plan in plans.items()}
    assert kept["both"] == [*kept["full"][:6], *kept["none"][6:]]
    sent = {how: plan.traffic.all_tensor_bytes for how, plan in plans.items()}
    assert sent["none"] < sent["both"] < sent["full"]


def test_saves_by_samples_are_counted_and_no_run_loses_all_of_its_time():
    by_samples = [*NO_CADENCE, "checkpoint.every_samples=512_000"]
    request = Request(
        loaded=load_recipe("tr11-176b", by_samples), hardware=load_hardware("a100-80g"), accelerators=384
    )
    kept = make_plan(request).draft.checkpoints
    assert kept.interval_steps == 512_000 / 2_048
    assert kept.saves == pytest.approx(220_001_200 / 512_000, abs=3)
    plan = make_plan(replace(request, loaded=load_recipe("tr11-176b", NO_CADENCE)))
    assert MOST_LOST < plan.draft.checkpoints.lost_share <= 1
    assert any("does not end" in warning for warning in plan.warnings)
    assert plan.whole.days == pytest.approx(plan.whole.training_days / (1 - MOST_LOST), rel=0.01)


def test_a_restart_takes_the_time_to_notice_to_start_and_to_load():
    request = Request(loaded=load_recipe("tr11-176b"), hardware=load_hardware("a100-80g"), accelerators=384)
    kept, operation = make_plan(request).draft.checkpoints, request.hardware.operation
    assert kept.load_s > 1.0
    assert kept.restart_s == pytest.approx(operation.detection_s + operation.restart_s + kept.load_s)


def test_a_save_beside_the_training_stops_it_for_the_copy_alone():
    request = Request(loaded=load_recipe("tr11-176b"), hardware=load_hardware("a100-80g"), accelerators=384)
    beside = make_plan(request).draft.checkpoints
    off = load_recipe("tr11-176b", ["checkpoint.background=off"])
    at_once = make_plan(replace(request, loaded=off)).draft.checkpoints
    assert at_once.blocking_s == at_once.save_s == beside.save_s
    assert beside.blocking_s == pytest.approx(beside.stored_bytes / 384 / 20e9)
    assert beside.saving_s == beside.saves * beside.blocking_s
    assert beside.lost_share < at_once.lost_share


@pytest.mark.parametrize(("tensor", "counts"), [(1, "8, 16, 32"), (2, "16, 32, 64")])
def test_a_ramp_up_that_few_replicas_can_start_says_how_many_could_train_the_full_batch(tensor, counts):
    settings = ["train.global_batch=64", "train.ramp_up=[8,4,480]", "train.micro_batch=1"]
    settings += [f"parallel.tensor={tensor}", "optim.name=adamw"]
    (warning,) = [text for text in planned("demo", *settings, gpus=4 * tensor).warnings if "ramp-up" in text]
    assert f"no more than 4 replicas start it; {counts} accelerators divide the full batch only" in warning
