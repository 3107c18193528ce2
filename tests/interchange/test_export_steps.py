"""An export and an import, step by step: what is written, counted, checked and refused, by value."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models

from bloomery.config.model import ModelSection
from bloomery.data.tokenizer import load_tokenizer
from bloomery.errors import CheckpointError, DataError, StorageError
from bloomery.events.run_directory import RunDirectory
from bloomery.interchange import generation_files, huggingface
from bloomery.interchange.generation_files import (
    TextBounds,
    _begins,
    export_generation_files,
    generation_files_of,
    keep_generation_files,
    text_bounds,
    token_ids,
)
from bloomery.interchange.huggingface import Exported, export, fill
from bloomery.interchange.logits_check import LogitsCheck
from bloomery.model.decoder import build
from bloomery.model.logical_parameters import logical_parameters
from bloomery.model.shape import resolve

SECTION = ModelSection(
    layers=1, hidden=8, heads=2, norm="layernorm", position="learned", activation="gelu", bias=True, tied=True
)


def test_an_export_counts_what_it_reads_and_says_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = resolve(SECTION, vocabulary=20, sequence_length=6)
    decoder = build(SECTION, vocabulary=20, sequence_length=6)
    tensors = {logical.name: torch.full(logical.shape, 0.5) for logical in logical_parameters(decoder)}
    asked: list[object] = []

    def read_model(checkpoint: Path, *, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        asked.append(("read", checkpoint))
        return ((name, tensors[name]) for name in names)

    def compared(*given: object, **how: object) -> LogitsCheck:
        asked.append(("compared", given, how))
        return LogitsCheck(largest=0.25, tolerance=0.5, where="", way="blocks")

    def describe(model: object, **how: object) -> dict[str, Any]:
        asked.append(("described", how))
        return {"bos_token_id": 0, "eos_token_id": None}

    monkeypatch.setattr(huggingface, "read_model", read_model)
    monkeypatch.setattr(huggingface, "check_logits", compared)
    tokenizer = tmp_path / "given.json"
    engine = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    engine.add_special_tokens(["<e>"])
    engine.save(str(tokenizer))
    content = json.loads(tokenizer.read_text())
    told: list[tuple[object, ...]] = []
    done = export(
        model,
        tmp_path / "checkpoint",
        tmp_path / "out",
        tokenizer=tokenizer,
        end_of_document="<e>",
        dtype="bf16",
        describe=describe,
        way="whole",
        progress=lambda *what: told.append(what),
    )
    count = sum(tensor.numel() for tensor in tensors.values())
    assert done == Exported(
        directory=tmp_path / "out", family="gpt2", parameters=count, largest_difference=0.25, tolerance=0.5
    )
    assert asked == [
        ("read", tmp_path / "checkpoint"),
        ("described", {"family": "gpt2", "dtype": "bfloat16", "end_of_document": 2}),
        (
            "compared",
            (model, tmp_path / "checkpoint", tmp_path / "out.partial"),
            {"dtype": torch.bfloat16, "way": "whole"},
        ),
    ]
    assert told[-1] == ("exporting", 4 * count, 4 * count, "bytes"), "fp32 is read, whatever is written"
    out = tmp_path / "out"
    assert json.loads((out / "tokenizer_config.json").read_text()) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<e>",
        "eos_token": "<e>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 6,
    }
    assert json.loads((out / "tokenizer.json").read_text()) == content
    assert json.loads((out / "config.json").read_text()) == {"bos_token_id": 0, "eos_token_id": None}
    assert json.loads((out / "generation_config.json").read_text()) == {"bos_token_id": 0}
    assert (out / "model.safetensors").stat().st_size > 2 * count
    with pytest.raises(DataError, match="has no token '<other>'") as refused:
        export(model, tmp_path, tmp_path / "again", tokenizer=tokenizer, end_of_document="<other>")
    assert "data.end_of_document_token" in refused.value.remedy and not (tmp_path / "again").exists()


@pytest.mark.parametrize("kind", ["unigram", "moved"])
def test_the_end_of_a_document_has_the_id_that_the_run_was_trained_with(tmp_path: Path, kind: str) -> None:
    path, model = tmp_path / "given.json", resolve(SECTION, vocabulary=20, sequence_length=6)
    if kind == "unigram":
        scores = [("<u>", 0.0), ("a", -1.5), ("b", -2.5), ("<e>", -3.2)]
        Tokenizer(models.Unigram(scores, unk_id=0)).save(str(path))
    else:
        engine = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2}, []))
        engine.add_special_tokens(["<e>"])
        content = json.loads(engine.to_str())
        content["added_tokens"][0]["id"] = 9  # which tokenizers does not follow
        path.write_text(json.dumps(content))
    assert load_tokenizer(path, end_of_document="<e>").eod == 3
    assert huggingface._write_tokenizer(tmp_path, path, "<e>", model) == 3


def test_a_sentencepiece_model_is_exported_as_one_whatever_its_file_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pieces.model").write_bytes(b"\n\x0epieces")
    monkeypatch.setattr(huggingface, "export_sentencepiece_model", lambda *given: given)
    model = resolve(SECTION, vocabulary=20, sequence_length=6)
    given = tmp_path / "out", tmp_path / "pieces.model", "<e>"
    written: object = huggingface._write_tokenizer(*given, model)
    assert written == given


def test_an_export_that_cannot_get_its_name_says_where_and_lists_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, published = resolve(SECTION, vocabulary=20, sequence_length=6), list[set[str]]()
    decoder = build(SECTION, vocabulary=20, sequence_length=6)
    tensors = {logical.name: torch.full(logical.shape, 0.5) for logical in logical_parameters(decoder)}

    def refused(partial: Path, directory: Path) -> None:
        published.append({path.name for path in partial.iterdir()})
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(huggingface, "read_model", lambda checkpoint, names: ((n, tensors[n]) for n in names))
    equal = LogitsCheck(largest=0.0, tolerance=0.5, where="", way="blocks")
    monkeypatch.setattr(huggingface, "check_logits", lambda *_, **__: equal)
    monkeypatch.setattr(huggingface.durable, "publish", refused)
    with pytest.raises(StorageError, match=f"Exporting a model failed at {tmp_path / 'out'}"):
        export(model, tmp_path / "checkpoint", tmp_path / "out")
    names = {"config.json", "generation_config.json", "model.safetensors", "checksums.xxh128"}
    assert published == [names] and list(tmp_path.iterdir()) == []


def test_a_model_without_a_first_token_begins_no_text_with_one(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for number, bos in enumerate((None, 10, -1)):
        (model / "config.json").write_text(json.dumps({"bos_token_id": bos, "eos_token_id": [3, None]}))
        rundir = RunDirectory(tmp_path / str(number)).create()
        keep_generation_files(
            model, rundir, tokenizer=tmp_path / "tokenizer.model", end_of_document=7, vocabulary=10
        )
        bounds = text_bounds(generation_files_of(rundir), end_of_document=7)
        assert bounds == TextBounds(begins=(), empty=7, ends=frozenset({3, 7}))


def test_a_model_is_filled_with_exactly_its_own_tensors() -> None:
    decoder = build(SECTION, vocabulary=20, sequence_length=6)
    tensors = [(logical.name, torch.full(logical.shape, 0.5)) for logical in logical_parameters(decoder)]
    fill(decoder, tensors)
    assert all(bool((logical.tensor == 0.5).all()) for logical in logical_parameters(decoder))
    name, first = tensors[0]
    for given, said in (
        ([("other", first)], "The tensor other does not belong to this model"),
        ([*tensors, tensors[0]], f"The tensor {name} does not belong to this model, or comes twice"),
        ([(name, first[:-1])], rf"{name} is \(19, 8\), but the model's is \(20, 8\)"),
        (tensors[1:], rf"1 tensors are missing, {name} among them"),
        (tensors[2:], "2 tensors are missing"),
    ):
        with pytest.raises(CheckpointError, match=said) as refused:
            fill(decoder, given)
        assert "the recipe and the weights are of the same run" in refused.value.remedy


KEPT = {
    "config.json": '{"bos_token_id": 2, "eos_token_id": null, "pad_token_id": 4, "other": 5}',
    "generation_config.json": '{"temperature": 1}',
    "tokenizer_config.json": "{}",
    "special_tokens_map.json": "{}",
    "chat_template.jinja": "not JSON",
    "chat_template.json": "{}",
}


def test_all_files_of_generation_are_kept_as_they_are_and_given_back_but_for_ours(
    tmp_path: Path,
) -> None:
    rundir = RunDirectory(tmp_path / "run").create()
    model, tokenizer = tmp_path / "model", tmp_path / "tokenizer.model"
    (model / "additional_chat_templates").mkdir(parents=True)
    for name in ("tools.jinja", "notes.txt"):
        (model / "additional_chat_templates" / name).write_text(name)
    for name, content in {**KEPT, "README.md": "#"}.items():
        (model / name).write_text(content)
    assert generation_files_of(rundir) is None
    keep_generation_files(model, rundir, tokenizer=tokenizer, end_of_document=7, vocabulary=10)
    kept = generation_files_of(rundir)
    assert kept == rundir.data / "transformers"
    files = {str(path.relative_to(kept)): path.read_text() for path in kept.rglob("*") if path.is_file()}
    bounds = files.pop("bounds.json")
    assert files == {**KEPT, "additional_chat_templates/tools.jinja": "tools.jinja"}
    assert json.loads(bounds) == {"begins": [2], "empty": 2, "ends": [7]}
    assert text_bounds(kept, end_of_document=9) == TextBounds(begins=(2,), empty=2, ends=frozenset({7}))
    assert token_ids(kept) == {"bos_token_id": 2, "eos_token_id": None, "pad_token_id": 4}
    out = tmp_path / "out"
    out.mkdir()
    (out / "generation_config.json").write_text("written before")
    export_generation_files(kept, out)
    given = {str(path.relative_to(out)): path.read_text() for path in out.rglob("*") if path.is_file()}
    assert given == {name: content for name, content in files.items() if name != "config.json"}
    assert _begins(model, tokenizer, None) == []
    for name in ("chat_template.json", "special_tokens_map.json"):
        second = RunDirectory(tmp_path / name).create()
        (model / name).write_text("{")
        with pytest.raises(CheckpointError, match=f"{name} is not JSON"):
            keep_generation_files(model, second, tokenizer=tokenizer, end_of_document=7, vocabulary=10)
        (model / name).write_text("{}")


@pytest.mark.parametrize(
    "content",
    [
        {"begins": [], "empty": 0, "ends": [-1]},
        {"begins": [-1], "empty": 0, "ends": [1]},
        {"begins": [], "empty": -1, "ends": [1]},
        {"begins": ["a"], "empty": 0, "ends": [1]},
        {"begins": [], "empty": "0", "ends": [1]},
    ],
)
def test_bounds_that_are_no_ids_are_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    (tmp_path / "bounds.json").write_text(json.dumps(content))
    with pytest.raises(
        CheckpointError, match=r"(?s)does not say how texts begin and end.*Import the model again"
    ):
        text_bounds(tmp_path, end_of_document=0)
    good = {"begins": [0], "empty": 0, "ends": [0, 3]}
    (tmp_path / "bounds.json").write_text(json.dumps(good))
    assert text_bounds(tmp_path, end_of_document=9).ends == {0, 3}


def test_a_sentencepiece_model_names_the_first_class_that_gives_its_ids_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out.partial"
    out.mkdir()
    tried: list[dict[str, Any]] = []
    pieces = SimpleNamespace(eod=5, save=lambda path: path.write_bytes(b"pieces"))
    monkeypatch.setattr(generation_files, "load_tokenizer", lambda path, *, end_of_document: pieces)
    answers: list[bool] = []

    def gives(export: Path, given: object) -> bool:
        tried.append(json.loads((export / "tokenizer_config.json").read_text()))
        return answers.pop(0)

    monkeypatch.setattr(generation_files, "_gives_equal_ids", gives)
    for said, legacy in (([True], [False]), ([False, True], [False, True])):
        answers[:], tried[:] = said, []
        assert generation_files.export_sentencepiece_model(out, tmp_path / "t.model", "<e>") == 5
        assert [content["legacy"] for content in tried] == legacy
        assert json.loads((out / "tokenizer_config.json").read_text()) == {
            "tokenizer_class": "LlamaTokenizer",
            "add_bos_token": False,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "bos_token": "<e>",
            "eos_token": "<e>",
            "legacy": legacy[-1],
        }
    assert (out / "tokenizer.model").read_bytes() == b"pieces" and not caplog.text
    answers[:] = [False, False]
    assert generation_files.export_sentencepiece_model(out, tmp_path / "t.model", "<e>") == 5
    assert [path.name for path in out.iterdir()] == ["tokenizer.model"]
    assert "so out names no class" in caplog.text


class Encoding:
    """A tokenizer of transformers that gives these ids of each text."""

    def __init__(self, ids: dict[str, list[int]], *, begins: list[int]) -> None:
        self._ids, self._begins = ids, begins

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Any:
        return SimpleNamespace(input_ids=[*(self._begins if add_special_tokens else []), *self._ids[text]])


def test_a_class_of_transformers_is_asked_offline_and_must_give_equal_ids_for_every_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {text: [len(text), number] for number, text in enumerate(generation_files.HARD_TEXTS)}
    pieces: Any = SimpleNamespace(encode=own.__getitem__)
    asked: list[Any] = []
    theirs: list[Any] = []

    def opened(path: Path, **how: Any) -> Any:
        asked.append((path, how))
        if isinstance(theirs[0], Exception):
            raise theirs[0]
        return theirs[0]

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", opened)
    first, *_, last = own
    for given, is_equal in (
        (Encoding(own, begins=[1]), True),
        (Encoding({**own, last: [9]}, begins=[]), False),
        (Encoding({**own, first: [9]}, begins=[]), False),
        (ValueError("no such class"), False),
    ):
        theirs[:] = [given]
        assert generation_files._gives_equal_ids(tmp_path, pieces) is is_equal
    theirs[:] = [Encoding({"a": [5]}, begins=[1, 2])]
    assert _begins(tmp_path, tmp_path / "tokenizer.json", None) == [1, 2]
    assert asked == [(tmp_path, {"local_files_only": True, "trust_remote_code": False})] * 5
