"""`bloomery completion`: prints a script with which a shell completes commands, options and files."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser
from importlib import import_module

from bloomery.cli import COMMANDS
from bloomery.cli.arguments import THE_PARSER, ParserFound, parser
from bloomery.errors import BloomeryError

EXAMPLES = """\
bloomery completion bash > ~/.local/share/bash-completion/completions/bloomery
bloomery completion zsh > ~/.zfunc/_bloomery          with fpath+=~/.zfunc before compinit in ~/.zshrc
bloomery completion tcsh > ~/.bloomery.completion     with source ~/.bloomery.completion in ~/.cshrc
"""
SHELLS = ("bash", "zsh", "tcsh")


def run(arguments: list[str]) -> int:
    """Print the script; returns 0."""
    options = parser(
        "completion",
        "Print a script with which a shell completes the commands and options of bloomery, and files.",
        examples=EXAMPLES,
    )
    options.add_argument("shell", choices=SHELLS, help="the shell that reads the script")
    chosen = options.parse_args(arguments)
    import shtab

    print(shtab.complete(whole_parser(), shell=chosen.shell))
    return 0


def whole_parser() -> ArgumentParser:
    """Return one parser that knows all commands, their subcommands and their options."""
    import shtab

    whole = ArgumentParser(prog="bloomery", description="Pre-trains language models.")
    whole.add_argument("--version", action="store_true", help="print the version, and exit")
    commands = whole.add_subparsers(metavar="COMMAND")
    for name, (place, line) in COMMANDS.items():
        module, _, function = place.partition(":")
        found = _asked(getattr(import_module(module), function))
        if found.parser is not None:
            added = commands.add_parser(
                name, help=line, parents=[found.parser], add_help=False, conflict_handler="resolve"
            )
            _complete_files(added, shtab.FILE)
            continue
        command = commands.add_parser(name, help=line)
        subcommands = command.add_subparsers(metavar="COMMAND")
        for subcommand, (act, about) in found.subcommands.items():
            its_parser = _asked(act).parser
            assert its_parser is not None, "subcommands have no subcommands"
            added = subcommands.add_parser(
                subcommand, help=about, parents=[its_parser], add_help=False, conflict_handler="resolve"
            )
            _complete_files(added, shtab.FILE)
    return whole


def _asked(act: object) -> ParserFound:
    """Return what a command hands out when it is asked for its parser."""
    assert callable(act)
    try:
        act([THE_PARSER])
    except ParserFound as found:
        return found
    raise BloomeryError(f"{act} does not hand out its parser", remedy="Please report this.")


def _complete_files(parser: ArgumentParser, files: object) -> None:
    """Let words without a list of choices be completed as files, as are runs, recipes and directories."""
    for action in parser._actions:  # shtab reads them from there too
        if action.nargs != 0 and not action.choices and action.help is not SUPPRESS:
            vars(action)["complete"] = files
