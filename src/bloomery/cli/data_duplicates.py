"""`bloomery data dedup` writes a pair without the documents that an earlier one is equal to, or alike."""

from __future__ import annotations

import argparse
from typing import Any

from bloomery.cli.argument_values import pair_prefix
from bloomery.cli.arguments import data_bar


def add_parser(commands: Any) -> None:  # Any: argparse names no type for it
    """Add the subcommand `dedup` and its arguments to the parser of `bloomery data`."""
    from bloomery.cli.data_pairs import add_target

    dedup = commands.add_parser(
        "dedup",
        help="join pairs in one without documents that an earlier one is equal to, or alike",
        description="Join pairs in one, without the documents that an earlier document is equal to, or has "
        "most n-grams of tokens in common with. PREFIX-duplicates.jsonl lists what was left out and why.",
    )
    dedup.add_argument(
        "prefixes",
        type=pair_prefix,
        nargs="+",
        metavar="PREFIX",
        help="paths of the pairs, without their extension",
    )
    add_target(dedup, metavar="PREFIX", kind=pair_prefix, about="path of the new pair, without its extension")
    dedup.add_argument(
        "--against",
        type=pair_prefix,
        nargs="+",
        default=[],
        metavar="PREFIX",
        help="pairs whose documents are left out of the new one too, such as held-out text",
    )
    dedup.add_argument("--exact", action="store_true", help="leave out equal documents alone")
    dedup.add_argument(
        "--threshold",
        type=float,
        default=0.8,
        metavar="SHARE",
        help="share of common n-grams (Jaccard) from which on a document is left out (default: 0.8)",
    )
    dedup.add_argument("--ngram", type=int, default=5, metavar="N", help="tokens of an n-gram (default: 5)")
    dedup.add_argument("--json", action="store_true", help="print one JSON object instead")
    dedup.set_defaults(command=_dedup)


def _dedup(options: argparse.Namespace) -> int:
    from bloomery.cli.data_pairs import print_result
    from bloomery.data.duplicates import DUPLICATES, Likeness, deduplicate
    from bloomery.errors import DataError

    if not 0.5 <= options.threshold <= 1 or not 1 <= options.ngram <= 64:
        raise DataError(
            f"--threshold {options.threshold} and --ngram {options.ngram} find no near duplicates.",
            remedy="Give a share from 0.5 to 1, and 1 to 64 tokens.",
        )
    likeness = Likeness(threshold=1.0 if options.exact else options.threshold, ngram=options.ngram)
    with data_bar(shown=not options.json) as progress:
        done = deduplicate(
            options.prefixes, options.out, likeness=likeness, against=options.against, progress=progress
        )
    listed = options.out.with_name(options.out.name + DUPLICATES)
    facts = {
        "prefix": str(options.out),
        "documents": done.documents,
        "tokens": done.tokens,
        "removed_equal": done.removed_equal,
        "removed_near": done.removed_near,
        "removed_tokens": done.removed_tokens,
        "removed_list": str(listed),
    }
    lines = [
        f"{options.out}: {done.documents:,} documents, {done.tokens:,} tokens",
        f"left out: {done.removed_equal:,} equal to an earlier document and {done.removed_near:,} like one, "
        f"{done.removed_tokens:,} tokens; {listed} lists them",
    ]
    return print_result(facts, lines, as_json=options.json)
