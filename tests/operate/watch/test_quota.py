"""Quotas as `quota -w -p` and `lfs quota` print them, through imitations of both commands."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.operate.watch.test_watcher import a_run

from bloomery.operate.run_state import RunStatus, RunVerdict
from bloomery.operate.watch import observe, quota
from bloomery.operate.watch.conditions import WatchedQuota, WatchedRun, WatchLimits, conditions_of
from bloomery.operate.watch.disk import DiskForecast, DiskSample
from bloomery.operate.watch.observe import RunObserver
from bloomery.operate.watch.quota import MountedAt, mounted_at, parse_quota
from bloomery.operate.watch.watcher import RunWatcher

NFS = MountedAt(kind="nfs4", place="/home", source="filer:/vol/home")
LUSTRE = MountedAt(kind="lustre", place="/lustre/scratch1/projects", source="10.0.0.1@o2ib:/scratch1")
HEADER = (
    "Disk quotas for user ann (uid 1234): \n     Filesystem  blocks   quota   limit   grace   files   quota"
)
QUOTA = f"""{HEADER}   limit   grace
/dev/sda1   12 1 1 0 1 1 1 0
filer:/vol/home  11720* 10000   20000 1764200000       3      50     100       0
"""
LFS = """/lustre/scratch1/projects
                 1048576  0       4194304 -       200     0       1000    -
gid 77 is using default file quota setting
"""


def test_what_is_left_is_counted_from_the_hard_limit_and_from_the_soft_one_where_there_is_no_other() -> None:
    assert parse_quota(QUOTA, NFS, now=5.0) == DiskSample(5.0, (20000 - 11720) << 10, 97)
    assert parse_quota(LFS, LUSTRE, now=5.0) == DiskSample(5.0, 3 << 30, 800)
    soft = QUOTA.replace("20000", "0").replace("11720*", "11720")
    assert parse_quota(soft, NFS, now=5.0) == DiskSample(5.0, 0, 97)


@pytest.mark.parametrize(
    "text",
    [
        "Disk quotas for user ann (uid 1234): none\n",
        f"{HEADER}\n/dev/sda1   12 1 1 0 1 1 1 0\n",  # of another file system
        "filer:/vol/home  11720 0 0 0 3 0 0 0\n",  # not limited
        "/home  [11720] 10000 20000 - 3 50 100 -\n",  # a server did not answer
    ],
)
def test_what_limits_nothing_here_is_no_quota(text: str) -> None:
    assert parse_quota(text, NFS, now=5.0) is None


def test_only_the_files_of_a_quota_may_be_limited() -> None:
    assert parse_quota("/home 11720 0 0 0 3 0 100 0\n", NFS, now=5.0) == DiskSample(5.0, -1, 97)


def test_a_quota_that_a_run_uses_up_is_told_before_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands count up by a mebibyte a minute, of 16 that are left."""
    run = a_run(tmp_path / "run")
    mount = mounted_at(run.path)
    assert mount is not None and mount.place in ("/", *(str(parent) for parent in run.path.parents))
    used = tmp_path / "used"
    used.write_text("100")
    imitation = tmp_path / "bin" / "quota"
    imitation.parent.mkdir()
    line = f"{mount.source} $(cat {used}) 0 16484 0 3 0 0 0"
    imitation.write_text(f'#!/bin/sh\n[ "$*" = "-w -p -g 77" ] && echo "{line}"\nexit 1\n')
    imitation.chmod(0o755)
    monkeypatch.setenv("PATH", str(imitation.parent), prepend=":")
    monkeypatch.setattr(quota, "_owners", lambda path: iter([("-g", "llm", 77)]))
    watcher = RunWatcher(run, send=lambda alert: None)
    told = []
    for minute in range(8):
        used.write_text(str(100 + 1024 * minute))
        told += watcher.check(now=1e9 + 61.0 * minute)
        if minute == 4:
            watcher.close()
            watcher = RunWatcher(run, send=lambda alert: None)
    watcher.close()
    said = [alert.condition for alert in told if "quota" in alert.condition.kind]
    assert [condition.kind for condition in said] == ["quota space (group llm)"]
    assert "the quota of group llm for space is used up in" in said[0].line


def test_what_is_known_of_a_quota_outlives_an_answer_that_did_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = {owner: DiskSample(1e9, 1 << 30, -1) for owner in ("user ann", "group llm")}
    silent: set[str] = set()
    monkeypatch.setattr(
        observe,
        "sample_quotas",
        lambda path, now: {
            owner: sample._replace(time=now) for owner, sample in left.items() if owner not in silent
        },
    )
    observer = RunObserver(a_run(tmp_path / "run"))
    for minute in range(30):
        silent = {"group llm"} if minute >= 20 else set()
        seen = observer.observe(now=1e9 + 61.0 * minute)
    assert [quota.owner for quota in seen.quotas] == ["user ann", "group llm"]
    before = len(observer.quotas["group llm"])
    assert before > 1
    silent = set()
    observer.observe(now=1e9 + 61.0 * 30)
    assert len(observer.quotas["group llm"]) >= before
    silent = {"group llm"}
    assert [quota.owner for quota in observer.observe(now=1e9 + 6000.0).quotas] == ["user ann"]


def test_a_save_that_no_quota_has_room_for_is_told() -> None:
    left = DiskSample(5.0, 1 << 30, -1)
    seen = WatchedRun(
        path="run",
        verdict=RunVerdict(state=RunStatus.RUNNING),
        now=5.0,
        since=0.0,
        save_bytes=2 << 30,
        quotas=[
            WatchedQuota(owner="user ann", left=left, forecast=DiskForecast(what="inodes", full_in_s=60.0)),
            WatchedQuota(owner="group llm", left=left._replace(free_bytes=-1), forecast=None),
            WatchedQuota(owner="group all", left=left, forecast=DiskForecast(what="space", full_in_s=60.0)),
        ],
    )
    said = {condition.kind: condition.line for condition in conditions_of(seen, WatchLimits())}
    assert list(said) == [
        "no quota for a save (user ann)", "quota files (user ann)",
        "no quota for a save (group all)", "quota space (group all)",
    ]  # fmt: skip
    assert "2.00 GiB, 1.00 GiB left" in said["no quota for a save (user ann)"]


@pytest.mark.parametrize(("what", "named"), [("space", "space"), ("inodes", "files")])
def test_a_quota_is_told_once_it_is_used_up_within_a_day(what: str, named: str) -> None:
    def told(full_in_s: float) -> list[str]:
        left, forecast = DiskSample(5.0, 9 << 30, 9), DiskForecast(what=what, full_in_s=full_in_s)
        quotas = [WatchedQuota(owner="user ann", left=left, forecast=forecast)]
        running = RunVerdict(state=RunStatus.RUNNING)
        run = WatchedRun(path="run", verdict=running, now=5.0, since=0.0, quotas=quotas)
        return [condition.kind for condition in conditions_of(run, WatchLimits())]

    assert (told(86400.0), told(86399.0)) == ([], [f"quota {named} (user ann)"])


def test_the_file_system_of_a_path_is_the_innermost_mount_of_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path.stat().st_dev
    here, number = tmp_path.resolve(), f"{os.major(device)}:{os.minor(device)}"
    lines = [
        f"40 35 0:99999 / {here} rw - nfs4 filer:/vol rw",
        f"36 35 {number} / {here.parent} rw,noatime shared:1 - ext4 /dev/mapper/one-with-a-long-name rw",
        f"37 35 {number} / {here} rw,noatime - xfs /dev/a\\040disk rw",
        f"38 35 {number} / / rw - ext4 /dev/root rw",
        f"39 35 {number} / {here}/deeper rw - ext4 /dev/deeper rw",
    ]
    lines.append("40 22 0:99 / /mnt/caf\udce9 rw - tmpfs tmpfs rw")  # of somebody who writes Latin-1
    monkeypatch.setattr(Path, "read_bytes", lambda self: os.fsencode("\n".join(lines) + "\n"))
    assert mounted_at(here) == MountedAt(kind="xfs", place=str(here), source="/dev/a disk")


def test_each_command_is_asked_for_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("quota", "lfs"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $*"\nexit 1\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    asked = [quota._asked(mount, flag, 77) for mount in (NFS, LUSTRE) for flag in ("-u", "-g")]
    place = LUSTRE.place
    assert [line.strip() for line in asked] == [
        "quota -w -p -u", "quota -w -p -g 77", f"lfs quota -q -u 77 {place}", f"lfs quota -q -g 77 {place}"
    ]  # fmt: skip
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert quota._asked(NFS, "-u", 77) == ""


@pytest.mark.parametrize(
    ("user", "group", "owners"),
    [(0, 0, []), (0, 61234, [("-g", "61234", 61234)]), (61235, 0, [("-u", "61235", 61235)])],
)
def test_nobody_limits_root_and_a_number_without_a_name_is_told_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int, group: int, owners: list
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(Path, "stat", lambda self: SimpleNamespace(st_gid=group))
    assert list(quota._owners(tmp_path)) == owners


def test_a_directory_that_is_gone_for_a_moment_has_no_group_and_its_user_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 61235)
    assert list(quota._owners(tmp_path / "gone")) == [("-u", "61235", 61235)]
