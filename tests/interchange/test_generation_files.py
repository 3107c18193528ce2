"""How an imported model is spoken to survives import and export, and `generate` begins and ends so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from bloomery.cli import ckpt_export
from bloomery.errors import CheckpointError
from bloomery.evaluate.generate import chat_opening
from bloomery.evaluate.open_checkpoint import open_saved
from bloomery.events.run_directory import RunDirectory
from bloomery.interchange.generation_files import (
    _begins,
    generation_files_of,
    keep_generation_files,
    text_bounds,
)

VOCABULARY = {"<s>": 0, "</s>": 1, "<pad>": 2, "<eot>": 3, "a": 4, "def": 5, "main": 6, "<unk>": 7}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<eot>{% endfor %}"


def their_directory(
    directory: Path, *, adds_bos: bool, settings: dict[str, Any], template: str = "chat_template.jinja"
) -> Path:
    """A small Llama with a tokenizer whose tokenizer.json adds BOS or not, as `settings` may change."""
    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=0,
        eos_token_id=[1, 3],
        pad_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.temperature = 0.7
    model.generation_config.do_sample = True
    model.save_pretrained(directory)
    engine = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    engine.add_special_tokens(["<s>", "</s>", "<pad>", "<eot>"])
    if adds_bos:
        engine.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    engine.save(str(directory / "tokenizer.json"))
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps({**content, **settings}))
    (directory / template).write_text(TEMPLATE)
    return directory


def run_of(theirs: Path, tmp_path: Path) -> Path:
    assert ckpt_export.import_([str(theirs), str(tmp_path / "run")]) == 0
    return tmp_path / "run"


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("settings", [{}, {"add_bos_token": True}, {"add_bos_token": False}], ids=str)
def test_generate_begins_as_the_tokenizer_does(
    adds_bos: bool, settings: dict[str, Any], tmp_path: Path
) -> None:
    theirs = their_directory(tmp_path / "theirs", adds_bos=adds_bos, settings=settings)
    saved = open_saved(run_of(theirs, tmp_path))
    their = transformers.AutoTokenizer.from_pretrained(theirs, local_files_only=True)
    for text in ("def main", "a", ""):
        # Where nothing is there at all, the generation of transformers begins with BOS.
        assert saved.bounds.opening(saved.tokenizer.encode(text)) == (their(text).input_ids or [0])
    assert saved.bounds.ends == {1, 3}


@pytest.mark.parametrize("adds_bos", [False, True])
def test_another_tokenizer_than_the_models_says_itself_how_texts_begin(
    adds_bos: bool, tmp_path: Path
) -> None:
    theirs = their_directory(tmp_path / "theirs", adds_bos=not adds_bos, settings={})
    other = their_directory(tmp_path / "other", adds_bos=adds_bos, settings={}) / "tokenizer.json"
    rundir = RunDirectory(tmp_path / "run").create()
    keep_generation_files(theirs, rundir, tokenizer=other, end_of_document=1, vocabulary=8)
    bounds = text_bounds(generation_files_of(rundir), end_of_document=1)
    assert bounds.begins == ((0,) if adds_bos else ())


def test_ids_that_the_model_has_not_end_no_text_and_keep_no_run_from_generating(tmp_path: Path) -> None:
    theirs = their_directory(tmp_path / "theirs", adds_bos=True, settings={})
    (theirs / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, 3, 8]}))
    rundir = RunDirectory(tmp_path / "run").create()
    tokenizer = theirs / "tokenizer.json"
    keep_generation_files(theirs, rundir, tokenizer=tokenizer, end_of_document=1, vocabulary=8)
    assert text_bounds(generation_files_of(rundir), end_of_document=1).ends == {1, 3}


def test_a_model_trained_here_begins_and_ends_with_the_end_of_document(tmp_path: Path) -> None:
    bounds = text_bounds(None, end_of_document=7)
    assert (bounds.opening([5]), bounds.opening([]), bounds.ends) == ([7, 5], [7], {7})
    assert generation_files_of(RunDirectory(tmp_path)) is None


def test_special_tokens_template_and_generation_survive_import_and_export(tmp_path: Path) -> None:
    theirs = their_directory(tmp_path / "theirs", adds_bos=True, settings={})
    run = run_of(theirs, tmp_path)
    assert ckpt_export.export([str(run), str(tmp_path / "again")]) == 0
    again = tmp_path / "again"
    for name in ("generation_config.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (again / name).read_bytes() == (theirs / name).read_bytes(), name
    one, other = (json.loads((path / "config.json").read_text()) for path in (theirs, again))
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert other[key] == one[key], key
    tokenizers = [transformers.AutoTokenizer.from_pretrained(path) for path in (theirs, again)]
    messages = [{"role": "user", "content": "def"}]
    chats = [each.apply_chat_template(messages, tokenize=False) for each in tokenizers]
    assert chats == ["def<eot>", "def<eot>"]
    assert [each("def main").input_ids for each in tokenizers] == [[0, 5, 6], [0, 5, 6]]


@pytest.mark.parametrize("named", ["chat_template.jinja", "tokenizer_config.json", "several"])
def test_a_chat_is_opened_with_the_ids_of_transformers(tmp_path: Path, named: str) -> None:
    theirs = their_directory(tmp_path / "theirs", adds_bos=True, settings={})
    template = "{{ bos_token }}" + TEMPLATE + "{% if add_generation_prompt %}main{% endif %}"
    (theirs / "chat_template.jinja").write_text(template)
    if named != "chat_template.jinja":
        (theirs / "chat_template.jinja").unlink()
        content = json.loads((theirs / "tokenizer_config.json").read_text())
        by_name = [{"name": "tool_use", "template": "main"}, {"name": "default", "template": template}]
        content["chat_template"] = by_name if named == "several" else template
        (theirs / "tokenizer_config.json").write_text(json.dumps(content))
    saved = open_saved(run_of(theirs, tmp_path))
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "def main"}]
    their = transformers.AutoTokenizer.from_pretrained(theirs, local_files_only=True)
    expected = their.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert chat_opening(saved, messages) == expected == [0, 4, 3, 5, 6, 3, 6]


def test_an_exported_import_can_be_imported_again(tmp_path: Path) -> None:
    run = run_of(their_directory(tmp_path / "theirs", adds_bos=True, settings={}), tmp_path)
    assert ckpt_export.export([str(run), str(tmp_path / "again")]) == 0
    assert ckpt_export.import_([str(tmp_path / "again"), str(tmp_path / "second")]) == 0
    assert open_saved(tmp_path / "second").bounds == open_saved(run).bounds


@pytest.mark.parametrize(
    "content",
    ["{}", '{"begins": 1, "empty": 0, "ends": [0]}', '{"begins": [], "empty": null, "ends": ["a"]}'],
)
def test_bounds_that_are_damaged_are_refused_by_their_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "bounds.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"bounds\.json does not say how texts begin and end"):
        text_bounds(tmp_path, end_of_document=0)


def test_the_settings_of_generation_say_where_texts_end_before_those_of_the_model(tmp_path: Path) -> None:
    theirs = their_directory(tmp_path / "theirs", adds_bos=False, settings={})
    config = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps({**config, "eos_token_id": 1, "bos_token_id": 4}))
    rundir = RunDirectory(tmp_path / "run").create()
    keep_generation_files(
        theirs, rundir, tokenizer=theirs / "tokenizer.json", end_of_document=1, vocabulary=8
    )
    bounds = text_bounds(generation_files_of(rundir), end_of_document=1)
    assert (bounds.empty, bounds.ends) == (0, {1, 3})


def test_a_tokenizer_that_pads_its_texts_begins_them_like_one_that_does_not(tmp_path: Path) -> None:
    other = their_directory(tmp_path / "other", adds_bos=True, settings={}) / "tokenizer.json"
    engine = Tokenizer.from_file(str(other))
    engine.enable_padding(length=8, pad_id=2, pad_token="<pad>")
    engine.save(str(other))
    assert _begins(tmp_path / "model", other, None) == [0]


def test_a_tokenizer_in_a_file_of_another_name_says_itself_how_texts_begin(tmp_path: Path) -> None:
    other = their_directory(tmp_path / "other", adds_bos=False, settings={}) / "tokenizer.json"
    assert _begins(tmp_path / "model", other.rename(tmp_path / "mine.json"), 0) == []


@pytest.mark.parametrize(("bos", "expected"), [(None, []), (0, [0]), (3, [3])])
def test_a_sentencepiece_model_begins_texts_with_what_the_model_names(
    bos: int | None, expected: list[int], tmp_path: Path
) -> None:
    (tmp_path / "pieces.model").write_bytes(b"\n\x0epieces")
    assert _begins(tmp_path / "model", tmp_path / "pieces.model", bos) == expected
