"""Fetching: whole, checked, resumed where it broke off, and one share for the life of a run."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.disk_calls import recorded
from tests.range_server import Served, serving

from bloomery import objects
from bloomery.cli.data import run
from bloomery.config.data import DataSection
from bloomery.config.environment import OfflineRefused
from bloomery.data import fetch as fetching
from bloomery.data import remote_files
from bloomery.data.fetch import refuse_incomplete
from bloomery.data.prepare import prepare
from bloomery.data.remote_files import Remote, RemoteFile
from bloomery.errors import DataError, UsageError

NAMES = [f"part-{number}.jsonl" for number in range(6)] + ["deep/one.bin", "deep/one.idx", "empty.txt"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Files of some chunks each, and the list of their checksums."""
    directory, source = tmp_path / "there", random.Random(5)
    for name in NAMES:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"" if "empty" in name else source.randbytes(source.randrange(500, 5000)))
    sums = [f"{hashlib.sha256((directory / name).read_bytes()).hexdigest()}  ./{name}\n" for name in NAMES]
    (directory / "SHA256SUMS").write_text("".join(sums))
    return directory


@pytest.fixture
def server(corpus: Path) -> Iterator[Served]:
    with serving(corpus) as served:
        yield served


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_CHUNK_BYTES", 700)
    monkeypatch.setattr(objects, "_FIRST_PAUSE_S", 0.001)


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
        and path.name not in ("SHA256SUMS", "fetched.json", "fetched-files.jsonl", "fetched.lock")
    }


def fetch(
    capsys: pytest.CaptureFixture[str], address: str, to: Path, *options: str
) -> dict[str, int | list[dict[str, int]]]:
    assert run(["fetch", f"set={address}", "--to", str(to), "--json", *options]) == 0
    found: dict[str, int | list[dict[str, int]]] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("kind", ["http", "list", "file", "directory"])
def test_every_file_comes_whole_and_only_once(
    corpus: Path, server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    address = {
        "http": server.url,
        "list": f"{server.url}/SHA256SUMS",
        "file": corpus.as_uri(),
        "directory": str(corpus),
    }[kind]
    to = tmp_path / "here"
    done = fetch(capsys, address, to)
    assert contents(to / "set") == contents(corpus)
    assert done["fetched_files"] == len(NAMES)
    given = server.given_bytes
    assert fetch(capsys, address, to)["kept_files"] == len(NAMES)
    assert server.given_bytes - given < 2000  # the list again, no file
    record = [json.loads(line) for line in (to / "fetched-files.jsonl").read_text().splitlines()]
    assert {entry["name"]: entry["sha256"] for entry in record} == {
        f"set/{name}": hashlib.sha256(content).hexdigest() for name, content in contents(corpus).items()
    }


def test_a_dry_run_lists_sizes_and_fetches_nothing(
    corpus: Path, server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = fetch(capsys, server.url, tmp_path / "here", "--dry-run", "--include", "part-*")
    sizes = {f"set/{name}": (corpus / name).stat().st_size for name in NAMES if name.startswith("part")}
    assert {one["path"]: one["bytes"] for one in done["files"]} == sizes  # type: ignore[union-attr]
    assert done["bytes"] == sum(sizes.values()) and server.requests == ["/SHA256SUMS"]
    assert not (tmp_path / "here").exists()
    assert run(["fetch", str(corpus), "--to", str(tmp_path / "here"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "there/part-0.jsonl" in said and "--dry-run" in said


def test_connections_that_break_are_tried_again(
    corpus: Path, server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.hang_ups = 5
    fetch(capsys, server.url, tmp_path / "here", "--threads", "3")
    assert contents(tmp_path / "here" / "set") == contents(corpus) and server.hang_ups == 0


def test_a_server_that_is_gone_is_named_and_what_came_is_kept(
    corpus: Path,
    server: Served,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_files, "_PATIENCE_S", 0.1)
    (corpus / "part-3.jsonl").unlink()
    (corpus / "SHA256SUMS").write_text((corpus / "SHA256SUMS").read_text())
    with pytest.raises(DataError, match=rf"Cannot read {server.url}/part-3\.jsonl: .*not found") as refused:
        run(["fetch", f"set={server.url}", "--to", str(tmp_path / "here")])
    assert "goes on" in refused.value.remedy
    with serving(tmp_path) as gone:
        url = gone.url
    with pytest.raises(DataError, match=f"Cannot read {url}/SHA256SUMS"):
        run(["fetch", f"set={url}", "--to", str(tmp_path / "other")])


KILLED = """
import os, signal, sys
from bloomery.cli.data import run
from bloomery.data import fetch
from bloomery.data.fetch import refuse_incomplete
from bloomery.data.prepare import prepare
from bloomery.data.remote_files import Remote, RemoteFile
fetch._CHUNK_BYTES = 700
read, count = Remote.read, [0]
def counted(self, path, *, start, length):
    count[0] += 1
    if count[0] == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    return read(self, path, start=start, length=length)
Remote.read = counted
run(["fetch", "set=" + sys.argv[1], "--to", sys.argv[2], "--threads", "1"])
"""


def test_after_a_kill_no_byte_is_fetched_twice(
    corpus: Path, server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "here"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run([sys.executable, "-c", KILLED, server.url, to], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    done = fetch(capsys, server.url, to)
    assert contents(to / "set") == contents(corpus)
    assert done["kept_files"]
    whole = sum(map(len, contents(corpus).values()))
    lists = 2 * (corpus / "SHA256SUMS").stat().st_size
    lost = 8 * 700  # what a killed process had not yet given to the system: at most its buffers
    assert server.given_bytes <= whole + lists + lost


def test_a_run_does_not_take_a_part_of_what_was_to_be_fetched_for_the_whole(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    to, bring, left = tmp_path / "here", fetching._bring_one, 3

    def broken_off(*arguments: object, **settings: object) -> None:
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        bring(*arguments, **settings)  # type: ignore[arg-type]

    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(fetching, "_bring_one", broken_off)
        fetch(capsys, str(corpus), to, "--threads", "1")
    data = DataSection(sources=(str(to),), sequence_length=16)
    with pytest.raises(DataError, match=rf"holds 3 of the {len(NAMES)} files of share 0 of 1, .* not end"):
        prepare(data, tmp_path / "run")
    fetch(capsys, str(corpus), to)
    refuse_incomplete([to / "set" / "part-0.jsonl"])
    (to / "set" / "part-2.jsonl").write_bytes(b"cut")
    with pytest.raises(DataError, match=r"set/part-2\.jsonl is gone or has another size") as refused:
        refuse_incomplete([to / "set" / "part-0.jsonl"])
    assert "the same `bloomery data fetch`" in refused.value.remedy
    fetch(capsys, str(corpus), to)
    refuse_incomplete([to / "set" / "part-0.jsonl"])


def test_what_comes_with_another_checksum_is_not_kept(
    corpus: Path, server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sums = (corpus / "SHA256SUMS").read_text()
    right = hashlib.sha256((corpus / "part-2.jsonl").read_bytes()).hexdigest()
    (corpus / "SHA256SUMS").write_text(sums.replace(right, "0" * 64))
    with pytest.raises(DataError, match=r"part-2\.jsonl came with the checksum .* its list says 0000"):
        run(["fetch", f"set={server.url}", "--to", str(tmp_path / "here")])
    assert not list((tmp_path / "here" / "set").glob("part-2*"))
    (corpus / "SHA256SUMS").write_text(sums)
    fetch(capsys, server.url, tmp_path / "here")
    assert contents(tmp_path / "here" / "set") == contents(corpus)


def test_a_file_that_changed_there_is_fetched_again(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (corpus / "SHA256SUMS").unlink()
    fetch(capsys, str(corpus), tmp_path / "here")
    (corpus / "part-1.jsonl").write_bytes(b"other")
    again = fetch(capsys, str(corpus), tmp_path / "here")
    assert (again["fetched_files"], again["kept_files"]) == (1, len(contents(corpus)) - 1)
    assert contents(tmp_path / "here" / "set") == contents(corpus)


def test_another_share_is_refused_until_it_is_fetched_anew(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to, seen = tmp_path / "here", {}
    for share in range(2):
        fetch(capsys, str(corpus), tmp_path / f"share{share}", "--shares", "2", "--share", str(share))
        seen |= contents(tmp_path / f"share{share}" / "set")
    assert seen == contents(corpus)
    first = fetch(capsys, str(corpus), to, "--shares", "2", "--share", "0")
    for other in (["--shares", "3", "--share", "0"], ["--shares", "2", "--share", "1"], ["--seed", "4"]):
        with pytest.raises(DataError, match="holds another share or selection") as refused:
            run(["fetch", f"set={corpus}", "--to", str(to), *other])
        assert "--anew" in refused.value.remedy
    assert fetch(capsys, str(corpus), to, "--shares", "2", "--share", "0")["fetched_files"] == 0
    done = fetch(capsys, str(corpus), to, "--shares", "2", "--share", "1", "--anew")
    assert contents(to / "set") == contents(tmp_path / "share1" / "set")
    assert done["removed_files"] == first["fetched_files"]


def test_a_bucket_is_fetched_and_one_that_is_not_there_is_named(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import obstore
    from obstore.store import S3Store
    from tests.checkpoint.object_store import serving as serving_objects

    with serving_objects() as store_of_objects:
        address = f"{store_of_objects.new_bucket()}/some/corpus"
        store = S3Store.from_url(address, client_options={"allow_http": True})
        for name, content in (contents(corpus) | {"SHA256SUMS": b""}).items():
            obstore.put(store, name, content)
        done = fetch(capsys, address, tmp_path / "here", "--include", "part-*")
        assert done["fetched_files"] == 6
        assert contents(tmp_path / "here" / "set").items() <= contents(corpus).items()
        monkeypatch.setattr(remote_files, "_PATIENCE_S", 0.1)
        with pytest.raises(DataError, match="Cannot read s3://no-such-bucket"):
            run(["fetch", "s3://no-such-bucket/corpus", "--to", str(tmp_path / "other")])


def test_what_is_wrong_with_the_addresses_is_said(
    corpus: Path, server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = ["--to", str(tmp_path / "here")]
    for arguments, said in (
        ([str(tmp_path / "none")], r"Cannot (open|read) .*none"),
        (["ftp://host/x"], "Cannot open ftp://host/x"),
        ([f"{server.url}/deep"], "has no SHA256SUMS"),
        ([str(corpus), str(corpus)], "no name of its own"),
        ([str(corpus), "--ratio", "there"], "not NAME=PART"),
    ):
        with pytest.raises((DataError, UsageError), match=said) as refused:
            run(["fetch", *arguments, *to])
        assert refused.value.remedy
    (corpus / "SHA256SUMS").write_text("0" * 64 + "  ../../etc/passwd\n")
    with pytest.raises(DataError, match="SHA256SUMS:1 is not a checksum and a path below"):
        run(["fetch", server.url, *to])
    monkeypatch.setenv("BLOOMERY_OFFLINE", "1")
    with pytest.raises(OfflineRefused, match=f"needed to read {server.url}"):
        run(["fetch", server.url, *to])
    Remote(str(corpus))  # a directory needs no network


@pytest.mark.parametrize(
    "url",
    ["https://user:s3cret@host.example/c", "https://host.example/c?sig=s3cret", "s3://k:s3cret@bucket/c"],
)
def test_credentials_in_an_address_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(DataError, match="holds credentials") as refused:
        Remote(url)
    assert "s3cret" not in str(refused.value)


def test_each_file_and_its_name_are_on_the_disk_before_the_record_says_that_it_is_here(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "here"
    with recorded() as calls:
        fetch(capsys, corpus.as_uri(), to, "--threads", "1")
    lines = (to / "fetched-files.jsonl").read_text().splitlines()
    records = [
        number for number, call in enumerate(calls.paths) if call == ("sync", to / "fetched-files.jsonl")
    ]
    assert len(lines) == len(records) >= len(NAMES)
    for line, record in zip(lines, records, strict=True):
        path = to / json.loads(line)["name"]
        named = calls.paths.index(("rename", path))
        data = next(
            number
            for number, (call, one) in enumerate(calls.paths)
            if call == "sync" and one.name.startswith(f"{path.name}.")
        )
        directory = calls.paths.index(("sync", path.parent), named)
        assert data < named < directory < record


@pytest.mark.parametrize(
    "address",
    [
        "https://me@there/set",
        "https://:secret@there/set",
        "s3://key:secret@there/set",
        "https://there/set?token=secret",
    ],
)
def test_an_address_with_credentials_is_refused_and_not_repeated(address: str) -> None:
    with pytest.raises(DataError, match="holds credentials") as refused:
        Remote(address)
    assert "secret" not in f"{refused.value.message} {refused.value.remedy}"


def test_what_an_address_lacks_is_told_with_its_place(corpus: Path) -> None:
    remote = Remote(str(corpus))
    assert remote.size("deep/one.bin") == (corpus / "deep" / "one.bin").stat().st_size
    whole = (corpus / "part-0.jsonl").read_bytes()
    assert remote.read("part-0.jsonl", start=3, length=90) == whole[3:93]
    for asked in (lambda: remote.read("none.bin", start=0, length=1), lambda: remote.size("none.bin")):
        with pytest.raises(DataError, match=r"Cannot read .*none\.bin"):
            asked()
    with pytest.raises(DataError, match="nowhere does not exist"):
        Remote(str(corpus / "nowhere"))


@pytest.mark.parametrize(
    ("line", "is_taken"),
    [
        (f"{'a' * 64}  part-0.jsonl", True),
        (f"{'A' * 64} *./part-0.jsonl", True),
        (f"{'a' * 63}  part-0.jsonl", False),
        (f"{'a' * 64}  ../part-0.jsonl", False),
        (f"{'a' * 64}  deep/../../part-0.jsonl", False),
        (f"{'a' * 64}  /part-0.jsonl", False),
        (f"{'a' * 64}  ", False),
    ],
)
def test_a_list_of_checksums_names_files_below_it_alone(corpus: Path, line: str, is_taken: bool) -> None:
    (corpus / "SHA256SUMS").write_text(line + "\n")
    if is_taken:
        (first,) = [file for file in Remote(str(corpus)).files() if file.path == "part-0.jsonl"]
        assert first.sha256 == "a" * 64
    else:
        with pytest.raises(DataError, match="SHA256SUMS:1 is not a checksum and a path below"):
            Remote(str(corpus)).files()


def test_a_file_that_another_share_had_and_that_is_gone_is_no_obstacle(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "here"
    fetch(capsys, str(corpus), to, "--include", "part-*")
    (to / "set" / "part-0.jsonl").unlink()
    done = fetch(capsys, str(corpus), to, "--include", "part-5*", "--anew")
    assert (done["removed_files"], done["kept_files"], done["fetched_files"]) == (5, 1, 0)
    assert list(contents(to / "set")) == ["part-5.jsonl"]


@pytest.mark.parametrize(
    ("changed", "is_whole"), [("", True), ("size", False), ("gone", False), ("record", False)]
)
def test_a_directory_is_whole_where_each_recorded_file_is_there_with_its_size(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: str, is_whole: bool
) -> None:
    to = tmp_path / "here"
    fetch(capsys, str(corpus), to)
    file = to / "set" / "part-3.jsonl"
    if changed == "size":
        file.write_bytes(file.read_bytes()[:-1])
    elif changed == "gone":
        file.unlink()
    elif changed == "record":
        lines = (to / "fetched-files.jsonl").read_text().splitlines(keepends=True)
        (to / "fetched-files.jsonl").write_text("".join(lines[:-1]) + lines[-1][:20])
    if is_whole:
        refuse_incomplete([to / "set" / "deep" / "one.bin"])
    else:
        with pytest.raises(DataError, match=f"holds {len(NAMES) - 1} of the {len(NAMES)} files"):
            refuse_incomplete([to / "set" / "deep" / "one.bin"])
        given = fetch(capsys, str(corpus), to)
        assert given["fetched_files"] == 1 and contents(to / "set") == contents(corpus)


def test_a_file_that_became_shorter_since_it_was_listed_is_told_as_that(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, size = Remote.files, (corpus / NAMES[0]).stat().st_size

    def shortened(remote: Remote) -> list[RemoteFile]:
        found = listed(remote)
        os.truncate(corpus / NAMES[0], 0)
        return found

    monkeypatch.setattr(Remote, "files", shortened)
    monkeypatch.setattr(objects.time, "sleep", lambda seconds: pytest.fail("it was asked again"))
    said = rf"{NAMES[0]} ended at byte 0 of {size:,}(?s:.*)changed while it was fetched"
    with pytest.raises(DataError, match=said):
        run(["fetch", f"set={corpus}", "--to", str(tmp_path / "here")])
