"""`bloomery peer probe`: measures the links between the peers of a run, as a table and a picture."""

from __future__ import annotations

import os
import secrets
from argparse import ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.cli.argument_values import picture_file
from bloomery.cli.arguments import add_recipe, parser
from bloomery.cli.json_output import json_text
from bloomery.cli.tables import table_text
from bloomery.errors import PeerError

if TYPE_CHECKING:
    from bloomery.agent.assemble import PeerAccess
    from bloomery.coordination.snapshot import RunSnapshot
    from bloomery.transport.bandwidth_probe import LinkMeasurement, ProbeSizes

ABOUT = """\
Measure bandwidth and latency from this machine to the peers of a run, and show what the peers measured among
themselves when they joined. Each row is a sender, each column a receiver; the figures are Mbit/s over as
many connections as a ring uses."""

EXAMPLES = """\
bloomery peer probe my.toml                       print a table
bloomery peer probe my.toml --picture links.svg   draw a picture too (.svg, .png or .pdf)
bloomery peer probe my.toml --json                print JSON
bloomery peer probe my.toml --streams 1,2,4,8,16  compare numbers of connections, to choose elastic.streams
"""

_DEADLINE_S = 30.0
_MOST_STREAMS = 64
_COMPARISON_S = 2.0
"""The seconds for which each number of connections is measured, since a new connection is slow at first."""
_NEARLY_BEST = 0.9
"""A number of connections is enough when it reaches this share of the best rate."""
Rates = Mapping[str, Mapping[str, float]]
"""Mbit/s by sender, then by receiver."""
Links = Mapping[str, "LinkMeasurement | str"]
"""By peer: what was measured to it, or why nothing was."""
Comparison = Sequence[tuple[int, Links]]
"""What was measured to each peer with each number of connections."""


def run(arguments: list[str]) -> int:
    """Measure the links and print them, and return the exit status."""
    options = _parse(arguments)
    from bloomery.agent.assemble import access_of
    from bloomery.cli.arguments import load_given
    from bloomery.coordination.attempts import ring_order
    from bloomery.coordination.run_view import RunView
    from bloomery.protocol.keys import Keys
    from bloomery.transport.bandwidth_probe import MAX_LOAD, ProbeSizes

    loaded = load_given(options.recipe, options.overrides)
    access = access_of(loaded.recipe, loaded.sources, os.environ)
    with access.etcd() as etcd, RunView(etcd, Keys(access.run)) as view:
        snapshot = view.snapshot
        if options.streams:
            loads = [
                ProbeSizes(streams=count, most=MAX_LOAD, enough_s=_COMPARISON_S) for count in options.streams
            ]
            compared = [
                (load.streams, _measure(access, snapshot, access.trust(etcd), load)) for load in loads
            ]
            if options.json:
                print(json_text(_comparison_json(compared), indent=1))
            else:
                print(comparison_text(compared))
            return 0
        sizes = ProbeSizes(streams=loaded.recipe.elastic.streams)
        links = _measure(access, snapshot, access.trust(etcd), sizes)
    rates = {name: dict(row) for name, row in snapshot.rates.items() if name in snapshot.members}
    order, _ = ring_order(tuple(snapshot.members), rates=rates)
    if options.json:
        measured = {"peer": access.peer, "now": _links_json(links), "rates": rates, "order": list(order)}
        print(json_text(measured, indent=1))
    else:
        print(_links_text(access.peer, sorted(snapshot.members), rates, links, order))
    if options.picture:
        draw_links(sorted(snapshot.members), rates, order, options.picture)
    return 0


def _parse(arguments: list[str]) -> Namespace:
    options = parser("peer probe", ABOUT, examples=EXAMPLES)
    add_recipe(options)
    options.add_argument(
        "--picture",
        type=picture_file,
        metavar="FILE",
        help="draw the links into this file: .svg, .png or .pdf",
    )
    options.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_argument(
        "--streams",
        metavar="N,N,…",
        type=_counts,
        help="compare these numbers of connections, a few seconds for each peer and number",
    )
    chosen = options.parse_intermixed_args(arguments)
    if chosen.streams and chosen.picture:
        options.error("--picture does not go with --streams, which compares numbers of connections")
    return chosen


def _counts(text: str) -> list[int]:
    try:
        counts = sorted({int(number) for number in text.split(",")})
    except ValueError as error:
        raise ArgumentTypeError(f"numbers with commas, like 1,2,4,8, not '{text}'") from error
    if not 1 <= counts[0] <= counts[-1] <= _MOST_STREAMS:
        raise ArgumentTypeError(f"from 1 to {_MOST_STREAMS}, not '{text}'")
    return counts


def _measure(access: PeerAccess, snapshot: RunSnapshot, trust: object, sizes: ProbeSizes) -> Links:
    from bloomery.transport.connection import Contact
    from bloomery.transport.connection_manager import ConnectionManager
    from bloomery.transport.handshake import OwnIdentity
    from bloomery.transport.trust import PeerRefused, Trust

    assert isinstance(trust, Trust)
    identity = OwnIdentity(run=access.run, peer=access.peer, incarnation=secrets.token_hex(8))
    connections = ConnectionManager(
        identity, trust, listen=(), turns=access.timeouts.dialing, patience=access.timeouts.tcp
    )
    links: dict[str, LinkMeasurement | str] = {}
    for name, listed in sorted(snapshot.members.items()):
        member = listed.member
        if name == access.peer:
            continue
        contact = Contact(peer=name, incarnation=member.incarnation, addresses=member.addresses)
        try:
            links[name] = connections.probe(contact, sizes=sizes, deadline_s=_DEADLINE_S)
        except (PeerRefused, OSError) as error:
            links[name] = str(error) or type(error).__name__
    connections.close()
    return links


def fewest_streams(compared: Comparison) -> int | None:
    """Return the smallest number of connections per link at which the slowest link is nearly at its best.

    Only links that were measured with every number count; None where there is no such link.
    """
    rates = [
        (streams, {name: link.mbit_s for name, link in links.items() if not isinstance(link, str)})
        for streams, links in compared
    ]
    comparable = set.intersection(*(set(row) for _, row in rates)) if rates else set()
    slowest = {streams: min(row[name] for name in comparable) for streams, row in rates if comparable}
    best = max(slowest.values(), default=0.0)
    return min((streams for streams, rate in slowest.items() if rate >= _NEARLY_BEST * best), default=None)


def comparison_text(compared: Comparison) -> str:
    """Return a table of Mbit/s by peer and number of connections, and the number that is enough."""
    names = sorted({name for _, links in compared for name in links})
    if not names:
        return "No other peer is in the run."
    rows = [["to", *(str(streams) for streams, _ in compared)]]
    failures = []
    for name in names:
        links = [row[name] for _, row in compared]
        rows.append([name, *("-" if isinstance(link, str) else f"{link.mbit_s:,.0f}" for link in links)])
        failures += [f"{name}: {why}" for why in sorted({link for link in links if isinstance(link, str)})]
    lines = ["Mbit/s from here, by the number of connections:", table_text(rows, left=(0,)), *failures]
    enough = fewest_streams(compared)
    if enough is not None:
        lines += ["", f"elastic.streams={enough} is nearly as fast over the slowest link as any number here."]
    return "\n".join(lines)


def _comparison_json(compared: Comparison) -> dict[str, object]:
    return {
        "streams": {str(streams): _links_json(links) for streams, links in compared},
        "worthwhile": fewest_streams(compared),
    }


def _links_text(me: str, names: Sequence[str], rates: Rates, links: Links, order: Sequence[str]) -> str:
    lines = [f"from '{me}', now:"]
    reached = [(name, link) for name, link in links.items() if not isinstance(link, str)]
    if reached:
        rows = [["to", "Mbit/s", "round trip, ms"]]
        rows += [[name, f"{link.mbit_s:,.0f}", f"{link.rtt_ms:.1f}"] for name, link in reached]
        lines.append(table_text(rows, left=(0,)))
    lines += [f"{name}: {link}" for name, link in links.items() if isinstance(link, str)]
    if not links:
        lines.append("no other peer is in the run")
    if any(rates.values()):
        rows = [["sends", *names]]
        for source in names:
            row = (rates.get(source, {}).get(target) for target in names)
            rows.append([source, *("-" if rate is None else f"{rate:,.0f}" for rate in row)])
        lines += ["", "between the peers, as they measured it, Mbit/s:", table_text(rows, left=(0,))]
    if len(order) > 1:
        lines += ["", f"order of the ring: {' → '.join((*order, order[0]))}"]
        hops = [(a, b, rates.get(a, {}).get(b)) for a, b in zip(order, (*order[1:], order[0]), strict=True)]
        measured = [(rate, a, b) for a, b, rate in hops if rate is not None]
        if measured:
            rate, source, target = min(measured)
            lines.append(f"the slowest hop is {source} → {target}: {rate:,.0f} Mbit/s")
    return "\n".join(lines)


def _links_json(links: Links) -> dict[str, object]:
    return {
        name: {"why": link} if isinstance(link, str) else {"mbit_s": link.mbit_s, "rtt_ms": link.rtt_ms}
        for name, link in links.items()
    }


def draw_links(names: Sequence[str], rates: Rates, order: Sequence[str], path: Path) -> None:
    """Write a picture to `path`: the rate from each peer to each other in Mbit/s, the ring's hops framed.

    Raises PeerError where there is no peer.
    """
    if not names:
        raise PeerError("No peer is there, so there is nothing to draw.", remedy="Start the peers first.")
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot
    from matplotlib.patches import Rectangle

    cells = [[rates.get(a, {}).get(b, float("nan")) for b in names] for a in names]
    figure, axes = pyplot.subplots(figsize=(2.5 + len(names), 2.0 + 0.8 * len(names)), dpi=120)
    picture = axes.imshow(cells, cmap="viridis")
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="receives", ylabel="sends", title="Mbit/s between peers; framed: the hops of the ring")
    for row, rates_of_sender in enumerate(cells):
        for column, rate in enumerate(rates_of_sender):
            if rate == rate:
                axes.text(column, row, f"{rate:,.0f}", ha="center", va="center", color="white", fontsize=8)
    for source, target in zip(order, (*order[1:], *order[:1]), strict=True):
        corner = (names.index(target) - 0.5, names.index(source) - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="#c1292e", linewidth=2.5))
    figure.colorbar(picture, ax=axes)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
