"""`bloomery peer`: runs one peer of an elastic run, which is an agent and the ranks that it starts."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, repeat
from typing import TYPE_CHECKING

from bloomery.agent.agent import Agent, PeerOutcome
from bloomery.cli.arguments import add_recipe, add_training_options, parser
from bloomery.cli.json_output import json_text
from bloomery.cli.ranks import RankRange, run_ranks
from bloomery.cli.standard_output import let_output_end_nothing, tell
from bloomery.cli.train import prepared_environment
from bloomery.errors import StoppedBySwitch
from bloomery.events.switches import Switches, disarming

if TYPE_CHECKING:
    from bloomery.agent.agent import PeerOutcome
    from bloomery.agent.assemble import PeerAccess
    from bloomery.cli.supervised import StartRanks
    from bloomery.config.load import LoadedRecipe
    from bloomery.events.run_directory import RunDirectory


log = logging.getLogger(__name__)

_JOIN_S = 60.0
_REPAIR_S = 3600.0
"""The seconds that a supervised peer waits for the coordinator when it starts again."""


ABOUT = """\
Train as one peer of an elastic run. This process registers the peer, connects it to the other peers, and
starts and watches its ranks. Other peers may join, leave, hang or crash; rounds are committed all the same.

`bloomery peer explain` lists every time-out with its reason. `bloomery peer probe` measures the links."""

EXAMPLES = """\
bloomery coordinate                                       start the coordinator, on one machine
export BLOOMERY_COORDINATOR=http://127.0.0.1:2379         the address that it printed
bloomery peer my.toml elastic.peer=alice --run runs/alice start the first peer
bloomery peer my.toml elastic.peer=bob --run runs/bob     start a second peer on the same machine
bloomery peer my.toml --nproc 4                           start a peer with four ranks
bloomery peer my.toml --supervise                         restart ranks that crash or hang
bloomery peer explain my.toml                             list every time-out and how it is derived
bloomery peer probe my.toml --picture links.svg           measure bandwidth and latency to the others

Between machines peers need certificates: `bloomery coordinate --init-certs` makes a bundle for each peer.
bloomery peer my.toml elastic.certificates=certs/my/alice elastic.listen=[::]:29600 \\
    elastic.advertise=alice.example.org:29600

The port of elastic.listen carries the all_reduce rings; the next port serves state to peers that join. Two
peers can connect when one of them can be reached from outside. Where neither can, a third peer with
elastic.relay=true forwards between them, or a VPN connects all. Ctrl-C and SIGTERM save and leave, and the
other peers go on at once. The same command rejoins and fetches the state that it missed.

--supervise does that by itself: when a rank crashes or hangs, it kills the others, says why in
RUN/operations.jsonl, and starts the peer again. It keeps what ranks print in RUN/logs/HOST-RANK.log. In a
job of a scheduler it saves and leaves before the time limit."""


def run(arguments: list[str]) -> int:
    """Run a peer, or its part `explain` or `probe`, and return the exit status."""
    if arguments and arguments[0] == "explain":
        return _explain(arguments[1:])
    if arguments and arguments[0] == "probe":
        from bloomery.cli.peer_probe import run as probe

        return probe(arguments[1:])
    return _train(_parse(arguments))


def _parse(arguments: list[str]) -> Namespace:
    options = parser("peer", ABOUT, examples=EXAMPLES)
    add_recipe(options)
    add_training_options(
        options, run="runs/NAME-PEER", nproc="ranks of this peer on this machine (default: 1)"
    )
    options.add_argument(
        "--supervise",
        action="store_true",
        help="kill hung ranks, name the culprit, and start the peer again where that can help",
    )
    return options.parse_intermixed_args(arguments)


def _train(options: Namespace) -> int:
    let_output_end_nothing()
    from bloomery.agent.assemble import access_of
    from bloomery.cli.arguments import load_given
    from bloomery.cli.early_refusals import refuse_early
    from bloomery.config.find import run_path
    from bloomery.config.validate import check_recipe
    from bloomery.events.run_directory import RunDirectory
    from bloomery.plan.ranks import degrees_of, wrong_ranks_error
    from bloomery.transport.listener import raise_descriptor_limit

    loaded = load_given(options.recipe, options.overrides)
    degrees = degrees_of(loaded.recipe.parallel, world=options.nproc)
    check_recipe(loaded.recipe, loaded.sources, data_degree=degrees.data if degrees else None)
    if degrees is None:
        raise wrong_ranks_error(loaded.recipe.parallel, world=options.nproc)
    access = access_of(loaded.recipe, loaded.sources, os.environ)
    usual = f"{access.run}-{access.peer}"
    rundir = RunDirectory(run_path(options.recipe, run=options.run, name=usual))
    _refuse_when_stopped(rundir, loaded)
    refuse_early(loaded, rundir.path)  # before other peers wait for this one
    for note in loaded.notes:  # ranks leave them to who starts them
        tell(f"note: {note}")
    _log_lines()
    raise_descriptor_limit()
    command = [sys.executable, "-m", "bloomery", "train", options.recipe, *options.overrides]
    command += ["--run", str(rundir.path), *(["--plain"] if options.plain or options.supervise else [])]
    command += ["--fallback"] if options.fallback else []
    if options.supervise:
        return _supervised(loaded, access, rundir, command, ranks=options.nproc)

    def start_ranks(more: Mapping[str, str]) -> int:
        environment = {**prepared_environment(loaded.recipe.environment), **more}
        return run_ranks(
            command, RankRange(count=options.nproc, world=options.nproc), environment=environment
        )

    return _with_agent(loaded, access, rundir, start_ranks)[0]


def _supervised(
    loaded: LoadedRecipe, access: PeerAccess, rundir: RunDirectory, command: Sequence[str], *, ranks: int
) -> int:
    """Run the peer in attempts, each with an agent of its own, until it has ended or is given up."""
    from bloomery.cli.supervised import SupervisedStart, run_supervised

    # The first attempt says soon that an address is wrong; later ones outlast a coordinator under repair.
    timeouts = replace(access.timeouts, coordinator_start_s=_REPAIR_S)
    accesses = chain([access], repeat(replace(access, timeouts=timeouts)))
    start = SupervisedStart(
        command=lambda rundir: tuple(command),
        ranks=ranks,
        environment=loaded.recipe.environment,
        attempt=lambda start_ranks: _with_agent(loaded, next(accesses), rundir, start_ranks),
        says="bloomery peer",
    )
    return run_supervised(loaded, rundir, start)


def _with_agent(
    loaded: LoadedRecipe, access: PeerAccess, rundir: RunDirectory, start_ranks: StartRanks
) -> tuple[int, str]:
    """Run this peer's agent and its training ranks, which connect to it, until all have ended.

    Returns the exit status, and why the agent failed; "" where it did not.
    """
    from bloomery.agent.assemble import assemble_agent
    from bloomery.agent.rank_server import PARENT

    with ExitStack() as stack:
        parent = assemble_agent(loaded.recipe, access, rundir, stack)
        status, ending = lead(parent, lambda path: start_ranks({PARENT: path, "BLOOMERY_PEER": access.peer}))
    why = ending.why if ending is not None and ending.failed else ""
    return _ended(status, ending, loaded), why


def _refuse_when_stopped(rundir: RunDirectory, loaded: LoadedRecipe) -> None:
    """Raise StoppedBySwitch where the stop switch is armed, before other peers hear of this one."""
    path = Switches.of_run(rundir, loaded.recipe.control.directory).armed("stop")
    if path is not None:
        raise StoppedBySwitch(
            f"Nothing was trained: the switch {path} is armed.",
            remedy=f"`{disarming(path, rundir)}` lets the peer go on.",
        )


def lead(parent: Agent, start_ranks: Callable[[str], int]) -> tuple[int, PeerOutcome | None]:
    """Run the agent in a thread and the ranks on this one, until both have ended.

    start_ranks: called with the path of the agent's socket; returns the exit status of the ranks.
    Returns that exit status, and the agent's outcome (None when the agent failed).
    """
    parent.open()
    outcomes: list[PeerOutcome] = []

    def run() -> None:
        try:
            outcomes.append(parent.run())
        except Exception:
            log.exception("the agent of this peer failed; its ranks end as well")

    thread = threading.Thread(target=run, name="parent", daemon=True)
    thread.start()
    status = 1
    try:
        status = start_ranks(str(parent.path))
    finally:
        parent.ranks_ended(failed=status != 0)
        thread.join(_JOIN_S)
    return status, outcomes[0] if outcomes else None


def _ended(status: int, ending: PeerOutcome | None, loaded: LoadedRecipe) -> int:
    """Print how the peer ended, and return the exit status."""
    if ending is None:
        return status or 1
    _say(f"this peer's part of '{loaded.recipe.run.name}' ended: {ending.why}")
    return status or int(ending.failed)


def _explain(arguments: list[str]) -> int:
    options = parser(
        "peer explain",
        "List every time-out of an elastic run: its value, how it is computed, and why it exists.",
    )
    options.add_argument(
        "recipe", metavar="RECIPE", nargs="?", help="a recipe (default: the default settings)"
    )
    options.add_argument(
        "overrides",
        metavar="section.key=value",
        nargs="*",
        default=(),
        help="settings that replace the recipe's",
    )
    options.add_argument("--json", action="store_true", help="print one JSON array")
    chosen = options.parse_intermixed_args(arguments)
    from bloomery.agent.timeouts import table
    from bloomery.cli.arguments import load_given
    from bloomery.config.elastic import ElasticSection

    section = ElasticSection()
    if chosen.recipe is not None:
        section = load_given(chosen.recipe, chosen.overrides).recipe.elastic
    entries = table(section)
    if chosen.json:
        rows = [
            {"name": entry.name, "seconds": entry.seconds, "origin": entry.origin, "why": entry.why}
            for entry in entries
        ]
        print(json_text(rows, indent=1))
        return 0
    for entry in entries:
        print(f"{entry.name:<14} {entry.seconds:>7,.4g} s  = {entry.origin}\n{'':6}{entry.why}")
    return 0


def _log_lines() -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s peer: %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
