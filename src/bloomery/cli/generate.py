"""`bloomery generate`: continues a text with a trained model."""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.cli.arguments import add_fallback, parser
from bloomery.errors import BloomeryError

if TYPE_CHECKING:
    from bloomery.data.tokenizer import Tokenizer
    from bloomery.evaluate.generate import OpenedModel

EXAMPLES = """\
bloomery generate runs/demo "def main("
bloomery generate runs/demo/checkpoints/step-000500.i001 --temperature 0 --max-tokens 50
"""


def run(arguments: list[str]) -> int:
    """Load the model and print the text that it generates; returns the exit status."""
    options = _parser().parse_args(arguments)
    _refuse_unreadable(options.prompt)

    import torch

    from bloomery.evaluate.generate import Sampling, generate, open_saved

    saved = open_saved(options.path, fallback=options.fallback)
    opening = saved.bounds.opening(saved.tokenizer.encode(options.prompt))
    _warn_if_long(saved, len(opening), options.max_tokens)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ids = generate(
        saved.decoder(device=device),
        opening,
        max_new_tokens=options.max_tokens,
        sampling=Sampling(
            temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, seed=options.seed
        ),
        ends=saved.bounds.ends,
    )
    _print_text(options, ids, saved)
    return 0


def _refuse_unreadable(prompt: str) -> None:
    """Raise BloomeryError for a prompt that is not UTF-8, of which Python hands bytes on as surrogates."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BloomeryError(
            f"The prompt is not UTF-8: its character {error.start + 1} is the byte "
            f"0x{ord(prompt[error.start]) & 0xFF:02x}.",
            remedy="Give it in UTF-8, for example with `iconv -f latin1 -t utf-8`.",
        ) from error


def _warn_if_long(saved: OpenedModel, opening: int, new: int) -> None:
    """Say on standard error if a text grows beyond what the model was trained with."""
    trained = max(saved.model.max_positions, saved.recipe.data.sequence_length)
    if saved.model.section.position != "learned" and opening + new > trained:
        print(
            f"note: prompt and new tokens are up to {opening + new:,}, and the model was trained with "
            f"{trained:,} at a time: it may write worse beyond",
            file=sys.stderr,
        )


def _print_text(options: Namespace, ids: Iterator[int], saved: OpenedModel) -> None:
    started, count, text, ended = time.monotonic(), 0, "", False
    if not options.json:
        print(options.prompt, end="", flush=True)
    for piece, count, ended in _pieces(ids, saved.tokenizer, saved.bounds.ends):  # noqa: B007  — the last values are told below
        text += piece
        if not options.json:
            print(piece, end="", flush=True)
    seconds = time.monotonic() - started
    if options.json:
        summary = {
            "checkpoint": str(saved.checkpoint),
            "prompt": options.prompt,
            "text": text,
            "tokens": count,
            "ended": ended,
            "seconds": round(seconds, 3),
        }
        print(json.dumps(summary))
        return
    print()
    if sys.stderr.isatty():
        print(f"{count} tokens, {count / max(seconds, 1e-9):.1f} a second", file=sys.stderr)


def _pieces(
    ids: Iterator[int], tokenizer: Tokenizer, ends: Collection[int]
) -> Iterator[tuple[str, int, bool]]:
    """Yield (text, tokens so far, whether the model ended the text) each time the last character is whole.

    A character may take several tokens, and is decoded once all of them are there.
    """
    pending: list[int] = []
    count = 0
    for token in ids:
        count += 1
        if token in ends:
            break
        pending.append(token)
        piece = tokenizer.decode(pending)
        if not piece.endswith("\ufffd"):
            pending.clear()
            yield piece, count, False
    else:
        yield tokenizer.decode(pending), count, False
        return
    yield tokenizer.decode(pending), count, True


def _parser() -> ArgumentParser:
    options = parser("generate", "Continue a text with a trained model.", examples=EXAMPLES)
    options.add_argument("path", type=Path, metavar="RUN|CHECKPOINT", help="a run or checkpoint directory")
    options.add_argument("prompt", nargs="?", default="", metavar="PROMPT", help="the text to continue")
    options.add_argument("--prompt", dest="prompt", default="", help="the same, as an option")
    options.add_argument(
        "--max-tokens",
        type=_positive,
        default=200,
        metavar="N",
        help="most tokens to generate (default: 200)",
    )
    options.add_argument(
        "--temperature",
        type=_not_negative,
        metavar="T",
        default=0.8,
        help="divides the logits; 0 always takes the likeliest token (default: 0.8)",
    )
    options.add_argument(
        "--top-k",
        type=_count,
        default=0,
        metavar="K",
        help="sample among the K likeliest tokens (default: 0, all)",
    )
    options.add_argument(
        "--top-p",
        type=_share,
        default=1.0,
        metavar="P",
        help="sample among the likeliest tokens whose probabilities sum to P (default: 1, all)",
    )
    options.add_argument(
        "--seed", type=_count, metavar="N", default=0, help="seed of the sampling (default: 0)"
    )
    add_fallback(options)
    options.add_argument(
        "--json", action="store_true", help="print one JSON object when the text is complete"
    )
    return options


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ArgumentTypeError(f"{text} is below 1")
    return number


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ArgumentTypeError(f"{text} is below 0")
    return number


def _not_negative(text: str) -> float:
    number = float(text)
    if not 0.0 <= number < float("inf"):
        raise ArgumentTypeError(f"{text} is not a temperature")
    return number


def _share(text: str) -> float:
    number = float(text)
    if not 0.0 < number <= 1.0:
        raise ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return number
