"""`bloomery peer`: one peer of a run between peers; the time-outs; the links."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.cli.arguments import add_recipe, add_start, parser
from bloomery.cli.ranks import Share, run_ranks
from bloomery.cli.train import prepared_environment

if TYPE_CHECKING:
    from bloomery.config.load import LoadedRecipe
    from bloomery.elastic.peer.parent import Ending

ABOUT = """\
Train as one peer of a run between peers: this process holds the peer's place in the run, connects it to
the others, and starts and watches its ranks. Others may come, go, hang and crash: rounds still commit.

`bloomery peer explain` prints every time-out and why it is so, `bloomery peer probe` measures links."""

EXAMPLES = """\
bloomery coordinate                                       on one machine: the run's meeting point
export BLOOMERY_COORDINATOR=http://127.0.0.1:2379         what it said
bloomery peer my.toml elastic.peer=alice --run runs/alice the first peer
bloomery peer my.toml elastic.peer=bob --run runs/bob     a second one, on the same machine
bloomery peer my.toml --nproc 4                           a peer of four ranks
bloomery peer explain my.toml                             every time-out, and what it follows from
bloomery peer probe my.toml --picture links.svg           bandwidth and latency to the others

Between machines peers show certificates: `bloomery coordinate --init-certs` makes a bundle for each.
bloomery peer my.toml elastic.certificates=certs/my/alice elastic.listen=[::]:29600 \\
    elastic.advertise=alice.example.org:29600

The port of elastic.listen carries the rings, the next one the state for newcomers. One side that can be
dialled is enough; where none can, a third peer with elastic.relay=true forwards, or a VPN joins all.
Ctrl-C and SIGTERM save and leave: the others go on at once. The same command comes back, and fetches
what it missed."""


def run(arguments: list[str]) -> int:
    """Be a peer, or do one part of it."""
    if arguments and arguments[0] == "explain":
        return _explain(arguments[1:])
    if arguments and arguments[0] == "probe":
        from bloomery.cli.peer_probe import run as probe

        return probe(arguments[1:])
    return _train(_parse(arguments))


def _parse(arguments: list[str]) -> Namespace:
    options = parser("peer", ABOUT, examples=EXAMPLES)
    add_recipe(options)
    add_start(options, run="runs/NAME-PEER", nproc="ranks of this peer, on this machine")
    return options.parse_intermixed_args(arguments)


def _train(options: Namespace) -> int:
    from bloomery.cli.peer_lead import lead
    from bloomery.config.check import check_recipe
    from bloomery.config.load import load_recipe
    from bloomery.elastic.peer.access import access_of
    from bloomery.elastic.peer.assembly import assemble_parent
    from bloomery.elastic.peer.handoff import PARENT
    from bloomery.events.rundir import RunDir
    from bloomery.plan.ranks import degrees_of, other_ranks_wanted

    loaded = load_recipe(options.recipe, options.overrides)
    degrees = degrees_of(loaded.recipe.parallel, world=options.nproc)
    check_recipe(loaded.recipe, loaded.sources, data_degree=degrees.data if degrees else None)
    if degrees is None:
        raise other_ranks_wanted(loaded.recipe.parallel, world=options.nproc)
    access = access_of(loaded.recipe, loaded.sources, os.environ)
    rundir = RunDir(Path(options.run or Path("runs") / f"{access.run}-{access.peer}"))
    _log_lines()
    with ExitStack() as stack:
        parent = assemble_parent(loaded.recipe, access, rundir, stack)
        command = [sys.executable, "-m", "bloomery", "train", options.recipe, *options.overrides]
        command += ["--run", str(rundir.path), *(["--plain"] if options.plain else [])]
        command += ["--fallback"] if options.fallback else []

        def start_ranks(path: str) -> int:
            environment = prepared_environment() | {PARENT: path, "BLOOMERY_PEER": access.peer}
            share = Share(count=options.nproc, world=options.nproc)
            return run_ranks(command, share, environment=environment)

        status, ending = lead(parent, start_ranks)
    return _ended(status, ending, loaded)


def _ended(status: int, ending: Ending | None, loaded: LoadedRecipe) -> int:
    """Say how it ended; the exit status."""
    if ending is None:
        return status or 1
    _say(f"this peer's part of '{loaded.recipe.run.name}' ended: {ending.why}")
    return status or int(ending.failed)


def _explain(arguments: list[str]) -> int:
    options = parser("peer explain", "Every time-out of training between peers, and what it follows from.")
    options.add_argument("recipe", metavar="RECIPE", nargs="?", help="without one, of the defaults")
    options.add_argument("overrides", metavar="section.key=value", nargs="*", default=())
    options.add_argument("--json", action="store_true", help="for programs")
    chosen = options.parse_intermixed_args(arguments)
    from bloomery.config.elastic import ElasticSection
    from bloomery.config.load import load_recipe
    from bloomery.elastic.peer.timeouts import table

    section = ElasticSection()
    if chosen.recipe is not None:
        section = load_recipe(chosen.recipe, chosen.overrides).recipe.elastic
    entries = table(section)
    if chosen.json:
        rows = [
            {"name": one.name, "seconds": one.seconds, "origin": one.origin, "why": one.why}
            for one in entries
        ]
        print(json.dumps(rows, indent=1))
        return 0
    for one in entries:
        print(f"{one.name:<14} {one.seconds:>7,.4g} s  = {one.origin}\n{'':27}{one.why}")
    return 0


def _log_lines() -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s peer: %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
