"""Copies of checkpoints that arrive: what is fetched again, what is not, and what must be there before."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from bloomery import errors
from bloomery.checkpoint.format.catalogue import verify
from bloomery.checkpoint.format.manifest import (
    INDEX,
    MANIFEST,
    DamagedCheckpoint,
    manifest_text,
    read_index,
    read_manifest,
)
from bloomery.checkpoint.format.source import LocalCheckpoint, RangedFile
from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.format.suspects import SUSPECT, why_suspect
from bloomery.checkpoint.remote import transfer
from bloomery.checkpoint.remote.remote_run import remote_source
from bloomery.checkpoint.remote.transfer import download_checkpoint, subset, upload_checkpoint
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.errors import CheckpointError, StorageError
from bloomery.objects import Objects, StoreUnreachable


class Watched(LocalCheckpoint):
    """A checkpoint that counts how often each file is opened to be read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.opened: list[str] = []

    def open(self, file: str) -> RangedFile:
        self.opened.append(file.partition("-")[0])
        return super().open(file)


@pytest.fixture
def source(tmp_path: Path) -> Watched:
    entries = [whole("model.a", torch.randn(70, 99)), whole("optim.a", torch.randn(50, 7))]
    return Watched(save_checkpoint(tmp_path / "there", entries, step=3, incarnation=1, about={"told": 1}))


def same(one: Path, other: Path) -> bool:
    contents = [{path.name: path.read_bytes() for path in place.iterdir()} for place in (one, other)]
    return contents[0] == contents[1]


def test_what_arrives_is_counted_and_becomes_visible_after_what_must_come_before(
    source: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(transfer, "_WINDOW_BYTES", 10_000)
    here, told, seen = tmp_path / "here", list[tuple[int, int]](), list[list[str]]()

    def before() -> None:
        seen.append(sorted(path.name for path in here.iterdir()))

    fetched = download_checkpoint(source, here, before_commit=before, progress=lambda *at: told.append(at))
    assert fetched == here / source.name and same(fetched, source.path)
    manifest = read_manifest(fetched)
    sizes = [file.bytes for file in manifest.files]
    assert told == [(sizes[0], manifest.bytes), (sum(sizes), manifest.bytes)]
    assert download_checkpoint(source, here, before_commit=before) == fetched
    assert seen == [[f"{source.name}.partial"], [source.name]], "also where it is here already"
    assert source.opened == ["model", "optim"], "nothing is fetched twice"


def test_of_an_earlier_try_only_whole_files_are_kept(source: Watched, tmp_path: Path):
    here = tmp_path / "here"
    partial = here / f"{source.name}.partial"
    fetched = download_checkpoint(source, here)
    for spoil, again in (
        (lambda content: content, ["model"]),
        (lambda content: content[:-1], ["model", "optim"]),
        (lambda content: content[:-1] + bytes([content[-1] ^ 1]), ["model", "optim"]),
        (lambda content: content + b"x", ["model", "optim"]),
    ):
        fetched.rename(partial)
        for name in (MANIFEST, INDEX):
            (partial / name).write_text("of the earlier try")
        (optim,) = partial.glob("optim-*")
        optim.write_bytes(spoil(optim.read_bytes()))
        next(partial.glob("model-*")).unlink()
        source.opened.clear()
        assert download_checkpoint(source, here) == fetched and same(fetched, source.path)
        assert source.opened == again


def test_a_checkpoint_that_is_damaged_here_is_mended_from_its_copy(source: Watched, tmp_path: Path):
    here = download_checkpoint(source, tmp_path / "here")
    (optim,) = here.glob("optim-*")
    for damaged in (optim, here / INDEX, here / MANIFEST):
        content = damaged.read_bytes()
        damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        source.opened.clear()
        assert download_checkpoint(source, tmp_path / "here") == here and same(here, source.path)
        assert source.opened == (["optim"] if damaged == optim else [])
    optim.write_bytes(b"?")
    silent = Watched(source.path)
    silent.open = lambda file: (_ for _ in ()).throw(StoreUnreachable(5, "away"))  # type: ignore[method-assign]
    with pytest.raises(StorageError, match="away"):
        download_checkpoint(silent, tmp_path / "here")
    assert (here / MANIFEST).exists(), "until all is there, what is here stays"


def test_files_that_cannot_be_linked_or_read_here_are_fetched_again(
    source: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    here, read = download_checkpoint(source, tmp_path / "here"), Path.open

    def lost(path: Path, *given: Any, **more: Any) -> Any:
        if path.parent == here and path.name.startswith("optim-"):
            raise OSError(5, "Input/output error")
        return read(path, *given, **more)

    def no_links(path: Path, target: Path) -> None:
        raise OSError(1, "Operation not permitted")

    source.opened.clear()
    with monkeypatch.context() as failing:
        failing.setattr(Path, "open", lost)
        assert download_checkpoint(source, tmp_path / "here") == here and source.opened == ["optim"]
        source.opened.clear()
        failing.setattr(Path, "hardlink_to", no_links)
        assert download_checkpoint(source, tmp_path / "here") == here
    assert source.opened == ["model", "optim"] and same(here, source.path)


def test_another_checkpoint_of_the_same_name_is_not_taken_for_the_copy(source: Watched, tmp_path: Path):
    other = save_checkpoint(tmp_path / "here", [whole("model.a", torch.ones(3))], step=3, incarnation=1)
    before = (other / MANIFEST).read_bytes()
    with pytest.raises(CheckpointError, match=f"{other} is another checkpoint of this name"):
        download_checkpoint(source, tmp_path / "here")
    assert (other / MANIFEST).read_bytes() == before and verify(other) == []


def test_a_copy_that_would_not_fit_is_refused_before_anything_is_fetched(
    source: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    needed = read_manifest(source).bytes
    monkeypatch.setattr(errors, "free_bytes", lambda path: needed - 1)
    with pytest.raises(StorageError, match=r"no space.*needed"):
        download_checkpoint(source, tmp_path / "here")
    assert source.opened == [] and not (tmp_path / "here").exists()


def test_room_is_needed_only_for_what_an_earlier_try_has_not_fetched(
    source: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fetched = download_checkpoint(source, tmp_path / "here")
    partial = fetched.rename(fetched.with_name(f"{source.name}.partial"))
    (partial / MANIFEST).unlink()
    (model,), (optim,) = partial.glob("model-*"), partial.glob("optim-*")
    missing = model.stat().st_size + (partial / INDEX).stat().st_size + 100
    optim.write_bytes(optim.read_bytes()[:-100])
    model.unlink()
    monkeypatch.setattr(errors, "free_bytes", lambda path: missing - 1)
    with pytest.raises(StorageError, match=r"no space.*needed"):
        download_checkpoint(source, tmp_path / "here")
    monkeypatch.setattr(errors, "free_bytes", lambda path: missing)
    assert same(download_checkpoint(source, tmp_path / "here"), source.path)
    fetched.rename(partial)
    (partial / MANIFEST).unlink()
    optim.write_bytes(optim.read_bytes() + b"too long")
    model.write_bytes(model.read_bytes()[:-100])
    missing = (partial / INDEX).stat().st_size + 100
    monkeypatch.setattr(errors, "free_bytes", lambda path: missing - 1)
    with pytest.raises(StorageError, match=r"no space.*needed"):
        download_checkpoint(source, tmp_path / "here")
    monkeypatch.setattr(errors, "free_bytes", lambda path: missing)
    assert same(download_checkpoint(source, tmp_path / "here"), source.path)


def test_what_is_damaged_or_cut_off_there_never_becomes_a_checkpoint_here(source: Watched, tmp_path: Path):
    (optim,) = source.path.glob("optim-*")
    content = optim.read_bytes()
    for spoiled, said in (
        (content[:-1], "ends too early"),
        (content[:-1] + bytes([content[-1] ^ 1]), "does not have the hash it was saved with"),
        (None, "No such file"),
    ):
        optim.unlink() if spoiled is None else optim.write_bytes(spoiled)
        with pytest.raises(DamagedCheckpoint, match=said):
            download_checkpoint(source, tmp_path / "here")
        assert [path.suffix for path in (tmp_path / "here").iterdir()] == [".partial"]
    optim.write_bytes(content)
    assert verify(download_checkpoint(source, tmp_path / "here")) == []


def test_a_mark_that_the_source_has_got_since_is_taken_over(source: Watched, tmp_path: Path):
    fetched = download_checkpoint(source, tmp_path / "here")
    (source.path / SUSPECT).write_text('{"why": "rank 3 erred"}')
    assert why_suspect(fetched) == ""
    assert why_suspect(download_checkpoint(source, tmp_path / "here")) == "rank 3 erred"


def test_parts_that_are_not_there_or_share_a_file_are_no_checkpoint_of_their_own(source: Watched):
    manifest = read_manifest(source)
    index = read_index(source, manifest)
    with pytest.raises(
        CheckpointError, match=r"step 3's checkpoint holds nothing of inner, outer(?s:.*)Copy it whole"
    ):
        subset(manifest, index, parts={"outer", "inner"})
    model, optim = index.boxes
    mixed = replace(index, boxes=(model, type(optim)(**{**_fields(optim), "file": model.file})))
    with pytest.raises(CheckpointError, match=f"mixes parts in {model.file}"):
        subset(manifest, mixed, parts={"model"})
    both = subset(manifest, index, parts={"model", "optim"})
    assert [file.name for file in both.files] == [file.name for file in manifest.files]


def _fields(box: object) -> dict[str, object]:
    return {name: getattr(box, name) for name in type(box).__struct_fields__}  # type: ignore[attr-defined]


def test_an_upload_counts_all_of_its_bytes_and_tells_of_each_file(source: Watched, tmp_path: Path):
    url, told = f"file://{tmp_path}/store", list[tuple[int, int]]()
    done = upload_checkpoint(
        source.path, Objects(url), notes=tmp_path / "notes", progress=lambda *at: told.append(at), workers=2
    )
    assert done.bytes == done.bytes_sent == sum(path.stat().st_size for path in source.path.iterdir())
    assert [total for _, total in told] == [done.bytes] * 3
    assert [at for at, _ in told] == sorted(at for at, _ in told) and told[-1][0] == done.bytes
    alone = upload_checkpoint(source.path, Objects(f"{url}2"), what="model", notes=tmp_path / "notes")
    stored = remote_source(f"{url}2")
    assert verify(stored) == [] and read_manifest(stored).about == {"told": 1, "parts": ["model"]}
    assert alone.bytes == read_manifest(stored).bytes + len(manifest_text(read_manifest(stored)).encode())


def test_a_checkpoint_with_a_hole_is_refused_before_anything_is_fetched(
    source: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    index = read_index(source, read_manifest(source))
    wider = tuple(structs.replace(box, global_shape=(999, *box.global_shape[1:])) for box in index.boxes)
    monkeypatch.setattr(transfer, "read_index", lambda *given: replace(index, boxes=wider))
    with pytest.raises(CheckpointError, match="is not filled exactly by its boxes"):
        download_checkpoint(source, tmp_path / "here")
    assert source.opened == [] and not (tmp_path / "here").exists()
