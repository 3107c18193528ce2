"""`bloomery data report` of recipes and of runs, and what `data merge` and `verify` hand on and refuse."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.cli.test_data_options import pair
from tests.cli.test_data_report import RECIPE

from bloomery.cli import data_duplicates, data_pairs
from bloomery.cli.data import run
from bloomery.config.load import load_recipe
from bloomery.data.stream import DatasetRow
from bloomery.errors import ConfigError, DataError, UsageError
from bloomery.events.run_directory import RunDirectory


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe of two groups of data, of which the first is wanted three times as much."""
    text = RECIPE.replace("{order}", "bloomery")
    for name, group, weight in (("prose", "text", 3), ("python", "code", 1)):
        pair(tmp_path / name, *([7] * 20 for _ in range(50)))
        text += f'[[data.datasets]]\nname = "{name}"\nweight = {weight}.0\n'
        text += f'path = "{tmp_path / name}"\ngroup = "{group}"\n'
    path = tmp_path / "mixed.toml"
    path.write_text(text)
    return path


def told(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    capsys.readouterr()
    assert run([*map(str, words), "--json"]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


def test_progress_is_shown_unless_json_is_wanted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bars, asked = list[bool](), list[Any]()

    @contextmanager
    def bar(*, shown: bool) -> Iterator[str]:
        bars.append(shown)
        yield "progress"

    merged = SimpleNamespace(document_count=1, token_count=2, dtype=np.dtype("uint16"))
    checked = SimpleNamespace(findings=[], skipped=[], documents=1, tokens=2, vocabulary_size=None)

    def noted(result: Any) -> Any:
        return lambda *given, progress=None, **more: asked.append(progress) or result

    monkeypatch.setattr(data_pairs, "data_bar", bar)
    monkeypatch.setattr("bloomery.data.pairs.merge_pairs", noted(merged))
    monkeypatch.setattr("bloomery.data.pairs.verify_pair", noted(checked))
    monkeypatch.setattr("bloomery.data.corpus_parts.join_parts", noted([]))
    for words in (["merge", "a", "--out", "b"], ["merge", "--parts", "--to", "b"], ["verify", "a"]):
        assert run(words) == 0 == run([*words, "--json"])
    assert bars == [True, False] * 3 and asked == ["progress"] * 6


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ((), "Name pairs, or give --parts to join parts."),
        (("--parts", "a"), "Give --parts and --to alone, or name pairs without --parts."),
    ],
)
def test_a_merge_of_nothing_or_of_both_says_how_to_name_pairs(words: tuple[str, ...], remedy: str) -> None:
    with pytest.raises(UsageError) as refused:
        run(["merge", *words, "--to", "new"])
    assert refused.value.remedy == remedy


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "a", "--peek", "-1"),
        ("verify", "a", "--vocabulary", "0"),
        ("report", "demo", "--png", "no/such/directory/x.png"),
    ],
)
def test_numbers_and_pictures_that_cannot_be_are_refused_at_once(words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(list(words))


def test_a_report_shows_data_sets_their_groups_and_where_it_was_drawn(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(
        data_pairs, "_draw", lambda rows, groups, path: drawn.append((len(rows), len(groups), path))
    )
    picture = tmp_path / "x.png"
    assert run(["report", str(recipe), "--png", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1,000 samples of 8 tokens: 8,000 tokens"
    heads = [line.split()[0] for line in lines if line.split()[-1:] == ["ends"]]
    assert heads == ["dataset", "group"] and lines[-1] == f"Drawn into {picture}."
    facts = told(capsys, "report", recipe, "--png", picture)
    assert [row["wanted"] for row in facts["datasets"]] == [0.75, 0.25]
    assert drawn == [(2, 2, picture)] * 2
    with pytest.raises(ConfigError, match=r"model\.heads"):
        run(["report", str(recipe), "model.heads=7"])


def test_a_report_of_a_run_counts_what_it_has_used_with_the_settings_given(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bloomery.data import prepare
    from bloomery.train import data_stream

    rundir = RunDirectory(tmp_path / "run").create()
    rundir.recipe.write_text(recipe.read_text())
    asked: list[Any] = []
    forecast, prefixes = data_stream.data_forecast, prepare.dataset_prefixes
    monkeypatch.setattr(
        data_stream,
        "data_forecast",
        lambda recipe, stream, run: asked.append(run) or forecast(recipe, stream, run),
    )
    monkeypatch.setattr(
        prepare, "dataset_prefixes", lambda data, place: asked.append(place) or prefixes(data, place)
    )
    assert told(capsys, "report", rundir.path, "train.samples=2000")["samples"] == 2000
    assert asked == [rundir.data, rundir.path]
    told(capsys, "report", recipe)
    assert asked[3] is None
    monkeypatch.setattr(
        data_duplicates, "report_overlap", lambda loaded, run, *, as_json: asked.append((run, as_json)) or 1
    )
    assert run(["report", str(rundir.path), "--overlap"]) == 1 and asked[-1] == (rundir.path, False)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError):
        run(["report", str(empty)])


def test_text_that_a_run_has_tokenised_is_one_data_set_without_a_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rundir = RunDirectory(tmp_path / "run").create()
    text = RECIPE.replace("{order}", "bloomery").replace(
        'tokenizer = "tokenizer.json"', 'sources = ["*.txt"]'
    )
    rundir.recipe.write_text(text)
    rundir.data.mkdir(exist_ok=True)
    pair(rundir.data / "train", *([7] * 20 for _ in range(50)))
    facts = told(capsys, "report", rundir.path)
    (row,) = facts["datasets"]
    assert (row["name"], row["group"], row["tokens"], facts["groups"]) == ("train", "", 1_000, [])
    with pytest.raises(DataError, match="not tokenised yet") as refused:
        run(["report", str(rundir.recipe)])
    assert "the directory of a run that was started" in refused.value.remedy


def test_names_and_groups_begin_below_their_headings() -> None:
    rows = [
        DatasetRow(
            name=name, group=group, tokens=1, wanted=0.5, delivered=0.5, epochs=1.0, first_epoch_step=None
        )
        for name, group in (("a", "x"), ("long name", "a group"))
    ]
    head, _, first, _ = data_pairs._table(rows, first="dataset").splitlines()[-4:]
    assert first.index("x") == head.index("group") and first.startswith("a ")


def test_texts_are_those_of_a_run_or_of_a_recipe_and_held_out_ones_are_needed_to_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    prepared = SimpleNamespace(train=[SimpleNamespace(name="own"), SimpleNamespace(name="other")])
    held_out = [SimpleNamespace(name="kept", documents="documents")]
    for name in ("prepare", "prepared_of_run"):
        monkeypatch.setattr(
            f"bloomery.data.prepare.{name}", lambda data, place: asked.append(place) or prepared
        )
    monkeypatch.setattr("bloomery.train.data_stream.training_documents", lambda data, train: ["a", "b"])
    monkeypatch.setattr("bloomery.train.data_stream.held_out_documents", lambda data, found: held_out)
    pairs = ["data.sources=[]", "data.tokenizer=t.json", "data.datasets=[{name='own', path='x'}]"]
    loaded, sources = load_recipe("demo", pairs), load_recipe("demo")
    found = {"own": "a", "other": "b"}, {"kept": "documents"}, prepared
    assert data_duplicates.texts_of(loaded, None) == found == data_duplicates.texts_of(sources, tmp_path)
    assert asked == [Path(tempfile.gettempdir()) / "bloomery-data", RunDirectory(tmp_path).data]
    with pytest.raises(DataError, match="not tokenised yet"):
        data_duplicates.texts_of(sources, None)
    held_out.clear()
    with pytest.raises(DataError, match="no held-out text to compare with"):
        data_duplicates.texts_of(loaded, None)
    assert data_duplicates.texts_of(loaded, None, needs_held_out=False) == (found[0], {}, prepared)
