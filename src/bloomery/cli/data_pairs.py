"""`bloomery data inspect`, `merge`, `verify` and `report`: commands on tokenised datasets."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.cli.argument_values import not_negative, pair_prefix, picture_file, positive
from bloomery.cli.arguments import data_bar
from bloomery.cli.json_output import json_text
from bloomery.cli.tables import table_text

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from bloomery.config.load import LoadedRecipe
    from bloomery.data.stream import DatasetRow
    from bloomery.data.tokenizer import Tokenizer

_PEEK_TOKENS = 64


def add_parsers(commands: Any, *, end_of_document: str) -> None:  # Any: argparse names no type for it
    """Add `inspect`, `merge` and `verify` to the table of `bloomery data`."""
    inspect = commands.add_parser(
        "inspect",
        help="show the documents, tokens and lengths of a dataset, and its first texts",
        description="Show a dataset's documents, tokens, histogram of document lengths, and first texts.",
    )
    _add_pair(inspect)
    _add_tokenizer(inspect, end_of_document)
    inspect.add_argument("--peek", metavar="N", type=not_negative, default=3, help="documents to print (3)")
    inspect.add_argument("--json", action="store_true", help="print one JSON object instead")
    inspect.set_defaults(command=_inspect)

    merge = commands.add_parser(
        "merge",
        help="join several pairs into one",
        description="Join several .bin/.idx pairs into one, in the order given.",
    )
    merge.add_argument(
        "prefixes",
        type=pair_prefix,
        nargs="*",
        metavar="PREFIX",
        help="paths of the pairs, without their extension",
    )
    add_target(merge, metavar="PREFIX", kind=pair_prefix, about="path of the new pair, without its extension")
    merge.add_argument(
        "--parts",
        action="store_true",
        help="join all parts that `data tokenize --part` made for the PREFIX of --to, and what they held out",
    )
    merge.add_argument("--json", action="store_true", help="print one JSON object instead")
    merge.set_defaults(command=_merge)

    verify = commands.add_parser(
        "verify",
        help="check a pair: its checksums, its length, and that all ids are in the vocabulary",
        description="Check the checksums and length of a pair, and that all ids are in the vocabulary.",
    )
    _add_pair(verify)
    _add_tokenizer(verify, end_of_document)
    verify.add_argument(
        "--vocabulary", metavar="N", type=positive, help="entries of the vocabulary, in place of a tokenizer"
    )
    verify.add_argument("--json", action="store_true", help="print one JSON object instead")
    verify.set_defaults(command=_verify)


def print_result(facts: dict[str, Any], lines: Sequence[str], *, as_json: bool) -> int:
    """Print the result of a command and return 0: `facts` as one JSON object, or `lines` for people."""
    if as_json:
        print(json_text(facts, ensure_ascii=False))
    else:
        print("\n".join(lines).rstrip())
    return 0


def _add_pair(parser: argparse.ArgumentParser) -> None:
    about = "path of the .bin/.idx pair, without its extension"
    parser.add_argument("prefix", metavar="PREFIX", type=pair_prefix, help=about)


def _add_tokenizer(parser: argparse.ArgumentParser, end_of_document: str) -> None:
    parser.add_argument("--tokenizer", help="its tokenizer (default: the tokenizer.json beside the pair)")
    parser.add_argument(
        "--end-of-document",
        metavar="TOKEN",
        default=end_of_document,
        help=f"token that ends a document (default: {end_of_document})",
    )


def _tokenizer_for(options: argparse.Namespace) -> Tokenizer | None:
    from bloomery.data.tokenizer import find_tokenizer, load_tokenizer
    from bloomery.data.tokenizer_files import tokenizer_in

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
        "tokens per document",
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
    from bloomery.errors import UsageError

    if options.parts:
        return _merge_parts(options)
    if not options.prefixes:
        raise UsageError("No pair to merge is named.", remedy="Name pairs, or give --parts to join parts.")
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


def _merge_parts(options: argparse.Namespace) -> int:
    from bloomery.data.corpus_parts import join_parts
    from bloomery.errors import UsageError

    if options.prefixes:
        raise UsageError(
            f"--parts finds the parts by itself, and {options.prefixes[0]} was named too.",
            remedy="Give --parts and --to alone, or name pairs without --parts.",
        )
    with data_bar(shown=not options.json) as progress:
        joined = join_parts(options.out, progress=progress)
    datasets = [
        {"prefix": str(pair.prefix), "documents": pair.document_count, "tokens": pair.token_count}
        for pair in joined
    ]
    lines = [
        f"{pair['prefix']}: {pair['documents']:,} documents, {pair['tokens']:,} tokens" for pair in datasets
    ]
    lines.append("The parts are still there; what they hold is in the new pair.")
    return print_result({"datasets": datasets}, lines, as_json=options.json)


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
    lines += [f"  not checked: {check}" for check in result.skipped]
    if result.findings:
        lines.append("  Copy the pair again from an intact copy, or tokenise its source again.")
    print_result(facts, lines, as_json=options.json)
    return 1 if result.findings else 0


_NAME_WIDTH, _GROUP_WIDTH = 30, 12


def add_target(
    parser: argparse.ArgumentParser, *, metavar: str, kind: Callable[[str], Path], about: str
) -> None:
    """Add the option that names what a command writes: --to, and --out, its name of before.

    kind: reads the path, or refuses it.
    """
    parser.add_argument("--to", "--out", dest="out", type=kind, required=True, metavar=metavar, help=about)


def add_report_parser(commands: Any) -> None:  # Any: argparse keeps this type to itself
    """Add `report` to the table of `bloomery data`."""
    report = commands.add_parser(
        "report",
        help="show the tokens, shares and epochs of each dataset and group in a run",
        description="Show what a run takes from each dataset and group: the tokens it holds, its share as "
        "wanted and as delivered, its epochs, and the step at which its first epoch ends. For a run that "
        "has begun, the samples it has used count with the weights, batches and lengths of that time. "
        "Only the indices of the datasets are read.",
    )
    report.add_argument("recipe", metavar="RECIPE|RUN", help="a recipe, or a run directory")
    report.add_argument(
        "overrides",
        metavar="section.key=value",
        nargs="*",
        help="settings that replace the recipe's",
    )
    report.add_argument(
        "--png", metavar="FILE", type=picture_file, help="draw shares and epochs into this file"
    )
    report.add_argument(
        "--overlap",
        action="store_true",
        help="read all documents, and list which held-out ones are in the training text too (status 1)",
    )
    report.add_argument("--json", action="store_true", help="print one JSON object instead")
    report.set_defaults(command=_report)


def _report(options: argparse.Namespace) -> int:
    from bloomery.cli.arguments import load_given
    from bloomery.config.validate import check_recipe
    from bloomery.data.stream import group_rows, tokens_of_rows

    path = Path(options.recipe)
    run = path if (path / "recipe.toml").exists() else None
    loaded = load_given(str(path / "recipe.toml") if run else options.recipe, options.overrides)
    check_recipe(loaded.recipe, loaded.sources)
    if options.overlap:
        from bloomery.cli.data_duplicates import report_overlap

        return report_overlap(loaded, run, as_json=options.json)
    rows, samples = _rows(loaded, run)
    groups, tokens, data = group_rows(rows), tokens_of_rows(rows), loaded.recipe.data
    if options.png:
        _draw(rows, groups, options.png)
    if options.json:
        facts = {"samples": samples, "tokens": tokens, "order": data.order}
        facts |= {"datasets": [asdict(row) for row in rows], "groups": [asdict(row) for row in groups]}
        print(json_text(facts, ensure_ascii=False))
        return 0
    most = "at most " if data.packing == "documents" else ""
    print(f"{samples:,} samples of {most}{data.sequence_length:,} tokens: {tokens:,} tokens\n")
    print(_table(rows, first="dataset"))
    if groups:
        print(f"\n{_table(groups, first='group')}")
    if options.png:
        print(f"\nDrawn into {options.png}.")
    return 0


def _rows(loaded: LoadedRecipe, run: Path | None) -> tuple[list[DatasetRow], int]:
    from bloomery.data.stream import dataset_rows
    from bloomery.train.data_stream import data_forecast, stream_of_run, training_documents

    recipe = loaded.recipe
    prepared = prepared_datasets(loaded, run)
    datasets = training_documents(recipe.data, prepared)
    ahead = data_forecast(recipe, stream_of_run(recipe, prepared, datasets), run)
    groups = [dataset.group for dataset in recipe.data.datasets] or [""]
    rows = dataset_rows(
        ahead.stream,
        names=[dataset.name for dataset in prepared],
        groups=groups,
        tokens=[dataset.token_count for dataset in datasets],
        samples=ahead.samples,
        step_of=ahead.step_of,
    )
    return rows, ahead.samples


def prepared_datasets(loaded: LoadedRecipe, run: Path | None) -> list[Any]:
    """Return the tokenised datasets: those of data.datasets, or the one that the run made of its sources."""
    from tempfile import gettempdir

    from bloomery.data.indexed import IndexedDataset
    from bloomery.data.prepare import PreparedDataset, dataset_prefixes
    from bloomery.data.prepare_build import TRAIN
    from bloomery.errors import DataError
    from bloomery.events.run_directory import RunDirectory

    data = loaded.recipe.data
    place = RunDirectory(run).data if run else Path(gettempdir()) / "bloomery-data"
    prefixes = dataset_prefixes(data, place)
    pairs = [(dataset.name, prefixes[dataset.path], dataset.resolved_weight) for dataset in data.datasets]
    if data.sources:
        if run is None:
            raise DataError(
                "The recipe's data.sources are not tokenised yet, so their tokens cannot be counted.",
                remedy="Give the directory of a run that was started, or a recipe with data.datasets.",
            )
        pairs = [(TRAIN, RunDirectory(run).data / TRAIN, 1.0)]
    prepared = []
    for name, prefix, weight in pairs:
        dataset = IndexedDataset(prefix)
        prepared.append(
            PreparedDataset(
                name=name,
                prefix=prefix,
                weight=weight,
                documents=dataset.document_count,
                tokens=dataset.token_count,
                text_bytes=0,
            )
        )
    return prepared


def _table(rows: Sequence[DatasetRow], *, first: str) -> str:
    """Return the rows as a table at most 100 columns wide; `first` is the heading of the names."""
    named = any(row.group for row in rows)
    heads = [first, "tokens", "wanted", "delivered", "epochs", "first epoch ends"]
    lines = [[*heads[:1], *(["group"] if named else []), *heads[1:]]]
    for row in rows:
        ends = "-" if row.first_epoch_step is None else f"step {row.first_epoch_step:,}"
        figures = [f"{row.tokens:,}", f"{row.wanted:.4%}", f"{row.delivered:.4%}", f"{row.epochs:.3f}", ends]
        name = _short(row.name, _NAME_WIDTH)
        lines.append([name, *([_short(row.group, _GROUP_WIDTH)] if named else []), *figures])
    return table_text(lines, left=(0, 1) if named else (0,))


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _draw(rows: Sequence[DatasetRow], groups: Sequence[DatasetRow], path: Path) -> None:
    """Draw the shares delivered and wanted, and the epochs, with one bar for each dataset and group."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    shown = [*groups, *rows][::-1]
    places = list(range(len(shown)))
    figure, (shares, epochs) = pyplot.subplots(
        1, 2, figsize=(11, max(2.5, 0.26 * len(shown) + 1.2)), dpi=120, sharey=True
    )
    shares.barh(places, [row.delivered * 100 for row in shown], color="tab:blue", label="delivered")
    shares.plot([row.wanted * 100 for row in shown], places, "k|", markersize=9, label="wanted")
    shares.set(xlabel="share of the run's samples (%)", yticks=places)
    shares.set_yticklabels([_short(row.name, _NAME_WIDTH) for row in shown], fontsize=7)
    shares.legend(loc="lower right")
    epochs.barh(places, [row.epochs for row in shown], color="tab:orange")
    epochs.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    epochs.set(xlabel="epochs")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
