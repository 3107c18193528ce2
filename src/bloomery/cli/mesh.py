"""`bloomery mesh`: shows which rank runs on which node and what each pipeline stage holds, without torch."""

from __future__ import annotations

from argparse import Namespace

from bloomery.cli.argument_values import positive
from bloomery.cli.arguments import add_recipe, load_given, parser
from bloomery.cli.json_output import json_text
from bloomery.cli.tables import table_text
from bloomery.config.parallel import ParallelSection
from bloomery.config.recipe import Recipe
from bloomery.config.validate import check_recipe
from bloomery.config.validate_layout import batch_mistakes
from bloomery.errors import ConfigError
from bloomery.plan.pipeline_stages import contents_of
from bloomery.plan.ranks import (
    Degrees,
    axes,
    degrees_of,
    hosts_of_ranks,
    indices_on_node,
    ranks_by_host,
    reach_words,
    read_hosts,
    refuse_tensor_groups_across_hosts,
    wrong_ranks_error,
)
from bloomery.plan.request import unknown_vocabulary, vocabulary_of, with_local_vocabulary

EXAMPLES = """\
bloomery mesh tr11-176b                            show BLOOM's 384 ranks, by node
bloomery mesh tr11-176b --stages                   show what each of its 12 stages holds, too
bloomery mesh llmjp-172b --world 1024              use another number of ranks, by data parallelism
bloomery mesh tr1-13b --world 32 --nodes gpu[01-08]        name the nodes gpu01 to gpu08
bloomery mesh my.toml parallel.tensor=4 --nodes a,b --json     print every rank as JSON
"""


def run(arguments: list[str]) -> int:
    """Print where each rank runs, and return the exit status. Raises an error for an impossible layout."""
    options = _parse(arguments)
    loaded = load_given(options.recipe, options.overrides)
    parallel = loaded.recipe.parallel
    world = options.world or _usual_world(parallel)
    degrees = degrees_of(parallel, world=world)
    check_recipe(loaded.recipe, loaded.sources)
    if degrees is None:
        raise wrong_ranks_error(parallel, world=world)
    if options.stages:
        loaded = with_local_vocabulary(loaded)
        if unknown := list(unknown_vocabulary(loaded)):
            raise ConfigError(unknown, of="the recipe")
    hosts = _hosts(options.nodes, parallel, world=world)
    refuse_tensor_groups_across_hosts(degrees, hosts)
    if options.json:
        for rank, host in enumerate(hosts):
            degrees_of_rank: dict[str, int] = dict(degrees.place(rank).items())
            print(json_text({"rank": rank, "host": host, **degrees_of_rank}))
    else:
        _show(loaded.recipe.run.name, degrees, hosts)
        if options.stages:
            print_stages(loaded.recipe, degrees)
        for finding in batch_mistakes(loaded.recipe.train, parallel, data_degree=degrees.data):
            print(f"\nthis layout cannot train: {finding.key}: {finding.problem}\n  {finding.remedy}")
    return 0


def _parse(arguments: list[str]) -> Namespace:
    options = parser(
        "mesh",
        "Show which rank runs on which node: tensor parallelism innermost, then data, then pipeline.\n"
        "Nothing is started. An impossible layout is refused, and the message names a possible one.",
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
    options.add_argument("--json", action="store_true", help="print one JSON object per rank")
    chosen = options.parse_intermixed_args(arguments)
    if chosen.stages and chosen.json:
        options.error("--stages does not go with --json, which prints ranks alone")
    return chosen


def _usual_world(parallel: ParallelSection) -> int:
    data = 1 if parallel.data == "auto" else int(parallel.data)
    return data * parallel.tensor * parallel.pipeline


def _hosts(nodes: str | None, parallel: ParallelSection, *, world: int) -> list[str]:
    if nodes is not None:
        return hosts_of_ranks(read_hosts(nodes), world=world)
    per_node = world if parallel.ranks_per_node == "auto" else min(world, int(parallel.ranks_per_node))
    return [f"node-{rank // per_node + 1}" for rank in range(world)]


def _show(name: str, degrees: Degrees, hosts: list[str]) -> None:
    nodes = ranks_by_host(hosts)
    print(
        f"{name}: {degrees.world} rank{'s' if degrees.world > 1 else ''} on {len(nodes)} "
        f"node{'s' if len(nodes) > 1 else ''}, pipeline {degrees.pipeline} × data {degrees.data} × "
        f"tensor {degrees.tensor}"
    )
    for axis in reversed(axes()):
        if degrees.of(axis) > 1:
            print(f"  {axis:<9} {reach_words(degrees, axis, hosts)}")
    rows = [("node", "ranks", *axes())]
    for node in nodes:
        ranks = f"{node.ranks[0]}–{node.ranks[-1]}" if len(node.ranks) > 1 else f"{node.ranks[0]}"
        rows.append((node.host, ranks, *(indices_on_node(degrees, axis, node) for axis in axes())))
    print(f"\n{table_text(rows, left=range(len(rows[0])))}")


def print_stages(recipe: Recipe, degrees: Degrees) -> None:
    """Print one row for each pipeline stage: its blocks, parameters, and elements on each of its ranks."""
    stages = contents_of(
        recipe.model,
        recipe.parallel,
        vocabulary=vocabulary_of(recipe),
        sequence_length=recipe.data.sequence_length,
        data=degrees.data,
    )
    print(f"\n{sum(stage.parameters for stage in stages):,} parameters in {len(stages)} stages")
    rows = [("stage", "pipeline", "blocks", "parameters", "weights a rank", "masters a rank")]
    rows += [
        (
            str(stage.stage.index),
            str(stage.stage.rank),
            str(stage.stage),
            f"{stage.parameters:,}",
            f"{stage.weights:,}",
            f"{stage.masters:,}",
        )
        for stage in stages
    ]
    print(table_text(rows))
