"""The texts of a checkpoint, its sources and boxes, byte by byte and value by value."""

from __future__ import annotations

import errno
import gc
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash

from bloomery.checkpoint.format import manifest, source
from bloomery.checkpoint.format.manifest import (
    FILE_NAME,
    DamagedCheckpoint,
    FileRecord,
    IndexedBox,
    Manifest,
    checked_manifest,
    checkpoint_name,
    index_bytes,
    manifest_text,
    parse_name,
    read_index,
    read_manifest,
    unreadable,
    without_garbage_collection,
)
from bloomery.checkpoint.format.source import STORED_AT, RemoteCheckpoint, StoredCheckpoint, source_of
from bloomery.checkpoint.format.state import Box, StateEntry, collect, whole
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.config.environment import OfflineRefused
from bloomery.errors import CheckpointError, StorageError
from bloomery.objects import Objects, StoreUnreachable

FACTS: dict[str, Any] = {"step": 3, "incarnation": 2, "time": 5.25, "world": 4}


def boxed(name: str, offset: int, begin: int, *, file: str = "f") -> IndexedBox:
    return IndexedBox(
        name=name,
        dtype="int8",
        global_shape=(4,),
        offset=(offset,),
        shape=(2,),
        scope="peer",
        file=file,
        begin=begin,
        end=begin + 2,
    )


def test_an_index_has_its_boxes_by_name_and_place_and_its_files_with_their_blocks() -> None:
    files = [FileRecord(name=name, bytes=8, xxh3_128="ab", blocks="cd" * 8) for name in "fe"]
    boxes = [boxed("b", 0, 4), boxed("a", 2, 2), boxed("a", 0, 0)]
    text = index_bytes(boxes, files)
    expected = {
        "format": "bloomery-checkpoint",
        "version": 1,
        "block_bytes": 1048576,
        "files": {name: {"bytes": 8, "blocks": "cd" * 8} for name in "fe"},
        "boxes": [
            {
                **{"name": name, "dtype": "int8", "global_shape": [4], "offset": [offset], "shape": [2]},
                **{"scope": "peer", "file": "f", "begin": begin, "end": begin + 2},
            }
            for name, offset, begin in (("a", 0, 0), ("a", 2, 2), ("b", 0, 4))
        ],
    }
    assert text == json.dumps(expected, separators=(",", ":")).encode()
    assert json.loads(index_bytes([], [])) == {**expected, "files": {}, "boxes": []}


def test_a_manifest_is_read_as_it_was_written_and_its_hash_is_of_all_else(tmp_path: Path) -> None:
    record = FileRecord(name="f", bytes=8, xxh3_128="ab", blocks="")
    made = Manifest(
        **FACTS,
        about={"told": "ö"},
        values={"b": {"x": 1}},
        files=(record,),
        index_bytes=9,
        index_xxh3_128="c",
    )
    text = manifest_text(made)
    content = json.loads(text)
    assert list(content)[-1] == "manifest_xxh3_128" and "ö" in text and text.endswith("}\n")
    digest = content.pop("manifest_xxh3_128")
    assert content == {
        **FACTS,
        "format": "bloomery-checkpoint",
        "version": 1,
        "about": {"told": "ö"},
        "values": {"b": {"x": 1}},
        "files": [{"name": "f", "bytes": 8, "xxh3_128": "ab"}],
        "index_bytes": 9,
        "index_xxh3_128": "c",
    }
    plain = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert digest == xxhash.xxh3_128_hexdigest(plain.encode())
    (tmp_path / "manifest.json").write_text(text, encoding="utf-8")
    assert read_manifest(tmp_path) == made and made.bytes == 17
    for change, said in (
        ({"version": 2}, "has format version 2; this bloomery reads version 1"),
        ({"format": "other"}, "has format version 1"),
    ):
        changed = {**content, **change}
        plain = json.dumps(changed, sort_keys=True, separators=(",", ":"))
        changed["manifest_xxh3_128"] = xxhash.xxh3_128_hexdigest(plain.encode())
        (tmp_path / "manifest.json").write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=said):
            read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is not the manifest of a bloomery checkpoint"):
        read_manifest(tmp_path)
    for odd in ("5", "[]"):
        (tmp_path / "manifest.json").write_text(odd)
        with pytest.raises(CheckpointError, match="is not the manifest"):
            read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json is damaged"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"is not a finished checkpoint: it has no manifest.json(?s:.*)ckpt list"
    ):
        read_manifest(tmp_path)


def test_sizes_of_a_manifest_may_be_nothing_and_no_less(tmp_path: Path) -> None:
    record = FileRecord(name="f", bytes=0, xxh3_128="", blocks="")
    made = Manifest(**FACTS, about={}, values={}, files=(record,), index_bytes=0)
    assert checked_manifest(made) is made
    assert checked_manifest(replace(made, index_bytes=64 << 30)).index_bytes == 64 << 30
    saved = save_checkpoint(tmp_path, [whole("model.a", torch.ones(3))], step=3, incarnation=1)
    read_index(saved, read_manifest(saved))
    with (saved / "index.json").open("ab") as file:
        file.write(b" ")
    with pytest.raises(DamagedCheckpoint, match=r"index.json is damaged: it does not have the hash"):
        read_index(saved, read_manifest(saved))


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("step-000012.i003", (12, 3)),
        ("step-1234567.i1234", (1234567, 1234)),
        ("step-12345.i003", None),
        ("step-000012.i03", None),
        ("step-000012.i003.partial", None),
        ("a/step-000012.i003", None),
        ("step-000012-i003", None),
    ],
)
def test_a_name_says_step_and_incarnation_or_is_no_checkpoints(
    name: str, parsed: tuple[int, int] | None
) -> None:
    assert parse_name(name) == parsed
    if parsed is not None:
        assert checkpoint_name(*parsed) == name


def test_a_data_file_has_a_plain_name() -> None:
    for name, is_plain in (("a-b_c.0", True), ("_a", True), (".a", False), ("-a", False), ("a b", False)):
        assert bool(FILE_NAME.fullmatch(name)) is is_plain


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (OSError(errno.EIO, "Input/output error"), DamagedCheckpoint, "there cannot be read: Input/output"),
        (FileNotFoundError(errno.ENOENT, "No such file"), DamagedCheckpoint, "there is missing"),
        (StoreUnreachable(errno.EIO, "no answer"), StorageError, "Reading a checkpoint"),
        *(
            (OSError(number, "refused"), StorageError, "Reading a checkpoint")
            for number in (
                *(errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR),
                *(errno.EAGAIN, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNRESET),
                *(errno.ECONNREFUSED, errno.ECONNABORTED, errno.EHOSTDOWN, errno.EHOSTUNREACH),
                *(errno.ENETDOWN, errno.ENETUNREACH),
            )
        ),
    ],
)
def test_only_what_the_disk_lost_is_damage(error: OSError, kind: type[Exception], said: str) -> None:
    found = unreadable("there", error)
    assert type(found) is kind and said in str(found)
    if kind is DamagedCheckpoint and not isinstance(error, FileNotFoundError):
        assert unreadable("there", error, what="the block is gone").message == "the block is gone"
        assert "--fallback" in found.remedy


def test_the_time_of_a_save_is_to_the_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "time", SimpleNamespace(time=lambda: 1234.56789))
    assert manifest.now() == 1234.568


def test_the_search_for_garbage_is_as_it_was_afterwards() -> None:
    assert gc.isenabled()
    with pytest.raises(RuntimeError), without_garbage_collection():
        assert not gc.isenabled()
        with without_garbage_collection():
            pass
        assert not gc.isenabled(), "it was off around the inner block"
        raise RuntimeError
    assert gc.isenabled()


class Asked:
    """A stand-in for a store that notes what it is asked for."""

    url = "s3://b/run"

    def __init__(self) -> None:
        self.log: list[tuple[object, ...]] = []

    def place(self, key: str) -> str:
        return f"{self.url}/{key}"

    def stat(self, key: str) -> Any:
        self.log.append(("stat", key))
        return SimpleNamespace(bytes=10, mark="etag")

    def content(self, key: str, *, end: int) -> bytes:
        self.log.append(("content", key, end))
        return b"0123456789"[:end]

    def pieces(self, key: str, *, begin: int, end: int, mark: str) -> list[memoryview]:
        self.log.append(("pieces", key, begin, end, mark))
        data = memoryview(b"0123456789")[begin:end]
        return [data[:3], data[3:]]


def test_ranges_of_a_remote_file_are_of_one_version_and_end_with_it() -> None:
    store: Any = Asked()
    there = RemoteCheckpoint(store, "/checkpoints/step-000003.i001/", is_marked=True)
    assert (there.name, there.is_marked) == ("step-000003.i001", True)
    assert RemoteCheckpoint(store, "").name == "run" and not RemoteCheckpoint(store, "").is_marked
    key = "checkpoints/step-000003.i001"
    assert there.place() == f"s3://b/run/{key}" and there.place("f") == f"s3://b/run/{key}/f"
    assert there.size("f") == 10 and there.content("f", at_most=4) == b"0123"
    assert there.content("f", at_most=40) == b"0123456789"
    view = bytearray(9)
    with there.open("f") as file:
        assert file.window_bytes == 32 << 20
        views = [memoryview(view)[:0], memoryview(view)[:4], memoryview(view)[4:]]
        assert file.read_into(views, begin=6) == 4
        assert bytes(view) == b"6789" + bytes(5)
        assert file.read_into([memoryview(view)], begin=0) == 9 and bytes(view) == b"012345678"
    assert store.log == [
        *[("stat", f"{key}/f")] * 2,
        ("content", f"{key}/f", 4),
        ("stat", f"{key}/f"),
        ("content", f"{key}/f", 10),
        ("stat", f"{key}/f"),
        ("pieces", f"{key}/f", 6, 10, "etag"),
        ("pieces", f"{key}/f", 0, 9, "etag"),
    ]


def test_of_a_checkpoint_elsewhere_only_the_manifest_and_the_mark_are_read_here(tmp_path: Path) -> None:
    there = Objects(f"file://{tmp_path}/store")
    for name in ("manifest.json", "index.json", "suspect.json", "f"):
        there.put(name, b"there")
    entry = tmp_path / "step-000003.i001"
    entry.mkdir()
    for name in ("manifest.json", "suspect.json", "index.json", "f"):
        (entry / name).write_bytes(b"here!!")
    (entry / STORED_AT).write_text(json.dumps({"url": there.url}))
    found = source_of(entry)
    assert isinstance(found, StoredCheckpoint) and found.name == entry.name
    contents = {name: found.content(name, at_most=4) for name in ("manifest.json", "suspect.json")}
    assert contents == {"manifest.json": b"here", "suspect.json": b"here"}
    assert found.content("index.json", at_most=9) == b"there" == found.content("f", at_most=9)
    assert found.size("manifest.json") == 5 and found.place("f") == f"{there.url}/f"
    view = bytearray(5)
    with found.open("f") as file:
        assert file.read_into([memoryview(view)], begin=0) == 5
    assert bytes(view) == b"there"
    assert source.stored_url(entry) == there.url


def test_what_the_entry_of_a_checkpoint_elsewhere_says_needs_no_store_and_makes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = tmp_path / "step-000003.i001"
    entry.mkdir()
    (entry / "manifest.json").write_bytes(b"here")
    for url, refusal in [(f"file://{tmp_path}/unmounted", StorageError), ("s3://bucket/x", OfflineRefused)]:
        (entry / STORED_AT).write_text(json.dumps({"url": url}))
        monkeypatch.setenv("BLOOMERY_OFFLINE", "1")
        found = source_of(entry)
        assert found.content("manifest.json", at_most=9) == b"here" and found.place("f") == f"{url}/f"
        with pytest.raises(refusal):
            found.size("f")
    assert list(tmp_path.iterdir()) == [entry]


def test_boxes_have_sizes_windows_and_common_parts() -> None:
    box = Box((1, 2), (3, 4))
    assert box.size == 12 and box.window == (slice(1, 4), slice(2, 6))
    assert box.intersection(Box((3, 0), (5, 3))) == Box((3, 2), (1, 1))
    for apart in (Box((4, 2), (1, 1)), Box((1, 6), (1, 1)), Box((0, 0), (1, 9)), Box((1, 2), (0, 4))):
        assert box.intersection(apart) is None and apart.intersection(box) is None
    assert Box((), ()).intersection(Box((), ())) == Box((), ()) and Box((), ()).size == 1
    assert box.is_within((4, 6)) and not box.is_within((3, 6)) and not box.is_within((4, 5))
    assert not box.is_within((4, 6, 1)) and not box.is_within((4,))
    for offset, shape in (((-1,), (2,)), ((0,), (-1,)), ((0, 0), (1,)), ((), (1,))):
        with pytest.raises(ValueError, match="not a box"):
            Box(offset, shape)


def test_an_entry_is_what_its_tensor_is() -> None:
    entry = whole("model.a", torch.zeros(2, 3, dtype=torch.bfloat16), scope="peer")
    assert (entry.nbytes, entry.dtype, entry.scope, entry.box) == (
        12,
        "bfloat16",
        "peer",
        Box((0, 0), (2, 3)),
    )
    assert entry.global_shape == (2, 3) and whole("model.a", torch.zeros(1)).scope == "shared"
    with pytest.raises(ValueError, match=r"model.a: the tensor has shape \(2, 3\), its box \(2, 2\)"):
        replace(entry, box=Box((0, 0), (2, 2)))
    with pytest.raises(ValueError, match="a tensor of complex64 was declared complex64"):
        whole("model.a", torch.zeros(1, dtype=torch.complex64))

    class Part:
        def __init__(self, *offsets: int) -> None:
            self.offsets = offsets

        def state_entries(self) -> list[StateEntry]:
            place = {"name": "model.a", "global_shape": (9,), "dtype": "float32", "tensor": torch.zeros(1)}
            return [StateEntry(**place, box=Box((offset,), (1,))) for offset in self.offsets]

        def state_values(self) -> dict[str, Any]:
            return {"at": self.offsets[0]}

        def load_state_values(self, values: object) -> None:
            """Nothing is there."""

    state = collect({"model": Part(3, 4)})
    assert [entry.box.offset for entry in state.entries] == [(3,), (4,)]
    assert state.values == {"model": {"at": 3}}
    with pytest.raises(ValueError, match=r"model.a at \(3,\) is there twice"):
        collect({"model": Part(3, 4, 3)})


def write_manifest(directory: Path, content: dict[str, Any]) -> None:
    """Write a manifest with the hash of what it says."""
    content.pop("manifest_xxh3_128", None)
    plain = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["manifest_xxh3_128"] = xxhash.xxh3_128_hexdigest(plain.encode())
    (directory / "manifest.json").write_text(json.dumps(content))


@pytest.mark.parametrize("lost", ["step", "time", "files", "values", "index_xxh3_128"])
def test_a_manifest_that_lacks_something_says_what(tmp_path: Path, lost: str) -> None:
    content = json.loads(manifest_text(Manifest(**FACTS, about={}, values={})))
    del content[lost]
    write_manifest(tmp_path, content)
    with pytest.raises(DamagedCheckpoint, match=f"is not a valid manifest: it lacks '{lost}'"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["step", "incarnation", "index_bytes"])
@pytest.mark.parametrize("number", [float("inf"), float("nan"), "many", []])
def test_a_manifest_whose_number_is_none_is_damaged(tmp_path: Path, name: str, number: Any) -> None:
    content = json.loads(manifest_text(Manifest(**FACTS, about={}, values={})))
    write_manifest(tmp_path, {**content, name: number})
    with pytest.raises(DamagedCheckpoint, match="is not a valid manifest"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"about": None}, {"about": [1]}, {"values": 5}, {"values": {"train": 5}}, {"world": 0},
        {"world": "x"}, {"time": None}, {"time": "now"}, {"time": -1}, {"time": float("nan")},
        {"time": 1e300}, {"time": True}, {"files": [{"name": "a", "bytes": 10**400, "xxh3_128": ""}]},
    ],
)  # fmt: skip
def test_a_manifest_whose_facts_make_no_sense_is_damaged(tmp_path: Path, wrong: dict[str, Any]) -> None:
    content = json.loads(manifest_text(Manifest(**FACTS, about={}, values={})))
    write_manifest(tmp_path, {**content, **wrong})
    with pytest.raises(DamagedCheckpoint, match="is not a valid manifest"):
        read_manifest(tmp_path)


def test_an_index_with_a_number_beyond_all_sizes_is_damaged(tmp_path: Path) -> None:
    directory = save_checkpoint(tmp_path, [whole("model.a", torch.ones(3))], step=1, incarnation=1)
    index = (
        (directory / "index.json").read_bytes().replace(b'"global_shape":[3]', b'"global_shape":[%d]' % 2**63)
    )
    (directory / "index.json").write_bytes(index)
    content = json.loads((directory / "manifest.json").read_text())
    content |= {"index_bytes": len(index), "index_xxh3_128": xxhash.xxh3_128_hexdigest(index)}
    write_manifest(directory, content)
    with pytest.raises(DamagedCheckpoint, match="is not a valid index"):
        read_index(directory, read_manifest(directory))
