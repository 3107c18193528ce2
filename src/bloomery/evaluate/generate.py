"""Text from a model, one token at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bloomery.errors import BloomeryError
from bloomery.model.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn. temperature 0: the likeliest; top_k 0 and top_p 1 leave nothing out."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def generate(
    decoder: Decoder, prompt: Sequence[int], *, max_new_tokens: int, sampling: Sampling, eod: int
) -> Iterator[int]:
    """New token ids after `prompt`, as they are drawn; ends after `eod`, which is yielded, or at the maximum.

    prompt: token ids without the leading end-of-document token, which opens every document and is put before
    them here. Raises BloomeryError where the model has no positions for so many tokens.
    """
    opened = [eod, *prompt]
    _refuse_too_long(decoder, len(opened) + max_new_tokens - 1)
    return _drawn(decoder, opened, max_new_tokens=max_new_tokens, sampling=sampling, eod=eod)


def _refuse_too_long(decoder: Decoder, tokens: int) -> None:
    if decoder.positions is None:
        return
    longest = decoder.positions.weight.shape[0]
    if tokens > longest:
        raise BloomeryError(
            f"Prompt and new tokens are {tokens}, but the model has {longest} learned positions.",
            remedy="Give a shorter prompt, or ask for fewer new tokens.",
        )


@torch.inference_mode()
def _drawn(
    decoder: Decoder, opened: Sequence[int], *, max_new_tokens: int, sampling: Sampling, eod: int
) -> Iterator[int]:
    device = decoder.head_weight.device
    # Drawn on the CPU, so that a seed means the same on every device.
    generator = torch.Generator().manual_seed(sampling.seed)
    cache = decoder.cache(batch=1, capacity=len(opened) + max_new_tokens)
    fresh = list(opened)
    for _ in range(max_new_tokens):
        hidden = decoder(torch.tensor([fresh], device=device), cache=cache)
        token = _draw(decoder.logits(hidden[0, -1]).float().cpu(), sampling, generator)
        yield token
        if token == eod:
            return
        fresh = [token]


def _draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token id from fp32 logits [v]."""
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    logits, order = (logits / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k > 0:
        logits[sampling.top_k :] = float("-inf")
    probabilities = logits.softmax(-1)
    if sampling.top_p < 1.0:
        # A token stays while those before it do not reach the share: the likeliest always does.
        probabilities[probabilities.cumsum(-1) - probabilities >= sampling.top_p] = 0.0
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])
