"""How long a backup waits and for what, how it says that it failed, and how it asks the store."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.checkpoint.test_backup_steps import NAMES, backup_of, run, save, section  # noqa: F401

from bloomery.checkpoint.format import catalogue
from bloomery.checkpoint.format.catalogue import (
    CommittedCheckpoint,
    checkpoints,
    has_copies,
    record_copy,
    remote_copies,
)
from bloomery.checkpoint.format.suspects import mark_suspects, marks_to_send
from bloomery.checkpoint.remote import backup as backup_module
from bloomery.checkpoint.remote.backup import Backup
from bloomery.checkpoint.remote.backup_duty import Duty, backup_url, write_duty
from bloomery.checkpoint.remote.places import sections, waiting_for_copies
from bloomery.checkpoint.remote.shared_upload import notes_of, read_request
from bloomery.checkpoint.remote.transfer import UploadInterrupted
from bloomery.config.checkpoint import BackupSection
from bloomery.config.environment import OfflineRefused
from bloomery.errors import CheckpointError, StorageError
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import PATIENCE_S


class Waiting:
    """A backup whose thread never comes to an end, and the seconds for which `close` waited for it."""

    def __init__(self, backup: Backup, monkeypatch: pytest.MonkeyPatch) -> None:
        self.backup, self.slept_s, self.woken = backup, 0.0, list[bool]()
        self.joined, self.copied = list[object](), list[str]()
        self.look: Any = lambda: None
        backup._started = True
        thread = SimpleNamespace(is_alive=lambda: True, join=lambda timeout: self.joined.append(timeout))
        monkeypatch.setattr(backup, "_thread", thread)
        backup.on_all_copied = lambda: self.copied.append("all")
        clock = SimpleNamespace(monotonic=lambda: 1000.0 + self.slept_s, sleep=self._sleep)
        monkeypatch.setattr(backup_module, "time", clock)

    def _sleep(self, seconds: float) -> None:
        assert not self.backup._stop.is_set(), "it goes on while it is waited for"
        self.woken.append(self.backup._wake.is_set())
        self.backup._wake.clear()
        self.slept_s += seconds
        self.look()


@pytest.mark.parametrize(("wait_s", "expected_s"), [(None, 30.0), (7.0, 7.0), (0.0, 0.0)])
def test_the_end_of_a_run_waits_for_its_backups_as_long_as_it_was_told(
    run: RunDirectory,  # noqa: F811
    section: BackupSection,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wait_s: float | None,
    expected_s: float,
) -> None:
    waiting = Waiting(backup_of(run, BackupSection(url=section.url, finish_minutes=0.5)), monkeypatch)
    waiting.backup.close(wait_s=wait_s)
    assert waiting.slept_s == pytest.approx(expected_s, abs=0.21) and all(waiting.woken)
    assert waiting.backup._stop.is_set() and waiting.backup._wake.is_set()
    assert waiting.joined == [1.0] and waiting.copied == []
    assert [record.message for record in caplog.records] == [
        "2 checkpoint(s) are not backed up: the next start goes on with it"
    ]


def test_the_end_waits_no_longer_once_the_last_try_failed_or_all_is_sent(
    run: RunDirectory,  # noqa: F811
    section: BackupSection,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing = Waiting(backup_of(run, section), monkeypatch)
    failing.backup._tries = failing.backup._failed_try = 4

    def fail() -> None:
        failing.backup._tries += 1
        failing.backup._failed_try = failing.backup._tries

    failing.look = fail
    failing.backup.close()
    assert len(failing.woken) == 1, "what failed before is tried once more"
    backup_of(run, section)._copy_all()
    done = Waiting(backup_of(run, section), monkeypatch)
    done.backup.close()
    assert done.woken == [] and done.copied == ["all"]
    done.backup._stop.clear()
    done.backup._has_files_left = True
    done.look = lambda: setattr(done.backup, "_has_files_left", len(done.woken) < 3)
    done.backup.close()
    assert len(done.woken) == 3 and done.copied == ["all"] * 2
    done.backup._stop.clear()
    done.backup.close(wait_s=5.0)
    assert done.copied == ["all"] * 2, "it is called where the end waits as long as it takes"
    mark_suspects(run, checkpoints(run), clean_step=15, why="rank 3 erred")
    marking = Waiting(backup_of(run, section), monkeypatch)
    marking.look = lambda: marking.backup._copy_all() if len(marking.woken) == 2 else None
    marking.backup.close()
    assert len(marking.woken) == 2, "marks are waited for too"


def test_who_makes_no_backups_waits_for_none_and_says_so_where_nothing_is_due(
    run: RunDirectory,  # noqa: F811
    section: BackupSection,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_duty(run, Duty(peer="north", writes=False, covered=-1))
    waiting = Waiting(backup_of(run, section), monkeypatch)
    waiting.backup.close()
    assert waiting.woken == [] and waiting.joined == [1.0] and waiting.copied == []
    assert waiting.backup._stop.is_set() and waiting.backup._wake.is_set() and not caplog.text
    monkeypatch.setattr(waiting.backup, "due", list)
    waiting.backup.close()
    assert waiting.copied == ["all"]


def test_an_upload_that_is_told_to_stop_ends_the_thread_without_a_word(
    run: RunDirectory,  # noqa: F811
    section: BackupSection,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    backup = backup_of(run, section)

    def stopped() -> None:
        raise UploadInterrupted(NAMES[1])

    monkeypatch.setattr(backup, "_copy_all", stopped)
    backup._run()
    assert not caplog.text and (backup._tries, backup._failed_try) == (1, 0)
    backup = backup_of(run, section)
    backup._stop.set()
    with pytest.raises(UploadInterrupted):
        backup_module._back_up(
            run,
            checkpoints(run)[1],
            backup_module.place_at(backup.url),
            section,
            stopped=backup._stop,
            others=backup._others,
            place="",
        )
    assert remote_copies(run) == {}


def test_an_error_that_nobody_expected_counts_as_a_failed_try_and_the_thread_goes_on(
    run: RunDirectory,  # noqa: F811
    section: BackupSection,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    backup, waits = backup_of(run, section), list[float]()

    def wait(seconds: float) -> None:
        waits.append(seconds)
        backup._stop.set()

    monkeypatch.setattr(backup, "_copy_all", lambda: [][0])
    monkeypatch.setattr(backup, "_wake", SimpleNamespace(wait=wait, clear=lambda: None))
    backup._run()
    assert waits == [600.0] and backup._failed_try == 1
    assert f"the backup of {run.path} failed" in caplog.text and "IndexError" in caplog.text


def test_a_wake_during_a_look_makes_the_thread_look_again(
    run: RunDirectory,  # noqa: F811
    section: BackupSection,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backup, woken = backup_of(run, section), list[bool]()

    def wait(seconds: float) -> None:
        woken.append(backup._wake.is_set())
        backup._stop.set()

    monkeypatch.setattr(backup, "_copy_all", backup._wake.set)
    monkeypatch.setattr(backup._wake, "wait", wait)
    backup._run()
    assert woken == [True]


def test_only_the_first_wake_starts_the_thread_and_each_says_that_files_may_be_left(
    run: RunDirectory,  # noqa: F811
    section: BackupSection,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backup, started = backup_of(run, section), list[int]()
    monkeypatch.setattr(backup, "_thread", SimpleNamespace(start=lambda: started.append(1)))
    for _ in range(2):
        backup._has_files_left = False
        backup._wake.clear()
        backup.wake()
        assert started == [1] and backup._wake.is_set() and backup._has_files_left


def test_a_start_that_has_checkpoints_waits_for_the_backup_for_half_a_minute_at_most(
    run: RunDirectory,  # noqa: F811
    section: BackupSection,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    backup, asked = backup_of(run, section), list[object]()
    backup._copy_all()
    place_at = backup_module.place_at

    def watched(url: str, **how: object) -> object:
        asked.append((url, how))
        return place_at(url, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(backup_module, "place_at", watched)
    assert backup.newer() == [] and len(backup.restorable()) == 2
    assert asked == [
        (backup.url, {"patience_s": 30.0, "create": False}),
        (backup.url, {"patience_s": PATIENCE_S, "create": False}),
    ]
    caplog.clear()
    for error in (OSError(5, "no answer"), StorageError("no answer", remedy=""), OfflineRefused("no answer")):

        def refused(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(backup_module, "place_at", refused)
        assert backup.newer() == []
    told = [record.message for record in caplog.records]
    start = f"it could not be checked whether {backup.url} has a newer checkpoint than this directory: "
    assert len(told) == 3 and all(text.startswith(start) and "no answer" in text for text in told)

    def away(*_: object, **__: object) -> None:
        raise OSError(5, "no answer")

    monkeypatch.setattr(backup_module, "place_at", place_at)
    monkeypatch.setattr(backup_module, "remote_checkpoints", away)
    with pytest.raises(StorageError, match="Looking for a backup of the run"):
        backup.restorable()

    def none_such(*_: object, **__: object) -> None:
        raise CheckpointError("no such kind of store", remedy="")

    monkeypatch.setattr(backup_module, "place_at", none_such)
    with pytest.raises(CheckpointError, match="no such kind"):
        backup.newer()


@pytest.mark.parametrize(
    ("what", "doing"),
    [
        ("upload_run_files", "The backup failed"),
        ("send_marks", "Marking backups as suspect failed"),
        ("upload_logs_and_data", "The backup of logs and data failed"),
    ],
)
def test_what_the_store_refuses_is_told_by_what_was_to_be_sent(
    run: RunDirectory,  # noqa: F811
    section: BackupSection,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    doing: str,
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(backup_module, what, refused)
    with pytest.raises(StorageError, match=re.escape(doing)):
        backup_of(run, section)._copy_all()


def test_a_backup_is_recorded_and_logged_with_its_place_its_size_and_its_time(
    run: RunDirectory,  # noqa: F811
    section: BackupSection,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    backup, times = backup_of(run, section), iter([100.0, 161.0])
    url = f"{backup.url}/checkpoints/{NAMES[0]}"
    uploaded = SimpleNamespace(url=url, what="model", bytes=2_340_000_000)
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(backup_module, "upload_checkpoint", lambda *_, **how: asked.append(how) or uploaded)
    monkeypatch.setattr(backup_module, "time", SimpleNamespace(monotonic=lambda: next(times)))
    place: Any = None
    backup_module._back_up(
        run, checkpoints(run)[0], place, section, stopped=backup._stop, others=backup._others, place=""
    )
    ((name, (copy,)),) = remote_copies(run).items()
    assert (name, copy.url, copy.what, copy.bytes) == (NAMES[0], url, "model", 2_340_000_000)
    assert f"backed up {NAMES[0]} to {url}: 2.34 GB in 61 s" in caplog.text
    (how,) = asked
    go_on = how.pop("go_on")
    assert how == {"what": "all", "notes": notes_of(run, NAMES[0]), "others": backup._others}
    assert go_on() and not (backup._stop.set() or go_on())


def test_a_backup_to_a_further_place_asks_as_many_ranks_there_as_there_are(
    run: RunDirectory,  # noqa: F811
    section: BackupSection,  # noqa: F811
) -> None:
    backup = Backup(run, section, run_name="small", world=3, place="second")
    assert backup._others.world == 3
    run.backups.mkdir(exist_ok=True)
    backup._others.ask(NAMES[0], url="s3://b", files=[])
    assert read_request(run) is None and read_request(run, "second") is not None


def test_the_places_of_a_recipe_are_those_that_it_names_and_pruning_waits_for_some(
    run: RunDirectory,  # noqa: F811
    tmp_path: Path,
) -> None:
    near = BackupSection(url=f"file://{tmp_path}/near", every_steps=20)
    far = BackupSection(url=f"file://{tmp_path}/far")
    patient = BackupSection(url=far.url, prune_waits=False)
    none = BackupSection()

    def recipe(first: BackupSection, second: BackupSection) -> Any:
        return SimpleNamespace(backup=first, second_backup=second, run=SimpleNamespace(name="small"))

    assert sections(recipe(near, far)) == {"": near, "second": far}
    assert sections(recipe(none, far)) == {"second": far} and sections(recipe(none, none)) == {}
    assert waiting_for_copies(run, recipe(near, none)) == {NAMES[1]}
    assert waiting_for_copies(run, recipe(near, patient)) == {NAMES[1]}
    assert waiting_for_copies(run, recipe(near, far)) == {NAMES[0], NAMES[1]}
    place = f"{backup_url(far, 'small')}/checkpoints/{NAMES[1]}"
    backup_module.record_copy(run, NAMES[1], url=place, what="all", bytes=1, place="second")
    assert waiting_for_copies(run, recipe(none, far)) == set()
    write_duty(run, Duty(peer="north", writes=False, covered=-1))
    assert waiting_for_copies(run, recipe(none, far)) == set(), "another peer copies to a further place"


def test_the_newest_go_first_and_none_is_sent_after_the_run_has_ended(
    run: RunDirectory,  # noqa: F811
    section: BackupSection,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save(run, 30)
    backup, sent, told = backup_of(run, section), list[str](), list[object]()

    def back_up(
        rundir: RunDirectory, checkpoint: CommittedCheckpoint, remote: object, *_: object, **how: object
    ) -> None:
        sent.append(checkpoint.name)
        told.append((rundir, how["stopped"], how["others"], how["place"]))
        url = f"{backup.url}/checkpoints/{checkpoint.name}"
        backup_module.record_copy(run, checkpoint.name, url=url, what="all", bytes=1)
        if len(sent) == 2:
            backup._stop.set()

    monkeypatch.setattr(backup_module, "_back_up", back_up)
    backup._copy_all()
    assert sent == [NAMES[2], NAMES[1]] and backup._sending == ""
    assert told == [(run, backup._stop, backup._others, "")] * 2


def test_what_is_due_is_told_without_reading_the_records_of_checkpoints_that_are_gone(
    run: RunDirectory,  # noqa: F811
    section: BackupSection,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for step in range(100, 1000, 100):
        record_copy(run, f"step-{step:06d}.i001", url=f"{section.url}/gone", what="all", bytes=1)
    backup, read = backup_of(run, section), list[str]()
    kept = {f"{item.name}.json" for item in checkpoints(run)}
    monkeypatch.setattr(catalogue, "_read", lambda path: read.append(path.name) or ())
    assert [item.name for item in backup.due()] == NAMES[:2]
    assert marks_to_send(run, backup.url) == {}
    assert {name.replace(".second", "") for name in read} <= kept


def test_a_run_that_was_ever_copied_is_known_by_one_record_of_thousands(
    run: RunDirectory,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not has_copies(run)
    for step in range(100, 1000, 100):
        record_copy(run, f"step-{step:06d}.i001", url="file:///gone", what="all", bytes=1)
    read, read_all = list[Path](), catalogue._read
    monkeypatch.setattr(catalogue, "_read", lambda path: read.append(path) or read_all(path))
    assert has_copies(run) and len(read) == 2, "one for each place"
