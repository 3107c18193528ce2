"""Uploads, restores and downloads that kill themselves at chosen points, and what each leaves behind."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from tests.checkpoint.kills import DEADLINE_S
from tests.checkpoint.small_run import Run
from tests.forked import forked

from bloomery import durable
from bloomery.checkpoint.format.catalogue import checkpoints, verify
from bloomery.checkpoint.format.state import collect
from bloomery.checkpoint.remote.backup import Backup
from bloomery.checkpoint.remote.remote_run import (
    download_run_files,
    place_at,
    remote_checkpoints,
    remote_source,
    upload_run_files,
)
from bloomery.checkpoint.remote.transfer import download_checkpoint, upload_checkpoint
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.config.checkpoint import BackupSection, CheckpointSection
from bloomery.events import incarnation
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import Objects
from bloomery.train.checkpoint_store import Store

STEP, NAME = 7, "step-000007.i001"


def upload(path: str, url: str) -> None:
    """Back the run's checkpoint up."""
    rundir = RunDirectory(Path(path) / "run")
    upload_run_files(rundir, place_at(url))
    upload_checkpoint(rundir.checkpoints / NAME, place_at(url), notes=rundir.backups / "notes")


def restore(path: str, url: str) -> None:
    """Go on from the backup in a directory that has nothing, or what a kill left there."""
    place, _, name = url.rpartition("/")
    rundir, run = RunDirectory(Path(path) / "restored").create(), Run()
    backup = Backup(rundir, BackupSection(url=place), run_name=name)
    restored = Store(rundir, CheckpointSection(background="off"), backup=backup).restore(run.parts)
    assert restored is not None and restored.step == STEP and run.equals(Run().fill(STEP))


def download(path: str, url: str) -> None:
    """Bring the checkpoint back as a run."""
    rundir = RunDirectory(Path(path) / "downloaded").create()
    fetch = lambda: download_run_files(place_at(url), rundir)  # noqa: E731
    download_checkpoint(remote_source(url), rundir.checkpoints, before_commit=fetch)


ACTS: dict[str, Callable[[str, str], None]] = {"upload": upload, "restore": restore, "download": download}


class Points:
    """Counts what an act does, each beginning and end of a step, and calls `at` with each number."""

    def __init__(self, at: Callable[[int], None]) -> None:
        self.count, self._at = 0, at

    def passed(self) -> None:
        self.count += 1
        self._at(self.count)

    def around(self, function: Callable) -> Callable:
        def counted(*given, **named):
            self.passed()
            result = function(*given, **named)
            self.passed()
            return result

        return counted

    def along(self, function: Callable) -> Callable:
        def counted(*given, **named) -> Iterator:
            for piece in function(*given, **named):
                self.passed()
                yield piece

        return counted

    def run(self, act: str, path: str, url: str) -> None:
        with (
            mock.patch.object(Objects, "put", self.around(Objects.put)),
            mock.patch.object(Objects, "stat", self.around(Objects.stat)),
            mock.patch.object(Objects, "delete", self.around(Objects.delete)),
            mock.patch.object(Objects, "pieces", self.along(Objects.pieces)),
            mock.patch.object(Path, "rename", self.around(Path.rename)),
            mock.patch.object(durable, "write_new", self.around(durable.write_new)),
            mock.patch.object(os, "fsync", self.around(os.fsync)),
        ):
            ACTS[act](path, url)


def die_at(act: str, path: str, url: str, point: int, environment: dict[str, str]) -> None:
    """Act, and be killed at a point of it; in a process of its own."""
    os.environ |= environment

    def at(number: int) -> None:
        if number == point:
            os.kill(os.getpid(), signal.SIGKILL)

    Points(at).run(act, path, url)


@dataclass(kw_only=True)
class Killed:
    """How many kills there were of each act, and of how many points each has without one."""

    kills: Counter[str] = field(default_factory=Counter)
    points: dict[str, int] = field(default_factory=dict)


def kill_at_points(path: Path, new_place: Callable[[], str], *, kills: int, seed: int) -> Killed:
    """Kill each act so often, at seeded points, one attempt after the other till it is done.

    After each kill, what is committed is whole; after the last, the act is done without one and all is there.
    """
    rundir, dice, told = RunDirectory(path / "run").create(), random.Random(seed), Killed()
    incarnation.begin(rundir, base=None, reason="start")
    state = collect(Run().fill(STEP).parts)
    save_checkpoint(rundir.checkpoints, state.entries, step=STEP, incarnation=1, values=state.values)
    context = forked()
    url = f"{new_place()}/run"
    for act in ACTS:
        trial = path / f"{act}-trial"
        trial.mkdir()
        (trial / "run").symlink_to(rundir.path)
        counting = Points(lambda number: None)
        counting.run(act, str(trial), f"{new_place()}/run" if act == "upload" else url)
        (rundir.backups / "notes").unlink(missing_ok=True)
        told.points[act] = counting.count
        for _ in range(kills):
            point = dice.randint(1, counting.count)
            environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
            arguments = (act, str(path), url, point, environment)
            child = context.Process(target=die_at, args=arguments, daemon=True)
            child.start()
            child.join(DEADLINE_S)
            assert child.exitcode in (0, -signal.SIGKILL), f"{act} at {point}: ended with {child.exitcode}"
            told.kills[act] += child.exitcode != 0
            _what_is_left(path, url)
            if child.exitcode == 0 and act == "upload":  # it is all there: the next begins anew
                url = f"{new_place()}/run"
            if child.exitcode == 0 and act == "download":
                shutil.rmtree(path / "downloaded")
        ACTS[act](str(path), url)
        _what_is_left(path, url)
        if act == "upload":
            assert [source.name for source in remote_checkpoints(place_at(url))] == [NAME]
    restored = incarnation.read_incarnations(RunDirectory(path / "restored"))
    assert restored.pop(1) is None and set(restored.values()) == {(STEP, 1)}, "no life began from nothing"
    (found,) = checkpoints(RunDirectory(path / "downloaded"))
    assert found.name == NAME
    return told


def _what_is_left(path: Path, url: str) -> None:
    for source in remote_checkpoints(place_at(url)):
        assert verify(source) == []
    assert set(incarnation.read_incarnations(RunDirectory(path / "restored")).values()) <= {None, (STEP, 1)}
    downloaded = RunDirectory(path / "downloaded")
    for found in checkpoints(downloaded):
        assert verify(found.directory) == [] and incarnation.identity(downloaded)
    assert verify(RunDirectory(path / "run").checkpoints / NAME) == []
