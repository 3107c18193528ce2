"""`bloomery mesh`: who would be where, for any number of ranks, without starting one. Needs no torch."""

from __future__ import annotations

import json
from argparse import Namespace

from bloomery.cli.arguments import add_recipe, parser, positive
from bloomery.cli.stage_table import print_stages
from bloomery.config.batches import batch_mistakes
from bloomery.config.check import check_recipe
from bloomery.config.load import load_recipe
from bloomery.config.parallel import ParallelSection
from bloomery.plan.placement import axes, reach, read_hosts, refuse_split_lines, seat, seats_of, span
from bloomery.plan.ranks import Degrees, degrees_of, other_ranks_wanted

EXAMPLES = """\
bloomery mesh tr11-176b                            BLOOM's 384 ranks, by node
bloomery mesh tr11-176b --stages                   and what each of its 12 stages holds
bloomery mesh llmjp-172b --world 1024              another number of ranks: data parallelism takes the rest
bloomery mesh tr1-13b --world 32 --nodes gpu[01-08]        with names; a range is written so
bloomery mesh my.toml parallel.tensor=4 --nodes a,b --json     every rank, for programs
"""


def run(arguments: list[str]) -> int:
    """Print the placement, or refuse the one that cannot be."""
    options = _parse(arguments)
    loaded = load_recipe(options.recipe, options.overrides)
    parallel = loaded.recipe.parallel
    world = options.world or _usual_world(parallel)
    degrees = degrees_of(parallel, world=world)
    check_recipe(loaded.recipe, loaded.sources)
    if degrees is None:
        raise other_ranks_wanted(parallel, world=world)
    hosts = _hosts(options.nodes, parallel, world=world)
    refuse_split_lines(degrees, hosts)
    if options.json:
        for rank, host in enumerate(hosts):
            print(json.dumps({"rank": rank, "host": host, **degrees.place(rank)}))
    else:
        _show(loaded.recipe.run.name, degrees, hosts)
        if options.stages:
            print_stages(loaded.recipe, degrees)
        for finding in batch_mistakes(loaded.recipe.train, parallel, data_degree=degrees.data):
            print(f"\nnot trainable so: {finding.key}: {finding.problem}\n  {finding.remedy}")
    return 0


def _parse(arguments: list[str]) -> Namespace:
    options = parser(
        "mesh",
        "Who stands where: the ranks of a recipe on their nodes, tensor parallelism innermost, then data,\n"
        "then pipeline. Nothing is started. A layout that cannot be is refused with one that can.",
        examples=EXAMPLES,
    )
    add_recipe(options)
    options.add_argument(
        "--world", type=positive, metavar="N", help="ranks in all; by default what the recipe's degrees make"
    )
    options.add_argument(
        "--nodes", metavar="HOST,…", help="names of the nodes, in the order of their ranks: a,b,node[01-12]"
    )
    options.add_argument("--stages", action="store_true", help="also show what each pipeline stage holds")
    options.add_argument("--json", action="store_true", help="print one JSON object a rank")
    return options.parse_intermixed_args(arguments)


def _usual_world(parallel: ParallelSection) -> int:
    data = 1 if parallel.data == "auto" else int(parallel.data)
    return data * parallel.tensor * parallel.pipeline


def _hosts(nodes: str | None, parallel: ParallelSection, *, world: int) -> list[str]:
    if nodes is not None:
        return seat(read_hosts(nodes), world=world)
    per_node = world if parallel.ranks_per_node == "auto" else min(world, int(parallel.ranks_per_node))
    return [f"node-{rank // per_node + 1}" for rank in range(world)]


def _show(name: str, degrees: Degrees, hosts: list[str]) -> None:
    seats = seats_of(hosts)
    print(
        f"{name}: {degrees.world} rank{'s' if degrees.world > 1 else ''} on {len(seats)} "
        f"node{'s' if len(seats) > 1 else ''}, pipeline {degrees.pipeline} × data {degrees.data} × "
        f"tensor {degrees.tensor}"
    )
    for axis in reversed(axes()):
        if degrees.of(axis) > 1:
            print(f"  {axis:<9} {reach(degrees, axis, hosts)}")
    rows = [("node", "ranks", *axes())]
    for one in seats:
        ranks = f"{one.ranks[0]}–{one.ranks[-1]}" if len(one.ranks) > 1 else f"{one.ranks[0]}"
        rows.append((one.host, ranks, *(span(degrees, axis, one) for axis in axes())))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    print()
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
