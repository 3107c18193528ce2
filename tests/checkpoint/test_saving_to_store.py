"""Ranks whose nodes share nothing save straight to object storage, and go on from there on any node."""

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.checkpoint import store_kills
from tests.checkpoint.object_store import ObjectStore
from tests.checkpoint.small_run import Ranks, Run

from bloomery.checkpoint.format.catalogue import checkpoints, verify
from bloomery.checkpoint.format.manifest import MANIFEST, DamagedCheckpoint
from bloomery.checkpoint.format.source import is_stored_elsewhere, source_of
from bloomery.checkpoint.format.suspects import SUSPECT, why_suspect
from bloomery.checkpoint.load.loader import read_tensors
from bloomery.checkpoint.remote.places import refuse_changed_url, remove_kept, run_storage
from bloomery.checkpoint.remote.remote_run import remote_checkpoints, remote_source
from bloomery.checkpoint.writer.store_place import ObjectPartWriter
from bloomery.cli import main
from bloomery.config.checkpoint import CheckpointSection
from bloomery.errors import BloomeryError, CheckpointError, RunBusy, StorageError
from bloomery.events.incarnation import read_incarnations
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import Objects
from bloomery.train.checkpoint_store import Store
from bloomery.train.saved_state import RunStateToSave

NAME = "mine"


@pytest.fixture(params=["file", "s3"])
def section(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointSection:
    if request.param == "file":
        return CheckpointSection(url=f"file://{tmp_path}/store", background="off")
    store: ObjectStore = request.getfixturevalue("object_store")
    return CheckpointSection(url=store.new_bucket(), background="off")


def on_nodes(
    tmp_path: Path, section: CheckpointSection, act: Callable[[Store, Run], object], *, nodes: str = "ab"
) -> list[object]:
    """What `act` returns or raises on each rank; each has a run directory of its own, by its node's name."""
    ranks = Ranks(len(nodes))

    def live(rank: int) -> object:
        rundir = RunDirectory(tmp_path / nodes[rank]).create()
        place, run = run_storage(rundir, section, run_name=NAME), Run()
        gather = ranks.gather_of(rank)
        with Store(rundir, section, rank=rank, world=len(nodes), gather=gather, place=place) as store:
            store.restore(run.parts)
            return act(store, run)

    return Ranks.run(len(nodes), live)


def saving(*steps: int) -> Callable[[Store, Run], object]:
    def act(store: Store, run: Run) -> object:
        for step in steps:
            store.save(RunStateToSave(run.fill(step).parts, step=step))
        return store.incarnation

    return act


def restored(tmp_path: Path, section: CheckpointSection, node: str) -> int:
    """The number that the newest checkpoint was filled with, as a node finds it; -1 for none."""

    def act(store: Store, run: Run) -> int:
        step = store._saver.committed_step
        assert step < 0 or run.equals(Run().fill(step))
        return step

    (step,) = on_nodes(tmp_path, section, act, nodes=node)
    assert isinstance(step, int), step
    return step


def keys(section: CheckpointSection) -> list[str]:
    return [entry.key for entry in Objects(f"{section.url}/{NAME}").entries()]


@pytest.mark.parametrize("background", ["off", "on"])
def test_nodes_that_share_nothing_save_together_and_another_goes_on(
    tmp_path: Path, section: CheckpointSection, background: str
) -> None:
    section = replace(section, background=background)
    assert on_nodes(tmp_path, section, saving(1, 2)) == [1, 1]
    (*_, newest) = remote_checkpoints(Objects(f"{section.url}/{NAME}"))
    assert newest.name == "step-000002.i001" and verify(newest) == []
    files = [key for key in keys(section) if "step-000002" in key]
    assert {key.split("-r")[1][:5] for key in files if key.endswith(".safetensors")} == {"00000", "00001"}
    assert not any(key.startswith("saving/") for key in keys(section))
    entry = tmp_path / "a" / "checkpoints" / newest.name
    assert is_stored_elsewhere(entry) and verify(entry) == [] and not list(entry.glob("*.safetensors"))
    assert not list((tmp_path / "b" / "checkpoints").iterdir())
    assert restored(tmp_path, section, "c") == 2


def test_of_two_machines_that_start_at_once_one_is_superseded_and_its_saves_do_not_count(
    tmp_path: Path, section: CheckpointSection
) -> None:
    numbers: list[int] = []

    def overtaken(store: Store, run: Run) -> object:
        saving(1)(store, run)
        numbers.extend([store.incarnation, *on_nodes(tmp_path, section, saving(2), nodes="z")])
        return saving(3)(store, run)

    (refused,) = on_nodes(tmp_path, section, overtaken, nodes="a")
    assert isinstance(refused, RunBusy) and "incarnation 2" in refused.message and numbers == [1, 2]
    assert not any("step-000003" in key and key.endswith(MANIFEST) for key in keys(section))
    assert restored(tmp_path, section, "y") == 2


def test_incarnations_are_claimed_once_whoever_looks_at_the_same_moment(
    tmp_path: Path, section: CheckpointSection
) -> None:
    places = [
        run_storage(RunDirectory(tmp_path / name).create(), section, run_name=NAME) for name in "abcdefgh"
    ]
    numbers = Ranks.run(len(places), lambda rank: places[rank].begin(base=None, reason="start"))
    assert sorted(map(int, numbers)) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_save_that_one_rank_cannot_send_leaves_nothing_and_the_next_is_made(
    tmp_path: Path, section: CheckpointSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = ObjectPartWriter.send

    def refused(place: ObjectPartWriter, name: str, **more: object) -> object:
        if "-r00001-" in name and "step-000002" in place.name:
            raise StorageError("the line is cut", remedy="Mend it.")
        return send(place, name, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(ObjectPartWriter, "send", refused)

    def act(store: Store, run: Run) -> object:
        saving(1)(store, run)
        with pytest.raises(BloomeryError, match="the line is cut"):
            saving(2)(store, run)
        return saving(3)(store, run)

    assert on_nodes(tmp_path, section, act) == [1, 1]
    assert not any("step-000002" in key for key in keys(section))
    assert restored(tmp_path, section, "c") == 3


def test_what_is_not_kept_goes_from_the_store_and_from_other_nodes_lists(
    tmp_path: Path, section: CheckpointSection
) -> None:
    keep_one = replace(section, keep_last=1, keep_tenths=False)
    on_nodes(tmp_path, section, saving(1), nodes="c")
    assert on_nodes(tmp_path, keep_one, saving(2, 3)) == [2, 2]
    names = {key.split("/")[1] for key in keys(section) if key.startswith("checkpoints/")}
    assert names == {"step-000003.i002"}
    run_storage(RunDirectory(tmp_path / "c"), section, run_name=NAME).refresh()
    assert [item.name for item in checkpoints(RunDirectory(tmp_path / "c"))] == ["step-000003.i002"]


def test_a_start_removes_what_interrupted_saves_left_and_nothing_else(
    tmp_path: Path, section: CheckpointSection
) -> None:
    on_nodes(tmp_path, section, saving(1), nodes="a")
    remote = Objects(f"{section.url}/{NAME}")
    for key in ("checkpoints/hf-export/model.safetensors", "checkpoints/README.md"):
        remote.put(key, b"somebody else's")
    before = keys(section)
    for key in ("checkpoints/step-000002.i001/model-r00000-of-00002-000.safetensors", "saving/x/part-r00001"):
        remote.put(key, b"half")
    cut = tmp_path / "store" / NAME / "checkpoints" / "step-000003.i001" / "model-r00000.safetensors#1"
    cut.parent.mkdir(parents=True)
    cut.write_bytes(b"of a process that was killed")
    os.utime(cut, (0, 0))
    run_storage(RunDirectory(tmp_path / "b").create(), section, run_name=NAME).refresh()
    assert keys(section) == before and cut.exists() == (not section.url.startswith("file://"))


def test_the_object_that_a_console_makes_for_a_folder_is_no_checkpoint(
    tmp_path: Path, object_store: ObjectStore
) -> None:
    section = CheckpointSection(url=object_store.new_bucket(), background="off")
    object_store.put(f"/{section.url.removeprefix('s3://')}/{NAME}/checkpoints/")
    assert on_nodes(tmp_path, section, saving(1), nodes="a") == [1]
    assert restored(tmp_path, section, "b") == 1


def test_suspects_are_known_on_every_node(tmp_path: Path, section: CheckpointSection) -> None:
    def marking(store: Store, run: Run) -> object:
        saving(1, 2)(store, run)
        return store.mark_suspects(clean_step=1, why="a bit fell over")

    assert on_nodes(tmp_path, section, marking, nodes="a") == [["step-000002.i001"]]
    assert any(key.endswith(f"step-000002.i001/{SUSPECT}") for key in keys(section))
    assert restored(tmp_path, section, "b") == 1
    assert why_suspect(tmp_path / "b" / "checkpoints" / "step-000002.i001") == "a bit fell over"


def test_a_node_that_has_an_entry_learns_that_its_checkpoint_became_suspect(
    tmp_path: Path, section: CheckpointSection
) -> None:
    on_nodes(tmp_path, section, saving(1), nodes="a")
    (entry,) = checkpoints(RunDirectory(tmp_path / "a"))
    mark = b'{"why": "a bit fell over"}'
    Objects(f"{section.url}/{NAME}").put(f"checkpoints/{entry.name}/{SUSPECT}", mark)
    assert not (entry.directory / SUSPECT).exists()
    run_storage(RunDirectory(tmp_path / "a"), section, run_name=NAME).refresh()
    assert (entry.directory / SUSPECT).read_bytes() == mark


def test_the_commands_read_a_run_whose_checkpoints_are_elsewhere(
    tmp_path: Path, section: CheckpointSection, capsys: pytest.CaptureFixture[str]
) -> None:
    on_nodes(tmp_path, section, saving(1, 2), nodes="a")
    run, url = str(tmp_path / "a"), f"{section.url}/{NAME}"
    assert main(["ckpt", "list", run]) == 0 and "complete" in capsys.readouterr().out
    assert main(["ckpt", "verify", run]) == 0 and f"{url}/checkpoints" in capsys.readouterr().out
    assert main(["ckpt", "diff", run, url, "--contents"]) == 0
    assert remote_source(url).name == source_of(checkpoints(RunDirectory(tmp_path / "a"))[-1].directory).name
    assert main(["ckpt", "copy", run, f"file://{tmp_path}/other"]) != 0
    assert "object storage already" in capsys.readouterr().err
    assert main(["ckpt", "copy", url, str(tmp_path / "here")]) == 0
    (copied,) = checkpoints(RunDirectory(tmp_path / "here"))
    assert not is_stored_elsewhere(copied.directory) and verify(copied.directory) == []
    remove_kept(checkpoints(RunDirectory(tmp_path / "a"))[-1].directory)
    assert remote_source(url).name == "step-000001.i001"


def test_a_checkpoint_of_the_store_that_was_half_removed_is_no_checkpoint(
    tmp_path: Path, section: CheckpointSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(remote: Objects, keys: Iterable[str]) -> None:
        raise OSError("the network went away")

    on_nodes(tmp_path, section, saving(1, 2), nodes="a")
    newest = checkpoints(RunDirectory(tmp_path / "a"))[-1].directory
    before = keys(section)
    monkeypatch.setattr(Objects, "delete_all", unreachable)

    with pytest.raises(StorageError, match="Removing an old checkpoint"):
        remove_kept(newest)

    assert len(keys(section)) == len(before) - 1
    assert remote_source(f"{section.url}/{NAME}").name == "step-000001.i001"


def test_damage_in_the_store_is_found_through_the_run_directory(
    tmp_path: Path, section: CheckpointSection
) -> None:
    on_nodes(tmp_path, section, saving(1), nodes="a")
    remote = Objects(f"{section.url}/{NAME}")
    key = next(key for key in keys(section) if key.endswith(".safetensors"))
    remote.put(key, remote.content(key)[:-1] + b"?")
    (entry,) = checkpoints(RunDirectory(tmp_path / "a"))
    assert [problem.file for problem in verify(entry.directory)] == [key.rpartition("/")[2]]
    place = f"{section.url}/{NAME}/checkpoints/{entry.name}"
    assert source_of(entry.directory).place() == place
    assert source_of(entry.directory).place(MANIFEST) == f"{place}/{MANIFEST}"
    with pytest.raises(DamagedCheckpoint, match=re.escape(f"{section.url}/{NAME}/{key}: the block at")):
        list(read_tensors(entry.directory))
    remote.delete(f"checkpoints/{entry.name}/{MANIFEST}")
    assert [problem.file for problem in verify(entry.directory)] == [MANIFEST]


def test_a_run_that_has_checkpoints_at_the_other_place_is_refused(tmp_path: Path) -> None:
    here, there = CheckpointSection(), CheckpointSection(url=f"file://{tmp_path}/store", background="off")
    on_nodes(tmp_path, there, saving(1), nodes="a")
    with pytest.raises(CheckpointError, match=r"store/mine/(?s:.*)Keep checkpoint.url as it was"):
        refuse_changed_url(RunDirectory(tmp_path / "a"), here)
    refuse_changed_url(RunDirectory(tmp_path / "a"), there)
    on_nodes(tmp_path, here, saving(1), nodes="b")
    with pytest.raises(CheckpointError, match=r"kept at .*/b/checkpoints"):
        refuse_changed_url(RunDirectory(tmp_path / "b"), there)


def test_a_place_that_holds_nothing_of_the_run_does_not_make_it_begin_anew(tmp_path: Path) -> None:
    mounted, rundir = tmp_path / "store", RunDirectory(tmp_path / "a")
    there = CheckpointSection(url=f"file://{mounted}", background="off")
    on_nodes(tmp_path, there, saving(1), nodes="a")
    moved = mounted.rename(tmp_path / "moved")
    (refusal,) = on_nodes(tmp_path, there, saving(2), nodes="a")  # as where the disk is not mounted
    saved = f"{there.url}/{NAME}/checkpoints/step-000001.i001"
    assert isinstance(refusal, CheckpointError) and refusal.message == (
        f"{there.url}/{NAME} holds nothing of this run, which saved step-000001.i001 to {saved}"
    )
    assert [item.step for item in checkpoints(rundir)] == [1]
    assert restored(tmp_path, replace(there, url=f"file://{moved}"), "a") == 1
    (entry,) = checkpoints(rundir)
    assert source_of(entry.directory).place().startswith(f"file://{moved}/") and not verify(entry.directory)


def test_a_start_learns_of_incarnations_that_others_began(tmp_path: Path, section: CheckpointSection) -> None:
    on_nodes(tmp_path, section, saving(1), nodes="a")
    on_nodes(tmp_path, section, saving(2), nodes="b")
    assert on_nodes(tmp_path, section, saving(3), nodes="a") == [3]
    assert read_incarnations(RunDirectory(tmp_path / "a")) == {1: None, 2: (1, 1), 3: (2, 2)}


def test_kills_at_random_moments_lose_nothing_that_was_sent_and_committed(tmp_path: Path) -> None:
    soak = store_kills.kill_again_and_again(tmp_path, f"file://{tmp_path}/store", kills=3, seed=3)
    assert soak.kills == 3


@pytest.mark.parametrize("background", ["off", "on"])
def test_a_directory_whose_disk_goes_away_is_not_made_anew_by_the_next_save(
    tmp_path: Path, background: str
) -> None:
    section = CheckpointSection(url=f"file://{tmp_path}/store", background=background)

    def act(store: Store, run: Run) -> None:
        store.save(RunStateToSave(run.fill(1).parts, step=1))
        (tmp_path / "store").rename(tmp_path / "unmounted")
        with pytest.raises(StorageError, match="does not exist"):
            store.save(RunStateToSave(run.fill(2).parts, step=2))
        assert not (tmp_path / "store").exists()
        (tmp_path / "unmounted").rename(tmp_path / "store")
        store.save(RunStateToSave(run.fill(3).parts, step=3))

    assert on_nodes(tmp_path, section, act, nodes="a") == [None]
    assert restored(tmp_path, section, "b") == 3
