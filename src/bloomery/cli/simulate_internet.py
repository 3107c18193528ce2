"""`bloomery simulate-internet`: real peers on this machine, with an internet between them."""

from __future__ import annotations

from bloomery.cli.arguments import parser
from bloomery.cli.rehearse import add_rehearsal, rehearse

EXAMPLES = """\
bloomery simulate-internet                                  diloco-internet: 4 peers, 200 Mbit/s, 50 ms
bloomery simulate-internet diloco-internet --peers 2 --rate 1gbit --rtt 100ms --loss 0.1%
bloomery simulate-internet mine.toml elastic.codec=fp32 train.steps=200 --directory rehearsal

Each peer is `bloomery peer` with a run directory of its own; what goes between them passes through proxies
that give each peer a link of this rate, delay and loss. `bloomery chaos` does the same, and breaks things.
"""


def run(arguments: list[str]) -> int:
    """Rehearse a run between peers. 0: it ended, and nothing was miscounted or left behind."""
    options = parser(
        "simulate-internet", "Real peers on this machine, with an internet between them.", examples=EXAMPLES
    )
    add_rehearsal(options)
    return rehearse(options.parse_intermixed_args(arguments))
