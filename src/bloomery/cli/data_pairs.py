"""`bloomery data inspect`, `merge` and `verify`: commands on .bin/.idx pairs that are already written."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.cli.arguments import data_bar

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from bloomery.data.tokenizer import Tokenizer

_PEEK_TOKENS = 64


def add_parsers(commands: Any, *, end_of_document: str) -> None:  # Any: argparse names no type for it
    """Add the three commands to the table of `bloomery data`."""
    inspect = commands.add_parser(
        "inspect", help="show the documents, tokens and lengths of a dataset, and its first texts"
    )
    inspect.add_argument("prefix", type=Path, help="path of the .bin/.idx pair, without its extension")
    _add_tokenizer(inspect, end_of_document)
    inspect.add_argument(
        "--peek", metavar="N", type=int, default=3, help="number of documents to print (default: 3)"
    )
    inspect.add_argument("--json", action="store_true", help="print one JSON object instead")
    inspect.set_defaults(command=_inspect)

    merge = commands.add_parser("merge", help="join several pairs in one")
    merge.add_argument(
        "prefixes", type=Path, nargs="+", metavar="PREFIX", help="paths of the pairs, without their extension"
    )
    merge.add_argument("--out", type=Path, required=True, help="path of the new pair, without its extension")
    merge.add_argument("--json", action="store_true", help="print one JSON object instead")
    merge.set_defaults(command=_merge)

    verify = commands.add_parser(
        "verify", help="check a pair: its checksums, its length, and that all ids are in the vocabulary"
    )
    verify.add_argument("prefix", type=Path, help="path of the .bin/.idx pair, without its extension")
    _add_tokenizer(verify, end_of_document)
    verify.add_argument(
        "--vocabulary", metavar="N", type=int, help="entries of the vocabulary, in place of a tokenizer"
    )
    verify.add_argument("--json", action="store_true", help="print one JSON object instead")
    verify.set_defaults(command=_verify)


def print_result(facts: dict[str, Any], lines: Sequence[str], *, as_json: bool) -> int:
    """Print the result of a command and return 0: `facts` as one JSON object, or `lines` for people."""
    if as_json:
        print(json.dumps(facts, ensure_ascii=False))
    else:
        print("\n".join(lines).rstrip())
    return 0


def _add_tokenizer(parser: argparse.ArgumentParser, end_of_document: str) -> None:
    parser.add_argument(
        "--tokenizer", help="tokenizer of the pair (default: the tokenizer.json beside the pair)"
    )
    parser.add_argument(
        "--end-of-document",
        metavar="TOKEN",
        default=end_of_document,
        help=f"token that ends a document (default: {end_of_document})",
    )


def _tokenizer_for(options: argparse.Namespace) -> Tokenizer | None:
    from bloomery.data.tokenizer import load_tokenizer, tokenizer_in
    from bloomery.data.tokenizer_files import find_tokenizer

    path = find_tokenizer(options.tokenizer) if options.tokenizer else tokenizer_in(options.prefix.parent)
    return None if path is None else load_tokenizer(path, end_of_document=options.end_of_document)


def _inspect(options: argparse.Namespace) -> int:
    import numpy as np

    from bloomery.data.indexed import IndexedDataset

    dataset = IndexedDataset(options.prefix)
    lengths = np.diff(dataset.document_starts)
    tokenizer = _tokenizer_for(options)
    peeks: list[dict[str, Any]] = []
    for number in range(min(options.peek, dataset.document_count)):
        ids = dataset.document(number)[:_PEEK_TOKENS].tolist()
        peek: dict[str, Any] = {"document": number, "tokens": int(lengths[number]), "ids": ids[:16]}
        if tokenizer is not None:
            peek["text"] = tokenizer.decode(ids)
        peeks.append(peek)
    histogram = _histogram(lengths)
    facts = {
        "prefix": str(options.prefix),
        "documents": dataset.document_count,
        "tokens": dataset.token_count,
        "dtype": dataset.dtype.name,
        "lengths": [{"from": low, "below": high, "documents": count} for low, high, count in histogram],
        "peek": peeks,
    }
    lines = [
        f"{options.prefix}: {dataset.document_count:,} documents, {dataset.token_count:,} tokens "
        f"({dataset.dtype.name})",
        "",
        "tokens a document",
    ]
    widest = max((count for *_, count in histogram), default=1)
    for low, high, count in histogram:
        lines.append(f"  {low:>10,} to {high - 1:>10,}  {count:>9,}  {'█' * round(40 * count / widest)}")
    for peek in peeks:
        shown = repr(peek["text"]) if "text" in peek else f"{peek['ids']} (no tokenizer.json to decode with)"
        lines += ["", f"document {peek['document']} ({peek['tokens']:,} tokens): {shown}"]
    return print_result(facts, lines, as_json=options.json)


def _histogram(lengths: npt.NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Return (from, below, documents) for each power of two from the shortest to the longest document."""
    import numpy as np

    if not len(lengths):
        return []
    sizes = np.frexp(lengths.astype(np.float64))[1]  # the bit length, exact below 2**53
    counts = np.bincount(sizes)
    return [((1 << size) >> 1, 1 << size, int(counts[size])) for size in range(sizes.min(), len(counts))]


def _merge(options: argparse.Namespace) -> int:
    from bloomery.data.pairs import merge_pairs

    with data_bar(shown=not options.json) as progress:
        merged = merge_pairs(options.prefixes, options.out, progress=progress)
    facts = {
        "prefix": str(options.out),
        "merged": [str(prefix) for prefix in options.prefixes],
        "documents": merged.document_count,
        "tokens": merged.token_count,
        "dtype": merged.dtype.name,
    }
    line = (
        f"{options.out}: {merged.document_count:,} documents, {merged.token_count:,} tokens of "
        f"{len(options.prefixes)} pairs"
    )
    return print_result(facts, [line], as_json=options.json)


def _verify(options: argparse.Namespace) -> int:
    from bloomery.data.pairs import verify_pair

    tokenizer = None if options.vocabulary else _tokenizer_for(options)
    vocabulary = options.vocabulary or (tokenizer.vocabulary_size if tokenizer else None)
    with data_bar(shown=not options.json) as progress:
        result = verify_pair(options.prefix, vocabulary_size=vocabulary, progress=progress)
    facts = {
        "prefix": str(options.prefix),
        "ok": not result.findings,
        "findings": result.findings,
        "not_looked_at": result.skipped,
        "documents": result.documents,
        "tokens": result.tokens,
        "vocabulary": result.vocabulary_size,
    }
    verdict = "damaged" if result.findings else "whole"
    lines = [f"{options.prefix}: {verdict}; {result.documents:,} documents, {result.tokens:,} tokens"]
    lines += [f"  {finding}" for finding in result.findings]
    lines += [f"  not checked: {what}" for what in result.skipped]
    if result.findings:
        lines.append("  Copy the pair again from an intact copy, or tokenise its source again.")
    print_result(facts, lines, as_json=options.json)
    return 1 if result.findings else 0
