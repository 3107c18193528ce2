"""What is not reached is not damaged: no older one is taken for it, and the message says what it is."""

import errno
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.checkpoint.object_store import ObjectStore
from tests.checkpoint.small_run import Run
from tests.checkpoint.thread_ranks import Threads

from bloomery.checkpoint.format.catalogue import verify
from bloomery.checkpoint.format.manifest import (
    INDEX,
    MANIFEST,
    DamagedCheckpoint,
    read_index,
    read_manifest,
    unreadable,
)
from bloomery.checkpoint.format.source import LocalCheckpoint, RangedFile
from bloomery.checkpoint.format.state import collect
from bloomery.checkpoint.load.loader import load_checkpoint
from bloomery.checkpoint.remote.backup import Backup
from bloomery.checkpoint.remote.remote_run import remote_source
from bloomery.checkpoint.remote.transfer import download_checkpoint, upload_checkpoint
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.config.checkpoint import BackupSection, CheckpointSection
from bloomery.errors import StorageError
from bloomery.events.incarnation import read_incarnations
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import Objects, StoreUnreachable
from bloomery.train.checkpoint_store import Store


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = collect(Run().fill(1).parts)
    return save_checkpoint(
        tmp_path / "checkpoints", state.entries, step=1, incarnation=1, values=state.values
    )


class Faulty(LocalCheckpoint):
    """A checkpoint whose files, but for those in `works`, answer with an error."""

    def __init__(self, path: Path, error: OSError, *, works: Sequence[str] = (), opens: bool = False) -> None:
        super().__init__(path)
        self._error, self._works, self._opens = error, works, opens

    def content(self, file: str, *, at_most: int) -> bytes:
        if file not in self._works:
            raise self._error
        return super().content(file, at_most=at_most)

    def open(self, file: str) -> RangedFile:
        if not self._opens:
            raise self._error
        opened = super().open(file)

        def read_into(views: Sequence[memoryview], *, begin: int) -> int:
            raise self._error

        opened.read_into = read_into  # type: ignore[method-assign]
        return opened


ALL = (MANIFEST, INDEX)
SILENT = StoreUnreachable(errno.EIO, "s3://bucket/x: the line was silent")


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE])
def test_an_error_between_a_file_and_us_says_nothing_of_the_file(saved: Path, number: int):
    told = unreadable(str(saved), OSError(number, "why"))
    assert isinstance(told, StorageError) and "why" in told.message


def test_at_every_place_of_a_read_the_two_are_told_apart(saved: Path):
    entries = collect(Run().parts).entries
    manifest = read_manifest(saved)
    for error, kind in ((SILENT, StorageError), (OSError(errno.EIO, "the disk"), DamagedCheckpoint)):
        with pytest.raises(kind):
            read_manifest(Faulty(saved, error))
        with pytest.raises(kind):
            read_index(Faulty(saved, error), manifest)
        for opens in (False, True):
            with pytest.raises(kind):
                load_checkpoint(Faulty(saved, error, works=ALL, opens=opens), entries)
    with pytest.raises(StorageError, match="silent"):
        verify(Faulty(saved, SILENT, works=ALL, opens=True))
    problems = verify(Faulty(saved, OSError(errno.EIO, "the disk"), works=ALL, opens=True))
    assert len(problems) == 2 and all("the disk" in problem.text for problem in problems)
    with pytest.raises(StorageError, match="silent"):
        download_checkpoint(Faulty(saved, SILENT, works=ALL), saved.parent / "other")


def test_what_one_rank_does_not_reach_ends_all_with_the_same_words(saved: Path):
    def one(ranks: Ranks) -> None:
        error = SILENT if ranks.rank == 1 else None
        source = Faulty(saved, error, works=ALL, opens=True) if error else LocalCheckpoint(saved)
        load_checkpoint(source, collect(Run().parts).entries, ranks=ranks)

    ended = Threads(2).run(one)
    assert all(isinstance(error, StorageError) and "silent" in error.message for error in ended), ended


def test_credentials_that_are_refused_at_a_restore_are_no_reason_to_take_an_older_one(
    tmp_path: Path, saved: Path, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
):
    url = object_store.new_bucket()
    upload_checkpoint(saved, Objects(f"{url}/run"), notes=tmp_path / "notes")
    source = remote_source(f"{url}/run")
    rundir = RunDirectory(tmp_path / "new").create()
    backup = Backup(rundir, BackupSection(url=url), run_name="run")
    found = backup.restorable()
    with object_store.checking_credentials():
        with pytest.raises(StorageError, match=r"403|InvalidAccessKeyId") as refused:
            load_checkpoint(source, collect(Run().parts).entries)
        assert "AWS_ACCESS_KEY_ID" in refused.value.remedy
        with pytest.raises(StorageError, match=r"403|InvalidAccessKeyId"):
            verify(source)
        with pytest.raises(StorageError, match=r"403|InvalidAccessKeyId"):
            download_checkpoint(source, tmp_path / "copied")
        store = Store(rundir, CheckpointSection(), backup=backup)
        monkeypatch.setattr(backup, "restorable", lambda **_: found)  # refused only after it was listed
        with pytest.raises(StorageError, match=r"403|InvalidAccessKeyId"):
            store.restore(Run().parts, fallback=True)
    assert read_incarnations(rundir) == {}, "a refused start is no life"


def test_a_slow_line_to_one_rank_keeps_no_other_in_a_collective(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
):
    upload_checkpoint(saved, Objects(f"file://{tmp_path}/there"), notes=tmp_path / "notes")
    asked, pieces, slow = [0], Objects.pieces, threading.Event()

    def crawling(self: Objects, key: str, **given) -> Iterator[memoryview]:
        if key.endswith(".safetensors"):
            slow.set()
            deadline = time.monotonic() + 120
            while asked[0] < 8:
                assert time.monotonic() < deadline, "the others are stuck in one collective"
                time.sleep(0.01)
        yield from pieces(self, key, **given)

    def one(ranks: Ranks) -> bool:
        def gather(value: object) -> list:
            asked[0] += slow.is_set()
            return ranks.gather(value)

        run = Run()
        source = remote_source(f"file://{tmp_path}/there")
        values = load_checkpoint(source, collect(run.parts).entries, ranks=replace(ranks, gather=gather))
        run.moments.load_state_values(values["optim"])
        return run.equals(Run().fill(1))

    monkeypatch.setattr(Objects, "pieces", crawling)
    assert Threads(2).run(one) == [True, True]
