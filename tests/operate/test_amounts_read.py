"""How many bytes, lines and seconds supervisors and watchers take for a look, and no more."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.operate.ledger.test_ledger import T0, start, step
from tests.operate.test_group import boards

from bloomery.errors import StorageError
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import ObjectStat
from bloomery.operate import (
    departure,
    group_supervisor,
    node_facts,
    progress_watch,
    run_state,
    share_log,
    submission,
)
from bloomery.operate.decision import Decision
from bloomery.operate.group_supervisor import GroupSize, GroupSupervisor
from bloomery.operate.ledger.operations import read_marks
from bloomery.operate.ledger.time_class import TimeClass
from bloomery.operate.ledger.timeline import rank_spans
from bloomery.operate.schedulers import machine_queue
from bloomery.operate.share_log import ShareLog
from bloomery.operate.sync.mirror import RunMirror
from bloomery.operate.sync.pieces import new_pieces
from bloomery.operate.watch.observe import JournalTail

MIB = 1 << 20


def lines(count: int) -> bytes:
    """Return lines of a kibibyte each, which are events."""
    return (b'{"event": "x"' + b" " * (1024 - 15) + b"}\n") * count


def test_a_watcher_begins_with_the_last_mebibyte_and_passes_over_more_than_eight(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(lines(1500))
    tail = JournalTail(path)
    assert len(list(tail.read())) == 1024
    for count, read in ((8 << 10, 8 << 10), ((8 << 10) + 1, 1024)):
        with path.open("ab") as file:
            file.write(lines(count))
        assert len(list(tail.read())) == read


def test_the_tails_of_journals_are_read_to_so_many_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, asked = RunDirectory(tmp_path).create(), list[Any]()

    def read(path: Path, *, most_bytes: int, named: Any = ()) -> Iterator[Any]:
        asked.append((path.name, most_bytes, tuple(named)))
        return iter(())

    for module in (run_state, departure, machine_queue, submission):
        monkeypatch.setattr(module, "read_tail", read)
    run_state.observe_run(run, ())
    departure.measured_save(run)
    machine_queue.outcome_without_status(run.path, started=0.0)
    submission.is_finished(run)
    journal, operations = run.journal().name, run.operations.name
    assert asked == [
        (journal, MIB, ("start", "end")), (operations, MIB, ("attempt", "attempt_end", "diagnosis", "job")),
        (journal, MIB // 4, ()), (operations, MIB // 4, ("attempt", "attempt_end")),
        (journal, MIB // 4, ()), (journal, MIB // 4, ()),
    ]  # fmt: skip


def test_a_first_step_is_compared_with_the_five_after_it() -> None:
    events, moment = [start(1, starting=1.0)], 1.0
    for number, seconds in enumerate((10.0, 1.0, 1.0, 3.0, 3.0, 3.0, 1.0, 1.0), 1):
        moment += seconds
        events.append(step(moment, number, compute=seconds))
    marks = read_marks([], was_finished=False)
    spans = rank_spans(events, marks=marks, is_visible=lambda base: True, begin=T0, end=T0 + moment)
    (first,) = [span.end - span.begin for span in spans if span.kind == TimeClass.FIRST_STEP]
    assert first == pytest.approx(7.0)


def test_of_a_rank_the_last_words_and_the_newest_children_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path).create()
    monkeypatch.setattr(share_log, "sees_kernel_pids", lambda: True)
    monkeypatch.setattr(share_log, "descendants", lambda pid: list(range(1200)))
    share = ShareLog(run, ranks=range(1), host="n1")
    run.log(host="n1", rank=0).parent.mkdir(exist_ok=True)
    run.log(host="n1", rank=0).write_text("x" * 40_000 + "y" * 32_768)
    share.started({0: 7})
    share.note_children()
    share.ended({0: 1}, killed=())
    (end,) = share.ends(attempt="")
    assert end.log == "y" * 32_768 and end.children == tuple(range(200, 1200))


def test_other_programs_are_waited_for_so_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[str, float]] = []

    def late(command: list[str], **options: Any) -> Any:
        assert options.pop("check") is False and options["capture_output"] and options["text"]
        calls.append((command[0], options["timeout"]))
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", late)
    assert share_log.kernel_lines() == [] and node_facts._gpus() == ((), "")
    (tmp_path / ".git").touch()
    assert node_facts._commit(tmp_path) == "" == node_facts._commit(tmp_path / "none")
    assert calls == [("dmesg", 5.0), ("nvidia-smi", 20.0), ("git", 5.0)]
    done = SimpleNamespace(stdout="abc123\n", returncode=0)
    monkeypatch.setattr(subprocess, "run", lambda command, **options: calls.append(command) or done)
    assert node_facts._commit(tmp_path) == "abc123"
    assert calls[-1] == ["git", "-C", str(tmp_path), "rev-parse", "--short=12", "HEAD"]


def test_a_probe_of_the_disk_is_larger_than_what_lies_beside_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []

    def write(path: Path, text: str) -> None:
        written.append(len(text))
        path.touch()

    monkeypatch.setattr(progress_watch.durable, "write_whole_unsynced", write)
    assert progress_watch.takes_heartbeats(RunDirectory(tmp_path).create()) and written == [8192]


def test_stacks_of_other_nodes_are_waited_for_ten_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    _, board = boards(tmp_path / "board", "n1", "n2")
    size = GroupSize(nodes=2, needed=2, ranks=1)
    group = GroupSupervisor(RunDirectory(tmp_path), board, job="x", size=size, say=print)

    def sleep(seconds: float) -> None:
        clock[0] = round(clock[0] + seconds, 3)

    monkeypatch.setattr(group_supervisor, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    monkeypatch.setattr(board, "is_alive", lambda host: True)
    monkeypatch.setattr(group, "_follow", lambda: None)
    assert group._all_stacks(Decision(number=3, hosts=("n1",), ranks=1)) == {} and clock[0] == 110.0
    assert board.has("ask-3")


def test_a_new_queue_waits_a_second_for_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    @contextmanager
    def hold(run: Path, *, wait_s: float) -> Iterator[bool]:
        waits.append(wait_s)
        yield False

    monkeypatch.setattr(machine_queue, "_waiting", lambda run: ["a job"])
    monkeypatch.setattr(machine_queue, "_hold", hold)
    machine_queue.run_queue(tmp_path)
    assert waits == [1.0], "another process runs it"


def test_a_piece_has_four_mebibytes_and_no_longer_one_than_256_is_fetched(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(lines(9 << 10))
    assert [len(piece.content) for piece in new_pieces(path, [])] == [4 * MIB, 4 * MIB, MIB]
    sizes = [256 * MIB]
    place: Any = SimpleNamespace(
        name="place", content=lambda key, *, begin=0: b"",
        entries=lambda: {"logs/a": ObjectStat(bytes=sizes[0], mark="m")},
    )  # fmt: skip
    assert RunMirror(place, tmp_path / "m").fetch() == 0
    sizes[0] += 1
    with pytest.raises(StorageError, match="logs/a is longer"):
        RunMirror(place, tmp_path / "m").fetch()
    assert json.loads((tmp_path / "m" / ".followed.json").read_text()) == {"logs/a": "m"}
