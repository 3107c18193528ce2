"""`bloomery simulate-internet` and `chaos`: train real peers here behind simulated links and faults."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from bloomery.chaos.faults import KINDS, parse_rate, parse_seconds, parse_share, schedule
from bloomery.chaos.scenario import peer_names
from bloomery.chaos.shaped_network import Shape
from bloomery.cli.argument_values import amount, not_negative, positive
from bloomery.cli.arguments import parser
from bloomery.cli.json_output import json_text
from bloomery.events.records import as_float

if TYPE_CHECKING:
    from bloomery.chaos.audit import RunAudit
    from bloomery.chaos.faults import Fault
    from bloomery.chaos.scenario import InjectedFault, ScenarioOutcome

Value = TypeVar("Value")

DEFAULT_RECIPE = "diloco-internet"
PRINT_EVERY_S = 2.0
_JOURNAL_TAIL_BYTES = 65536

INTERNET_EXAMPLES = """\
bloomery simulate-internet                          diloco-internet: 4 peers, 200 Mbit/s, 50 ms
bloomery simulate-internet diloco-internet --peers 2 --rate 1gbit --rtt 100ms --loss 0.1%
bloomery simulate-internet mine.toml elastic.codec=fp32 train.samples=20_000 --directory simulated

Each peer is a `bloomery peer` with a run directory of its own. All that peers send to each other passes
through proxies, which give each peer a link of the given rate, delay and loss. `bloomery chaos` does the
same and injects faults as well.
"""

CHAOS_EXAMPLES = """\
bloomery chaos                                      20 faults of all kinds, on the recipe diloco-internet
bloomery chaos mine.toml --faults 500 --seed 7      a longer run; the same seed gives the same faults
bloomery chaos mine.toml --kinds kill-peer,cut      only faults of these kinds
bloomery chaos mine.toml --plain --nproc 8          20 faults in a run without peers (see bloomery drill)

kinds of faults:
""" + "\n".join(f"  {kind:17} {effect}" for kind, effect in KINDS.items())


def simulate_internet(arguments: list[str]) -> int:
    """Train real peers behind simulated links.

    Returns 0 when the run ended, each sample was counted once, and no process was left behind.
    """
    options = parser(
        "simulate-internet",
        "Train several real peers on this machine, with simulated internet links between them.",
        examples=INTERNET_EXAMPLES,
    )
    _add_scenario_options(options)
    return _run(options.parse_intermixed_args(arguments))


def chaos(arguments: list[str]) -> int:
    """Train real peers behind simulated links, and inject faults by a seeded schedule.

    Returns 0 when the run ended, each sample was counted once, and no process was left behind. With --plain
    the run is one of a single cluster, and `bloomery drill` does it.
    """
    if "--plain" in arguments:
        from bloomery.cli.drill import run as drill

        words = [word for word in arguments if word != "--plain"]
        is_given = any(word.partition("=")[0] == "--random" for word in words)
        return drill(words if is_given else [*words, "--random", "20"])
    options = parser(
        "chaos",
        "Train several real peers on this machine, and inject faults by a seeded schedule. With --plain it\n"
        "runs `bloomery drill --random 20` instead, whose options then apply (there --faults names kinds).",
        examples=CHAOS_EXAMPLES,
    )
    _add_scenario_options(options)
    options.add_argument(
        "--faults", type=positive, default=20, metavar="N", help="number of faults to inject (default: 20)"
    )
    options.add_argument(
        "--plain", action="store_true", help="a run without peers; the other options are those of drill"
    )
    options.add_argument(
        "--seed", type=not_negative, default=0, metavar="N", help="seed of the fault schedule (default: 0)"
    )
    options.add_argument(
        "--kinds",
        type=_kinds,
        default=tuple(KINDS),
        metavar="KIND,KIND",
        help="kinds of faults to inject (default: all that are listed below)",
    )
    options.add_argument(
        "--gap",
        type=amount("a number of seconds above 0", above=0),
        default=5.0,
        metavar="S",
        help="mean seconds between two faults (default: 5)",
    )
    options.add_argument(
        "--longest",
        type=amount("a number of seconds above 0", above=0),
        default=8.0,
        metavar="S",
        help="longest duration of a fault that ends by itself, in seconds (default: 8)",
    )
    options.add_argument(
        "--back",
        type=amount("a number of seconds of at least 0", least=0),
        default=3.0,
        metavar="S",
        help="seconds after which a peer that ended is started again (default: 3)",
    )
    chosen = options.parse_intermixed_args(arguments)
    faults = schedule(
        seed=chosen.seed,
        peers=peer_names(chosen.peers),
        faults=chosen.faults,
        mean_gap_s=chosen.gap,
        longest_s=chosen.longest,
        kinds=chosen.kinds,
    )
    return _run(chosen, faults=faults, seed=chosen.seed, back_s=chosen.back)


def recipe_and_overrides(words: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return (recipe, overrides) of the positional words: the first names a recipe unless it holds a `=`."""
    if words and "=" not in words[0]:
        return words[0], tuple(words[1:])
    return DEFAULT_RECIPE, tuple(words)


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(kind.strip() for kind in text.split(","))
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ArgumentTypeError(f"no such fault: {', '.join(unknown)}. There are {', '.join(KINDS)}")
    return kinds


def _add_scenario_options(options: ArgumentParser) -> None:
    """Add what both commands take. `recipe_and_overrides` reads the recipe, which may be left out."""
    options.add_argument(
        "words",
        metavar="[RECIPE] section.key=value",
        nargs="*",
        default=(),
        help=f"recipe (default: {DEFAULT_RECIPE}), and settings that replace the recipe's",
    )
    options.add_argument(
        "--peers", type=positive, default=4, metavar="N", help="number of peers (default: 4)"
    )
    options.add_argument(
        "--nproc", type=positive, default=1, metavar="N", help="ranks of each peer (default: 1)"
    )
    options.add_argument(
        "--rate",
        type=_read_by(parse_rate),
        default=parse_rate("200mbit"),
        metavar="RATE",
        help="rate of each peer's link in each direction, such as 200mbit or 1gbit "
        "(default: 200mbit; 0: no limit)",
    )
    options.add_argument(
        "--rtt",
        type=_read_by(parse_seconds),
        default=parse_seconds("50ms"),
        metavar="TIME",
        help="round trip between two peers, such as 50ms (default: 50ms)",
    )
    options.add_argument(
        "--loss",
        type=_read_by(parse_share),
        default=0.0,
        metavar="SHARE",
        help="share of packets that each link loses, such as 0.1%% (default: 0)",
    )
    options.add_argument(
        "--directory",
        type=Path,
        metavar="DIR",
        help="directory for each peer's run directory and for what every process printed "
        "(default: a temporary one)",
    )
    options.add_argument(
        "--minutes",
        type=amount("a number of minutes above 0", above=0),
        default=60.0,
        metavar="M",
        help="end everything and fail after M minutes (default: 60)",
    )
    options.add_argument("--json", action="store_true", help="print one JSON object at the end")


def _run(options: Namespace, *, faults: Sequence[Fault] = (), seed: int = 0, back_s: float = 3.0) -> int:
    """Run the scenario, print its progress and its outcome, and return the exit status."""
    from bloomery.chaos.audit import audit
    from bloomery.chaos.processes import interrupted_once
    from bloomery.chaos.scenario import ScenarioSettings, run_scenario
    from bloomery.config.load import load_recipe
    from bloomery.config.peer_settings import no_rounds_mistake
    from bloomery.config.validate import check_recipe
    from bloomery.errors import ConfigError
    from bloomery.events.journal import read_journal
    from bloomery.events.run_directory import RunDirectory
    from bloomery.plan.schedule import total_samples

    name, overrides = recipe_and_overrides(options.words)
    overrides = (*overrides, f"elastic.peers={options.peers}")
    loaded = load_recipe(name, overrides)
    check_recipe(loaded.recipe, loaded.sources)
    recipe = loaded.recipe
    if not recipe.elastic.inner_steps:
        raise ConfigError([no_rounds_mistake(loaded.sources)])
    directory = options.directory or Path(tempfile.mkdtemp(prefix="bloomery-scenario-"))
    say = _print_to_stderr if options.json else _print
    say(f"{options.peers} peers, {_link_text(options)}; what each process prints is in {directory / 'logs'}")
    printer = _ProgressPrinter(directory, peer_names(options.peers), say)
    settings = ScenarioSettings(
        recipe=name,
        overrides=overrides,
        run=recipe.run.name,
        peers=options.peers,
        shape=Shape(rate=options.rate, delay=options.rtt / 2, loss=options.loss),
        directory=directory,
        faults=faults,
        back_s=back_s,
        seed=seed,
        ranks=options.nproc,
        deadline_s=60.0 * options.minutes,
    )
    with interrupted_once():  # its `finally` clauses end every process that was started
        outcome = run_scenario(settings, watch=printer.watch)
    journals = {
        name: list(read_journal(RunDirectory(directory / name).journal()))
        for name in peer_names(options.peers)
    }
    samples = total_samples(recipe.train, sequence_length=recipe.data.sequence_length)
    counts = audit(outcome.commits, journals, samples=samples)
    print(json_text(_as_json(outcome, counts)) if options.json else _summary(outcome, counts))
    return 1 if outcome.failed or counts.mistakes else 0


class _ProgressPrinter:
    """Prints each fault when it is injected, and every few seconds the newest step of each peer."""

    def __init__(self, directory: Path, names: Iterable[str], say: Callable[[str], None]) -> None:
        from bloomery.events.run_directory import RunDirectory

        self._journals = {name: RunDirectory(directory / name).journal() for name in names}
        self._say, self._printed_at, self._faults_printed = say, 0.0, 0

    def watch(self, at_s: float, injected: Sequence[InjectedFault]) -> None:
        for fault in injected[self._faults_printed :]:
            self._say(f"{fault.at_s:7.1f} s  {fault.fault}{'' if fault.done else ': no such process now'}")
        self._faults_printed = len(injected)
        if time.monotonic() - self._printed_at >= PRINT_EVERY_S:
            self._printed_at = time.monotonic()
            progress = ", ".join(f"{name} {_newest_step(path)}" for name, path in self._journals.items())
            self._say(f"{at_s:7.1f} s  {progress}")


def _newest_step(journal: Path) -> str:
    """Return the newest step of a journal in words, read from the end of the file."""
    try:
        with journal.open("rb") as file:
            file.seek(max(0, journal.stat().st_size - _JOURNAL_TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return "starts"
    for line in reversed(lines):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if event.get("event") == "step":
            return f"step {event['step']} loss {as_float(event['loss']):.3f}"  # texts are not finite
    return "starts"


def _summary(outcome: ScenarioOutcome, counts: RunAudit) -> str:
    injected = sum(fault.done for fault in outcome.injected)
    loss = "-" if counts.loss is None else f"{counts.loss:.3f}"
    lines = [
        f"ended after {outcome.seconds:.1f} s: {counts.rounds} rounds in {counts.attempts} attempts, "
        f"{counts.peers:.1f} peers a round",
        f"{counts.consumed:,} samples committed of {counts.computed:,} computed: "
        f"{100 * counts.lost_share:.1f}% lost; loss {loss}",
        f"{injected} faults injected, {len(outcome.injected) - injected} found no process"
        if outcome.injected
        else "no faults",
    ]
    for name, (sent, received) in outcome.bytes_between.items():
        megabytes = (sent + received) / 1e6
        lines.append(f"  {name}: exit status {outcome.statuses[name]}, {megabytes:,.1f} MB over its link")
    lines += [f"LEFT BEHIND: {process}" for process in outcome.leftover]
    lines += [f"WRONG: {mistake}" for mistake in counts.mistakes]
    return "\n".join(lines)


def _as_json(outcome: ScenarioOutcome, counts: RunAudit) -> dict[str, object]:
    return {
        "seconds": outcome.seconds,
        "statuses": dict(outcome.statuses),
        "leftover": list(outcome.leftover),
        "bytes_between": {name: list(both) for name, both in outcome.bytes_between.items()},
        "faults": [
            {"at_s": fault.at_s, "kind": fault.fault.kind, "peer": fault.fault.peer, "done": fault.done}
            for fault in outcome.injected
        ],
        **counts.to_json(),
    }


def _link_text(options: Namespace) -> str:
    rate = f"{options.rate * 8 / 1e6:g} Mbit/s" if options.rate else "no limit of rate"
    return f"{rate}, {1000 * options.rtt:g} ms round trip, {100 * options.loss:g}% loss"


def _print(text: str) -> None:
    print(text, flush=True)


def _print_to_stderr(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _read_by(read: Callable[[str], Value]) -> Callable[[str], Value]:
    """Return a function for `type=` that shows the ValueError of `read` to the user word for word."""

    def reader(text: str) -> Value:
        try:
            return read(text)
        except ValueError as mistake:
            raise ArgumentTypeError(str(mistake)) from None

    return reader
