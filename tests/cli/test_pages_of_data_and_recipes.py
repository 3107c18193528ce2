"""The report of `data audit`, `config check` and `config show --why`, and the files that `plan` writes."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.in_process import status_of
from tests.cli.made_plan import made_plan
from tests.cli.test_demo_steps import Recorder

from bloomery.cli import arguments, config, data, data_audit, plan, run_inputs
from bloomery.cli.arguments import add_recipe, parser
from bloomery.config.load import dump_recipe, load_recipe
from bloomery.errors import StorageError
from bloomery.events.run_directory import RunDirectory
from bloomery.plan.parameters import count_parameters, token_cost


def dataset(name: str, *, wanted: float, delivered: float, **changed: Any) -> dict[str, Any]:
    near = {
        "alarms": [], "correlations": [0.001, -0.0125, 0.002], "looked_at": 2_345, "is_exact": True,
        "near": 0.0213, "near_by_chance": 0.02,
    }  # fmt: skip
    taken = {"epochs": [1_000, 200], "least": 1, "most": 2}
    return {
        "name": name, "tokens": 1_234_567, "wanted": wanted, "delivered": delivered,
        "neighbours": near | changed.pop("near", {}), "taken": taken | changed.pop("taken", {}),
    }  # fmt: skip


def shared(**changed: Any) -> dict[str, Any]:
    return {"ngrams": 5_000, "found": 0, "documents": 0, "is_whole": True, "examples": []} | changed


FACTS: dict[str, Any] = {
    "recipe": "mine.toml", "samples": 10_000, "sequence_length": 2_048, "order": "bloomery", "packing": "cut",
    "ngram": 13, "look_at": ["this is strange"], "skipped": 0, "skips": 0, "mixtures": 1,
    "datasets": [
        dataset("own", wanted=0.6, delivered=0.6005),
        dataset("other", wanted=0.4, delivered=0.3995, near={"is_exact": False, "correlations": []},
                taken={"epochs": [1] * 7, "least": None, "most": None}),
        dataset("new", wanted=0.0, delivered=0.0, taken={"epochs": []}),
    ],
    "overlap": {"documents": {"own": 9_000, "rest": 5}, "shared": {"own": 1_200, "rest": 0}},
    "text": {
        "tokens_read": 7_654_321, "is_exact": True, "left_out": 0,
        "shared": {
            "held-out: own": shared(),
            "task: x": shared(ngrams=1_300, found=1_100, documents=1_050, is_whole=False,
                              examples=[["own", 1_001, 3], ["own", 2, 1], ["other", 3, 1], ["own", 4, 1]]),
        },
        "repeated": {
            "own": {"documents": 2_000, "share": 0.0123, "histogram": [1_500, 500],
                    "most": [[1_005, 0.91, 60], [6, 0.5, 50], [7, 0.4, 9], [8, 0.3, 9]]},
            "other": {"documents": 0, "share": 0.0, "histogram": [0, 0], "most": []},
        },
    },
}  # fmt: skip
PAGE = """\
# Data of mine.toml

10,000 samples of 2,048 tokens; order `bloomery`, packing `cut`.

- **Look at:** this is strange

## Neighbours in the order

![neighbours and shares](order.png)

| dataset | pairs | largest correlation, 1 to 32 apart | within 1% (by chance) | looked at |
|---|---|---|---|---|
| own | 2,345 | -0.0125 | 2.13% (2.00%) | all samples: exact |
| other | 2,345 | +0.0000 | 2.13% (2.00%) | 64 stretches of 65,536 samples |
| new | 2,345 | -0.0125 | 2.13% (2.00%) | all samples: exact |

## Tokens by dataset and epoch: exact

| dataset | tokens | wanted | delivered | samples taken of each epoch | a sample is taken |
|---|---|---|---|---|---|
| own | 1,234,567 | 60.0000% | 60.0500% | 1,000 + 200 | 1 to 2 times |
| other | 1,234,567 | 40.0000% | 39.9500% | 1 + 1 + 1 + 1 + 1 + 1 + … (7 epochs) | not counted |
| new | 1,234,567 | 0.0000% | 0.0000% | 0 | 1 to 2 times |

## Held-out documents in the training text: exact

- own: 1,200 of 9,000
- rest: 0 of 5

## 13-grams in common

7,654,321 tokens of training text were read (all of it: exact). Shorter texts have no n-gram.

| text | its n-grams | in the training text | training documents with one | the first |
|---|---|---|---|---|
| held-out: own | 5,000 | 0 | 0 | - |
| task: x | 1,300 of its beginning | 1,100 | 1,050 | own 1,001, own 2, other 3 |

## Documents that repeat themselves

![repeated n-grams](repeats.png)

| dataset | documents read | 13-grams that occurred before | most of all |
|---|---|---|---|
| own | 2,000 | 1.23% | document 1,005: 91%, document 6: 50%, document 7: 40% |
| other | 0 | 0.00% | - |

"""


def test_every_figure_of_an_audit_stands_on_its_page() -> None:
    assert data_audit.page_of(FACTS) == PAGE
    sound = FACTS | {"look_at": [], "overlap": None, "text": FACTS["text"] | {"is_exact": False}}
    page = data_audit.page_of(sound)
    assert "\nNothing strange was found.\n" in page and "\nThere is no held-out text.\n" in page
    assert "were read (stretches of documents: a sample)." in page
    skipped = FACTS | {"skipped": 1_300, "text": FACTS["text"] | {"is_exact": False, "left_out": 5_000}}
    page = data_audit.page_of(skipped)
    assert "of 2,048 tokens, 1,300 of them skipped; order" in page
    assert "(not all: among others, 5,000 tokens at the ends of very long documents were not)." in page


def test_an_audit_finds_what_is_taken_unevenly_delivered_otherwise_or_trained_on() -> None:
    # Five samples too many are less than a thousandth of 6,000, and five too few more than one of 4,000.
    assert data_audit.findings_of(FACTS) == [
        "other: 40.000% wanted, 39.950% delivered",
        "1,200 held-out documents of own are in the training text",
        "1,100 of 1,300 13-grams of task: x are in 1,050 training documents",
    ]
    uneven = dataset(
        "own", wanted=0.6, delivered=0.6007, near={"alarms": ["it lies near"]}, taken={"least": 1, "most": 3}
    )
    facts = FACTS | {"datasets": [uneven], "overlap": None, "text": {"shared": {"task: x": shared(found=9)}}}
    assert data_audit.findings_of(facts) == [
        "order of own: it lies near",
        "own: some samples are taken 3 times and others 1",
        "own: 60.000% wanted, 60.070% delivered",
    ]
    never = dataset("own", wanted=0.6, delivered=0.6, taken={"least": 0, "most": 2})
    said = data_audit.findings_of(facts | {"datasets": [never]})
    assert "own: some samples are taken 2 times and others 0" in said
    assert not data_audit.findings_of(facts | {"skips": 1, "datasets": [never]}), "a skip may do it"
    # One sample of few is what rounding does; a thousandth of the due samples where there are many.
    for wanted, delivered, samples, found in (
        (0.5, 0.49951, 2_000, 0), (0.5, 0.499, 2_000, 1), (0.5, 0.5006, 10**6, 1), (0.5, 0.5004, 10**6, 0),
    ):  # fmt: skip
        one = [dataset("own", wanted=wanted, delivered=delivered)]
        assert len(data_audit.findings_of(facts | {"datasets": one, "samples": samples})) == found
    one = [dataset("own", wanted=0.5, delivered=0.4992)]
    assert not data_audit.findings_of(facts | {"datasets": one, "samples": 2_000, "mixtures": 2}), (
        "each rounds"
    )


def test_an_audit_is_of_a_recipe_or_of_a_run_and_writes_its_report_where_it_was_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    found = [FACTS | {"recipe": "theirs"}]

    def facts(loaded: Any, run: Path | None, options: Namespace, progress: Any) -> dict[str, Any]:
        asked.append((loaded.recipe.run.name, loaded.recipe.train.samples, run))
        return dict(found[0])

    monkeypatch.setattr(data_audit, "_facts", facts)
    monkeypatch.setattr(data_audit, "pictures_of", lambda facts: {"order.png": facts["recipe"].encode()})
    rundir, to = RunDirectory(tmp_path / "run").create(), tmp_path / "new" / "report"
    rundir.recipe.write_text(dump_recipe(load_recipe("demo", ["run.name=theirs"]).recipe))
    words = ["train.samples=6400", "train.tokens=0", "--to", str(to)]
    assert data.run(["audit", str(rundir.path), *words]) == 1
    findings = data_audit.findings_of(FACTS)
    told = [f"{to}/audit.md", *(f"  look at: {finding}" for finding in findings)]
    assert capsys.readouterr().out.splitlines() == told and len(findings) == 3
    assert (to / "audit.md").read_text() == data_audit.page_of(found[0] | {"look_at": findings})
    assert (to / "order.png").read_bytes() == b"theirs"
    found[0] |= {"datasets": [], "overlap": None, "text": FACTS["text"] | {"shared": {}}}
    assert data.run(["audit", "demo", *words]) == 0
    assert capsys.readouterr().out == f"{to}/audit.md\n  nothing strange\n"
    assert asked == [("theirs", 6_400, rundir.path), ("demo", 6_400, None)]


def test_texts_that_training_text_is_searched_for_are_those_of_sources_and_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def shown(tasks: list[str], *, include: Path | None) -> dict[str, list[str]]:
        asked.append((tasks, include))
        return {task: [f"{task} is", "asked"] for task in tasks}

    def load(path: Path, *, end_of_document: str) -> Any:
        asked.append((path, end_of_document))
        return SimpleNamespace(encode=lambda text: [len(text)])

    monkeypatch.setattr("bloomery.data.tokenizer.load_tokenizer", load)
    monkeypatch.setattr("bloomery.evaluate.task_texts.task_texts", shown)
    monkeypatch.setattr(
        "bloomery.data.text_audit.Ngrams.of_texts",
        lambda texts, size: ([ids.tolist() for ids in texts], size),
    )
    source = tmp_path / "a.jsonl"
    source.write_text('{"body": "seven", "text": "no"}\n{"text": "no"}\n{"body": "x"}\n')
    prepared: Any = SimpleNamespace(tokenizer_path=Path("t.json"))

    def found(*, against: list[str], tasks: list[str]) -> dict[str, Any]:
        options = Namespace(against=against, tasks=tasks, text_field="body", include=Path("more"), ngram=5)
        return data_audit._other_texts(options, prepared, end_of_document="</s>")

    assert found(against=[], tasks=[]) == {} and not asked
    assert found(against=[str(source)], tasks=["one"]) == {
        str(source): ([[5], [1]], 5), "task: one": ([[6], [5]], 5),
    }  # fmt: skip
    assert asked == [(Path("t.json"), "</s>"), (["one"], Path("more"))]


def test_the_pictures_of_an_audit_have_each_datasets_lags_shares_and_repeats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    drawing = Recorder(calls)
    made: list[int] = []

    def subplots(*given: int, **options: Any) -> Any:
        made.append(len(given))
        return drawing, (drawing, drawing) if given else drawing

    pyplot = SimpleNamespace(subplots=subplots, close=drawing.close)
    monkeypatch.setitem(sys.modules, "matplotlib", SimpleNamespace(use=drawing.use, pyplot=pyplot))  # type: ignore[arg-type]
    assert list(data_audit.pictures_of(FACTS)) == ["order.png", "repeats.png"] and made == [2, 0]
    plots = [call for call in calls if call[0] == "plot"]
    assert plots[0][1:3] == (range(1, 4), [0.001, -0.0125, 0.002])
    assert plots[3][1] == pytest.approx([60.0, 40.0, 0.0]) and plots[3][2] == [2, 1, 0]
    (bars,) = [call for call in calls if call[0] == "barh"]
    assert bars[1] == [2, 1, 0] and bars[2] == pytest.approx([60.05, 39.95, 0.0])
    (chance,) = [call for call in calls if call[0] == "axhspan"]
    assert chance[1:3] == pytest.approx((-5 / 2_345**0.5, 5 / 2_345**0.5))
    steps = [call for call in calls if call[0] == "step"]
    assert steps[0][1:3] == ([25.0, 75.0], [75.0, 25.0]) and steps[1][2] == [0.0, 0.0]
    assert ("set_yticklabels", ["own", "other", "new"], {"fontsize": 7}) in calls
    assert [call[0] for call in calls].count("savefig") == 2 == [call[0] for call in calls].count("close")


SETTINGS = ("model.layers=2", "model.hidden=64", "model.heads=2", "data.sequence_length=128")


def test_a_recipe_is_told_by_its_size_its_length_and_its_batches(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train.samples=10_000", "train.tokens=0", "train.global_batch=16", "train.ramp_up=[4, 4, 3_000]"]
    recipe = load_recipe("demo", [*SETTINGS, *words, "train.micro_batch=4"]).recipe
    facts = dict(config._facts(recipe))
    assert list(facts) == ["parameters", "length", "batch", "compute"]
    assert facts["length"].startswith("10,000 samples = 1,280,000 tokens, ")
    assert facts["batch"] == "16 samples, from 4, of 128 tokens each"
    sizes = {"vocabulary": recipe.data.tokenizer_vocabulary, "sequence_length": 128}
    count, cost = (of(recipe.model, **sizes) for of in (count_parameters, token_cost))
    assert facts["parameters"] == f"{count.total:,}, of them {count.block.total:,} in each of 2 blocks"
    assert facts["compute"] == f"{cost.model * 1_280_000:.3g} FLOPs, {cost.model:.3g} a token"
    even = load_recipe("demo", [*SETTINGS, *words[:3], "train.ramp_up=[]"]).recipe
    assert dict(config._facts(even))["length"] == "10,000 samples = 1,280,000 tokens, 625 steps"
    assert dict(config._facts(even))["batch"] == "16 samples, of 128 tokens each"
    named = replace(even, data=replace(even.data, tokenizer="mine.json"))
    assert config._facts(named)[0] == (
        "parameters",
        "depend on the vocabulary: it is the tokenizer's, and no tokenizer.json can be read at mine.json",
    )
    assert len(config._facts(named)) == 3
    assert config._facts(replace(named, model=replace(named.model, vocabulary=999)))[-1][0] == "compute"
    peers = replace(even, elastic=replace(even.elastic, inner_steps=5, peers=3))
    assert dict(config._facts(peers))["peers"] == (
        "3 planned: each with the batch and the steps above, 48 samples per step in all"
    )
    ramped = replace(recipe, elastic=peers.elastic)
    assert "48 samples per step in all" in dict(config._facts(ramped))["peers"]
    assert dict(config._facts(peers))["length"] == "10,000 samples = 1,280,000 tokens, 209 steps"


def test_settings_are_shown_with_their_source_at_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    def row(key: str, value: str, **changed: str) -> config.SettingRow:
        given = {"source": "default", "kind": "free", "help": "What it means.", **changed}
        return config.SettingRow(key=key, value=value, **given)

    config._print_rows([row("a.one", "1"), row("a.two", "x" * 80, help="w " * 60), row("b.three", "3")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["[a]", "  one = 1" + " " * 77 + "default · free", "      What it means."]
    assert lines[3] == f"  two = {'x' * 80}" and lines[4] == " " * 86 + "default · free"
    assert lines[5].startswith("      w w") and len(lines[5]) <= 100
    assert lines[-4:-1] == ["", "[b]", "  three = 3" + " " * 75 + "default · free"]


def test_a_plan_writes_its_page_and_tells_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = made_plan()
    monkeypatch.setattr("bloomery.plan.overview.make_plan", lambda request: made)
    monkeypatch.setattr("bloomery.cli.plan_page.page", lambda plan, *, start: f"page from {start}")
    monkeypatch.setattr("bloomery.cli.plan_tables.plan_text", lambda plan, *, start: f"text from {start}")
    page = tmp_path / "x.html"
    words = ["plan", "demo", "--hardware", "h200", "--start", "2026-03-04", "--html", str(page)]
    assert status_of(*words) == 0
    assert capsys.readouterr().out == f"text from 2026-03-04\n\nwrote {page}\n"
    assert page.read_text() == "page from 2026-03-04"
    assert status_of(*words, "--json") == 0
    assert json.loads(capsys.readouterr().out)["recipe"] == "made"
    with pytest.raises(StorageError, match=r"cannot be written: Is a directory"):
        plan._write(tmp_path, "text")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--search", "--html", "x.html"), "--html does not go with --search"),
        (("--at", "runs/x", "--search"), "--search does not go with --at"),
        (("--at", "runs/x", "--html", "x.html"), "--html does not go with --at"),
        (("--at", "runs/x", "--start", "2026-03-04"), "--start does not go with --at"),
        (("--at", "runs/x", "--gpus", "1,2"), "--at does not go with several --gpus"),
        (("--gpus", "1,2", "--search"), "--search does not go with several --gpus"),
        (("--gpus", "1,2", "--html", "x.html"), "--html does not go with several --gpus"),
        (("--gpus", "1,2", "--start", "2026-03-04"), "--start does not go with several --gpus"),
        (("--gpus", "1,2", "--data-tokens", "1e9"), "--data-tokens does not go with several --gpus"),
    ],
)
def test_options_of_a_plan_that_would_have_no_effect_are_refused(
    words: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert status_of("plan", "demo", *words) == 2 and told in capsys.readouterr().err


def test_a_mistyped_option_is_told_with_the_nearest_or_how_settings_are_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = parser("try", "Try it.")
    add_recipe(options)
    options.add_argument("--samples")
    for words, told in (
        (["demo", "--sampels", "3"], "\n  Did you mean --samples?\n"),
        (["demo", "--sampels=3", "--versoin"], "\n  Did you mean --samples and --version?\n"),
        (["demo", "--train.steps=3"], "\n  Settings are written section.key=value, without dashes.\n"),
    ):
        with pytest.raises(SystemExit) as ended:
            options.parse_intermixed_args(words)
        assert ended.value.code == 2 and capsys.readouterr().err.endswith(told)
    plain = parser("try", "Try it.")
    with pytest.raises(SystemExit):
        plain.parse_args(["--train.steps=3"])
    assert capsys.readouterr().err.endswith("unrecognized arguments: --train.steps=3\n")


def test_settings_from_weights_are_those_of_their_directory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_recipe("demo", ["model.layers=3"])
    sources = dict(loaded.sources) | {"model.hidden": "weights", "model.heads": "weights"}
    asked: list[Any] = []
    found = replace(loaded, sources=sources)
    monkeypatch.setattr(
        arguments, "load_given", lambda name, overrides: asked.append((name, overrides)) or found
    )
    assert arguments.settings_from_weights("demo", ["a"]) == [] and asked == [("demo", ["a"])]
    recipe = replace(loaded.recipe, init=replace(loaded.recipe.init, from_="weights"))
    found = replace(loaded, recipe=recipe, sources=sources)
    model = loaded.recipe.model
    assert sorted(arguments.settings_from_weights("demo", [])) == [
        f"model.heads={model.heads}", f"model.hidden={model.hidden}",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "cuda", "by_layer", "is_large", "kind", "reads_layers"),
    [
        ("auto", False, False, False, "fp32", False), ("auto", True, False, False, "fp16", False),
        ("bf16", False, False, True, "bf16", True), ("fp32", True, True, False, "fp32", True),
    ],
)  # fmt: skip
def test_a_model_is_loaded_in_the_type_and_the_way_that_suit_the_machine(
    dtype: str, cuda: bool, by_layer: bool, is_large: bool, kind: str, reads_layers: bool,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    asked, judged = list[Any](), list[Any]()
    saved = SimpleNamespace(model="model", decoder=lambda **given: asked.append(given) or "decoder")
    kinds = {name: f"torch.{name}" for name in ("fp32", "bf16", "fp16")}
    files = SimpleNamespace(recipe=load_recipe("demo").recipe)
    monkeypatch.setattr(
        "bloomery.evaluate.saved_files.find_saved",
        lambda path, *, fallback: asked.append((path, fallback)) or files,
    )
    monkeypatch.setattr("bloomery.evaluate.open_checkpoint.open_model", lambda files: saved)
    monkeypatch.setattr(
        "bloomery.evaluate.open_checkpoint.must_load_by_block",
        lambda model, *, device, dtype: judged.append((model, device.type, dtype)) or is_large,
    )
    monkeypatch.setattr("bloomery.parallel.precision.DTYPES", kinds)
    monkeypatch.setattr("bloomery.parallel.precision.resolve_precision", lambda name, device: "fp16")
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    loaded = run_inputs.load_saved(Path("run"), dtype=dtype, by_layer=by_layer, fallback=True)
    assert loaded.decoder == "decoder" and asked[0] == (Path("run"), True)
    device = asked[1].pop("device").type
    assert (device, asked[1]) == (
        "cuda" if cuda else "cpu",
        {"dtype": f"torch.{kind}", "by_layer": reads_layers},
    )
    assert ("does not fit into memory" in capsys.readouterr().err) == is_large
    assert judged == ([] if by_layer else [("model", device, f"torch.{kind}")])
