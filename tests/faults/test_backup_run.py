"""A run whose machine is lost: the same command goes on from its backup, and learns bit for bit the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.checkpoint.object_store import serving
from tests.faults.commands import Said, events, running

from bloomery.checkpoint.format.catalogue import checkpoints, remote_copies, verify
from bloomery.checkpoint.format.manifest import parse_name
from bloomery.checkpoint.remote.backup_duty import due
from bloomery.checkpoint.remote.remote_run import place_at, remote_checkpoints
from bloomery.config.checkpoint import BackupSection
from bloomery.events.journal import loss_curve
from bloomery.events.run_directory import RunDirectory

STEPS = 20


def test_a_run_that_is_killed_and_loses_its_directory_goes_on_from_its_backup_bit_for_bit(
    train_command: Callable[..., list[str]], here: Callable[..., Said], tmp_path: Path
) -> None:
    length = ("train.samples=1000000", "evaluate.every_steps=0", "checkpoint.keep_last=1")
    with serving() as objects:
        url = objects.new_bucket()
        command = train_command(*length, f"backup.url={url}")
        there = place_at(f"{url}/tiny")
        with running(*command, log=tmp_path / "log") as trainer:
            assert trainer.wait_until(lambda: remote_copies(RunDirectory(tmp_path / "run"))), trainer.said()
        assert trainer.process.returncode == -9
        (tmp_path / "run").rename(tmp_path / "lost")
        known = parse_name(remote_checkpoints(there)[-1].name)
        assert known is not None
        last = known[0] + STEPS
        # No data either: it is prepared again from the text.
        assert here(*command, f"guard.stop_at_step={last}").status == 0
        run = RunDirectory(tmp_path / "run")
        (start,) = events(run.path, "start")
        step = start["step"]  # what was on its way when the trainer was killed may have arrived since
        assert known[0] <= step < last and start["incarnation"] == 2
        _all_is_copied_and_only_what_is_kept_is_here(run, url, last)
    unbroken = train_command(*length, f"guard.stop_at_step={last}", run="unbroken")
    assert here(*unbroken).status == 0
    curve = loss_curve(RunDirectory(tmp_path / "unbroken"))
    assert loss_curve(run) == curve[step:] and len(curve) == last
    lost = loss_curve(RunDirectory(tmp_path / "lost"))[: len(curve)]
    assert lost == curve[: len(lost)] and len(lost) >= step


def _all_is_copied_and_only_what_is_kept_is_here(run: RunDirectory, url: str, last: int) -> None:
    assert due(run, BackupSection(url=url), run_name="tiny") == []
    sources = remote_checkpoints(place_at(f"{url}/tiny"))
    assert sources[-1].name == f"step-{last:06d}.i002" and verify(sources[-1]) == []
    kept = [found.step for found in checkpoints(run)]
    assert kept[-1] == last and len(kept) <= 2, "the last, and the first of the run's first tenth"
