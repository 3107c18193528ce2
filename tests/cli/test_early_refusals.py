"""Missing text, tokenizers and packages, and fixed settings, are told before anything slow is done."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.cli import early_refusals
from bloomery.cli.early_refusals import refuse_early, refuse_missing
from bloomery.config.data import DataSection, DatasetSection
from bloomery.config.load import LoadedRecipe, dump_recipe, load_recipe
from bloomery.errors import BloomeryError, ConfigError, DataError, StorageError
from bloomery.events.run_directory import RunDirectory


def data(*sources: Path, **settings: Any) -> DataSection:
    return DataSection(sequence_length=8, sources=tuple(map(str, sources)), **settings)


def lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_json_lines_without_one_text_are_told_with_the_first_of_them(tmp_path: Path) -> None:
    bad = lines(tmp_path / "bad.jsonl", {"content": "x"}, {"body": "y"})
    with pytest.raises(
        DataError, match=r"no document that can be used, and 2 that cannot\. The first: .*bad"
    ):
        refuse_missing(data(bad, bad_documents="skip"))
    with pytest.raises(DataError, match="bad"):
        refuse_missing(data(bad, bad_documents="fail"))
    refuse_missing(data(bad, text_field="body", bad_documents="skip"))
    with pytest.raises(DataError):
        refuse_missing(data(bad, text_field="body", bad_documents="fail"))
    good = lines(tmp_path / "good.jsonl", {"text": "Once upon a time."})
    refuse_missing(data(bad, good, bad_documents="skip"))
    text = tmp_path / "more.txt"
    text.write_text("Once upon a time.")
    refuse_missing(data(bad, text, bad_documents="skip"))
    with pytest.raises(DataError, match=r"0 that cannot\.\n"):
        refuse_missing(data(lines(tmp_path / "empty.jsonl"), bad_documents="skip"))


def test_a_prompt_field_that_no_record_has_and_lines_beyond_the_longest_are_told(tmp_path: Path) -> None:
    asked = lines(tmp_path / "asked.jsonl", {"text": "an answer", "question": "a question"})
    refuse_missing(data(asked, prompt_field="question", bad_documents="skip"))
    with pytest.raises(DataError):
        refuse_missing(data(asked, prompt_field="request", bad_documents="skip"))
    long = lines(tmp_path / "long.jsonl", {"text": "x" * (2 << 20)})
    refuse_missing(data(long, bad_documents="skip"))
    with pytest.raises(DataError):
        refuse_missing(data(long, longest_line_mib=1, bad_documents="skip"))


def test_a_small_tokenizer_is_read_and_a_large_one_only_when_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[Path, str]] = []
    monkeypatch.setattr(
        "bloomery.data.tokenizer.load_tokenizer",
        lambda path, *, end_of_document: read.append((path, end_of_document)),
    )
    monkeypatch.setattr("bloomery.data.tokenizer.find_tokenizer", Path)
    for size in (early_refusals._QUICKLY_READ, early_refusals._QUICKLY_READ + 1):
        file = tmp_path / f"{size}.json"
        with file.open("wb") as sparse:
            sparse.truncate(size)
        refuse_missing(DataSection(sequence_length=8, tokenizer=str(file), end_of_document_token="<e>"))
    assert read == [(tmp_path / f"{early_refusals._QUICKLY_READ}.json", "<e>")]
    refuse_missing(DataSection(sequence_length=8, tokenizer="hf:somebody/some"))


def test_a_pair_below_the_home_directory_is_found_by_its_short_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    pair = DataSection(sequence_length=8, datasets=(DatasetSection(name="x", path="~/pair"),))
    with pytest.raises(DataError, match=f"Cannot read {tmp_path}/pair.idx"):
        refuse_missing(pair)
    for ending in ("idx", "bin"):
        (tmp_path / f"pair.{ending}").touch()
    refuse_missing(pair)


def started(tmp_path: Path, *overrides: str) -> tuple[LoadedRecipe, Path]:
    (tmp_path / "text.txt").write_text("Once upon a time.")
    given = ["run.name=x", f"data.sources=['{tmp_path}/text.txt']", *overrides]
    return load_recipe("demo", given), tmp_path / "run"


def test_a_start_is_refused_where_a_fixed_setting_is_another_than_the_runs(tmp_path: Path) -> None:
    loaded, run = started(tmp_path)
    rundir = RunDirectory(run).create()
    rundir.recipe.write_text(dump_recipe(loaded.recipe))
    refuse_early(*started(tmp_path, "optim.learning_rate=1e-5"))
    with pytest.raises(ConfigError) as refused:
        refuse_early(*started(tmp_path, "model.layers=3"))
    (mistake,) = refused.value.mistakes
    assert (mistake.key, mistake.source) == ("model.layers", "command line")
    assert f"{loaded.recipe.model.layers}" in mistake.problem and mistake.value == 3
    rundir.recipe.write_text("no TOML")
    refuse_early(*started(tmp_path, "model.layers=3"))  # its holder mends it, or says more


def test_a_start_is_refused_without_its_packages_its_directory_or_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, run = started(tmp_path, "log.trackers=['mlflow']")
    asked: list[tuple[str, ...]] = []

    def refuse(trackers: tuple[str, ...]) -> None:
        asked.append(trackers)
        raise BloomeryError("there is no mlflow")

    with monkeypatch.context() as lacking:
        lacking.setattr(early_refusals, "refuse_missing_packages", refuse)
        with pytest.raises(BloomeryError, match="no mlflow"):
            refuse_early(loaded, run)
    assert asked == [("mlflow",)]
    loaded, _ = started(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file is a file"):
        refuse_early(loaded, tmp_path / "file" / "run")
    with monkeypatch.context() as others:
        others.setattr("os.access", lambda path, rights: path != tmp_path)
        with pytest.raises(StorageError, match="is not yours to write to"):
            refuse_early(loaded, run)
    with monkeypatch.context() as mounted:
        mounted.setattr("os.statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY | os.ST_NODEV))
        with pytest.raises(StorageError, match="is mounted read-only"):
            refuse_early(loaded, run)
    (tmp_path / "text.txt").unlink()
    with pytest.raises(DataError, match=r"text\.txt"):
        refuse_early(loaded, run)
    assert not run.exists(), "a look makes nothing"
    (run / "data").mkdir(parents=True)
    (run / "data" / "tokenizer.json").touch()
    refuse_early(loaded, run)  # the start decides whether the run needs its text


@pytest.mark.parametrize(
    ("changes", "reads"),
    [((), 0), (("train.ramp_up=[8, 8, 64]",), 1), (("train.micro_batch_changes=[[64, 2]]",), 1)],
)
def test_a_start_reads_how_far_the_run_is_only_where_its_batches_change(
    changes: tuple[str, ...], reads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(early_refusals, "samples_consumed", lambda rundir: asked.append(rundir.path) or 64)
    batches = ("train.global_batch=16", "train.micro_batch=1", "train.ramp_up=[]", *changes)
    loaded = load_recipe("demo", ["optim.name=adamw", *batches])
    early_refusals.check_start(loaded, tmp_path, data_degree=8)
    assert asked == [tmp_path] * reads
    with pytest.raises(ConfigError):
        early_refusals.check_start(loaded, tmp_path, data_degree=48)
