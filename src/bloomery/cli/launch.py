"""`bloomery launch`: all ranks of this machine, or its share of several."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.cli.arguments import add_recipe, parser, positive
from bloomery.cli.rank_output import RankOutput
from bloomery.cli.ranks import OtherNodes, Share, run_ranks
from bloomery.cli.train import prepared_environment
from bloomery.errors import TrainingFailed
from bloomery.events.host import host_name
from bloomery.events.rundir import RunDir

if TYPE_CHECKING:
    from bloomery.config.load import LoadedRecipe
    from bloomery.config.parallel import ParallelSection

EXAMPLES = """\
bloomery launch my.toml                                 all ranks of this machine
bloomery launch my.toml --nproc 4 parallel.tensor=2     four of them
bloomery launch tr11-176b --nnodes 48 --rdzv node-1:29400       the same command on each of 48 nodes

Each line is prefixed by its rank, and kept in RUN/logs/HOST-RANK.log. The same command goes on where the
run stands. Ctrl-C and SIGTERM save and stop; `bloomery mesh RECIPE` shows who would be where. torchrun can
start `bloomery train RECIPE` itself, and so can all that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT.
"""


def run(arguments: list[str]) -> int:
    """Start the ranks, and stay until they have ended. Returns the first failure's status, or 0."""
    options = _parse(arguments)
    from bloomery.config.check import check_recipe
    from bloomery.config.load import load_recipe
    from bloomery.config.peers import refuse_alone
    from bloomery.plan.ranks import degrees_of, other_ranks_wanted

    loaded = load_recipe(options.recipe, options.overrides)
    parallel = loaded.recipe.parallel
    count = options.nproc or _usual_count(parallel, nodes=options.nnodes)
    world = count * options.nnodes
    degrees = degrees_of(parallel, world=world)
    check_recipe(loaded.recipe, loaded.sources, data_degree=degrees.data if degrees else None)
    refuse_alone(loaded.recipe, loaded.sources)
    if degrees is None:
        raise other_ranks_wanted(parallel, world=world)
    path = Path(options.run or Path("runs") / loaded.recipe.run.name)
    if options.nnodes == 1:
        return _run(options, path, Share(count=count, world=world), environment={})
    return _run_share(options, loaded, path, count=count)


def _parse(arguments: list[str]) -> Namespace:
    options = parser(
        "launch",
        "Start a run, or go on with it, with all ranks of this machine or its share of several.",
        examples=EXAMPLES,
    )
    add_recipe(options)
    options.add_argument("--run", metavar="DIR", help="the run directory; by default runs/NAME of the recipe")
    options.add_argument(
        "--nproc",
        type=positive,
        metavar="N",
        help="ranks on this machine; by default its share of the recipe's degrees, or one for each GPU",
    )
    options.add_argument("--nnodes", type=positive, default=1, metavar="N", help="machines; by default 1")
    options.add_argument(
        "--rdzv", metavar="HOST:PORT", help="where the nodes meet: one of them, and a free port there"
    )
    options.add_argument(
        "--join-timeout",
        type=positive,
        default=600,
        metavar="S",
        help="how long to wait for the other nodes (default 600)",
    )
    options.add_argument(
        "--fallback",
        action="store_true",
        help="resume from the newest intact checkpoint when the newest of all is damaged",
    )
    chosen = options.parse_intermixed_args(arguments)
    if (chosen.nnodes > 1) != (chosen.rdzv is not None):
        options.error("--nnodes above 1 and --rdzv HOST:PORT go together")
    return chosen


def _usual_count(parallel: ParallelSection, *, nodes: int) -> int:
    """Ranks of this machine where nobody says how many."""
    if parallel.ranks_per_node != "auto":
        return int(parallel.ranks_per_node)
    replica = parallel.tensor * parallel.pipeline
    if parallel.data != "auto":
        world = replica * int(parallel.data)
        if world % nodes:
            raise TrainingFailed(
                f"{world} ranks do not divide among {nodes} nodes.", remedy="Say --nproc, or other --nnodes."
            )
        return world // nodes
    import torch

    return torch.cuda.device_count() or max(1, replica // nodes)


def _run_share(options: Namespace, loaded: LoadedRecipe, path: Path, *, count: int) -> int:
    from bloomery.cli.nodes import Node, meet_nodes
    from bloomery.config.dump import settings_of

    mine = Node(host=host_name(), ranks=count, nodes=options.nnodes, recipe=settings_of(loaded.recipe))
    nodes = meet_nodes(options.rdzv, mine, timeout_s=options.join_timeout, say=_say)
    environment = {"BLOOMERY_MEETING_STORE": options.rdzv, "BLOOMERY_HOST": mine.host}
    if options.rdzv.rpartition(":")[0] in ("localhost", "127.0.0.1"):
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        return _run(options, path, nodes.share, environment=environment, others=nodes)
    finally:
        nodes.leave()


def _run(
    options: Namespace,
    path: Path,
    share: Share,
    *,
    environment: dict[str, str],
    others: OtherNodes | None = None,
) -> int:
    command = [sys.executable, "-m", "bloomery", "train", options.recipe, *options.overrides]
    command += ["--run", str(path), "--plain", *(["--fallback"] if options.fallback else [])]
    rundir, host = RunDir(path), host_name()
    return run_ranks(
        command,
        share,
        environment=prepared_environment() | environment,
        output=RankOutput(lambda rank: rundir.log(host=host, rank=rank)),
        others=others,
    )


def _say(line: str) -> None:
    print(f"bloomery launch: {line}", file=sys.stderr, flush=True)
