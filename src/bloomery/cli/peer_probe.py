"""`bloomery peer probe`: how fast the links between the peers of a run are, as a table and a picture."""

from __future__ import annotations

import json
import os
import secrets
from argparse import ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.cli.arguments import add_recipe, parser

if TYPE_CHECKING:
    from bloomery.elastic.control.snapshot import Snapshot
    from bloomery.elastic.links.probe import Measured, Sizes
    from bloomery.elastic.peer.access import PeerAccess

ABOUT = """\
Measure bandwidth and latency from this machine to the peers of a run, and show what they measured among
themselves when they came. Rows send, columns receive; Mbit/s over as many streams as a ring uses."""

EXAMPLES = """\
bloomery peer probe my.toml                       a table
bloomery peer probe my.toml --picture links.svg   and a picture (.svg, .png or .pdf)
bloomery peer probe my.toml --json                for programs
bloomery peer probe my.toml --streams 1,2,4,8,16  how many connections a hop is worth, for elastic.streams
"""

_DEADLINE_S = 30.0
_MOST_STREAMS = 64
_ENOUGH_S = 2.0
"""Numbers of streams are compared over so long: what a connection that has just begun carries says little."""
_NEARLY = 0.9
"""Of the best: more connections than that takes are not worth it."""
Rates = Mapping[str, Mapping[str, float]]


def run(arguments: list[str]) -> int:
    """Measure and show."""
    options = _parse(arguments)
    from bloomery.config.load import load_recipe
    from bloomery.elastic.control.keys import Keys
    from bloomery.elastic.control.ringorder import ring
    from bloomery.elastic.control.view import View
    from bloomery.elastic.links.probe import MAX_LOAD, Sizes
    from bloomery.elastic.peer.access import access_of

    loaded = load_recipe(options.recipe, options.overrides)
    access = access_of(loaded.recipe, loaded.sources, os.environ)
    with access.etcd() as etcd, View(etcd, Keys(access.run)) as view:
        snapshot = view.snapshot
        if options.streams:
            each = [Sizes(streams=count, most=MAX_LOAD, enough_s=_ENOUGH_S) for count in options.streams]
            compared = [(one.streams, _measure(access, snapshot, access.trust(etcd), one)) for one in each]
            print(json.dumps(_compared_json(compared), indent=1) if options.json else _comparison(compared))
            return 0
        sizes = Sizes(streams=loaded.recipe.elastic.streams)
        measured = _measure(access, snapshot, access.trust(etcd), sizes)
    rates = {name: dict(row) for name, row in snapshot.rates.items() if name in snapshot.members}
    order, _ = ring(tuple(snapshot.members), rates=rates)
    if options.json:
        print(json.dumps(_as_json(access.peer, rates, measured, order), indent=1))
    else:
        print("\n".join(_table(access.peer, sorted(snapshot.members), rates, measured, order)))
    if options.picture:
        draw_links(sorted(snapshot.members), rates, order, Path(options.picture))
    return 0


def _parse(arguments: list[str]) -> Namespace:
    options = parser("peer probe", ABOUT, examples=EXAMPLES)
    add_recipe(options)
    options.add_argument("--picture", metavar="FILE", help="draw the links: .svg, .png or .pdf")
    options.add_argument("--json", action="store_true", help="for programs")
    options.add_argument(
        "--streams", metavar="N,N,…", type=_counts, help="compare so many connections, each for some seconds"
    )
    return options.parse_intermixed_args(arguments)


def _counts(text: str) -> list[int]:
    try:
        counts = sorted({int(one) for one in text.split(",")})
    except ValueError as error:
        raise ArgumentTypeError(f"numbers with commas, like 1,2,4,8, not '{text}'") from error
    if not 1 <= counts[0] <= counts[-1] <= _MOST_STREAMS:
        raise ArgumentTypeError(f"from 1 to {_MOST_STREAMS}, not '{text}'")
    return counts


def _measure(
    access: PeerAccess, snapshot: Snapshot, trust: object, sizes: Sizes
) -> dict[str, Measured | str]:
    """From here to each peer: what was measured, or why not."""
    from bloomery.elastic.links.handshake import Identity
    from bloomery.elastic.links.refusal import Refused
    from bloomery.elastic.links.station import Contact, Station
    from bloomery.elastic.links.trust import Trust

    assert isinstance(trust, Trust)
    identity = Identity(run=access.run, peer=access.peer, incarnation=secrets.token_hex(8))
    station = Station(
        identity, trust, listen=(), turns=access.timeouts.turns, patience=access.timeouts.patience
    )
    found: dict[str, Measured | str] = {}
    for name, one in sorted(snapshot.members.items()):
        member = one.member
        if name == access.peer:
            continue
        contact = Contact(peer=name, incarnation=member.incarnation, addresses=member.addresses)
        try:
            found[name] = station.probe(contact, sizes=sizes, deadline_s=_DEADLINE_S)
        except (Refused, OSError) as error:
            found[name] = str(error) or type(error).__name__
    station.close()
    return found


Compared = Sequence[tuple[int, Mapping[str, "Measured | str"]]]
"""By the number of streams: what was measured to each peer."""


def worthwhile(compared: Compared) -> int | None:
    """The fewest streams with which the slowest link carries nearly as much as with any number.

    Of links that were measured with each number.
    """
    rates = [
        (streams, {name: one.mbit_s for name, one in found.items() if not isinstance(one, str)})
        for streams, found in compared
    ]
    always = set.intersection(*(set(found) for _, found in rates)) if rates else set()
    slowest = {streams: min(found[name] for name in always) for streams, found in rates if always}
    most = max(slowest.values(), default=0.0)
    return min((streams for streams, rate in slowest.items() if rate >= _NEARLY * most), default=None)


def _comparison(compared: Compared) -> str:
    names = sorted({name for _, found in compared for name in found})
    if not names:
        return "nobody else is there"
    lines = ["Mbit/s from here, by the number of connections:"]
    lines.append(" " * 18 + "".join(f"{streams:>9}" for streams, _ in compared))
    for name in names:
        found = [measured[name] for _, measured in compared]
        cells = "".join(f"{'-' if isinstance(one, str) else f'{one.mbit_s:,.0f}':>9}" for one in found)
        lines.append(f"  {name:<16}{cells}")
        lines += [f"    {why}" for why in sorted({one for one in found if isinstance(one, str)})]
    best = worthwhile(compared)
    if best is not None:
        lines += [
            "",
            f"elastic.streams={best} carries nearly as much over the slowest link as any number here",
        ]
    return "\n".join(lines)


def _compared_json(compared: Compared) -> dict[str, object]:
    return {
        "streams": {str(streams): _as_now(found) for streams, found in compared},
        "worthwhile": worthwhile(compared),
    }


def _table(
    me: str, names: Sequence[str], rates: Rates, measured: Mapping[str, Measured | str], order: Sequence[str]
) -> list[str]:
    lines = [f"from '{me}', now:"]
    for name, found in measured.items():
        said = found if isinstance(found, str) else f"{found.mbit_s:10,.0f} Mbit/s {found.rtt_ms:8.1f} ms"
        lines.append(f"  {name:<16} {said}")
    if not measured:
        lines.append("  nobody else is there")
    if any(rates.values()):
        wide = max(8, *(len(name) for name in names)) + 1
        lines += ["", "between the peers, as they measured it, Mbit/s:"]
        lines.append(" " * (wide + 2) + "".join(f"{name:>{wide}}" for name in names))
        for source in names:
            row = "".join(_cell(rates.get(source, {}).get(target), wide=wide) for target in names)
            lines.append(f"  {source:<{wide}}{row}")
    if len(order) > 1:
        lines += ["", f"order of the ring: {' → '.join((*order, order[0]))}"]
        hops = [(a, b, rates.get(a, {}).get(b)) for a, b in zip(order, (*order[1:], order[0]), strict=True)]
        known = [(rate, a, b) for a, b, rate in hops if rate is not None]
        if known:
            rate, source, target = min(known)
            lines.append(f"it waits for {source} → {target}: {rate:,.0f} Mbit/s")
    return lines


def _cell(rate: float | None, *, wide: int) -> str:
    return f"{'-' if rate is None else f'{rate:,.0f}':>{wide}}"


def _as_json(
    me: str, rates: Rates, measured: Mapping[str, Measured | str], order: Sequence[str]
) -> dict[str, object]:
    return {"peer": me, "now": _as_now(measured), "rates": rates, "order": list(order)}


def _as_now(measured: Mapping[str, Measured | str]) -> dict[str, object]:
    return {
        name: {"why": found} if isinstance(found, str) else {"mbit_s": found.mbit_s, "rtt_ms": found.rtt_ms}
        for name, found in measured.items()
    }


def draw_links(names: Sequence[str], rates: Rates, order: Sequence[str], path: Path) -> None:
    """A square of Mbit/s for each pair, and the ring through the peers."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot
    from matplotlib.patches import Rectangle

    cells = [[rates.get(a, {}).get(b, float("nan")) for b in names] for a in names]
    figure, axes = pyplot.subplots(figsize=(2.5 + len(names), 2.0 + 0.8 * len(names)), dpi=120)
    picture = axes.imshow(cells, cmap="viridis")
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="receives", ylabel="sends", title="Mbit/s between peers; framed: the ring")
    for row, line in enumerate(cells):
        for column, rate in enumerate(line):
            if rate == rate:
                axes.text(column, row, f"{rate:,.0f}", ha="center", va="center", color="white", fontsize=8)
    for source, target in zip(order, (*order[1:], *order[:1]), strict=True):
        corner = (names.index(target) - 0.5, names.index(source) - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="#c1292e", linewidth=2.5))
    figure.colorbar(picture, ax=axes)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
