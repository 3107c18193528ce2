import json
import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.disk_calls import recorded

from bloomery import durable
from bloomery.errors import CheckpointError, StorageError
from bloomery.events.incarnation import (
    begin,
    current,
    identity,
    is_same_run,
    merge_records,
    read_incarnations,
    visible,
)
from bloomery.events.run_directory import RunDirectory


def test_incarnations_are_numbered_from_one_and_name_their_base(tmp_path: Path):
    rundir = RunDirectory(tmp_path).create()
    assert current(rundir) == 0
    assert begin(rundir, base=None, reason="start") == 1
    assert begin(rundir, base=(100, 1), reason="rewind") == 2
    assert read_incarnations(rundir) == {1: None, 2: (100, 1)}


def test_processes_that_begin_at_once_get_different_numbers(tmp_path: Path):
    rundir = RunDirectory(tmp_path).create()
    children = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            for _ in range(5):
                begin(rundir, base=(1, 1), reason="race")
            os._exit(0)
        children.append(pid)
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
    assert sorted(read_incarnations(rundir)) == list(range(1, 21))


def test_a_number_that_another_machine_has_claimed_is_not_begun_here(tmp_path: Path):
    rundir, asked, claimed = RunDirectory(tmp_path).create(), list[int](), list[str]()

    def claim(number: int, record: str) -> bool:
        asked.append(number)
        claimed.append(record)
        return number > 2

    assert begin(rundir, base=(7, 0), reason="start", claim=claim) == 3
    assert asked == [1, 2, 3] and read_incarnations(rundir) == {3: (7, 0)}
    assert claimed == [rundir.incarnation(3).read_text()] * 3, "there and here it is the same record"


def test_a_record_that_a_crash_left_empty_never_began(tmp_path: Path):
    rundir = RunDirectory(tmp_path).create()
    begin(rundir, base=None, reason="start")
    rundir.incarnation(2).write_text("")
    assert read_incarnations(rundir) == {1: None}
    assert begin(rundir, base=(5, 1), reason="start") in (2, 3)
    assert set(read_incarnations(rundir)) <= {1, 3}


def test_a_damaged_record_is_named_and_not_guessed(tmp_path: Path):
    rundir = RunDirectory(tmp_path).create()
    rundir.incarnation(1).write_text('{"base": {"st')
    with pytest.raises(CheckpointError, match=r"000001\.json is damaged") as damage:
        read_incarnations(rundir)
    assert "Restore it from a backup" in damage.value.remedy


def test_a_directory_that_cannot_be_written_is_told():
    with pytest.raises(StorageError):
        begin(RunDirectory(Path("/proc/bloomery")), base=None, reason="start")


class Lives:
    """The slow, other implementation: every checkpoint remembers what its trainer had been through."""

    def __init__(self) -> None:
        self.bases: dict[int, tuple[int, int] | None] = {}
        self.saved: set[tuple[int, int]] = set()
        self.at: dict[int, int] = {}  # incarnation → step its trainer has come to

    def lineage(self) -> set[tuple[int, int]]:
        """Walk back from the newest incarnation: its own saves, then its base's up to the base, and so on."""
        kept: set[tuple[int, int]] = set()
        life, limit = max(self.bases, default=0), 10**9
        while life:
            kept |= {(step, who) for step, who in self.saved if who == life and step <= limit}
            base = self.bases[life]
            if base is None:
                break
            limit, life = min(limit, base[0]), base[1]
        return kept

    def begin(self, base: tuple[int, int] | None) -> None:
        number = len(self.bases) + 1
        self.bases[number] = base
        self.at[number] = base[0] if base else 0

    def step(self, life: int, steps: int, *, saves: bool) -> None:
        self.at[life] += steps
        if saves:
            self.saved.add((self.at[life], life))


@given(st.integers(0, 2**32), st.integers(5, 60))
def test_what_is_visible_is_exactly_the_newest_incarnations_past(seed: int, moves: int):
    dice, lives = random.Random(seed), Lives()
    lives.begin(None)
    for _ in range(moves):
        shown = sorted(visible(lives.saved, lives.bases))
        match dice.choice(["train", "train", "split brain", "restart", "rewind", "afresh"]):
            case "train":
                lives.step(max(lives.at), dice.randint(1, 9), saves=dice.random() < 0.7)
            case "split brain":  # an older trainer was not dead after all, trains on and saves
                lives.step(dice.choice(list(lives.at)), dice.randint(1, 9), saves=True)
            case "restart":
                lives.begin(shown[-1] if shown else None)
            case "rewind":
                lives.begin(dice.choice(shown) if shown else None)
                if dice.random() < 0.5:  # saved at once, so that a crash keeps the skip
                    lives.step(max(lives.at), 0, saves=True)
            case "afresh":
                if dice.random() < 0.1:
                    lives.begin(None)
        assert visible(lives.saved, lives.bases) == lives.lineage()


def test_the_incarnations_of_a_copy_are_adopted_all_or_not_at_all(tmp_path: Path, monkeypatch):
    one, other = RunDirectory(tmp_path / "one").create(), RunDirectory(tmp_path / "other").create()
    for base in (None, (5, 1), (9, 2)):
        begin(one, base=base, reason="start")
    records = {f"s3://b/incarnations/{path.name}": path.read_bytes() for path in one.incarnations.iterdir()}
    left = [2]

    def dies(path: Path, content: bytes) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        path.write_bytes(content)

    with monkeypatch.context() as patch:
        patch.setattr(durable, "write_new", dies)
        with pytest.raises(KeyboardInterrupt):
            merge_records(other, records)
    assert read_incarnations(other) == {} and identity(other) == ""
    for _ in range(2):
        merge_records(other, records)
        assert read_incarnations(other) == read_incarnations(one) and identity(other) == identity(one)
    begin(one, base=(12, 3), reason="start")
    later = {f"incarnations/{path.name}": path.read_bytes() for path in one.incarnations.iterdir()}
    merge_records(other, later)
    assert read_incarnations(other) == read_incarnations(one)


def test_the_incarnations_of_another_run_are_refused(tmp_path: Path):
    one, other = RunDirectory(tmp_path / "one").create(), RunDirectory(tmp_path / "other").create()
    for rundir in (one, other):
        begin(rundir, base=None, reason=str(rundir.path))
    assert identity(one) != identity(other)
    with pytest.raises(CheckpointError, match="belongs to another run"):
        merge_records(other, {"incarnations/000001.json": one.incarnation(1).read_bytes()})


def test_an_incarnation_and_its_name_are_on_the_disk_when_it_begins(tmp_path: Path):
    rundir = RunDirectory(tmp_path).create()
    with recorded() as calls:
        begin(rundir, base=None, reason="start")
    assert calls.names == [("sync", "000001.json"), ("sync", "incarnations")]


def test_who_continued_a_run_that_its_copy_continued_too_is_told_what_to_move(tmp_path: Path):
    one, other = RunDirectory(tmp_path / "one").create(), RunDirectory(tmp_path / "other").create()
    begin(one, base=None, reason="start")
    merge_records(other, {"x/000001.json": one.incarnation(1).read_bytes()})
    for rundir in (one, other):
        begin(rundir, base=(5, 1), reason=str(rundir.path))
    copy = {f"x/{path.name}": path.read_bytes() for path in one.incarnations.iterdir()}
    with pytest.raises(CheckpointError, match=r"x/000002\.json were both continued as incarnation 2"):
        merge_records(other, copy)
    assert is_same_run(other, copy) and is_same_run(other, {"9/000001.json": copy["x/000001.json"]})
    assert not is_same_run(other, {}) and not is_same_run(other, {"x/000001.json": b"\n"})
    assert not is_same_run(RunDirectory(tmp_path / "new"), copy)


def test_a_run_knows_its_copy_where_a_power_cut_left_a_first_record_empty(tmp_path: Path):
    run, foreign = RunDirectory(tmp_path / "run").create(), RunDirectory(tmp_path / "foreign").create()
    for rundir in (run, foreign):
        begin(rundir, base=None, reason="start")
        begin(rundir, base=(5, 1), reason=f"of {rundir.path.name}")
    copy = {f"x/{path.name}": path.read_bytes() for path in run.incarnations.iterdir()}
    cut_there = copy | {"x/000001.json": b""}
    assert is_same_run(run, cut_there) and not is_same_run(foreign, copy) | is_same_run(foreign, cut_there)
    run.incarnation(1).write_bytes(b"")
    assert is_same_run(run, copy) and is_same_run(run, cut_there)


def test_a_record_that_a_crash_left_empty_is_taken_from_the_copy_and_never_the_other_way(tmp_path: Path):
    one, other = RunDirectory(tmp_path / "one").create(), RunDirectory(tmp_path / "other").create()
    for base in (None, (5, 1)):
        begin(one, base=base, reason="start")
    copy = {f"x/{path.name}": path.read_bytes() for path in one.incarnations.iterdir()}
    merge_records(other, copy)
    other.incarnation(2).write_text("")
    merge_records(other, copy)
    assert read_incarnations(other) == {1: None, 2: (5, 1)}
    merge_records(other, {**copy, "x/000002.json": b"", "x/000003.json": b"\n"})
    assert read_incarnations(other) == {1: None, 2: (5, 1)}


def test_a_record_says_who_began_it_when_and_why(tmp_path: Path):
    rundir = RunDirectory(tmp_path).create()
    begin(rundir, base=(7, 3), reason="a rewind")
    record = json.loads(rundir.incarnation(1).read_text())
    assert record["base"] == {"step": 7, "incarnation": 3} and record["reason"] == "a rewind"
    assert (record["pid"], record["host"], record["format"]) == (os.getpid(), os.uname().nodename, 1)
    assert len(record["token"]) == 16
    (rundir.incarnations / "notes.json").write_text("of a person")
    rundir.incarnation(12).write_text(json.dumps({"base": None}))
    assert begin(rundir, base=None, reason="start") == 13 and set(read_incarnations(rundir)) == {1, 12, 13}


def copy_of(rundir: RunDirectory) -> dict[str, bytes]:
    return {f"s3://b/incarnations/{path.name}": path.read_bytes() for path in rundir.incarnations.iterdir()}


def test_a_run_begins_where_no_directory_is_yet(tmp_path: Path):
    rundir = RunDirectory(tmp_path / "new")
    assert begin(rundir, base=None, reason="für Köln") == 1
    assert begin(rundir, base=(5, 1), reason="start") == 2 == current(rundir)
    assert "für Köln" in rundir.incarnation(1).read_text(encoding="utf-8")


def test_a_number_that_somebody_took_in_between_is_not_begun_twice(tmp_path: Path):
    rundir = RunDirectory(tmp_path).create()

    def claim(number: int, record: str) -> bool:
        if number == 1:
            rundir.incarnation(1).write_text('{"base": null}')
        return True

    assert begin(rundir, base=(3, 1), reason="start", claim=claim) == 2
    assert read_incarnations(rundir) == {1: None, 2: (3, 1)}


def test_adopted_incarnations_are_on_the_disk_before_they_take_their_place(tmp_path: Path):
    one, other = RunDirectory(tmp_path / "one").create(), RunDirectory(tmp_path / "other")
    begin(one, base=None, reason="start")
    begin(one, base=(5, 1), reason="start")
    with recorded() as calls:
        merge_records(other, copy_of(one))
    at = calls.index("rename", "incarnations")
    assert all(calls.synced_before(f"00000{number}.json", at=at) for number in (1, 2))
    assert calls.synced_before("incarnations.partial", at=at)
    assert read_incarnations(other) == read_incarnations(one)


def test_who_may_not_merge_two_runs_is_told_what_to_do_instead(tmp_path: Path):
    one, other = RunDirectory(tmp_path / "one").create(), RunDirectory(tmp_path / "other").create()
    for rundir in (one, other):
        begin(rundir, base=None, reason="start")
    with pytest.raises(CheckpointError) as foreign:
        merge_records(other, copy_of(one))
    assert "another run.name or backup.url" in foreign.value.remedy
    parted = RunDirectory(tmp_path / "parted")
    merge_records(parted, copy_of(one))
    for rundir in (one, parted):
        begin(rundir, base=(5, 1), reason="start")
    with pytest.raises(CheckpointError) as apart:
        merge_records(parted, copy_of(one))
    assert f"move {parted.path} away and start again" in apart.value.remedy


def test_of_several_incarnations_that_parted_the_earliest_is_named(tmp_path: Path):
    one, other = RunDirectory(tmp_path / "one").create(), RunDirectory(tmp_path / "other")
    begin(one, base=None, reason="start")
    merge_records(other, copy_of(one))
    for number in range(30, 1, -1):  # so that no directory lists them in their order by chance
        for rundir in (one, other):
            rundir.incarnation(number).write_text(json.dumps({"base": None, "of": str(rundir.path)}))
    with pytest.raises(CheckpointError, match="both continued as incarnation 2:"):
        merge_records(other, copy_of(one))
    assert identity(one) == identity(other)


def test_a_run_is_told_by_its_first_record_that_is_not_empty(tmp_path: Path):
    rundirs = [RunDirectory(tmp_path / name).create() for name in ("one", "other")]
    for rundir in rundirs:
        rundir.incarnation(1).write_text("\n")
    assert [identity(rundir) for rundir in rundirs] == ["", ""]
    begun = [begin(rundir, base=None, reason="start") for rundir in rundirs]
    assert begun == [2, 2] and identity(rundirs[0]) != identity(rundirs[1])


def test_incarnations_that_cannot_be_fetched_are_told_with_their_place(tmp_path: Path):
    one = RunDirectory(tmp_path / "one").create()
    begin(one, base=None, reason="start")
    with pytest.raises(StorageError, match=r"Fetching the incarnations.*/proc/bloomery/incarnations"):
        merge_records(RunDirectory(Path("/proc/bloomery")), copy_of(one))


def test_a_later_incarnation_from_nothing_hides_all_that_was_before():
    items = {(5, 1), (9, 2), (3, 3)}
    assert visible(items, {1: None, 2: (5, 1), 3: None}) == {(3, 3)}
    assert visible(items, {1: None, 2: (5, 1), 3: (9, 2)}) == items
