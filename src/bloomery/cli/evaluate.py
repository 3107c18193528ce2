"""`bloomery evaluate`: the loss of any text under a model, and its scores on tasks of `lm-eval`.

Tasks score one checkpoint, or each new one beside the training, which never waits.
"""

from __future__ import annotations

import math
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.checkpoint.format.catalogue import checkpoints
from bloomery.checkpoint.format.manifest import MANIFEST
from bloomery.cli.argument_values import not_negative, positive
from bloomery.cli.arguments import parser
from bloomery.cli.json_output import json_text
from bloomery.cli.run_inputs import add_loading, load_saved, run_directory
from bloomery.cli.tables import table_text
from bloomery.config.convert import typed_separator
from bloomery.errors import BloomeryError, CheckpointError, DataError, StorageError
from bloomery.events.journal import Journal, read_journal, read_tail
from bloomery.events.run_directory import RunDirectory

if TYPE_CHECKING:
    from bloomery.cli.run_inputs import LoadedModel
    from bloomery.evaluate.open_checkpoint import OpenedModel
    from bloomery.evaluate.scoring import DocumentScore, TokenizedDocument


EXAMPLES = """\
bloomery evaluate runs/demo                          the held-out text of the run
bloomery evaluate runs/demo README.md --by-document  any text: .txt, .jsonl, .parquet, and others as text
bloomery evaluate runs/demo README.md --window 4096  see more tokens at once than in the training
bloomery evaluate runs/demo --tasks local_pairs      tasks of lm-eval, or the three that come with us
bloomery evaluate runs/demo --tasks local_pairs --follow   each new checkpoint, beside the training
bloomery evaluate runs/demo --table                  what was scored so far, by checkpoint
"""


def run(arguments: list[str]) -> int:
    """Run `bloomery evaluate …`, and return the exit status."""
    options = _parser()
    args = options.parse_intermixed_args(arguments)
    if args.table:
        return show_table(args)
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
        return follow(args) if args.follow else score_once(args)
    for path in args.files:
        if not path.is_file():
            raise DataError(f"There is no file {path}.", remedy="Give files of text, .jsonl or .parquet.")
    loaded = load_saved(args.path, dtype=args.dtype, by_layer=args.by_layer)
    groups = _files(args, loaded) if args.files else _held_out(loaded)
    return _report(args, loaded, groups)


def _report(
    args: Namespace, loaded: LoadedModel, groups: Sequence[tuple[str, Iterator[TokenizedDocument]]]
) -> int:
    from bloomery.evaluate.scoring import score_documents, total_score

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
                sequence_length=_window(args, saved),
                rows=args.batch,
            )
        )
        if not scores:
            raise DataError(f"{name} holds no document.", remedy="Give a text, or its --text-field.")
        rows += scores if args.by_document else [total_score(scores, name=name)]
        every += scores
    if len(rows) > 1:
        rows.append(total_score(every, name="all together"))
    if args.json:
        for row in rows:
            print(json_text({"checkpoint": str(saved.checkpoint), **_facts(row)}, ensure_ascii=False))
        return 0
    head = ("loss", "perplexity", "bits/byte", "tokens", "bytes", "text")
    print(table_text([head, *(_cells(row) for row in rows)], left=(5,), wrap=False))
    return 0


def _window(args: Namespace, saved: OpenedModel) -> int:
    from bloomery.evaluate.open_checkpoint import trained_window, window_of

    window = window_of(saved, args.window)
    if window > trained_window(saved):
        trained = f"{trained_window(saved):,}"
        print(f"note: the model was trained with {trained} tokens at a time", file=sys.stderr)
    return window


def _files(args: Namespace, loaded: LoadedModel) -> list[tuple[str, Iterator[TokenizedDocument]]]:
    return [(str(path), _documents(args, path, loaded)) for path in args.files]


def _documents(args: Namespace, path: Path, loaded: LoadedModel) -> Iterator[TokenizedDocument]:
    from bloomery.data.documents import BadDocuments
    from bloomery.data.readers import Reading, SourceFile, read_file
    from bloomery.evaluate.scoring import TokenizedDocument

    reading = Reading(text_field=args.text_field, separator=args.separator)
    bad = BadDocuments()
    for document in read_file(SourceFile(key=path.name, path=path), reading=reading, bad=bad):
        tokens = loaded.saved.tokenizer.encode(document.text)
        yield TokenizedDocument(document.place, tokens, document.size_bytes)
    if bad.count:
        print(f"note: {bad.summary()}", file=sys.stderr)


def _held_out(loaded: LoadedModel) -> list[tuple[str, Iterator[TokenizedDocument]]]:
    """Return the held-out text of the model's run, by dataset."""
    from bloomery.data.prepare import prepared_of_run
    from bloomery.events.run_directory import RunDirectory
    from bloomery.train.data_stream import held_out_documents

    saved = loaded.saved
    rundir = RunDirectory(saved.checkpoint.parent.parent)
    if not (saved.recipe.data.sources or saved.recipe.data.datasets):
        raise BloomeryError(
            f"{rundir.path} has no data of its own, as after an import.",
            remedy="Name the texts to evaluate on: bloomery evaluate RUN FILE …",
        )
    parts = held_out_documents(saved.recipe.data, prepared_of_run(saved.recipe.data, rundir.data))
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
        "--text-field", default="text", metavar="NAME", help="field of .jsonl and .parquet (default: text)"
    )
    options.add_argument(
        "--separator",
        default="",
        type=typed_separator,
        metavar="TEXT",
        help="what separates the documents of a text file, such as '\\n\\n'",
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
        "--every-steps", type=positive, default=1, metavar="N", help="with --follow: at least this far apart"
    )
    options.add_argument(
        "--patience",
        type=positive,
        default=120,
        metavar="MINUTES",
        help="with --follow: exit after MINUTES without a new checkpoint (default: 120)",
    )
    options.add_argument("--table", action="store_true", help="print the scores of all checkpoints so far")
    options.add_argument(
        "--batch", type=positive, default=8, metavar="N", help="windows computed together (default: 8)"
    )
    options.add_argument(
        "--window",
        type=positive,
        metavar="TOKENS",
        help="tokens that the model sees at once; more than in the training try how it extrapolates",
    )
    add_loading(options)
    options.add_argument("--json", action="store_true", help="print one JSON object per line")
    return options


EVENT = "tasks"
_POLL_S = 2.0


def score_once(args: Namespace) -> int:
    """Score one checkpoint, record the scores in its run and print them, and return the exit status."""
    record = _score(args, args.path)
    _print([record], args)
    return 0


def follow(args: Namespace) -> int:
    """Score the newest checkpoint again and again until the run has ended, and return the exit status.

    It runs in a process of its own and only reads what the training has committed. Where it is slower than
    the training saves, it leaves out what lies between. Checkpoints that were scored before are left out.
    """
    from bloomery.evaluate.harness import refuse_without_lm_eval

    refuse_without_lm_eval()
    rundir = run_directory(args.path)
    waited_since = time.monotonic()
    while True:
        has_ended = _has_ended(rundir)  # asked first, so that a last checkpoint cannot be overlooked
        directory = _next(rundir, args)
        if directory is not None:
            try:
                _print([_score(args, directory)], args)
            except (CheckpointError, StorageError):
                if directory.exists():  # otherwise it was pruned while it was read
                    raise
            waited_since = time.monotonic()
        elif has_ended:
            return 0
        elif time.monotonic() - waited_since > 60 * args.patience:
            raise BloomeryError(
                f"{rundir.path} has saved no checkpoint for {args.patience} minutes.",
                remedy="Look whether it still trains, or wait longer (--patience).",
            )
        else:
            time.sleep(_POLL_S)


def show_table(args: Namespace) -> int:
    """Print what was scored so far, a line for each checkpoint, and return the exit status."""
    rundir = run_directory(args.path)
    records = [record for record in read_journal(rundir.evaluations) if record["event"] == EVENT]
    if not records and not args.json:
        print(f"{args.path} has no scores yet: bloomery evaluate {rundir.as_word()} --tasks …")
        return 0
    _print(sorted(records, key=lambda record: (record["step"], record["time"])), args)
    return 0


def _score(args: Namespace, path: Path) -> dict[str, Any]:
    """Score a checkpoint and return the record that its run's evaluations now hold."""
    from bloomery.evaluate.harness import refuse_without_lm_eval, score_tasks

    refuse_without_lm_eval()
    loaded = load_saved(path, dtype=args.dtype, by_layer=args.by_layer)
    rundir = RunDirectory(loaded.saved.checkpoint.parent.parent)
    with Journal(rundir.evaluations, is_shared=True):
        pass  # a run that cannot be written to is told before hours of scoring
    scores = score_tasks(
        loaded.saved,
        loaded.decoder,
        _names(args),
        batch=args.batch,
        window=_window(args, loaded.saved) if args.window else None,
        limit=args.limit,
        shots=args.shots,
        include=args.include,
    )
    directory = loaded.saved.checkpoint
    checkpoint = {item.name: item for item in checkpoints(rundir)}.get(directory.name)
    step, incarnation = (checkpoint.step, checkpoint.incarnation) if checkpoint else (0, 0)
    with Journal(rundir.evaluations, is_shared=True, is_needed=True) as journal:
        record = journal.write(
            EVENT,
            incarnation=incarnation,
            step=step,
            checkpoint=directory.name,
            tasks=_names(args),  # a name may stand for several tasks, under whose names the scores are
            limit=args.limit,
            shots=args.shots,
            window=args.window,
            scores=[score.to_json() for score in scores],
        )
        if journal.is_refused:
            _print([record], args)  # what took hours is shown at least
    return record


def _next(rundir: RunDirectory, args: Namespace) -> Path | None:
    """Return the newest checkpoint if it is to be scored."""
    committed = checkpoints(rundir)
    if not committed:
        return None
    tasks = set(_names(args))
    done = [
        record
        for record in read_journal(rundir.evaluations)
        if record["event"] == EVENT
        and all(record.get(name) == getattr(args, name) for name in ("limit", "shots", "window"))
        and tasks <= {*record.get("tasks", ()), *(score["task"] for score in record["scores"])}
    ]
    newest = committed[-1]
    if any(record["checkpoint"] == newest.name for record in done):
        return None
    last = max((record["step"] for record in done if record["step"] < newest.step), default=None)
    is_last = _has_ended(rundir)
    if last is not None and newest.step - last < args.every_steps and not is_last:
        return None
    return newest.directory if (newest.directory / MANIFEST).is_file() else None


def _has_ended(rundir: RunDirectory) -> bool:
    """Whether the first rank's journal ends with the end of the run, not only of a job of it."""
    has_ended = False
    for event in read_tail(rundir.journal()):
        if event["event"] in ("start", "step", "end"):
            has_ended = event["event"] == "end" and bool(event.get("finished", True))
    return has_ended


def _names(args: Namespace) -> list[str]:
    return [name.strip() for name in args.tasks.split(",") if name.strip()]


def _print(records: list[dict[str, Any]], args: Namespace) -> None:
    if args.json:
        for record in records:
            print(json_text(record, ensure_ascii=False), flush=True)
        return
    rows = [("step", "checkpoint", "task", "samples", "scores")]
    for record in records:
        for score in record["scores"]:
            metrics = {
                name: value
                for name, value in score.items()
                if isinstance(value, float) and not name.endswith("_stderr")
            }
            metrics_text = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            rows.append(
                (
                    f"{record['step']:,}",
                    record["checkpoint"],
                    score["task"],
                    str(score["samples"]),
                    metrics_text,
                )
            )
    print(table_text(rows, left=(1, 2, 4)), flush=True)
