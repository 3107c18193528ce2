"""`bloomery evaluate`: the loss of any text under a model, and its scores on tasks of `lm-eval`."""

from __future__ import annotations

import json
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.cli.argument_values import not_negative, positive
from bloomery.cli.arguments import parser
from bloomery.cli.run_inputs import add_loading, load_saved
from bloomery.cli.tables import table_text
from bloomery.errors import BloomeryError, DataError

if TYPE_CHECKING:
    from bloomery.cli.run_inputs import LoadedModel
    from bloomery.evaluate.scoring import DocumentScore, TokenizedDocument

EXAMPLES = """\
bloomery evaluate runs/demo                          the held-out text of the run
bloomery evaluate runs/demo README.md --by-document  any text: .txt, .jsonl, .parquet, and others as text
bloomery evaluate runs/demo --tasks local_pairs      tasks of lm-eval, or the three that come with us
bloomery evaluate runs/demo --tasks local_pairs --follow   each new checkpoint, beside the training
bloomery evaluate runs/demo --table                  what was scored so far, by checkpoint
"""


def run(arguments: list[str]) -> int:
    """Run `bloomery evaluate …`; returns the exit status."""
    options = _parser()
    args = options.parse_intermixed_args(arguments)
    from bloomery.cli import evaluate_tasks

    if args.table:
        return evaluate_tasks.show_table(args)
    if args.follow and not args.tasks:
        options.error("--follow wants --tasks: the training measures held-out loss itself")
    if args.tasks and args.files:
        options.error("tasks are scored on their own texts: leave the files out")
    for option in ("limit", "shots", "include"):
        if getattr(args, option) is not None and not args.tasks:
            options.error(f"--{option} wants --tasks")
    if args.tasks is not None and not args.tasks.strip(", "):
        options.error("--tasks names no task")
    if args.tasks:
        return evaluate_tasks.follow(args) if args.follow else evaluate_tasks.score_once(args)
    for path in args.files:
        if not path.is_file():
            raise DataError(f"There is no file {path}.", remedy="Give files of text, .jsonl or .parquet.")
    loaded = load_saved(args.path, dtype=args.dtype, by_layer=args.by_layer)
    groups = _files(args, loaded) if args.files else _held_out(loaded)
    return _report(args, loaded, groups)


def _report(
    args: Namespace, loaded: LoadedModel, groups: Sequence[tuple[str, Iterator[TokenizedDocument]]]
) -> int:
    from bloomery.evaluate.scoring import score_documents, total

    saved = loaded.saved
    rows: list[DocumentScore] = []
    every: list[DocumentScore] = []
    for name, documents in groups:
        scores = list(
            score_documents(
                loaded.decoder,
                documents,
                opening=saved.bounds.begins or (saved.bounds.empty,),
                end=saved.tokenizer.eod,
                sequence_length=min(saved.recipe.data.sequence_length, saved.model.max_positions),
                rows=args.batch,
            )
        )
        if not scores:
            raise DataError(f"{name} holds no document.", remedy="Give a file with text.")
        rows += scores if args.by_document else [total(scores, name=name)]
        every += scores
    if len(rows) > 1:
        rows.append(total(every, name="all together"))
    if args.json:
        for row in rows:
            print(json.dumps({"checkpoint": str(saved.checkpoint), **_facts(row)}, ensure_ascii=False))
        return 0
    head = ("loss", "perplexity", "bits/byte", "tokens", "bytes", "text")
    print(table_text([head, *(_cells(row) for row in rows)], left=(5,), wrap=False))
    return 0


def _files(args: Namespace, loaded: LoadedModel) -> list[tuple[str, Iterator[TokenizedDocument]]]:
    return [(str(path), _documents(args, path, loaded)) for path in args.files]


def _documents(args: Namespace, path: Path, loaded: LoadedModel) -> Iterator[TokenizedDocument]:
    from bloomery.data.documents import BadDocuments
    from bloomery.data.readers import Reading, SourceFile, read_file
    from bloomery.evaluate.scoring import TokenizedDocument

    reading = Reading(text_field=args.text_field, separator=args.separator)
    file = SourceFile(key=path.name, path=path)
    for document in read_file(file, reading=reading, bad=BadDocuments(fail=True)):
        tokens = loaded.saved.tokenizer.encode(document.text)
        yield TokenizedDocument(document.place, tokens, document.size_bytes)


def _held_out(loaded: LoadedModel) -> list[tuple[str, Iterator[TokenizedDocument]]]:
    """Return the held-out text of the model's run, by dataset."""
    from bloomery.data.prepare import prepare
    from bloomery.events.run_directory import RunDirectory
    from bloomery.train.data_stream import held_out_documents

    saved = loaded.saved
    rundir = RunDirectory(saved.checkpoint.parent.parent)
    if not (saved.recipe.data.sources or saved.recipe.data.datasets):
        raise BloomeryError(
            f"{rundir.path} has no data of its own, as after an import.",
            remedy="Name the texts to evaluate on: bloomery evaluate RUN FILE …",
        )
    parts = held_out_documents(saved.recipe.data, prepare(saved.recipe.data, rundir.data))
    if not parts:
        raise BloomeryError(
            f"{rundir.path} has no held-out text.",
            remedy="Name texts to evaluate on, or set data.held_out_every before the training.",
        )
    return [(part.name, _of_dataset(part.name, part.documents, loaded)) for part in parts]


def _of_dataset(name: str, dataset: Any, loaded: LoadedModel) -> Iterator[TokenizedDocument]:
    from bloomery.evaluate.scoring import TokenizedDocument

    tokenizer = loaded.saved.tokenizer
    for number in range(dataset.document_count):
        tokens = dataset.document(number).tolist()
        if tokens and tokens[-1] == tokenizer.eod:
            tokens.pop()
        size = len(tokenizer.decode(tokens).encode())
        yield TokenizedDocument(f"{name}, document {number:,}", tokens, size)


def _facts(row: DocumentScore) -> dict[str, Any]:
    def finite(number: float) -> float | None:
        return number if math.isfinite(number) else None

    return {
        "text": row.name,
        "loss": finite(row.loss),
        "perplexity": finite(row.perplexity),
        "bits_per_byte": finite(row.bits_per_byte),
        "tokens": row.tokens,
        "bytes": row.bytes,
    }


def _cells(row: DocumentScore) -> tuple[str, ...]:
    return (
        f"{row.loss:.4f}",
        f"{row.perplexity:,.2f}" if row.perplexity < 1e7 else f"{row.perplexity:.2e}",
        f"{row.bits_per_byte:.4f}",
        f"{row.tokens:,}",
        f"{row.bytes:,}",
        row.name,
    )


def _parser() -> ArgumentParser:
    options = parser(
        "evaluate", "Measure the loss of texts under a model, or score it on tasks.", examples=EXAMPLES
    )
    options.add_argument("path", type=Path, metavar="RUN|CHECKPOINT", help="a run or checkpoint directory")
    options.add_argument(
        "files",
        nargs="*",
        default=[],
        type=Path,
        metavar="FILE",
        help="texts; without any, the held-out text of the run",
    )
    options.add_argument("--by-document", action="store_true", help="a line for each document")
    options.add_argument(
        "--text-field",
        default="text",
        metavar="NAME",
        help="field of .jsonl and .parquet (default: text)",
    )
    options.add_argument(
        "--separator", default="", metavar="TEXT", help="what separates the documents of a text file"
    )
    options.add_argument("--tasks", metavar="A,B", help="score these tasks with lm-eval instead")
    options.add_argument("--limit", type=positive, metavar="N", help="with --tasks: samples of each task")
    options.add_argument(
        "--shots", type=not_negative, metavar="N", help="with --tasks: examples before each question"
    )
    options.add_argument("--include", type=Path, metavar="DIR", help="with --tasks: further tasks")
    options.add_argument(
        "--follow", action="store_true", help="with --tasks: score new checkpoints until the run has ended"
    )
    options.add_argument(
        "--every-steps",
        type=positive,
        default=1,
        metavar="N",
        help="with --follow: at least this far apart",
    )
    options.add_argument(
        "--patience",
        type=positive,
        default=120,
        metavar="MINUTES",
        help="with --follow: end after so long without a new checkpoint (default: 120)",
    )
    options.add_argument("--table", action="store_true", help="print the scores of all checkpoints so far")
    options.add_argument(
        "--batch", type=positive, default=8, metavar="N", help="windows computed together (default: 8)"
    )
    add_loading(options)
    options.add_argument("--json", action="store_true", help="print one JSON object a line")
    return options
