"""Every checkpoint of a run becomes a branch of its own, pruned meanwhile or not, and none twice."""

from __future__ import annotations

import os
import shutil
import signal
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from tests.faults.commands import bloomery
from tests.operate.sync.hub_server import Hub

from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.save.direct import save_streamed
from bloomery.cli import sync
from bloomery.errors import BloomeryError, StorageError
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.sync import published
from bloomery.operate.sync.hub import HubRepository
from bloomery.operate.sync.published import MARK, CheckpointPublisher
from bloomery.operate.sync.run_sync import RunSync


def save(run: RunDirectory, step: int) -> Path:
    save_streamed(
        run.checkpoints, [whole("model.weight", torch.full((4,), float(step)))], step=step, incarnation=1
    )
    return run.checkpoints / f"step-{step:06d}.i001"


def export(checkpoint: Path, target: Path) -> None:
    """Copy the weights, as an export has them, with a file large enough for the Hub to keep it apart."""
    target.mkdir()
    shutil.copy(next(checkpoint.glob("*.safetensors")), target / "model.safetensors")
    (target / "config.json").write_text("{}")


def publisher(run: RunDirectory) -> CheckpointPublisher:
    return CheckpointPublisher(run, HubRepository("people/tiny"), export=export)


def branches(hub: Hub) -> list[str]:
    return sorted(set(hub.repositories["people/tiny"].commits) - {"main"})


def test_each_checkpoint_is_a_branch_that_holds_its_export_alone(run: RunDirectory, hub: Hub) -> None:
    HubRepository("people/tiny").publish({"logs/a": b"a log on main\n"})
    directories = [save(run, 5), save(run, 10)]
    ours = publisher(run)
    ours.hold()
    assert ours.publish_held() == ["step-000005.i001", "step-000010.i001"] == branches(hub)
    for directory in directories:
        files = hub.repositories["people/tiny"].files(directory.name)
        assert set(files) == {".gitattributes", "config.json", "model.safetensors", MARK}
        assert files["model.safetensors"] == next(directory.glob("*.safetensors")).read_bytes()
    later = publisher(run)
    later.hold()
    assert ours.publish_held() == [] == later.publish_held(), (
        "also by a process that knows nothing of the first"
    )
    assert not list((run.path / "publishing").iterdir())


def test_of_branches_of_earlier_processes_only_those_of_held_checkpoints_are_looked_at(
    run: RunDirectory, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruned, kept = save(run, 5), save(run, 10)
    ours = publisher(run)
    ours.hold()
    ours.publish_held()
    shutil.rmtree(pruned)
    asked, files_of = list[str](), HubRepository.files_of
    monkeypatch.setattr(
        HubRepository, "files_of", lambda hub, name: asked.append(name) or files_of(hub, name)
    )
    save(run, 15)
    later = publisher(run)
    later.hold()
    assert later.publish_held() == ["step-000015.i001"] and asked == [kept.name]


def test_a_checkpoint_that_was_pruned_before_its_turn_is_published(run: RunDirectory, hub: Hub) -> None:
    ours, pruned = publisher(run), save(run, 5)
    ours.hold()
    weights = next(pruned.glob("*.safetensors")).read_bytes()
    shutil.rmtree(pruned)
    assert publisher(run).publish_held() == ["step-000005.i001"], "held for whoever comes next"
    assert hub.repositories["people/tiny"].files("step-000005.i001")["model.safetensors"] == weights


def test_a_checkpoint_that_is_pruned_while_it_is_held_keeps_no_other_from_its_branch(
    run: RunDirectory, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (5, 10):
        save(run, step)
    listed = published.checkpoints(run)
    shutil.rmtree(run.checkpoints / "step-000005.i001")
    monkeypatch.setattr(published, "checkpoints", lambda rundir: listed)
    ours = publisher(run)
    ours.hold()
    assert ours.publish_held() == ["step-000010.i001"] == branches(hub)


def test_what_is_held_is_whole_where_another_begins_to_hold_it_and_is_killed(
    run: RunDirectory, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, link, links = save(run, 5), os.link, list[Path]()

    def link_beside_another(source: Path, target: Path) -> None:
        links.append(target)
        if len(links) == 2:
            with pytest.raises(KeyboardInterrupt):
                publisher(run).hold()
        elif len(links) == 3:
            raise KeyboardInterrupt
        link(source, target)

    monkeypatch.setattr(os, "link", link_beside_another)
    ours = publisher(run)
    ours.hold()
    (held,) = (run.path / "publishing").glob("step-*")
    assert {path.name for path in held.iterdir()} == {path.name for path in saved.iterdir()}
    assert ours.publish_held() == [saved.name]


def test_a_checkpoint_that_another_has_held_meanwhile_is_held_once(
    run: RunDirectory, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, link, others = save(run, 5), os.link, [publisher(run)]

    def link_after_another(source: Path, target: Path) -> None:
        while others:
            others.pop().hold()
        link(source, target)

    monkeypatch.setattr(os, "link", link_after_another)
    ours = publisher(run)
    ours.hold()
    assert [path.name for path in (run.path / "publishing").iterdir()] == [saved.name]
    assert ours.publish_held() == [saved.name]


def test_no_draft_of_a_checkpoint_that_is_pruned_while_it_is_held_keeps_its_bytes(
    run: RunDirectory, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, link = save(run, 5), os.link

    def link_and_prune(source: Path, target: Path) -> None:
        link(source, target)
        shutil.rmtree(saved, ignore_errors=True)

    monkeypatch.setattr(os, "link", link_and_prune)
    publisher(run).hold()
    assert not list((run.path / "publishing").iterdir())
    left = run.path / "publishing" / ".draft-of-one-that-was-killed"
    left.mkdir()
    os.utime(left, (1.0, 1.0))
    save(run, 10)
    monkeypatch.setattr(os, "link", link)
    publisher(run).hold()
    assert [path.name for path in left.parent.iterdir()] == ["step-000010.i001"]


def test_a_checkpoint_that_cannot_be_exported_holds_up_no_other(run: RunDirectory, hub: Hub) -> None:
    damaged = save(run, 5)

    def export_intact(checkpoint: Path, target: Path) -> None:
        if checkpoint.name == damaged.name:
            raise BloomeryError("it is damaged", remedy="None.")
        export(checkpoint, target)

    ours = CheckpointPublisher(run, HubRepository("people/tiny"), export=export_intact)
    ours.hold()
    with pytest.raises(BloomeryError, match="damaged"):
        ours.publish_held()
    names = [save(run, step).name for step in (10, 15)]
    ours.hold()
    with pytest.raises(BloomeryError, match="damaged"):
        ours.publish_held()
    assert branches(hub) == names


def test_of_checkpoints_that_cannot_be_published_the_newest_few_are_held(run: RunDirectory, hub: Hub) -> None:
    def fails(checkpoint: Path, target: Path) -> None:
        raise BloomeryError("this model has no such form", remedy="None.")

    ours = CheckpointPublisher(run, HubRepository("people/tiny"), export=fails)
    for step in range(1, 8):
        shutil.rmtree(run.checkpoints / f"step-{step - 1:06d}.i001", ignore_errors=True)  # as pruning does
        save(run, step)
        ours.hold()
        with pytest.raises(BloomeryError, match="no such form"):
            ours.publish_held()
    held = sorted(path.name for path in (run.path / "publishing").glob("step-*"))
    # Beside the four, what is being published and what the run has still.
    assert len(held) <= 4 + 2 and held[-1] == "step-000007.i001"


def test_all_checkpoints_of_a_run_are_published_also_where_many_wait(run: RunDirectory, hub: Hub) -> None:
    names = [save(run, step).name for step in range(1, 8)]
    ours = publisher(run)
    ours.hold()
    assert ours.publish_held() == names == branches(hub)


def test_a_checkpoint_is_published_long_before_the_logs_are_due(
    run: RunDirectory, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, looks = publisher(run), list[list[str]]()
    publish = ours.publish_held

    def publish_and_end() -> list[str]:
        looks.append(publish())
        if len(looks) == 1:
            save(run, 5)
        elif looks[-1]:
            os.kill(os.getpid(), signal.SIGTERM)
        return looks[-1]

    monkeypatch.setattr(ours, "publish_held", publish_and_end)
    monkeypatch.setattr(sync, "_TICK_S", 0.01)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        options = Namespace(every=60.0, beside=False, json=True, once=False, place="hf:people/tiny")
        sync._repeat(run, RunSync(run, HubRepository("people/tiny")), ours, options)
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
    assert looks[:2] == [[], ["step-000005.i001"]] and branches(hub) == looks[1]


def test_a_file_of_a_repository_is_read_from_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, places = list[tuple[str, ...]](), list[Path]()

    class Api:
        def hf_hub_download(self, *words: str, revision: str, local_dir: str) -> str:
            asked.append((*words, revision))
            places.append(Path(local_dir))
            (places[-1] / "log").write_bytes(b"0123456789")
            return str(places[-1] / "log")

    monkeypatch.setattr(HubRepository, "_api", lambda repository: Api())
    repository = HubRepository("people/tiny")
    assert repository.content("log") == b"0123456789" and repository.content("log", begin=7) == b"789"
    assert asked == [("people/tiny", "log", "main")] * 2
    assert not any(place.exists() for place in places), "no copy of it stays"


def test_a_branch_whose_upload_broke_off_is_published_again(run: RunDirectory, hub: Hub) -> None:
    save(run, 5)
    hub.refusals, ours = 1, publisher(run)
    ours.hold()
    with pytest.raises(StorageError, match="failed"):
        ours.publish_held()
    assert branches(hub) == ["step-000005.i001"]
    assert MARK not in hub.repositories["people/tiny"].files("step-000005.i001")
    assert publisher(run).publish_held() == ["step-000005.i001"]
    assert MARK in hub.repositories["people/tiny"].files("step-000005.i001")


def test_the_commands_send_a_run_and_tell_of_it_elsewhere(
    run: RunDirectory, hub: Hub, tmp_path: Path
) -> None:
    shutil.copy("recipes/demo.toml", run.recipe)
    bloomery("sync", run.path, "--once").refuses("Nobody says where", "sync.place")
    run.recipe.write_text(run.recipe.read_text() + "[sync]\nplace = 'hf:a/b'\nevery_minutes = 7.0\n")
    every = [sync._parse([str(run.path), *more]).every for more in ((), ("--every", "3"), ("hf:a/c",))]
    assert every == [7.0, 3.0, 60.0]
    shutil.copy("recipes/demo.toml", run.recipe)
    bloomery("sync", run.path, f"file://{tmp_path}/x", "--once", "--checkpoints").refuses("hf:OWNER/NAME")
    sent = bloomery("sync", run.path, "hf:people/tiny", "--once")
    assert sent.status == 0 and "in 7 files" in sent.out, sent
    told = bloomery("follow", "hf:people/tiny", "--once", "--steps", "5", "--into", tmp_path / "kept")
    assert told.status == 0 and "step 5 | loss 3.9500" in told.out, told
    assert (tmp_path / "kept" / "journal" / "0-0.jsonl").read_bytes() == run.journal().read_bytes()
    bloomery("follow", "hf:people/tiny", "--once", "--into", run.path).refuses("holds a run of its own")
    bloomery("follow", "hf:people/none", "--once").refuses("holds no logs of a run")
