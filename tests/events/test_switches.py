from __future__ import annotations

import errno
import os
import shlex
from pathlib import Path

import pytest

from bloomery.cli import main
from bloomery.errors import StorageError
from bloomery.events.run_directory import RunDirectory
from bloomery.events.switches import Switches, arm, disarming, note_of, switch_places, write_request
from bloomery.operate.departure import maintenance_files


def test_a_switch_in_any_directory_is_armed_until_its_file_is_gone(tmp_path: Path):
    switches = Switches([tmp_path / "not there", tmp_path])
    assert switches.armed("stop") is None
    arm(tmp_path / "stop")
    assert switches.armed("stop") == tmp_path / "stop" and switches.armed("save") is None
    assert note_of(tmp_path / "stop").startswith("armed by ")
    (tmp_path / "stop").unlink()
    assert switches.armed("stop") is None


def test_a_directory_of_switches_may_be_given_from_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    arm(tmp_path / "our switches" / "stop")
    run = RunDirectory(tmp_path / "run")
    assert Switches.of_run(run, "~/our switches").armed("stop") == tmp_path / "our switches" / "stop"
    assert maintenance_files(run, "~/x") == [run.control_dir / "maintenance", tmp_path / "x" / "maintenance"]
    assert switch_places("") == [] and switch_places("a/b") == [Path("a/b")]


def test_a_save_that_was_taken_is_gone_in_every_directory(tmp_path: Path):
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        arm(directory / "save")
    switches = Switches(directories)
    switches.take("save")
    assert switches.armed("save") is None and not any(list(each.iterdir()) for each in directories)


def test_a_save_that_cannot_be_removed_counts_once_until_it_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    arm(tmp_path / "save")
    switches = Switches([tmp_path])
    monkeypatch.setattr(Path, "unlink", refuse)
    switches.take("save")
    assert switches.armed("save") is None
    (tmp_path / "save").touch()
    assert switches.armed("save") == tmp_path / "save"


def test_a_directory_that_cannot_be_looked_into_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    switches = Switches([loop])
    assert [switches.armed("stop") for _ in range(3)] == [None] * 3
    assert caplog.text.count("cannot be looked at") == 1


def test_a_note_of_a_hostile_length_is_cut(tmp_path: Path):
    (tmp_path / "stop").write_text("x" * 10**6)
    assert len(note_of(tmp_path / "stop")) == 200


def test_requests_wait_one_line_after_the_other_or_replace_each_other(tmp_path: Path):
    rundir = RunDirectory(tmp_path)
    for line in ("0:8", "8:16"):
        write_request(rundir, "skip", line, keep=True)
        write_request(rundir, "rewind", line, keep=False)
    assert rundir.control("skip").read_text() == "0:8\n8:16\n"
    assert rundir.control("rewind").read_text() == "8:16\n"


def test_who_armed_a_switch_is_told_where_accounts_have_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.delenv("USER", raising=False)
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    arm(tmp_path / "stop", why="the disk is full")
    note = note_of(tmp_path / "stop")
    assert note.startswith(f"armed by ada on {os.uname().nodename} at ") and note.endswith(
        ": the disk is full"
    )
    monkeypatch.setattr("getpass.getuser", nameless)
    arm(tmp_path / "stop")
    assert note_of(tmp_path / "stop").startswith(f"armed by {os.getuid()} on ")


def test_a_request_that_cannot_be_written_is_told_with_its_path(tmp_path: Path):
    (tmp_path / "control").write_text("in the way")
    with pytest.raises(StorageError, match=str(tmp_path / "control")):
        write_request(RunDirectory(tmp_path), "skip", "0:8", keep=True)
    assert note_of(tmp_path / "control" / "skip") == ""


def test_a_switch_that_is_not_there_is_no_trouble(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").touch()
    switches = Switches([tmp_path / "none", tmp_path / "file", tmp_path])
    assert switches.armed("stop") is None and not caplog.records


def test_a_directory_that_cannot_be_looked_into_is_named_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    Switches([loop]).armed("stop")
    assert f"the switch {loop / 'stop'} cannot be looked at: Too many levels" in caplog.text


def test_a_save_that_its_author_takes_back_meanwhile_is_taken_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    class Withdrawn(Switches):
        def _identity(self, path: Path) -> tuple[int, int] | None:
            seen = super()._identity(path)
            path.unlink(missing_ok=True)
            return seen

    arm(tmp_path / "save")
    Withdrawn([tmp_path]).take("save")
    assert not caplog.records


def test_a_note_in_another_encoding_is_shown_as_far_as_it_can_be(tmp_path: Path):
    (tmp_path / "stop").write_bytes(b"armed by caf\xe9: quota\n")
    assert note_of(tmp_path / "stop") == "armed by caf\N{REPLACEMENT CHARACTER}: quota"


def test_a_request_is_added_to_what_a_person_wrote_by_hand(tmp_path: Path):
    run = RunDirectory(tmp_path)
    run.control_dir.mkdir()
    run.control("skip").write_bytes(b"10:20 # caf\xe9")
    write_request(run, "skip", "30:40", keep=True)
    assert run.control("skip").read_text().splitlines() == ["10:20 # caf\N{REPLACEMENT CHARACTER}", "30:40"]


def test_a_request_that_the_run_takes_meanwhile_is_no_hindrance_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = RunDirectory(tmp_path)
    monkeypatch.setattr(Path, "exists", lambda path: True)
    write_request(run, "skip", "30:40", keep=True)
    assert run.control("skip").read_text() == "30:40\n"


@pytest.mark.parametrize("name", ["stop", "save"])
def test_a_switch_of_a_run_is_disarmed_with_the_run_and_that_of_a_group_without_one(name: str):
    rundir = RunDirectory(Path("runs/a b"))
    own, of_group = rundir.control(name), Path("/group/our switches") / name
    assert disarming(own, rundir) == f"bloomery {name} 'runs/a b' --disarm"
    assert disarming(of_group, rundir) == f"bloomery {name} --at '/group/our switches' --disarm"


def test_a_switch_is_armed_on_a_full_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "stop"
    numbers = [errno.ENOSPC, errno.EDQUOT, errno.EROFS]

    def refused(*given: object, **more: object) -> int:
        raise OSError(numbers[0], os.strerror(numbers[0]))

    monkeypatch.setattr(os, "write", refused)
    while numbers[1:]:
        arm(path)
        assert Switches([tmp_path]).armed("stop") == path and list(tmp_path.iterdir()) == [path]
        assert note_of(path) == ""
        path.unlink()
        del numbers[0]
    with pytest.raises(OSError, match="Read-only"):
        arm(path)
    assert not path.exists()


@pytest.mark.parametrize("place", ["run/control", "a group's switches"])
def test_the_command_that_is_told_disarms_a_switch_also_where_nothing_has_trained(tmp_path: Path, place: str):
    run = RunDirectory(tmp_path / "run")
    switch = tmp_path / place / "stop"
    switch.parent.mkdir(parents=True)
    switch.touch()
    assert main(shlex.split(disarming(switch, run))[1:]) == 0
    assert not switch.exists()
