"""`bloomery drill`: injects faults into a real run for some minutes, and says how long each recovery took."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from random import Random
from textwrap import fill
from typing import TYPE_CHECKING

from bloomery.cli.argument_values import amount, not_negative, positive
from bloomery.cli.arguments import add_recipe, parser
from bloomery.cli.json_output import json_text
from bloomery.cli.tables import COLUMNS, table_text
from bloomery.config.trial import WITHIN_ITS_DIRECTORY
from bloomery.errors import TrainingFailed
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.drill.faults import EFFECTS, ORDINARY, DrillFault

if TYPE_CHECKING:
    from bloomery.operate.drill.allocation import DrillNodes
    from bloomery.operate.drill.exercise import DrillResult
    from bloomery.operate.ledger.run_ledger import RunLedger

EXAMPLES = """\
bloomery drill my.toml --nproc 8                        each ordinary fault once, in a scratch directory
bloomery drill my.toml --nproc 8 --faults kill,hang --rounds 3
bloomery drill my.toml --nproc 2 --random 40 --seed 7   forty faults of all ordinary kinds by a seed
bloomery drill my.toml --run drill --nproc 8            in a batch script: on all nodes of SLURM's job
bloomery drill --timeouts runs/mine                     all time-outs that apply to a run now

kinds of faults:
""" + "\n".join(f"  {kind:9} {effect}" for kind, effect in EFFECTS.items())
_DISK_MIB, _SHM_MIB = 2048, 1024
_NEED_ROOT = (DrillFault.DISK, DrillFault.SHM)


def run(arguments: list[str]) -> int:
    """Run a drill; returns 0 where the run lived through each fault."""
    if arguments[:1] == ["--strike"] and len(arguments) == 3:  # what a drill runs on other nodes of its job
        from bloomery.operate.drill.faults import strike

        strike(DrillFault(arguments[1]), int(arguments[2]))
        return 0
    options = _parse(arguments)
    if options.timeouts is not None:
        return _print_timeouts(options)
    from bloomery.operate.drill.allocation import drill_nodes
    from bloomery.operate.drill.exercise import DrillPlan, exercise, small_disk
    from bloomery.operate.ledger.run_ledger import read_ledger

    nodes = drill_nodes()
    faults = list(_faults(options))
    _refuse_what_needs_root(faults)
    _refuse_what_is_of_one_machine(faults, options, nodes)
    _refuse_wrong_recipe(options, ranks=options.nproc * nodes.count)
    with ExitStack() as stack:
        # The ranks and the scratch directory shall not outlive a drill that is asked to end.
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        stack.callback(signal.signal, signal.SIGTERM, before)
        if DrillFault.DISK in faults:
            directory = stack.enter_context(small_disk(_DISK_MIB))
        else:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bloomery-drill-")))
        rundir = RunDirectory(options.run or directory / "run")
        _refuse_existing(rundir)
        plan = DrillPlan(
            rundir=rundir,
            command=_launch_words(options, rundir, nodes),
            world=options.nproc * nodes.count,
            nodes=nodes,
            faults=faults,
            seed=options.seed,
            steps_between=options.steps,
            patience_s=options.patience,
            private_shm_mib=_SHM_MIB if DrillFault.SHM in faults else 0,
        )
        results = list(exercise(plan, say=_say))
        ledger = read_ledger(rundir)
        if options.json:
            shown = [asdict(result) | {"total_s": result.phases.total_s} for result in results]
            print(json_text({"faults": shown, "survived": sum(result.survived for result in results)}))
        else:
            print(f"{drill_text(results, ledger)}\n\n{timeouts_text(rundir, world=plan.world)}")
    return 0 if results and all(result.survived for result in results) else 1


def drill_text(results: Sequence[DrillResult], ledger: RunLedger | None) -> str:
    """Return the seconds of each phase of each recovery, and what the faults cost, as text."""
    rows = [
        ["fault", "noticed", "ended", "restart", "start-up", "load", "step", "total", "survived", "cause"]
    ]
    for result in results:
        phases = result.phases
        seconds = (
            phases.noticed,
            phases.ended,
            phases.restarted,
            phases.started,
            phases.loaded,
            phases.stepped,
        )
        rows.append(
            [
                str(result.fault),
                *(_seconds(value) for value in (*seconds, phases.total_s)),
                "yes" if result.survived else "NO",
                result.cause or "-",
            ]
        )
    parts = [table_text(rows, left={0, 8, 9})]
    if ledger is not None:
        lost = sum(incident.steps_lost for incident in ledger.history.incidents)
        survived = sum(result.survived for result in results)
        parts.append(
            f"{len(results)} faults, {survived} survived; {lost} steps made "
            f"again; effective time {ledger.effective_time:.1%} of {ledger.end - ledger.begin:.0f} s"
        )
    return "\n\n".join(parts)


def timeouts_text(rundir: RunDirectory, *, world: int) -> str:
    """Return a table of all time-outs that apply to a run, and below it those that contradict each other."""
    from bloomery.operate.standstill import read_beats
    from bloomery.operate.timeouts import contradictions, run_timeouts

    table = run_timeouts(read_beats(rundir, ranks=range(world), attempt=""))
    rows = [["time-out", "seconds", "from", "then"]]
    rows += [[timeout.name, f"{timeout.seconds:.4g}", timeout.derived, timeout.then] for timeout in table]
    warnings = [fill(f"note: {line}", COLUMNS) for line in contradictions(table)]
    return "\n".join([table_text(rows, left={0, 2, 3}), *warnings])


def _print_timeouts(options: Namespace) -> int:
    from bloomery.cli.run_inputs import existing_run
    from bloomery.events.heartbeat import read_beat
    from bloomery.operate.standstill import read_beats
    from bloomery.operate.timeouts import run_timeouts

    rundir = existing_run(options.timeouts)
    beat = read_beat(rundir.heartbeat())
    world = beat.world if beat is not None else 1
    if options.json:
        table = run_timeouts(read_beats(rundir, ranks=range(world), attempt=""))
        print(json_text([asdict(timeout) for timeout in table]))
    else:
        print(timeouts_text(rundir, world=world))
    return 0


def _launch_words(options: Namespace, rundir: RunDirectory, nodes: DrillNodes) -> list[str]:
    settings = (*options.overrides, *WITHIN_ITS_DIRECTORY)
    words = [options.recipe, *settings, "--run", str(rundir.path), "--nproc", str(options.nproc)]
    # What a drill does to a node must not keep real runs off it.
    own_list = ["submit.exclusions="] if nodes.is_allocation else []
    return [*words, *own_list, "--supervise", "--fallback"]


def _faults(options: Namespace) -> Iterator[DrillFault]:
    if options.random:
        rng = Random(options.seed)
        yield from (rng.choice(options.faults) for _ in range(options.random))
        return
    for _ in range(options.rounds):
        yield from options.faults


def _refuse_wrong_recipe(options: Namespace, *, ranks: int) -> None:
    """Raise what the start of the run would, before anything is started."""
    from bloomery.cli.arguments import load_given
    from bloomery.cli.early_refusals import refuse_missing
    from bloomery.config.validate import check_recipe
    from bloomery.plan.ranks import degrees_of, wrong_ranks_error

    loaded = load_given(options.recipe, [*options.overrides, *WITHIN_ITS_DIRECTORY])
    degrees = degrees_of(loaded.recipe.parallel, world=ranks)
    if degrees is None:
        raise wrong_ranks_error(loaded.recipe.parallel, world=ranks)
    check_recipe(loaded.recipe, loaded.sources, data_degree=degrees.data)
    refuse_missing(loaded.recipe.data)


def _refuse_what_needs_root(faults: Sequence[DrillFault]) -> None:
    needed = sorted({str(fault) for fault in faults if fault in _NEED_ROOT})
    if needed and os.geteuid() != 0:
        raise TrainingFailed(
            f"The faults {', '.join(needed)} need a file system of their own, which only root may mount.",
            remedy="Leave them out of --faults, or run the drill as root.",
        )


def _refuse_what_is_of_one_machine(
    faults: Sequence[DrillFault], options: Namespace, nodes: DrillNodes
) -> None:
    """Raise TrainingFailed for what several nodes, or a single rank, cannot do."""
    if nodes.is_allocation and options.run is None:
        raise TrainingFailed(
            f"This job has {nodes.count} nodes, and a scratch directory is on one of them.",
            remedy="Give a new directory that all nodes share: --run DIR.",
        )
    needed = sorted({str(fault) for fault in faults if fault in _NEED_ROOT})
    if nodes.is_allocation and needed:
        raise TrainingFailed(
            f"The faults {', '.join(needed)} need a file system of their own, on one machine.",
            remedy="Leave them out of --faults, or run the drill outside of the job.",
        )
    if DrillFault.CUT in faults and options.nproc * nodes.count == 1:
        raise TrainingFailed(
            "A single rank has no connections to cut.", remedy="Leave cut out of --faults, or raise --nproc."
        )


def _refuse_existing(rundir: RunDirectory) -> None:
    if rundir.exists():
        raise TrainingFailed(
            f"{rundir.path} holds a run already, and a drill damages what it trains.",
            remedy="Give a directory that does not exist, or leave --run out.",
        )


def _parse(arguments: list[str]) -> Namespace:
    options = parser(
        "drill",
        "Train a recipe for some minutes at its real layout, on this machine or on all nodes of the SLURM\n"
        "job, inject faults, and print the seconds of each phase of each recovery and the time-outs in\n"
        "force.",
        examples=EXAMPLES,
    )
    if any(word.split("=")[0] == "--timeouts" for word in arguments):
        options.add_argument("--timeouts", metavar="RUN", help="only print the time-outs of a run")
        options.add_argument("--json", action="store_true")
        return options.parse_args(arguments)
    add_recipe(options)
    options.add_argument("--timeouts", metavar="RUN", help="only print the time-outs of a run")
    options.add_argument("--json", action="store_true", help="print JSON")
    options.add_argument("--nproc", type=positive, default=2, metavar="N", help="ranks of each node (2)")
    options.add_argument("--run", type=Path, metavar="DIR", help="a new run directory (default: scratch)")
    options.add_argument(
        "--faults", type=_kinds, default=ORDINARY, metavar="KIND,KIND", help="kinds, in this order"
    )
    options.add_argument("--rounds", type=positive, default=1, metavar="N", help="how often each kind (1)")
    options.add_argument("--random", type=positive, default=0, metavar="N", help="N faults, by the seed")
    options.add_argument("--seed", type=not_negative, default=0, metavar="N", help="seed of the faults (0)")
    options.add_argument("--steps", type=positive, default=5, metavar="N", help="steps before each fault (5)")
    options.add_argument(
        "--patience",
        type=amount("a number of seconds above 0", above=0),
        default=600.0,
        metavar="S",
        help="seconds for each recovery (600)",
    )
    return options.parse_intermixed_args(arguments)


def _kinds(text: str) -> tuple[DrillFault, ...]:
    try:
        return tuple(DrillFault(word) for word in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"{text!r}: the kinds are {', '.join(DrillFault)}") from None


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _say(line: str) -> None:
    print(f"bloomery drill: {line}", file=sys.stderr, flush=True)
