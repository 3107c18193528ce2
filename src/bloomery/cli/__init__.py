"""The command line: the table of commands, and `main`, which runs one of them.

A command's module is imported when it runs, so `bloomery --help` answers at once.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from bloomery.errors import BloomeryError

COMMANDS = {
    "demo": ("bloomery.cli.demo:run", "train a small model on real text in minutes, from data to a sample"),
    "plan": ("bloomery.cli.plan:run", "predict memory, speed, duration and cost of a run before it starts"),
    "calibrate": ("bloomery.cli.calibrate:run", "measure this machine, so that `bloomery plan` knows it"),
    "train": ("bloomery.cli.train:run", "start or resume a training run"),
    "launch": ("bloomery.cli.launch:run", "start the ranks of this machine, for a run on one or several"),
    "preflight": ("bloomery.cli.preflight:run", "check the nodes of a job and measure them before a run"),
    "submit": ("bloomery.cli.submit:run", "queue the jobs of a run with SLURM, or on this machine"),
    "status": ("bloomery.cli.status:run", "show what one run or all runs are doing, and what they wait for"),
    "cancel": ("bloomery.cli.status:cancel", "end the jobs of a run"),
    "stop": ("bloomery.cli.control:stop", "save and stop a run, and keep queued starts from training"),
    "save": ("bloomery.cli.control:save", "let a run save a checkpoint now and go on"),
    "drill": ("bloomery.cli.drill:run", "inject faults into a real run here: how long each recovery takes"),
    "note": ("bloomery.cli.report:note", "add a note to the chronicle of a run, or write the chronicle anew"),
    "watch": ("bloomery.cli.watch:run", "watch runs and alert people: hung, gone, failed, disk full, guards"),
    "sync": ("bloomery.cli.sync:sync", "send the logs of a run elsewhere while it trains: a store, the Hub"),
    "follow": ("bloomery.cli.sync:follow", "show what a run is doing that trains elsewhere, or here"),
    "dashboard": ("bloomery.cli.dashboard:run", "serve a live page about runs: curves, events, health"),
    "top": ("bloomery.cli.top:run", "show runs live in the terminal, with sparklines"),
    "plot": ("bloomery.cli.plot:run", "draw the curves of runs as a picture: PNG, SVG or PDF"),
    "report": ("bloomery.cli.report:run", "show where the time of a run went: goodput, and what it lost to"),
    "peer": ("bloomery.cli.peer:run", "train as one peer of an elastic run; measure links; list time-outs"),
    "coordinate": ("bloomery.cli.coordinate:run", "start the coordinator of elastic runs; make certificates"),
    "mesh": ("bloomery.cli.mesh:run", "show which rank runs on which node, and what each stage holds"),
    "data": ("bloomery.cli.data:run", "fetch, tokenize, merge, verify and inspect training data"),
    "generate": ("bloomery.cli.generate:run", "continue a text with a trained model"),
    "evaluate": ("bloomery.cli.evaluate:run", "measure the loss of any text, or score a model on tasks"),
    "ckpt": ("bloomery.cli.ckpt:run", "list, show, verify, copy, export and import checkpoints"),
    "guard": ("bloomery.cli.guard:run", "replay an old log: what the guards would have done, and when"),
    "skip": ("bloomery.cli.control:skip", "let a run leave samples out from now on; --dry-run says which"),
    "rewind": ("bloomery.cli.control:rewind", "let a run go back; --dry-run says what would be lost"),
    "fork": ("bloomery.cli.fork:run", "begin another run from a checkpoint, to try other settings"),
    "simulate": ("bloomery.cli.simulate:run", "simulate months of a run: the cost of failures and links"),
    "simulate-internet": (
        "bloomery.cli.chaos:simulate_internet",
        "train real peers here over simulated links",
    ),
    "chaos": ("bloomery.cli.chaos:chaos", "train real peers here while faults are injected by a seed"),
    "completion": ("bloomery.cli.completion:run", "print a script for the completion of a shell"),
    "config": ("bloomery.cli.config:run", "show and check recipes; print the reference of all settings"),
}
"""Each command: its function, as `module:function`, and one line of help."""

GROUPS = {
    "begin": "demo train generate evaluate config completion",
    "see runs": "status top dashboard plot report watch follow note",
    "change a run": "save stop skip rewind fork",
    "data and checkpoints": "data ckpt sync guard",
    "before paying": "plan calibrate simulate mesh",
    "several nodes": "submit cancel launch preflight drill",
    "several sites": "coordinate peer simulate-internet chaos",
}
"""The commands by what a person is about to do, in the order of the help."""

EXAMPLES = """\
examples:
  bloomery demo                                   run every part once, on Python's own source code
  bloomery train demo train.global_batch=16       train a shipped recipe with one setting changed
  bloomery train my.toml                          train your own recipe; the same command resumes it
  bloomery generate runs/demo "def main("         continue a text with the model of a run
  bloomery ckpt export runs/demo exported         write a directory that transformers loads
  bloomery config show demo --why                 show every setting and where its value came from

`bloomery COMMAND --help` says more about each command."""

INTERRUPTED = 130
BROKEN_PIPE = 141
USAGE = 2
COMMIT_FILE = "commit.txt"
"""Written beside the package when a wheel is built (setup.py); a clone asks git."""
_GIT_TIMEOUT_S = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    An error that a user can mend is printed as a message without a traceback.

    arguments: the words after `bloomery`; None takes them from the command line.
    """
    from bloomery.cli.standard_output import discard_output, is_refused, open_streams

    words = list(sys.argv[1:] if arguments is None else arguments)
    open_streams()
    try:
        status = _dispatch(words)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("bloomery: interrupted", file=sys.stderr)
        if arguments is None:
            _end_at_once(INTERRUPTED)
        return INTERRUPTED
    except BrokenPipeError:
        discard_output()
        return BROKEN_PIPE
    except OSError as error:
        if is_refused():
            discard_output()
            print(
                f"bloomery: what it prints cannot be written: {error.strerror or error}\n"
                "  Free space where its output goes, or send it elsewhere.",
                file=sys.stderr,
            )
            return 1
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or error.filename is not None:
            raise
        print(
            f"bloomery: {error.strerror}: a file that it wrote is not whole\n"
            "  Free some space there, then start it again.",
            file=sys.stderr,
        )
        return 1
    return status


def version_line() -> str:
    """Return for instance `bloomery 0.1.0 (51d1de1a2b3c)`; without the commit where it is unknown."""
    from importlib import metadata
    from pathlib import Path

    commit = commit_of(Path(__file__).parents[1])
    return f"bloomery {metadata.version('bloomery')}" + (f" ({commit})" if commit else "")


def commit_of(package: Path) -> str:
    """Return the commit of a package directory: as it was built, or as its clone is; '' if unknown.

    `-dirty` is added where files of the clone were changed.
    """
    import subprocess

    built = package / COMMIT_FILE
    if built.is_file():
        return built.read_text(encoding="utf-8").strip()
    clone = package.parents[1]
    if not (clone / ".git").exists():
        return ""
    command = ["git", "-C", str(clone), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _end_at_once(status: int) -> None:
    """End a process that was started for one training, whose parts are closed already.

    Python would take seconds to take down torch and a tokenizer that is still being trained in a thread.
    """
    import os

    if os.environ.get("BLOOMERY_ENVIRONMENT") == "own":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _dispatch(words: list[str]) -> int:
    if len(words) > 1 and words[0] == "help":
        words = [words[1], "--help"] if words[1] in COMMANDS else [words[1]]
    name = words[0] if words else "--help"
    if name in ("-h", "--help", "help"):
        print(_help())
        return 0 if words else USAGE
    if name in ("-V", "--version"):
        print(version_line())
        return 0
    if wrong := _not_utf8(words):
        print(wrong, file=sys.stderr)
        return USAGE
    if name not in COMMANDS:
        print(_unknown(name), file=sys.stderr)
        return USAGE
    return _run(name, words[1:])


def _not_utf8(words: list[str]) -> str:
    """Return what is wrong with a word that is not UTF-8, which no journal, recipe or record could hold.

    Python hands its other bytes on as surrogates.
    """
    for word in words:
        at = next((n for n, character in enumerate(word) if "\ud800" <= character <= "\udfff"), None)
        if at is not None:
            shown = word.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
            return (
                f"bloomery: '{shown}' is not UTF-8: its character {at + 1} is the byte "
                f"0x{ord(word[at]) & 0xFF:02x}\n"
                "  Write it in UTF-8 (`iconv -f latin1 -t utf-8`); rename a file whose name is not."
            )
    return ""


def _run(name: str, arguments: list[str]) -> int:
    from importlib import import_module

    from bloomery.config.environment import go_offline, is_offline
    from bloomery.errors import BloomeryError

    if is_offline():
        go_offline()  # sets the variables that make the other libraries stay offline too
    module, _, function = COMMANDS[name][0].partition(":")
    try:
        status: int = getattr(import_module(module), function)(arguments)
    except BloomeryError as error:
        _flush()
        if error.message and not _is_reported_by_launcher(error):
            print(f"bloomery {name}: {error}", file=sys.stderr)
        return error.exit_status
    except OSError as error:
        from bloomery.errors import of_disk

        refused = of_disk(error)
        if refused is None:
            raise
        _flush()
        print(f"bloomery {name}: {refused}", file=sys.stderr)
        return refused.exit_status
    return status


def _is_reported_by_launcher(error: BloomeryError) -> bool:
    """Whether the launcher of this rank reports the lost rank, so that the other ranks need not."""
    import os

    from bloomery.errors import RankLost

    return isinstance(error, RankLost) and "BLOOMERY_LAUNCHER" in os.environ


def _help() -> str:
    width = max(len(name) for name in COMMANDS)
    groups = "\n".join(
        "\n".join([f"{title}:", *(f"  {name:<{width}}  {COMMANDS[name][1]}" for name in names.split())])
        for title, names in GROUPS.items()
    )
    return (
        "usage: bloomery COMMAND …\n\n"
        "Pre-trains large language models and keeps the training alive.\n\n"
        f"{groups}\n\n{EXAMPLES}"
    )


def _unknown(name: str) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
    hint = f"Did you mean `bloomery {near[0]}`?" if near else f"Commands: {', '.join(COMMANDS)}."
    return f"bloomery: there is no command '{name}'\n  {hint}"


def _flush() -> None:
    """Show what was printed before an error. Where it cannot be shown, the end of `main` tells why."""
    from contextlib import suppress

    with suppress(OSError):
        sys.stdout.flush()
