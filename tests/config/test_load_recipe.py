import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.config.convert import BadValues, convert, dump_recipe
from bloomery.config.find import shipped_recipes
from bloomery.config.load import line_numbers, load_recipe, override, parse_recipe, sections
from bloomery.config.setting import Setting, key_of
from bloomery.config.validate import check_recipe
from bloomery.errors import ConfigError

MINIMAL = """\
[run]
name = "small"

[model]
layers = 2
hidden = 32
heads = 4

[data]
sources = ["notes.txt"]
sequence_length = 64

[train]
steps = 10
global_batch = 4

[optim]
learning_rate = 1e-3
"""


def mistakes(text, *overrides):
    with pytest.raises(ConfigError) as refused:
        parse_recipe(text, overrides, label="small.toml")
    return {one.key: one for one in refused.value.mistakes}


def only(text, *overrides):
    (one,) = mistakes(text, *overrides).values()
    return one


def test_a_minimal_recipe_takes_the_rest_from_the_defaults():
    loaded = parse_recipe(MINIMAL, label="small.toml")
    assert loaded.recipe.model.layers == 2
    assert loaded.recipe.model.ffn == "auto"
    assert loaded.recipe.guard.spike_patience == 10


def test_sources_say_line_command_line_or_default_for_every_setting():
    loaded = parse_recipe(MINIMAL, ["train.steps=20"], label="small.toml")
    assert loaded.sources["model.layers"] == "small.toml:5"
    assert loaded.sources["train.steps"] == "command line"
    assert loaded.sources["guard.spike_patience"] == "default"
    every = {f"{name}.{key_of(field)}" for name, section in sections().items() for field in fields(section)}
    assert set(loaded.sources) == every


def test_all_mistakes_are_reported_at_once_each_with_its_line():
    text = MINIMAL.replace("layers = 2", "layers = 0\nlayerz = 3").replace("heads = 4", "heads = true")
    found = mistakes(text + "\n[shedule]\nwarmup = 3\n", "optim.beta2=nan", "train.precision=bf61")
    assert {key: one.source for key, one in found.items()} == {
        "shedule": "small.toml:21",
        "model.layerz": "small.toml:6",
        "model.layers": "small.toml:5",
        "model.heads": "small.toml:8",
        "train.precision": "command line",
        "optim.beta2": "command line",
    }
    assert "model.layers" in found["model.layerz"].remedy
    assert "[schedule]" in found["shedule"].remedy
    assert "'bf16'" in found["train.precision"].remedy


def test_the_message_counts_and_names_every_mistake():
    with pytest.raises(ConfigError, match=r"(?s)2 mistakes.*train\.steps.*optim\.clip") as refused:
        parse_recipe(MINIMAL, ["train.steps=-1", "optim.clip=-1"], label="small.toml")
    assert refused.value.exit_status == 2


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("train.steps=true", "true or false"),
        ("train.steps=1.5", "integer"),
        ('train.steps="10"', "integer"),
        ("optim.learning_rate=true", "number"),
        ("optim.learning_rate=inf", "finite"),
        ("optim.learning_rate=0", "above 0"),
        ("optim.beta1=1", "at most"),
        ("model.ffn=wide", "'auto'"),
        ("model.tied=1", "true or false"),
        ("model.init_std=0", "above 0"),
        ("model.init_std=tiny", "choices"),
        ("train.ramp_up=16", "list of integers"),
        ("train.micro_batch_changes=[[1]]", "[an integer, an integer]"),
        ("train.micro_batch_changes=16", "list of [an integer, an integer], and is an integer"),
        ("train.precision_changes=fp8", "list of [an integer, one of 'auto'"),
        ('train.precision_changes=[[1, "bf61"]]', "choices"),
        ("data.datasets=[1]", "table"),
        ("data.datasets=1", "a list of tables, and is an integer"),
    ],
)
def test_a_value_of_the_wrong_type_or_size_is_refused(setting, problem):
    one = only(MINIMAL, setting)
    assert problem in one.problem
    assert one.remedy


def test_an_integer_is_taken_for_a_float_and_a_whole_float_is_explained_for_an_integer():
    loaded = parse_recipe(MINIMAL, ["optim.learning_rate=1"], label="small.toml")
    assert loaded.recipe.optim.learning_rate == 1.0
    assert isinstance(loaded.recipe.optim.learning_rate, float)
    assert "1_000_000_000" in only(MINIMAL, "train.samples=1e9").remedy


def test_a_quoted_number_is_explained_where_a_number_is_wanted_and_only_there():
    assert only(MINIMAL, 'train.steps="10"').remedy == "Write 10, without quotes."
    assert "quotes" not in only(MINIMAL, 'model.tied="1"').remedy
    assert "quotes" not in only(MINIMAL, 'train.steps="many"').remedy


def test_a_missing_setting_names_its_section_and_meaning():
    one = only(MINIMAL.replace("hidden = 32\n", ""))
    assert (one.key, one.source) == ("model.hidden", "small.toml:4")
    assert "[model]" in one.remedy


def test_a_missing_section_reports_each_setting_it_must_have():
    text = MINIMAL.replace('[run]\nname = "small"\n', "")
    assert set(mistakes(text)) == {"run.name"}


def test_a_key_of_another_section_is_sent_there():
    remedy = only(MINIMAL, "train.weight_decay=0.1").remedy
    assert "[optim]" in remedy and "optim.weight_decay" in remedy


def test_a_key_outside_any_section_is_sent_to_its_section():
    one = only("hidden = 3\n" + MINIMAL)
    assert one.source == "small.toml:1"
    assert "[model]" in one.remedy


@pytest.mark.parametrize("text", ["steps", "train.steps", "=3", "train.=3", "train=3"])
def test_an_override_that_is_no_setting_is_refused(text):
    assert "section.key=value" in only(MINIMAL, text).remedy


def test_a_section_that_is_misspelt_is_told_with_the_nearest():
    mistake = only(f"{MINIMAL}\n[schedul]\nfloor = 0.1\n")
    assert (mistake.key, mistake.problem) == ("schedul", "there is no such section")
    assert mistake.remedy == "Did you mean [schedule]?"


def test_an_override_that_is_no_setting_hides_no_mistake_after_it():
    assert set(mistakes(MINIMAL, "nonsense", "model.layers=0")) == {"nonsense", "model.layers"}


def test_overrides_are_toml_or_a_bare_word():
    loaded = parse_recipe(
        MINIMAL,
        [
            "optim.name=muon",
            "run.name=7",
            "data.sources=a/b.txt",
            "train.ramp_up=[2, 2, 10]",
            "model.kv_heads=2",
            "train.global_batch = 8",
            'data.held_out_datasets=[{name="v", path="p"}]',
        ],
        label="small.toml",
    )
    recipe = loaded.recipe
    assert recipe.optim.name == "muon"
    assert recipe.run.name == "7"
    assert recipe.data.sources == ("a/b.txt",)
    assert recipe.train.ramp_up == (2, 2, 10)
    assert recipe.model.kv_heads == 2
    assert recipe.train.global_batch == 8
    assert recipe.data.held_out_datasets[0].weight == "auto"
    assert recipe.data.held_out_datasets[0].resolved_weight == 1.0


@pytest.mark.parametrize(
    ("typed", "separator"),
    [
        (r"\n\n", "\n\n"),  # data.separator='\n\n' in a shell, as the documentation has it
        ("\n\n", "\n\n"),  # data.separator=$'\n\n'
        (r'"\n\n"', "\n\n"),
        (r"\n---\r\n", "\n---\r\n"),
        (r"\newpage", r"\newpage"),
        (r"'\n'", r"\n"),  # a literal text of TOML
        ("7", "7"),
    ],
)
def test_a_separator_is_typed_with_the_line_ends_that_it_stands_for(typed, separator):
    loaded = parse_recipe(MINIMAL, [f"data.separator={typed}"], label="small.toml")
    assert loaded.recipe.data.separator == separator


def test_the_last_of_two_overrides_counts():
    loaded = parse_recipe(MINIMAL, ["train.steps=5", "train.steps=6"], label="small.toml")
    assert loaded.recipe.train.steps == 6


def test_mistakes_in_tables_of_a_list_name_the_entry_and_its_line():
    text = MINIMAL.replace('sources = ["notes.txt"]\n', "") + (
        '\n[[data.datasets]]\nname = "a"\npath = "a"\n'
        '\n[[data.datasets]]\nname = "b"\nweight = -1\npth = "b"\n'
    )
    found = mistakes(text)
    assert {key: one.source for key, one in found.items()} == {
        "data.datasets[1].pth": "small.toml:26",
        "data.datasets[1].path": "small.toml:23",
        "data.datasets[1].weight": "small.toml:25",
    }


def test_a_mistake_in_a_list_of_the_command_line_has_no_line_of_the_list_that_it_replaces():
    text = MINIMAL.replace('sources = ["notes.txt"]\n', "") + '\n[[data.datasets]]\nname = "a"\npath = "a"\n'
    one = only(text, 'data.datasets=[{name="b", path=3}]')
    assert (one.key, one.source) == ("data.datasets[0].path", "command line")


def test_a_setting_that_is_missing_beside_one_of_the_command_line_is_looked_for_in_its_section():
    text = MINIMAL.replace("hidden = 32\n", "")
    assert only(text, "model.layers=3").source == "small.toml:4"
    named = MINIMAL.replace('[run]\nname = "small"\n', "")
    assert only(named, "run.seed=3").source == "command line"
    assert mistakes("model = 5\n", "model.layers=3")["model"].problem == "must be a table"


def test_a_bare_number_is_a_text_also_for_a_setting_whose_name_is_a_keyword():
    assert parse_recipe(MINIMAL, ["init.from=7"], label="small.toml").recipe.init.from_ == "7"


def test_a_syntax_error_names_its_line():
    one = only(MINIMAL.replace("steps = 10", "steps = ten"))
    assert (one.key, one.source, one.problem) == ("syntax", "small.toml:14", "Invalid value (column 9)")
    cut = only("[run")
    assert cut.source == "small.toml" and cut.problem.endswith("(at end of document)")
    assert "This is not TOML" in cut.remedy
    with pytest.raises(ConfigError, match="`bloomery train RECIPE --run RUN`, and the start mends it"):
        parse_recipe("[run", label="runs/mine", is_record=True)


def test_a_missing_recipe_suggests_the_nearest_shipped_one():
    with pytest.raises(ConfigError, match=r"Did you mean 'tr11-176b'") as refused:
        load_recipe("tr11-176")
    assert "demo" in refused.value.mistakes[0].remedy


def test_a_missing_file_a_directory_and_a_file_that_is_not_text_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_recipe(str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match="directory"):
        load_recipe(str(tmp_path))
    (tmp_path / "binary.toml").write_bytes(b'[run]\nname = "\xff"')
    with pytest.raises(ConfigError, match=r"is not UTF-8 text \(byte 14\)"):
        load_recipe(str(tmp_path / "binary.toml"))


def test_a_file_that_cannot_be_read_is_told_by_its_path(tmp_path, monkeypatch):
    def refuse(path, **how):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "mine.toml").write_text(MINIMAL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "read_text", refuse)
    shipped = str(shipped_recipes()["demo"])
    for name, label, path in (("mine.toml", "mine.toml", "mine.toml"), ("demo", "demo.toml", shipped)):
        with pytest.raises(ConfigError) as refused:
            load_recipe(name)
        (one,) = refused.value.mistakes
        assert (one.key, one.value, one.source) == ("recipe", label, path)
        assert one.problem == "cannot be read: Permission denied" and "permissions" in one.remedy


def test_a_path_and_a_name_load_the_same_recipe(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(dump_recipe(load_recipe("demo").recipe), encoding="utf-8")
    assert load_recipe(str(path)).recipe == load_recipe("demo").recipe


def test_line_numbers_hold_for_every_form_of_toml():
    text = (
        "# comment\n"
        "top = 1\n"
        "[a]\n"
        "list = [  # begins\n  1,\n  2,\n]\n"
        'text = """\n[not.a.table]\nx = 1\n"""\n'
        "inline = { x = 1, y = { z = 2 } }\n"
        'b."quoted key" = 3\n'
        "[[a.many]]\nx = 1\n"
        "[[a.many]]\nx = 2\n"
        "[a.many.below]\ny = 1\n"
        "[ 'd' . e ]\nf = 1\n"
    )
    tomllib.loads(text)
    lines = line_numbers(text)
    assert lines["top"] == 2
    assert lines["a"] == 3
    assert lines["a.list"] == 4
    assert lines["a.text"] == 8
    assert lines["a.inline.y.z"] == 12
    assert lines["a.b.quoted key"] == 13
    assert (lines["a.many"], lines["a.many[0].x"], lines["a.many[1].x"]) == (14, 15, 17)
    assert lines["a.many[1].below.y"] == 19
    assert lines["d.e.f"] == 21
    assert "x" not in lines


def test_a_line_ends_only_where_one_of_toml_does():
    lines = line_numbers('[a]\r\ntext = "one\u2028[two\x85three"\r\nnext = 1\r\n')
    assert (lines["a.text"], lines["a.next"]) == (2, 3)


def test_the_lines_of_a_long_list_are_not_parsed_again_at_each_of_them(monkeypatch):
    asked = []
    monkeypatch.setattr(tomllib, "loads", lambda text, loads=tomllib.loads: asked.append(text) or loads(text))
    entries = "".join(f'"{number}",\n' for number in range(50))
    assert line_numbers(f"list = [\n{entries}]\nnext = 1\n")["next"] == 53
    assert len(asked) == 3


def test_every_shipped_recipe_dumps_to_toml_that_loads_back_equal():
    for name in ("demo", "tr1-13b", "tr11-176b", "llmjp-172b", "intellect1-10b"):
        recipe = load_recipe(name).recipe
        assert parse_recipe(dump_recipe(recipe), label="dump").recipe == recipe


counts = st.integers(min_value=-(10**15), max_value=10**15)
text_values = st.text(st.characters(exclude_categories=["Cs"]))


@settings(max_examples=60, deadline=None)
@given(
    notes=text_values,
    field=text_values,
    floor=st.floats(min_value=0.0, allow_infinity=False, allow_nan=False),
    sources=st.lists(text_values, max_size=3),
    changes=st.lists(st.tuples(counts, counts), max_size=3),
)
def test_any_recipe_dumps_to_toml_that_loads_back_equal(notes, field, floor, sources, changes):
    recipe = parse_recipe(MINIMAL, label="small.toml").recipe
    recipe = replace(
        recipe,
        run=replace(recipe.run, notes=notes),
        data=replace(recipe.data, text_field=field, sources=tuple(sources)),
        schedule=replace(recipe.schedule, floor=floor),
        train=replace(recipe.train, micro_batch_changes=tuple(changes)),
    )
    assert parse_recipe(dump_recipe(recipe), label="dump").recipe == recipe


def test_a_loaded_recipe_can_be_overridden_as_strictly_as_a_file():
    recipe = parse_recipe(MINIMAL, label="small.toml").recipe
    assert override(recipe, ["log.every_steps=3"]).log.every_steps == 3
    with pytest.raises(ConfigError) as refused:
        override(recipe, ["log.every_steps=0", "log.evry=1"], source="control/set")
    assert {one.source for one in refused.value.mistakes} == {"control/set"}
    assert len(refused.value.mistakes) == 2


def test_a_setting_of_an_earlier_version_is_refused_with_what_to_write_instead():
    told = only(MINIMAL + "[guard]\nspike_threshold = 1.0\n")
    assert told.problem == "is no longer a setting" and "guard.spike = true" in told.remedy
    assert "Leave it out" in only(MINIMAL, "guard.spike_window=100").remedy


def test_what_a_run_of_an_earlier_version_recorded_is_still_read(tmp_path):
    recorded = MINIMAL + "[guard]\nspike_threshold = 0.0\nspike_window = 100\nspike_patience = 5\n"
    (tmp_path / "recipe.toml").write_text(recorded)
    with pytest.raises(ConfigError):
        load_recipe(str(tmp_path / "recipe.toml"))
    (tmp_path / "sources.toml").touch()
    guard = load_recipe(str(tmp_path / "recipe.toml")).recipe.guard
    assert guard.spike and guard.spike_patience == 5


def test_a_typed_length_takes_the_place_of_the_recipes_with_a_note():
    loaded = load_recipe("demo", ["train.steps=900"])
    tokens = load_recipe("demo").recipe.train.tokens
    assert (loaded.recipe.train.steps, loaded.recipe.train.tokens, loaded.recipe.train.samples) == (900, 0, 0)
    assert loaded.sources["train.tokens"] == "command line: train.steps takes its place"
    (note,) = loaded.notes
    assert "train.steps = 900" in note and f"train.tokens = {tokens}" in note and "demo.toml:" in note
    check_recipe(loaded.recipe, loaded.sources)
    for both in (["train.steps=900", "train.samples=50"], ["train.steps=900", "train.tokens=5"]):
        with pytest.raises(ConfigError, match=r"the run has [23] lengths"):
            twice = load_recipe("demo", both)
            check_recipe(twice.recipe, twice.sources)
    assert not load_recipe("demo", ["train.tokens=5_000"]).notes


def test_a_runs_directory_stands_for_its_recipe(tmp_path):
    run = tmp_path / "moved"
    (run / "incarnations").mkdir(parents=True)
    (run / "recipe.toml").write_text(dump_recipe(load_recipe("demo", ["run.name=old"]).recipe))
    assert load_recipe(str(run)).recipe.run.name == "old"
    (run / "incarnations").rmdir()
    with pytest.raises(ConfigError, match="is a directory"):
        load_recipe(str(run))


@pytest.mark.parametrize("setting", ["run.seed", "data.order_seed"])
def test_a_seed_of_63_bits_is_taken_again_from_the_recipe_of_its_run(setting):
    largest = 2**63 - 1
    begun = parse_recipe(MINIMAL, [f"{setting}={largest}"], label="small.toml").recipe
    assert parse_recipe(dump_recipe(begun), label="recipe.toml").recipe == begun
    assert only(MINIMAL, f"{setting}={largest + 1}").problem == "must be at most 9_223_372_036_854_775_807"


def test_an_integer_beyond_all_counts_is_told_its_nearest_bound():
    assert only(MINIMAL, f"optim.learning_rate={10**400}").problem == "must be a finite number"
    assert only(MINIMAL, f"train.steps={10**16}").problem == "must be at most 1_000_000_000_000_000"
    assert only(MINIMAL, f"train.steps=-{10**16}").problem == "must be at least 0"
    unbounded = Setting(kind="free", help="")
    with pytest.raises(BadValues) as refused:
        convert(int, unbounded, -(10**16), key="a.b")
    assert refused.value.wrongs[0].problem == "must be at least -1_000_000_000_000_000"


def test_a_run_that_began_from_weights_is_read_from_its_record_alone(tmp_path):
    def asked(directory):
        raise AssertionError("the record is complete")

    (tmp_path / "recipe.toml").write_text(MINIMAL + '[init]\nfrom = "there"\n')
    (tmp_path / "sources.toml").touch()
    loaded = load_recipe(str(tmp_path / "recipe.toml"), describe=asked)
    assert loaded.recipe.init.from_ == "there"


def test_a_number_for_a_text_is_not_told_to_lose_its_point():
    one = only(MINIMAL.replace('name = "small"', "name = 1.0"))
    assert one.problem == "must be text, and is a number" and "point" not in one.remedy


def test_a_value_in_place_of_a_section_is_refused_by_its_name():
    one = mistakes("model = 5\n")["model"]
    assert (one.value, one.problem) == (5, "must be a table")
    assert one.remedy == "Write [model] on its own line."
