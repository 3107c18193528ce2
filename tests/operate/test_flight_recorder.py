"""What torch's flight recorder dumped is read without trust, and names the rank that did not come."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from bloomery.operate.blame import diagnose
from bloomery.operate.decision import ShareResult
from bloomery.operate.diagnosis import Cause
from bloomery.operate.failure_evidence import FailureEvidence, RankEnd
from bloomery.operate.flight_recorder import (
    find_absent,
    flight_variables,
    last_collectives,
    read_flight,
)

REAL = """
import os, sys, torch, torch.distributed as dist, torch._C._distributed_c10d as c10d
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
for _ in range(3): dist.all_reduce(torch.ones(4))
dist.broadcast(torch.ones(4), 0)
open(sys.argv[1], "wb").write(c10d._dump_fr_trace())
"""
WATCHDOG = "[Rank {}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)"


def dump(number: int, name: str = "all_reduce", *, group: str = "0") -> bytes:
    entries = [
        {
            "is_p2p": False,
            "process_group": (group, "default_pg"),
            "collective_seq_id": seq,
            "profiling_name": f"nccl:{name if seq == number else 'all_reduce'}",
        }
        for seq in range(1, number + 1)
    ]
    return pickle.dumps({"version": "2.10", "entries": entries})


@pytest.fixture
def stacks(tmp_path: Path) -> Path:
    return tmp_path


def flights(stacks: Path, **dumps: bytes) -> dict[int, dict]:
    for name, content in dumps.items():
        (stacks / f"flight-{name[1:]}").write_bytes(content)
    return {int(name[1:]): dict(read_flight(stacks, int(name[1:]), since=0.0)) for name in dumps}


def test_the_rank_that_did_not_come_is_named_with_the_collective(stacks: Path) -> None:
    finding = find_absent(flights(stacks, r0=dump(7), r1=dump(7), r2=dump(5), r3=dump(7)))
    assert finding is not None and finding.culprits == (2,)
    assert finding.words == "rank 2 did not come to all_reduce 7 of group 0:default_pg, and began 5 last"


def test_a_rank_that_called_another_collective_is_named(stacks: Path) -> None:
    finding = find_absent(flights(stacks, r0=dump(7), r1=dump(7, "all_gather"), r2=dump(7)))
    assert finding is not None and finding.culprits == (1,)
    assert "called all_gather where others called all_reduce" in finding.words


def test_ranks_that_agree_name_nobody(stacks: Path) -> None:
    assert find_absent(flights(stacks, r0=dump(7), r1=dump(7))) is None
    assert find_absent(flights(stacks, r0=dump(7))) is None and find_absent({}) is None


def test_a_dump_of_torch_itself_is_read(stacks: Path) -> None:
    environment = os.environ | {"TORCH_FR_BUFFER_SIZE": "100", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([sys.executable, "-c", REAL, str(stacks / "flight-0")], check=True, env=environment)
    assert read_flight(stacks, 0, since=0.0) == {"0:default_pg": (4, "broadcast")}


class Evil:
    def __reduce__(self) -> tuple:
        return (os.system, ("touch /tmp/never",))


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps({"entries": [Evil()]}),
        pickle.dumps({"entries": [{"is_p2p": False}]}),
        pickle.dumps([1, 2]),
        dump(3)[:-9],
        b"",
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f",
    ],
)
def test_what_is_no_dump_says_nothing_and_runs_nothing(stacks: Path, content: bytes) -> None:
    assert flights(stacks, r0=content) == {0: {}}
    assert not Path("/tmp/never").exists()


def test_a_dump_of_an_earlier_attempt_is_left_alone(stacks: Path) -> None:
    (stacks / "flight-0").write_bytes(dump(7))
    assert read_flight(stacks, 0, since=time.time() + 60.0) == {}
    assert read_flight(stacks, 1, since=0.0) == {}


def test_the_verdict_on_a_time_out_is_that_of_the_recorder() -> None:
    """All ranks report the time-out, so that nothing in their logs says who was missing."""
    ends = [
        RankEnd(
            rank=rank,
            host=f"node{rank // 2}",
            status=-6,
            log=WATCHDOG.format(rank),
            flight=last_collectives(pickle.loads(dump(5 if rank == 3 else 7))),
        )
        for rank in range(4)
    ]
    result = ShareResult.from_json(asdict(ShareResult(host="x", status=1, ends=tuple(ends))))
    verdict = diagnose(FailureEvidence(ranks=result.ends))
    assert (verdict.cause, verdict.culprit.rank, verdict.culprit.host) == (Cause.NCCL_TIMEOUT, 3, "node1")
    assert verdict.sure and "rank 3 did not come to all_reduce 7" in str(verdict)


def test_torch_dumps_into_the_run_where_its_recorder_is_on(tmp_path: Path) -> None:
    assert flight_variables({}, tmp_path) == {}
    on = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_FR_DUMP_TEMP_FILE": "/mine/"}
    assert flight_variables(on, tmp_path) == {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{tmp_path}/flight-"}


def entry(number: int, name: str, *, group: str = "0", is_p2p: bool = False) -> dict:
    return {
        "is_p2p": is_p2p,
        "process_group": (group, "g"),
        "collective_seq_id": number,
        "profiling_name": f"nccl:{name}",
    }


def test_the_last_collective_of_each_group_counts_and_no_exchange_of_two_ranks() -> None:
    entries = [
        entry(7, "all_reduce"),
        entry(5, "broadcast"),
        entry(9, "send", is_p2p=True),
        entry(2, "x", group="1"),
    ]
    assert last_collectives({"entries": entries}) == {"0:g": (7, "all_reduce"), "1:g": (2, "x")}


def test_a_dump_that_is_far_too_long_is_not_read(stacks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = dump(3)
    monkeypatch.setattr("bloomery.operate.flight_recorder._MOST_BYTES", len(content))
    assert flights(stacks, r0=content)[0] != {}
    monkeypatch.setattr("bloomery.operate.flight_recorder._MOST_BYTES", len(content) - 1)
    assert flights(stacks, r0=content) == {0: {}}


def test_a_dump_of_the_very_moment_in_which_an_attempt_began_is_of_it(stacks: Path) -> None:
    (stacks / "flight-0").write_bytes(dump(7))
    os.utime(stacks / "flight-0", (500.0, 500.0))
    assert read_flight(stacks, 0, since=500.0) != {} and read_flight(stacks, 0, since=500.5) == {}


def test_of_collectives_of_one_number_the_newest_counts() -> None:
    entries = [entry(7, "all_reduce"), entry(7, "broadcast")]
    assert last_collectives({"entries": entries}) == {"0:g": (7, "broadcast")}


def test_the_rank_that_called_another_collective_is_the_one_and_not_the_first(stacks: Path) -> None:
    finding = find_absent(flights(stacks, r0=dump(7, "all_gather"), r1=dump(7), r2=dump(7)))
    assert finding is not None and finding.culprits == (0,)


@pytest.mark.parametrize("size", ["", "0"])
def test_a_recorder_of_no_size_is_off(tmp_path: Path, size: str) -> None:
    assert flight_variables({"TORCH_FR_BUFFER_SIZE": size}, tmp_path) == {}


def test_a_dump_that_refers_to_something_outside_of_it_is_not_read(stacks: Path) -> None:
    class Referring(pickle.Pickler):
        def persistent_id(self, value: object) -> str | None:
            return "elsewhere" if value == "nccl:all_reduce" else None

    content = io.BytesIO()
    Referring(content).dump(pickle.loads(dump(7)))
    assert flights(stacks, r0=content.getvalue()) == {0: {}}


def test_a_rank_that_is_behind_in_a_later_group_is_named_though_all_agree_in_the_first() -> None:
    flights = {rank: {"0": (7, "all_reduce"), "1": (5 - rank, "broadcast")} for rank in (0, 1)}
    finding = find_absent(flights)
    assert finding is not None and finding.culprits == (1,) and "broadcast 5 of group 1" in finding.words


def test_who_waits_in_one_group_is_not_named_for_being_late_in_another() -> None:
    """Rank 3 hangs. Rank 2 waits for it, so that rank 0 waits for rank 2, in a group that comes first."""
    flights = {
        0: {"0": (5, "all_reduce"), "1": (9, "all_gather")},
        1: {"1": (9, "all_gather"), "3": (4, "all_reduce")},
        2: {"0": (4, "all_reduce"), "2": (8, "all_gather")},
        3: {"2": (7, "all_gather"), "3": (3, "all_reduce")},
    }
    finding = find_absent(flights)
    assert finding is not None and finding.culprits == (3,)
    assert finding.words == "rank 3 did not come to all_gather 8 of group 2, and began 7 last"
    flights[2]["2"] = (8, "reduce_scatter")
    flights[3]["2"] = (8, "all_gather")
    finding = find_absent(flights)
    assert finding is not None and "called" in finding.words and " of 2" in finding.words
    assert len(finding.culprits) == 1 and set(finding.culprits) < {2, 3}


def test_ranks_that_are_missing_in_several_groups_are_all_named() -> None:
    late = {
        group: {2 * group: {str(group): (5, "x")}, 2 * group + 1: {str(group): (4, "x")}}
        for group in range(5)
    }
    finding = find_absent({rank: flight for both in late.values() for rank, flight in both.items()})
    assert finding is not None and finding.culprits == (1, 3, 5, 7, 9)
    assert finding.words.count("did not come") == 3 and finding.words.endswith("; and 2 more groups differ")


def test_where_each_waits_for_another_all_are_named() -> None:
    flights = {0: {"0": (5, "x"), "1": (7, "y")}, 1: {"0": (4, "x"), "1": (8, "y")}}
    finding = find_absent(flights)
    assert finding is not None and set(finding.culprits) == {0, 1}
    assert "x 5 of group 0" in finding.words and "y 8 of group 1" in finding.words
