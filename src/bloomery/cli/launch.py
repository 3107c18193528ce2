"""`bloomery launch`: starts the ranks of this machine, for a run on one machine or on several."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.cli.argument_values import not_negative, positive, read_endpoint
from bloomery.cli.arguments import add_recipe, parser
from bloomery.cli.rank_output import RankOutput
from bloomery.cli.ranks import RankRange, run_ranks
from bloomery.cli.standard_output import tell
from bloomery.cli.supervised import LOOPBACK, SupervisedStart, run_supervised
from bloomery.cli.train import prepared_environment
from bloomery.config.find import run_path
from bloomery.errors import BloomeryError, StoppedBySwitch, TrainingFailed
from bloomery.events.run_directory import RunDirectory
from bloomery.events.run_lock import host_name
from bloomery.events.switches import Switches, disarming, note_of

if TYPE_CHECKING:
    from bloomery.cli.nodes import LauncherGroup
    from bloomery.config.load import LoadedRecipe
    from bloomery.config.parallel import ParallelSection

EXAMPLES = """\
bloomery launch my.toml                                 start all ranks of this machine
bloomery launch my.toml --nproc 4 parallel.tensor=2     start four ranks
bloomery launch tr11-176b --nnodes 48 --rdzv node-1:29400       start this on each of 48 nodes

What a rank prints is shown after its number, and kept in RUN/logs/HOST-RANK.log. The same command resumes
the run. Ctrl-C and SIGTERM save and stop it. `bloomery mesh RECIPE` shows which rank runs on which node.
--supervise kills hung ranks, says why they failed, and restarts them, over several nodes too.
In a job of SLURM: srun --ntasks-per-node=1 bloomery launch RECIPE, which needs no --nnodes and no --rdzv.
srun, mpirun and torchrun can start `bloomery train RECIPE` too, once for each rank.
"""


def run(arguments: list[str]) -> int:
    """Start the ranks and wait until all have ended; returns the status of the first that failed, or 0."""
    options = _parse(arguments)
    if options.rdzv:
        read_endpoint(options.rdzv)
    _take_nodes_of_srun(options)
    from bloomery.cli.arguments import load_given
    from bloomery.cli.early_refusals import check_start, refuse_early
    from bloomery.config.peer_settings import refuse_alone
    from bloomery.plan.ranks import degrees_of, wrong_ranks_error

    loaded = load_given(options.recipe, options.overrides)
    parallel = loaded.recipe.parallel
    nodes = _nodes_with_ranks(options)
    count = options.nproc or _usual_count(parallel, nodes=nodes)
    world = count * nodes
    degrees = degrees_of(parallel, world=world)
    path = run_path(options.recipe, run=options.run, name=loaded.recipe.run.name)
    check_start(loaded, path, data_degree=degrees.data if degrees else None)
    refuse_alone(loaded.recipe, loaded.sources)
    if degrees is None:
        raise wrong_ranks_error(parallel, world=world)
    _refuse_stopped(RunDirectory(path), loaded.recipe.control.directory)
    for note in loaded.notes:  # ranks leave them to who starts them
        tell(f"note: {note}")
    if options.supervise or options.nnodes == 1:
        refuse_early(loaded, path)
    if options.supervise:
        return run_supervised(
            loaded, RunDirectory(path), _supervised(options, loaded, count=count, nodes=nodes)
        )
    if options.nnodes == 1:
        return _run(options, loaded, path, RankRange(count=count, world=world), environment={})
    return _run_share(options, loaded, path, count=count)


def _refuse_stopped(rundir: RunDirectory, directory: str) -> None:
    """Raise StoppedBySwitch where the stop switch is armed, before ranks have to load torch to find it so."""
    armed = Switches.of_run(rundir, directory).armed("stop")
    if armed is not None:
        raise StoppedBySwitch(
            f"Nothing was started: the switch {armed} is armed ({note_of(armed) or 'by hand'}).",
            remedy=f"`{disarming(armed, rundir)}` lets the run go on.",
        )


def _parse(arguments: list[str]) -> Namespace:
    options = parser(
        "launch",
        "Start or resume a run with several ranks on this machine. For a run on several machines, give the\n"
        "same command on each of them.",
        examples=EXAMPLES,
    )
    add_recipe(options)
    options.add_argument(
        "--run", metavar="DIR", help="the run directory (default: runs/NAME, with the recipe's name)"
    )
    options.add_argument(
        "--nproc",
        type=positive,
        metavar="N",
        help="ranks on this machine (default: its share of the recipe's degrees, or one for each GPU)",
    )
    options.add_argument(
        "--nnodes",
        type=positive,
        metavar="N",
        help="number of machines (default: those on which srun has started this, else 1)",
    )
    options.add_argument(
        "--rdzv",
        metavar="HOST:PORT",
        help="rendezvous of the machines: the name of one of them, and a free port on it",
    )
    options.add_argument(
        "--join-timeout",
        type=positive,
        default=600,
        metavar="S",
        help="seconds to wait for the other machines (default: 600)",
    )
    options.add_argument(
        "--fallback",
        action="store_true",
        help="when the newest checkpoint is damaged, resume from the newest one that is intact",
    )
    options.add_argument(
        "--supervise",
        action="store_true",
        help="kill hung ranks, name the culprit, and restart where that can help",
    )
    options.add_argument(
        "--spares",
        type=not_negative,
        default=0,
        metavar="N",
        help="with --supervise: N of the machines are hot spares, used when another is lost (default: 0)",
    )
    options.add_argument(
        "--job",
        metavar="TEXT",
        help="job id (as torchrun's --rdzv-id) for --supervise on several machines without SLURM: equal on "
        "all, new at each start",
    )
    chosen = options.parse_intermixed_args(arguments)
    if not chosen.supervise and ((chosen.nnodes or 1) > 1) != (chosen.rdzv is not None):
        options.error("--nnodes above 1 and --rdzv HOST:PORT go together")
    if chosen.supervise and (chosen.nnodes or 1) > 1 and not chosen.job and "SLURM_JOB_ID" not in os.environ:
        options.error("--supervise on several machines without SLURM needs --job TEXT, equal on all of them")
    if chosen.spares and not chosen.supervise:
        options.error("--spares needs --supervise")
    return chosen


def _take_nodes_of_srun(options: Namespace) -> None:
    """Fill in the machines and their rendezvous where srun has started this launcher on each of them."""
    from bloomery.operate.launcher import node_group, node_name

    if node_name(os.environ):
        os.environ.setdefault("BLOOMERY_HOST", node_name(os.environ))
    group = None if options.rdzv else node_group(os.environ)
    if group is not None and options.nnodes not in (None, group.nodes):
        raise TrainingFailed(
            f"--nnodes {options.nnodes} was given, and srun has started this on {group.nodes} nodes.",
            remedy="Leave --nnodes out, or change srun's --nodes.",
        )
    options.nnodes = options.nnodes or (group.nodes if group else 1)
    options.rdzv = options.rdzv or (group.rendezvous if group else None)


def _usual_count(parallel: ParallelSection, *, nodes: int) -> int:
    """Return the number of ranks on this machine when --nproc is not given."""
    if parallel.ranks_per_node != "auto":
        return int(parallel.ranks_per_node)
    replica = parallel.tensor * parallel.pipeline
    if parallel.data != "auto":
        world = replica * int(parallel.data)
        if world % nodes:
            raise TrainingFailed(
                f"{world} ranks do not divide among {nodes} nodes.",
                remedy="Give --nproc, or another --nnodes.",
            )
        return world // nodes
    import torch

    return torch.cuda.device_count() or max(1, replica // nodes)


def _run_share(options: Namespace, loaded: LoadedRecipe, path: Path, *, count: int) -> int:
    from bloomery.cli.nodes import LauncherNode, rendezvous
    from bloomery.config.convert import settings_of

    node = LauncherNode(
        host=host_name(), ranks=count, nodes=options.nnodes, recipe=settings_of(loaded.recipe)
    )
    launchers = rendezvous(options.rdzv, node, timeout_s=options.join_timeout, say=_say)
    environment = {"BLOOMERY_RENDEZVOUS_STORE": options.rdzv, "BLOOMERY_HOST": node.host}
    if options.rdzv.rpartition(":")[0] in LOOPBACK:
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        _refuse_here(loaded, path, launchers)
        return _run(options, loaded, path, launchers.share, environment=environment, others=launchers)
    finally:
        launchers.leave()


def _refuse_here(loaded: LoadedRecipe, path: Path, launchers: LauncherGroup) -> None:
    """Refuse what this machine lacks after the rendezvous, so that the others need not wait."""
    from bloomery.cli.early_refusals import refuse_early

    try:
        refuse_early(loaded, path)
    except BloomeryError as refused:
        launchers.report_failure(f"{host_name()} started no rank: {refused.message}")
        raise


def _run(
    options: Namespace,
    loaded: LoadedRecipe,
    path: Path,
    share: RankRange,
    *,
    environment: dict[str, str],
    others: LauncherGroup | None = None,
) -> int:
    command = _command(options, path)
    rundir, host = RunDirectory(path), host_name()

    return run_ranks(
        command,
        share,
        environment=prepared_environment(loaded.recipe.environment) | environment,
        output=RankOutput(lambda rank: rundir.log(host=host, rank=rank)),
        others=others,
    )


def _command(options: Namespace, path: Path) -> list[str]:
    command = [sys.executable, "-m", "bloomery", "train", options.recipe, *options.overrides]
    return [*command, "--run", str(path), "--plain", *(["--fallback"] if options.fallback else [])]


def _nodes_with_ranks(options: Namespace) -> int:
    """Return the number of machines that start ranks: all but the spares."""
    if options.spares >= options.nnodes:
        raise TrainingFailed(
            f"{options.spares} of {options.nnodes} machines are spares, so none would start ranks.",
            remedy="Lower --spares, or start on more machines.",
        )
    return int(options.nnodes) - int(options.spares)


def _supervised(options: Namespace, loaded: LoadedRecipe, *, count: int, nodes: int) -> SupervisedStart:
    path = Path(options.run) if options.run else None
    return SupervisedStart(
        command=lambda rundir: tuple(_command(options, path or rundir.path)),
        ranks=count,
        nodes=nodes,
        spares=options.spares,
        job=options.job or "",
        is_loopback=bool(options.rdzv) and options.rdzv.rpartition(":")[0] in LOOPBACK,
        join_timeout_s=float(options.join_timeout),
        environment=loaded.recipe.environment,
    )


def _say(line: str) -> None:
    tell(f"bloomery launch: {line}")
