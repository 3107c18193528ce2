"""Runs ranks under supervision, on one machine or together with the launchers of other machines."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.cli.rank_output import RankOutput
from bloomery.cli.ranks import PASSED_ON, RankRange, run_ranks
from bloomery.cli.standard_output import tell
from bloomery.cli.train import prepared_environment
from bloomery.errors import BloomeryError
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
    from bloomery.operate.start_check import StartCheck
    from bloomery.operate.supervise import AttemptWatch, JobReactions

LOOPBACK = ("localhost", "127.0.0.1")
_LEAVES_S = 3.0
"""A job that leaves before its limit waits no longer for its logs to be sent."""


StartRanks = Callable[[Mapping[str, str]], int]
"""Runs the ranks of an attempt, with variables that are added to theirs, and returns the exit status."""


def _ranks_alone(start_ranks: StartRanks) -> tuple[int, str]:
    return start_ranks({}), ""


@dataclass(frozen=True, kw_only=True)
class SupervisedStart:
    """What `launch --supervise` or `peer --supervise` was asked for.

    command: returns the words that start one rank of a run directory.
    ranks: the ranks of each machine. environment: the recipe's variables for the ranks.
    nodes: the machines that start ranks. spares: further machines.
    job: a name that is equal on all machines and new at each start; "" takes the scheduler's.
    is_loopback: whether the machines are emulated on this one.
    join_timeout_s: seconds to wait for the other machines.
    attempt: runs an attempt on one machine: it is called with what runs the ranks, may run something beside
        them, and returns the exit status, and why it failed where that is known besides what ranks say.
    says: the command's name in front of messages.
    """

    command: Callable[[RunDirectory], tuple[str, ...]]
    ranks: int
    environment: EnvironmentSection
    nodes: int = 1
    spares: int = 0
    job: str = ""
    is_loopback: bool = False
    join_timeout_s: float = 0.0
    attempt: Callable[[StartRanks], tuple[int, str]] = _ranks_alone
    says: str = "bloomery launch"

    def say(self, line: str) -> None:
        """Print a message to standard error, after the name of the command."""
        tell(f"{self.says}: {line}")


def run_supervised(loaded: LoadedRecipe, rundir: RunDirectory, start: SupervisedStart) -> int:
    """Start the ranks, again after each failure, until the run ends or is given up. Return an exit status."""
    from bloomery.operate.diagnosis import EXIT_STATUSES, Cause
    from bloomery.operate.job_context import departure_of, job_context, reactions_of, refuse_quarantined
    from bloomery.operate.ledger.chronicle import ChronicleKeeper
    from bloomery.operate.start_check import start_check_of
    from bloomery.operate.sync.keeper import SyncKeeper

    context, say = job_context(os.environ), start.say
    reactions = None
    if context is not None:
        refuse_quarantined(host_name(), rundir, loaded)
        reactions = reactions_of(rundir, loaded, say=say)
    node = os.environ.get("SLURM_NODEID") or os.environ.get("JOB_COMPLETION_INDEX", "0")  # SLURM, Kubernetes
    is_first = node == "0" or start.nodes + start.spares == 1
    with ExitStack() as stack:
        departure = stack.enter_context(
            departure_of(context, host_name(), rundir, loaded, asks_scheduler=is_first)
        )
        if is_first:
            stack.enter_context(ChronicleKeeper(rundir))
            if loaded.recipe.sync.place:
                minutes = loaded.recipe.backup.finish_minutes

                def wait_s() -> float:
                    return _LEAVES_S if departure.reason else 60.0 * minutes

                stack.enter_context(SyncKeeper(rundir, loaded.recipe.sync, wait_s=wait_s, say=say))
        check = start_check_of(loaded)
        if start.nodes + start.spares == 1:
            if check is not None and _is_unfit(check, rundir, reactions, say):
                return EXIT_STATUSES[Cause.UNFIT_NODE]
            return _on_one_machine(rundir, start, reactions, departure)
        status = _on_several(rundir, start, context, reactions, departure, check)
        _free_memory_where_left_out(rundir, loaded)
        return status


def _free_memory_where_left_out(rundir: RunDirectory, loaded: LoadedRecipe) -> None:
    """Free the copies in memory that the run left on this machine before it went on without it."""
    if not loaded.recipe.checkpoint.partner_copies:
        return
    from bloomery.operate.node_shm import free_memory_where_absent

    with suppress(OSError, BloomeryError):  # the job has ended, and its status is what counts
        root = Path(loaded.recipe.checkpoint.memory_directory)
        if free_memory_where_absent(rundir, root, host=host_name()):
            tell(f"bloomery launch: the run went on without {host_name()}, whose copies in memory were freed")


def _is_unfit(
    check: StartCheck, rundir: RunDirectory, reactions: JobReactions | None, say: Callable[[str], None]
) -> bool:
    """Say what is wrong with this machine; returns whether a job must end, as no other start must."""
    facts = check.gather(rundir, host_name())
    unfit = check.unfit_hosts(rundir, {facts.host: facts}, say=say, reactions=reactions)
    return bool(unfit) and reactions is not None


def _on_one_machine(
    rundir: RunDirectory, start: SupervisedStart, reactions: JobReactions | None, departure: Departure
) -> int:
    from bloomery.operate.supervise import supervise

    share, host = RankRange(count=start.ranks, world=start.ranks), host_name()

    def run_once(watch: AttemptWatch) -> int:
        def start_ranks(more: Mapping[str, str]) -> int:
            return run_ranks(
                start.command(rundir),
                share,
                environment={**_environment(rundir, start), ATTEMPT: watch.name, **more},
                output=RankOutput(lambda rank: rundir.log(host=host, rank=rank), on_unlogged=watch.unlogged),
                supervisor=watch,
            )

        status, watch.failure = start.attempt(start_ranks)
        if status == 0 or watch.why_to_stop():
            _finish_undisturbed()
        return status

    return supervise(
        rundir,
        run_once,
        world=share.world,
        host=host,
        say=start.say,
        reactions=reactions,
        departure=departure,
    )


def _on_several(
    rundir: RunDirectory,
    start: SupervisedStart,
    context: JobContext | None,
    reactions: JobReactions | None,
    departure: Departure,
    check: StartCheck | None,
) -> int:
    from bloomery.operate.group_supervisor import GroupSize, GroupSupervisor
    from bloomery.operate.job_board import JobBoard, LauncherCard
    from bloomery.operate.launcher import address_of_node

    host = host_name()
    job = start.job or (context.name if context else "")
    known = "127.0.0.1" if start.is_loopback else os.environ.get("BLOOMERY_ADDRESS", "")
    address = known or address_of_node(
        host, remedy="Set BLOOMERY_HOST to a name or address of this machine by which the others reach it."
    )
    card = LauncherCard(host=host, address=address, ranks=start.ranks, pid=os.getpid())
    nodes = start.nodes + start.spares
    board = JobBoard(rundir.path / "launchers" / job, card, nodes=nodes)
    board.take_part()
    group = GroupSupervisor(
        rundir,
        board,
        job=job,
        size=GroupSize(nodes=nodes, needed=start.nodes, ranks=start.ranks),
        say=start.say,
        reactions=reactions,
        departure=departure,
        check=check,
        join_timeout_s=start.join_timeout_s,
    )

    def run_attempt(decision: Decision, watch: ShareWatch) -> int:
        share = decision.share(host)
        master, _, port = decision.meeting.rpartition(":")
        own = {"MASTER_ADDR": master, "MASTER_PORT": port, "BLOOMERY_HOST": host, ATTEMPT: watch.name}
        if address.startswith("127."):
            own["GLOO_SOCKET_IFNAME"] = "lo"
        status = run_ranks(
            start.command(rundir),
            RankRange(first=share.start, count=len(share), world=decision.world),
            environment=_environment(rundir, start) | own,
            output=RankOutput(lambda rank: rundir.log(host=host, rank=rank), on_unlogged=watch.unlogged),
            others=watch,
            supervisor=watch,
        )
        if watch.why_to_stop():
            _finish_undisturbed()
        return status

    return group.run(run_attempt)


def _environment(rundir: RunDirectory, start: SupervisedStart) -> dict[str, str]:
    """Return the environment of ranks, whose flight recorder, if it is on, dumps into the run directory."""
    from bloomery.operate.flight_recorder import flight_variables

    environment = prepared_environment(start.environment)
    return environment | flight_variables(environment, rundir.stacks().parent)


def _finish_undisturbed() -> None:
    """Let signals no longer end this process, whose ranks have ended well and which is about to end.

    Else a launcher that the scheduler signals at its limit, after all was saved, would count as failed.
    """
    for number in PASSED_ON:
        signal.signal(number, lambda number, frame: None)
