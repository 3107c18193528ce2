"""A node that was thought dead writes on beside its successor: no reader sees a checkpoint of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from tests.faults.commands import bloomery, wait_for

from bloomery.checkpoint.format.catalogue import checkpoints
from bloomery.checkpoint.format.manifest import parse_name
from bloomery.events.incarnation import read_incarnations
from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory
from bloomery.events.run_lock import STALE_AFTER_S

LONG = ("train.samples=40_000_000", "optim.name=adamw", "evaluate.every_steps=0", "train.compile=off")
BESIDE_S = float(os.environ.get("BLOOMERY_SOAK_BESIDE_S", "30"))
OTHER_MACHINE = 'hostname other-node && mount --bind "$0" "$1" && shift && exec "$@"'
"""A machine of another name, where the file that is locked is another one: locks are not shared."""


@contextmanager
def launcher(command: list[str], log: Path, *, before: tuple[str, ...] = ()) -> Iterator[psutil.Process]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BLOOMERY_")}
    words = [*before, sys.executable, "-m", "bloomery", *command]
    with log.open("wb") as said:
        process = subprocess.Popen(
            words, stdout=said, stderr=said, env=environment | {"OMP_NUM_THREADS": "1"}
        )
    try:
        yield psutil.Process(process.pid)
    finally:
        with suppress(psutil.NoSuchProcess):
            signal_all(psutil.Process(process.pid), signal.SIGCONT)
        process.terminate()
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def signal_all(root: psutil.Process, number: int) -> None:
    for process in [root, *root.children(recursive=True)]:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def committed(run: RunDirectory) -> set[tuple[int, int]]:
    """(step, incarnation) of all checkpoints that lie there with a manifest, whoever sees them."""
    names = (parse_name(path.parent.name) for path in run.checkpoints.glob("*/manifest.json"))
    return {(name[0], name[1]) for name in names if name is not None}


def listed(run: RunDirectory) -> set[tuple[int, int]]:
    """The same of the checkpoints that `bloomery ckpt list` shows."""
    said = bloomery("ckpt", "list", str(run.path), "--json")
    records = [json.loads(line) for line in said.out.splitlines()]
    return {(record["step"], record["incarnation"]) for record in records}


@pytest.mark.slow
@pytest.mark.needs(lambda: os.geteuid() == 0, rights="root, to make a machine of another name")
def test_no_checkpoint_of_the_old_incarnation_is_visible_after_the_base_of_the_new_one(
    train_command: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(tmp_path / "run")
    more = (*LONG, "checkpoint.keep_last=1000", "--nproc", "2", "--supervise")
    command = ["launch", *train_command(*more)[1:]]
    other_lock = tmp_path / "other.lock"
    other_lock.touch()
    with launcher(command, tmp_path / "old.log") as old:
        wait_for(lambda: time.sleep(0.2) or len(committed(run)) >= 3)
        signal_all(old, signal.SIGSTOP)
        frozen = max(committed(run))
        time.sleep(STALE_AFTER_S + 2.0 - (time.time() - run.holder.stat().st_mtime))
        namespace = ("unshare", "--mount", "--uts", "sh", "-c", OTHER_MACHINE)
        with launcher(
            command, tmp_path / "new.log", before=(*namespace, str(other_lock), str(run.lock))
        ) as new:
            wait_for(lambda: time.sleep(0.2) or len(read_incarnations(run)) == 2 or not new.is_running())
            wait_for(lambda: time.sleep(0.2) or any(number == 2 for _, number in committed(run)))
            base = read_incarnations(run)[2]
            assert base is not None and base[1] == 1
            # its launcher, which would end the ranks when it finds others' heartbeats, stays frozen
            for process in old.children(recursive=True):
                process.send_signal(signal.SIGCONT)
            seen: set[tuple[int, int]] = set()
            lie_there: set[tuple[int, int]] = set()
            looks, end = 0, time.monotonic() + BESIDE_S
            while time.monotonic() < end:
                seen |= {(checkpoint.step, checkpoint.incarnation) for checkpoint in checkpoints(run)}
                lie_there |= committed(run)
                looks += 1
                time.sleep(0.25)
            seen |= listed(run)
            signal_all(old, signal.SIGCONT)
            with suppress(psutil.TimeoutExpired):
                old.wait(120)
            has_ended = not old.is_running() or old.status() == psutil.STATUS_ZOMBIE
            seen |= listed(run)
    written = {name for name in lie_there if name[1] == 1 and name[0] > base[0]}
    visible = {name for name in seen if name[1] == 1 and name[0] > base[0]}
    starts = [event["incarnation"] for event in read_journal(run.journal()) if event["event"] == "start"]
    figures = {
        "name": "split brain",
        "the new incarnation's base": base,
        "newest checkpoint when frozen": frozen,
        "manifests of the old one after it": len(written),
        "of them visible": len(visible),
        "looks": looks,
        "incarnations": len(read_incarnations(run)),
        "starts": len(starts),
        "the old launcher ended by itself once it went on": has_ended,
    }
    with capsys.disabled():
        print(json.dumps(figures))
    assert not visible and has_ended
    assert len(read_incarnations(run)) == len(starts) == 2, "the new one was not disturbed"
