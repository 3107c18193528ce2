"""`bloomery preflight`: checks and measures the nodes of a job, and names those to leave out."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.cli.argument_values import amount, positive
from bloomery.cli.arguments import add_recipe, parser
from bloomery.cli.json_output import json_text
from bloomery.cli.ranks import RankRange, run_ranks
from bloomery.cli.tables import table_text
from bloomery.cli.train import prepared_environment
from bloomery.config.find import run_path
from bloomery.errors import BloomeryError, RankLost, TrainingFailed, require_space
from bloomery.events.run_directory import RunDirectory
from bloomery.events.run_lock import host_name

if TYPE_CHECKING:
    from bloomery.config.load import LoadedRecipe
    from bloomery.operate.exclusions import Exclusions
    from bloomery.operate.node_checks import NodeFinding
    from bloomery.operate.node_facts import NodeFacts

EXAMPLES = """\
bloomery preflight my.toml                              check this machine, and measure it for a few seconds
srun --ntasks-per-node=1 bloomery preflight my.toml     all nodes of a job, compared with each other
bloomery preflight my.toml --long                       measure for ten minutes; lets a node out of quarantine
bloomery preflight my.toml --storage                    save and load as many bytes as a checkpoint has
bloomery preflight my.toml --release node7              let a node out of quarantine by hand

The exit status is 0 where nothing is wrong with this node, 67 where it must be left out, 1 for a warning.
"""
_SHORT_S, _LONG_S = 2.0, 600.0
_JOIN_S = 300.0
_POLL_S = 0.2
_WARNING, _BAD_NODE = 1, 67


def run(arguments: list[str]) -> int:
    """Check this node, and its peers under srun, and return the exit status."""
    if arguments[:1] == ["--probe"] and len(arguments) == 3:  # what the ranks of the measurement run
        from bloomery.calibrate.node_probe import probe_as_rank

        probe_as_rank(Path(arguments[1]), seconds=float(arguments[2]))
        return 0
    options = _parse(arguments)
    from bloomery.cli.arguments import load_given
    from bloomery.operate.exclusions import Exclusions
    from bloomery.operate.launcher import node_name

    loaded = load_given(options.recipe, options.overrides)
    if node_name(os.environ):
        os.environ.setdefault("BLOOMERY_HOST", node_name(os.environ))
    rundir = RunDirectory(run_path(options.recipe, run=options.run, name=loaded.recipe.run.name))
    exclusions = Exclusions.of(rundir, loaded.recipe.submit)
    if options.release:
        node = exclusions.release(options.release)
        held = ", ".join(sorted(exclusions.nodes())) or "none"
        told = f"{node} is let back" if node else f"{options.release} is not in quarantine; held are: {held}"
        _say(told, options)
        if not node:
            return _WARNING
        _tell_queue(rundir, loaded, exclusions, options)
        return 0
    if options.storage and options.gigabytes:
        require_space(rundir.path, doing="Measuring the storage", bytes_needed=int(options.gigabytes * 1e9))
    facts = _measured(rundir, loaded, options)
    nodes = _of_all_nodes(rundir, facts)
    findings = _findings(nodes, loaded)
    own = [finding for finding in findings if finding.host == facts.host]
    is_bad = any(finding.is_bad for finding in own)
    if options.long and not is_bad and exclusions.release(facts.host) is not None:
        _say(f"{facts.host} passed the long test and is out of quarantine", options)
        _tell_queue(rundir, loaded, exclusions, options)
    if facts.host == next(iter(nodes)):
        _show(nodes, findings, as_json=options.json)
    if options.storage:
        _storage(rundir, loaded, options, nodes=len(nodes))
    return _BAD_NODE if is_bad else _WARNING if own else 0


def _parse(arguments: list[str]) -> Namespace:
    options = parser(
        "preflight", "Look at the nodes of a job before a run starts on them.", examples=EXAMPLES
    )
    add_recipe(options)
    options.add_argument("--run", metavar="DIR", help="the run directory (default: runs/NAME)")
    options.add_argument(
        "--nproc", type=positive, metavar="N", help="ranks that measure (default: one for each GPU, or 2)"
    )
    options.add_argument("--long", action="store_true", help="measure for ten minutes")
    options.add_argument("--storage", action="store_true", help="write and read as much as a checkpoint")
    options.add_argument(
        "--gigabytes",
        type=amount("a number of gigabytes above 0", above=0),
        metavar="X",
        help="with --storage: GB that this node writes (default: its share of the recipe's checkpoint)",
    )
    options.add_argument("--release", metavar="HOST", help="let a node out of quarantine, and end")
    options.add_argument("--json", action="store_true", help="print JSON")
    return options.parse_intermixed_args(arguments)


def _say(text: str, options: Namespace) -> None:
    """Print a line, with --json on standard error: standard output then is one JSON object."""
    print(text, file=sys.stderr if options.json else sys.stdout)


def _tell_queue(
    rundir: RunDirectory, loaded: LoadedRecipe, exclusions: Exclusions, options: Namespace
) -> None:
    """Let the run's waiting jobs start on all nodes but those that are still in quarantine."""
    from bloomery.operate.exclusions import exclude_in_queue
    from bloomery.operate.submission import scheduler_of

    section, hosts = loaded.recipe.submit, sorted(exclusions.nodes())
    scheduler = scheduler_of(section, rundir.path.absolute())
    try:
        jobs = exclude_in_queue(scheduler, rundir, name=loaded.recipe.run.name, section=section, nodes=hosts)
    except BloomeryError as silent:  # the list is right all the same, and jobs that start read it
        _say(f"the queue could not be told: {silent.message}", options)
        return
    if jobs:
        _say(f"{', '.join(jobs)} may start there", options)


def _measured(rundir: RunDirectory, loaded: LoadedRecipe, options: Namespace) -> NodeFacts:
    """Return this node's facts with what its ranks measured."""
    from bloomery.operate.node_facts import gather_facts

    facts = gather_facts(rundir.path, host=host_name())
    count = options.nproc or len(facts.gpus) or 2
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "probe.json"
        seconds = _LONG_S if options.long else _SHORT_S
        command = [sys.executable, "-m", "bloomery", "preflight", "--probe", str(target), str(seconds)]
        environment = prepared_environment(loaded.recipe.environment)
        status = run_ranks(command, RankRange(count=count, world=count), environment=environment)
        if status:
            raise TrainingFailed(
                f"The ranks that measure {facts.host} ended with status {status}.",
                remedy="Read what they printed above.",
            )
        probe = json.loads(target.read_text())
    return replace(
        facts,
        teraflops=probe["teraflops"],
        all_reduce_gb_per_s=probe["all_reduce_gb_per_s"],
        is_exact=probe["is_exact"],
    )


def _of_all_nodes(rundir: RunDirectory, own: NodeFacts) -> dict[str, NodeFacts]:
    """Return the facts of all nodes of srun's step by host, sorted; each waits for all others."""
    from bloomery import durable
    from bloomery.operate.job_board import natural_sort_key
    from bloomery.operate.job_context import job_context
    from bloomery.operate.launcher import node_group
    from bloomery.operate.node_facts import NodeFacts

    group, context = node_group(os.environ), job_context(os.environ)
    if group is None or context is None:
        return {own.host: own}
    place = rundir.path / "preflight" / context.name
    durable.make_directory(place)
    durable.write_whole(place / f"{own.host}.json", json.dumps(own.to_json()))
    deadline = time.monotonic() + _JOIN_S
    while len(paths := list(place.glob("*.json"))) < group.nodes:
        if time.monotonic() > deadline:
            there = ", ".join(sorted(path.stem for path in paths))
            raise RankLost(
                f"{group.nodes - len(paths)} of {group.nodes} nodes said nothing for {_JOIN_S:.0f} s; "
                f"these did: {there}.",
                remedy="Look at the others; leave them out: submit.exclude.",
            )
        time.sleep(_POLL_S)
    facts = [NodeFacts.from_json(json.loads(path.read_text())) for path in paths]
    return {fact.host: fact for fact in sorted(facts, key=lambda fact: natural_sort_key(fact.host))}


def _findings(nodes: dict[str, NodeFacts], loaded: LoadedRecipe) -> list[NodeFinding]:
    from bloomery.config.environment import variables_of
    from bloomery.operate.node_checks import judge_nodes
    from bloomery.operate.start_check import checkpoint_bytes

    recipe = loaded.recipe
    disk_gb = checkpoint_bytes(loaded) * (recipe.checkpoint.keep_last + 1) / 1e9
    variables = variables_of(recipe.environment)
    return judge_nodes(nodes, disk_gb=disk_gb, gpus=recipe.submit.gpus_per_node, environment=variables)


def _show(nodes: dict[str, NodeFacts], findings: list[NodeFinding], *, as_json: bool) -> None:
    if as_json:
        shown: dict[str, Any] = {host: facts.to_json() for host, facts in nodes.items()}
        print(json_text({"nodes": shown, "findings": [asdict(finding) for finding in findings]}, indent=1))
        return
    rows = [
        ("node", "TFLOP/s", "all-reduce GB/s", "GPUs", "memory GiB", "disk GB", "/dev/shm free", "clock s")
    ]
    for facts in nodes.values():
        reduced = facts.all_reduce_gb_per_s
        rows.append(
            (
                facts.host,
                f"{facts.teraflops or 0:.3g}",
                "-" if reduced is None else f"{reduced:.3g}",
                str(len(facts.gpus)),
                f"{facts.memory_gib:.1f}",
                f"{facts.disk_gb:.1f}",
                "-" if facts.shm_share is None else f"{facts.shm_share:.0%}",
                f"{facts.clock_s:+.1f}",
            )
        )
    print(table_text(rows, left=(0,)))
    for finding in findings:
        verdict = "left out" if finding.is_bad else "warning"
        print(f"{verdict}: {finding}\n  {finding.remedy}")
    print("nothing is wrong" if not findings else f"{len(findings)} findings")


def _storage(rundir: RunDirectory, loaded: LoadedRecipe, options: Namespace, *, nodes: int) -> None:
    """Measure the storage from this node, and print what a checkpoint of the whole run will take."""
    from bloomery import durable
    from bloomery.operate.start_check import checkpoint_bytes
    from bloomery.operate.storage_probe import forecast, measure_storage
    from bloomery.operate.submission import nodes_of

    total = checkpoint_bytes(loaded)
    planned = max(nodes, nodes_of(loaded.recipe.submit, loaded.recipe.parallel))
    share = int(options.gigabytes * 1e9) if options.gigabytes else -(-total // planned)
    writers = options.nproc or 2
    place = rundir.path / "preflight" / f"storage-{host_name()}@{os.getpid()}"
    durable.remove_abandoned(place.parent, f"storage-{host_name()}@")  # of measurements that were killed
    require_space(rundir.path, doing="Measuring the storage", bytes_needed=share)
    with _no_new_directories(place.parent):
        times = measure_storage(place, total=share, writers=writers)
    if not times.is_equal:
        raise TrainingFailed(
            f"What was read in {place} is not what was written.", remedy="Have the disk tested."
        )
    moved = times.bytes_written / 1e9
    _say(
        f"{host_name()}: {moved:.2f} GB saved in {times.save_s:.2f} s ({moved / times.save_s:.2f} GB/s), "
        f"read in {times.load_s:.2f} s ({moved / times.load_s:.2f} GB/s)",
        options,
    )
    whole = forecast([times], total=total, nodes=planned)
    _say(
        f"a checkpoint of {total / 1e9:.2f} GB from {planned} nodes: saved in {whole.save_s[0]:.1f} s if the "
        f"path of each node is the limit, {whole.save_s[1]:.1f} s if\nwhat all share is; "
        f"read in {whole.load_s[0]:.1f} s or {whole.load_s[1]:.1f} s",
        options,
    )


@contextmanager
def _no_new_directories(path: Path) -> Iterator[None]:
    """Remove at the end those directories of `path` that are missing now, as far as they are empty."""
    missing = list(takewhile(lambda directory: not directory.exists(), (path, *path.parents)))
    try:
        yield
    finally:
        with suppress(OSError):
            for directory in missing:
                directory.rmdir()
