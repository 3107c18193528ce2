"""Bytes are synced, then named, then the directory is synced, and what failed leaves nothing beside."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import pytest
from tests.disk_calls import recorded

from bloomery import durable


def test_a_whole_file_is_synced_then_renamed_then_its_directory_is_synced(tmp_path: Path):
    with recorded() as calls:
        durable.write_whole(tmp_path / "recipe.toml", "steps = 1\n")
    assert calls.names == [("sync", "recipe.toml"), ("rename", "recipe.toml"), ("sync", tmp_path.name)]
    assert (tmp_path / "recipe.toml").read_text() == "steps = 1\n"


def test_a_file_system_that_syncs_no_directory_is_written_to_all_the_same(
    tmp_path: Path, monkeypatch
) -> None:
    fsync, answer = os.fsync, errno.EINVAL  # as SMB answers

    def refusing(file: int) -> None:
        if Path(f"/proc/self/fd/{file}").is_dir():
            raise OSError(answer, os.strerror(answer))
        fsync(file)

    monkeypatch.setattr(os, "fsync", refusing)
    durable.write_whole(tmp_path / "recipe.toml", "steps = 1\n")
    durable.sync_tree(tmp_path)
    answer = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        durable.write_whole(tmp_path / "recipe.toml", "steps = 1\n")


def test_directories_that_were_missing_are_synced_from_the_top(tmp_path: Path):
    with recorded() as calls:
        durable.write_whole(tmp_path / "a" / "b" / "file", b"x")
    assert calls.names[:2] == [("sync", tmp_path.name), ("sync", "a")]
    assert calls.names[2:] == [("sync", "file"), ("rename", "file"), ("sync", "b")]


def test_a_file_that_could_not_be_synced_leaves_the_old_one_and_nothing_beside(tmp_path: Path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("old")

    def failing(file: int) -> None:
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(os, "fsync", failing)
    for write in (durable.write_whole, durable.append):
        with pytest.raises(OSError, match="no"):
            write(path, "new")
        if write is durable.write_whole:
            assert path.read_text() == "old"
    with pytest.raises(OSError, match="no"):
        durable.write_new(tmp_path / "new", "new")
    with pytest.raises(OSError, match="no"), durable.open_new(tmp_path / "stream") as file:
        file.write(b"new")
    assert list(tmp_path.iterdir()) == [path]


def test_what_tells_of_the_living_is_replaced_whole_and_never_synced(tmp_path: Path):
    with recorded() as calls:
        durable.write_whole_unsynced(tmp_path / "heartbeat", "1")
        durable.write_whole_unsynced(tmp_path / "heartbeat", "2")
    assert calls.names == [("rename", "heartbeat")] * 2 and (tmp_path / "heartbeat").read_text() == "2"
    assert len(list(tmp_path.iterdir())) == 1
    durable.write_whole_unsynced(tmp_path / "new" / "deep" / "heartbeat", "3")
    assert (tmp_path / "new" / "deep" / "heartbeat").read_text() == "3"


def test_a_sign_of_life_is_written_over_the_old_one_where_a_draft_finds_no_room(tmp_path: Path, monkeypatch):
    path = tmp_path / "heartbeat"
    durable.refresh(path, '{"moves": 17}\n')

    def refused(number: int):
        return lambda *content: (_ for _ in ()).throw(OSError(number, "no"))

    monkeypatch.setattr(Path, "write_text", lambda *_, **__: refused(errno.EDQUOT)())
    durable.refresh(path, '{"moves": 9}\n')
    assert json.loads(path.read_text()) == {"moves": 9} and list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match="no"):
        durable.refresh(tmp_path / "first", "1")
    monkeypatch.setattr(Path, "write_text", lambda *_, **__: refused(errno.EROFS)())
    with pytest.raises(OSError, match="no"):
        durable.refresh(path, '{"moves": 10}\n')
    monkeypatch.undo()
    durable.refresh(path, "1")
    assert path.read_text() == "1"


def test_two_writers_of_one_file_never_mix(tmp_path: Path):
    """Each has a draft of its own: with a common one, a writer would rename what another is writing."""
    path, contents = tmp_path / "file", [str(number) * 100_000 for number in range(4)]
    threads = [
        threading.Thread(target=lambda text=text: [durable.write_whole(path, text) for _ in range(20)])
        for text in contents
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if path.exists():
            assert path.read_text() in contents
    for thread in threads:
        thread.join(timeout=60)
    assert path.read_text() in contents and list(tmp_path.iterdir()) == [path]


def test_a_created_file_is_synced_and_its_name_too_and_only_one_creates_it(tmp_path: Path):
    with recorded() as calls:
        durable.create(tmp_path / "000001.json", "first")
    assert calls.names == [("sync", "000001.json"), ("sync", tmp_path.name)]
    with pytest.raises(FileExistsError):
        durable.create(tmp_path / "000001.json", "second")
    assert (tmp_path / "000001.json").read_text() == "first"


def test_who_dies_while_creating_a_file_leaves_no_empty_one_that_keeps_others_out(tmp_path: Path):
    path = tmp_path / "decision-000001.json"
    child = os.fork()
    if child == 0:
        os.write = lambda file, data: os.kill(os.getpid(), 9)
        durable.create(path, "first")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 9
    durable.create(path, "second")
    assert path.read_text() == "second"


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_file_is_created_once_where_links_are_refused_or_their_answer_is_lost(
    tmp_path: Path, monkeypatch, is_answered: bool
):
    link = os.link

    def lost(source: Path, target: Path) -> None:
        if is_answered:
            raise PermissionError(errno.EPERM, "no hard links here")
        link(source, target)
        raise FileExistsError(errno.EEXIST, "asked twice")

    path = tmp_path / "000001.json"
    monkeypatch.setattr(os, "link", lost)
    durable.create(path, "first")
    monkeypatch.setattr(os, "link", link)
    with pytest.raises(FileExistsError):
        durable.create(path, "second")
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


def test_what_is_appended_is_synced_and_the_name_of_a_new_file_too(tmp_path: Path):
    with recorded() as calls:
        durable.append(tmp_path / "list", "a\n")
        durable.append(tmp_path / "list", "b\n")
    assert calls.names == [("sync", "list"), ("sync", tmp_path.name), ("sync", "list")]
    assert (tmp_path / "list").read_text() == "a\nb\n"


def test_a_move_between_directories_syncs_both(tmp_path: Path):
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    (tmp_path / "from" / "file").touch()
    with recorded() as calls:
        durable.replace(tmp_path / "from" / "file", tmp_path / "to" / "file")
    assert calls.names == [("rename", "file"), ("sync", "to"), ("sync", "from")]


def test_a_published_directory_is_synced_to_the_last_file_before_it_gets_its_name(tmp_path: Path):
    draft = tmp_path / "export.partial"
    (draft / "deep").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "deep/vocabulary"):
        (draft / name).write_text(name)
    (draft / "link").symlink_to("nowhere")
    with recorded() as calls:
        durable.publish(draft, tmp_path / "export")
    renamed = calls.index("rename", "export")
    expected = {"config.json", "model.safetensors", "vocabulary", "deep", "export.partial"}
    assert {name for _, name in calls.names[:renamed]} == expected
    assert calls.names[renamed - 1] == ("sync", "export.partial")
    assert calls.names[renamed + 1 :] == [("sync", tmp_path.name)]


def test_a_file_that_only_its_owner_may_read_is_so_from_its_first_byte(tmp_path: Path):
    durable.write_whole(tmp_path / "key", "secret", mode=0o600)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def test_an_error_names_the_file_that_was_to_be_written(tmp_path: Path, monkeypatch):
    def refused(*given: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", refused)
    for write in (durable.write_whole, durable.write_new):
        with pytest.raises(OSError, match="No space left") as told:
            write(tmp_path / "report.md", "text")
        assert told.value.filename == str(tmp_path / "report.md") and not list(tmp_path.iterdir())


def test_what_could_not_get_its_name_leaves_nothing_beside(tmp_path: Path, monkeypatch):
    def refused(*paths: object) -> None:
        raise OSError(errno.EIO, "no")

    (tmp_path / "there").mkdir()
    monkeypatch.setattr(Path, "rename", refused)
    monkeypatch.setattr(Path, "replace", refused)
    monkeypatch.setattr(os, "link", refused)
    for write in (durable.write_whole, durable.write_whole_unsynced, durable.create):
        with pytest.raises(OSError, match="no"):
            write(tmp_path / "file", "content")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_path_that_is_no_text_is_told_as_well_as_it_can_be(tmp_path: Path):
    durable.write_whole_unsynced(tmp_path / "lock", "in /data/\udcff on ä")
    assert (tmp_path / "lock").read_bytes() == "in /data/? on ä".encode()
    (tmp_path / "lock").write_bytes(b"by \xff")
    with (tmp_path / "lock").open("rb") as held:
        assert durable.try_lock(held.fileno())
        with pytest.raises(durable.LockHeld, match="by"), durable.locked(tmp_path / "lock", owner="me"):
            raise AssertionError("two hold it")


def test_what_is_streamed_or_added_is_in_the_file_when_it_is_synced(tmp_path: Path, monkeypatch):
    sizes: list[int] = []
    monkeypatch.setattr(durable, "sync_file", lambda file: sizes.append(os.fstat(file).st_size))
    with durable.open_new(tmp_path / "new") as file:
        file.write(b"abc")
    durable.append(tmp_path / "new", b"de")
    assert sizes == [3, 5] and (tmp_path / "new").read_bytes() == b"abcde"


def test_where_even_the_old_blocks_cannot_be_written_a_sign_of_life_is_refused(tmp_path: Path, monkeypatch):
    durable.refresh(tmp_path / "heartbeat", "1")
    monkeypatch.setattr(durable, "write_whole_unsynced", lambda *_: _full_disk())
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, content: write(file, content[:3]))
    durable.refresh(tmp_path / "heartbeat", "2")
    with pytest.raises(OSError, match="space") as refused:
        durable.refresh(tmp_path / "heartbeat", "four")
    assert refused.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="no room"):
        durable.refresh(tmp_path / "first", "1")


def test_a_sign_of_life_may_name_a_path_that_is_no_utf8_on_a_full_disk_too(tmp_path: Path, monkeypatch):
    path = tmp_path / "heartbeat"
    durable.refresh(path, "caf\udce9")
    assert path.read_text() == "caf?"
    monkeypatch.setattr(durable, "write_whole_unsynced", lambda *_: _full_disk())
    durable.refresh(path, "tea\udce9")
    assert path.read_text() == "tea?"


def test_a_published_file_is_synced_before_it_gets_its_name(tmp_path: Path):
    (tmp_path / "draft").write_text("x")
    with recorded() as calls:
        durable.publish(tmp_path / "draft", tmp_path / "file")
    assert calls.names[-2:] == [("rename", "file"), ("sync", tmp_path.name)]
    assert [call for call, _ in calls.names] == ["sync", "rename", "sync"]


def test_a_directory_that_cannot_be_listed_is_not_taken_for_one_that_is_synced(tmp_path: Path, monkeypatch):
    (tmp_path / "whole" / "deep").mkdir(parents=True)
    scan = os.scandir

    def refusing(path: str):
        if str(path).endswith("deep"):
            raise OSError(errno.EIO, "no answer")
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(OSError, match="no answer"):
        durable.sync_tree(tmp_path / "whole")


def test_no_call_leaves_a_descriptor_open(tmp_path: Path, monkeypatch):
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    path, before = tmp_path / "file", count()
    durable.write_whole(path, "1")
    durable.append(path, "2")
    durable.create(tmp_path / "other", "1")
    durable.sync_tree(tmp_path)
    lock = durable.hold_directory(tmp_path)
    assert lock is not None and durable.hold_directory(tmp_path) is None
    os.close(lock)
    monkeypatch.setattr(durable, "write_whole_unsynced", lambda *_: _full_disk())
    durable.refresh(path, "3")
    assert count() == before and path.read_text() == "3 "


def _full_disk() -> None:
    raise OSError(errno.ENOSPC, "no room")


def test_drafts_of_writers_that_were_killed_are_removed_and_nothing_else(tmp_path: Path):
    def killed() -> None:
        os.fsync = lambda file: os.kill(os.getpid(), 9)
        durable.write_whole(tmp_path / "recipe.toml", "new")

    (tmp_path / "recipe.toml").write_text("old")
    child = os.fork()
    if child == 0:
        killed()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 9
    assert len(list(tmp_path.iterdir())) == 2
    durable.remove_drafts(tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_file_is_whole_where_the_system_takes_a_few_bytes_at_a_time(tmp_path: Path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, content: write(file, content[:3]))
    durable.write_whole(tmp_path / "whole", "ten letters")
    durable.append(tmp_path / "list", b"ten letters")
    durable.append(tmp_path / "list", b", and more")
    assert (tmp_path / "whole").read_text() == "ten letters"
    assert (tmp_path / "list").read_text() == "ten letters, and more"


def test_who_is_interrupted_while_writing_leaves_nothing_beside(tmp_path: Path, monkeypatch):
    def interrupt(*given: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "file").write_text("old")
    monkeypatch.setattr(os, "fsync", interrupt)
    monkeypatch.setattr(Path, "replace", interrupt)
    for write, name in (
        (durable.write_whole, "file"),
        (durable.write_whole_unsynced, "file"),
        (durable.write_new, "new"),
        (durable.create, "new"),
    ):
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / name, "new")
    with pytest.raises(KeyboardInterrupt), durable.open_new(tmp_path / "new"):
        raise KeyboardInterrupt
    monkeypatch.undo()
    monkeypatch.setattr(Path, "rename", interrupt)
    with pytest.raises(KeyboardInterrupt):
        durable.write_whole(tmp_path / "file", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]
