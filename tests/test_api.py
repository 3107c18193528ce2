"""The Python API, as its page shows it."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny_run import TINY

import bloomery
from bloomery.api import LanguageModel
from bloomery.config.load import dump_recipe, parse_recipe
from bloomery.data.sample_layout import Packs
from bloomery.errors import BloomeryError, CheckpointError, ConfigError, StorageError
from bloomery.evaluate.generate import Sampling, generate_together
from bloomery.evaluate.scoring import IGNORED
from bloomery.events.incarnation import begin
from bloomery.events.journal import Journal, loss_curve
from bloomery.events.run_directory import RunDirectory
from bloomery.train.settings import StartOptions

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "api.md"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which every example of the page has been run, in order."""
    path = tmp_path_factory.mktemp("api")
    (path / "notes.txt").write_text(Path(argparse.__file__).read_text()[:40_000])
    known: dict[str, object] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S):
            exec(compile(block, str(PAGE), "exec"), known)
    return path


def test_the_page_runs_as_written_and_names_the_whole_api(place: Path) -> None:
    assert (place / "runs" / "notes" / "checkpoints").is_dir()
    used = set(re.findall(r"bloomery\.(\w+)\(", PAGE.read_text()))
    assert used == {"fit", "journal", "load", "recipe", "samples"}
    assert used < set(dir(bloomery))


def test_importing_the_package_is_quick_and_without_torch_or_numpy() -> None:
    asked = "import sys, bloomery; print(len(sys.modules), {'torch', 'numpy'} & set(sys.modules))"
    told = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout
    assert told.endswith("set()\n")
    with pytest.raises(AttributeError):
        bloomery.nothing_of_the_kind  # noqa: B018  — the access is what is tested


def test_the_order_is_that_of_the_training(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)  # the recipe names its text by a relative path
    run, steps = place / "runs" / "notes", bloomery.journal(place / "runs" / "notes")
    samples = bloomery.samples(run)
    recipe = bloomery.recipe(run).recipe
    assert len(samples) * recipe.data.sequence_length >= recipe.train.tokens
    first = [samples[index] for index in range(recipe.train.global_batch)]
    again = bloomery.recipe(run, {"run.name": "again", "train.tokens": 1 * 64 * recipe.train.global_batch})
    tokens = torch.stack([sample["tokens"] for sample in first])
    targets = torch.stack([sample["targets"] for sample in first])
    bloomery.fit(again, place / "again", progress=False)  # the same first step, then a checkpoint
    assert bloomery.journal(place / "again")["loss"][0] == steps["loss"][0]
    untrained = bloomery.recipe(run, {"run.name": "zero", "optim.learning_rate": 1e-30} | _still(recipe))
    bloomery.fit(untrained, place / "zero", progress=False)
    logits = bloomery.load(place / "zero").logits(tokens)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    assert float(loss) == pytest.approx(bloomery.journal(place / "zero")["loss"][0], abs=1e-5)
    for beyond in (len(samples), -1):
        with pytest.raises(IndexError):
            samples[beyond]


def test_the_targets_of_prompts_count_in_no_sample_where_answers_alone_count(tmp_path: Path) -> None:
    records = [{"prompt": f"what comes after the number {n}?", "text": f" {n + 1}."} for n in range(60)]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    samples = bloomery.samples(
        parse_recipe(TINY, [f"data.sources={file}", "data.prompt_field=prompt"], label="tiny"), tmp_path
    )
    targets = torch.stack([sample["targets"] for sample in samples.__getitems__(range(4))])
    counted = (targets != IGNORED).float().mean()
    assert 0.0 < counted < 0.5


def test_samples_are_read_as_their_recipe_packs_them_with_the_tokens_of_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, given = tmp_path / "texts.jsonl", list[dict[str, Any]]()
    file.write_text("".join(json.dumps({"text": f"the number {n}"}) + "\n" for n in range(60)))
    monkeypatch.setattr("bloomery.data_loader.reading.Samples", lambda *_, **how: given.append(how))
    recipe = parse_recipe(
        TINY, [f"data.sources={file}", "data.packing=documents", "data.mask_documents=true"], label="tiny"
    )
    prepared = bloomery.samples(recipe, tmp_path / "data")._prepared
    (how,) = given
    (layout,) = how.pop("layouts")
    assert isinstance(layout, Packs)
    assert how == {
        "sequence_length": 32,
        "vocabulary_size": prepared.vocabulary_size,
        "eod": prepared.end_of_document_id,
        "answers": (),
    }


def _still(recipe: object) -> dict[str, object]:
    """Settings with which one step leaves the weights as they were."""
    return {
        "optim.muon_learning_rate": 1e-30,
        "optim.head_learning_rate": 1e-30,
        "train.precision": "fp32",
        "train.tokens": 64 * recipe.train.global_batch,  # type: ignore[attr-defined]
    }


def test_a_journal_is_the_loss_curve_and_ids_give_the_logits_of_their_text(place: Path) -> None:
    run = place / "runs" / "notes"
    table = bloomery.journal(str(run))
    assert list(zip(table["step"], table["loss"], strict=True)) == loss_curve(RunDirectory(run))
    model = bloomery.load(run)
    ids = model.tokenizer.encode("import os")
    torch.testing.assert_close(model.logits(ids), model.logits("import os"))
    torch.testing.assert_close(model.logits(torch.tensor([ids, ids]))[1], model.logits(ids))
    assert bloomery.load(model.checkpoint).generate("x", max_tokens=5, seed=3) == model.generate(
        "x", max_tokens=5, seed=3
    )


def test_columns_come_in_the_order_of_the_fields_and_are_as_long_as_there_are_events(tmp_path: Path) -> None:
    rundir = RunDirectory(tmp_path).create()
    with Journal(rundir.journal()) as journal:
        for step, fields in ((1, {"loss": 3.0}), (1, {"loss": 2.5}), (2, {"zeros": 4}), (3, {"loss": 1.0})):
            journal.write("step", incarnation=1, step=step, **fields)
        journal.write("guard", incarnation=1, step=3, why="a rise")
    table = bloomery.journal(tmp_path)
    assert list(table) == ["event", "time", "incarnation", "step", "loss", "zeros"]
    assert (table["step"], table["loss"]) == ([1, 2, 3], [2.5, None, 1.0])
    assert table["zeros"] == [None, 4, None]
    assert (
        bloomery.journal(tmp_path, "guard")["why"] == ["a rise"] and bloomery.journal(tmp_path, "end") == {}
    )


def test_what_is_not_there_is_refused_as_by_the_commands(tmp_path: Path) -> None:
    for call, error in (
        (lambda: bloomery.load(tmp_path), CheckpointError),
        (lambda: bloomery.journal(tmp_path), StorageError),
        (lambda: bloomery.recipe("demo", {"train.stps": 1}), ConfigError),
        (lambda: bloomery.samples(bloomery.recipe("demo")), StorageError),
    ):
        with pytest.raises(error):
            call()


def test_settings_take_the_numbers_of_arrays_and_mappings_and_refuse_what_is_no_value() -> None:
    loaded = bloomery.recipe(
        "demo",
        {
            "train.samples": np.int64(500),
            "optim.learning_rate": np.float64(1e-3),
            "train.ramp_up": np.array([4, 4, 20]),
            "data.held_out_datasets": [{"name": "v", "path": Path("a b"), "weight": np.float32(0.5)}],
        },
    ).recipe
    assert (loaded.train.samples, loaded.train.ramp_up) == (500, (4, 4, 20))
    assert loaded.optim.learning_rate == 1e-3
    (dataset,) = loaded.data.held_out_datasets
    assert (dataset.name, dataset.path, dataset.weight) == ("v", "a b", 0.5)
    for value in (None, object(), [None]):
        with pytest.raises(ConfigError, match=r"train\.steps.*\(settings\): is no value of a setting"):
            bloomery.recipe("demo", {"train.steps": value})


def test_numbers_that_make_no_sense_are_refused_with_what_to_give(tmp_path: Path) -> None:
    decoder, usual = torch.nn.Identity(), Sampling()
    for call, remedy in (
        (lambda: bloomery.load(tmp_path, dtype="fp7"), "fp32"),
        (lambda: Sampling(temperature=-1.0), "at least 0"),
        (lambda: Sampling(top_p=0.0), "at most 1"),
        (
            lambda: generate_together(decoder, [[1]], max_new_tokens=0, sampling=usual, ends=()),
            "at least 1",
        ),
    ):
        with pytest.raises(BloomeryError) as refused:
            call()
        assert remedy in refused.value.remedy


def test_a_recipe_whose_settings_do_not_fit_together_is_refused_before_it_is_trained() -> None:
    with pytest.raises(ConfigError, match=r"model\.heads"):
        bloomery.recipe("demo", {"model.hidden": 64, "model.heads": 5, "data.sources": ["python:stdlib"]})


def test_logits_of_rounded_weights_are_fp32_and_take_ids_as_a_list_a_row_or_a_batch() -> None:
    class Decoder(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows[..., None]

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            assert torch.is_inference_mode_enabled()
            return hidden.to(torch.bfloat16) * torch.tensor([1, 2], dtype=torch.bfloat16)

    opened = SimpleNamespace(tokenizer=None, recipe=None, checkpoint=None)
    model = LanguageModel(opened, Decoder())  # type: ignore[arg-type]
    for ids in ([3, 4], torch.tensor([3, 4])):
        row = model.logits(ids)
        assert row.dtype == torch.float32 and row.tolist() == [[3, 6], [4, 8]]
    assert model.logits(torch.tensor([[3, 4]])).tolist() == [[[3, 6], [4, 8]]]


def test_a_recipe_of_peers_is_not_trained_alone(tmp_path: Path) -> None:
    loaded = bloomery.recipe("demo", {"elastic.inner_steps": 10, "data.sources": ["python:stdlib"]})
    with pytest.raises(ConfigError, match="each peer needs an agent"):
        bloomery.fit(loaded, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_journals_columns_have_each_field_of_the_events_that_are_part_of_the_run(tmp_path: Path) -> None:
    rundir = RunDirectory(tmp_path / "run").create()
    begin(rundir, base=None, reason="start")
    begin(rundir, base=(2, 1), reason="rewind")
    with Journal(rundir.journal()) as journal:
        for incarnation, step, loss in ((1, 1, 5.0), (1, 2, 4.0), (1, 3, 9.0), (1, 4, 8.0), (2, 3, 3.0)):
            journal.write("step", incarnation=incarnation, step=step, loss=loss)
        journal.write("guard", incarnation=1, step=3, kind="spike")
        journal.write("guard", incarnation=2, step=3, reason="it rose")
    steps = bloomery.journal(rundir.path)
    assert (steps["step"], steps["loss"], steps["incarnation"]) == ([1, 2, 3], [5.0, 4.0, 3.0], [1, 1, 2])
    guards = bloomery.journal(str(rundir.path), "guard")
    assert (guards["kind"], guards["reason"]) == (["spike", None], [None, "it rose"])
    assert bloomery.journal(rundir.path, "nothing of the kind") == {}


def test_what_is_given_to_load_and_generate_reaches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[dict[str, object]] = []
    drawn: list[dict[str, object]] = []

    class Tokenizer:
        def encode(self, text: str) -> list[int]:
            return [*text.encode()]

        def decode_after(self, ids: list[int], *, before: list[int]) -> str:
            assert before == [7, 97]
            return bytes(ids).decode()

    class Saved:
        recipe, checkpoint = "its recipe", Path("runs/x/checkpoints/step-5")
        tokenizer = Tokenizer()
        bounds = SimpleNamespace(opening=lambda ids: [7, *ids], ends={0})

        def decoder(self, **given: object) -> torch.nn.Module:
            opened.append(given)
            return torch.nn.Identity()

    def open_saved(path: Path, *, fallback: bool) -> Saved:
        opened.append({"path": path, "fallback": fallback})
        return Saved()

    def generate(decoder: object, opening: list[int], **given: object) -> list[int]:
        drawn.append({"opening": opening, **given})
        return [104, 105, 0]

    monkeypatch.setattr("bloomery.evaluate.open_checkpoint.open_saved", open_saved)
    monkeypatch.setattr("bloomery.evaluate.generate.generate", generate)
    model = bloomery.load("runs/x", dtype="bf16", device="meta", fallback=True)
    assert not model.decoder.training
    assert (model.recipe, model.checkpoint) == (Saved.recipe, Saved.checkpoint)
    assert opened[0] == {"path": Path("runs/x"), "fallback": True}
    assert opened[1] == {"device": torch.device("meta"), "dtype": torch.bfloat16}
    assert model.generate("a", max_tokens=9, temperature=0.5, top_k=3, top_p=0.75, seed=4) == "hi"
    sampling = Sampling(temperature=0.5, top_k=3, top_p=0.75, seed=4)
    assert drawn.pop() == {"opening": [7, 97], "max_new_tokens": 9, "sampling": sampling, "ends": {0}}
    bloomery.load("runs/x").generate("a")
    assert opened[-2:] == [
        {"path": Path("runs/x"), "fallback": False},
        {"device": torch.device("cpu"), "dtype": torch.float32},
    ]
    usual = Sampling(temperature=0.8, top_k=0, top_p=1.0, seed=0)
    assert (drawn[0]["max_new_tokens"], drawn[0]["sampling"]) == (200, usual)


def test_a_fit_trains_in_the_directory_given_or_in_that_of_the_recipes_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[tuple[object, ...]] = []

    def train(loaded: object, rundir: RunDirectory, options: StartOptions) -> str:
        started.append((loaded, rundir.path, options.form))
        options.say("not shown")
        return "the outcome"

    monkeypatch.setattr("bloomery.train.loop.train", train)
    loaded = bloomery.recipe("demo", {"run.name": "mine", "data.sources": [Path("a.txt"), "b.txt"]})
    assert loaded.recipe.data.sources == ("a.txt", "b.txt")
    assert bloomery.fit(loaded) == "the outcome" == bloomery.fit(loaded, "elsewhere", progress=False)
    assert started == [(loaded, Path("runs/mine"), "bar"), (loaded, Path("elsewhere"), "short")]
    run = tmp_path / "moved"
    (run / "incarnations").mkdir(parents=True)
    (run / "recipe.toml").write_text(dump_recipe(loaded.recipe))
    for given, path in ((run, run), ("demo", Path("runs/demo"))):
        bloomery.fit(given)
        assert started[-1][1] == path
    bloomery.fit("demo", "elsewhere")
    assert started[-1][1] == Path("elsewhere") and capsys.readouterr().out == ""


def test_a_fit_of_an_offline_recipe_forbids_the_network_before_it_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    monkeypatch.setattr("bloomery.config.environment.go_offline", lambda: done.append("offline"))
    monkeypatch.setattr("bloomery.train.loop.train", lambda *given: done.append("train"))
    bloomery.fit(bloomery.recipe("demo", {"run.offline": True}), "run", progress=False)
    bloomery.fit("demo", "run", progress=False)
    assert done == ["offline", "train", "train"]


def test_a_run_is_found_below_the_home_directory_by_each_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("bloomery.train.loop.train", lambda loaded, rundir, options: rundir.path)
    run = RunDirectory(tmp_path / "run").create()
    assert bloomery.fit(bloomery.recipe("demo"), "~/run", progress=False) == run.path
    assert bloomery.journal("~/run") == {}
    with pytest.raises(BloomeryError, match=f"{run.path}"):
        bloomery.load("~/run")
    with pytest.raises(BloomeryError, match=f"{run.recipe}"):
        bloomery.samples("~/run")


def test_a_model_that_is_loaded_drops_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = SimpleNamespace(
        decoder=lambda **how: torch.nn.Dropout(0.5), tokenizer=None, recipe=None, checkpoint=None
    )
    monkeypatch.setattr("bloomery.evaluate.open_checkpoint.open_saved", lambda path, *, fallback: opened)
    assert bloomery.load("run").decoder(torch.ones(64)).tolist() == [1.0] * 64
