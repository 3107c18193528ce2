"""Starts ranks under supervision, on one machine or together with the launchers of others."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bloomery.cli.ranks import RankOutput, RankRange, run_ranks
from bloomery.cli.train import prepared_environment
from bloomery.events.heartbeat import ATTEMPT
from bloomery.events.run_directory import RunDirectory
from bloomery.events.run_lock import host_name

if TYPE_CHECKING:
    from bloomery.config.environment import EnvironmentSection
    from bloomery.config.load import LoadedRecipe
    from bloomery.operate.decision import Decision
    from bloomery.operate.departure import Departure
    from bloomery.operate.job_context import JobContext
    from bloomery.operate.share_watch import ShareWatch
    from bloomery.operate.supervise import AttemptWatch, JobReactions

LOOPBACK = ("localhost", "127.0.0.1")


@dataclass(frozen=True, kw_only=True)
class SupervisedStart:
    """What `bloomery launch --supervise` was asked for.

    command: returns the words that start one rank of a run directory.
    ranks: the ranks of each machine. nodes: the machines that start ranks. spares: further machines.
    job: a name that is equal on all machines and new at each start; "" takes the scheduler's.
    is_loopback: whether the machines are emulated on this one.
    join_timeout_s: seconds to wait for the other machines.
    environment: the recipe's variables for the ranks.
    """

    command: Callable[[RunDirectory], tuple[str, ...]]
    ranks: int
    nodes: int
    spares: int
    job: str
    is_loopback: bool
    join_timeout_s: float
    environment: EnvironmentSection


def run_supervised(loaded: LoadedRecipe, rundir: RunDirectory, start: SupervisedStart) -> int:
    """Run attempts until the run ends or is given up; returns the exit status."""
    from bloomery.operate.job_context import departure_of, job_context, reactions_of, refuse_quarantined
    from bloomery.operate.ledger.chronicle import ChronicleKeeper

    context = job_context(os.environ)
    reactions = None
    if context is not None:
        refuse_quarantined(host_name(), rundir, loaded)
        reactions = reactions_of(rundir, loaded, say=_say)
    is_first = os.environ.get("SLURM_NODEID", "0") == "0"
    with ExitStack() as stack:
        departure = stack.enter_context(
            departure_of(context, host_name(), rundir, loaded, asks_scheduler=is_first)
        )
        if is_first:
            stack.enter_context(ChronicleKeeper(rundir))
        if start.nodes + start.spares == 1:
            return _on_one_machine(rundir, start, reactions, departure)
        return _on_several(rundir, start, context, reactions, departure)


def _on_one_machine(
    rundir: RunDirectory, start: SupervisedStart, reactions: JobReactions | None, departure: Departure
) -> int:
    from bloomery.operate.supervise import supervise

    share, host = RankRange(count=start.ranks, world=start.ranks), host_name()

    def run_once(watch: AttemptWatch) -> int:
        return run_ranks(
            start.command(rundir),
            share,
            environment=prepared_environment(start.environment) | {ATTEMPT: watch.name},
            output=RankOutput(lambda rank: rundir.log(host=host, rank=rank)),
            supervisor=watch,
        )

    return supervise(
        rundir, run_once, world=share.world, host=host, say=_say, reactions=reactions, departure=departure
    )


def _on_several(
    rundir: RunDirectory,
    start: SupervisedStart,
    context: JobContext | None,
    reactions: JobReactions | None,
    departure: Departure,
) -> int:
    from bloomery.operate.group_supervisor import GroupSize, GroupSupervisor
    from bloomery.operate.job_board import JobBoard, LauncherCard
    from bloomery.operate.launcher import address_of_node

    host = host_name()
    job = start.job or (context.name if context else "")
    address = "127.0.0.1" if start.is_loopback else address_of_node(host)
    card = LauncherCard(host=host, address=address, ranks=start.ranks, pid=os.getpid())
    nodes = start.nodes + start.spares
    board = JobBoard(rundir.path / "launchers" / job, card, nodes=nodes)
    board.refuse_used()
    group = GroupSupervisor(
        rundir,
        board,
        job=job,
        size=GroupSize(nodes=nodes, needed=start.nodes, ranks=start.ranks),
        say=_say,
        reactions=reactions,
        departure=departure,
        join_timeout_s=start.join_timeout_s,
    )

    def run_attempt(decision: Decision, watch: ShareWatch) -> int:
        share = decision.share(host)
        master, _, port = decision.meeting.rpartition(":")
        own = {"MASTER_ADDR": master, "MASTER_PORT": port, "BLOOMERY_HOST": host, ATTEMPT: watch.name}
        if address.startswith("127."):
            own["GLOO_SOCKET_IFNAME"] = "lo"
        return run_ranks(
            start.command(rundir),
            RankRange(first=share.start, count=len(share), world=decision.world),
            environment=prepared_environment(start.environment) | own,
            output=RankOutput(lambda rank: rundir.log(host=host, rank=rank)),
            others=watch,
            supervisor=watch,
        )

    return group.run(run_attempt)


def _say(line: str) -> None:
    print(f"bloomery launch: {line}", file=sys.stderr, flush=True)
