"""What addresses of datasets list, which files go together, and how the Hub's refusals are told."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from tests.data.hub_mirror import COMMIT, mirror

from bloomery.cli import data_fetch
from bloomery.config.data import DatasetSection
from bloomery.config.environment import OfflineRefused
from bloomery.config.setting import declaration_of
from bloomery.data import hub_dataset, remote_files
from bloomery.data.hub_dataset import HubDataset
from bloomery.data.remote_files import FetchRequest, Remote, RemoteFile, Shard, plan_share, shard_numbers
from bloomery.errors import DataError, StorageError
from bloomery.objects import ObjectEntry, ObjectStat

SUM = "ab" * 32


class Objects:
    """Objects of a dictionary; what is asked of them is noted."""

    def __init__(self, url: str, *, patience_s: float, create: bool) -> None:
        self.asked: list[tuple[Any, ...]] = [(url, patience_s, create)]
        self.contents: dict[str, bytes] = {}

    def entries(self) -> list[ObjectEntry]:
        self.asked.append(("entries",))
        return [ObjectEntry(key=key, stat=self.stat(key)) for key in self.contents]

    def stat(self, key: str) -> ObjectStat:
        self.asked.append(("stat", key))
        return ObjectStat(bytes=len(self.content(key)), mark=f'"{key}"')

    def content(self, key: str, *, begin: int = 0, end: int | None = None) -> bytes:
        if key not in self.contents:
            raise FileNotFoundError(2, f"{key} does not exist: not found")
        return self.contents[key][begin:end]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Remote, Objects]]:
    monkeypatch.setattr(remote_files, "Objects", Objects)

    def open_at(url: str, **contents: bytes) -> tuple[Remote, Objects]:
        remote = Remote(url)
        objects: Any = remote._objects
        objects.contents = {
            "SHA256SUMS" if key == "sums" else key: content for key, content in contents.items()
        }
        return remote, objects

    return open_at


def file(path: str, size: int, *, sha256: str = "") -> RemoteFile:
    return RemoteFile(path=path, size_bytes=size, sha256=sha256, version=f'"{path}"')


def test_a_bucket_lists_its_objects_with_the_checksums_that_it_has(
    opened: Callable[..., tuple[Remote, Objects]],
) -> None:
    remote, objects = opened("s3://b/set/", a=b"123", b=b"", sums=f"{SUM.upper()} *./a\n".encode())
    assert objects.asked == [("s3://b/set", 120.0, False)] and remote.url == "s3://b/set/"
    assert remote.files() == [file("a", 3, sha256=SUM), file("b", 0)]
    assert remote.read("a", start=1, length=1) == b"2" and remote.size("a") == 3
    plain, _ = opened("gs://b/set", a=b"123")
    assert plain.files() == [file("a", 3)]
    for asked in (lambda: remote.size("none"), lambda: remote.read("none", start=0, length=1)):
        with pytest.raises(DataError) as refused:
            asked()
        said = "Cannot read s3://b/set/none: none does not exist: not found."
        assert refused.value.message == said and "goes on" in refused.value.remedy


def test_a_directory_may_be_given_from_home_or_from_where_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a.txt").write_bytes(b"123")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for address in ("~/there", "there"):
        remote = Remote(address)
        assert remote.url == address and [one.path for one in remote.files()] == ["a.txt"]


@pytest.mark.parametrize("address", ["https://h/set", "http://h/set/", "https://h/set/SHA256SUMS"])
def test_over_http_the_list_of_checksums_is_the_list_of_files(
    opened: Callable[..., tuple[Remote, Objects]], address: str
) -> None:
    sums = f"{SUM}  b\n{SUM[::-1]}  a\n".encode()
    remote, objects = opened(address, a=b"123", b=b"4", other=b"5", sums=sums)
    assert objects.asked[0][0] == f"{address.partition(':')[0]}://h/set"
    assert remote.files() == [file("a", 3, sha256=SUM[::-1]), file("b", 1, sha256=SUM)]
    assert ("entries",) not in objects.asked
    objects.contents["SHA256SUMS"] += f"{SUM}  ./SHA256SUMS\n".encode()  # made again where an older one lay
    assert [found.path for found in remote.files()] == ["a", "b"]
    del objects.contents["SHA256SUMS"]
    with pytest.raises(
        DataError, match=r"://h/set has no SHA256SUMS, and over http\(s\) nothing else lists"
    ) as refused:
        remote.files()
    assert refused.value.remedy == "Make one there: find . -type f | xargs sha256sum > SHA256SUMS"


def test_a_line_that_is_no_checksum_is_told_with_its_number(
    opened: Callable[..., tuple[Remote, Objects]],
) -> None:
    remote, _ = opened("s3://b", sums=f"{SUM}  a\nno sum of {'x' * 90}\n".encode(), a=b"")
    with pytest.raises(DataError) as refused:
        remote.files()
    shown = repr(f"no sum of {'x' * 70}")
    assert refused.value.message == f"s3://b/SHA256SUMS:2 is not a checksum and a path below: {shown}."


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "http", "https", "file"])
def test_addresses_of_every_known_kind_are_opened_and_others_are_not(
    opened: Callable[..., tuple[Remote, Objects]], monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    opened(f"{scheme}://b/x")
    with pytest.raises(DataError, match=r"Cannot open ftp://b/x: no such kind of address\."):
        opened("ftp://b/x")
    with pytest.raises(DataError, match=rf"Cannot open {scheme}://\[b/x: Invalid IPv6 URL\."):
        opened(f"{scheme}://[b/x")

    def refused(*_: object, **__: object) -> None:
        raise StorageError("it is no bucket", remedy="")

    monkeypatch.setattr(remote_files, "Objects", refused)
    with pytest.raises(DataError) as told:
        Remote(f"{scheme}://b/x")
    assert told.value.message == f"Cannot open {scheme}://b/x: it is no bucket."
    kinds = "s3://, gs://, az://, http://, https://, file:// or a directory"
    assert told.value.remedy == f"Give an address with {kinds}."


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "http(s)", "file"])
def test_every_known_kind_of_address_is_named_where_people_look(scheme: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    fetch = next(line for line in page.splitlines() if line.startswith("Sources are"))
    dataset = next(line for line in page.splitlines() if line.startswith("A dataset's `path`"))
    assert f"`{scheme}://`" in fetch and f"`{scheme}://`" in dataset
    (path,) = (field for field in fields(DatasetSection) if field.name == "path")
    assert f"{scheme}://" in declaration_of(path).help and f"{scheme}://" in data_fetch._ABOUT


def plain(*names: str, size: int = 10) -> list[RemoteFile]:
    return [file(name, size) for name in names]


def planned(files: list[RemoteFile], **wanted: Any) -> dict[str, list[str]]:
    shards = plan_share({"a": files}, FetchRequest(**{"ratios": {}, **wanted}))
    return {shard.name: [one.path for one in shard.files] for shard in shards}


def test_the_four_files_of_a_pair_are_one_shard_of_its_name() -> None:
    names = [f"deep/x{ending}" for ending in (".bin", ".idx", ".seal.json", ".seal.sums")]
    assert planned(plain(*names, "y.bin", "y.seal.json", "z.txt")) == {
        "deep/x": names,
        "y.bin": ["y.bin"],
        "y.seal.json": ["y.seal.json"],
        "z.txt": ["z.txt"],
    }
    shard = Shard(dataset="a", name="deep/x", files=tuple(plain(*names, size=7)))
    assert shard.size_bytes == 28


@pytest.mark.parametrize(
    ("wanted", "kept"),
    [
        ({}, {"x", "y.txt", "z.md"}),
        ({"include": ("x",)}, {"x"}),  # by its name
        ({"include": ("*.idx",)}, {"x"}),  # by that of one of its files, and then it is whole
        ({"include": ("*.txt", "*.md")}, {"y.txt", "z.md"}),
        ({"exclude": ("*.bin",)}, {"y.txt", "z.md"}),
        ({"include": ("*",), "exclude": ("y*", "x")}, {"z.md"}),
    ],
)
def test_filters_take_and_leave_whole_shards(wanted: dict[str, Any], kept: set[str]) -> None:
    assert set(planned(plain("x.bin", "x.idx", "y.txt", "z.md"), **wanted)) == kept


def test_shares_take_every_nth_place_of_the_shuffled_shards() -> None:
    whole = shard_numbers(share=0, shares=1, count=10, seed=3, dataset=1)
    assert sorted(whole) == list(range(10))
    for share in range(3):
        part = shard_numbers(share=share, shares=3, count=10, seed=3, dataset=1)
        assert part == whole[share::3]
    assert shard_numbers(share=0, shares=1, count=10, seed=3, dataset=2) != whole
    assert shard_numbers(share=2, shares=3, count=2, seed=3, dataset=1) == []
    assert shard_numbers(share=0, shares=1, count=0, seed=3, dataset=1) == []
    datasets = {"b": plain(*map(str, range(10))), "a": plain("x")}
    names = [shard.name for shard in plan_share(datasets, FetchRequest(seed=3, ratios={}))]
    assert names == ["x", *(str(number) for number in whole)]  # sorted by the dataset's name
    limited = plan_share(datasets, FetchRequest(seed=3, ratios={}, limit=2))
    assert [shard.name for shard in limited] == names[:3]


@pytest.mark.parametrize(
    ("ratios", "counts"),
    [({"a": 1.0, "b": 1.0}, (4, 4)), ({"a": 4.0, "b": 2.0}, (4, 2)), ({"a": 1.0, "b": 4.0}, (3, 10))],
)
def test_a_dataset_gives_as_many_shards_as_its_part_of_the_bytes_takes(
    ratios: dict[str, float], counts: tuple[int, int]
) -> None:
    datasets = {"a": plain(*"abcd"), "b": plain(*"0123456789")}
    shards = plan_share(datasets, FetchRequest(ratios=ratios))
    assert tuple(sum(shard.dataset == name for shard in shards) for name in "ab") == counts


def test_what_ratios_cannot_be_is_told_with_its_values() -> None:
    datasets = {"a": plain("x"), "b": plain("y")}
    for ratios, said in (
        ({"a": 1.0}, "Ratios and datasets differ: b."),
        ({"a": 1.0, "b": 1.0, "c": 2.0}, "Ratios and datasets differ: c."),
        ({"a": 1.0, "b": float("nan")}, "The ratios {'a': 1.0, 'b': nan} are not all above 0."),
    ):
        with pytest.raises(DataError) as refused:
            plan_share(datasets, FetchRequest(ratios=ratios))
        assert refused.value.message == said


def test_the_hub_lists_files_of_one_commit_with_their_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {"en/b.jsonl": b"22", "README.md": b"1", "en/a.jsonl": b""}
    with mirror(contents) as serving:
        monkeypatch.setenv("HF_ENDPOINT", serving.endpoint)
        dataset = HubDataset("owner/texts")
        assert dataset.url == "hf:owner/texts"
        assert dataset.files() == [
            RemoteFile(
                path=path,
                size_bytes=len(contents[path]),
                sha256="" if path.endswith(".md") else hashlib.sha256(contents[path]).hexdigest(),
                version=hashlib.sha1(contents[path]).hexdigest(),
            )
            for path in sorted(contents)
        ]
        HubDataset(f"owner/texts@{COMMIT}:/en/").files()
        listed = [path.partition("?")[0] for path, _ in serving.asked if "/tree/" in path]
        assert listed[2].endswith(f"/tree/{COMMIT}/en") and listed[0].endswith(f"/tree/{COMMIT}")
        revisions = [path.partition("?")[0].rpartition("/")[2] for path, _ in serving.asked if "/rev" in path]
        assert revisions == ["main", COMMIT]


def test_files_in_all_folders_of_the_hub_are_listed_by_their_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.hf_api import RepoFile, RepoFolder

    asked: list[dict[str, object]] = []

    def tree(*place: object, **how: object) -> list[RepoFile | RepoFolder]:
        asked.append(how)
        files = [RepoFile(path=path, size=1, oid=path) for path in ("b/c", "a", "b/a")]
        return [*files, RepoFolder(path="b", oid="b")]

    api = SimpleNamespace(dataset_info=lambda *_, revision: SimpleNamespace(sha=COMMIT), list_repo_tree=tree)
    monkeypatch.setattr(HubDataset, "_api", lambda self: api)
    assert [file.path for file in HubDataset("a/b").files()] == ["a", "b/a", "b/c"]
    assert asked == [{"recursive": True, "revision": COMMIT, "repo_type": "dataset"}]
    monkeypatch.setenv("HF_ENDPOINT", "")
    assert HubDataset("a/b")._endpoint() is None, "an empty address is none"


@pytest.mark.parametrize(
    ("address", "name", "revision", "folder"),
    [
        ("a/b", "a/b", "main", ""),
        ("a.x-1/b_2@v1/x", "a.x-1/b_2", "v1/x", ""),
        ("a/b:x y/z/", "a/b", "main", "x y/z"),
        ("a/b@r:f", "a/b", "r", "f"),
    ],
)
def test_an_address_of_the_hub_is_taken_apart(address: str, name: str, revision: str, folder: str) -> None:
    dataset = HubDataset(address)
    assert (dataset._name, dataset._revision, dataset._folder) == (name, revision, folder)


@pytest.mark.parametrize("address", ["a", "a/b/c", "a/b@", "a/b:", "a/b\n", "ä/b", "/b", "a/" + "b" * 97])
def test_what_is_no_address_of_the_hub_is_told_with_how_one_is_written(address: str) -> None:
    with pytest.raises(DataError) as refused:
        HubDataset(address)
    assert refused.value.message == f"hf:{address} is no dataset of the Hub."
    assert refused.value.remedy.startswith("Write hf:OWNER/NAME, hf:OWNER/NAME@REVISION or")


def refusal(kind: type[Exception], status: int) -> Exception:
    response = httpx2.Response(status, request=httpx2.Request("GET", "https://hub/x"))
    return kind("the hub\n  says no sig=abc " + "x" * 400, response=response)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("status", "remedy"),
    [(401, "Set HF_TOKEN"), (403, "Set HF_TOKEN"), (404, "Set HF_TOKEN"), (500, "Try it"), (429, "Try it")],
)
def test_a_refusal_of_the_hub_is_one_line_without_secrets(status: int, remedy: str) -> None:
    from huggingface_hub.errors import HfHubHTTPError

    dataset = HubDataset("a/b")
    with pytest.raises(DataError) as told, dataset._told("list"):
        raise refusal(HfHubHTTPError, status)
    line = told.value.message.removeprefix("Cannot list hf:a/b: ")
    assert line.startswith("the hub says no sig=*** xxx") and len(line) == 300
    assert told.value.remedy.startswith(remedy)


@pytest.mark.parametrize(
    "error", [OSError("no route"), ValueError("no json"), KeyError("sha"), RuntimeError("x")]
)
def test_what_goes_wrong_on_the_way_to_the_hub_is_told_as_such(error: Exception) -> None:
    with pytest.raises(DataError) as told, HubDataset("a/b")._told("read x of"):
        raise error
    assert told.value.message == f"Cannot read x of hf:a/b: {error}."
    assert told.value.remedy == "Is the Hub reachable from here (HF_ENDPOINT)?"
    with (
        pytest.raises(DataError, match=r"no route to x\?sig=\*\*\* yy") as told,
        HubDataset("a/b")._told("list"),
    ):
        raise OSError("no\n route to x?sig=abc " + "y" * 400)
    assert len(told.value.message) < 350
    with pytest.raises(ZeroDivisionError), HubDataset("a/b")._told("list"):
        raise ZeroDivisionError


@pytest.mark.parametrize("path", ["", "/x", "a/../b", "..", "a\\b", "a\0b"])
def test_a_path_that_leads_elsewhere_is_refused(path: str) -> None:
    with pytest.raises(DataError, match="which would lie outside of the directory"):
        HubDataset("a/b")._checked(path)
    assert HubDataset("a/b")._checked("a..b/c") == "a..b/c"


def test_a_dataset_of_the_hub_is_refused_where_the_network_is_forbidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BLOOMERY_OFFLINE", "1")
    with pytest.raises(OfflineRefused, match="needed to read hf:a/b"):
        HubDataset("a/b")


def test_the_loud_library_of_the_hub_is_made_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[tuple[str, int]] = []
    fake = SimpleNamespace(
        getLogger=lambda name: SimpleNamespace(setLevel=lambda level: levels.append((name, level))),
        WARNING=30,
    )
    monkeypatch.setattr(hub_dataset, "logging", fake)
    HubDataset("a/b")
    assert levels == [("httpx2", 30)]
