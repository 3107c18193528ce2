"""`bloomery data`: train a tokenizer, tokenise text, look into a tokenised dataset."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.cli.bars import data_bar

if TYPE_CHECKING:
    from bloomery.data.sources import BadDocuments, Document

_END_OF_DOCUMENT = "<|endoftext|>"


def run(arguments: list[str]) -> int:
    """Run one `bloomery data` command; 0 when it did what was asked."""
    options = _parser().parse_args(arguments)
    status: int = options.command(options)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bloomery data", description="Text to tokens, and a look at them.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    trainer = commands.add_parser("tokenizer", help="train a byte-level BPE tokenizer on text")
    _add_sources(trainer)
    trainer.add_argument("--vocabulary", type=int, default=8192, help="entries wanted (default: 8192)")
    trainer.add_argument(
        "--split", choices=("text", "code"), default="text", help="where merges stop (default: text)"
    )
    trainer.add_argument("--out", type=Path, required=True, help="the tokenizer.json to write")
    trainer.set_defaults(command=_train_tokenizer)

    tokenizing = commands.add_parser("tokenize", help="write text as token ids: OUT.bin and OUT.idx")
    _add_sources(tokenizing)
    tokenizing.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer.json")
    tokenizing.add_argument("--out", type=Path, required=True, help="path of the pair, without the ending")
    tokenizing.set_defaults(command=_tokenize)

    inspect = commands.add_parser(
        "inspect", help="documents, tokens, lengths and a peek of a tokenised dataset"
    )
    inspect.add_argument("prefix", type=Path, help="path of the .bin/.idx pair, without the ending")
    inspect.add_argument(
        "--tokenizer", type=Path, help="tokenizer.json for the peek (default: the one beside)"
    )
    inspect.add_argument("--peek", type=int, default=3, help="documents to show (default: 3)")
    inspect.add_argument("--end-of-document", default=_END_OF_DOCUMENT, help="token that ends a document")
    inspect.add_argument("--json", action="store_true", help="print one JSON object instead")
    inspect.set_defaults(command=_inspect)
    return parser


def _add_sources(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help=".txt, .jsonl, .jsonl.gz, a directory or glob of these, or python:stdlib",
    )
    parser.add_argument("--text-field", default="text", help="field of a JSON line (default: text)")
    parser.add_argument(
        "--bad-documents", choices=("skip", "fail"), default="skip", help="empty, malformed or not UTF-8"
    )
    parser.add_argument(
        "--held-out-every",
        type=int,
        default=0,
        help="keep 1 document in so many apart, as data.held_out_every does (default: 0, none)",
    )
    parser.add_argument("--end-of-document", default=_END_OF_DOCUMENT, help="token that ends a document")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")


def _train_tokenizer(options: argparse.Namespace) -> int:
    from bloomery.data.prepare import watched_texts
    from bloomery.data.sources import is_held_out
    from bloomery.data.tokenizer import train_tokenizer

    started = time.monotonic()
    documents, bad, total_bytes = _documents(options)
    training = (one for one in documents if not is_held_out(one.key, every=options.held_out_every))
    with data_bar(shown=not options.json) as progress:
        tokenizer = train_tokenizer(
            watched_texts(training, total_bytes=total_bytes, progress=progress),
            vocabulary=options.vocabulary,
            end_of_document=options.end_of_document,
            split=options.split,
        )
    tokenizer.save(options.out)
    facts = {
        "tokenizer": str(options.out),
        "vocabulary": tokenizer.vocabulary_size,
        "vocabulary_asked": options.vocabulary,
        "end_of_document_id": tokenizer.eod,
        "bad_documents": len(bad.entries),
        "seconds": round(time.monotonic() - started, 3),
    }
    lines = [f"{options.out}: vocabulary {tokenizer.vocabulary_size:,} in {facts['seconds']:.1f} s"]
    if tokenizer.vocabulary_size != options.vocabulary:
        lines.append(f"{options.vocabulary:,} were asked; this text gives no more.")
    return _tell(facts, [*lines, bad.summary()], as_json=options.json)


def _tokenize(options: argparse.Namespace) -> int:
    from contextlib import ExitStack

    from bloomery.data.indexed import IndexedWriter, token_dtype
    from bloomery.data.sources import is_held_out
    from bloomery.data.tokenize import encode_all
    from bloomery.data.tokenizer import load_tokenizer
    from bloomery.errors import DataError

    started = time.monotonic()
    tokenizer = load_tokenizer(options.tokenizer, end_of_document=options.end_of_document)
    documents, bad, total_bytes = _documents(options)
    dtype = token_dtype(tokenizer.vocabulary_size)
    prefixes = [options.out]
    if options.held_out_every:
        prefixes.append(options.out.with_name(options.out.name + "-held-out"))
    text_bytes = 0
    with data_bar(shown=not options.json) as progress, ExitStack() as stack:
        writers = [stack.enter_context(IndexedWriter(prefix, dtype=dtype)) for prefix in prefixes]
        for document, ids in encode_all(documents, tokenizer, progress=progress, total_bytes=total_bytes):
            writers[is_held_out(document.key, every=options.held_out_every)].add_document(ids)
            text_bytes += document.size_bytes
        if not writers[0].document_count:
            raise DataError(
                f"No document is left to write to {options.out}. {bad.summary()}",
                remedy="Give text that is not empty, or leave out --held-out-every.",
            )
    sizes = [(str(one.prefix), one.document_count, one.token_count) for one in writers]
    seconds = time.monotonic() - started
    report = _write_report(bad, options.out)
    facts = {
        "datasets": [{"prefix": name, "documents": count, "tokens": ids} for name, count, ids in sizes],
        "dtype": dtype.name,
        "text_bytes": text_bytes,
        "bad_documents": len(bad.entries),
        "bad_documents_report": report,
        "seconds": round(seconds, 3),
    }
    rate = text_bytes / sum(ids for *_, ids in sizes)
    lines = [f"{name}: {count:,} documents, {ids:,} tokens" for name, count, ids in sizes]
    lines.append(f"{text_bytes / 1e6:,.1f} MB in {seconds:.1f} s, {rate:.2f} bytes a token")
    if report:
        lines.append(f"{bad.summary()}; all are listed in {report}")
    return _tell(facts, lines, as_json=options.json)


def _write_report(bad: BadDocuments, prefix: Path) -> str | None:
    """Name every skipped document beside the dataset; the path of the list, or None when all were good."""
    from bloomery.data.storage import write_whole

    report = prefix.with_name(prefix.name + "-bad-documents.jsonl")
    if not bad.entries:
        report.unlink(missing_ok=True)
        return None
    write_whole(report, bad.report())
    return str(report)


def _inspect(options: argparse.Namespace) -> int:
    import numpy as np

    from bloomery.data.indexed import IndexedDataset
    from bloomery.data.tokenizer import load_tokenizer

    dataset = IndexedDataset(options.prefix)
    lengths = np.diff(dataset.document_starts)
    beside = options.prefix.with_name("tokenizer.json")
    path = options.tokenizer or (beside if beside.exists() else None)
    peeks: list[dict[str, Any]] = []
    for number in range(min(options.peek, dataset.document_count)):
        ids = dataset.document(number)[:64].tolist()
        peek: dict[str, Any] = {"document": number, "tokens": int(lengths[number]), "ids": ids[:16]}
        if path is not None:
            tokenizer = load_tokenizer(path, end_of_document=options.end_of_document)
            peek["text"] = tokenizer.decode(ids)
        peeks.append(peek)
    histogram = _histogram(lengths.tolist())
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
    return _tell(facts, lines, as_json=options.json)


def _histogram(lengths: list[int]) -> list[tuple[int, int, int]]:
    """(from, below, documents) for each power of two from the shortest to the longest."""
    counts: dict[int, int] = {}
    for length in lengths:
        counts[length.bit_length()] = counts.get(length.bit_length(), 0) + 1
    sizes = range(min(counts), max(counts) + 1) if counts else range(0)
    return [((1 << size) >> 1, 1 << size, counts.get(size, 0)) for size in sizes]


def _documents(options: argparse.Namespace) -> tuple[Iterator[Document], BadDocuments, int]:
    from bloomery.data.sources import BadDocuments, find_files, read_documents

    found = find_files(options.sources)
    bad = BadDocuments(fail=options.bad_documents == "fail")
    total_bytes = sum(file.path.stat().st_size for file in found.files)
    if found.ignored:
        print(f"{len(found.ignored)} files are not text and are left out.", file=sys.stderr)
    return read_documents(found.files, text_field=options.text_field, bad=bad), bad, total_bytes


def _tell(facts: dict[str, Any], lines: list[str], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(facts, ensure_ascii=False))
    else:
        print("\n".join(lines).rstrip())
    return 0
