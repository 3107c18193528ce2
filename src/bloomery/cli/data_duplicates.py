"""`bloomery data dedup` and `data report --overlap`: remove duplicates, find held-out text in training.

`dedup` writes a pair without the documents that an earlier one is equal to, or alike; `--overlap` lists the
held-out documents that are in the training text too.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.cli.argument_values import pair_prefix
from bloomery.cli.arguments import data_bar

if TYPE_CHECKING:
    from bloomery.config.load import LoadedRecipe
    from bloomery.data.indexed import IndexedDataset
    from bloomery.data.prepare import Prepared


def add_parser(commands: Any) -> None:  # Any: argparse names no type for it
    """Add the subcommand `dedup` and its arguments to the parser of `bloomery data`."""
    from bloomery.cli.data_pairs import add_target

    dedup = commands.add_parser(
        "dedup",
        help="join pairs into one without duplicates: of near-equal documents only the first is kept",
        description="Join pairs into one without duplicates: of equal or near-equal documents (by shared "
        "n-grams of tokens) only the first is kept. PREFIX-duplicates.jsonl lists what was left out and why.",
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
    dedup.add_argument("--exact", action="store_true", help="leave out only equal documents")
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
    from bloomery.data.duplicates import DUPLICATES, SimilarityThreshold, deduplicate
    from bloomery.errors import UsageError

    if not 0.5 <= options.threshold <= 1 or not 1 <= options.ngram <= 64:
        raise UsageError(
            f"--threshold {options.threshold} and --ngram {options.ngram} find no near duplicates.",
            remedy="Give a share from 0.5 to 1, and 1 to 64 tokens.",
        )
    likeness = SimilarityThreshold(threshold=1.0 if options.exact else options.threshold, ngram=options.ngram)
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


def report_overlap(loaded: LoadedRecipe, run: Path | None, *, as_json: bool) -> int:
    """Print which held-out documents of a recipe or run are in its training text too; returns 1 if any is."""
    from bloomery.cli.data_pairs import print_result
    from bloomery.data.overlap import overlap_of

    training, held_out, _ = texts_of(loaded, run)
    with data_bar(shown=not as_json) as progress:
        found = overlap_of(training, held_out, progress=progress)
    total = sum(found.shared.values())
    lines = [
        f"{name}: {found.shared[name]:,} of {count:,} held-out documents are in the training text too"
        for name, count in found.documents.items()
    ]
    lines += [f"  of them in {name}: {count:,}" for name, count in found.by_training.items() if count]
    lines += [
        f"  held-out document {each.held_out_document:,} of {each.held_out} is document "
        f"{each.training_document:,} of {each.training} ({each.tokens:,} tokens)"
        for each in found.examples
    ]
    if total:
        lines.append(
            "  `bloomery data dedup PREFIX --against HELD-OUT --to NEW` writes training text without them."
        )
    print_result(asdict(found) | {"total": total}, lines, as_json=as_json)
    return int(total > 0)


def texts_of(
    loaded: LoadedRecipe, run: Path | None, *, needs_held_out: bool = True
) -> tuple[dict[str, IndexedDataset], dict[str, IndexedDataset], Prepared]:
    """Return the training documents and the held-out ones of a recipe or run, by dataset.

    needs_held_out: refuse a recipe that holds out nothing.
    """
    from tempfile import gettempdir

    from bloomery.data.prepare import prepare, prepared_of_run
    from bloomery.errors import DataError
    from bloomery.events.run_directory import RunDirectory
    from bloomery.train.data_stream import held_out_documents, training_documents

    data = loaded.recipe.data
    if data.sources and run is None:
        raise DataError(
            "The recipe's data.sources are not tokenised yet.",
            remedy="Give the directory of a run that was started, or a recipe with data.datasets.",
        )
    place = Path(gettempdir()) / "bloomery-data"
    prepared = prepared_of_run(data, RunDirectory(run).data) if run else prepare(data, place)
    training = training_documents(data, prepared.train)
    held_out = {part.name: part.documents for part in held_out_documents(data, prepared)}
    if needs_held_out and not held_out:
        raise DataError(
            "There is no held-out text to compare with.",
            remedy="Set data.split, data.held_out_datasets or data.held_out_every.",
        )
    names = [dataset.name for dataset in prepared.train]
    return dict(zip(names, training, strict=True)), held_out, prepared
