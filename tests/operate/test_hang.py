"""Hangs planted in real processes, and who the verdict says holds up the others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import bloomery
from bloomery.events.heartbeat import RankActivity, RankBeat, read_beat
from bloomery.operate.hang import find_hang, place_of
from bloomery.operate.stacks import Frame, RankStack, parse_pyspy, take_stacks

RANK = """
import os, sys, threading, time, pathlib, importlib.util
sys.path.insert(0, {root!r})
from bloomery.events.heartbeat import Heartbeat, RankActivity
import faulthandler, signal
rank = int(sys.argv[1])
stacks = pathlib.Path({stacks!r}) / str(rank)
def register(path):
    faulthandler.register(signal.SIGUSR2, file=path.open("wb"), all_threads=True)
heartbeat = Heartbeat(pathlib.Path({beats!r}) / f"0-{{rank}}", rank=rank, world=4, host=f"node{{rank}}",
    stacks=stacks, before_first_write=register, interval_s=0.1)
def load(name):
    path = pathlib.Path({root!r}) / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module); return module
collective, stander = load("torch/distributed/distributed_c10d.py"), load(sys.argv[2])
heartbeat.start()
if rank == int(sys.argv[3]):
    heartbeat.enter(RankActivity(sys.argv[4])); stander.stand()
heartbeat.enter(RankActivity.REDUCING); collective.all_reduce()
"""
STANDS = {
    "a data loader that sleeps": ("bloomery/data_loader/b.py", "time.sleep(600)", "waiting for samples"),
    "a data loader that reads": ("bloomery/data/s.py", "os.read(os.pipe()[0], 1)", "waiting for samples"),
    "a lock": ("bloomery/other.py", "n = threading.Lock(); n.acquire(); n.acquire()", "between steps"),
    "a thread": ("bloomery/other.py", "t = threading.Thread(target=time.sleep, args=(600,), daemon=True);"
        " t.start(); t.join()", "between steps"),
    "a condition": ("bloomery/other.py", "threading.Event().wait()", "between steps"),
    "a disk": ("bloomery/durable.py", "os.read(os.pipe()[0], 1)", "saving a checkpoint"),
    "a save": ("bloomery/checkpoint/save/saver.py", "time.sleep(600)", "saving a checkpoint"),
    "a load": ("bloomery/checkpoint/load/executor.py", "time.sleep(600)", "loading a checkpoint"),
    "a sleep": ("bloomery/train/step.py", "time.sleep(600)", "forward and backward"),
    "a loop": ("bloomery/model/decoder.py", "n = 0\n    while True: n += 1", "forward and backward"),
    "a socket": ("bloomery/o.py", "import socket; p = socket.socketpair(); p[0].recv(1)", "between steps"),
    "a stop": ("bloomery/other.py", "os.kill(os.getpid(), 19)", "updating the weights"),
}  # fmt: skip
DEADLINE_S = 60.0


@contextmanager
def hanging(
    tmp_path: Path, file: str, code: str, activity: str, *, culprit: int
) -> Iterator[dict[int, RankBeat]]:
    """Four processes, three of which wait in an all_reduce for the culprit; yields their heartbeats."""
    for name, function, does in (
        (file, "stand", code),
        ("torch/distributed/distributed_c10d.py", "all_reduce", "time.sleep(600)"),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        arrive = "open(os.environ['ARRIVED'], 'w').close()"
        path.write_text(f"import os, threading, time\ndef {function}():\n    {arrive}; {does}\n")
    arrived = [tmp_path / f"arrived-{rank}" for rank in range(4)]
    (tmp_path / "beats").mkdir()
    program = tmp_path / "rank.py"
    program.write_text(RANK.format(root=str(tmp_path), stacks=str(tmp_path), beats=str(tmp_path / "beats")))
    path = {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), file, str(culprit), activity],
            env=dict(os.environ) | path | {"ARRIVED": str(arrived[rank])},
        )
        for rank in range(4)
    ]
    try:
        expected = {rank: activity if rank == culprit else str(RankActivity.REDUCING) for rank in range(4)}
        deadline = time.monotonic() + DEADLINE_S
        while True:
            beats = {rank: read_beat(tmp_path / "beats" / f"0-{rank}") for rank in range(4)}
            known = {rank: beat for rank, beat in beats.items() if beat is not None}
            reached = {rank: beat.activity for rank, beat in known.items()}
            stopped = [rank for rank, beat in known.items() if _state(beat.pid) == "T"]
            right = [rank for rank in reached if reached[rank] == expected[rank]]
            # A heartbeat comes before the call that it tells of, and a stack in between would be of neither.
            if all(path.exists() for path in arrived) and len(right) >= (3 if stopped else 4):
                break
            assert time.monotonic() < deadline, reached
            time.sleep(0.05)
        yield known
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("what", STANDS)
def test_the_verdict_names_the_rank_that_the_others_wait_for(what: str, tmp_path: Path) -> None:
    file, code, activity = STANDS[what]
    culprit = list(STANDS).index(what) % 4
    with hanging(tmp_path, file, code, activity, culprit=culprit) as beats:
        finding = find_hang(beats, take_stacks(beats))
    assert (finding.culprits, finding.hosts, finding.sure) == ((culprit,), (f"node{culprit}",), True), finding
    assert f"wait in the gradient all-reduce for rank {culprit} on node{culprit}" in finding.summary


def test_without_py_spy_the_stacks_come_by_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bloomery.operate.stacks._by_pyspy", lambda pid, deadline: ())
    file, code, activity = STANDS["a data loader that sleeps"]
    with hanging(tmp_path, file, code, activity, culprit=2) as beats:
        finding = find_hang(beats, take_stacks(beats))
    assert finding.culprits == (2,) and "the data loader: stand (b.py:3)" in finding.summary, finding


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_process_that_answers_neither_way_has_no_stack_and_the_state_of_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_stopped: bool
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))  # py-spy may stand beside it
    with subprocess.Popen(["/bin/sleep", "600"]) as process:
        try:
            os.kill(process.pid, 19 if is_stopped else 0)
            while is_stopped and _state(process.pid) != "T":
                time.sleep(0.001)
            (stack,) = take_stacks({3: RankBeat(rank=3, pid=process.pid)}).values()
        finally:
            process.kill()
    assert (stack.rank, stack.frames, stack.state == "T") == (3, (), is_stopped)
    assert RankStack.from_json(stack.to_json()) == stack
    gone = take_stacks({3: RankBeat(rank=3, pid=process.pid)})
    assert gone == {3: RankStack(rank=3, frames=(), state="")}


def beat(rank: int, activity: RankActivity, **more: object) -> RankBeat:
    usual = {"host": f"node{rank}", "step": 7, "world": 4, "pid": 9, "longest_s": {str(activity): 1.0}}
    return RankBeat(rank=rank, activity=activity, **{**usual, **more})  # type: ignore[arg-type]


def test_without_any_stack_the_heartbeats_say_who_is_likely() -> None:
    beats = {rank: beat(rank, RankActivity.REDUCING) for rank in range(8)}
    beats[6] = beat(6, RankActivity.WAITING_FOR_SAMPLES)
    finding = find_hang(beats, {})
    assert finding.culprits == (6,) and not finding.sure
    assert finding.summary == (
        "ranks 0–5, 7 wait in the gradient all-reduce for rank 6 on node6, "
        "which stands in waiting for samples"
    )


def test_ranks_that_have_ended_are_to_blame_only_where_all_others_wait_for_them() -> None:
    beats = {rank: beat(rank, RankActivity.ENDED) for rank in range(4)}
    beats[2] = beat(2, RankActivity.ENDING)
    finding = find_hang(beats, {})
    assert (finding.culprits, finding.hosts) == ((2,), ("node2",))
    assert finding.summary == "rank 2 on node2 stands in ending"
    assert finding.evidence == ("ranks 0–1, 3 in ended", "rank 2 in ending")
    left = {rank: beat(rank, RankActivity.REDUCING) for rank in range(3)} | {3: beats[3]}
    finding = find_hang(left, {})
    assert finding.culprits == (3,) and finding.summary.startswith(
        "ranks 0–2 wait in the gradient all-reduce"
    )


def test_where_all_wait_alike_nobody_is_blamed() -> None:
    finding = find_hang({rank: beat(rank, RankActivity.REDUCING) for rank in range(4)}, {})
    assert finding.culprits == () and not finding.sure and "the network" in finding.summary


def test_a_stopped_process_is_named_alone_where_another_waits_for_its_part_of_a_save() -> None:
    beats = {rank: beat(rank, RankActivity.SAVING) for rank in range(3)}
    waits = Frame(function="wait", file="/x/bloomery/checkpoint/save/background.py", line=9)
    stacks = {0: RankStack(rank=0, frames=(waits,), state="S"), 1: RankStack(rank=1, state="T")}
    finding = find_hang(beats, stacks)
    assert finding.culprits == (1,) and finding.sure


@pytest.mark.parametrize(("state", "is_sure"), [("T", True), ("D", False)])
def test_a_process_that_gave_no_stack_is_surely_to_blame_only_where_it_is_stopped(
    state: str, is_sure: bool
) -> None:
    beats = {0: beat(0, RankActivity.REDUCING), 1: beat(1, RankActivity.COMPUTING)}
    finding = find_hang(beats, {1: RankStack(rank=1, state=state)})
    assert (finding.culprits, finding.sure) == ((1,), is_sure)


def test_ranks_whose_heartbeats_another_start_has_replaced_are_not_said_to_wait() -> None:
    finding = find_hang({}, {})
    assert finding.culprits == () and "another start may have taken the run" in finding.summary


def test_a_rank_that_waits_for_other_peers_waits_whatever_its_stack_shows() -> None:
    inner = (Frame(function="wait", file="/usr/lib/python3.11/threading.py", line=9),)
    waits = beat(0, RankActivity.WAITING_FOR_PEERS)
    place = place_of(waits, RankStack(rank=0, frames=inner, state="S"), is_silent=False)
    assert place.waits and place.where == "a wait for other peers"
    assert not place_of(waits, RankStack(rank=0, frames=inner, state="T"), is_silent=False).waits
    assert not place_of(waits, None, is_silent=True).waits


@pytest.mark.parametrize("state", ["T"])
def test_a_stopped_process_is_named_without_a_stack(state: str) -> None:
    beats = {rank: beat(rank, RankActivity.REDUCING) for rank in range(3)}
    finding = find_hang(beats, {1: RankStack(rank=1, state=state)})
    assert finding.culprits == (1,) and finding.sure and "stopped" in finding.summary


def test_qualified_names_of_functions_are_compared_by_their_last_part() -> None:
    """py-spy gives them for Python 3.11 and later, as in `PendingCollective.wait_for_collective`."""
    frame = {"name": "Outer.<locals>.wait_for_collective", "filename": "x.py", "line": 3}
    (parsed,) = parse_pyspy([{"os_thread_id": 7, "frames": [frame]}], 7)
    assert parsed == Frame(function="wait_for_collective", file="x.py", line=3)


def test_a_wait_in_a_file_of_ours_is_a_wait_for_others() -> None:
    """The wait itself is native, so that the innermost frame is the function of ours that calls it."""
    places = {"wait_for_collective": "parallel/axis.py", "wait_for_rank_zero": "parallel/rank_zero_task.py"}
    for function, name in places.items():
        path = Path(bloomery.__file__).parent / name
        assert f"def {function}(" in path.read_text(), "hang.py names this function"
        waits = Frame(function=function, file=str(path), line=31)
        stands = Frame(function="accept", file="/usr/lib/python3.11/socket.py", line=294)
        stacks = {rank: RankStack(rank=rank, frames=(waits,), state="S") for rank in range(3)}
        stacks[1] = RankStack(rank=1, frames=(stands,), state="S")
        finding = find_hang({rank: beat(rank, RankActivity.COMPUTING) for rank in range(3)}, stacks)
        assert finding.culprits == (1,) and "ranks 0, 2 wait in the" in finding.summary


def test_a_wait_for_a_lock_names_who_waits_for_it() -> None:
    inner = [
        Frame(function=name, file="/usr/lib/python3.11/threading.py", line=9) for name in ("wait", "join")
    ]
    caller = Frame(function="flush", file="/home/ann/logger.py", line=7)
    for frames, named in (((*inner, caller), "flush (logger.py:7)"), (tuple(inner), "wait (threading.py:9)")):
        place = place_of(
            beat(0, RankActivity.BETWEEN_STEPS), RankStack(rank=0, frames=frames), is_silent=False
        )
        assert not place.waits and place.where == f"a wait for a lock or a thread: {named}"


def test_a_silent_rank_without_a_stack_is_named_and_a_waiting_one_is_not() -> None:
    beats = {rank: beat(rank, RankActivity.REDUCING) for rank in range(3)}
    finding = find_hang(beats, {}, silent=[1])
    assert (finding.culprits, finding.sure) == ((1,), False)
    assert "silence since it began reducing gradients" in finding.summary


def test_of_ranks_that_all_wait_the_few_at_another_step_are_named() -> None:
    beats = {rank: beat(rank, RankActivity.REDUCING, step=7 if rank in (1, 4) else 6) for rank in range(5)}
    finding = find_hang(beats, {})
    assert (finding.culprits, finding.hosts, finding.sure) == ((1, 4), ("node1", "node4"), False)
    assert find_hang(dict(list(beats.items())[:1]), {}).culprits == ()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)])
def test_of_two_groups_alike_the_one_at_the_earlier_step_is_named_and_ranks_are_in_order(
    order: tuple[int, ...],
) -> None:
    steps = {0: 8, 1: 7, 2: 8, 3: 7}
    finding = find_hang({rank: beat(rank, RankActivity.REDUCING, step=steps[rank]) for rank in order}, {})
    assert (finding.culprits, finding.hosts) == ((1, 3), ("node1", "node3"))
    stand = {
        rank: beat(rank, RankActivity.COMPUTING if rank % 2 else RankActivity.UPDATING) for rank in order
    }
    finding = find_hang(stand, {})
    assert finding.culprits == (0, 1, 2, 3)
    assert finding.evidence == ("ranks 0, 2 in updating the weights", "ranks 1, 3 in forward and backward")


@pytest.mark.parametrize(
    ("file", "where"),
    [("load/executor.py", "loading a checkpoint"), ("save/saver.py", "saving a checkpoint")],
)
def test_a_load_is_told_from_a_save(file: str, where: str) -> None:
    frame = Frame(function="read", file=f"/x/bloomery/checkpoint/{file}", line=9)
    place = place_of(beat(0, RankActivity.COMPUTING), RankStack(rank=0, frames=(frame,)), is_silent=False)
    assert not place.waits and place.where == f"{where}: {frame}"


def test_a_rank_that_has_begun_nothing_stands_in_its_start() -> None:
    assert place_of(RankBeat(rank=0), None, is_silent=False).where == "its start"


def test_ranks_of_one_host_name_it_once() -> None:
    beats = {rank: beat(rank, RankActivity.REDUCING, host=f"n{rank // 2}") for rank in range(4)}
    beats |= {rank: beat(rank, RankActivity.COMPUTING, host="n1") for rank in (2, 3)}
    finding = find_hang(beats, {})
    assert (finding.culprits, finding.hosts) == ((2, 3), ("n1",))
    assert finding.summary == (
        "ranks 0–1 wait in the gradient all-reduce for ranks 2–3 on n1, which stand in forward and backward"
    )


def test_a_rank_in_a_report_waits_for_the_others_and_one_that_stands_alone_is_told_so() -> None:
    beats = {0: beat(0, RankActivity.REPORTING), 1: beat(1, RankActivity.UPDATING)}
    finding = find_hang(beats, {})
    assert finding.culprits == (1,) and finding.summary.startswith("rank 0 waits in the report's all-reduce")
    alone = find_hang({1: beats[1]}, {})
    assert alone.summary == "rank 1 on node1 stands in updating the weights"


@pytest.mark.parametrize(
    ("function", "where"),
    [
        ("all_reduce", "the all-reduce"),
        ("all_gather", "the all-gather"),
        ("all_gather_into_tensor", "the all-gather"),
        ("all_gather_single", "the all-gather"),
        ("reduce_scatter_tensor", "the reduce-scatter"),
        ("reduce_scatter_single", "the reduce-scatter"),
        ("broadcast", "the broadcast"),
        ("barrier", "the barrier"),
        ("send", "the send to its pipeline neighbour"),
        ("recv", "the receive from its pipeline neighbour"),
        ("batch_isend_irecv", "the exchange with its pipeline neighbours"),
        ("get_rank", ""),
    ],
)
def test_only_a_collective_of_torch_is_a_wait_for_others(function: str, where: str) -> None:
    inner = Frame(function="inner", file="/x/c.py", line=1)
    for file in ("/t/torch/distributed/distributed_c10d.py", "/usr/lib/python3.11/socket.py"):
        frames = (inner, Frame(function=function, file=file, line=9))
        stack = RankStack(rank=0, frames=frames)
        place = place_of(beat(0, RankActivity.BETWEEN_STEPS), stack, is_silent=False)
        waits = bool(where) and "torch" in file
        assert (place.waits, place.where) == (waits, where if waits else "inner (c.py:1)")


@pytest.mark.parametrize("function", ["acquire", "wait", "join", "_wait_for_tstate_lock", "result", "get"])
def test_whoever_waits_inside_of_threads_is_named_by_its_caller(function: str) -> None:
    inner = Frame(function=function, file="/usr/lib/python3.11/threading.py", line=9)
    caller = Frame(function="flush", file="/home/ann/logger.py", line=7)
    stack = RankStack(rank=0, frames=(inner, caller))
    place = place_of(beat(0, RankActivity.BETWEEN_STEPS), stack, is_silent=False)
    assert place.where == "a wait for a lock or a thread: flush (logger.py:7)"


@pytest.mark.parametrize(
    ("file", "words"),
    [("data/shards.py", "the data loader"), ("durable.py", "a write to the disk"),
     ("events/journal.py", "a write of the journal")],
)  # fmt: skip
def test_the_part_of_the_program_that_called_is_named_with_the_innermost_function(
    file: str, words: str
) -> None:
    inner = Frame(function="write", file="/usr/lib/python3.11/io.py", line=3)
    caller = Frame(function="append", file=f"/x/bloomery/{file}", line=9)
    place = place_of(
        beat(0, RankActivity.COMPUTING), RankStack(rank=0, frames=(inner, caller)), is_silent=False
    )
    assert not place.waits and place.where == f"{words}: write (io.py:3)"
