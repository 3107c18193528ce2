import json
import subprocess
import sys

import pytest

from bloomery.cli import main
from bloomery.config.load import load_recipe
from bloomery.operate.start_check import checkpoint_bytes
from bloomery.plan.parameters import count_parameters


def lines(capsys):
    return capsys.readouterr().out.splitlines()


def test_a_plan_fits_100_columns_and_says_what_matters(capsys):
    assert main(["plan", "tr11-176b", "--data-tokens", "341e9", "--start", "2022-03-11"]) == 0
    shown = lines(capsys)
    assert max(map(len, shown)) <= 100
    text = "\n".join(shown)
    for words in ("176,247,271,424", "bottleneck", "epoch 1 ends", "2022-03-11", "MWh", "warnings"):
        assert words in text, words


@pytest.mark.parametrize("recipe", ["tr1-13b", "llmjp-172b", "intellect1-10b", "demo", "demo-small"])
def test_every_recipe_has_a_plan_within_100_columns(recipe, capsys):
    assert main(["plan", recipe]) == 0
    assert max(map(len, lines(capsys))) <= 100


def test_a_plan_as_json_is_one_object_with_formulas(capsys):
    assert main(["plan", "demo", "--hardware", "h200", "--gpus", "2", "train.global_batch=8", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["hardware"] == "h200"
    assert figures["accelerators"] == 2
    assert {"memory", "step", "hardware_teraflops", "checkpoints"} <= figures["formulas"].keys()


def test_a_search_is_a_table_within_100_columns(capsys):
    assert main(["plan", "tr1-13b", "--gpus", "64", "--search"]) == 0
    shown = lines(capsys)
    assert max(map(len, shown)) <= 100
    assert "layouts fit" in shown[0]
    assert main(["plan", "tr1-13b", "--gpus", "64", "--search", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranked"][0]["reason"] == "the best"


def test_a_plan_that_does_not_fit_has_exit_status_1(capsys):
    assert main(["plan", "tr11-176b", "--gpus", "8", "parallel.pipeline=2"]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_nonsense_is_one_message_with_all_complaints(capsys):
    command = ["plan", "tr11-176b", "--gpus", "0", "--failures-per-week", "-1", "--price", "-2"]
    assert main(command) == 2
    told = capsys.readouterr().err
    assert told.startswith("bloomery plan: 3 mistakes in the plan:")
    assert "Traceback" not in told


def test_what_is_no_number_is_refused_together(capsys):
    assert main(["plan", "tr11-176b", "--gpus", "many", "--price", "cheap"]) == 2
    told = capsys.readouterr().err
    assert "2 mistakes" in told
    assert "--gpus = 'many'" in told


def test_several_numbers_of_gpus_are_one_table_or_one_list_and_one_that_fits_is_enough(capsys):
    assert main(["plan", "tr11-176b", "--gpus", "48,100,384"]) == 0
    shown = lines(capsys)
    assert max(map(len, shown)) <= 100
    assert [line.split()[0] for line in shown[4:6]] == ["48", "384"]
    assert shown[4].endswith("does not fit") and shown[5].endswith("fits")
    assert "100 GPUs: is no multiple of 48" in shown[7]
    assert main(["plan", "tr11-176b", "--gpus", "48,100", "--json"]) == 1
    small, refused = json.loads(capsys.readouterr().out)
    assert main(["plan", "tr11-176b", "--gpus", "48", "--json"]) == 1
    assert small == json.loads(capsys.readouterr().out)
    assert refused["accelerators"] == 100
    assert [mistake["key"] for mistake in refused["mistakes"]] == ["--gpus"]


def test_numbers_of_gpus_that_are_none_or_come_twice_are_told_together(capsys):
    assert main(["plan", "tr11-176b", "--gpus", "384,48,384,x,,384", "--price", "cheap"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("bloomery plan: 4 mistakes in the plan:")
    for words in ("--gpus = 'x'", "--gpus = ''", "--gpus = 384  (command line): is given twice", "--price"):
        assert words in told
    assert main(["plan", "tr11-176b", "--gpus", "1,2", "model.heads=100"]) == 2
    assert capsys.readouterr().err.count("model.heads = 100") == 1, "a mistake of the recipe is told once"


@pytest.mark.parametrize(
    "command",
    [
        ["plan"],
        ["plan", "tr11-176b", "--hardware", "abacus"],
        ["plan", "intellect1-10b", "--link", "pigeon"],
        ["plan", "demo", "--start", "soon"],
        ["plan", "--at", "/nowhere"],
    ],
)
def test_what_a_person_got_wrong_is_a_message(command, capsys):
    assert main(command) == 2
    assert "bloomery plan: 1 mistake" in capsys.readouterr().err


def test_a_page_is_written(tmp_path, capsys):
    path = tmp_path / "plan.html"
    assert main(["plan", "tr11-176b", "--html", str(path)]) == 0
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "tr11-176b", "--html", str(tmp_path / "no" / "plan.html")])
    assert "cannot be written" in capsys.readouterr().err


def test_planning_loads_neither_torch_nor_numpy_nor_a_library_of_tokenizers(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 700}}}), encoding="utf-8")
    code = (
        "import sys; from bloomery.cli import main; status = main(['plan', 'tr11-176b', '--search']);"
        "status += main(['plan', 'tr11-176b']);"
        f"status += main(['plan', 'demo', '--hardware=h200', 'data.tokenizer={file}']);"
        "heavy = {'torch', 'numpy', 'matplotlib', 'tokenizers'} & set(sys.modules);"
        "sys.exit(f'{heavy}' if heavy else status)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_commands_read_the_vocabulary_of_a_tokenizers_file(tmp_path, capsys):
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 700}}}), encoding="utf-8")
    named = ["demo", f"data.tokenizer={file}"]
    model = load_recipe("demo").recipe.model
    parameters = count_parameters(model, vocabulary=701, sequence_length=512).total
    assert main(["plan", *named, "--hardware", "h200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"]["total"] == parameters
    assert main(["config", "check", *named]) == 0
    assert f"parameters   {parameters:,}, of them" in capsys.readouterr().out
    assert main(["mesh", "--stages", *named]) == 0
    assert f"{parameters:,} parameters in 1 stages" in capsys.readouterr().out
    assert checkpoint_bytes(load_recipe(*named[:1], named[1:])) == 12 * parameters
    file.unlink()
    assert main(["mesh", "--stages", *named]) == 2
    told = capsys.readouterr()
    assert "no tokenizer.json can be read" in told.err and not told.out
    assert main(["mesh", *named]) == 0


def test_hours_per_day_lengthen_the_plan_and_are_24_where_none_are_given(capsys):
    days = {}
    for hours in ("", "12", "24"):
        given = ["--hours-per-day", hours] if hours else []
        assert main(["plan", "demo", "--hardware", "h200", "--json", *given]) == 0
        days[hours] = json.loads(capsys.readouterr().out)["run"]["days"]
    assert days["12"] == pytest.approx(2 * days["24"]) and days[""] == days["24"] > 0
