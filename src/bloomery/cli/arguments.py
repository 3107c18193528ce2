"""What all commands share: argument parsers, subcommands, progress bars, and loading the given recipe.

`bloomery config show` is a subcommand. The recipe that a command was given is completed from the directory
of `init.from`.
"""

from __future__ import annotations

import sys
import time
from argparse import Action, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from bloomery.cli.argument_values import positive
from bloomery.config.find import nearest

if TYPE_CHECKING:
    from bloomery.config.begin_from import DescribedWeights
    from bloomery.config.load import LoadedRecipe
    from bloomery.events.records import ProgressCallback


USAGE = 2
_UNKNOWN = "unrecognized arguments: "  # how argparse begins its message


def parser(command: str, about: str, *, examples: str = "") -> ArgumentParser:
    """Return a parser without arguments for `bloomery COMMAND`; --help keeps the line breaks of both texts.

    about: what the command does, shown above its arguments.
    examples: one command per line, shown at the end.
    """
    epilog = f"examples:\n{_indented(examples)}" if examples else None
    return CommandParser(
        prog=f"bloomery {command}",
        description=about,
        epilog=epilog,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


THE_PARSER = "--the-parser"
"""As the only argument, it makes a command raise ParserFound with its parser or subcommands."""


class ParserFound(Exception):
    """Carries the parser of a command to shell completion, which calls the command with THE_PARSER.

    parser: of a command without subcommands; None for one with them.
    subcommands: as `run_subcommand` takes them.
    """

    def __init__(
        self,
        parser: ArgumentParser | None,
        subcommands: Mapping[str, tuple[Callable[[list[str]], int], str]] | None = None,
    ) -> None:
        super().__init__()
        self.parser, self.subcommands = parser, subcommands or {}


class CommandParser(ArgumentParser):
    """The parser of a command or subcommand: with --version, and known to shell completion."""

    def __init__(self, **settings: Any) -> None:  # Any: what ArgumentParser takes
        super().__init__(**settings)
        self.add_argument("--version", action=_Version, nargs=0, help="print the version, and exit")

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and the message; for an unknown option the most similar one is named."""
        hint = self._hint(message.removeprefix(_UNKNOWN)) if message.startswith(_UNKNOWN) else ""
        super().error(message + hint)

    def _hint(self, words: str) -> str:
        unknown = [word[2:].partition("=")[0] for word in words.split() if word.startswith("--")]
        known = [option[2:] for option in self._option_string_actions if option.startswith("--")]
        near = [f"--{name}" for word in unknown for name in nearest(word, known, cutoff=0.6)]
        if near:
            return f"\n  Did you mean {' and '.join(dict.fromkeys(near))}?"
        takes_settings = any(action.dest == "overrides" for action in self._actions)
        return (
            "\n  Settings are written section.key=value, without dashes."
            if unknown and takes_settings
            else ""
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as ArgumentParser does. Raises ParserFound when it is asked for the parser itself."""
        if args == [THE_PARSER]:
            raise ParserFound(self)
        return super().parse_known_args(args, namespace)

    def parse_known_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as ArgumentParser does. Raises ParserFound when it is asked for the parser itself."""
        if args == [THE_PARSER]:
            raise ParserFound(self)
        return super().parse_known_intermixed_args(args, namespace)


class SubcommandParser(CommandParser):
    """The parser of a subcommand; it refuses unknown arguments with its own usage."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as ArgumentParser does, and end with status 2 where words are left.

        Settings of a recipe (`overrides`) may follow options: a subcommand cannot `parse_intermixed_args`.
        """
        found, words = super().parse_known_args(args, namespace)
        if hasattr(found, "overrides") and not any(word.startswith("-") for word in words):
            found.overrides, words = [*found.overrides, *words], []
        elif words:
            self.error(_UNKNOWN + " ".join(words))
        return found, words


class _Version(Action):
    def __call__(self, parser: ArgumentParser, *others: object, **more: object) -> None:
        from bloomery.cli import version_line

        print(version_line())
        parser.exit()


def add_recipe(parser: ArgumentParser) -> None:
    """Add `RECIPE [section.key=value …]`; parse with `parse_intermixed_args`, so options may follow."""
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        help="name of a shipped recipe, path of a .toml file, or a run's directory",
    )
    parser.add_argument(
        "overrides",
        metavar="section.key=value",
        nargs="*",
        default=(),
        help="settings that replace the recipe's, for instance train.global_batch=16",
    )


def add_training_options(parser: ArgumentParser, *, run: str, nproc: str) -> None:
    """Add the options that every command which starts a training takes.

    run: the default of --run, in words.
    nproc: the help text of --nproc.
    """
    parser.add_argument(
        "--run",
        "--rundir",  # torchrun takes --run, wherever it stands, for its own --run-path, and refuses it
        metavar="DIR",
        help=f"the run directory (default: {run}); write --rundir under torchrun",
    )
    parser.add_argument("--nproc", type=positive, default=1, metavar="N", help=nproc)
    parser.add_argument(
        "--fallback",
        action="store_true",
        help="when the newest checkpoint is damaged, resume from the newest one that is intact",
    )
    parser.add_argument(
        "--plain", action="store_true", help="print log lines instead of a progress bar, on a terminal too"
    )


def add_fallback(parser: ArgumentParser) -> None:
    """Add --fallback for a command that reads a run's newest checkpoint."""
    parser.add_argument(
        "--fallback",
        action="store_true",
        help="when a run's newest checkpoint is damaged, take the newest one that is intact",
    )


def run_subcommand(
    command: str,
    arguments: list[str],
    subcommands: Mapping[str, tuple[Callable[[list[str]], int], str]],
    *,
    about: str,
    examples: str = "",
) -> int:
    """Run one subcommand of a command and return its exit status.

    subcommands: by name, the function that takes the remaining arguments, and one line of help.
    """
    name = arguments[0] if arguments else "--help"
    if name == THE_PARSER:
        raise ParserFound(None, subcommands)
    if name == "--version":
        from bloomery.cli import version_line

        print(version_line())
        return 0
    if name in subcommands:
        return subcommands[name][0](arguments[1:])
    if name in ("-h", "--help"):
        width = max(len(subcommand) for subcommand in subcommands)
        lines = "\n".join(f"{subcommand:<{width}}  {line}" for subcommand, (_, line) in subcommands.items())
        shown = f"\n\nexamples:\n{_indented(examples)}" if examples else ""
        print(f"usage: bloomery {command} COMMAND …\n\n{about}\n\ncommands:\n{_indented(lines)}{shown}")
        return 0 if arguments else USAGE
    near = nearest(name, subcommands, cutoff=0.5)
    hint = f"Did you mean `bloomery {command} {near[0]}`?" if near else f"Commands: {', '.join(subcommands)}."
    print(f"bloomery {command}: there is no command '{name}'\n  {hint}", file=sys.stderr)
    return USAGE


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.strip("\n").splitlines())


@contextmanager
def data_bar(*, shown: bool, lines: bool = False) -> Iterator[ProgressCallback]:
    """Yield a callback that draws progress, with one bar and the time left for each stage.

    It draws to standard error, because standard output carries the result. Where that is no terminal, or
    with `lines`, a line every ten seconds says how far the work is. The callback does nothing when `shown`
    is false.
    """
    if not shown:
        from bloomery.events.records import ignore_progress  # not by each command: it takes 5 ms to load

        yield ignore_progress
        return
    if lines or not sys.stderr.isatty():
        yield ProgressLines(say=lambda line: print(line, file=sys.stderr, flush=True))
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Bars(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, Any] = {}  # Any: rich's task ids

        def draw(stage: str, done: int, total: int, unit: str, note: str = "") -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total or None, amount="", note="")
            bars.update(tasks[stage], completed=done, amount=_amount(done, unit), note=note)

        yield draw


class ProgressLines:
    """A progress callback that prints a line at most every ten seconds, for logs; short work prints none.

    say: prints a line. clock: seconds, from any moment.
    """

    EVERY_S = 10.0

    def __init__(self, say: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._said = clock()

    def __call__(self, stage: str, done: int, total: int, unit: str, note: str = "") -> None:
        """Print how far a stage is, if nothing was printed for ten seconds."""
        now = self._clock()
        if now - self._said < self.EVERY_S:
            return
        self._said = now
        share = f" ({done / total:.0%})" if total else ""
        of = f" of {_amount(total, unit)}" if total else ""
        self._say(f"{stage}: {_amount(done, unit)}{of}{share}{', ' + note if note else ''}")


def _amount(count: int, unit: str) -> str:
    return f"{count / 1e6:,.1f} MB" if unit == "bytes" else f"{count:,} {unit}"


def parsed_with_target(
    options: ArgumentParser, arguments: list[str], *, metavar: str, about: str, required: bool
) -> Namespace:
    """Parse arguments whose target is the second positional word or `--to`; it is returned as `to`.

    metavar, about: name and help text of the target.
    required: whether the parser refuses arguments without a target.
    """
    options.add_argument("target", nargs="?", type=Path, metavar=metavar, help=about)
    options.add_argument("--to", type=Path, metavar=metavar, help=f"the same as {metavar}, as an option")
    args = options.parse_intermixed_args(arguments)
    if args.to and args.target:
        options.error(f"two targets to write to: {args.target} and {args.to}")
    args.to = args.to or args.target
    if required and args.to is None:
        options.error(f"{metavar} is missing: {about}")
    return args


def load_given(path_or_name: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Return the recipe as `load_recipe` does, completed with the model shape and tokenizer of `init.from`.

    From then on this process does not use the network where the recipe forbids it.
    Raises ConfigError, and CheckpointError for weights of an architecture that our decoder does not have.
    torch is loaded only to read a transformers directory's weight files, after all checks without it.
    """
    from bloomery.config.environment import follow_recipe

    loaded = load_completed(path_or_name, overrides)
    follow_recipe(offline=loaded.recipe.run.offline)
    return loaded


def load_completed(path_or_name: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Return the recipe as `load_given` does, which changes nothing of this process. Raises as it does."""
    from bloomery.config.load import load_recipe

    return load_recipe(path_or_name, overrides, describe=_described)


def settings_from_weights(path_or_name: str, overrides: Sequence[str]) -> list[str]:
    """Return the settings that the directory of `init.from` adds to the recipe, as `section.key=value`.

    With these and the other overrides the recipe loads without that directory. Raises as `load_given`.
    """
    from bloomery.config.convert import settings_of

    loaded = load_given(path_or_name, overrides)
    if not loaded.recipe.init.from_:
        return []
    values = settings_of(loaded.recipe)
    place = loaded.recipe.init.from_
    return [f"{key}={values[key]}" for key, source in loaded.sources.items() if source == place]


def _described(place: str) -> Iterator[DescribedWeights]:
    from bloomery.interchange.described_weights import described_weights  # only for recipes that name some

    return described_weights(place)
