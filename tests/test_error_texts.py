"""What is told of a disk's refusals, whole, and constants and places that other parts take for granted."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

import bloomery
from bloomery import errors
from bloomery.config.load import load_recipe
from bloomery.config.trial import WITHIN_ITS_DIRECTORY
from bloomery.errors import (
    BloomeryError,
    CheckpointError,
    ConfigError,
    CoordinatorAway,
    CoordinatorError,
    DataError,
    ExportRefused,
    PeerError,
    RankLost,
    ReportedElsewhere,
    RunBusy,
    StoppedBySwitch,
    StorageError,
    ThreadEnded,
    TrainingFailed,
    of_disk,
    reporting_errors,
    require_space,
    storage_error,
    without_logins,
)
from bloomery.events import timeouts


class Disk:
    f_frsize, f_bavail, f_files, f_favail = 1000, 2_345_678, 9, 3


@pytest.fixture(autouse=True)
def disk(monkeypatch: pytest.MonkeyPatch) -> Any:
    facts = type("Facts", (Disk,), {})
    monkeypatch.setattr(errors.os, "statvfs", lambda path: facts)
    return facts


FREE = "Free some space or raise the quota, then start again. Files that were finished are intact."
WRITABLE = "Make it writable, or choose another directory (for a run: --run DIRECTORY)."
MOUNTED = "Is the path right, and the disk still mounted? Bring it back, or choose another."
NEEDS_FILE = "A directory is where a file is needed: move it away, or name a file."
NEEDS_DIRECTORY = "A file is where a directory is needed: move it away, or choose another directory."
CHECK = "Check the disk (dmesg, df), then start again. Files that were finished are intact."
LIMIT = "A limit on file sizes is set (ulimit -f): raise it, then start again."
SPACE = " (1.5 MB needed, 2,345.7 MB free)"


@pytest.mark.parametrize(
    ("number", "more", "remedy", "known"),
    [
        (errno.ENOSPC, SPACE, FREE, True),
        (errno.EDQUOT, SPACE, FREE, True),
        (errno.EFBIG, SPACE, LIMIT, True),
        (errno.EACCES, "", WRITABLE, True),
        (errno.EPERM, "", WRITABLE, True),
        (errno.EROFS, "", WRITABLE, True),
        (errno.ENOENT, "", MOUNTED, True),
        (errno.ESTALE, "", MOUNTED, True),
        (errno.EISDIR, "", NEEDS_FILE, True),
        (errno.EEXIST, "", NEEDS_DIRECTORY, True),
        (errno.ENOTDIR, "", NEEDS_DIRECTORY, True),
        (errno.ENAMETOOLONG, "", CHECK, True),
        (errno.EIO, "", CHECK, False),
    ],
)
def test_a_disks_refusal_is_told_with_its_place_and_what_to_do(
    number: int, more: str, remedy: str, known: bool
) -> None:
    said = os.strerror(number)
    refused = storage_error(OSError(number, said), path=Path("/a/b"), doing="Saving", bytes_needed=1_500_000)
    assert refused.message == f"Saving failed at /a/b: {said}{more}" and refused.remedy == remedy
    by_command = of_disk(OSError(number, said, "/a/b"))
    assert (by_command is not None) is known
    if by_command is not None:
        without = more.replace("1.5 MB needed, ", "")
        assert (by_command.message, by_command.remedy) == (
            f"The command failed at /a/b: {said}{without}",
            remedy,
        )


def test_a_disk_without_inodes_or_room_is_told_so(disk: Any) -> None:
    disk.f_favail = 0
    refused = storage_error(OSError(errno.ENOSPC, "full"), path=Path("/a"), doing="Saving")
    assert refused.message == (
        "Saving failed at /a: full (no inodes are left: the file system holds as many files as it can; "
        "2,345.7 MB free)"
    )
    assert refused.remedy == (
        "Remove files that nobody needs (df -i counts them); space alone does not help."
    )
    quota = storage_error(OSError(errno.EDQUOT, "full"), path=Path("/a"), doing="Saving")
    assert quota.message == "Saving failed at /a: full (2,345.7 MB free)", "a quota is no lack of inodes"
    with pytest.raises(StorageError) as told:
        require_space(Path("/a"), doing="Saving", bytes_needed=3_000_000_000)
    assert told.value.message == ("Saving was refused at /a: no space (3,000.0 MB needed, 2,345.7 MB free)")
    assert told.value.remedy == (
        "Free some space, or lower checkpoint.keep_last; earlier checkpoints are untouched."
    )
    nameless = storage_error(OSError("odd"), path=Path("/a"), doing="Saving")
    assert nameless.message == "Saving failed at /a: odd" and nameless.remedy == CHECK


def test_each_kind_of_error_has_its_status_and_what_it_is_a_kind_of() -> None:
    kinds: dict[type[BloomeryError], tuple[type, int]] = {
        ConfigError: (BloomeryError, 2),
        DataError: (BloomeryError, 1),
        CheckpointError: (BloomeryError, 1),
        ExportRefused: (CheckpointError, 1),
        RunBusy: (BloomeryError, 1),
        StorageError: (BloomeryError, 1),
        TrainingFailed: (BloomeryError, 1),
        StoppedBySwitch: (BloomeryError, 0),
        RankLost: (TrainingFailed, 3),
        ReportedElsewhere: (RankLost, 3),
        PeerError: (BloomeryError, 1),
        CoordinatorError: (BloomeryError, 1),
        CoordinatorAway: (CoordinatorError, 1),
        ThreadEnded: (CoordinatorError, 1),
    }
    assert {kind: (kind.__base__, kind.exit_status) for kind in kinds} == kinds


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://u:p@h/x and s3://k@b/y", "https://***@h/x and s3://***@b/y"),
        ("https:/u:p@h", "https:/***@h"),
        ("https://h/u@x", "https://h/u@x"),
        ("http://a b@c", "http://a b@c"),
        ("'https://u:p' @h", "'https://u:p' @h"),
        ("mail me@home", "mail me@home"),
    ],
)
def test_logins_are_left_out_of_addresses_alone(text: str, shown: str) -> None:
    assert without_logins(text) == shown


def test_a_thread_that_ended_is_logged_and_told_with_its_name(caplog: pytest.LogCaptureFixture) -> None:
    told: list[CoordinatorError] = []

    def run() -> None:
        raise KeyError("x")

    reporting_errors(run, name="rounds", on_error=told.append)()
    assert told[0].message == "the thread 'rounds' of this peer ended: KeyError: 'x'"
    assert told[0].remedy == (
        "This is a mistake in bloomery, not in your run: please report it with the log."
    )
    assert [record.getMessage() for record in caplog.records] == ["the thread 'rounds' ended"]
    assert caplog.records[0].exc_info is not None

    def leave() -> None:
        raise SystemExit

    with pytest.raises(SystemExit):
        reporting_errors(leave, name="rounds", on_error=told.append)()
    assert len(told) == 1


def test_the_time_outs_of_a_run_are_these_seconds() -> None:
    found = {name: value for name, value in vars(timeouts).items() if name.endswith("_S")}
    assert found == {
        "COLLECTIVE_TIMEOUT_S": 600, "JOIN_TIMEOUT_S": 300.0, "STORE_TIMEOUT_S": 60.0,
        "RANK_ZERO_SILENCE_S": 600.0, "RANK_ZERO_STALL_S": 3600.0, "GRACE_S": 60.0,
        "GRACE_AFTER_FAILURE_S": 20.0, "GRACE_AFTER_SIGNAL_S": 3.0, "WATCHDOG_MARGIN_S": 60,
    }  # fmt: skip


def test_a_trial_of_a_recipe_keeps_to_its_own_directory() -> None:
    places = [
        "checkpoint.url=s3://a/b", "backup.url=s3://a/c", "second_backup.url=s3://a/d", "sync.place=hf:a/b",
        "sync.checkpoints=true", "log.trackers=['wandb']",
    ]  # fmt: skip
    recipe = load_recipe("demo", [*places, *WITHIN_ITS_DIRECTORY]).recipe
    assert (recipe.checkpoint.url, recipe.backup.url, recipe.second_backup.url) == ("", "", "")
    assert (recipe.sync.place, recipe.sync.checkpoints, recipe.log.trackers) == ("", False, ())


def test_the_package_names_its_api_and_nothing_else() -> None:
    api = {"SampleOrder", "LanguageModel", "fit", "journal", "load", "recipe", "samples"}
    assert api <= set(dir(bloomery)) and "__version__" in dir(bloomery)
    assert dir(bloomery) == sorted(dir(bloomery))
    from bloomery import api as module

    assert {name: getattr(bloomery, name) for name in api} == {name: getattr(module, name) for name in api}
    with pytest.raises(AttributeError, match="module 'bloomery' has no attribute 'trian'"):
        bloomery.trian  # noqa: B018  — the access is what is tested
