"""`bloomery data audit`: reports on a recipe's training text, and on the order in which it is read."""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.cli.argument_values import positive
from bloomery.cli.arguments import data_bar
from bloomery.cli.data_pairs import print_result
from bloomery.cli.json_output import json_text

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from bloomery.config.load import LoadedRecipe
    from bloomery.data.prepare import Prepared
    from bloomery.data.text_audit import Ngrams
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
        "themselves. Exit status 1 if there is a finding.",
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
        help="most tokens of training text to read; of a longer text, evenly spaced stretches (default: 10⁹)",
    )
    audit.add_argument("--json", action="store_true", help="print one JSON object instead")
    audit.set_defaults(command=_audit, error=audit.error)


def _audit(options: argparse.Namespace) -> int:
    from bloomery import durable
    from bloomery.cli.arguments import load_given
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
    facts["look_at"] = findings_of(facts)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, content in pictures_of(facts).items():
        durable.write_whole(options.out / name, content)
    durable.write_whole(options.out / "audit.json", json_text(facts, indent=1))
    durable.write_whole(options.out / "audit.md", page_of(facts))
    lines = [f"{options.out}/audit.md", *(f"  look at: {finding}" for finding in facts["look_at"])]
    print_result(facts, lines if facts["look_at"] else [*lines, "  nothing strange"], as_json=options.json)
    return int(bool(facts["look_at"]))


def _facts(
    loaded: LoadedRecipe, run: Path | None, options: argparse.Namespace, progress: Any
) -> dict[str, Any]:  # Any: the report as JSON
    from bloomery.cli.data_duplicates import texts_of
    from bloomery.data.order_audit import neighbours_of, sample_counts_of
    from bloomery.data.overlap import overlap_of
    from bloomery.data.position import total, within
    from bloomery.data.stream import dataset_rows
    from bloomery.data.text_audit import Ngrams, audit_text
    from bloomery.train.data_stream import data_forecast, stream_of_run

    recipe = loaded.recipe
    training, held_out, prepared = texts_of(loaded, run, needs_held_out=False)
    theirs = _other_texts(options, prepared, end_of_document=recipe.data.end_of_document_token)
    others = {f"{HELD_OUT}{name}": Ngrams.of_dataset(text, options.ngram) for name, text in held_out.items()}
    others |= theirs
    files = list(training.values())
    stream = stream_of_run(recipe, prepared.train, files)
    ahead = data_forecast(recipe, stream, run)
    rows = dataset_rows(
        ahead.stream,
        names=list(training),
        groups=[dataset.group for dataset in recipe.data.datasets] or [""],
        tokens=[dataset.token_count for dataset in training.values()],
        samples=ahead.samples,
        step_of=ahead.step_of,
    )
    order, sizes = ahead.stream.order, [_samples_of(ahead.stream, n) for n in range(len(rows))]
    near = neighbours_of(order, sizes, samples=ahead.samples, datasets=files, progress=progress)
    skips = within(ahead.position.skips, (range(ahead.samples),))
    taken = sample_counts_of(order, sizes, samples=ahead.samples, skips=skips)
    wanted = [float(count / ahead.samples) for count in ahead.stream.asked(ahead.samples)]
    text = audit_text(training, others, size=options.ngram, at_most_tokens=options.tokens, progress=progress)
    return {
        "recipe": str(options.recipe),
        "samples": ahead.samples,
        "skipped": total(skips),
        "skips": len(skips),
        "mixtures": len(ahead.stream.mixtures),
        "sequence_length": recipe.data.sequence_length,
        "order": recipe.data.order,
        "packing": recipe.data.packing,
        "ngram": options.ngram,
        "datasets": [
            asdict(row) | {"wanted": share, "neighbours": asdict(lie), "taken": asdict(gives)}
            for row, share, lie, gives in zip(rows, wanted, near, taken, strict=True)
        ],
        "overlap": asdict(overlap_of(training, held_out, progress=progress)) if held_out else None,
        "text": asdict(text),
    }


def _samples_of(stream: Any, number: int) -> int:
    from bloomery.data.megatron_order import MegatronOrder

    order = stream.order
    if not isinstance(order, MegatronOrder):
        windows: int = order.windows[number]
        return windows
    return max(1, order.rows[number].epoch_samples)


def _other_texts(
    options: argparse.Namespace, prepared: Prepared, *, end_of_document: str
) -> dict[str, Ngrams]:
    from bloomery.data.documents import BadDocuments
    from bloomery.data.sources import find_files, read_documents
    from bloomery.data.text_audit import Ngrams
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


def findings_of(facts: dict[str, Any]) -> list[str]:
    """Return a sentence for each finding of a report."""
    found = []
    for row in facts["datasets"]:
        found += [f"order of {row['name']}: {alarm}" for alarm in row["neighbours"]["alarms"]]
        taken = row["taken"]
        if taken["least"] is not None and taken["most"] - taken["least"] > 1 + facts["skips"]:
            found.append(
                f"{row['name']}: some samples are taken {taken['most']} times and others {taken['least']}"
            )
        due = row["wanted"] * facts["samples"]
        if abs(row["delivered"] - row["wanted"]) * facts["samples"] > max(facts["mixtures"], 0.001 * due):
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


_SHOWN = 60
_BAR = 24

Facts = dict[str, Any]  # Any: the report as JSON


def pictures_of(facts: Facts) -> dict[str, bytes]:
    """Return the pictures of a report as PNG, by file name."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    rows = facts["datasets"][:_SHOWN]
    figure, (lags, shares) = pyplot.subplots(1, 2, figsize=(11, max(3.5, 0.26 * len(rows) + 1.2)), dpi=120)
    for row in rows:
        found = row["neighbours"]
        lags.plot(range(1, len(found["correlations"]) + 1), found["correlations"], linewidth=1)
    looked_at = max(min((row["neighbours"]["looked_at"] or 1 for row in rows), default=1), 1)
    lags.axhspan(-5 / looked_at**0.5, 5 / looked_at**0.5, color="grey", alpha=0.2, label="by chance (5σ)")
    lags.set(xlabel="samples apart in the stream", ylabel="correlation of places", title="Neighbours")
    lags.legend(loc="upper right")
    places = list(range(len(rows)))[::-1]
    shares.barh(places, [100 * row["delivered"] for row in rows], color="tab:blue", label="delivered")
    shares.plot([100 * row["wanted"] for row in rows], places, "k|", markersize=9, label="wanted")
    shares.set(xlabel="share of the run's samples (%)", yticks=places, title="Shares")
    shares.set_yticklabels([row["name"][:30] for row in rows], fontsize=7)
    shares.legend(loc="lower right")
    order = _png(figure)
    figure, axes = pyplot.subplots(figsize=(7, 3.5), dpi=120)
    for name, found in list(facts["text"]["repeated"].items())[:_SHOWN]:
        bins, documents = len(found["histogram"]), max(found["documents"], 1)
        share = [100 * count / documents for count in found["histogram"]]
        axes.step([100 * (n + 0.5) / bins for n in range(bins)], share, where="mid", label=name[:30])
    axes.set(
        xlabel=f"{facts['ngram']}-grams that occurred before (%)", ylabel="documents (%)", yscale="symlog"
    )
    axes.set(title="Documents that repeat themselves")
    if len(facts["datasets"]) <= 12:
        axes.legend(fontsize=7)
    return {"order.png": order, "repeats.png": _png(figure)}


def _png(figure: Any) -> bytes:  # Any: matplotlib has no stubs
    from matplotlib import pyplot

    content = io.BytesIO()
    figure.tight_layout()
    figure.savefig(content, format="png")
    pyplot.close(figure)
    return content.getvalue()


def page_of(facts: Facts) -> str:
    """Return the report as Markdown."""
    found = facts["look_at"]
    lines = [
        f"# Data of {facts['recipe']}",
        "",
        f"{facts['samples']:,} samples of {facts['sequence_length']:,} tokens"
        + (f", {facts['skipped']:,} of them skipped" if facts["skipped"] else "")
        + f"; order `{facts['order']}`, packing `{facts['packing']}`.",
        "",
        *([f"- **Look at:** {finding}" for finding in found] or ["Nothing strange was found."]),
        "",
        *_order_lines(facts),
        *_epoch_lines(facts),
        *_overlap_lines(facts),
        *_ngram_lines(facts),
        *_repeat_lines(facts),
    ]
    return "\n".join(lines) + "\n"


def _order_lines(facts: Facts) -> list[str]:
    lines = [
        "## Neighbours in the order",
        "",
        "![neighbours and shares](order.png)",
        "",
        "| dataset | pairs | largest correlation, 1 to 32 apart | within 1% (by chance) | looked at |",
        "|---|---|---|---|---|",
    ]
    for row in facts["datasets"]:
        near = row["neighbours"]
        largest = max(near["correlations"], key=abs, default=0.0)
        scope = "all samples: exact" if near["is_exact"] else "64 stretches of 65,536 samples"
        shares = f"{near['near']:.2%} ({near['near_by_chance']:.2%})"
        lines.append(f"| {row['name']} | {near['looked_at']:,} | {largest:+.4f} | {shares} | {scope} |")
    return [*lines, ""]


def _epoch_lines(facts: Facts) -> list[str]:
    lines = [
        "## Tokens by dataset and epoch: exact",
        "",
        "| dataset | tokens | wanted | delivered | samples taken of each epoch | a sample is taken |",
        "|---|---|---|---|---|---|",
    ]
    for row in facts["datasets"]:
        taken = row["taken"]
        some = " + ".join(f"{count:,}" for count in taken["epochs"][:6])
        epochs = some + (f" + … ({len(taken['epochs'])} epochs)" if len(taken["epochs"]) > 6 else "")
        times = "not counted" if taken["least"] is None else f"{taken['least']} to {taken['most']} times"
        shares = f"{row['wanted']:.4%} | {row['delivered']:.4%}"
        lines.append(f"| {row['name']} | {row['tokens']:,} | {shares} | {epochs or 0} | {times} |")
    return [*lines, ""]


def _overlap_lines(facts: Facts) -> list[str]:
    lines = ["## Held-out documents in the training text: exact", ""]
    if facts["overlap"] is None:
        return [*lines, "There is no held-out text.", ""]
    for name, count in facts["overlap"]["documents"].items():
        lines.append(f"- {name}: {facts['overlap']['shared'][name]:,} of {count:,}")
    return [*lines, ""]


def _ngram_lines(facts: Facts) -> list[str]:
    text = facts["text"]
    scope = "all of it: exact" if text["is_exact"] else "stretches of documents: a sample"
    if text["left_out"]:
        scope = (
            f"not all: among others, {text['left_out']:,} tokens at the ends of very long documents were not"
        )
    lines = [
        f"## {facts['ngram']}-grams in common",
        "",
        f"{text['tokens_read']:,} tokens of training text were read ({scope}). Shorter texts have no n-gram.",
        "",
        "| text | its n-grams | in the training text | training documents with one | the first |",
        "|---|---|---|---|---|",
    ]
    for name, shared in text["shared"].items():
        first = ", ".join(f"{dataset} {number:,}" for dataset, number, _ in shared["examples"][:3])
        ngrams = f"{shared['ngrams']:,}{'' if shared['is_whole'] else ' of its beginning'}"
        lines.append(
            f"| {name} | {ngrams} | {shared['found']:,} | {shared['documents']:,} | {first or '-'} |"
        )
    return [*lines, ""]


def _repeat_lines(facts: Facts) -> list[str]:
    lines = [
        "## Documents that repeat themselves",
        "",
        "![repeated n-grams](repeats.png)",
        "",
        f"| dataset | documents read | {facts['ngram']}-grams that occurred before | most of all |",
        "|---|---|---|---|",
    ]
    for name, found in facts["text"]["repeated"].items():
        most = ", ".join(f"document {number:,}: {share:.0%}" for number, share, _ in found["most"][:3])
        lines.append(f"| {name} | {found['documents']:,} | {found['share']:.2%} | {most or '-'} |")
    return [*lines, ""]
