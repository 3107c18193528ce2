"""`bloomery stop`, `save`, `skip` and `rewind`: write requests to a running training, or show their cost."""

from __future__ import annotations

import shlex
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.cli.argument_values import MOST, not_negative
from bloomery.cli.arguments import parser
from bloomery.cli.json_output import json_text
from bloomery.errors import BloomeryError, UsageError, storage_error
from bloomery.events.run_directory import RunDirectory
from bloomery.events.switches import Switches, arm, note_of, switch_places

if TYPE_CHECKING:
    from bloomery.checkpoint.format.catalogue import CommittedCheckpoint
    from bloomery.events.history import PastSteps
    from bloomery.events.records import StepReport


_WHAT = {
    "stop": "Save and stop a run. Until the switch is disarmed each new start exits at once, so that jobs\n"
    "that are already queued drain one by one.",
    "save": "Save a checkpoint now and go on.",
}
_SWITCH_EXAMPLES = """\
bloomery {name} runs/mine                 arm the switch runs/mine/control/{name}
bloomery {name} runs/mine --disarm        take it back
bloomery {name} --at /group/switches      the same in the directory that the recipe's control.directory names
"""
_ARMED = {
    "stop": "the run saves and stops after its present step, and starts end at once until `bloomery stop {} "
    "--disarm`",
    "save": "the run saves after its present step",
}
_SAVES_LATER = "the run is not training, and saves after the first step of its next start"


def stop(arguments: list[str]) -> int:
    """Run `bloomery stop`, and return the exit status."""
    return _switch("stop", arguments)


def save(arguments: list[str]) -> int:
    """Run `bloomery save`, and return the exit status."""
    return _switch("save", arguments)


def _switch(name: str, arguments: list[str]) -> int:
    options = parser(name, _WHAT[name], examples=_SWITCH_EXAMPLES.format(name=name))
    options.add_argument("run", metavar="RUN", nargs="?", help="the run directory")
    options.add_argument("--at", metavar="DIR", help="a directory of switches, in place of a run")
    options.add_argument("--disarm", action="store_true", help="remove the switch")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = options.parse_args(arguments)
    if (chosen.run is None) == (chosen.at is None):
        options.error("give RUN or --at DIR, one of them")
    directories = _directories(chosen)
    if chosen.disarm:
        return _disarm(name, directories, as_json=chosen.json)
    path = _armed(name, directories)
    target = shlex.quote(chosen.run) if chosen.run else f"--at {shlex.quote(chosen.at)}"
    if chosen.json:
        print(json_text({"switch": name, "armed": str(path)}))
    else:
        is_idle = name == "save" and chosen.run and _is_training(RunDirectory(Path(chosen.run))) is False
        print(f"{path} is armed: {_SAVES_LATER if is_idle else _ARMED[name].format(target)}")
    return 0


def _directories(chosen: Namespace) -> list[Path]:
    """Return the directories of the switches: that of --at, or the run's and the one its recipe names."""
    if chosen.at is not None:
        if not Path(chosen.at).is_dir():
            raise BloomeryError(
                f"There is no directory {chosen.at}.", remedy="Give the one that control.directory names."
            )
        return [Path(chosen.at)]
    rundir = RunDirectory(Path(chosen.run))
    if not (rundir.exists() or rundir.control_dir.is_dir()):
        raise BloomeryError(
            f"There is no run in {chosen.run}.", remedy="Give a run directory, for instance runs/demo."
        )
    directories = [rundir.control_dir]
    if rundir.recipe.exists():
        from bloomery.config.load import load_recipe

        try:
            elsewhere = load_recipe(str(rundir.recipe)).recipe.control.directory
        except BloomeryError as unreadable:  # a run that trains can be stopped all the same
            print(f"bloomery: only {rundir.control_dir} is used: {unreadable.message}", file=sys.stderr)
            elsewhere = ""
        directories += switch_places(elsewhere)
    return directories


def _armed(name: str, directories: list[Path]) -> Path:
    """Arm the switch in the first directory that can be written, and return its path. Raises StorageError."""
    refused: OSError | None = None
    for directory in directories:
        try:
            arm(directory / name)
        except OSError as error:
            refused = refused or error
            continue
        return directory / name
    assert refused is not None
    raise storage_error(refused, path=directories[0] / name, doing="Arming the switch") from refused


def _disarm(name: str, directories: list[Path], *, as_json: bool) -> int:
    switches, disarmed = Switches(directories), list[str]()
    if switches.armed(name) is None and not as_json:
        print(f"{name} is not armed in {' or '.join(map(str, directories))}")
        return 0
    while path := switches.armed(name):
        note = note_of(path)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise storage_error(error, path=path, doing="Disarming the switch") from error
        disarmed.append(str(path))
        if not as_json:
            print(f"{path} is disarmed" + (f" ({note})" if note else ""))
    if as_json:
        print(json_text({"switch": name, "disarmed": disarmed}))
    return 0


_SKIP_EXAMPLES = """\
bloomery skip runs/demo --samples 4096:8192 --dry-run   say what that leaves out; change nothing
bloomery skip runs/demo --samples 4096:8192             never use the samples 4096 to 8191 of the stream
bloomery skip runs/demo --steps 300:500                 nor those of the steps 300 to 499"""


def skip(arguments: list[str]) -> int:
    """Run `bloomery skip`, and return the exit status."""
    options = parser(
        "skip",
        "Let a run leave samples out of its stream. The run takes the request after its next step, all\n"
        "ranks and peers alike, and every checkpoint from then on remembers it.",
        examples=_SKIP_EXAMPLES,
    )
    options.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    add_samples(options, required=True)
    options.add_argument("--dry-run", action="store_true", help="say what would be left out; ask for nothing")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    args = options.parse_args(arguments)
    from bloomery.cli.run_inputs import run_directory
    from bloomery.events.history import past_steps
    from bloomery.events.switches import write_request

    rundir = run_directory(args.run)
    past = past_steps(rundir, reaching=steps_before(args))
    samples = samples_of(args, past)
    facts = skipped_facts(samples, past.newest)
    if not args.dry_run:
        write_request(rundir, "skip", f"{samples.start}:{samples.stop}", keep=True)
    if args.json:
        print(json_text({"asked": not args.dry_run, **facts}))
        return 0
    print(skipped_words(facts))
    print(when_words(rundir, "skip", dry_run=args.dry_run))
    return 0


def add_samples(options: ArgumentParser, *, required: bool) -> None:
    """Add `--samples FIRST:END` and `--steps FIRST:END`, of which at most one is given."""
    either = options.add_mutually_exclusive_group(required=required)
    either.add_argument(
        "--samples",
        type=_span,
        metavar="FIRST:END",
        help="indices of the sample stream to leave out, the end not included",
    )
    either.add_argument(
        "--steps",
        type=_span,
        metavar="FIRST:END",
        help="leave out the samples of these steps, the end not included; for steps not yet made they are "
        "computed with the present global batch",
    )


def steps_before(args: Namespace) -> tuple[int, ...]:
    """Return the steps after which the samples of `--steps` begin and end; () where it was not given."""
    return () if args.steps is None else (args.steps.start - 1, args.steps.stop - 1)


def samples_of(args: Namespace, past: PastSteps) -> range:
    """Return the indices of the stream that were asked for; an empty range where none were.

    past: reaches the steps of `steps_before`.
    Raises BloomeryError for steps that have no samples, as before the first step of the run.
    """
    if args.samples is not None:
        wanted: range = args.samples
        return wanted
    if not args.steps:
        return range(0)
    found = range(*(cursor_after(step, past) for step in steps_before(args)))
    if found and found.stop <= MOST:
        return found
    asked = f"--steps {args.steps.start}:{args.steps.stop}"
    if found:
        raise UsageError(f"{asked} ends beyond sample {MOST:,}.", remedy="Give an earlier step as its end.")
    if past.newest is None:
        raise BloomeryError(
            f"No step of this run is recorded yet, so nobody knows which samples {asked} are.",
            remedy="Wait for its first step, or name the samples: --samples FIRST:END.",
        )
    raise UsageError(f"{asked} has no samples: the first step of a run is 1.", remedy="Give a later step.")


def cursor_after(step: int, past: PastSteps) -> int:
    """Return the index of the stream after a step; for a future step, the index at today's batch size."""
    last = past.newest
    if step <= 0 or last is None:
        return 0
    if step >= last.step:
        return last.cursor + (step - last.step) * last.global_batch * last.peers
    return past.reached[step].cursor


def skipped_facts(samples: range, last: StepReport | None) -> dict[str, Any]:
    """Return what leaving these samples out means for the run, as the fields that `--json` prints.

    last: the step after which it happens; None before the first.
    """
    cursor = last.cursor if last else 0
    ahead = range(max(samples.start, cursor), max(samples.stop, cursor))
    batch = last.global_batch * last.peers if last else 0
    return {
        "samples": [samples.start, samples.stop],
        "left_out": len(ahead),
        "used_already": len(samples) - len(ahead),
        "steps_worth": len(ahead) / batch if batch else None,
    }


def skipped_words(facts: dict[str, Any]) -> str:
    """Return in words which samples a skip leaves out of the stream. facts: what `skipped_facts` returned."""
    start, stop = facts["samples"]
    steps = "" if facts["steps_worth"] is None else f", {facts['steps_worth']:,.1f} steps' worth"
    text = f"Samples {start:,} to {stop - 1:,} of the stream: {facts['left_out']:,} are left out{steps}."
    if facts["used_already"]:
        text += f" {facts['used_already']:,} lie behind the run and stay used: `bloomery rewind` goes back."
    return text


def when_words(rundir: RunDirectory, name: str, *, dry_run: bool) -> str:
    """Return the sentences that say when the run takes a request, and how to take it back.

    name: of the request, which is that of its file.
    """
    from bloomery.operate.submission import is_finished

    if dry_run:
        return "Nothing was asked for: this was a dry run."
    is_training = _is_training(rundir)
    if is_training is None:
        return "The run takes it after its next step, or after the first step of its next start."
    if is_training:
        return "The run takes it after its next step."
    takes_back = f"Remove {rundir.control(name)} to take it back."
    if is_finished(rundir):
        return (
            "The run is finished, and a start makes no step before train.tokens is raised: it then takes "
            f"this after its first step, and says so at its beginning. {takes_back}"
        )
    return (
        "The run is not training: its next start takes this after its first step, and says so at its "
        f"beginning. {takes_back}"
    )


def _is_training(rundir: RunDirectory) -> bool | None:
    """Whether somebody holds the run's lock; None where the file system has no locks."""
    from bloomery import durable

    try:
        with rundir.lock.open("rb") as lock:
            return not durable.try_lock(lock.fileno(), shared=True)
    except FileNotFoundError:
        return False
    except OSError:
        return None


def _span(text: str) -> range:
    first, colon, end = text.replace("_", "").partition(":")
    if not (colon and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise ArgumentTypeError(f"{text!r} is not FIRST:END with FIRST below END")
    if int(end) > MOST:
        raise ArgumentTypeError(f"{end} is too much: at most {MOST:,}")
    return range(int(first), int(end))


_REWIND_EXAMPLES = """\
bloomery rewind runs/demo --to-step 400 --dry-run       say from which checkpoint, and what would be lost
bloomery rewind runs/demo --to-step 400                 go back, and make the same steps again
bloomery rewind runs/demo --to-step 400 --steps 401:700 go back, and leave out the samples of these steps"""


def rewind(arguments: list[str]) -> int:
    """Run `bloomery rewind`, and return the exit status."""
    options = parser(
        "rewind",
        "Let a run go back to its newest checkpoint at or before a step. The run takes the request after\n"
        "its next step, all ranks alike; a run between peers goes back together. What was abandoned stays\n"
        "in the journal and is no longer part of the run.",
        examples=_REWIND_EXAMPLES,
    )
    options.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    options.add_argument(
        "--to-step", type=not_negative, required=True, metavar="STEP", help="the latest step to keep"
    )
    add_samples(options, required=False)
    options.add_argument("--dry-run", action="store_true", help="say what would be lost; ask for nothing")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    args = options.parse_args(arguments)
    from bloomery.checkpoint.format.catalogue import checkpoints
    from bloomery.checkpoint.format.suspects import trusted
    from bloomery.cli.run_inputs import run_directory
    from bloomery.errors import CheckpointError
    from bloomery.events.history import past_steps
    from bloomery.events.switches import write_request

    rundir = run_directory(args.run)
    listed = checkpoints(rundir)
    early = [checkpoint for checkpoint in trusted(listed) if checkpoint.step <= args.to_step]
    if not early:
        steps = ", ".join(f"{checkpoint.step:,}" for checkpoint in trusted(listed)) or "none"
        raise CheckpointError(
            f"{rundir.path} has no checkpoint at or before step {args.to_step:,} (there are: {steps})",
            remedy="Go back to a later step, or restore an older checkpoint with `bloomery ckpt copy`.",
        )
    past = past_steps(rundir, back_to=early[-1].step, reaching=steps_before(args))
    newest = max(listed[-1].step, past.newest.step if past.newest else 0)
    if args.to_step > newest:
        raise CheckpointError(
            f"{rundir.path} is at step {newest:,}, and cannot go back to step {args.to_step:,}",
            remedy="Give a step that it has made.",
        )
    facts = lost_facts(early[-1], past)
    samples = samples_of(args, past)
    if samples:
        facts["skip"] = skipped_facts(samples, past.kept)
    if not args.dry_run:
        skip = f" {samples.start}:{samples.stop}" if samples else ""
        write_request(rundir, "rewind", f"{args.to_step}{skip}", keep=False)
    if args.json:
        print(json_text({"asked": not args.dry_run, **facts}))
        return 0
    which = f" (steps {facts['to_step'] + 1:,} to {facts['last_step']:,})" if facts["steps"] else ""
    print(
        f"From {facts['checkpoint']}: {facts['steps']:,} steps, {facts['samples']:,} samples and "
        f"{facts['seconds'] / 3600:.2f} hours of training are undone{which}, and those that the run makes "
        "until it takes the request."
    )
    if samples:
        print(skipped_words(facts["skip"]))
    print(when_words(rundir, "rewind", dry_run=args.dry_run))
    return 0


def lost_facts(checkpoint: CommittedCheckpoint, past: PastSteps) -> dict[str, Any]:
    """Return the steps, samples and seconds of training that a run loses by going back to a checkpoint.

    past: where the steps up to the checkpoint's are kept, and the later ones undone.
    """
    last = past.newest if past.undone else None
    return {
        "checkpoint": checkpoint.name,
        "to_step": checkpoint.step,
        "last_step": last.step if last else checkpoint.step,
        "steps": past.undone,
        "samples": last.consumed_samples - (past.kept.consumed_samples if past.kept else 0) if last else 0,
        "seconds": round(past.undone_s, 3),
    }
