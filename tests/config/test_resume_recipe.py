from dataclasses import fields, replace

import pytest

from bloomery.config.load import load_recipe, override, sections
from bloomery.config.resume import SettingChange, apply_free, compare, refuse_fixed
from bloomery.config.setting import declaration_of
from bloomery.errors import ConfigError

DEMO = load_recipe("demo").recipe
MIXTURE = (
    "data.sources=[]",
    "data.tokenizer=t.json",
    'data.datasets=[{name="a", path="a"}, {name="b", path="b"}]',
)


def test_equal_recipes_have_no_changes():
    assert not compare(DEMO, load_recipe("demo").recipe)


def test_changes_are_sorted_by_what_a_resume_may_do():
    new = override(
        DEMO, ["train.tokens=9_000_000", "optim.learning_rate=1e-4", "model.layers=9", "train.micro_batch=2"]
    )
    changes = compare(DEMO, new)
    assert {one.key for one in changes.free} == {"train.tokens", "train.micro_batch"}
    assert changes.journalled == (
        SettingChange(key="optim.learning_rate", old=DEMO.optim.learning_rate, new=1e-4),
    )
    assert changes.fixed == (SettingChange(key="model.layers", old=DEMO.model.layers, new=9),)


@pytest.mark.parametrize("change", ["train.micro_batch=2", "optim.learning_rate=1e-4", "model.layers=9"])
def test_a_change_of_any_one_kind_is_a_change(change):
    assert compare(DEMO, override(DEMO, [change]))


def test_a_fixed_change_is_refused_with_both_values():
    changes = compare(DEMO, override(DEMO, ["model.layers=9", "run.seed=7"]))
    with pytest.raises(ConfigError) as refused:
        refuse_fixed(changes, {"model.layers": "demo.toml:12"})
    first, second = sorted(refused.value.mistakes, key=lambda one: one.key)
    assert (first.key, first.value, first.source) == ("model.layers", 9, "demo.toml:12")
    assert str(DEMO.model.layers) in first.problem
    assert second.key == "run.seed"


def test_adding_data_and_changing_weights_is_journalled_and_moving_files_is_free():
    old = override(DEMO, MIXTURE)
    new = override(
        old,
        ['data.datasets=[{name="a", path="moved"}, {name="b", path="b", weight=2}, {name="c", path="c"}]'],
    )
    changes = compare(old, new)
    assert [one.key for one in changes.free] == ["data.datasets[0].path"]
    assert [one.key for one in changes.journalled] == ["data.datasets[1].weight", "data.datasets[2]"]
    assert changes.journalled[1].old is None
    assert not changes.fixed


def test_an_entry_that_left_the_end_of_a_list_is_a_change():
    old = override(DEMO, MIXTURE)
    changes = compare(old, override(old, ['data.datasets=[{name="a", path="a"}]']))
    (left,) = changes.free + changes.journalled + changes.fixed
    assert (left.key, left.old.name, left.new) == ("data.datasets[1]", "b", None)


def test_a_change_of_any_number_is_found_under_its_kind():
    for name, section in sections().items():
        for field in fields(section):
            before = getattr(DEMO, name)
            value = getattr(before, field.name)
            if type(value) not in (int, float):
                continue
            new = replace(DEMO, **{name: replace(before, **{field.name: value + 1})})
            changes = compare(DEMO, new)
            (found,) = getattr(changes, declaration_of(field).kind)
            assert found == SettingChange(key=f"{name}.{field.name}", old=value, new=value + 1)
            assert len(changes.free + changes.journalled + changes.fixed) == 1


def test_a_free_setting_changes_while_running():
    changed = apply_free(DEMO, " checkpoint.every_steps ", " 50\n")
    assert changed.checkpoint.every_steps == 50
    assert compare(DEMO, changed).free == (
        SettingChange(key="checkpoint.every_steps", old=DEMO.checkpoint.every_steps, new=50),
    )


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("optim.learning_rate", "1e-4", "journalled"),
        ("model.layers", "3", "fixed"),
        ("parallel.tensor", "2", "when training starts"),
        ("evaluate.samples", "8", "when training starts"),
        ("log.every_steps", "1", "when training starts"),
        ("checkpoint.evry_steps", "3", "checkpoint.every_steps"),
        ("checkpont.every_steps", "3", "no such section"),
        ("checkpoint.every_steps", "-3", "at least 0"),
        ("train.micro_batch", "3", "not divisible"),
    ],
)
def test_what_cannot_change_while_running_is_refused_with_one_mistake(key, value, word):
    with pytest.raises(ConfigError) as refused:
        apply_free(DEMO, key, value)
    (one,) = refused.value.mistakes
    assert word in one.problem + one.remedy
    assert one.source == "control/set" or key == "train.micro_batch"


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [("model.hidden", "64", "It is fixed"), ("elastic.outer_learning_rate", "0.5", "resume it")],
)
def test_the_refusal_of_a_change_says_whether_a_resume_would_take_it(key, value, remedy):
    with pytest.raises(ConfigError) as refused:
        apply_free(DEMO, key, value)
    assert remedy in refused.value.mistakes[0].remedy


def test_a_run_from_before_the_prefix_may_say_that_its_tokenizer_is_a_name():
    old = override(DEMO, ["data.tokenizer=somebody/something"])
    changes = compare(old, override(old, ["data.tokenizer=hf:somebody/something"]))
    assert [one.key for one in changes.journalled] == ["data.tokenizer"] and not changes.fixed
    assert compare(old, override(old, ["data.tokenizer=hf:somebody/else"])).fixed


def test_a_dataset_may_take_the_place_of_another_one_as_the_whole_list_may():
    old = override(DEMO, MIXTURE)
    changes = compare(old, override(old, ['data.datasets=[{name="c", path="a"}, {name="b", path="b"}]']))
    assert [one.key for one in changes.journalled] == ["data.datasets[0].name"] and not changes.fixed
