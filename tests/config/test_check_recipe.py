from dataclasses import replace

import pytest

from bloomery.config.checkpoint import BackupSection, GuardSection
from bloomery.config.data import DatasetSection
from bloomery.config.findings import nearest_numbers
from bloomery.config.load import load_recipe
from bloomery.config.peer_settings import refuse_alone
from bloomery.config.validate import backup_mistakes, check_recipe
from bloomery.config.validate_layout import batch_pairs
from bloomery.errors import ConfigError
from bloomery.plan.schedule import phase_at

ROTATIONS = "model.rope_low_rotations={} model.rope_high_rotations={}"
SPLIT_SEQUENCE = ("parallel.tensor=2", "parallel.sequence=true", "optim.name=adamw")
DATASETS = ("data.sources=[]", "data.tokenizer=t.json", 'data.datasets=[{name="a", path="a"}]')


def findings(name, *overrides, check=check_recipe, **facts):
    loaded = load_recipe(name, overrides)
    try:
        check(loaded.recipe, loaded.sources, **facts)
    except ConfigError as refused:
        return {one.key: one for one in refused.mistakes}
    return {}


def test_all_mistakes_across_sections_are_reported_at_once():
    found = findings(
        "tr1-13b",
        "run.name=../elsewhere",
        "model.hidden=5121",
        "train.steps=3",
        "schedule.floor=1.0",
        "parallel.pipeline=41",
        "parallel.tensor=3",
    )
    assert set(found) == {
        "run.name",
        "model.heads",
        "train.ramp_up",
        "schedule.warmup",  # a typed number of steps takes the place of the recipe's tokens
        "schedule.floor",
        "parallel.pipeline",
        "parallel.tensor",
    }
    assert found["schedule.floor"].source == "command line"
    assert found["model.heads"].source.startswith("tr1-13b.toml:")


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["model.kv_heads=3"], "model.kv_heads"),
        (["model.heads=256"], "model.heads"),
        (["model.hidden=12", "model.heads=4"], "model.heads"),
        (["model.position=alibi", "model.max_positions=64"], "model.max_positions"),
        (["model.rope_scaling=yarn", "model.rope_theta=1.0"], "model.rope_theta"),
        (["model.position=learned", "model.max_positions=64"], "data.sequence_length"),
        (["data.sources=[]"], "data.sources"),
        (["data.reset_positions=true"], "data.reset_positions"),
        (['data.datasets=[{name="a", path="a"}]'], "data.sources"),
        (['data.datasets=[{name="a", path="a"}]', "data.sources=[]"], "data.tokenizer"),
        (
            ["data.sources=[]", "data.tokenizer=gpt2", 'data.datasets=[{name="a", path="a", weight=0.0}]'],
            "data.datasets",
        ),
        (['data.held_out_datasets=[{name="a", path="a"}, {name="a", path="b"}]'], "data.held_out_datasets"),
        (["train.tokens=0"], "train.samples"),
        (["train.samples=500", "train.steps=500"], "train.steps"),
        (["train.micro_batch_changes=[[9, 1], [5, 2]]"], "train.micro_batch_changes"),
        (["train.micro_batch_changes=[[9, 0]]"], "train.micro_batch_changes"),
        (['train.precision_changes=[[0, "bf16"]]'], "train.precision_changes"),
        (["train.attention=flash", "model.position=alibi"], "train.attention"),
        (["train.attention=cudnn", "data.mask_documents=true"], "train.attention"),
        (["train.attention=math", "model.attention_dropout=0.1"], "train.attention"),
        (["train.attention=cudnn", "train.deterministic=true"], "train.attention"),
        (["train.micro_batch=3"], "train.global_batch"),
        (["schedule.warmup=1_000_000"], "schedule.warmup"),
        (["schedule.warmup=10", "schedule.decay=9"], "schedule.warmup"),
        (["parallel.sequence=true"], "parallel.sequence"),
        (["parallel.tensor=2", "parallel.ranks_per_node=1", "optim.name=adamw"], "parallel.tensor"),
        (["parallel.tensor=2"], "optim.name"),
        (
            ["parallel.tensor=2", "parallel.sequence=true", "optim.name=adamw", "data.sequence_length=255"],
            "data.sequence_length",
        ),
        (["parallel.async_tensor=true"], "parallel.async_tensor"),
        ([*SPLIT_SEQUENCE, "parallel.async_tensor=true", "train.precision=fp8"], "parallel.async_tensor"),
        (
            [*SPLIT_SEQUENCE, "parallel.async_tensor=true", 'train.precision_changes=[[9, "fp8"]]'],
            "parallel.async_tensor",
        ),
        (
            [
                *SPLIT_SEQUENCE,
                "parallel.async_tensor=true",
                "parallel.pipeline=2",
                "parallel.schedule=zero-bubble",
            ],
            "parallel.async_tensor",
        ),
        (["run.name=a/b"], "run.name"),
        (["run.name=.hidden"], "run.name"),
        (["model.head_dim=7"], "model.head_dim"),
        (["model.heads=128", "model.rope_scaling=dynamic"], "model.rope_scaling"),
        (["model.rope_scaling=llama3", *ROTATIONS.format(4.0, 4.0).split()], "model.rope_high_rotations"),
        (["model.rope_scaling=yarn", *ROTATIONS.format(4.0, 3.0).split()], "model.rope_high_rotations"),
        (["model.embedding_init=bigram", "model.tied=true"], "model.embedding_init"),
        (["model.qk_norm=true", "optim.qk_clip=100.0"], "optim.qk_clip"),
        (["model.position=alibi", "model.max_positions=256"], "model.max_positions"),
        (["data.sources=['a.txt', ' ']"], "data.sources"),
        (["data.weights_file=w.toml"], "data.weights_file"),
        (["data.split=[9, 1]"], "data.split"),
        (["data.order=bloomery", "data.order_samples=100"], "data.order_samples"),
        (["data.packing=documents", "data.mask_documents=false"], "data.packing"),
        (["data.packing=documents", "data.mask_documents=true", "data.order=megatron"], "data.packing"),
        (["data.prompt_field=question", "data.order=megatron"], "data.prompt_field"),
        ([*DATASETS, "data.prompt_field=question"], "data.prompt_field"),
        ([*DATASETS[:2], 'data.datasets=[{name="a", path="a", weight=2.0, tokens=9}]'], "data.datasets"),
        ([*DATASETS[:2], 'data.datasets=[{name="a", path="a", epochs=1.5, tokens=9}]'], "data.datasets"),
        ([*DATASETS[:2], 'data.datasets=[{name="a", path="a"}, {name="a", path="b"}]'], "data.datasets"),
        (["log.profile_steps=[5]"], "log.profile_steps"),
        (["log.profile_steps=[6, 5]"], "log.profile_steps"),
        (["train.micro_batch_changes=[[5, 1], [5, 2]]"], "train.micro_batch_changes"),
        (["optim.learning_rate=1e-3", "schedule.floor=1.1e-3"], "schedule.floor"),
        (["backup.url=s3://b/x", "second_backup.url=s3://b/x"], "second_backup.url"),
        (["environment.variables=['1X=2']"], "environment.variables"),
    ],
)
def test_each_combination_that_cannot_work_is_refused(settings, key):
    assert list(findings("demo", *settings)) == [key]


@pytest.mark.parametrize(
    "settings",
    [
        ["run.name=a.b_c+d-1"],
        ["model.head_dim=8"],
        ["model.heads=64", "model.rope_scaling=dynamic"],
        ["model.rope_scaling=llama3", *ROTATIONS.format(3.0, 4.0).split()],
        ["model.rope_scaling=linear", *ROTATIONS.format(4.0, 3.0).split()],
        ["model.embedding_init=bigram", "model.tied=false"],
        ["model.position=learned", "model.max_positions=256", "data.sequence_length=256"],
        ["model.position=rotary", "model.max_positions=64", "data.sequence_length=256"],
        ["data.order=megatron", "data.order_samples=100"],
        ["data.packing=documents", "data.mask_documents=true", "data.reset_positions=true"],
        ["data.prompt_field=question"],
        [*DATASETS, "data.weights_file=w.toml"],
        [*DATASETS[:2], 'data.datasets=[{name="a", path="a", weight=0.0}, {name="b", path="b", epochs=1.5}]'],
        [*DATASETS[:2], 'data.datasets=[{name="a", path="a", weight=1.0, tokens=9}]'],
        ["log.profile_steps=[5, 5]"],
        ["train.micro_batch_changes=[[1, 2], [9, 1]]"],
        ["optim.learning_rate=1e-3", "schedule.floor=1e-3"],
        ["schedule.warmup=10", "schedule.decay=10"],
        ["backup.url=s3://b/x", "second_backup.url=s3://b/y"],
        ["environment.variables=['_X1=a=b']"],
    ],
)
def test_combinations_at_the_edge_of_what_works_are_taken(settings):
    assert findings("demo", *settings) == {}


@pytest.mark.parametrize(
    ("settings", "key", "refused"),
    [
        (["elastic.inner_steps=96", "elastic.fragments=32"], "elastic.fragments", False),
        (["elastic.fragments=33"], "elastic.fragments", True),
        (["elastic.overlap_steps=98"], "elastic.overlap_steps", False),
        (["elastic.overlap_steps=99"], "elastic.overlap_steps", True),
        (["elastic.overlap_steps=2", "elastic.mixing=0.5"], "elastic.mixing", False),
        (["elastic.minimum_peers=8"], "elastic.minimum_peers", False),
        (["elastic.minimum_peers=9"], "elastic.minimum_peers", True),
        (["elastic.overlap_steps=2", "elastic.minimum_peers=3", "elastic.quorum=2"], "elastic.quorum", True),
        (["elastic.overlap_steps=2", "elastic.minimum_peers=3", "elastic.quorum=3"], "elastic.quorum", False),
        (["elastic.overlap_steps=2", "elastic.minimum_peers=3", "elastic.quorum=8"], "elastic.quorum", False),
        (["elastic.overlap_steps=2", "elastic.minimum_peers=3", "elastic.quorum=9"], "elastic.quorum", True),
        (["elastic.average=gradients", "optim.qk_clip=9.0"], "optim.qk_clip", True),
        (["optim.qk_clip=9.0"], "optim.qk_clip", False),
        (["elastic.average=gradients", "elastic.fragments=3"], "elastic.fragments", True),
        (["elastic.average=gradients", "elastic.overlap_steps=1"], "elastic.overlap_steps", True),
        (["elastic.average=gradients", "train.precision=fp16"], "train.precision", True),
        (["schedule.unit=steps", "schedule.decay=900000"], "schedule.unit", False),
        (["schedule.unit=steps", "schedule.decay='auto'", "schedule.shape=constant"], "schedule.unit", False),
    ],
)
def test_rounds_are_taken_up_to_their_bounds(settings, key, refused):
    rounds = ("elastic.inner_steps=99", "elastic.fragments=1", "elastic.peers=8", "model.layers=32")
    assert (key in findings("intellect1-10b", *rounds, *settings)) == refused


def test_what_follows_from_the_settings_of_rounds_models_and_datasets():
    elastic = load_recipe("intellect1-10b", ["elastic.inner_steps=103", "elastic.fragments=4"]).recipe.elastic
    assert elastic.round_steps == 25 and replace(elastic, overlap_steps=3).leased_steps == 28
    assert replace(elastic, inner_steps=0).round_steps == 1
    model = load_recipe("demo").recipe.model
    assert replace(model, hidden=96, heads=6).head_width == 16
    assert replace(model, hidden=96, heads=6, head_dim=20).head_width == 20
    biases = {
        (kind, on): (one.attention_bias, one.mlp_bias)
        for kind in ("all", "attention", "mlp")
        for on in (True, False)
        for one in [replace(model, bias=on, bias_in=kind)]
    }
    assert biases == {
        ("all", True): (True, True),
        ("attention", True): (True, False),
        ("mlp", True): (False, True),
        **{(kind, False): (False, False) for kind in ("all", "attention", "mlp")},
    }
    assert DatasetSection(name="a", path="a").resolved_weight == 1.0
    assert DatasetSection(name="a", path="a", weight=0.25).resolved_weight == 0.25


def test_the_reach_of_rewinds_is_what_a_guard_and_a_trial_take():
    guard = GuardSection(spike_rewind_steps=100, spike_patience=7, trial_steps=5, corruption_steps=40)
    assert guard.reach_steps == (136, 41)
    assert replace(guard, spike=False, refused_updates=0, not_finite_losses=3).reach_steps == (136, 41)
    assert replace(guard, spike=False, refused_updates=0, not_finite_losses=0).reach_steps == (41,)


@pytest.mark.parametrize(
    ("ramp_up", "word"),
    [
        ("[16, 16]", "three numbers"),
        ("[16, 0, 100]", "above 0"),
        ("[64, 16, 100]", "starts with 64"),
        ("[6, 16, 100]", "22 and 38"),
    ],
)
def test_a_ramp_up_that_does_not_reach_the_global_batch_is_refused(ramp_up, word):
    one = findings("tr1-13b-tiny", f"train.ramp_up={ramp_up}")["train.ramp_up"]
    assert word in one.problem + one.remedy


def test_a_ramp_up_is_refused_where_the_run_is_counted_in_steps():
    one = findings("tr1-13b", "train.tokens=0", "train.steps=1000")["train.ramp_up"]
    assert "counted in steps" in one.problem
    assert "train.samples" in one.remedy


def test_ninety_six_nodes_do_not_divide_the_batch_and_the_nodes_that_do_are_named():
    one = findings("tr1-13b", "train.ramp_up=[]", "parallel.data=48")["train.global_batch"]
    assert one.problem.endswith("1024 is not divisible by micro-batch 1 × data degree 48"), "no other batch"
    assert "1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024." in one.remedy
    assert "2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048 nodes of 4" in one.remedy
    assert "1008 or 1056" in one.remedy


def test_every_batch_of_a_ramp_up_must_divide():
    # 64 nodes: 1024 divides by 32 ranks, the first batch of 16 does not.
    one = findings("tr1-13b", "parallel.data=32")["train.ramp_up"]
    assert "a global batch of 16" in one.problem
    assert "1, 2, 4, 8, 16." in one.remedy


def test_the_degree_of_a_launch_counts_where_the_recipe_leaves_it_open():
    assert findings("llmjp-172b", data_degree=27) == {}
    assert list(findings("llmjp-172b", data_degree=10)) == ["train.global_batch"]


def test_the_pairs_of_batch_and_micro_batch_are_those_of_the_run_walked_sample_by_sample():
    train = load_recipe("tr11-176b-tiny").recipe.train
    walked = {(phase.global_batch, phase.micro_batch) for at in range(700) for phase in [phase_at(train, at)]}
    assert set(batch_pairs(train)) == walked


def test_bloom_changes_its_micro_batch_when_the_global_batch_reaches_784():
    train = load_recipe("tr11-176b").recipe.train
    ((at, micro_batch),) = train.micro_batch_changes
    assert micro_batch == 2
    assert phase_at(train, at).global_batch == 784
    assert phase_at(train, at - 1).global_batch == 768


def test_a_recipe_between_peers_is_not_started_as_a_run_of_its_own():
    found = findings("intellect1-10b", check=refuse_alone)
    assert set(found) == {"elastic.inner_steps"}
    assert "bloomery peer" in found["elastic.inner_steps"].remedy
    assert not findings("llmjp-172b", check=refuse_alone)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("train.steps=100", "train.steps"),
        ("schedule.decay='auto'", "schedule.unit"),
        ("elastic.fragments=3", "elastic.fragments"),
        ("elastic.fragments=50", "elastic.fragments"),
        ("elastic.overlap_steps=100", "elastic.overlap_steps"),
        ("elastic.mixing=0.5", "elastic.mixing"),
        ("elastic.minimum_peers=20", "elastic.minimum_peers"),
        ("elastic.average=gradients", "elastic.inner_steps"),
        ("elastic.codec=sparse", "elastic.outer_momentum"),
        ("elastic.quorum=3", "elastic.quorum"),
        ("elastic.quorum=30", "elastic.quorum"),
    ],
)
def test_rounds_that_cannot_be_are_refused(override, key):
    more = ("train.tokens=0",) if override.startswith("train.steps") else ()
    assert key in findings("intellect1-10b", override, *more)


def test_sparse_parts_need_weights_and_no_momentum_of_all_peers():
    sparse = ("elastic.codec=sparse", "elastic.outer_momentum=0")
    assert findings("intellect1-10b", *sparse) == findings("intellect1-10b")
    assert "elastic.codec" in findings("intellect1-10b", *sparse, "elastic.average=gradients")


def test_the_feedback_of_sparse_parts_alone_sums_up_several_rounds():
    elastic = load_recipe("intellect1-10b", ["elastic.feedback_decay=0.75"]).recipe.elastic
    assert elastic.feedback_rounds == 1.0
    assert replace(elastic, codec="sparse").feedback_rounds == 4.0


def test_averaged_gradients_take_rounds_of_one_step_alone():
    gradients = ("elastic.average=gradients", "elastic.outer_momentum=0", "elastic.fragments=1")
    assert "elastic.inner_steps" not in findings("intellect1-10b", *gradients, "elastic.inner_steps=1")
    assert "elastic.inner_steps" in findings("intellect1-10b", *gradients, "elastic.inner_steps=2")


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ((), set()),
        (("sync.place=hf:me/run",), set()),
        (("sync.place=hf:me/run", "run.offline=true"), {"sync.place"}),
        (("run.offline=true",), set()),
        (("sync.place=hf:me/run", "sync.checkpoints=true"), set()),
        (("sync.place=file:///copies", "sync.checkpoints=true"), {"sync.checkpoints"}),
    ],
)
def test_a_repository_of_the_hub_takes_the_network_and_alone_has_branches(settings, keys):
    assert {key for key in findings("demo", *settings) if key.startswith("sync.")} == keys


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ((), None),
        (("run.offline=true",), "checkpoint.url"),
        (("backup.url=s3://other/path",), "backup.url"),
        (("second_backup.url=s3://other/path",), "second_backup.url"),
    ],
)
def test_checkpoints_in_a_store_need_the_network_and_no_backup(settings, key):
    in_store = ("checkpoint.url=s3://bucket/path", *settings)
    assert list(findings("demo", *in_store)) == ([key] if key else [])


def test_peers_keep_no_checkpoints_in_a_store():
    assert "checkpoint.url" in findings("intellect1-10b", "checkpoint.url=s3://bucket/path")


@pytest.mark.parametrize(
    ("split", "is_refused"), [([98, 1, 1], False), ([97, 1, 1, 1], True), ([0, 1, 1], True), ([100], False)]
)
def test_a_split_has_a_part_to_train_on_and_at_most_two_others(split, is_refused):
    dataset = ("data.sources=[]", "data.tokenizer=t.json", 'data.datasets=[{name="a", path="a"}]')
    assert ("data.split" in findings("demo", *dataset, f"data.split={split}")) == is_refused


def test_a_run_with_several_lengths_is_told_which_to_set_to_zero():
    loaded = load_recipe("demo")
    train = replace(loaded.recipe.train, samples=80, tokens=0, steps=10)
    with pytest.raises(ConfigError) as refused:
        check_recipe(replace(loaded.recipe, train=train), loaded.sources)
    (mistake,) = [one for one in refused.value.mistakes if one.key == "train.steps"]
    assert "train.samples=0" in mistake.remedy and "train.steps=0" not in mistake.remedy


def test_tensor_degrees_that_fit_are_named():
    mistake = findings("tr1-13b", "parallel.tensor=3")["parallel.tensor"]
    assert mistake.remedy.endswith("1, 2, 4.")


def test_checkpoints_are_kept_for_rewinds_only_where_a_guard_may_ask_for_one():
    off = GuardSection(spike=False, not_finite_losses=0, refused_updates=0, corruption_steps=0)
    assert off.reach_steps == ()
    assert replace(off, corruption_steps=100).reach_steps == (101,)
    for one in ({"refused_updates": 1}, {"not_finite_losses": 1}, {"spike": True}):
        (by_loss,) = replace(off, **one).reach_steps
        assert by_loss > off.spike_rewind_steps


def test_a_warm_up_may_last_the_whole_run_in_any_unit():
    run = ["train.global_batch=8", "train.micro_batch=8", "train.samples=512", "data.sequence_length=64"]
    for unit, length in (("steps", 64), ("samples", 512), ("tokens", 512 * 64)):
        as_long = [*run, f"schedule.unit={unit}", f"schedule.warmup={length}"]
        assert "schedule.warmup" not in findings("demo", *as_long)
        assert "schedule.warmup" in findings("demo", *as_long[:-1], f"schedule.warmup={length + 1}")
    # 256 samples in batches of 4 and 256 in batches of 8: 96 steps, which are not counted here.
    ramp_up = [
        "train.ramp_up=[4, 4, 256]",
        "train.micro_batch=4",
        "schedule.unit=steps",
        "schedule.warmup=80",
    ]
    assert "schedule.warmup" not in findings("demo", *run, *ramp_up)


@pytest.mark.parametrize("url", ["s3://user@bucket/x", "s3://:word@bucket/x", "s3://bucket/x?key=1"])
def test_a_backup_url_with_any_credential_is_refused(url):
    (finding,) = backup_mistakes(BackupSection(url=url))
    assert "credentials" in finding.problem


@pytest.mark.parametrize("key", ["backup.url", "second_backup.url", "checkpoint.url", "sync.place"])
def test_a_url_with_brackets_is_a_mistake_of_its_setting(key):
    assert findings("demo", f"{key}=s3://[bucket]/path")[key].problem == "is no URL"


def test_a_remedy_names_the_eight_numbers_that_are_nearest():
    assert nearest_numbers(list(range(1, 31)), near=20) == "16, 17, 18, 19, 20, 21, 22, 23"


def test_a_shard_degree_has_to_divide_the_degree_of_a_launch():
    sharded = ("parallel.zero=1", "optim.name=adamw", "parallel.shard_degree=3")
    assert "parallel.shard_degree" not in findings("demo", *sharded)
    assert "parallel.shard_degree" not in findings("demo", *sharded, data_degree=6)
    assert "parallel.shard_degree" in findings("demo", *sharded, data_degree=4)


def test_averaged_gradients_take_no_step_of_fp16_at_any_time():
    gradients = ("elastic.average=gradients", "elastic.fragments=1", "elastic.inner_steps=1")
    assert "train.precision" not in findings("intellect1-10b", *gradients)
    later = 'train.precision_changes=[[1000, "fp16"]]'
    assert "train.precision" in findings("intellect1-10b", *gradients, later)


def test_a_mistake_is_told_with_its_value_but_without_its_login():
    found = findings("demo", "backup.url=s3://user:word@bucket/x", "schedule.warmup=1_000_000")
    assert {key: one.value for key, one in found.items()} == {
        "backup.url": "s3://***@bucket/x", "schedule.warmup": 1_000_000,
    }  # fmt: skip
    with pytest.raises(ConfigError) as refused:
        load_recipe("demo", ["train.steps=s3://user:word@bucket/x"])
    assert [one.value for one in refused.value.mistakes] == ["s3://***@bucket/x"]
