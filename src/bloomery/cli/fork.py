"""`bloomery fork`: begins another run from a checkpoint of a run, to go on from there with other settings."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.cli.argument_values import not_negative
from bloomery.cli.arguments import parser
from bloomery.cli.json_output import json_text
from bloomery.errors import CheckpointError, StorageError

if TYPE_CHECKING:
    from bloomery.checkpoint.format.catalogue import CommittedCheckpoint
    from bloomery.events.run_directory import RunDirectory

EXAMPLES = """\
bloomery fork runs/mine runs/slower --to-step 400          a run of its own, from the checkpoint at or before
bloomery train runs/slower optim.learning_rate=1e-4        go on from there with another setting
bloomery plot runs/mine runs/slower                        compare; both can be resumed at any time"""
_DRAFT = ".bloomery-fork-"
_NOT_TAKEN = (".lock", ".draft", ".partial")
"""Files of a run's data directory that belong to a process that prepares data."""


def run(arguments: list[str]) -> int:
    """Run `bloomery fork`, and return the exit status."""
    options = parser(
        "fork",
        "Begin another run from a checkpoint: with its weights, optimizer, order of samples and guards.\n"
        "Files of the checkpoint and of prepared data are shared by hard links, where the file system has\n"
        "them. The first run stays as it is, and may be training. Both runs note the fork.",
        examples=EXAMPLES,
    )
    options.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    options.add_argument("new", type=Path, metavar="NEW", help="the directory of the new run")
    options.add_argument(
        "--to-step",
        type=not_negative,
        metavar="STEP",
        help="the latest step to keep (default: the newest checkpoint)",
    )
    options.add_argument("--json", action="store_true", help="print one JSON object")
    args = options.parse_args(arguments)
    from bloomery.cli.run_inputs import run_directory
    from bloomery.events.run_directory import RunDirectory
    from bloomery.operate.ledger.chronicle import add_note

    rundir = run_directory(args.run)
    checkpoint = _chosen(rundir, args.to_step)
    # An empty directory makes room for the run, so that no path through it leads anywhere for a while.
    new = RunDirectory(args.new.resolve() if ".." in args.new.parts else args.new)
    name = _fork(rundir, checkpoint, new.path)
    add_note(new, f"This run is a fork of {rundir.path.resolve()}: it begins at its {checkpoint.name}.")
    try:
        add_note(rundir, f"A fork of this run begins at {checkpoint.name}: {new.path.resolve()}.")
    except StorageError as refused:  # a colleague's run: the fork is whole without the note there
        print(f"note: {rundir.path} does not note the fork: {refused.message}", file=sys.stderr)
    if args.json:
        facts = {"run": str(rundir.path), "new": str(new.path), "name": name, "step": checkpoint.step}
        print(json_text({**facts, "checkpoint": checkpoint.name}))
        return 0
    print(f"{new.path} begins at step {checkpoint.step:,} of {rundir.path} ({checkpoint.name}).")
    print(f"Go on with other settings: bloomery train {new.as_word()} optim.learning_rate=…")
    return 0


def _chosen(rundir: RunDirectory, to_step: int | None) -> CommittedCheckpoint:
    """Return the newest checkpoint at or before step `to_step` (None: of all) that is not marked suspect.

    Raises CheckpointError where there is none.
    """
    from bloomery.checkpoint.format.catalogue import checkpoints
    from bloomery.checkpoint.format.suspects import newest_trusted

    listed = checkpoints(rundir)
    early = [item for item in listed if to_step is None or item.step <= to_step]
    checkpoint = newest_trusted(early)
    if checkpoint is None:
        steps = ", ".join(f"{item.step:,}" for item in listed) or "none"
        before = "" if to_step is None else f" at or before step {to_step:,}"
        raise CheckpointError(
            f"{rundir.path} has no checkpoint{before} (there are: {steps})",
            remedy="Give a later step, or let the run save first: bloomery save RUN.",
        )
    return checkpoint


def _fork(rundir: RunDirectory, checkpoint: CommittedCheckpoint, target: Path) -> str:
    """Make the new run's directory as a whole, or not at all; return the new run's name."""
    from bloomery import durable
    from bloomery.checkpoint.format.source import is_stored_elsewhere
    from bloomery.config.convert import dump_recipe
    from bloomery.config.find import name_of
    from bloomery.config.load import load_recipe
    from bloomery.errors import storage_error
    from bloomery.events.run_directory import RunDirectory

    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(f"{target} is there already", remedy="Give the fork a directory of its own.")
    if target.resolve() == Path.cwd():
        raise CheckpointError(
            f"{target} is the directory that you are in, which the fork would replace",
            remedy="Leave it (cd ..), and give it by its name.",
        )
    if target.resolve().is_relative_to(rundir.path.resolve()):
        raise CheckpointError(
            f"{target} lies in the run itself", remedy="Give the fork a directory of its own, beside it."
        )
    _refuse_damaged(checkpoint)
    if not rundir.recipe.exists():
        raise CheckpointError(f"{rundir.path} has no recipe.toml", remedy="Give a whole run directory.")
    name = name_of(target)
    # Two runs that sync to one place would overwrite each other's logs there.
    changed = [f"run.name={json.dumps(name)}", "sync.place=''"]
    loaded = load_recipe(str(rundir.recipe), changed)
    if loaded.recipe.elastic.inner_steps:
        raise CheckpointError(
            f"{rundir.path} is one peer of a run between peers, whose state they hold together",
            remedy="Begin a run with its weights instead: init.from=RUN.",
        )
    if is_stored_elsewhere(checkpoint.directory):
        raise CheckpointError(
            f"{rundir.path} keeps its checkpoints in object storage",
            remedy="Fork a copy: bloomery ckpt copy URL RUN, and then this command with that RUN.",
        )
    try:
        with _draft(target.parent) as draft:
            # In the draft and not the draft itself, for that may be read by nobody else.
            new = RunDirectory(draft / "run").create()
            _share(checkpoint.directory, new.checkpoints / checkpoint.name)
            if (rundir.path / "data").is_dir():
                _share(rundir.path / "data", new.path / "data")
            for number, record in _incarnations_up_to(rundir, checkpoint).items():
                durable.write_whole(new.incarnation(number), record)
            durable.write_whole(new.recipe, dump_recipe(loaded.recipe))
            if rundir.sources.exists():
                durable.write_whole(new.sources, rundir.sources.read_bytes())
            if target.exists():
                target.rmdir()
            durable.publish(new.path, target)
    except OSError as error:
        raise storage_error(error, path=target, doing="Forking a run") from error
    return name


@contextmanager
def _draft(parent: Path) -> Iterator[Path]:
    """Yield a new directory, which is removed after the block with what is still in it.

    Those of forks that were killed are removed first: they would keep the bytes of their checkpoints.
    """
    from bloomery import durable

    durable.make_directory(parent)
    durable.remove_abandoned(parent, _DRAFT)
    draft = Path(tempfile.mkdtemp(prefix=_DRAFT, dir=parent))
    lock = durable.hold_directory(draft)
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _refuse_damaged(checkpoint: CommittedCheckpoint) -> None:
    """Raise CheckpointError for a data file that has not the size it was saved with."""
    from bloomery.checkpoint.format.manifest import read_manifest

    for file in read_manifest(checkpoint.directory).files:
        path = checkpoint.directory / file.name
        size = path.stat().st_size if path.exists() else 0
        if size != file.bytes:
            raise CheckpointError(
                f"{path} is damaged: it has {size:,} bytes, and {file.bytes:,} were saved",
                remedy="Fork an earlier one with --to-step; `bloomery ckpt verify` says which are intact.",
            )


def _incarnations_up_to(rundir: RunDirectory, checkpoint: CommittedCheckpoint) -> dict[int, str]:
    """Return the records of the incarnations that led to a checkpoint, by number, as the fork has them.

    They name the run that they come from, so that the fork is nowhere taken for that run: a backup or a
    replica in memory of the one is not the other's.
    """
    records = {}
    for number in range(1, checkpoint.incarnation + 1):
        path = rundir.incarnation(number)
        if path.exists() and path.read_bytes().strip():
            record = json.loads(path.read_text(encoding="utf-8"))
            record["fork_of"] = str(rundir.path.resolve())
            records[number] = json.dumps(record, ensure_ascii=False) + "\n"
    return records


def _share(source: Path, target: Path) -> None:
    """Link the files below `source` to the same places below `target`; copy those that cannot be linked.

    What is shared is never written again: checkpoints and prepared data are replaced, not changed.
    """
    for path in sorted(source.rglob("*")):
        if path.is_file() and not path.name.endswith(_NOT_TAKEN):
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path, place)
            except OSError:
                shutil.copyfile(path, place)
