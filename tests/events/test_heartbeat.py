"""The heartbeat of a rank: what it says, what it costs at the size of a large run, and how it ends."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError

import pytest
from tests.faults.commands import wait_for

from bloomery.errors import BloomeryError
from bloomery.events import heartbeat as heartbeat_file
from bloomery.events.heartbeat import (
    ATTEMPT,
    MOST_WRITES_PER_S,
    STARTING,
    Heartbeat,
    RankActivity,
    RankBeat,
    has_died_here,
    interval_of,
    process_age_s,
    read_beat,
)

NEVER_S = 3600.0


def beating(path: Path, **settings: object) -> Heartbeat:
    return Heartbeat(path, interval_s=NEVER_S, **settings)  # type: ignore[arg-type]  — checked where written


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_heartbeat_that_cannot_be_read_for_a_moment_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(heartbeat_file, "read_heartbeat", refuse)
    assert read_beat(tmp_path / "0-1") is None


def test_a_heartbeat_says_where_the_rank_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ATTEMPT, "a-2")
    with beating(tmp_path / "0-3", rank=3, world=8, device="cuda:3", host="node7").start() as heartbeat:
        heartbeat.at(step=12, incarnation=2)
        heartbeat.enter(RankActivity.REDUCING)
        heartbeat.write()
        beat = read_beat(heartbeat.path)
    assert beat is not None
    assert (beat.rank, beat.world, beat.step, beat.incarnation) == (3, 8, 12, 2)
    assert (beat.host, beat.device, beat.attempt) == ("node7", "cuda:3", "a-2")
    assert beat.activity == "reducing gradients" and beat.since <= beat.time


def test_a_thread_writes_while_the_rank_stands_still(tmp_path: Path) -> None:
    written = threading.Event()
    heartbeat = Heartbeat(tmp_path / "0-0", interval_s=0.01)
    with heartbeat.start():
        first = read_beat(heartbeat.path)
        assert first is not None
        for _ in range(3000):
            later = read_beat(heartbeat.path)
            if later is not None and later.time > first.time:
                written.set()
                break
            threading.Event().wait(0.01)
    assert written.is_set() and later is not None and later.moves == first.moves


def test_an_exception_is_kept_with_the_place_where_it_was_raised(tmp_path: Path) -> None:
    heartbeat = beating(tmp_path / "0-0")
    with pytest.raises(ZeroDivisionError), heartbeat.start():
        _ = 1 / 0
    beat = read_beat(heartbeat.path)
    assert beat is not None and beat.activity == "ended"
    assert beat.error == "ZeroDivisionError: division by zero" and "_ = 1 / 0" in beat.where
    for error, told in (
        (BloomeryError("x"), "BloomeryError: x"),
        (URLError("x"), "urllib.error.URLError: <"),
    ):
        with pytest.raises(type(error)), beating(tmp_path / "0-1").start():
            raise error
        beat = read_beat(tmp_path / "0-1")
        assert beat is not None and beat.error.startswith(told)


def test_an_exception_that_names_a_path_which_is_no_utf_8_is_kept_and_not_replaced(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    with pytest.raises(RuntimeError, match="cannot read"), beating(tmp_path / "0-0").start() as heartbeat:
        raise RuntimeError(f"cannot read /data/{name}/x.bin")
    beat = read_beat(heartbeat.path)
    assert beat is not None and beat.error == "RuntimeError: cannot read /data/caf?/x.bin"


@pytest.mark.parametrize("damage", ({"step": float("inf")}, {"gap_s": 10**400}, {"pid": None}))
def test_a_damaged_number_makes_a_heartbeat_one_that_cannot_be_read(
    tmp_path: Path, damage: dict[str, object]
) -> None:
    with beating(tmp_path / "0-0").start() as heartbeat:
        record = json.loads(heartbeat.path.read_text())
    (tmp_path / "0-1").write_text(json.dumps(record | damage))
    assert read_beat(tmp_path / "0-1") is None


def test_a_heartbeat_that_never_started_leaves_the_file_of_another_alone(tmp_path: Path) -> None:
    with beating(tmp_path / "0-0", host="first").start(), beating(tmp_path / "0-0", host="second"):
        pass
    beat = read_beat(tmp_path / "0-0")
    assert beat is not None and beat.host == "first"


def test_384_ranks_write_few_files_a_second_and_few_bytes(tmp_path: Path) -> None:
    heartbeat = Heartbeat(
        tmp_path / "0-383", rank=383, world=384, device="cuda:7", host="jean-zay-iam52", bus="0000:c9:00"
    )
    for _ in range(2):
        for activity in RankActivity:
            heartbeat.enter(activity)
    heartbeat.write()
    assert 384 / interval_of(384) <= MOST_WRITES_PER_S
    assert 384 * heartbeat.path.stat().st_size < 512 * 1024
    assert len(list(tmp_path.iterdir())) == 1
    assert interval_of(1) == 1.0
    beat = read_beat(heartbeat.path)
    assert beat is not None and (beat.device, beat.bus) == ("cuda:7", "0000:c9:00")


def test_a_file_that_is_no_heartbeat_is_none(tmp_path: Path) -> None:
    for content in ("", "[]", "{", json.dumps({"rank": "x"}), json.dumps({"longest_s": 3})):
        (tmp_path / "0-0").write_text(content)
        assert read_beat(tmp_path / "0-0") is None


def test_a_process_that_is_gone_is_told_from_one_that_lives_or_ended_well(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from bloomery.events.heartbeat import Heartbeat\n"
        "Heartbeat(Path(sys.argv[1]), interval_s=3600).start(); print('ready', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "0-0")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    beat = read_beat(tmp_path / "0-0")
    assert beat is not None
    later = beat.time + 2.0
    assert not has_died_here(beat, now=later)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has taken its status
    assert has_died_here(beat, now=later)
    process.communicate()
    assert has_died_here(beat, now=later)
    assert not has_died_here(
        beat, now=beat.time
    )  # as fresh as this, another machine of the name may write it
    for other in ({"host": "elsewhere"}, {"activity": RankActivity.ENDED}, {"pid": 0}):
        assert not has_died_here(replace(beat, **other), now=later)


def test_the_seconds_of_each_activity_are_told_once_and_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    stand_in = SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0])
    monkeypatch.setattr("bloomery.events.heartbeat.time", stand_in)
    monkeypatch.setattr("bloomery.events.heartbeat.process_age_s", lambda: 7.0)
    heartbeat = beating(tmp_path / "0-0")
    now[0] += 1.0
    heartbeat.enter(RankActivity.LOADING)
    now[0] += 2.5
    heartbeat.enter(RankActivity.COMPUTING)
    now[0] += 4.0
    assert heartbeat.take_spent() == {STARTING: 8.0, RankActivity.LOADING: 2.5, RankActivity.COMPUTING: 4.0}
    now[0] += 1.0
    assert heartbeat.take_spent() == {RankActivity.COMPUTING: 1.0}, "the same turn goes on"
    told = 0.0
    for _ in range(1000):
        now[0] += 0.00004
        told += sum(heartbeat.take_spent().values())
    assert told == pytest.approx(0.04, abs=2e-4), "nothing is lost by rounding"


def test_a_heartbeat_says_how_long_turns_took_and_the_longest_time_between_two_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    stand_in = SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0])
    monkeypatch.setattr("bloomery.events.heartbeat.time", stand_in)
    heartbeat = beating(tmp_path / "0-0")
    for seconds in (9.0, 2.0, 3.0, 1.0):
        heartbeat.enter(RankActivity.COMPUTING)
        now[0] += seconds
        heartbeat.enter(RankActivity.BETWEEN_STEPS)
        heartbeat.write()
    beat = read_beat(heartbeat.path)
    assert beat is not None and beat.gap_s == 9.0 and beat.time == 115.0 == beat.since
    assert beat.first_s[RankActivity.COMPUTING] == 9.0 and beat.longest_s[RankActivity.COMPUTING] == 3.0


@pytest.mark.parametrize("by_s", [3600.0, -3600.0])
def test_a_clock_that_is_set_makes_no_activity_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_s: float
) -> None:
    now, clock = [100.0], [5000.0]
    stand_in = SimpleNamespace(monotonic=lambda: now[0], time=lambda: clock[0] + now[0])
    monkeypatch.setattr("bloomery.events.heartbeat.time", stand_in)
    heartbeat = beating(tmp_path / "0-0")
    heartbeat.enter(RankActivity.COMPUTING)
    now[0] += 2.0
    clock[0] += by_s
    beat = heartbeat.record()
    assert beat.time - beat.since == 2.0


def test_a_heartbeat_that_fails_once_is_told_and_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heartbeat, failures = Heartbeat(tmp_path / "0-0", interval_s=0.01), [2]
    record = heartbeat.record

    def failing() -> RankBeat:
        if failures[0]:
            failures[0] -= 1
            raise RuntimeError("deque mutated during iteration")
        return record()

    with heartbeat.start():
        monkeypatch.setattr(heartbeat, "record", failing)
        heartbeat.at(step=7)
        wait_for(lambda: (beat := read_beat(heartbeat.path)) is not None and beat.step == 7)
    assert failures == [0] and caplog.text.count("the heartbeat cannot be written") == 1


def test_what_moves_and_what_is_held_is_in_the_heartbeat(tmp_path: Path) -> None:
    heartbeat = beating(tmp_path / "0-0")
    moves = [heartbeat.record().moves]
    for move in (lambda: heartbeat.enter(RankActivity.LOADING), heartbeat.tick, heartbeat.tick):
        move()
        moves.append(heartbeat.record().moves)
    assert len(set(moves)) == 4, "each is a move of its own"
    heartbeat.at(step=3, incarnation=2, memory_bytes=5e9)
    heartbeat.at(step=4, memory_bytes=6e9)
    heartbeat.write()
    beat = read_beat(heartbeat.path)
    assert beat is not None and (beat.step, beat.incarnation, beat.memory_bytes) == (4, 2, 6e9)
    assert beat.moves == moves[-1] and beat.pid == os.getpid()


def test_a_disk_that_refuses_the_heartbeat_is_told_once_until_it_works_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path, text: str) -> None:
        raise OSError(30, "Read-only file system")

    heartbeat = beating(tmp_path / "0-0")
    for told, refused in ((1, 1), (2, 3)):
        with monkeypatch.context() as full:
            full.setattr("bloomery.durable.write_whole_unsynced", refuse)
            for _ in range(refused):
                heartbeat.write()
        assert caplog.text.count("the heartbeat cannot be written") == told
        heartbeat.write()
        assert read_beat(heartbeat.path) is not None


def test_the_handler_of_stacks_is_there_before_the_file_names_them(tmp_path: Path) -> None:
    there: list[tuple[Path, bool]] = []
    stacks, path = tmp_path / "stacks.txt", tmp_path / "0-0"
    prepared = beating(
        path, stacks=stacks, before_first_write=lambda told: there.append((told, path.exists()))
    )
    with prepared.start():
        prepared.start()
        beat = read_beat(path)
    assert there == [(stacks, False)] and beat is not None and beat.stacks == str(stacks)
    with beating(path, before_first_write=lambda told: there.append((told, True))).start():
        beat = read_beat(path)
    assert len(there) == 1 and beat is not None and beat.stacks == ""


def test_a_heartbeat_is_late_by_a_fifth_of_its_interval_before_its_process_is_looked_for() -> None:
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    beat = RankBeat(pid=gone, host=os.uname().nodename, world=500, time=100.0)  # every 5 s
    assert not has_died_here(beat, now=105.9) and has_died_here(beat, now=106.1)


@pytest.mark.parametrize(("state", "is_dead"), [("Z", True), ("T", False), ("D", False)])
def test_a_process_that_is_stopped_or_waits_for_a_disk_has_not_died(
    state: str, is_dead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: f"{path.parts[2]} (a) b) {state} 1")
    beat = RankBeat(pid=7, host=os.uname().nodename, time=100.0)
    assert has_died_here(beat, now=110.0) is is_dead


def test_long_errors_are_cut_and_deep_ones_end_with_their_last_places(tmp_path: Path) -> None:
    def one() -> None:
        raise ValueError("x" * 5000)

    def two() -> None:
        one()

    def three() -> None:
        two()

    with pytest.raises(ValueError, match="x"), beating(tmp_path / "0-0").start():
        three()
    beat = read_beat(tmp_path / "0-0")
    assert beat is not None and len(beat.error) == 2000 and beat.error.startswith("ValueError: xxx")
    places = [line.rpartition(" in ")[2] for line in beat.where.splitlines() if " line " in line]
    assert places == ["three", "two", "one"] and "raise ValueError" in beat.where


def test_a_heartbeat_ends_once_and_reads_what_others_wrote_as_it_is_meant(tmp_path: Path) -> None:
    with beating(tmp_path / "0-0").start() as heartbeat:
        pass
    beat = read_beat(heartbeat.path)
    assert beat is not None and (beat.activity, beat.error, beat.where) == ("ended", "", "")
    before = (tmp_path / "0-0").stat().st_ino
    heartbeat.close()
    assert (tmp_path / "0-0").stat().st_ino == before, "closing again writes nothing"
    written = {"rank": 3, "time": 7, "may_compile": "yes", "longest_s": {"a": 2}, "of a later version": 1}
    (tmp_path / "0-1").write_text(json.dumps(written))
    assert read_beat(tmp_path / "0-1") == RankBeat(rank=3, time=7.0, longest_s={"a": 2.0})
    assert read_beat(tmp_path / "0-2") is None


@pytest.mark.parametrize("stat", ["", "1 (a) S 2", "1 (a) " + "x " * 30])
def test_a_kernel_that_tells_nothing_of_a_process_leaves_its_age_unknown(
    stat: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: stat)
    assert process_age_s() == 0.0


def test_the_age_of_a_process_counts_the_time_in_which_the_machine_slept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began = 100 * os.sysconf("SC_CLK_TCK")
    clocks = {time.CLOCK_BOOTTIME: 130.0, time.CLOCK_MONOTONIC: 110.0}
    monkeypatch.setattr(Path, "read_text", lambda path: f"7 (a) b) S{' 0' * 18} {began} 0")
    monkeypatch.setattr("bloomery.events.heartbeat.time.clock_gettime", clocks.__getitem__)
    assert process_age_s(7) == 30.0


def test_the_amounts_of_a_heartbeat_are_numbers_however_they_were_written(tmp_path: Path) -> None:
    (tmp_path / "0-0").write_text('{"shm_free_bytes": 5.0, "shm_bytes": "9", "gap_s": "1.5", "pid": 3.0}')
    assert read_beat(tmp_path / "0-0") == RankBeat(shm_free_bytes=5, shm_bytes=9, gap_s=1.5, pid=3)


@pytest.mark.parametrize("record", ['{"rank": null}', '{"rank": "x"}', '{"longest_s": 5}', '{"time": []}'])
def test_a_heartbeat_with_values_of_another_kind_is_none(record: str, tmp_path: Path) -> None:
    (tmp_path / "0-0").write_text(record)
    assert read_beat(tmp_path / "0-0") is None


def test_what_keeps_a_heartbeat_from_being_written_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: Path, text: str) -> None:
        raise RuntimeError("a mistake of ours")

    heartbeat, waits = Heartbeat(tmp_path / "0-0"), iter([False, False, False, True])
    monkeypatch.setattr("bloomery.events.heartbeat.durable.refresh", fail)
    monkeypatch.setattr(heartbeat._wake, "wait", lambda seconds: next(waits))
    heartbeat._run()
    assert caplog.text.count("the heartbeat cannot be written") == 1


@pytest.mark.parametrize(
    ("refused", "has_proc", "is_dead"),
    [
        (FileNotFoundError(errno.ENOENT, "none"), True, True),
        (ProcessLookupError(errno.ESRCH, "gone"), True, True),
        (FileNotFoundError(errno.ENOENT, "none"), False, False),
        (PermissionError(errno.EACCES, "no"), True, False),
        (None, True, False),
    ],
    ids=["none", "gone meanwhile", "no /proc", "not told", "an empty line"],
)
def test_a_process_has_died_only_where_the_kernel_says_so(
    refused: OSError | None, has_proc: bool, is_dead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path) -> str:
        if refused is not None:
            raise refused
        return ""

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(Path, "exists", lambda path: has_proc)
    beat = RankBeat(pid=7, host=os.uname().nodename, time=100.0)
    assert has_died_here(beat, now=110.0) is is_dead
