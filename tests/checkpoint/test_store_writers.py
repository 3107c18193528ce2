"""What one rank's writer sends of a save straight to object storage, and what it takes back."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash

from bloomery.checkpoint.format.commit import Part
from bloomery.checkpoint.format.deadlines import PartProgress
from bloomery.checkpoint.format.manifest import MANIFEST, FileRecord, read_manifest
from bloomery.checkpoint.writer import process as writer
from bloomery.checkpoint.writer import store_place
from bloomery.checkpoint.writer.shared_buffer import SharedBuffer
from bloomery.checkpoint.writer.store_place import ObjectPartWriter
from bloomery.errors import RunBusy, StorageError
from bloomery.objects import Objects

NAME = "mine"


class TestWriters:
    """Two writers of one save, with what each is told; their parts are empty but for a file of the first."""

    @pytest.fixture(autouse=True)
    def orders(self, tmp_path: Path) -> None:
        self.url = f"file://{tmp_path}/store/{NAME}"
        self.partials = [tmp_path / node / "checkpoints" / "step-000001.i001.partial" for node in "ab"]
        self.remote = Objects(self.url)

    def give(self, rank: int, attempt: int = 1, **more: Any) -> dict[str, object]:
        order = {
            **{"partial": str(self.partials[rank]), "store": self.url, "rank": rank, "world": 2},
            **{"attempt": attempt, "files": [], "boxes": [], "time": 1.0, "values": {}},
            **{"checkpoint": {"step": 1, "incarnation": 1, "about": {}}, "parts_s": 60.0, "stall_s": 60.0},
            **more,
        }
        return writer._answer(order, buffer=None)  # type: ignore[arg-type]  — no file is written

    def test_a_writer_that_takes_anothers_place_finds_what_is_done(self) -> None:
        assert "failure" not in self.give(1) and "failure" not in self.give(0)
        before = [entry.key for entry in self.remote.entries()]
        assert before == [
            "checkpoints/step-000001.i001/index.json",
            "checkpoints/step-000001.i001/manifest.json",
        ]
        for rank in (1, 0, 1):
            assert self.give(rank, attempt=2)["bytes"] == 0
        assert [entry.key for entry in self.remote.entries()] == before
        assert (self.partials[0].with_suffix("") / MANIFEST).exists()

    def test_a_checkpoint_in_a_store_has_the_time_and_the_values_of_its_order(self) -> None:
        checkpoint = {"step": 1, "incarnation": 4, "about": {"told": 1}}
        more: dict[str, Any] = {"time": 5.0, "values": {"train": {"at": 1}}, "checkpoint": checkpoint}
        assert "failure" not in self.give(1) and "failure" not in self.give(0, **more)
        manifest = read_manifest(self.partials[0].with_suffix(""))
        assert (manifest.step, manifest.incarnation, manifest.time, manifest.world) == (1, 4, 5.0, 2)
        assert manifest.values == {"train": {"at": 1}} and manifest.about == {"told": 1}

    def test_a_rank_that_failed_is_named_to_the_first(self) -> None:
        ObjectPartWriter(self.partials[1], self.url).abandon(
            1, files=(), why={"message": "it broke", "remedy": ""}
        )
        failure = self.give(0)["failure"]
        assert isinstance(failure, dict) and failure["message"] == "rank 1: it broke"
        assert self.remote.entries() == []

    def test_a_store_that_is_gone_fails_the_save_and_ends_no_writer(self, tmp_path: Path) -> None:
        shutil.rmtree(tmp_path / "store")
        (tmp_path / "store").write_text("where the mount was")
        failure = self.give(0)["failure"]
        assert isinstance(failure, dict) and failure["kind"] == "storage"
        assert "does not exist" in failure["message"]

    def test_a_rank_of_which_nothing_is_heard_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(store_place, "_FIRST_POLL_S", 0.0)
        failure = self.give(0, stall_s=-1.0)["failure"]
        assert isinstance(failure, dict) and "rank 1 has written nothing" in failure["message"]

    def test_what_is_committed_is_not_taken_back(self) -> None:
        assert "failure" not in self.give(1) and "failure" not in self.give(0)
        before = [entry.key for entry in self.remote.entries()]
        ObjectPartWriter(self.partials[0], self.url).abandon(0, files=(), why={"message": "", "remedy": ""})
        assert [entry.key for entry in self.remote.entries()] == before

    def test_a_part_that_may_be_committed_any_moment_stays_and_one_that_was_not_left_goes(self) -> None:
        second, why = ObjectPartWriter(self.partials[1], self.url), {"message": "it broke", "remedy": ""}
        for name in ("one", "two", "three"):
            self.remote.put(f"checkpoints/step-000001.i001/{name}", b"half")
        second.abandon(1, files=("one", "three"), why=why)
        left = [entry.key for entry in self.remote.entries()]
        assert left == ["checkpoints/step-000001.i001/two", "saving/step-000001.i001/part-r00001.json"]
        second.record(1, Part(files=(), boxes=()))
        second.abandon(1, files=("two",), why=why)
        assert self.remote.exists("checkpoints/step-000001.i001/two")
        assert second.written_before({"rank": 1}) == Part(files=(), boxes=())
        ObjectPartWriter(self.partials[0], self.url).abandon(0, files=(), why=why)
        assert self.remote.entries() == []

    def test_an_index_that_arrives_changed_and_a_file_that_was_lost_commit_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first, about = ObjectPartWriter(self.partials[0], self.url), {"step": 1, "incarnation": 2}
        usual = {**about, "time": 1.0, "values": {}, "about": {}}
        lost = Part(files=(FileRecord(name="gone", bytes=7, xxh3_128="", blocks=""),), boxes=())
        with pytest.raises(StorageError, match="has None bytes of the 7 sent"):
            first.commit_parts([lost], **usual)
        self.remote.put("checkpoints/step-000001.i001/gone", b"12345")
        with pytest.raises(StorageError, match="has 5 bytes of the 7 sent"):
            first.commit_parts([lost], **usual)
        self.remote.put("incarnations/000003.json", b"{}")
        with pytest.raises(RunBusy, match="incarnation 3"):
            first.commit_parts([Part(files=(), boxes=())], **usual)
        self.remote.delete("incarnations/000003.json")
        self.remote.put("incarnations/000002.json", b"{}")
        with monkeypatch.context() as damaging:
            damaging.setattr(Objects, "digest", lambda store, key: "0")
            with pytest.raises(StorageError, match=r"index.json is not what was sent"):
                first.commit_parts([Part(files=(), boxes=())], **usual)
        assert not self.remote.exists(f"checkpoints/step-000001.i001/{MANIFEST}")
        self.remote.put(f"checkpoints/step-000001.i001/{MANIFEST}", b"another's")
        with pytest.raises(StorageError, match="is another checkpoint's"):
            first.commit_parts([Part(files=(), boxes=())], **usual)

    def test_a_file_that_the_store_does_not_vouch_for_is_read_back(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = ObjectPartWriter(self.partials[0], self.url)
        content = [memoryview(b"abc"), memoryview(b"de")]
        record = first.send("f", size=5, pieces=lambda: content)
        assert (record.name, record.bytes) == ("f", 5)
        assert self.remote.digest("checkpoints/step-000001.i001/f") == record.xxh3_128
        monkeypatch.setattr(Objects, "digest", lambda store, key: "0")
        with pytest.raises(StorageError, match="is not what was sent"):
            first.send("f", size=5, pieces=lambda: content)

    def test_what_was_staged_is_sent_file_by_file_from_its_place_in_the_buffer(self) -> None:
        buffer = SharedBuffer.create(8192, name="sent")
        try:
            buffer.view[:8] = b"abcdefgh"
            buffer.filled, buffer.is_urgent = 8192, True
            files = [{"name": "one", "offset": 0, "bytes": 3}, {"name": "two", "offset": 3, "bytes": 5}]
            place, progress = ObjectPartWriter(self.partials[1], self.url), PartProgress(lambda count: None)
            part = place.write({"files": files, "boxes": []}, buffer, progress)
        finally:
            buffer.close()
        assert [(file.name, file.bytes) for file in part.files] == [("one", 3), ("two", 5)]
        contents = [self.remote.content(f"checkpoints/step-000001.i001/{name}") for name in ("one", "two")]
        assert contents == [b"abc", b"defgh"] and progress.count == 8
        assert [file.xxh3_128 for file in part.files] == [xxhash.xxh3_128_hexdigest(one) for one in contents]

    def test_a_rank_is_waited_for_until_the_deadline_and_no_longer(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        failure = self.give(0, parts_s=-1.0)["failure"]
        assert isinstance(failure, dict) and "rank 1 did not write its part" in failure["message"]
        pauses: list[float] = []

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 3:
                ObjectPartWriter(self.partials[1], self.url).record(1, Part(files=(), boxes=()))

        monkeypatch.setattr(store_place.time, "sleep", pause)
        assert "failure" not in self.give(0)
        assert pauses == pytest.approx([0.02, 0.03, 0.045])

    def test_a_store_that_is_away_while_a_save_is_given_up_is_no_further_error(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def away(*_: object) -> None:
            raise OSError(5, "no answer")

        monkeypatch.setattr(Objects, "exists", away)
        for rank in (0, 1):
            ObjectPartWriter(self.partials[rank], self.url).abandon(rank, files=(), why={})
        assert caplog.text.count("stays for now: [Errno 5] no answer") == 2

    def test_what_killed_uploads_of_a_save_left_goes_with_it(self, tmp_path: Path) -> None:
        left = tmp_path / "store" / NAME / "checkpoints" / "step-000001.i001" / "f#1"
        left.parent.mkdir(parents=True)
        left.write_bytes(b"half")
        os.utime(left, (0, 0))
        ObjectPartWriter(self.partials[0], self.url).clear()
        assert not left.exists()

    def test_notes_of_progress_are_for_whoever_waits(self) -> None:
        told: list[int] = []
        progress = ObjectPartWriter(self.partials[1], self.url).progress(1, told.append)
        progress._noted_s -= 1e6
        progress.add(4096)
        assert self.remote.content("saving/step-000001.i001/progress-r00001") == b"4096"

    def test_a_file_whose_sending_began_anew_is_recorded_as_it_is_in_the_store(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        send_pieces = Objects.send_pieces

        def broken_once(store: Objects, key: str, *, size: int, pieces: Callable[[], Any]) -> bool:
            next(iter(pieces()))
            return send_pieces(store, key, size=size, pieces=pieces)

        monkeypatch.setattr(Objects, "send_pieces", broken_once)
        first = ObjectPartWriter(self.partials[0], self.url)
        record = first.send("f", size=5, pieces=lambda: [memoryview(b"abc"), memoryview(b"de")])
        assert (record.bytes, record.xxh3_128) == (5, xxhash.xxh3_128_hexdigest(b"abcde"))

    def test_a_note_of_progress_is_a_request_each_minute_and_no_more(self) -> None:
        progress = ObjectPartWriter(self.partials[1], self.url).progress(1, lambda count: None)
        for since_s, keys in ((50.0, []), (9.0, []), (1.0, ["saving/step-000001.i001/progress-r00001"])):
            progress._noted_s -= since_s
            progress.add(1)
            assert [entry.key for entry in self.remote.entries()] == keys

    def test_records_that_are_long_in_coming_are_looked_for_each_two_seconds(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pauses: list[float] = []

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 20:
                ObjectPartWriter(self.partials[1], self.url).record(1, Part(files=(), boxes=()))

        monkeypatch.setattr(store_place.time, "sleep", pause)
        assert "failure" not in self.give(0)
        assert max(pauses) == pauses[-1] == 2.0

    def test_the_first_rank_learns_of_a_failure_though_its_files_cannot_be_removed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def away(*_: object) -> None:
            raise OSError(5, "no answer")

        with monkeypatch.context() as cut:
            cut.setattr(Objects, "delete_all", away)
            second = ObjectPartWriter(self.partials[1], self.url)
            second.abandon(1, files=("f",), why={"message": "it broke", "remedy": ""})
        failure = self.give(0)["failure"]
        assert isinstance(failure, dict) and failure["message"] == "rank 1: it broke"

    def test_of_ranks_that_are_late_the_first_is_named(self) -> None:
        failure = self.give(0, parts_s=-1.0, world=4)["failure"]
        assert isinstance(failure, dict) and "rank 1 did not write its part" in failure["message"]

    def test_what_is_sent_rests_until_the_save_is_urgent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[bool] = []

        monkeypatch.setattr(
            store_place,
            "CpuThrottle",
            lambda is_urgent: SimpleNamespace(rest=lambda: asked.append(is_urgent())),
        )
        monkeypatch.setattr(store_place, "_CHUNK_BYTES", 4)
        buffer = SharedBuffer.create(8192, name="sent")
        try:
            buffer.filled = 8192
            pieces = store_place._staged(buffer, 0, 12, PartProgress(lambda count: None))
            for buffer.is_urgent in (False, False, True):
                next(pieces)
        finally:
            pieces.close()
            buffer.close()
        assert asked == [False, True]
