"""`bloomery generate`: continues texts, or answers in a chat, with a trained model."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.cli.argument_values import amount, not_negative, positive
from bloomery.cli.arguments import add_fallback, parser
from bloomery.cli.json_output import json_text
from bloomery.errors import DataError

if TYPE_CHECKING:
    from bloomery.data.tokenizer import Tokenizer
    from bloomery.evaluate.generate import Sampling
    from bloomery.evaluate.open_checkpoint import OpenedModel
    from bloomery.model.decoder import Decoder

EXAMPLES = """\
bloomery generate runs/demo "def main("
bloomery generate runs/demo/checkpoints/step-000500.i001 --temperature 0 --max-tokens 50
bloomery generate runs/demo --prompts prompts.txt --batch 16 --json
bloomery generate runs/imported --chat "What is a bloomery?"
"""


def run(arguments: list[str]) -> int:
    """Load the model and print the texts that it generates, and return the exit status."""
    parsed = _parser()
    options = parsed.parse_intermixed_args(arguments)
    if options.system and not options.chat:
        parsed.error("--system wants --chat")
    prompts = _prompts(options)

    from bloomery.cli.run_inputs import load_saved

    loaded = load_saved(
        options.path, dtype=options.dtype, by_layer=options.by_layer, fallback=options.fallback
    )
    from bloomery.evaluate.generate import Sampling  # loads torch, as the line above did

    sampling = Sampling(
        temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, seed=options.seed
    )
    openings = [_opening(options, loaded.saved, prompt) for prompt in prompts]
    _warn_if_long(loaded.saved, max(map(len, openings)), options.max_tokens)
    if len(prompts) == 1:
        _write_as_it_comes(options, prompts[0], openings[0], loaded.saved, loaded.decoder, sampling)
        return 0
    for start in range(0, len(prompts), options.batch):
        batch = slice(start, start + options.batch)
        _write_together(
            options, prompts[batch], openings[batch], loaded.saved, loaded.decoder, sampling, first=start
        )
    return 0


def _prompts(options: Namespace) -> list[str]:
    """Return what to continue, at least one text. Raises DataError for a file that is not UTF-8."""
    given = [*([options.option] if options.option else []), *options.prompt]
    if options.prompts is None:
        return given or [""]
    try:
        content = sys.stdin.buffer.read() if options.prompts == "-" else Path(options.prompts).read_bytes()
    except OSError as unreadable:
        raise DataError(
            f"Cannot read the prompts in {options.prompts}: {unreadable.strerror}.",
            remedy="Give a text file with one prompt per line, or '-' for standard input.",
        ) from unreadable
    try:
        # Not `splitlines`, which would also divide a prompt at a form feed or at Unicode's line separators.
        lines = content.decode().replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as wrong:
        line = content.count(b"\n", 0, wrong.start) + 1
        raise DataError(
            f"{options.prompts} is not UTF-8 in line {line}.", remedy="Convert it, for instance with iconv."
        ) from wrong
    prompts = [*given, *(line for line in lines if line)]
    if not prompts:
        raise DataError(f"{options.prompts} holds no prompt.", remedy="Write one prompt per line.")
    return prompts


def _opening(options: Namespace, saved: OpenedModel, prompt: str) -> list[int]:
    if not options.chat:
        return saved.bounds.opening(saved.tokenizer.encode(prompt))
    from bloomery.evaluate.generate import chat_opening

    system = [{"role": "system", "content": options.system}] if options.system else []
    return chat_opening(saved, [*system, {"role": "user", "content": prompt}])


def _warn_if_long(saved: OpenedModel, opening: int, new: int) -> None:
    """Say on standard error if a text grows beyond what the model was trained with."""
    trained = max(saved.model.max_positions, saved.recipe.data.sequence_length)
    if saved.model.section.position != "learned" and opening + new > trained:
        print(
            f"note: prompt and new tokens are up to {opening + new:,}, and the model was trained with "
            f"{trained:,} at a time: it may write worse beyond",
            file=sys.stderr,
        )


def _write_as_it_comes(
    options: Namespace,
    prompt: str,
    opening: Sequence[int],
    saved: OpenedModel,
    decoder: Decoder,
    sampling: Sampling,
) -> None:
    from bloomery.evaluate.generate import generate

    ends = saved.bounds.ends
    ids = generate(decoder, opening, max_new_tokens=options.max_tokens, sampling=sampling, ends=ends)
    started, count, text, ended = time.monotonic(), 0, "", False
    if not (options.json or options.chat):
        print(prompt, end="", flush=True)
    for piece, count, ended in _pieces(ids, opening, saved.tokenizer, ends):  # noqa: B007  — the last values are told below
        text += piece
        if not options.json:
            print(piece, end="", flush=True)
    seconds = time.monotonic() - started
    if options.json:
        _print_summary(saved, prompt, text, tokens=count, ended=ended, seconds=seconds)
        return
    print()
    if sys.stderr.isatty():
        print(f"{count} tokens, {count / max(seconds, 1e-9):.1f} a second", file=sys.stderr)


def _write_together(
    options: Namespace,
    prompts: Sequence[str],
    openings: Sequence[Sequence[int]],
    saved: OpenedModel,
    decoder: Decoder,
    sampling: Sampling,
    *,
    first: int,
) -> None:
    """Continue several prompts together, and print each text when all are complete.

    first: the number of the first prompt among all, which its seed follows.
    """
    from dataclasses import replace

    from bloomery.evaluate.generate import generate_together

    started = time.monotonic()
    written: list[list[int]] = [[] for _ in prompts]
    drawn = generate_together(
        decoder,
        openings,
        max_new_tokens=options.max_tokens,
        sampling=replace(sampling, seed=sampling.seed + first),
        ends=saved.bounds.ends,
    )
    for tokens in drawn:
        for ids, token in zip(written, tokens, strict=True):
            if token is not None:
                ids.append(token)
    seconds = time.monotonic() - started
    texts = zip(prompts, openings, written, strict=True)
    for number, (prompt, opening, ids) in enumerate(texts, start=first):
        ended = bool(ids) and ids[-1] in saved.bounds.ends
        text = saved.tokenizer.decode_after(ids[:-1] if ended else ids, before=opening)
        if options.json:
            _print_summary(saved, prompt, text, tokens=len(ids), ended=ended, seconds=seconds)
            continue
        if number:
            print()
        print(f"> {prompt}\n{text}" if options.chat else prompt + text, flush=True)


def _print_summary(
    saved: OpenedModel, prompt: str, text: str, *, tokens: int, ended: bool, seconds: float
) -> None:
    summary = {
        "checkpoint": str(saved.checkpoint),
        "prompt": prompt,
        "text": text,
        "tokens": tokens,
        "ended": ended,
        "seconds": round(seconds, 3),
    }
    print(json_text(summary), flush=True)


def _pieces(
    ids: Iterator[int], opening: Sequence[int], tokenizer: Tokenizer, ends: Collection[int]
) -> Iterator[tuple[str, int, bool]]:
    """Yield (text, tokens so far, whether the model ended the text) each time the last character is whole.

    A character may take several tokens, and is decoded once all of them are there.

    opening: the ids that precede them.
    """
    before, pending = list(opening), list[int]()
    count = 0
    for token in ids:
        count += 1
        if token in ends:
            break
        pending.append(token)
        piece = tokenizer.decode_after(pending, before=before)
        if not piece.endswith("\ufffd"):
            before += pending
            pending.clear()
            yield piece, count, False
    else:
        yield tokenizer.decode_after(pending, before=before), count, False
        return
    yield tokenizer.decode_after(pending, before=before), count, True


def _parser() -> ArgumentParser:
    options = parser("generate", "Continue texts with a trained model.", examples=EXAMPLES)
    options.add_argument("path", type=Path, metavar="RUN|CHECKPOINT", help="a run or checkpoint directory")
    options.add_argument(
        "prompt", nargs="*", default=[], metavar="PROMPT", help="the text to continue; several: together"
    )
    options.add_argument("--prompt", dest="option", default="", metavar="TEXT", help="same as PROMPT")
    options.add_argument(
        "--prompts", metavar="FILE", help="a file with one prompt per line; '-': standard input"
    )
    options.add_argument(
        "--batch", type=positive, default=8, metavar="N", help="prompts computed together (default: 8)"
    )
    options.add_argument(
        "--chat", action="store_true", help="each prompt is a message; uses the model's chat template"
    )
    options.add_argument("--system", default="", metavar="TEXT", help="with --chat: the system message")
    options.add_argument(
        "--max-tokens",
        type=positive,
        default=200,
        metavar="N",
        help="most tokens to generate (default: 200)",
    )
    options.add_argument(
        "--temperature",
        type=amount("a temperature", least=0),
        metavar="T",
        default=0.8,
        help="divides the logits; 0 always takes the likeliest token (default: 0.8)",
    )
    options.add_argument(
        "--top-k",
        type=not_negative,
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
        "--seed",
        type=not_negative,
        metavar="N",
        default=0,
        help="seed of the first text; each further one adds 1",
    )
    from bloomery.cli.run_inputs import add_loading

    add_loading(options)
    add_fallback(options)
    options.add_argument(
        "--json", action="store_true", help="print one JSON object for each text when it is complete"
    )
    return options


def _share(text: str) -> float:
    what = "above 0 and at most 1"
    number = amount(what, above=0.0)(text)
    if number > 1.0:
        raise ArgumentTypeError(f"{text!r} is not {what}")
    return number
