"""Writes a conversation as the token ids that a model with a chat template goes on from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Engine

from bloomery.data.tokenizer import JSON_FILE
from bloomery.errors import CheckpointError
from bloomery.evaluate.open_checkpoint import OpenedModel
from bloomery.events.run_directory import RunDirectory
from bloomery.interchange.directories import read_object
from bloomery.interchange.generation_files import companions_of

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def chat_opening(saved: OpenedModel, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Return the ids of a conversation, and of what opens the model's answer.

    messages: as in transformers: each with a 'role' ('system', 'user' or 'assistant') and a 'content'.
    Raises CheckpointError if the model has no chat template, or the template refuses the conversation.
    """
    template, settings = _template(saved)
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    render: Any = render_jinja_template  # Any: its annotations do not fit what it takes and returns
    special = {name: _text(settings[name]) for name in _SPECIAL if settings.get(name)}
    try:
        (text,), _ = render(
            conversations=[list(messages)], chat_template=template, add_generation_prompt=True, **special
        )
    except jinja2.TemplateError as refused:
        raise CheckpointError(
            f"The chat template of {saved.checkpoint.parent.parent} refused the conversation: {refused}.",
            remedy="Some templates take no system message: leave --system out.",
        ) from refused
    if saved.tokenizer_path.name != JSON_FILE:
        return saved.tokenizer.encode(text)
    # the text names special tokens, which only the tokenizer's own rules turn into their ids
    engine: Any = Engine.from_file(str(saved.tokenizer_path))  # Any: a package without stubs
    engine.no_padding()
    engine.no_truncation()
    ids: list[int] = engine.encode(text, add_special_tokens=False).ids
    return ids


def _template(saved: OpenedModel) -> tuple[str, dict[str, Any]]:
    """Return the template and the tokenizer's settings, from what `ckpt import` kept."""
    rundir = RunDirectory(saved.checkpoint.parent.parent)
    companions = companions_of(rundir)
    if companions is not None:
        settings = _object(companions / "tokenizer_config.json")
        file = companions / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8"), settings
        for holder in (_object(companions / "chat_template.json"), settings):
            template = _default(holder.get("chat_template"))
            if template:
                return template, settings
    raise CheckpointError(
        f"The model of {rundir.path} has no chat template.",
        remedy="Leave --chat out to continue a text; models imported with `ckpt import` keep their template.",
    )


def _default(template: Any) -> str:  # Any: of a file of another project
    """Return the template among several named ones that is for plain conversations; "" without one."""
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else ""


def _object(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def _text(token: Any) -> str:  # Any: a token as its text, or as an object with it
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)
