"""What is sent to a place, in which order and how much at once; and what of a place is believed."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.operate.sync.conftest import write_steps

from bloomery.checkpoint.format.catalogue import CommittedCheckpoint
from bloomery.errors import StorageError
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import ObjectStat
from bloomery.operate.sync import mirror, pieces, published, run_sync
from bloomery.operate.sync.mirror import RunMirror
from bloomery.operate.sync.published import CheckpointPublisher
from bloomery.operate.sync.run_sync import RunSync
from bloomery.operate.sync.tail import RunTail


class Place:
    """A place in memory that notes what it is asked for. refusals: how many of the next writes it refuses."""

    def __init__(self, most_bytes: int = 1 << 20) -> None:
        self.name, self.most_bytes = "memory", most_bytes
        self.held, self.asked, self.refusals = dict[str, bytes](), list[tuple[str, ...]](), 0

    def entries(self) -> dict[str, ObjectStat]:
        return {key: ObjectStat(bytes=len(it), mark=f"{hash(it)}") for key, it in self.held.items()}

    def publish(self, files: Mapping[str, bytes]) -> None:
        if self.refusals:
            self.refusals -= 1
            raise StorageError("no", remedy="")
        self.asked.append(("publish", *files))
        self.held |= files

    def remove(self, keys: Collection[str]) -> None:
        if keys:
            self.asked.append(("remove", *keys))
        for key in keys:
            del self.held[key]

    def content(self, key: str, *, begin: int = 0) -> bytes:
        self.asked.append(("content", key))
        return self.held[key][begin:]


LOG = "logs/vm-0.log"


def log_of(place: Place) -> str:
    (key,) = (key for key in place.held if key.startswith("logs/") and key.count(".") < 2)
    return key


def test_files_that_were_sent_are_neither_read_nor_sent_again_until_they_change(bare: RunDirectory) -> None:
    place = Place()
    sync = RunSync(bare, place)
    assert (sync.send_new().count, set(place.held)) == (2, {"recipe.toml", log_of(place)})
    place.asked.clear()
    assert sync.send_new().count == 0 and place.asked == []
    assert RunSync(bare, place).send_new().count == 0 and ("content", "recipe.toml") in place.asked
    bare.recipe.write_text("[RUN]\n")
    assert RunSync(bare, place).send_new().count == 1 and place.held["recipe.toml"] == b"[RUN]\n"


def test_what_a_place_refused_is_sent_by_the_next_call(bare: RunDirectory) -> None:
    place = Place()
    sync, place.refusals = RunSync(bare, place), 1
    with pytest.raises(StorageError):
        sync.send_new()
    sent = sync.send_new()
    assert (sent.count, sent.bytes) == (2, len(b"[run]\n") + len(b"one\ntwo\n"))


def test_no_more_is_sent_at_once_than_a_place_takes(bare: RunDirectory) -> None:
    for number in range(4):
        bare.log(host=f"h{number}", rank=0).write_text("123456\n")
    place = Place(most_bytes=14)
    RunSync(bare, place).send_new()
    sizes = [
        len(files) - 1 for word, *files in ((call[0], *call) for call in place.asked if call[0] == "publish")
    ]
    assert sizes == [2, 2, 1, 1] and len(place.held) == 6


def test_a_piece_that_is_longer_than_a_place_takes_at_once_is_sent_by_itself(bare: RunDirectory) -> None:
    place = Place(most_bytes=1)
    RunSync(bare, place).send_new()
    assert place.asked == [("publish", "recipe.toml"), ("publish", log_of(place))]


def test_a_log_without_a_whole_line_keeps_the_place_of_its_first_piece(
    bare: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 4)
    place = Place()
    sync = RunSync(bare, place)
    sync.send_new()
    first = min(key for key in place.held if key.startswith("logs/"))
    assert f"{first}.000001" in place.held
    bare.log(host="vm", rank=0).write_text("ne")
    sync.send_new()
    assert [key for key in place.held if key.startswith("logs/")] == [first]


def test_a_log_that_was_written_anew_loses_its_old_pieces_and_no_others(
    bare: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 8)
    log, place = bare.log(host="vm", rank=0), Place()
    log.write_text("abc\n" * 8)
    sync = RunSync(bare, place)
    sync.send_new()
    first = next(key for key in place.held if key.startswith("logs/") and not key.endswith(("1", "2", "3")))
    assert {key for key in place.held if key.startswith(first)} == {
        first,
        *(f"{first}.00000{n}" for n in (1, 2, 3)),
    }
    log.write_text("xyz\n" * 3)
    sync.send_new()
    assert {key: place.held[key] for key in place.held if key.startswith(first)} == {
        first: b"xyz\nxyz\n", f"{first}.000001": b"xyz\n"
    }  # fmt: skip
    assert place.asked[-1] == ("remove", f"{first}.000002", f"{first}.000003")


@pytest.mark.parametrize("more", [{"incarnations/000002.json": b'{"base": [5, 1]}'}, {}])
def test_a_place_is_the_runs_own_by_their_first_incarnation(
    run: RunDirectory, more: dict[str, bytes]
) -> None:
    place = Place()
    place.held = {"incarnations/000001.json": run.incarnation(1).read_bytes(), **more}
    assert RunSync(run, place).send_new().count > 0


def test_a_record_that_was_left_empty_at_a_place_is_none_of_another_run(run: RunDirectory) -> None:
    place = Place()
    place.held = {"incarnations/000001.json": b""}
    RunSync(run, place).send_new()
    assert place.held["incarnations/000001.json"] == run.incarnation(1).read_bytes()


def test_a_place_that_another_run_took_before_this_one_began_is_refused(bare: RunDirectory) -> None:
    place = Place()
    sync = RunSync(bare, place)
    assert sync.send_new().count == 2, "what is there before it begins"
    place.held["incarnations/000001.json"] = b'{"base": null, "began": "by another"}'
    bare.incarnation(1).write_text('{"base": null}')
    with pytest.raises(StorageError, match="another run"):
        sync.send_new()


def test_a_log_that_is_removed_meanwhile_keeps_no_other_from_being_sent(
    bare: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = bare.log(host="a", rank=0)
    gone.write_text("x\n")
    opened = run_sync.new_pieces

    def pieces_of(path: Path, sent: Any) -> Any:
        if path == gone:
            raise FileNotFoundError(2, "No such file or directory")
        return opened(path, sent)

    monkeypatch.setattr(run_sync, "new_pieces", pieces_of)
    place = Place()
    RunSync(bare, place).send_new()
    assert set(place.held) == {"recipe.toml", log_of(place)}


def test_what_a_place_did_not_remove_is_tried_again(
    bare: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place()
    sync, remove = RunSync(bare, place), place.remove

    def refuse(keys: Collection[str]) -> None:
        raise StorageError("no", remedy="")

    place.remove = refuse  # type: ignore[method-assign]
    with pytest.raises(StorageError):
        sync.send_new()
    place.remove = remove  # type: ignore[method-assign]
    place.held.clear()
    sync.send_new()
    assert set(place.held) == {"recipe.toml", log_of(place)}


def test_a_place_of_a_run_of_a_million_starts_is_that_runs(bare: RunDirectory) -> None:
    place = Place()
    place.held = {"incarnations/1000000.json": b'{"base": null}'}
    assert RunSync(bare, place).send_new().count == 0, "this one has not begun, and that has"


def test_links_and_what_is_being_written_are_not_sent(bare: RunDirectory, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("password\n")
    (bare.log(host="vm", rank=0).parent / "link.log").symlink_to(secret)
    (bare.log(host="vm", rank=0).parent / ".draft").write_text("draft\n")
    place = Place()
    RunSync(bare, place).send_new()
    assert set(place.held) == {"recipe.toml", log_of(place)}


def test_a_place_that_holds_something_else_is_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place()
    with pytest.raises(StorageError, match="holds no logs") as refused:
        RunMirror(place, tmp_path / "m").fetch()
    assert "`bloomery sync RUN PLACE` sends them there" in refused.value.remedy
    place.held = {
        "out": b"x",
        "logs/.x": b"x",
        "logs//x": b"x",
        "recipe.toml.000001.x": b"x",
        "logs/a\x1b": b"x",
    }
    with pytest.raises(StorageError, match="holds no logs"):
        RunMirror(place, tmp_path / "m").fetch()
    monkeypatch.setattr(mirror, "_LONGEST_PIECE", 9)
    place.held = {"logs/a": b"x" * 9}
    assert RunMirror(place, tmp_path / "m").fetch() == 9
    place.held = {"logs/a": b"x" * 10}
    with pytest.raises(StorageError, match="is longer") as longer:
        RunMirror(place, tmp_path / "m").fetch()
    assert "Remove it" in longer.value.remedy


def test_a_mirror_fetches_what_is_missing_and_anew_what_changed(tmp_path: Path) -> None:
    place, target = Place(), tmp_path / "m" / "logs" / "a"
    place.held = {"logs/a": b"12\n", "logs/a.000001": b"34\n"}
    fetched = RunMirror(place, tmp_path / "m")
    assert (fetched.fetch(), target.read_bytes()) == (6, b"12\n34\n")
    place.held["logs/a.000001"] = b"34\n56\n"
    assert (fetched.fetch(), target.read_bytes()) == (3, b"12\n34\n56\n"), "it has grown"
    place.held["logs/a"] = b"78\n"
    assert (RunMirror(place, tmp_path / "m").fetch(), target.read_bytes()) == (9, b"78\n34\n56\n")
    place.held = {"logs/a": b"78\n"}
    shorter = RunMirror(place, tmp_path / "m")
    assert (shorter.fetch(), target.read_bytes()) == (3, b"78\n"), "a piece is gone there"


def test_the_only_piece_is_fetched_anew_where_another_of_its_length_replaced_it(tmp_path: Path) -> None:
    place, target = Place(), tmp_path / "m" / "logs" / "a"
    place.held = {"logs/a": b"12\n"}
    fetched = RunMirror(place, tmp_path / "m")
    assert fetched.fetch() == 3
    place.held = {"logs/a": b"34\n"}
    assert (fetched.fetch(), target.read_bytes()) == (3, b"34\n")


@pytest.mark.parametrize("record", ["", "[]", '{"logs/a": 5}'])
def test_what_was_fetched_is_kept_where_no_record_of_it_can_be_read(record: str, tmp_path: Path) -> None:
    place = Place()
    place.held = {"logs/a": b"12\n"}
    assert RunMirror(place, tmp_path / "m").fetch() == 3
    (tmp_path / "m" / ".followed.json").write_text(record)
    assert RunMirror(place, tmp_path / "m").fetch() == 0


def test_a_whole_file_that_was_removed_here_is_fetched_again(tmp_path: Path) -> None:
    place = Place()
    place.held = {"recipe.toml": b"[run]\n"}
    fetched = RunMirror(place, tmp_path / "m")
    assert (fetched.fetch(), fetched.fetch()) == (6, 0)
    (tmp_path / "m" / "recipe.toml").unlink()
    assert fetched.fetch() == 6 and (tmp_path / "m" / "recipe.toml").read_bytes() == b"[run]\n"


def test_a_piece_that_changes_while_it_is_fetched_is_finished_by_the_next_fetch(tmp_path: Path) -> None:
    place, target = Place(), tmp_path / "m" / "logs" / "a"
    place.held = {"logs/a": b"12\n34\n", "logs/a.000001": b"56\n"}
    listed = place.entries()
    place.entries = lambda: listed  # type: ignore[method-assign]
    place.held["logs/a"] = b"12\n"
    fetched = RunMirror(place, tmp_path / "m")
    assert (fetched.fetch(), target.read_bytes()) == (3, b"12\n")
    place.held["logs/a"] = b"12\n34\n more"
    assert (fetched.fetch(), target.read_bytes()) == (6, b"12\n34\n56\n"), "and no more than was listed"


def test_a_whole_file_without_a_mark_is_fetched_each_time(tmp_path: Path) -> None:
    place = Place()
    place.held = {"recipe.toml": b"[run]\n"}
    fetched = RunMirror(place, tmp_path / "m")
    assert (fetched.fetch(), fetched.fetch()) == (6, 0)
    place.entries = lambda: {"recipe.toml": ObjectStat(bytes=6, mark="")}  # type: ignore[method-assign]
    assert (fetched.fetch(), fetched.fetch()) == (6, 6)
    (tmp_path / "m" / ".followed.json").write_text('{"recipe.toml": 5}')
    assert RunMirror(place, tmp_path / "m").fetch() == 6


def test_a_tail_tells_due_steps_and_each_refused_update(run: RunDirectory) -> None:
    tail = RunTail(run, every_steps=4)
    assert [line[15:21] for line in tail.new_lines()] == ["step 4"]
    refused = {
        "event": "step",
        "step": 8,
        "loss": 3.0,
        "gradient_norm": 0.5,
        "update_applied": False,
        "time": 1.0,
    }
    saved = {"event": "checkpoint", "step": 9, "path": "step-9", "time": 2.0}
    held_out = {"event": "evaluation", "step": 9, "held_out_loss": 2.5, "time": "soon"}
    with run.journal().open("a") as journal:
        journal.write("".join(f"{json.dumps(event)}\n" for event in (saved, refused, held_out)))
    seen = list(tail.new_lines())
    assert [line[15:] for line in seen[1:]] == [
        "step 8 | loss 3.0000 | norm 0.50 | UPDATE REFUSED", "step 9: saved step-9"
    ]  # fmt: skip
    assert seen[0].endswith("step 9: held-out loss 2.5000") and seen[0].startswith("--:--:--")
    with run.journal().open("a") as journal:  # what comes from elsewhere may be anything
        journal.write("[" * 100_000 + "\n" + json.dumps(refused | {"loss": 10**400, "time": 10**400}) + "\n")
    assert list(tail.new_lines()) == ["--:--:-- step 8 | norm 0.50 | UPDATE REFUSED"]
    write_steps(run, 12, 13)
    assert [line[15:22] for line in tail.new_lines()] == ["step 12"]


def test_a_checkpoint_that_cannot_be_held_is_told_and_tried_again(
    bare: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = bare.checkpoints / "step-000005.i001"
    place.mkdir()
    checkpoint = CommittedCheckpoint(directory=place, step=5, incarnation=1)
    monkeypatch.setattr(published, "checkpoints", lambda rundir: [checkpoint])
    refusals: list[OSError] = [OSError(28, "No space left on device"), FileNotFoundError(2, "pruned")]
    link = published._link

    def refuse(source: Path, target: Path) -> None:
        if refusals:
            raise refusals.pop(0)
        link(source, target)

    monkeypatch.setattr(published, "_link", refuse)
    ours = CheckpointPublisher(bare, None, export=lambda source, target: None)  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="Holding a checkpoint"):
        ours.hold()
    ours.hold()
    assert not ours.is_waiting
    ours.hold()
    assert ours.is_waiting


def test_what_a_publisher_that_was_killed_left_half_done_is_made_anew(
    bare: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, held, sent = "step-000005.i001", bare.path / "publishing", list[list[str]]()
    checkpoint = CommittedCheckpoint(directory=bare.checkpoints / name, step=5, incarnation=1)
    for place in (checkpoint.directory, held / ".draft-1f", held / f".{name}.export"):
        place.mkdir(parents=True)
        (place / "part").write_text("old")
        os.utime(place, (1.0, 1.0))
    monkeypatch.setattr(published, "checkpoints", lambda rundir: [checkpoint])

    class Repository:
        def make(self) -> None: ...

        def branches(self) -> set[str]:
            return set()

        def publish_branch(self, branch: str, directory: Path, *, message: str) -> None:
            sent.append(sorted(path.name for path in directory.iterdir()))

    ours = CheckpointPublisher(bare, Repository(), export=lambda source, target: target.mkdir())  # type: ignore[arg-type]
    ours.hold()
    assert ours.publish_held() == [name] and sent == [[published.MARK]]
    assert not list(held.iterdir())


def test_the_newest_four_are_held_beside_the_one_that_is_published(
    bare: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = []
    for step in range(1, 8):
        place = bare.checkpoints / f"step-{step:06d}.i001"
        place.mkdir()
        (place / "part").write_text(str(step))
        listed.append(CommittedCheckpoint(directory=place, step=step, incarnation=1))
    monkeypatch.setattr(published, "checkpoints", lambda rundir: listed)
    link, linked = published._link, list[str]()
    monkeypatch.setattr(
        published, "_link", lambda source, target: linked.append(target.name) or link(source, target)
    )
    ours = CheckpointPublisher(bare, None, export=lambda source, target: None)  # type: ignore[arg-type]
    ours._publishing = listed[1].name
    ours.hold()
    assert len(list((bare.path / "publishing").iterdir())) == 7, "what the run has still takes no room"
    monkeypatch.setattr(published, "checkpoints", lambda rundir: [])
    ours.hold()
    held = sorted(path.name for path in (bare.path / "publishing").iterdir())
    assert held == [listed[number].name for number in (1, 3, 4, 5, 6)]
    monkeypatch.setattr(published, "checkpoints", lambda rundir: listed)
    ours.hold()
    assert sorted(path.name for path in (bare.path / "publishing").iterdir()) == held
    assert len(linked) == 7, "each is held once"
