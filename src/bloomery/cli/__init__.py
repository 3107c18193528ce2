"""The table of commands. Nothing is imported until a command runs, so `bloomery --help` answers at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bloomery.errors import BloomeryError

COMMANDS = {
    "demo": ("bloomery.cli.demo", "train a small model on real text, from nothing to a sample, in minutes"),
    "plan": ("bloomery.cli.plan", "what fits, how fast, how long, what it costs, before it is paid for"),
    "calibrate": ("bloomery.cli.calibrate", "measure this machine for `bloomery plan`"),
    "train": ("bloomery.cli.train", "train a recipe, or go on with a run"),
    "launch": ("bloomery.cli.launch", "train with all ranks of this machine, or its share of several"),
    "peer": ("bloomery.cli.peer", "train as one peer of a run between peers; its time-outs, its links"),
    "coordinate": ("bloomery.cli.coordinate", "start the coordinator of runs between peers; certificates"),
    "mesh": ("bloomery.cli.mesh", "who would be where: the ranks of a recipe on their nodes"),
    "data": ("bloomery.cli.data", "fetch, tokenize, merge, verify …: text to what training reads"),
    "generate": ("bloomery.cli.generate", "let a trained model write"),
    "ckpt": ("bloomery.cli.ckpt", "list, show, verify, export, import checkpoints"),
    "simulate": ("bloomery.cli.simulate", "months of a run in seconds: what failures and links will cost"),
    "simulate-internet": ("bloomery.cli.simulate_internet", "real peers here, with an internet between them"),
    "chaos": ("bloomery.cli.chaos", "the same, and things break by a seeded schedule"),
    "config": ("bloomery.cli.config", "show, check, reference: recipes and their settings"),
}

EXAMPLES = """\
examples:
  bloomery demo                                   everything once, on Python's own source code
  bloomery train demo train.global_batch=16       a shipped recipe, one setting changed
  bloomery train my.toml                          a recipe of your own; the same command resumes it
  bloomery generate runs/demo "def main("         text from a run
  bloomery ckpt export runs/demo exported         a directory that transformers loads
  bloomery config show demo --why                 every setting, and where its value came from

`bloomery COMMAND --help` says more about each command."""

INTERRUPTED = 130
BROKEN_PIPE = 141
USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. What a user can fix is a message, never a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = _dispatch(words)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("bloomery: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return BROKEN_PIPE
    return status


def _dispatch(words: list[str]) -> int:
    name = words[0] if words else "--help"
    if name in ("-h", "--help", "help"):
        print(_help())
        return 0 if words else USAGE
    if name in ("-V", "--version"):
        from importlib import metadata

        print(f"bloomery {metadata.version('bloomery')}")
        return 0
    if name not in COMMANDS:
        print(_unknown(name), file=sys.stderr)
        return USAGE
    return _run(name, words[1:])


def _run(name: str, arguments: list[str]) -> int:
    from importlib import import_module

    from bloomery.config.offline import go_offline, is_offline
    from bloomery.errors import BloomeryError

    if is_offline():
        go_offline()  # the libraries have switches of their own
    try:
        status: int = import_module(COMMANDS[name][0]).run(arguments)
    except BloomeryError as refused:
        sys.stdout.flush()
        if refused.message and not _told_by_launcher(refused):
            print(f"bloomery {name}: {refused}", file=sys.stderr)
        return refused.exit_status
    return status


def _told_by_launcher(refused: BloomeryError) -> bool:
    """Whether a launcher says which rank is gone, so that the others need not."""
    import os

    from bloomery.errors import RankLost

    return isinstance(refused, RankLost) and "BLOOMERY_LAUNCHER" in os.environ


def _help() -> str:
    width = max(len(name) for name in COMMANDS)
    commands = "\n".join(f"  {name:<{width}}  {line}" for name, (_, line) in COMMANDS.items())
    return (
        "usage: bloomery COMMAND …\n\n"
        "Pre-trains large language models and keeps the training alive.\n\n"
        f"commands:\n{commands}\n\n{EXAMPLES}"
    )


def _unknown(name: str) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
    hint = f"Did you mean `bloomery {near[0]}`?" if near else f"Commands: {', '.join(COMMANDS)}."
    return f"bloomery: there is no command '{name}'\n  {hint}"


def _discard_output() -> None:
    """Send what is still buffered nowhere: the reader of the pipe is gone, which is no error."""
    import os

    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
