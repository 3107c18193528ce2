"""What a run needs beside its checkpoints, in a store: sent once, read back, fetched to its place alone."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bloomery.checkpoint.format.manifest import MANIFEST
from bloomery.checkpoint.format.source import RemoteCheckpoint
from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.format.suspects import SUSPECT
from bloomery.checkpoint.remote import remote_run
from bloomery.checkpoint.remote.remote_run import (
    download_run_files,
    is_remote,
    log_backup_used,
    place_at,
    remote_checkpoints,
    remote_incarnations,
    remote_source,
    upload_logs_and_data,
    upload_run_files,
)
from bloomery.checkpoint.remote.transfer import upload_checkpoint
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.config.checkpoint import BackupSection
from bloomery.errors import CheckpointError, StorageError
from bloomery.events.incarnation import begin
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import LocalFileError, ObjectEntry, Objects, SentFile

SECTION = BackupSection(url="file:///there")


@pytest.fixture
def remote(tmp_path: Path) -> Objects:
    return Objects(f"file://{tmp_path}/elsewhere")


def write(rundir: RunDirectory, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (rundir.path / name).parent.mkdir(parents=True, exist_ok=True)
        (rundir.path / name).write_bytes(content)


def keys(remote: Objects) -> list[str]:
    return [entry.key for entry in remote.entries()]


FILES = {
    "data/train.bin": b"12345",
    "data/tokenizer.json": b"{}",
    "journal/0.jsonl": b"abc",
    "logs/.half": b"half",
    "stacks/0.txt": b"1234567",
    "evaluations.jsonl": b"{}\n",
    "other/file": b"mine",
}


def test_logs_and_data_are_sent_as_a_place_asks_and_only_when_they_changed(
    rundir: RunDirectory, remote: Objects
) -> None:
    write(rundir, FILES)
    (rundir.path / "logs" / "link").symlink_to(rundir.path / "other" / "file")
    logs = ["evaluations.jsonl", "journal/0.jsonl", "stacks/0.txt"]
    assert upload_logs_and_data(rundir, remote, BackupSection(url="file:///there", data=False)) == 3 + 7 + 3
    assert keys(remote) == logs
    assert upload_logs_and_data(rundir, remote, BackupSection(url="file:///there", logs=False)) == 5
    assert keys(remote) == ["data/train.bin", *logs], "the tokenizer goes with the recipe"
    assert upload_logs_and_data(rundir, remote, SECTION) == 0
    write(rundir, {"journal/0.jsonl": b"abcdef"})
    os.utime(rundir.path / "stacks" / "0.txt", ns=(5, 5))
    assert upload_logs_and_data(rundir, remote, SECTION) == 6 + 7
    assert remote.content("journal/0.jsonl") == b"abcdef"
    second = Objects(remote.url + "2")
    assert upload_logs_and_data(rundir, second, SECTION, place="second") == 5 + 6 + 7 + 3
    assert upload_logs_and_data(rundir, remote, SECTION) == 0, "each place has a record of its own"


def test_what_was_sent_before_a_stop_or_an_error_is_not_sent_again(
    rundir: RunDirectory, remote: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(rundir, FILES)
    answers = iter([True, False])
    assert upload_logs_and_data(rundir, remote, SECTION, go_on=lambda: next(answers)) == 3
    assert keys(remote) == ["journal/0.jsonl"]
    send = Objects.send

    def away(store: Objects, key: str, path: Path) -> object:
        if key == "evaluations.jsonl":
            raise OSError(5, "no answer")
        return send(store, key, path)

    with monkeypatch.context() as cut:
        cut.setattr(Objects, "send", away)
        with pytest.raises(OSError, match="no answer"):
            upload_logs_and_data(rundir, remote, SECTION)
    assert upload_logs_and_data(rundir, remote, SECTION) == 5 + 3
    write(rundir, {"stacks/0.txt": b"changed"})
    with monkeypatch.context() as damaging:
        damaging.setattr(Objects, "digest", lambda store, key: "0")
        with pytest.raises(OSError, match="is not what was sent"):
            upload_logs_and_data(rundir, remote, SECTION)
    assert upload_logs_and_data(rundir, remote, SECTION) == 7, "what arrived changed does not count as sent"


def test_a_log_that_cannot_be_read_keeps_no_other_from_being_sent(
    rundir: RunDirectory, remote: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(rundir, {"logs/a": b"1", "logs/b": b"2", "logs/c": b"3"})
    real, wrong = Objects.send, {"a": errno.EIO, "b": errno.ENOENT}

    def send(store: Objects, key: str, path: Path) -> SentFile:
        if path.name in wrong:
            raise LocalFileError(wrong[path.name], os.strerror(wrong[path.name]), str(path))
        return real(store, key, path)

    monkeypatch.setattr(Objects, "send", send)
    with pytest.raises(LocalFileError, match=r"Input/output error.*logs/a"):
        upload_logs_and_data(rundir, remote, SECTION)
    assert keys(remote) == ["logs/c"]
    del wrong["a"]  # what is gone by now is no error
    upload_logs_and_data(rundir, remote, SECTION)
    assert keys(remote) == ["logs/a", "logs/c"]


@pytest.mark.parametrize("entry", ["data/../../evil", "logs/./a", "journal//b", "data/.."])
def test_no_name_in_a_store_leads_out_of_the_run(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    directory = entry.partition("/")[0]
    names = [entry, f"{directory}/deep/good"]
    indices = [SimpleNamespace(key=f"segments/{name}-in-segments/index.json") for name in names]
    store = SimpleNamespace(pieces=lambda key: iter([b"evil"]), entries=lambda prefix: indices)
    monkeypatch.setattr(remote_run, "fetch_segments", lambda remote, name, file: bool(file.write(b"evil")))
    monkeypatch.setattr(remote_run, "remote_incarnations", lambda remote: {})
    monkeypatch.setattr(remote_run, "_content", lambda remote, key: None)
    monkeypatch.setattr(remote_run, "_entries", lambda remote, name: names if name == directory else [])
    before = {path for path in rundir.path.parent.rglob("*") if path.is_file()}
    download_run_files(store, rundir)  # type: ignore[arg-type]
    made = {path for path in rundir.path.parent.rglob("*") if path.is_file()} - before
    good = rundir.path / directory / "deep" / "good"
    logs = {good.with_name("good-in-segments")} if directory != "data" else set()
    assert made == {good} | logs


def test_what_is_here_stays_and_what_is_missing_or_empty_comes(
    rundir: RunDirectory, remote: Objects, tmp_path: Path
) -> None:
    write(rundir, {**FILES, "sources.toml": b"# sources\n", "recipe.toml": b"# recipe\n"})
    begin(rundir, base=None, reason="start")
    upload_run_files(rundir, remote)
    upload_logs_and_data(rundir, remote, SECTION)
    write(rundir, {"recipe.toml": b"# another recipe\n"})
    upload_run_files(rundir, remote)
    assert remote.content("recipe.toml") == b"# another recipe\n", "the newest recipe counts"
    back = RunDirectory(tmp_path / "back").create()
    write(back, {"data/train.bin": b"", "journal/0.jsonl": b"mine", "data/.train.bin.draft": b"half"})
    download_run_files(remote, back)
    assert (back.path / "data/train.bin").read_bytes() == b"12345"
    assert (back.path / "journal/0.jsonl").read_bytes() == b"mine"
    assert (back.path / "sources.toml").read_bytes() == b"# sources\n"
    assert (back.path / "evaluations.jsonl").read_bytes() == b"{}\n"
    assert back.incarnation(1).read_bytes() == rundir.incarnation(1).read_bytes()


def test_everything_that_a_run_needs_or_logs_comes_back(
    rundir: RunDirectory, remote: Objects, tmp_path: Path
) -> None:
    needed = {"recipe.toml", "sources.toml"}
    needed |= {f"data/{name}" for name in ("tokenizer.json", "tokenizer.model", "prepared.json")}
    logs = {f"{name}/0" for name in ("journal", "logs", "tensorboard", "stacks")}
    logs |= {f"{name}.jsonl" for name in ("operations", "evaluations", "rounds")} | {"chronicle.md"}
    write(rundir, {name: name.encode() for name in needed | logs})
    upload_run_files(rundir, remote)
    assert set(keys(remote)) == needed
    upload_logs_and_data(rundir, remote, SECTION)
    assert set(keys(remote)) == needed | logs
    back = RunDirectory(tmp_path / "back").create()
    download_run_files(remote, back)
    assert {name: (back.path / name).read_text() for name in needed | logs} == {
        name: name for name in needed | logs
    }


def test_only_numbered_records_are_incarnations(remote: Objects) -> None:
    for name in ("000002.json", "000010.json", "notes.json", "000003.json.draft", "00x.json"):
        remote.put(f"incarnations/{name}", name.encode())
    assert remote_incarnations(remote) == {
        f"{remote.url}/incarnations/{name}": name.encode() for name in ("000002.json", "000010.json")
    }


def test_a_store_lists_its_checkpoints_by_step_and_takes_nothing_else_for_one(
    tmp_path: Path, remote: Objects, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(CheckpointError, match=r"holds no finished checkpoint(?s:.*)Give the URL"):
        remote_source(remote.url)
    names = []
    for step, incarnation in ((9, 3), (10, 1), (10, 2)):
        entries = [whole("model.a", torch.full((3,), float(step)))]
        saved = save_checkpoint(tmp_path / "here", entries, step=step, incarnation=incarnation)
        upload_checkpoint(saved, remote, notes=tmp_path / "notes")
        names.append(saved.name)
    nested = "step-000012.i001/kept/manifest.json"
    for key in ("step-000011.i001/model-0.safetensors", "export/manifest.json", "manifest.json", nested):
        remote.put(f"checkpoints/{key}", b"{}")
    assert [item.name for item in remote_checkpoints(remote)] == names
    assert remote_source(remote.url).name == names[-1]
    remote.put(f"checkpoints/{names[2]}/{SUSPECT}", b'{"why": "rank 3 erred"}')
    assert [item.is_marked for item in remote_checkpoints(remote)] == [False, False, True]
    assert remote_source(f"{remote.url}/").name == names[1]
    assert f"{names[2]} is passed over as suspect: rank 3 erred" in caplog.text
    assert remote_source(f"{remote.url}/checkpoints/{names[0]}/").place().endswith(names[0])
    with pytest.raises(StorageError, match="does not exist"):
        remote_source(f"{remote.url}-2")


@pytest.mark.parametrize(
    ("text", "is_url"),
    [
        ("s3://b/run", True),
        ("file:///mnt/run", True),
        ("runs/demo", False),
        ("://b", False),
        ("a b://c", False),
        ("runs/s3://b", False),
    ],
)
def test_an_address_is_of_a_store_where_it_begins_with_a_scheme(text: str, is_url: bool) -> None:
    assert is_remote(text) is is_url


@pytest.mark.parametrize("sent", [None, [1], {"logs/a": None}, {"logs/a": ["x", 2]}, {"logs/a": 7}])
def test_where_the_record_of_what_was_sent_is_damaged_all_is_sent_again(
    rundir: RunDirectory, remote: Objects, sent: object
) -> None:
    write(rundir, {"logs/a": b"1", "backups/run-files.json": json.dumps({remote.url: sent}).encode()})
    assert upload_logs_and_data(rundir, remote, SECTION) == 1 and keys(remote) == ["logs/a"]


def test_many_checkpoints_of_thousands_of_files_are_listed_without_their_files(
    remote: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in (*(f"step-00000{step}.i001/data-{n}" for step in (1, 2) for n in range(5)), "other/data"):
        remote.put(f"checkpoints/{key}", b"")
    for key in (
        f"step-000001.i001/{MANIFEST}",
        f"step-000002.i001/{MANIFEST}",
        f"step-000002.i001/{SUSPECT}",
    ):
        remote.put(f"checkpoints/{key}", b"{}")
    listed, entries = list[int](), Objects.entries

    def counted(store: Objects, prefix: str = "") -> list[ObjectEntry]:
        found = entries(store, prefix)
        listed.append(len(found))
        return found

    monkeypatch.setattr(Objects, "entries", counted)
    found = [(item.name, item.is_marked) for item in remote_checkpoints(remote)]
    assert found == [("step-000001.i001", False), ("step-000002.i001", True)] and sum(listed) == 0


def test_a_store_of_no_known_kind_is_refused_without_its_secrets(tmp_path: Path) -> None:
    for url in ("nothing", "mail://b/run?token=abc"):
        with pytest.raises(CheckpointError, match="is not the URL of a store") as refused:
            place_at(url)
        assert "abc" not in refused.value.message
        assert refused.value.remedy.startswith("One of s3, gs, az, file:")
    assert place_at(f"file://{tmp_path}/new", patience_s=7.5)._patience_s == 7.5
    assert (tmp_path / "new").is_dir()


def test_the_beginning_of_a_run_from_a_backup_says_why(caplog: pytest.LogCaptureFixture) -> None:
    log_backup_used([], instead_of=["one"])
    assert not caplog.text
    copies = [
        RemoteCheckpoint(Objects("file:///tmp"), f"checkpoints/step-00000{step}.i001") for step in (9, 5)
    ]
    log_backup_used(copies, instead_of=[])
    assert "nothing is here: going on from the backup file:///tmp/checkpoints/step-000009.i001" in caplog.text


def test_files_are_never_sent_where_the_backups_of_another_run_are(
    remote: Objects, rundir: RunDirectory, tmp_path: Path
) -> None:
    begin(rundir, base=None, reason="start")
    upload_run_files(rundir, remote)
    upload_run_files(rundir, remote)
    other = RunDirectory(tmp_path / "other").create()
    begin(other, base=None, reason="another start")
    write(other, {"recipe.toml": b"of the other"})
    with pytest.raises(CheckpointError, match="holds the backups of another run") as refused:
        upload_run_files(other, remote)
    assert refused.value.remedy == "Choose another run.name or backup.url."
    assert not remote.exists("recipe.toml")


def test_a_run_of_many_incarnations_asks_for_one_of_their_records_after_a_save(
    rundir: RunDirectory, remote: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(12):
        begin(rundir, base=None, reason="start")
    upload_run_files(rundir, remote)
    begin(rundir, base=None, reason="start")
    asked, content = list[str](), Objects.content

    def counted(store: Objects, key: str, **more: int) -> bytes:
        asked.append(key)
        return content(store, key, **more)

    monkeypatch.setattr(Objects, "content", counted)
    sent, put = list[str](), Objects.put
    monkeypatch.setattr(
        Objects, "put", lambda store, key, content: sent.append(key) or put(store, key, content)
    )
    upload_run_files(rundir, remote)
    assert [key for key in asked if key.startswith("incarnations/")] == ["incarnations/000012.json"]
    assert sent == ["incarnations/000013.json"]
    assert len(remote_incarnations(remote)) == 13


def test_a_run_that_two_machines_went_on_with_apart_is_not_backed_up_to_one_place(
    rundir: RunDirectory, remote: Objects
) -> None:
    for _ in range(3):
        begin(rundir, base=None, reason="start")
    upload_run_files(rundir, remote)
    for number in (2, 3):  # the first is the same
        (rundir.incarnations / f"{number:06d}.json").unlink()
    for _ in range(3):
        begin(rundir, base=None, reason="start on another machine")
    with pytest.raises(CheckpointError, match=r"holds the backups of another run: its incarnations/000003"):
        upload_run_files(rundir, remote)
