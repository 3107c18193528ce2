"""Files that grow, in a store: each byte is sent about once, and what is fetched is the file to the byte."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from tests.checkpoint.object_store import ObjectStore

from bloomery.checkpoint.remote import segments
from bloomery.checkpoint.remote.remote_run import download_run_files, upload_logs_and_data
from bloomery.config.checkpoint import BackupSection
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import Objects
from bloomery.objects.refusals import AccessDenied

SECTION = BackupSection(url="file:///there")
SIZE, NAME = 64, "journal/0-0.jsonl"


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Objects:
    """A store, to which segments of 64 bytes go."""
    monkeypatch.setattr(segments, "WHOLE_BYTES", SIZE)
    monkeypatch.setattr(segments, "SEGMENT_BYTES", SIZE)
    return Objects(f"file://{tmp_path}/elsewhere")


@pytest.fixture
def journal(rundir: RunDirectory) -> Path:
    path = rundir.path / NAME
    path.parent.mkdir(exist_ok=True)
    return path


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The key and the bytes of each object that is written."""
    written: list[tuple[str, int]] = []
    put, send, send_pieces = Objects.put, Objects.send, Objects.send_pieces

    def counted_put(store: Objects, key: str, content: bytes) -> None:
        written.append((key, len(content)))
        put(store, key, content)

    def counted_send(store: Objects, key: str, path: Path) -> object:
        written.append((key, path.stat().st_size))
        return send(store, key, path)

    def counted_pieces(store: Objects, key: str, *, size: int, pieces: object) -> bool:
        written.append((key, size))
        return send_pieces(store, key, size=size, pieces=pieces)  # type: ignore[arg-type]

    monkeypatch.setattr(Objects, "put", counted_put)
    monkeypatch.setattr(Objects, "send", counted_send)
    monkeypatch.setattr(Objects, "send_pieces", counted_pieces)
    return written


def text(count: int, *, seed: int = 0) -> bytes:
    return Random(seed).randbytes(count)


def add(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


def keys(remote: Objects) -> list[str]:
    return [entry.key for entry in remote.entries()]


@pytest.fixture
def restored(tmp_path: Path, remote: Objects) -> Iterator[object]:
    """Returns what a run directory elsewhere gets of the file; None where it gets none."""

    def restore() -> bytes | None:
        number = len(list(tmp_path.glob("back*")))
        back = RunDirectory(tmp_path / f"back{number}").create()
        download_run_files(remote, back)
        assert not list(back.path.rglob(".*")), "no drafts stay"
        return (back.path / NAME).read_bytes() if (back.path / NAME).exists() else None

    return restore  # type: ignore[return-value]


@pytest.mark.parametrize("segment_bytes", [64, 512])
def test_a_growing_file_is_sent_a_few_times_however_often_it_is_backed_up(
    rundir: RunDirectory,
    remote: Objects,
    journal: Path,
    restored,
    traffic: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
    segment_bytes: int,
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", segment_bytes)
    told = 0
    for seed in range(20):
        add(journal, text(40, seed=seed))
        told += upload_logs_and_data(rundir, remote, SECTION)
        held = [key for key in keys(remote) if key.startswith("segments/") and "index" not in key]
        assert len(held) <= journal.stat().st_size / segment_bytes + math.log2(segment_bytes)
        if seed % 13 == 0:
            assert restored() == journal.read_bytes()
    size = journal.stat().st_size
    assert told == sum(count for key, count in traffic if "index" not in key)
    times = 1 + math.ceil(math.log(segment_bytes / 40, 1.5))  # a segment grows by half, or more, each time
    assert told <= times * size < size * 20 / 2, "what it is where the file is sent whole"
    assert restored() == journal.read_bytes()
    assert upload_logs_and_data(rundir, remote, SECTION) == 0


def test_of_a_file_that_grew_only_the_end_is_read_and_sent(
    rundir: RunDirectory, remote: Objects, journal: Path, restored
) -> None:
    journal.write_bytes(text(5 * SIZE + 9))
    upload_logs_and_data(rundir, remote, SECTION)
    with journal.open("r+b") as file:  # in place, in a segment that is final
        file.write(b"another")
    add(journal, b"more")
    assert upload_logs_and_data(rundir, remote, SECTION) == 4
    assert restored() == text(5 * SIZE + 9) + b"more", "it was not read again"


def test_a_file_that_was_written_anew_is_sent_where_it_differs(
    rundir: RunDirectory, remote: Objects, journal: Path, restored
) -> None:
    first = text(4 * SIZE + 20)
    journal.write_bytes(first)
    upload_logs_and_data(rundir, remote, SECTION)
    edited = first[:70] + b"!" + first[71:]  # as an editor does it: another file of the same name
    (rundir.path / "edited").write_bytes(edited)
    (rundir.path / "edited").replace(journal)
    assert upload_logs_and_data(rundir, remote, SECTION) == SIZE
    assert restored() == edited
    shifted = b"a line in front\n" + edited
    with journal.open("r+b") as file:  # in place
        file.write(shifted)
    assert upload_logs_and_data(rundir, remote, SECTION) == len(shifted)
    assert restored() == shifted
    cut = shifted[: 2 * SIZE]
    os.truncate(journal, len(cut))
    assert upload_logs_and_data(rundir, remote, SECTION) == 0, "the segments are there"
    assert restored() == cut and len(keys(remote)) == 4 - 1
    os.truncate(journal, 10)
    assert upload_logs_and_data(rundir, remote, SECTION) == 10
    assert restored() == cut[:10] and len(keys(remote)) == 2
    os.truncate(journal, 0)
    upload_logs_and_data(rundir, remote, SECTION)
    assert restored() == b""
    add(journal, first)
    upload_logs_and_data(rundir, remote, SECTION)
    assert restored() == first


def test_what_an_earlier_version_left_as_one_object_is_read_until_the_segments_are_whole(
    rundir: RunDirectory, remote: Objects, journal: Path, restored
) -> None:
    old = text(3 * SIZE)
    journal.write_bytes(old)
    status = journal.stat()
    remote.put(NAME, old)
    rundir.backups.mkdir(exist_ok=True)
    record = f'{{"{remote.url}": {{"{NAME}": [{status.st_size}, {status.st_mtime_ns}]}}}}'
    (rundir.backups / "run-files.json").write_text(record)
    assert upload_logs_and_data(rundir, remote, SECTION) == 0, "an unchanged file is not sent anew"
    assert restored() == old
    add(journal, b"more")
    answers = iter([True, True, True, False])
    assert upload_logs_and_data(rundir, remote, SECTION, go_on=lambda: next(answers)) == 2 * SIZE
    assert restored() == old
    assert upload_logs_and_data(rundir, remote, SECTION) == SIZE + 4, "it goes on where it stopped"
    assert restored() == old + b"more"
    remote.put(NAME, old + b"more, by the earlier version")
    assert restored() == old + b"more, by the earlier version"


def test_an_upload_that_breaks_off_leaves_the_state_before_and_goes_on(
    rundir: RunDirectory, remote: Objects, journal: Path, restored, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.write_bytes(text(3 * SIZE + 5))
    upload_logs_and_data(rundir, remote, SECTION)
    add(journal, text(3 * SIZE, seed=1))
    with monkeypatch.context() as broken:
        broken.setattr(segments, "_write_index", lambda *given: (_ for _ in ()).throw(OSError(5, "cut")))
        with pytest.raises(OSError, match="cut"):
            upload_logs_and_data(rundir, remote, SECTION)
    assert restored() == text(3 * SIZE + 5)
    assert upload_logs_and_data(rundir, remote, SECTION) == 0, "all segments had gone"
    assert restored() == text(3 * SIZE + 5) + text(3 * SIZE, seed=1)
    with monkeypatch.context() as damaging:
        damaging.setattr(Objects, "digest", lambda store, key: "0")
        add(journal, b"more")
        with pytest.raises(OSError, match="is not what was sent"):
            upload_logs_and_data(rundir, remote, SECTION)


def test_of_two_machines_that_send_one_file_the_last_counts_whole(
    rundir: RunDirectory, remote: Objects, journal: Path, restored, tmp_path: Path
) -> None:
    shared = text(2 * SIZE + 10)
    other = RunDirectory(tmp_path / "other").create()
    both = {rundir: shared, other: shared}
    (other.path / NAME).parent.mkdir(exist_ok=True)
    for turn in range(3):
        for run in both:
            both[run] += text(40, seed=turn + 100 * (run is other))
            (run.path / NAME).write_bytes(both[run])
            upload_logs_and_data(run, remote, SECTION)
            assert restored() == both[run]


def at_third_segment(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Let `act` run once, as a fetch is about to read its third segment."""
    pieces, opened = Objects.pieces, []

    def pieces_after_act(store: Objects, key: str, **more: object) -> Iterator[memoryview]:
        if key.startswith("segments/") and "index" not in key:
            opened.append(key)
            if len(opened) == 3:
                act()
        return pieces(store, key, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Objects, "pieces", pieces_after_act)


def test_a_fetch_during_which_all_of_a_file_is_sent_anew_begins_anew(
    rundir: RunDirectory, remote: Objects, journal: Path, restored, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.write_bytes(text(3 * SIZE + 5))
    upload_logs_and_data(rundir, remote, SECTION)

    def send_again() -> None:
        journal.write_bytes(text(4 * SIZE + 5, seed=1))
        upload_logs_and_data(rundir, remote, SECTION)

    at_third_segment(monkeypatch, send_again)
    assert restored() == text(4 * SIZE + 5, seed=1)


def test_a_fetch_during_an_upload_gets_one_state_of_the_file(
    rundir: RunDirectory, remote: Objects, journal: Path, restored, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    journal.write_bytes(text(3 * SIZE + 5))
    upload_logs_and_data(rundir, remote, SECTION)

    def send_again() -> None:
        add(journal, b"more")
        upload_logs_and_data(rundir, remote, SECTION)

    at_third_segment(monkeypatch, send_again)
    assert restored() == text(3 * SIZE + 5) + b"more"
    lost = [key for key in keys(remote) if key.startswith(f"segments/{NAME}/000001")]
    remote.delete_all(lost)
    assert restored() is None
    assert f"{NAME} is not restored: {remote.place(lost[0])} is no longer there" in caplog.text
    upload_logs_and_data(rundir, remote, SECTION)
    add(journal, b"!")
    upload_logs_and_data(rundir, remote, SECTION)
    assert restored() == text(3 * SIZE + 5) + b"more!", "what a store lost is sent again"


@pytest.mark.parametrize(
    "index", [b"{", b"[]", b'{"format": 2, "segments": []}', b'{"segments": [[3, "../x"]]}']
)
def test_damage_in_a_store_costs_the_log_until_the_next_upload(
    rundir: RunDirectory, remote: Objects, journal: Path, restored, index: bytes, caplog
) -> None:
    journal.write_bytes(text(2 * SIZE))
    upload_logs_and_data(rundir, remote, SECTION)
    remote.put(f"segments/{NAME}/index.json", index)
    assert restored() is None
    assert f"{NAME} is not restored: {remote.place(f'segments/{NAME}/index.json')} does not" in caplog.text
    add(journal, b"more")
    upload_logs_and_data(rundir, remote, SECTION)
    assert restored() == text(2 * SIZE) + b"more"
    damaged = next(key for key in keys(remote) if key.startswith(f"segments/{NAME}/000001"))
    remote.put(damaged, text(SIZE, seed=5))
    assert restored() is None and f"{damaged} is not what was sent: it has been damaged" in caplog.text


def test_who_may_not_remove_objects_backs_up_all_the_same(
    rundir: RunDirectory, remote: Objects, journal: Path, restored, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(store: Objects, keys: object) -> None:
        raise AccessDenied(13, "denied")

    monkeypatch.setattr(Objects, "delete_all", denied)
    for count in (SIZE, 2 * SIZE, 3 * SIZE, 10):
        journal.write_bytes(text(count))
        upload_logs_and_data(rundir, remote, SECTION)
        assert restored() == text(count)


def test_a_store_of_objects_keeps_segments_like_a_directory(
    rundir: RunDirectory, journal: Path, object_store: ObjectStore, tmp_path: Path, remote: Objects
) -> None:
    bucket = Objects(f"{object_store.new_bucket()}/run")
    for count in (SIZE, 3 * SIZE + 7):
        add(journal, text(count))
        upload_logs_and_data(rundir, bucket, SECTION)
    back = RunDirectory(tmp_path / "back").create()
    download_run_files(bucket, back)
    assert (back.path / NAME).read_bytes() == journal.read_bytes()


def test_a_long_file_that_is_no_log_stays_one_object(rundir: RunDirectory, remote: Objects) -> None:
    (rundir.path / "data").mkdir(exist_ok=True)
    (rundir.path / "data" / "train.bin").write_bytes(text(3 * SIZE))
    assert upload_logs_and_data(rundir, remote, SECTION) == 3 * SIZE and keys(remote) == ["data/train.bin"]


def test_an_index_of_what_is_no_log_is_left_where_it_is(
    rundir: RunDirectory, remote: Objects, tmp_path: Path, journal: Path
) -> None:
    journal.write_bytes(text(2 * SIZE))
    upload_logs_and_data(rundir, remote, SECTION)
    content = remote.content(f"segments/{NAME}/index.json")
    remote.put("segments/recipe.toml/index.json", content)
    back = RunDirectory(tmp_path / "back").create()
    download_run_files(remote, back)
    assert not back.recipe.exists() and (back.path / NAME).exists()


def test_a_log_of_as_many_bytes_as_go_whole_is_one_object(
    rundir: RunDirectory, remote: Objects, journal: Path
) -> None:
    journal.write_bytes(text(SIZE))
    assert upload_logs_and_data(rundir, remote, SECTION) == SIZE and keys(remote) == [NAME]
    add(journal, b"!")
    assert upload_logs_and_data(rundir, remote, SECTION) == SIZE + 1
    assert remote.content(NAME) == b"" and f"segments/{NAME}/index.json" in keys(remote)


def test_a_segment_that_is_longer_than_a_full_one_is_not_read_and_is_sent_anew(
    rundir: RunDirectory, remote: Objects, journal: Path, restored, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.write_bytes(text(3 * SIZE))
    with monkeypatch.context() as another:
        another.setattr(segments, "SEGMENT_BYTES", 3 * SIZE)
        upload_logs_and_data(rundir, remote, SECTION)
    add(journal, b"more")
    assert upload_logs_and_data(rundir, remote, SECTION) == 3 * SIZE + 4
    assert restored() == journal.read_bytes()
