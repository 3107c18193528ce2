"""The end of a run with a backup: all ranks stay while it is finished, none waits after an error."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from bloomery.checkpoint.format.catalogue import CommittedCheckpoint, remote_copies
from bloomery.checkpoint.format.deadlines import BACKUP_AFTER_ERROR_S
from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.remote.backup import Backup
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.config.checkpoint import BackupSection
from bloomery.events.incarnation import begin
from bloomery.events.run_directory import RunDirectory
from bloomery.parallel.mesh import Mesh
from bloomery.train.trainer import backed_up_at_the_end

DEADLINE_S = 120.0


class Upload:
    """A backup whose last copy is under way until somebody says that it is done."""

    def __init__(self) -> None:
        self.done, self.begun = threading.Event(), threading.Event()
        self.waits_s: list[float | None] = []

    def due(self) -> list[CommittedCheckpoint]:
        return (
            []
            if self.done.is_set()
            else [CommittedCheckpoint(step=7, incarnation=1, directory=Path("step-000007.i001"))]
        )

    def close(self, *, wait_s: float | None = None) -> None:
        self.waits_s.append(wait_s)
        if wait_s is None:
            self.begun.set()
            assert self.done.wait(DEADLINE_S)


def meshes(world: int) -> list[Mesh]:
    store = HashStore()
    return [Mesh(rank=rank, world=world, device=torch.device("cpu"), store=store) for rank in range(world)]


def test_all_ranks_stay_until_the_first_has_backed_up_and_it_says_what_it_waits_for():
    upload, order, said = Upload(), list[str](), list[str]()

    def live(mesh: Mesh) -> None:
        backup = upload if mesh.is_first else None
        with backed_up_at_the_end(backup, mesh, interruptions=lambda: 0, say=said.append):
            pass
        order.append("ended")

    with ThreadPoolExecutor(3) as pool:
        ranks = [pool.submit(live, mesh) for mesh in meshes(3)]
        assert upload.begun.wait(DEADLINE_S)
        order.append("still copying")
        upload.done.set()
        for rank in ranks:
            rank.result(DEADLINE_S)
    assert order == ["still copying", "ended", "ended", "ended"]
    assert upload.waits_s == [None] and all("step-000007.i001 before the end" in line for line in said)


def test_one_more_interruption_leaves_the_rest_to_the_next_start():
    upload, (mesh,) = Upload(), meshes(1)
    try:
        with backed_up_at_the_end(
            upload, mesh, interruptions=lambda: 2 if upload.begun.is_set() else 1, say=lambda line: None
        ):
            pass
    finally:
        upload.done.set()
    assert upload.waits_s == [None, 0.0]


def test_a_run_that_an_interruption_has_stopped_waits_for_its_backup_too():
    upload, (mesh,) = Upload(), meshes(1)
    with backed_up_at_the_end(
        upload, mesh, interruptions=lambda: 1, say=lambda line: None, on_progress=upload.done.set
    ):
        pass
    assert upload.waits_s == [None]


def test_after_an_error_the_wait_is_short_and_nobody_waits_for_the_others():
    upload, (mesh, _) = Upload(), meshes(2)
    with (
        pytest.raises(RuntimeError, match="the loss is gone"),
        backed_up_at_the_end(upload, mesh, interruptions=lambda: 0, say=lambda line: None),
    ):
        raise RuntimeError("the loss is gone")
    assert upload.waits_s == [BACKUP_AFTER_ERROR_S]


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_that_ends_well_leaves_nothing_to_be_copied_and_one_that_fails_does_not_wait(
    tmp_path: Path, fails: bool
):
    rundir, (mesh,) = RunDirectory(tmp_path / "run").create(), meshes(1)
    begin(rundir, base=None, reason="start")
    section = BackupSection(url=f"file://{tmp_path / 'elsewhere'}")
    (tmp_path / "elsewhere").mkdir()
    backup = Backup(rundir, section, run_name="it")
    with (
        suppress(KeyError),
        backed_up_at_the_end(backup, mesh, interruptions=lambda: 0, say=lambda line: None),
    ):
        save_checkpoint(rundir.checkpoints, [whole("model.w", torch.ones(9))], step=1, incarnation=1)
        if fails:
            raise KeyError
        backup.wake()
    assert fails or list(remote_copies(rundir)) == ["step-000001.i001"]
    if not fails:
        backup._thread.join(DEADLINE_S)
    assert not backup._thread.is_alive()
