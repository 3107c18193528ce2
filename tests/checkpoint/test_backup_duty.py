"""Backups of a run between peers: one peer makes them, and its copies count for all."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.checkpoint.small_run import Run

from bloomery.checkpoint.format.catalogue import checkpoints, remote_copies
from bloomery.checkpoint.remote.backup import Backup
from bloomery.checkpoint.remote.backup_duty import Duty, backed_up_round, note_round, read_duty, write_duty
from bloomery.checkpoint.remote.remote_run import remote_checkpoints
from bloomery.cli import main
from bloomery.config.checkpoint import BackupSection, CheckpointSection
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import Objects
from bloomery.train.checkpoint_store import Store
from bloomery.train.saved_state import RunStateToSave

KEEP_ONE = CheckpointSection(keep_last=1, keep_tenths=False)
DEADLINE_S = 60.0


class Peer:
    """One peer's run directory, store and backup."""

    def __init__(self, base: Path, name: str, *, writes: bool) -> None:
        self.name, self.rundir = name, RunDirectory(base / name).create()
        self.url = f"file://{base}/elsewhere"
        self.told(writes=writes, covered=-1)
        self.backup = Backup(self.rundir, BackupSection(url=self.url), run_name="run")
        self.run, self.store = Run(), Store(self.rundir, KEEP_ONE, backup=self.backup)
        self.store.restore(self.run.parts)

    def told(self, *, writes: bool, covered: int) -> None:
        write_duty(self.rundir, Duty(peer=self.name, writes=writes, covered=covered))

    def save(self, step: int, *, round: int, inside: bool = False) -> None:
        values = {"outer": {"round": round, "inside": inside}}
        self.store.save(RunStateToSave(self.run.fill(step).parts, step=step, values=values))

    @property
    def here(self) -> list[int]:
        return [found.step for found in checkpoints(self.rundir)]

    @property
    def there(self) -> list[str]:
        return sorted(one.name for one in remote_checkpoints(Objects(f"{self.url}/run/{self.name}")))


@pytest.fixture
def peers(tmp_path: Path):
    made = {"a": Peer(tmp_path, "a", writes=True), "b": Peer(tmp_path, "b", writes=False)}
    yield made
    for peer in made.values():
        peer.backup.close(wait_s=0.0)


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_one_peer_backs_up_and_the_others_prune_what_it_has_confirmed(peers) -> None:
    a, b = peers["a"], peers["b"]
    for peer, first in ((a, 10), (b, 100)):  # steps are each peer's own
        peer.save(first, round=1)
        peer.save(first + 1, round=2)
    until(lambda: backed_up_round(a.rundir) == 2)
    assert len(a.there) == 2 and not b.there
    assert b.here == [100, 101], "nothing is confirmed to b yet"
    b.told(writes=False, covered=2)
    b.save(102, round=3)
    assert b.here == [102] and [one.step for one in b.backup.due()] == [102]
    assert not b.there


def test_what_was_done_within_a_round_is_covered_by_the_next_round_alone(peers) -> None:
    b = peers["b"]
    b.save(100, round=1, inside=True)
    b.told(writes=False, covered=1)
    assert [one.step for one in b.backup.due()] == [100]
    b.told(writes=False, covered=2)
    assert not b.backup.due()


def test_another_takes_over_at_its_own_place_with_what_nobody_has_backed_up(peers) -> None:
    a, b = peers["a"], peers["b"]
    a.save(10, round=1)
    until(lambda: backed_up_round(a.rundir) == 1)
    b.save(100, round=1)
    b.told(writes=True, covered=1)
    b.save(101, round=2)
    until(lambda: backed_up_round(b.rundir) == 2)
    assert b.there == ["step-000101.i001"]


def test_an_older_round_that_is_backed_up_later_leaves_the_newer_one_recorded(peers) -> None:
    b = peers["b"]
    b.save(100, round=1)
    b.save(101, round=2)
    older, newer = checkpoints(b.rundir)
    for item, round in ((older, 1), (newer, 2), (older, 2)):
        note_round(b.rundir, item.directory)
        assert backed_up_round(b.rundir) == round


def test_at_the_end_only_the_peer_that_backs_up_waits_for_it(peers) -> None:
    a, b = peers["a"], peers["b"]
    a.save(10, round=1)
    b.save(100, round=1)
    told: list[str] = []
    b.backup.on_all_copied = lambda: told.append("b")
    b.backup.close()  # at once, though nothing is confirmed
    assert [one.step for one in b.backup.due()] == [100] and told == []
    b.told(writes=False, covered=2)
    b.backup.close()
    assert told == ["b"]
    a.backup.close()
    assert len(a.there) == 1 and not a.backup.due()


@pytest.mark.parametrize(
    "content", ['{"peer": "a", "writes": true, "covered": Infinity}', "[" * 100_000, "null"]
)
def test_records_of_backups_that_make_no_sense_count_as_none(rundir: RunDirectory, content: str) -> None:
    rundir.backups.mkdir(exist_ok=True)
    what = json.dumps({"url": "s3://b", "what": ["all"], "bytes": 1, "time": 1.0})
    for name in ("duty.json", "round.json", "step-000003.i001.json"):
        word = "covered" if name == "duty.json" else "round"
        (rundir.backups / name).write_text(content.replace("covered", word))
    assert read_duty(rundir) is None and backed_up_round(rundir) == -1 and remote_copies(rundir) == {}
    (rundir.backups / "step-000003.i001.json").write_text(what)
    assert remote_copies(rundir) == {}


def test_the_round_of_a_backup_by_hand_counts_for_all_peers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rundir = RunDirectory(tmp_path / "a").create()
    write_duty(rundir, Duty(peer="a", writes=True, covered=-1))
    run, store = Run(), Store(rundir, KEEP_ONE)
    store.restore(run.parts)
    values = {"outer": {"round": 4, "inside": False}}
    store.save(RunStateToSave(run.fill(3).parts, step=3, values=values))
    assert main(["config", "show", "demo", "run.name=run", f"backup.url=file://{tmp_path}/elsewhere"]) == 0
    rundir.recipe.write_text(capsys.readouterr().out)
    assert main(["ckpt", "backup", str(rundir.path)]) == 0
    assert backed_up_round(rundir) == 4
