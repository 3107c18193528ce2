"""The page and the pictures of `bloomery data audit`."""

from __future__ import annotations

import io
from typing import Any

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
        f"{facts['samples']:,} samples of {facts['sequence_length']:,} tokens; order `{facts['order']}`, "
        f"packing `{facts['packing']}`.",
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
