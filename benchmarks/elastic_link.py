"""All-reduces between peers over emulated links: the share of the ideal that the ring reaches.

MTU 1500, bbr, no limit of the rate set by hand, each member in a network namespace of its own; needs root.
Beside each figure stands what bare sockets made of as many bytes in the same run. See elastic_ring.py for a
link of your own, and benchmarks/README.md for what was seen.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from dataclasses import dataclass

import elastic_ring
from contract import Measurement, report
from emulated_link import emulated


@dataclass(frozen=True)
class Link:
    """A link, what is reduced over it, and the bars: back to back, and after a pause."""

    rate_mbit: float
    round_trip_ms: float
    members: int
    elements: int
    streams: int
    bars: tuple[float, float] | None


LINKS = {
    "200": Link(200, 50, members=2, elements=64 << 20, streams=4, bars=(0.85, 0.75)),
    "200x4": Link(200, 50, members=4, elements=16 << 20, streams=4, bars=(0.75, 0.60)),
    "1000": Link(1000, 100, members=2, elements=64 << 20, streams=8, bars=(0.70, 0.45)),
    "1000-16M": Link(1000, 100, members=2, elements=16 << 20, streams=8, bars=None),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--links", default=",".join(LINKS), help="which, with commas (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause-s", type=float, default=0.0, help="then rounds after such a pause, too")
    parser.add_argument("--offload", action="store_true", help="as network cards with segmentation offload")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no namespace is left behind
    found: list[Measurement] = []
    for name in options.links.split(","):
        found += measured(name, options)
    return report(found, as_json=options.json)


def measured(name: str, options: argparse.Namespace) -> list[Measurement]:
    link = LINKS[name]
    network = emulated(
        link.members, rate_mbit=link.rate_mbit, round_trip_ms=link.round_trip_ms, offload=options.offload
    )
    with network as hosts:
        asked = {
            "members": link.members,
            "elements": link.elements,
            "streams": link.streams,
            "rate-mbit": link.rate_mbit,
            "rounds": options.rounds,
            "pause-s": options.pause_s,
            "namespaces": ",".join(hosts.namespaces),
            "addresses": ",".join(hosts.addresses),
        }
        if link.bars:
            asked |= {"bar": link.bars[0], "bar-after-pause": link.bars[1]}
        given = [f"--{setting}={value}" for setting, value in asked.items()]
        where = f"{link.round_trip_ms:g} ms" + (", offload" if options.offload else "")
        return elastic_ring.over_link(
            elastic_ring.parser().parse_args([*given, "--without-gloo"]), where=where
        )


if __name__ == "__main__":
    raise SystemExit(main())
