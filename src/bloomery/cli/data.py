"""`bloomery data`: the table of its commands, and those that train a tokenizer and tokenise text."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from bloomery.cli.argument_values import json_file, not_negative, pair_prefix, positive, whole
from bloomery.cli.arguments import CommandParser, SubcommandParser, data_bar
from bloomery.cli.data_audit import add_parser as add_audit
from bloomery.cli.data_duplicates import add_parser as add_dedup
from bloomery.cli.data_fetch import add_parser as add_fetch
from bloomery.cli.data_pairs import add_parsers, add_report_parser, add_target, print_result
from bloomery.config.convert import typed_separator
from bloomery.config.data import LONGEST_LINE_MIB

if TYPE_CHECKING:
    from bloomery.data.corpus_parts import CorpusPart
    from bloomery.data.documents import BadDocuments, Document
    from bloomery.data.readers import SourceFile

_END_OF_DOCUMENT = "<|endoftext|>"
_SMALLEST = 257
"""Every byte and the end of a document."""
_MOST_WORKERS = 1024
"""Each is a thread at least."""


def run(arguments: list[str]) -> int:
    """Run one `bloomery data` command, and return the exit status."""
    options = _parser().parse_args(arguments)
    status: int = options.command(options)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="bloomery data", description="Fetch and tokenise text, and inspect tokenised datasets."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=SubcommandParser)

    trainer = commands.add_parser(
        "tokenizer",
        help="train a byte-level BPE tokenizer on text",
        description="Train a byte-level BPE tokenizer on text, and write its tokenizer.json.",
    )
    _add_sources(trainer)
    trainer.add_argument(
        "--vocabulary",
        metavar="N",
        type=whole(_SMALLEST),
        default=8192,
        help=f"entries of the vocabulary, at least {_SMALLEST} (default: 8192)",
    )
    trainer.add_argument(
        "--split",
        choices=("text", "code"),
        default="text",
        help="rules by which text is split before merging, for prose or for source code (default: text)",
    )
    add_target(trainer, metavar="FILE", kind=json_file, about="the tokenizer.json to write")
    trainer.set_defaults(command=_train_tokenizer)

    tokenizing = commands.add_parser(
        "tokenize",
        help="write text as token ids: PREFIX.bin and PREFIX.idx",
        description="Tokenise text on all cores into a pair PREFIX.bin and PREFIX.idx, in Megatron's format.",
    )
    _add_sources(tokenizing)
    tokenizing.add_argument(
        "--tokenizer",
        required=True,
        help="a tokenizer.json, a SentencePiece model, or hf:NAME for one of Hugging Face",
    )
    add_target(
        tokenizing,
        metavar="PREFIX",
        kind=pair_prefix,
        about="path of the pair to write, without its extension",
    )
    tokenizing.add_argument(
        "--workers",
        metavar="N",
        type=whole(1, _MOST_WORKERS),
        default=len(os.sched_getaffinity(0)),
        help="cores that tokenise (default: those that this process may use)",
    )
    tokenizing.add_argument(
        "--engine",
        choices=("auto", "reference"),
        default="auto",
        help="auto: the fast engine where it is proven to give the reference's ids (default)",
    )
    tokenizing.add_argument(
        "--part",
        metavar="I/N",
        type=_part,
        help="tokenise one of N parts, for instance 3/16, into PREFIX-part-03-of-16; `data merge --parts` "
        "joins them to what one machine would write",
    )
    tokenizing.set_defaults(command=_tokenize)

    add_fetch(commands)
    add_parsers(commands, end_of_document=_END_OF_DOCUMENT)
    add_dedup(commands)
    add_audit(commands)
    add_report_parser(commands)
    return parser


def _part(text: str) -> CorpusPart:
    from bloomery.data.corpus_parts import CorpusPart

    try:
        return CorpusPart.parse(text)
    except ValueError as wrong:
        raise argparse.ArgumentTypeError(str(wrong)) from None


def _add_sources(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help=".txt, .jsonl (.gz, .zst), .parquet, .arrow, a directory or glob of these, or python:stdlib",
    )
    parser.add_argument(
        "--text-field", default="text", help="field or column that holds the text (default: text)"
    )
    parser.add_argument(
        "--separator",
        type=typed_separator,
        default="",
        help="text between two documents of a .txt file, such as '\\n\\n' (default: a file is one document)",
    )
    parser.add_argument(
        "--bad-documents",
        choices=("skip", "fail"),
        default="skip",
        help="what to do with documents that are empty, malformed or not UTF-8 (default: skip)",
    )
    parser.add_argument(
        "--longest-line-mib",
        metavar="N",
        type=positive,
        default=LONGEST_LINE_MIB,
        help="treat a .jsonl line, or a text of a .txt file, that is longer than N MiB as a bad document "
        f"(default: {LONGEST_LINE_MIB})",
    )
    parser.add_argument(
        "--held-out-every",
        metavar="N",
        type=not_negative,
        default=0,
        help="hold out 1 document in N, as data.held_out_every does (default: 0, none)",
    )
    parser.add_argument(
        "--end-of-document",
        metavar="TOKEN",
        default=_END_OF_DOCUMENT,
        help=f"token that ends a document (default: {_END_OF_DOCUMENT})",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")


def _train_tokenizer(options: argparse.Namespace) -> int:
    from bloomery.data.prepare_build import watched_texts
    from bloomery.data.sources import is_held_out
    from bloomery.data.tokenizer import train_tokenizer
    from bloomery.errors import DataError

    started = time.monotonic()
    documents, bad, total_bytes = _documents(options)
    used = itertools.count()
    training = (
        document for document in documents if not is_held_out(document.key, one_in=options.held_out_every)
    )
    with data_bar(shown=not options.json) as progress:
        tokenizer = train_tokenizer(
            watched_texts(_counted(training, used), total_bytes=total_bytes, progress=progress),
            vocabulary=options.vocabulary,
            end_of_document=options.end_of_document,
            split=options.split,
        )
    if next(used) == 0:
        raise DataError(
            f"No document is left to train a tokenizer on. {bad.summary()}".rstrip(),
            remedy="Give more text, mend the bad documents, or hold out fewer (--held-out-every).",
        )
    tokenizer.save(options.out)
    facts = {
        "tokenizer": str(options.out),
        "vocabulary": tokenizer.vocabulary_size,
        "vocabulary_asked": options.vocabulary,
        "end_of_document_id": tokenizer.eod,
        "bad_documents": bad.count,
        "seconds": round(time.monotonic() - started, 3),
    }
    lines = [f"{options.out}: vocabulary {tokenizer.vocabulary_size:,} in {facts['seconds']:.1f} s"]
    if tokenizer.vocabulary_size != options.vocabulary:
        lines.append(f"{options.vocabulary:,} entries were asked for; this text does not give more.")
    return print_result(facts, [*lines, bad.summary()], as_json=options.json)


def _counted(documents: Iterable[Document], used: Iterator[int]) -> Iterator[Document]:
    for document in documents:
        next(used)
        yield document


def _tokenize(options: argparse.Namespace) -> int:
    from bloomery.data.corpus_parts import BAD_LIST, is_of_output
    from bloomery.data.tokenize_corpus import tokenize
    from bloomery.data.tokenize_pool import ENGINE_THREADS
    from bloomery.data.tokenize_worker import Job
    from bloomery.data.tokenizer import find_tokenizer

    os.environ.setdefault(ENGINE_THREADS, str(options.workers))
    started = time.monotonic()
    job = Job(
        directory="",
        tokenizer=str(find_tokenizer(options.tokenizer)),
        end_of_document=options.end_of_document,
        text_field=options.text_field,
        separator=options.separator,
        longest_line_mib=options.longest_line_mib,
        fail=options.bad_documents == "fail",
        held_out_every=options.held_out_every,
        fast=options.engine == "auto",
    )
    files = _files_of(options.sources)
    with data_bar(shown=not options.json) as progress:
        prefix = options.part.prefix(options.out) if options.part else options.out
        report = prefix.with_name(prefix.name + BAD_LIST)
        done = tokenize(
            [file for file in files if not is_of_output(file.path, options.out)],
            options.out,
            job,
            workers=options.workers,
            report=report,
            progress=progress,
            part=options.part,
        )
    seconds = time.monotonic() - started
    if not done.bad.count:
        report.unlink()
    tokens = sum(pair.tokens for pair in done.pairs)
    facts = {
        "datasets": [
            {"prefix": str(pair.prefix), "documents": pair.documents, "tokens": pair.tokens}
            for pair in done.pairs
        ],
        **({"part": options.part.number, "parts": options.part.count} if options.part else {}),
        "dtype": done.dtype,
        "text_bytes": done.text_bytes,
        "bad_documents": done.bad.count,
        "bad_documents_report": str(report) if done.bad.count else None,
        "engines": done.engines,
        "notes": done.notes,
        "workers": options.workers,
        "pieces": done.pieces,
        "pieces_kept": done.pieces_kept,
        "seconds": round(seconds, 3),
    }
    lines = [f"{pair.prefix}: {pair.documents:,} documents, {pair.tokens:,} tokens" for pair in done.pairs]
    speed = done.text_bytes / 1e6 / seconds
    engines = " and ".join(done.engines)
    lines.append(
        f"{done.text_bytes / 1e6:,.1f} MB in {seconds:.1f} s ({speed:,.1f} MB/s, {engines}, "
        f"{options.workers} at work)"
        + (f", {done.text_bytes / tokens:.2f} bytes per token" if tokens else "")
    )
    if done.pieces_kept:
        lines.append(f"{done.pieces_kept} of {done.pieces} pieces were kept from an earlier start.")
    if done.bad.count:
        lines.append(f"{done.bad.summary()}; all are listed in {report}")
    return print_result(facts, [*lines, *done.notes], as_json=options.json)


def _documents(options: argparse.Namespace) -> tuple[Iterator[Document], BadDocuments, int]:
    from bloomery.data.documents import BadDocuments
    from bloomery.data.sources import read_documents

    files = _files_of(options.sources)
    bad = BadDocuments(fail=options.bad_documents == "fail")
    total_bytes = sum(file.path.stat().st_size for file in files)
    documents = read_documents(
        files,
        text_field=options.text_field,
        separator=options.separator,
        longest_line_mib=options.longest_line_mib,
        bad=bad,
    )
    return documents, bad, total_bytes


def _files_of(sources: Sequence[str]) -> tuple[SourceFile, ...]:
    """Return the files of text, and tell which others were left out. An incomplete fetch is refused."""
    from bloomery.data.fetch import refuse_incomplete
    from bloomery.data.sources import find_files

    files = find_files(sources)
    refuse_incomplete(file.path for file in files.files)
    if files.ignored:
        print(files.note(), file=sys.stderr)
    return files.files
