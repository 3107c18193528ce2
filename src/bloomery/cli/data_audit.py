"""`bloomery data audit`: a report on the training text of a recipe or run, and on the order it is read in."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.cli.argument_values import positive
from bloomery.cli.arguments import data_bar
from bloomery.cli.data_pairs import print_result

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from bloomery.config.load import LoadedRecipe
    from bloomery.data.audit_text import Ngrams
    from bloomery.data.prepare import Prepared
    from bloomery.data.tokenizer import Tokenizer

_TOKENS = 1_000_000_000
HELD_OUT = "held-out: "


def add_parser(commands: Any) -> None:  # Any: argparse names no type for it
    """Add `audit` to the table of `bloomery data`."""
    audit = commands.add_parser(
        "audit",
        help="report on the order of samples, on shares and epochs, and on text that is held out or repeated",
        description="Write a report with pictures: whether neighbours in the order of samples lie near each "
        "other in the files, what each dataset gives in each epoch, which held-out documents are trained on, "
        "which n-grams training text shares with held-out text and with tasks, and how much documents repeat "
        "themselves. Status 1 where something wants a look.",
    )
    audit.add_argument("recipe", metavar="RECIPE|RUN", help="a recipe, or a run directory")
    audit.add_argument(
        "overrides", metavar="section.key=value", nargs="*", help="settings that replace the recipe's"
    )
    audit.add_argument(
        "--to", dest="out", type=Path, required=True, metavar="DIR", help="the directory of the report"
    )
    audit.add_argument(
        "--against",
        nargs="+",
        default=[],
        metavar="SOURCE",
        help="texts to look for in training text, such as those of tasks: files that `data tokenize` reads",
    )
    audit.add_argument("--text-field", default="text", help="field of --against that holds the text (text)")
    audit.add_argument(
        "--tasks",
        nargs="+",
        default=[],
        metavar="TASK",
        help="tasks to look for likewise: bloomery's own or, where it is installed, lm-eval's",
    )
    audit.add_argument("--include", type=Path, metavar="DIR", help="with --tasks: further tasks of lm-eval")
    audit.add_argument(
        "--ngram", type=positive, default=13, metavar="N", help="tokens of an n-gram (default: 13)"
    )
    audit.add_argument(
        "--tokens",
        type=positive,
        default=_TOKENS,
        metavar="N",
        help="tokens of training text whose n-grams are looked at; of more, stretches (default: 10⁹)",
    )
    audit.add_argument("--json", action="store_true", help="print one JSON object instead")
    audit.set_defaults(command=_audit, error=audit.error)


def _audit(options: argparse.Namespace) -> int:
    from bloomery import durable
    from bloomery.cli.data_audit_report import page_of, pictures_of
    from bloomery.cli.given_recipe import load_given
    from bloomery.config.validate import check_recipe
    from bloomery.errors import DataError

    if options.include and not options.tasks:
        options.error("--include wants --tasks")
    if options.out.exists() and not options.out.is_dir():
        raise DataError(f"{options.out} is a file.", remedy="Name a directory for the report: --to DIR.")
    path = Path(options.recipe)
    run = path if (path / "recipe.toml").exists() else None
    loaded = load_given(str(path / "recipe.toml") if run else options.recipe, options.overrides)
    check_recipe(loaded.recipe, loaded.sources)
    with data_bar(shown=not options.json) as progress:
        facts = _facts(loaded, run, options, progress)
    facts["look_at"] = look_at(facts)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, content in pictures_of(facts).items():
        durable.write_whole(options.out / name, content)
    durable.write_whole(options.out / "audit.json", json.dumps(facts, indent=1))
    durable.write_whole(options.out / "audit.md", page_of(facts))
    lines = [f"{options.out}/audit.md", *(f"  look at: {finding}" for finding in facts["look_at"])]
    print_result(facts, lines if facts["look_at"] else [*lines, "  nothing strange"], as_json=options.json)
    return int(bool(facts["look_at"]))


def _facts(
    loaded: LoadedRecipe, run: Path | None, options: argparse.Namespace, progress: Any
) -> dict[str, Any]:  # Any: the report as JSON
    from bloomery.cli.data_overlap import texts_of
    from bloomery.data.audit_order import neighbours_of, taken_of
    from bloomery.data.audit_text import Ngrams, audit_text
    from bloomery.data.overlap import overlap_of
    from bloomery.data.stream import dataset_rows
    from bloomery.train.data_stream import data_forecast, stream_of_run

    recipe = loaded.recipe
    training, held_out, prepared = texts_of(loaded, run, needs_held_out=False)
    theirs = _other_texts(options, prepared, end_of_document=recipe.data.end_of_document_token)
    others = {f"{HELD_OUT}{name}": Ngrams.of_dataset(text, options.ngram) for name, text in held_out.items()}
    others |= theirs
    stream = stream_of_run(recipe, prepared.train, list(training.values()))
    ahead = data_forecast(recipe, stream, run)
    rows = dataset_rows(
        ahead.stream,
        names=list(training),
        groups=[dataset.group for dataset in recipe.data.datasets] or [""],
        tokens=[dataset.token_count for dataset in training.values()],
        sequence_length=recipe.data.sequence_length,
        samples=ahead.samples,
        step_of=ahead.step_of,
    )
    order, sizes = ahead.stream.order, [_samples_of(ahead.stream, n) for n in range(len(rows))]
    near = neighbours_of(order, sizes, samples=ahead.samples, progress=progress)
    taken = taken_of(order, sizes, samples=ahead.samples)
    text = audit_text(training, others, size=options.ngram, at_most_tokens=options.tokens, progress=progress)
    return {
        "recipe": str(options.recipe),
        "samples": ahead.samples,
        "sequence_length": recipe.data.sequence_length,
        "order": recipe.data.order,
        "packing": recipe.data.packing,
        "ngram": options.ngram,
        "datasets": [
            asdict(row) | {"neighbours": asdict(lie), "taken": asdict(gives)}
            for row, lie, gives in zip(rows, near, taken, strict=True)
        ],
        "overlap": asdict(overlap_of(training, held_out, progress=progress)) if held_out else None,
        "text": asdict(text),
    }


def _samples_of(stream: Any, number: int) -> int:
    from bloomery.data.megatron_order import MegatronOrder

    order = stream.order
    return order.rows[number].sample_count if isinstance(order, MegatronOrder) else order.windows[number]


def _other_texts(
    options: argparse.Namespace, prepared: Prepared, *, end_of_document: str
) -> dict[str, Ngrams]:
    from bloomery.data.audit_text import Ngrams
    from bloomery.data.documents import BadDocuments
    from bloomery.data.sources import find_files, read_documents
    from bloomery.data.tokenizer import load_tokenizer
    from bloomery.evaluate.task_texts import task_texts

    if not (options.against or options.tasks):
        return {}
    tokenizer = load_tokenizer(prepared.tokenizer_path, end_of_document=end_of_document)
    others = {}
    for source in options.against:
        files = find_files([source]).files
        documents = read_documents(files, text_field=options.text_field, bad=BadDocuments())
        texts = (document.text for document in documents)
        others[source] = Ngrams.of_texts(_tokenised(texts, tokenizer), options.ngram)
    for task, shown in task_texts(options.tasks, include=options.include).items():
        others[f"task: {task}"] = Ngrams.of_texts(_tokenised(shown, tokenizer), options.ngram)
    return others


def _tokenised(texts: Iterator[str] | Sequence[str], tokenizer: Tokenizer) -> Iterator[npt.NDArray[np.int64]]:
    import numpy as np

    for text in texts:
        yield np.array(tokenizer.encode(text), dtype=np.int64)


def look_at(facts: dict[str, Any]) -> list[str]:
    """Return a sentence for each thing of a report that wants a look."""
    found = []
    for row in facts["datasets"]:
        found += [f"order of {row['name']}: {alarm}" for alarm in row["neighbours"]["alarms"]]
        taken = row["taken"]
        if taken["least"] is not None and taken["most"] - taken["least"] > 1:
            found.append(
                f"{row['name']}: some samples are taken {taken['most']} times and others {taken['least']}"
            )
        due = row["wanted"] * facts["samples"]
        if abs(row["delivered"] - row["wanted"]) * facts["samples"] > max(1.0, 0.001 * due):
            found.append(f"{row['name']}: {row['wanted']:.3%} wanted, {row['delivered']:.3%} delivered")
    for name, count in (facts["overlap"] or {"shared": {}})["shared"].items():
        if count:
            found.append(f"{count:,} held-out documents of {name} are in the training text")
    for name, shared in facts["text"]["shared"].items():
        if shared["documents"]:
            found.append(
                f"{shared['found']:,} of {shared['ngrams']:,} {facts['ngram']}-grams of {name} are in "
                f"{shared['documents']:,} training documents"
            )
    return found
