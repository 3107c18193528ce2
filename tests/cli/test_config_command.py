import json

import pytest

from bloomery.cli import main
from bloomery.cli.config import reference
from bloomery.config.load import load_recipe, parse_recipe


def run(capsys, *arguments):
    status = main(["config", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_show_prints_toml_that_loads_back_equal(capsys):
    status, out, _ = run(capsys, "show", "demo", "train.global_batch=16")
    assert status == 0
    assert parse_recipe(out, label="out").recipe == load_recipe("demo", ["train.global_batch=16"]).recipe


def test_show_why_says_where_each_value_came_from_in_100_columns(capsys):
    status, out, _ = run(capsys, "show", "tr11-176b", "--why", "optim.clip=0.5")
    assert status == 0
    assert all(len(line) <= 100 for line in out.splitlines())
    lines = out.splitlines()
    clip = next(index for index, line in enumerate(lines) if line.startswith("  clip = "))
    assert lines[clip].startswith("  clip = 0.5")
    assert lines[clip].endswith("command line · journalled")
    assert "larger global norm" in lines[clip + 1]
    assert any(line.startswith("  layers = 70") and "tr11-176b.toml:" in line for line in lines)


def test_show_json_is_for_programs(capsys):
    status, out, _ = run(capsys, "show", "demo", "--json")
    assert status == 0
    shown = json.loads(out)
    assert shown["model.layers"]["value"] == load_recipe("demo").recipe.model.layers
    assert shown["model.layers"]["kind"] == "fixed"
    assert shown["guard.spike_patience"]["source"] == "default"


def test_check_tells_what_a_sound_recipe_describes(capsys):
    status, out, _ = run(capsys, "check", "tr11-176b")
    assert status == 0
    assert "no mistakes" in out
    assert "176,247,271,424" in out
    assert "115,312 steps" in out
    assert "cannot train" not in out


def test_check_and_show_say_what_a_batch_is_to_each_peer_and_to_the_run(capsys):
    status, out, _ = run(capsys, "check", "intellect1-10b")
    assert status == 0
    assert "14 planned" in out and "1,792 samples per step in all" in out
    _, shown, _ = run(capsys, "show", "intellect1-10b", "--why")
    assert "use 1,792 samples per step" in " ".join(shown.split())


def test_check_says_nothing_of_training_where_it_can_train(capsys):
    status, out, _ = run(capsys, "check", "demo")
    assert status == 0
    assert "cannot" not in out


def test_check_gives_the_warnings_of_the_plan_and_json_holds_mistakes_too(capsys):
    status, out, _ = run(capsys, "check", "tr11-176b")
    assert status == 0 and "warning: Saving every" in " ".join(out.split())
    status, out, _ = run(
        capsys, "check", "demo", "model.hidden=2048", "model.layers=2", "model.heads=16", "--json"
    )
    (warning,) = json.loads(out)["warnings"]
    assert status == 0 and "hidden/layers is 1024" in warning and json.loads(out)["mistakes"] == []
    status, out, _ = run(capsys, "check", "demo", "train.micro_batch=3", "schedule.floor=9", "--json")
    assert status == 2 and len(json.loads(out)["mistakes"]) == 2


def test_warnings_are_of_the_vocabulary_of_the_tokenizers_file(capsys, monkeypatch):
    known = load_recipe("demo", ["model.vocabulary=4096"])
    monkeypatch.setattr("bloomery.cli.config.with_local_vocabulary", lambda loaded: known)
    monkeypatch.setattr(
        "bloomery.cli.config.warnings_of", lambda loaded: [f"{loaded.recipe.model.vocabulary} tokens"]
    )
    _, out, _ = run(capsys, "check", "demo", "--json")
    assert json.loads(out)["warnings"] == ["4096 tokens"]


def test_check_reports_every_mistake_and_fails(capsys):
    status, _, err = run(capsys, "check", "demo", "train.micro_batch=3", "schedule.floor=9")
    assert status == 2
    assert "2 mistakes" in err
    assert "train.global_batch" in err
    assert "schedule.floor" in err


def test_reference_prints_and_writes_the_page(capsys, tmp_path):
    status, out, _ = run(capsys, "reference")
    assert (status, out) == (0, reference())
    assert run(capsys, "reference", "--write", str(tmp_path / "page.md"))[0] == 0
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == reference()


def test_the_reference_is_written_to_its_page_where_no_other_is_named(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs" / "reference").mkdir(parents=True)
    assert run(capsys, "reference", "--write")[:2] == (0, "wrote docs/reference/settings.md\n")
    assert (tmp_path / "docs" / "reference" / "settings.md").read_text(encoding="utf-8") == reference()


def test_a_page_that_cannot_be_written_says_what_to_do(capsys, tmp_path):
    status, _, err = run(capsys, "reference", "--write", str(tmp_path / "no" / "page.md"))
    assert status == 1
    assert "cannot be written" in err
    assert "clone" in err


@pytest.mark.parametrize("arguments", [["--help"], ["show", "--help"], ["check", "--help"]])
def test_help_teaches_by_examples(capsys, arguments):
    if len(arguments) == 1:
        status, out, _ = run(capsys, *arguments)
        assert status == 0
    else:
        with pytest.raises(SystemExit):
            main(["config", *arguments])
        out = capsys.readouterr().out
    assert "examples:" in out


def test_an_unknown_part_suggests_the_nearest(capsys):
    status, _, err = run(capsys, "shwo")
    assert status == 2
    assert "bloomery config show" in err


def test_a_machine_that_nobody_knows_is_a_warning(capsys):
    assert main(["config", "check", "demo", "run.hardware=h101"]) == 0
    said = capsys.readouterr()
    assert "run.hardware = 'h101': there is no such file, nor a shipped one" in said.out + said.err


def test_a_list_of_tables_is_told_by_its_key_and_line_alone(capsys):
    no_weight = "data.datasets=[{name='a', path='x', weight=0}]"
    assert main(["config", "check", "demo", "data.sources=[]", "data.tokenizer=t.json", no_weight]) == 2
    said = capsys.readouterr().err
    assert "data.datasets  (command line): their weights sum to 0" in said
