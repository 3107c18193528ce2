"""What a writer tells of its progress, and who is thought to be stuck."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from bloomery.checkpoint.format import deadlines
from bloomery.checkpoint.format.deadlines import (
    Deadlines,
    PartProgress,
    StallWatch,
    note_progress,
    noted_progress,
    progress_files,
)
from bloomery.checkpoint.format.manifest import DamagedCheckpoint
from bloomery.checkpoint.writer import ranks as ranks_module
from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.errors import BloomeryError, CheckpointError, StorageError


class Clock:
    now_s = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(deadlines, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


def test_a_trainer_is_told_each_second_and_the_first_rank_more_rarely(clock: Clock) -> None:
    told, noted = list[tuple[float, int]](), list[tuple[float, int]]()
    progress = PartProgress(
        lambda count: told.append((clock.now_s, count)),
        note=lambda count: noted.append((clock.now_s, count)),
        note_every_s=5.0,
    )
    for _ in range(48):
        clock.now_s += 0.25
        progress.add(10)
    assert progress.count == 480
    assert told == [(100.0 + second, 40 * second) for second in range(1, 13)]
    assert noted == [(105.0, 200), (110.0, 400)]


def test_a_note_that_cannot_be_left_does_not_end_the_save(clock: Clock) -> None:
    def refuse(count: int) -> None:
        raise OSError(28, "no space left on device")

    progress = PartProgress(lambda count: None, note=refuse, note_every_s=0.0)
    progress.add(7)
    progress.add(8)
    assert progress.count == 15


def test_whose_number_stays_the_same_for_too_long_is_stuck_and_who_moves_is_not(clock: Clock) -> None:
    watch = StallWatch(10.0)
    seen = []
    for second, number in ((9, 0), (10, 0), (11, 0), (12, 5), (22, 5), (23, 5), (24, 4), (34, 4)):
        clock.now_s = 100.0 + second
        seen.append(watch.is_stalled(number))
    assert seen == [False, False, True, False, False, True, False, False]


def test_notes_of_progress_are_each_ranks_own_and_what_cannot_be_read_counts_as_nothing(
    tmp_path: Path,
) -> None:
    assert noted_progress(tmp_path, 3) == 0 and progress_files(tmp_path) == []
    for rank, count in ((3, 4096), (12, 1), (3, 8192)):
        note_progress(tmp_path, rank, count)
    assert [noted_progress(tmp_path, rank) for rank in (3, 12, 0)] == [8192, 1, 0]
    assert len(progress_files(tmp_path)) == 2
    for path in progress_files(tmp_path):
        path.write_text("many")
    assert noted_progress(tmp_path, 3) == noted_progress(tmp_path / "gone", 3) == 0
    note_progress(tmp_path / "gone", 3, 1)
    assert not (tmp_path / "gone").exists(), "a save that was given up is not begun again by a note"


class TwoRanks:
    """What rank 0 sees where rank 1 has this to say in each gather; the last is said for ever."""

    def __init__(self, *says: object) -> None:
        self._says, self.heard = list(says), list[object]()

    def gather(self, value: object) -> list[object]:
        self.heard.append(value)
        return [value, self._says.pop(0) if len(self._says) > 1 else self._says[0]]

    @property
    def ranks(self) -> Ranks:
        return Ranks(rank=0, world=2, gather=self.gather)


def failed(kind: str) -> dict[str, object]:
    return {"result": None, "failure": {"kind": kind, "message": "it is broken", "remedy": "Mend it."}}


@pytest.mark.parametrize(
    ("kind", "raised"), [("storage", StorageError), ("damaged", DamagedCheckpoint), ("", CheckpointError)]
)
def test_what_another_rank_raises_is_raised_here_with_its_kind_and_who_it_was(
    kind: str, raised: type[BloomeryError]
) -> None:
    with pytest.raises(raised, match="rank 1: it is broken") as told:
        TwoRanks(failed(kind)).ranks.run_on_all(lambda: 1)
    assert type(told.value) is raised and (kind == "damaged" or told.value.remedy == "Mend it.")


@pytest.mark.parametrize(
    ("mine", "kind"),
    [
        (StorageError("no space", remedy="Free some."), "storage"),
        (DamagedCheckpoint("a block differs"), "damaged"),
        (CheckpointError("another model", remedy="Take its recipe."), ""),
    ],
    ids=["storage", "damaged", "other"],
)
def test_ones_own_error_is_raised_as_it_is_after_the_others_have_heard_of_it(
    mine: BloomeryError, kind: str
) -> None:
    two = TwoRanks({"result": 5, "failure": None})

    def fail() -> None:
        raise mine

    with pytest.raises(type(mine)) as told:
        two.ranks.run_on_all(fail)
    assert told.value is mine
    (heard,) = two.heard
    assert heard == {
        "result": None,
        "failure": {"kind": kind, "message": mine.message, "remedy": mine.remedy},
    }


def test_results_come_in_the_order_of_the_ranks_and_the_firsts_is_everybodys() -> None:
    assert TwoRanks({"result": 5, "failure": None}).ranks.run_on_all(lambda: 4) == [4, 5]
    assert TwoRanks({"result": None, "failure": None}).ranks.run_on_first(lambda: 4) == 4
    second = Ranks(rank=1, world=2, gather=lambda value: [{"result": 7, "failure": None}, value])
    assert (
        second.run_on_first(lambda: pytest.fail("only the first rank does it")) == 7 and not second.is_first
    )
    assert Ranks().is_first and Ranks().run_on_all(lambda: 4) == [4] and Ranks().poll_on_first(lambda: 4) == 4


def test_the_one_rank_there_is_does_it_itself_and_one_that_is_late_is_named_by_all() -> None:
    done_by = []
    Ranks().poll_on_all(lambda: done_by.append(threading.current_thread()))
    assert done_by == [threading.current_thread()]
    with pytest.raises(
        StorageError, match=r"(?s)rank 1 has been busy with pruning for 60 s.*What was saved is safe"
    ):
        TwoRanks([False, "pruning for 60 s"]).ranks.poll_on_all(lambda: 4)
    two = TwoRanks([False, ""], [False, ""], [True, ""], {"result": 5, "failure": None})
    assert two.ranks.poll_on_all(lambda: 4) == [4, 5] and len(two.heard) == 4


def test_a_rank_that_writes_nothing_for_too_long_is_named_and_one_that_goes_on_is_waited_for(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module, "POLL_S", 0.01)
    go_on, heard = threading.Event(), list[object]()
    progress = PartProgress(lambda count: None)

    def gather(value: object) -> list[object]:
        heard.append(value)
        clock.now_s += 200.0
        progress.count += 5 if len(heard) <= 5 else 0
        return [value, [True, ""]]

    why = "its part of it without a new byte for 300 s"
    with pytest.raises(StorageError, match=f"rank 0 has been busy with {why}"):
        Ranks(rank=0, world=2, gather=gather).poll_on_all(
            go_on.wait, stall_s=300.0, progress=progress, doing="its part of it"
        )
    go_on.set()
    assert heard == [[False, ""]] * 7 + [[False, why]] and progress.count == 25


def test_each_wait_of_a_save_follows_from_what_is_written_and_outlasts_those_within_it() -> None:
    waits = Deadlines(part_bytes=2 * 10**9, largest_part_bytes=8 * 10**9)
    assert waits.parts_s == 300 + 4000
    assert waits.stall_s == 60 + 400 and waits.silence_s == 460 + 60
    assert waits.answer_s == 2 * 4300 + (60 + 100) + 60
    assert waits.staging_s == 300 + 100
    assert waits.prune_s == 2 * 4300 + 60
    assert waits.finish_s == 2 * (8820 + 60) + 8660
    small = Deadlines(part_bytes=0, largest_part_bytes=20_000_000)
    assert small.stall_s == 300, "sending so little to a partner takes less"
