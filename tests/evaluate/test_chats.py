"""How a conversation becomes the ids that a model goes on from, by the template that its run keeps."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from bloomery.errors import CheckpointError
from bloomery.evaluate.generate import chat_opening
from bloomery.events.run_directory import RunDirectory

VOCABULARY = {"<s>": 0, "</s>": 1, "<pad>": 2, "<unk>": 3, "a": 4, "b": 5, "go": 6}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": {"content": "<unk>"}}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"
MESSAGES = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "b"}]


def saved_in(directory: Path, files: dict[str, Any], *, tokenizer: str = "tokenizer.json") -> Any:
    """A run that keeps these generation files, as texts or as JSON."""
    rundir = RunDirectory(directory / "run").create()
    companions = rundir.data / "transformers"
    companions.mkdir(parents=True)
    for name, content in files.items():
        (companions / name).write_text(content if isinstance(content, str) else json.dumps(content))
    engine = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    engine.add_special_tokens(list(VOCABULARY)[:4])
    engine.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    engine.enable_padding(length=32)
    engine.enable_truncation(2)
    engine.save(str(rundir.data / "tokenizer.json"))
    return SimpleNamespace(
        checkpoint=rundir.checkpoints / "step-9",
        tokenizer_path=rundir.data / tokenizer,
        tokenizer=SimpleNamespace(encode=lambda text: ["pieces of", text]),
    )


def test_a_conversation_has_all_its_ids_and_no_padding(tmp_path: Path) -> None:
    saved = saved_in(tmp_path, {"chat_template.jinja": TEMPLATE, "tokenizer_config.json": SPECIAL})
    assert chat_opening(saved, MESSAGES) == [4, 5, 1, 5, 1]


def test_a_template_sees_the_special_tokens_that_the_tokenizer_has(tmp_path: Path) -> None:
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    template = "".join(
        f"{{% if {name} is defined %}}{{{{ {name} }}}}{{% else %}} a {{% endif %}}" for name in names
    )
    whole = saved_in(tmp_path / "1", {"chat_template.jinja": template, "tokenizer_config.json": SPECIAL})
    assert chat_opening(whole, MESSAGES) == [0, 1, 2, 3]
    lacking = {**SPECIAL, "pad_token": None, "bos_token": ""}
    some = saved_in(tmp_path / "2", {"chat_template.jinja": template, "tokenizer_config.json": lacking})
    assert chat_opening(some, MESSAGES) == [4, 1, 4, 3]
    none = saved_in(tmp_path / "3", {"chat_template.jinja": template})
    assert chat_opening(none, MESSAGES) == [4, 4, 4, 4]


@pytest.mark.parametrize(
    ("templates", "expected"),
    [
        ({"chat_template.jinja": "a", "chat_template.json": {"chat_template": "b"}}, 4),
        ({"chat_template.json": {"chat_template": "b"}, "tokenizer_config.json": {"chat_template": "go"}}, 5),
        ({"chat_template.json": {}, "tokenizer_config.json": {"chat_template": "go"}}, 6),
    ],
    ids=["a file of its own", "a file of JSON", "settings"],
)
def test_the_template_in_a_file_of_its_own_comes_first(
    templates: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    assert chat_opening(saved_in(tmp_path, templates), MESSAGES) == [expected]


def test_the_answer_of_the_model_is_opened(tmp_path: Path) -> None:
    template = "a{% if add_generation_prompt %} go{% endif %}"
    assert chat_opening(saved_in(tmp_path, {"chat_template.jinja": template}), MESSAGES) == [4, 6]


def test_a_sentencepiece_model_encodes_the_conversation_itself(tmp_path: Path) -> None:
    saved = saved_in(tmp_path, {"chat_template.jinja": "a b"}, tokenizer="tokenizer.model")
    assert chat_opening(saved, MESSAGES) == ["pieces of", "a b"]


def test_a_conversation_that_the_template_refuses_is_told_with_its_words(tmp_path: Path) -> None:
    template = "{{ raise_exception('no system message here') }}"
    with pytest.raises(CheckpointError, match="refused the conversation: no system message here") as refused:
        chat_opening(saved_in(tmp_path, {"chat_template.jinja": template}), MESSAGES)
    assert str(tmp_path / "run") in refused.value.message and "--system" in refused.value.remedy


@pytest.mark.parametrize("files", [{}, {"chat_template.json": {"chat_template": ""}}], ids=["none", "empty"])
def test_a_model_without_a_template_is_told(files: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no chat template") as refused:
        chat_opening(saved_in(tmp_path, files), MESSAGES)
    assert "--chat" in refused.value.remedy
