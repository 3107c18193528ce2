"""Publishes each checkpoint of a run on a branch of its own on the Hub; until then it is not pruned."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from bloomery import durable
from bloomery.checkpoint.format.catalogue import checkpoints
from bloomery.checkpoint.format.manifest import parse_name
from bloomery.errors import storage_error
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.sync.hub import HubRepository

log = logging.getLogger(__name__)

_MOST_HELD = 4
_DRAFT = ".draft-"
MARK = "bloomery.json"
"""A branch without this file is not whole: an upload was broken off between the branch and its commit."""
Export = Callable[[Path, Path], None]
"""Writes a checkpoint (first path) as the files to publish, into a directory that does not exist (second)."""


class CheckpointPublisher:
    """Publishes each checkpoint of a run as a branch that is named like it, such as step-000500.i001.

    A checkpoint that is seen is held by hard links in RUN/publishing, so that it may be pruned meanwhile. Of
    those that were pruned before they could be published the newest few are held, because they fill the disk.

    export: writes what is to be published. It raises BloomeryError.
    """

    def __init__(self, rundir: RunDirectory, repository: HubRepository, *, export: Export) -> None:
        self._rundir, self._repository, self._export = rundir, repository, export
        self._held = rundir.path / "publishing"
        self._published: set[str] = set()
        self._branches: set[str] | None = None
        self._seen: set[str] = set()
        self._refusals: Counter[str] = Counter()
        self._publishing = ""

    def hold(self) -> None:
        """Hold the checkpoints that were not seen yet. Cheap and without the network, so call it often.

        It may run in another thread than `publish_held`. Raises StorageError.
        """
        present = checkpoints(self._rundir)
        for checkpoint in present:
            place = self._held / checkpoint.name
            if checkpoint.name in self._seen:
                continue
            try:
                if not place.exists():
                    _link(checkpoint.directory, place)
                self._seen.add(checkpoint.name)
            except FileNotFoundError:
                continue  # it was pruned meanwhile
            except OSError as error:
                raise storage_error(error, path=place, doing="Holding a checkpoint") from error
        free = {checkpoint.name for checkpoint in present}  # the run has their bytes anyhow
        for name in [name for name in self._waiting() if name not in free][:-_MOST_HELD]:
            if name != self._publishing:
                log.warning("%s is not published: %d newer ones wait already", name, _MOST_HELD)
                shutil.rmtree(self._held / name, ignore_errors=True)
                shutil.rmtree(self._export_of(name), ignore_errors=True)

    def publish_held(self) -> list[str]:
        """Publish what is held, oldest first, and return the names. Raises BloomeryError.

        One that was refused comes last in the next call, so that a damaged checkpoint does not hold up the
        others.
        """
        done: list[str] = []
        while names := sorted(self._waiting(), key=self._refusals.__getitem__):
            self._publishing = names[0]
            self._refusals[names[0]] += 1
            if not self._is_published(names[0]):
                self._publish(names[0])
                self._published.add(names[0])
                done.append(names[0])
            shutil.rmtree(self._held / names[0])
        return done

    @property
    def is_waiting(self) -> bool:
        """Return whether some checkpoint is held."""
        return bool(self._waiting())

    def _waiting(self) -> list[str]:
        """Return the names of the checkpoints that are held, oldest first."""
        names = [path.name for path in self._held.glob("step-*")] if self._held.is_dir() else []
        return sorted(filter(parse_name, names), key=lambda name: parse_name(name) or (0, 0))

    def _publish(self, name: str) -> None:
        exported = self._export_of(name)
        shutil.rmtree(exported, ignore_errors=True)  # of a publisher that was killed
        step, incarnation = parse_name(name) or (0, 0)
        try:
            self._export(self._held / name, exported)
            facts = {
                "run": self._rundir.name,
                "checkpoint": name,
                "step": step,
                "incarnation": incarnation,
            }
            durable.write_whole(exported / MARK, json.dumps(facts, indent=1) + "\n")
            self._repository.publish_branch(name, exported, message=f"Step {step} of {self._rundir.name}")
        except OSError as error:
            raise storage_error(error, path=exported, doing="Exporting a checkpoint") from error
        finally:
            shutil.rmtree(exported, ignore_errors=True)

    def _export_of(self, name: str) -> Path:
        return self._held / f".{name}.export"

    def _is_published(self, name: str) -> bool:
        """Return whether a checkpoint has a whole branch. That of an earlier process is looked at once.

        After months there are thousands, and only those of checkpoints that are held matter.
        """
        if self._branches is None:
            self._repository.make()
            self._branches = self._repository.branches()
        if name in self._branches:
            if MARK in self._repository.files_of(name):
                self._published.add(name)
            self._branches.discard(name)
        return name in self._published


def _link(directory: Path, target: Path) -> None:
    """Make a directory whose files are those of another; it appears as a whole. Raises OSError.

    Others may make the same at once. What is left of those that were killed would keep the bytes of pruned
    checkpoints, so it is removed.
    """
    durable.remove_abandoned(target.parent, _DRAFT)
    draft = target.with_name(f"{_DRAFT}{secrets.token_hex(4)}")
    draft.mkdir(parents=True)
    lock = durable.hold_directory(draft)
    try:
        for path in directory.iterdir():
            os.link(path, draft / path.name)
        draft.rename(target)
    except OSError:
        if not target.exists():
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if lock is not None:
            os.close(lock)
