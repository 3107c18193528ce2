"""What `bloomery simulate-internet` and `bloomery chaos` share: options, the play, and what is told of it."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from bloomery.cli.arguments import positive
from bloomery.elastic.rehearsal.quantities import rate_bytes_s, seconds, share
from bloomery.elastic.rehearsal.shaping import Shape

if TYPE_CHECKING:
    from bloomery.elastic.rehearsal.account import Account
    from bloomery.elastic.rehearsal.play import Ending, Struck
    from bloomery.elastic.rehearsal.schedule import Fault

Value = TypeVar("Value")

TOLD_EVERY_S = 2.0


RECIPE = "diloco-internet"


def add_rehearsal(options: ArgumentParser) -> None:
    """The options of both. `recipe_of` reads the recipe, which may be left out."""
    options.add_argument(
        "words",
        metavar="[RECIPE] section.key=value",
        nargs="*",
        default=(),
        help=f"recipe (default: {RECIPE}), and settings that replace its",
    )
    options.add_argument("--peers", type=positive, default=4, metavar="N", help="peers (default: 4)")
    options.add_argument("--nproc", type=positive, default=1, metavar="N", help="ranks of each peer")
    options.add_argument(
        "--rate",
        type=_read_by(rate_bytes_s),
        default=rate_bytes_s("200mbit"),
        metavar="RATE",
        help="of each peer's link, in each direction (default: 200mbit; 0: no limit)",
    )
    options.add_argument(
        "--rtt",
        type=_read_by(seconds),
        default=seconds("50ms"),
        metavar="TIME",
        help="round trip between two peers (default: 50ms)",
    )
    options.add_argument(
        "--loss", type=_read_by(share), default=0.0, metavar="SHARE", help="of packets (default: 0)"
    )
    options.add_argument(
        "--directory",
        type=Path,
        metavar="DIR",
        help="takes each peer's run directory and what everybody printed; by default a temporary one",
    )
    options.add_argument(
        "--minutes", type=float, default=60.0, metavar="M", help="give up after (default: 60)"
    )
    options.add_argument("--json", action="store_true", help="one JSON object at the end")


def rehearse(options: Namespace, *, faults: Sequence[Fault] = (), seed: int = 0, back_s: float = 3.0) -> int:
    """Play, tell as it goes, and tell what came of it. 0: the run ended, nothing was miscounted or left."""
    from bloomery.config.check import check_recipe
    from bloomery.config.load import load_recipe
    from bloomery.elastic.rehearsal.account import audit
    from bloomery.elastic.rehearsal.play import Setting, peer_names, play
    from bloomery.events.journal import read_journal
    from bloomery.events.rundir import RunDir
    from bloomery.plan.schedule import total_samples

    name, given = recipe_of(options.words)
    overrides = (*given, f"elastic.peers={options.peers}")
    loaded = load_recipe(name, overrides)
    check_recipe(loaded.recipe, loaded.sources)
    recipe = loaded.recipe
    directory = options.directory or Path(tempfile.mkdtemp(prefix="bloomery-rehearsal-"))
    say = _quiet if options.json else _say
    say(f"{options.peers} peers, {_link_told(options)}; everything they say is in {directory / 'logs'}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that nothing is left behind
    teller = _Teller(directory, peer_names(options.peers), say)
    ending = play(
        Setting(
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
        ),
        watch=teller.watch,
    )
    journals = {
        name: list(read_journal(RunDir(directory / name).journal())) for name in peer_names(options.peers)
    }
    samples = total_samples(recipe.train, sequence_length=recipe.data.sequence_length)
    account = audit(ending.commits, journals, samples=samples)
    if options.json:
        print(json.dumps(_as_json(ending, account)))
    else:
        _tell(ending, account)
    return 1 if ending.failed or account.mistakes else 0


def recipe_of(words: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """(recipe, overrides): the first word is a recipe unless it sets something."""
    if words and "=" not in words[0]:
        return words[0], tuple(words[1:])
    return RECIPE, tuple(words)


class _Teller:
    """Says every little while how far each peer is, and each fault as it comes."""

    def __init__(self, directory: Path, names: Iterable[str], say: Callable[[str], None]) -> None:
        from bloomery.events.rundir import RunDir

        self._journals = {name: RunDir(directory / name).journal() for name in names}
        self._say, self._told_at, self._struck = say, 0.0, 0

    def watch(self, at_s: float, struck: Sequence[Struck]) -> None:
        for one in struck[self._struck :]:
            self._say(f"{one.at_s:7.1f} s  {one.fault}{'' if one.done else ': nobody there'}")
        self._struck = len(struck)
        if time.monotonic() - self._told_at >= TOLD_EVERY_S:
            self._told_at = time.monotonic()
            progress = ", ".join(f"{name} {_last(path)}" for name, path in self._journals.items())
            self._say(f"{at_s:7.1f} s  {progress}")


def _last(journal: Path) -> str:
    """The newest step of a journal, from its end."""
    try:
        with journal.open("rb") as file:
            file.seek(max(0, journal.stat().st_size - 65536))
            lines = file.read().splitlines()
    except OSError:
        return "starts"
    for line in reversed(lines):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if event.get("event") == "step":
            return f"step {event['step']} loss {event['loss']:.3f}"
    return "starts"


def _tell(ending: Ending, account: Account) -> None:
    done = sum(one.done for one in ending.struck)
    loss = "-" if account.loss is None else f"{account.loss:.3f}"
    lines = [
        f"ended after {ending.seconds:.1f} s: {account.rounds} rounds in {account.attempts} attempts, "
        f"{account.peers:.1f} peers in a round",
        f"{account.consumed:,} samples committed of {account.computed:,} computed: "
        f"{100 * account.lost_share:.1f}% lost; loss {loss}",
        f"{done} faults struck, {len(ending.struck) - done} found nobody" if ending.struck else "no faults",
    ]
    for name, (to, back) in ending.bytes_between.items():
        lines.append(f"  {name}: status {ending.statuses[name]}, {(to + back) / 1e6:,.1f} MB over its link")
    lines += [f"LEFT BEHIND: {one}" for one in ending.leftover]
    lines += [f"WRONG: {one}" for one in account.mistakes]
    print("\n".join(lines))


def _as_json(ending: Ending, account: Account) -> dict[str, object]:
    return {
        "seconds": ending.seconds,
        "statuses": dict(ending.statuses),
        "leftover": list(ending.leftover),
        "bytes_between": {name: list(both) for name, both in ending.bytes_between.items()},
        "faults": [
            {"at_s": one.at_s, "kind": one.fault.kind, "peer": one.fault.peer, "done": one.done}
            for one in ending.struck
        ],
        **account.to_json(),
    }


def _link_told(options: Namespace) -> str:
    rate = f"{options.rate * 8 / 1e6:g} Mbit/s" if options.rate else "no limit of rate"
    return f"{rate}, {1000 * options.rtt:g} ms round trip, {100 * options.loss:g}% loss"


def _say(line: str) -> None:
    print(line, flush=True)


def _quiet(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _read_by(read: Callable[[str], Value]) -> Callable[[str], Value]:
    """An argument's reader whose ValueError is told as it is."""

    def reader(text: str) -> Value:
        try:
            return read(text)
        except ValueError as mistake:
            raise ArgumentTypeError(str(mistake)) from None

    return reader
