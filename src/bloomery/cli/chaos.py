"""`bloomery chaos`: a rehearsal between peers in which things break by a seeded schedule."""

from __future__ import annotations

from argparse import ArgumentTypeError

from bloomery.cli.arguments import parser
from bloomery.cli.rehearse import add_rehearsal, rehearse
from bloomery.elastic.rehearsal.play import peer_names
from bloomery.elastic.rehearsal.schedule import KINDS, schedule

EXAMPLES = """\
bloomery chaos                                             20 faults of every kind, on diloco-internet
bloomery chaos mine.toml --faults 500 --seed 7             a longer one; the same seed gives the same faults
bloomery chaos mine.toml --kinds kill-peer,cut             of these kinds alone

kinds of faults:
""" + "\n".join(f"  {kind:17} {told}" for kind, told in KINDS.items())


def run(arguments: list[str]) -> int:
    """Rehearse and break. 0: the run ended, its data was counted exactly once, nothing was left behind."""
    options = parser(
        "chaos", "A run between peers in which things break, by a seeded schedule.", examples=EXAMPLES
    )
    add_rehearsal(options)
    options.add_argument("--faults", type=int, default=20, metavar="N", help="how many (default: 20)")
    options.add_argument("--seed", type=int, default=0, metavar="S", help="of the schedule (default: 0)")
    options.add_argument(
        "--kinds", type=_kinds, default=tuple(KINDS), metavar="A,B", help="which; by default all, see below"
    )
    options.add_argument(
        "--gap", type=float, default=5.0, metavar="S", help="seconds between two, on average (default: 5)"
    )
    options.add_argument(
        "--longest", type=float, default=8.0, metavar="S", help="how long one lasts at most (default: 8)"
    )
    options.add_argument(
        "--back", type=float, default=3.0, metavar="S", help="after which a peer that ended is started again"
    )
    found = options.parse_intermixed_args(arguments)
    faults = schedule(
        seed=found.seed,
        peers=peer_names(found.peers),
        faults=found.faults,
        mean_gap_s=found.gap,
        longest_s=found.longest,
        kinds=found.kinds,
    )
    return rehearse(found, faults=faults, seed=found.seed, back_s=found.back)


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(kind.strip() for kind in text.split(","))
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ArgumentTypeError(f"no such fault: {', '.join(unknown)}. There are {', '.join(KINDS)}")
    return kinds
