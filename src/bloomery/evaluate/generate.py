"""Generates texts from a model: draws one token after the other, for one text, for several, or in a chat.

A conversation becomes the token ids that a model with a chat template goes on from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer as Engine
from torch import Tensor

from bloomery.data.tokenizer_files import JSON_FILE
from bloomery.errors import BloomeryError, CheckpointError
from bloomery.evaluate.open_checkpoint import OpenedModel, free_memory_bytes
from bloomery.events.run_directory import RunDirectory
from bloomery.interchange.directories import read_object
from bloomery.interchange.generation_files import generation_files_of
from bloomery.model.decoder import Block, Decoder
from bloomery.model.shape import scaling_of


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn.

    temperature: 0 takes the likeliest token.
    top_k, top_p: 0 and 1 leave no token out.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0.0 and self.top_k >= 0 and 0.0 < self.top_p <= 1.0):
            raise BloomeryError(
                f"No token can be drawn with {self}.",
                remedy="Give a temperature and a top_k of at least 0, and a top_p above 0 and at most 1.",
            )


def generate(
    decoder: Decoder,
    opening: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    ends: Collection[int],
) -> Iterator[int]:
    """Yield new token ids after `opening`; the last one is in `ends`, or it is the `max_new_tokens`-th.

    opening: token ids, at least one, with those that open a text (`TextBounds.opening`).
    Raises BloomeryError if the model has no positions for so many tokens.
    """
    drawn = generate_together(decoder, [opening], max_new_tokens=max_new_tokens, sampling=sampling, ends=ends)
    return (token for (token,) in drawn if token is not None)


def generate_together(
    decoder: Decoder,
    openings: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    ends: Collection[int],
) -> Iterator[tuple[int | None, ...]]:
    """Yield the next token id of each text until all have ended; None for one that ended before.

    openings: as in `generate`, of any lengths. The n-th text, counted from 0, draws with seed + n, so each
    is what it would be alone with that seed.
    Raises BloomeryError if the model has no positions for so many tokens, or the machine no memory.
    """
    if max_new_tokens < 1:
        raise BloomeryError(f"{max_new_tokens} new tokens are asked for.", remedy="Ask for at least 1.")
    longest = max(len(opening) for opening in openings)
    _refuse_too_long(decoder, longest + max_new_tokens - 1)
    _refuse_too_large(decoder, longest + max_new_tokens, texts=len(openings))
    scaling = scaling_of(decoder.model)
    is_stretched = scaling and scaling.kind == "dynamic" and longest + max_new_tokens > scaling.positions
    if is_stretched and len({len(opening) for opening in openings}) > 1:
        # The frequencies follow from a text's length so far, and the rows of one pass share them.
        alone = [
            _drawn(
                decoder,
                [opening],
                max_new_tokens=max_new_tokens,
                sampling=replace(sampling, seed=sampling.seed + place),
                ends=ends,
            )
            for place, opening in enumerate(openings)
        ]
        steps = zip_longest(*alone, fillvalue=(None,))
        return (tuple(token for (token,) in step) for step in steps)
    return _drawn(decoder, openings, max_new_tokens=max_new_tokens, sampling=sampling, ends=ends)


def _refuse_too_long(decoder: Decoder, tokens: int) -> None:
    if decoder.positions is None:
        return
    longest = decoder.model.max_positions
    if tokens > longest:
        raise BloomeryError(
            f"Prompt and new tokens are {tokens}, but the model has {longest} learned positions.",
            remedy="Give a shorter prompt, or ask for fewer new tokens (--max-tokens).",
        )


def _refuse_too_large(decoder: Decoder, tokens: int, *, texts: int) -> None:
    """Raise BloomeryError where the keys and values of `tokens` tokens exceed the free memory."""
    device, kind = decoder.head_weight.device, decoder.head_weight.dtype
    attention = cast(Block, decoder.blocks[0]).attention
    each = 2 * len(decoder.blocks) * attention.kv_heads * attention.head_dim * kind.itemsize
    free = free_memory_bytes(device)
    if each * tokens * texts > free:
        raise BloomeryError(
            f"Keys and values of {texts} × {tokens:,} tokens take {each * tokens * texts / 1e9:,.1f} GB, and "
            f"{free / 1e9:,.1f} GB of memory are free.",
            remedy="Ask for fewer new tokens (--max-tokens), or for fewer texts at a time (--batch).",
        )


@torch.inference_mode()
def _drawn(
    decoder: Decoder,
    openings: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    ends: Collection[int],
) -> Iterator[tuple[int | None, ...]]:
    device = decoder.head_weight.device
    # Drawn on the CPU, so that a seed means the same on every device.
    generators = [torch.Generator().manual_seed(sampling.seed + place) for place in range(len(openings))]
    longest = max(len(opening) for opening in openings)
    lacking = [longest - len(opening) for opening in openings]
    cache = decoder.cache(
        batch=len(openings),
        capacity=longest + max_new_tokens,
        padding=torch.tensor(lacking, device=device) if any(lacking) else None,
    )
    fresh = [[0] * lack + list(opening) for lack, opening in zip(lacking, openings, strict=True)]
    writing = [True] * len(openings)
    for _ in range(max_new_tokens):
        hidden = decoder(torch.tensor(fresh, device=device), cache=cache)
        logits = decoder.logits(hidden[:, -1]).float().cpu()
        tokens = tuple(
            _draw(row, sampling, generator) if goes_on else None
            for row, generator, goes_on in zip(logits, generators, writing, strict=True)
        )
        yield tokens
        writing = [token is not None and token not in ends for token in tokens]
        if not any(writing):
            return
        fresh = [[0 if token is None else token] for token in tokens]


_COLDEST = 1e-30
"""Divided by a temperature below this, fp32 logits may be infinite; only the likeliest token is left."""


def _draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Return one token id drawn from fp32 logits [v]."""
    if sampling.temperature < _COLDEST:
        return int(logits.argmax())
    logits, order = (logits / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k > 0:
        logits[sampling.top_k :] = float("-inf")
    probabilities = logits.softmax(-1)
    if sampling.top_p < 1.0:
        # A token stays if those before it do not reach the share; the likeliest stays for any share.
        beyond = probabilities.cumsum(-1) - probabilities >= sampling.top_p
        probabilities[1:][beyond[1:]] = 0.0
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])


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
    companions = generation_files_of(rundir)
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
