"""On which nodes the parts of a run are kept in memory: machines of one name, and nodes that left the run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.checkpoint.test_partner_terms import ranks_with

from bloomery.checkpoint.format.commit import Part
from bloomery.checkpoint.writer.leftover_memory import free_left_over, free_memory_of
from bloomery.checkpoint.writer.memory_replica import MemoryReplica, MemoryReplicas, write_label
from bloomery.checkpoint.writer.partner import agree_on_partner
from bloomery.events.incarnation import begin, identity
from bloomery.events.machine import machine_id
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.node_shm import free_memory_where_absent
from bloomery.operate.start_check import StartCheck


def test_machines_of_one_name_are_partners_of_each_other_and_that_no_part_reaches_them_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDirectory(tmp_path / "run").create()
    begin(run, base=None, reason="start")
    (tmp_path / "memory").mkdir()
    name, memory = os.uname().nodename, (tmp_path / "memory").resolve()
    others = ([f"{name}/{machine_id()} {memory}", 5, 7], *[[f"{name}/another boot {memory}", 5, 7]] * 2)
    settings, keeper = agree_on_partner(ranks_with(0, *others), memory, run=run.path, bytes=6, boxes=2)
    assert keeper == 2 and settings.limits.owners == (2,) and settings.host == name
    assert caplog.text.count("some machines have equal host names") == 1


def kept(directory: Path, name: str) -> tuple[RunDirectory, MemoryReplicas]:
    """A run in its first incarnation, and its replica of that on a node whose ranks have ended."""
    rundir = RunDirectory(directory / name).create()
    number = begin(rundir, base=None, reason="start")
    replicas = MemoryReplicas(directory / "memory", rundir.path, identity(rundir))
    replicas.create()
    slot = replicas.slot(0, 0)
    slot.write_bytes(b"a part")
    write_label(
        MemoryReplica(
            path=slot,
            step=5,
            incarnation=number,
            rank=0,
            world=1,
            time=1.0,
            part=Part(files=(), boxes=()),
            offsets={},
            values={},
            about={},
        )
    )
    replicas.release()
    return rundir, replicas


def test_memory_of_a_run_that_went_on_without_the_node_is_freed_by_the_next_run_there(tmp_path: Path) -> None:
    (gone_on, left), (_, may_return) = kept(tmp_path, "gone on"), kept(tmp_path, "may return")
    _, own = kept(tmp_path, "own")
    assert own.sweep() == []
    begin(gone_on, base=(5, 1), reason="start")
    begin(RunDirectory(tmp_path / "own"), base=(5, 1), reason="start")
    left.create()  # as its ranks do, where it starts on this node
    assert own.sweep() == []
    left.release()
    assert own.sweep() == [left.directory] and not left.directory.exists()
    assert len(may_return.complete()) == len(own.complete()) == 1


def test_a_launcher_frees_what_other_runs_left_before_it_judges_the_node_and_keeps_what_is_its_own(
    tmp_path: Path,
) -> None:
    (gone_on, left), (own, mine) = kept(tmp_path, "gone on"), kept(tmp_path, "own")
    for run in (gone_on, own):
        begin(run, base=(5, 1), reason="start")
    check = StartCheck(gpus=0, disk_gb=0.0, environment={}, memory_directory=tmp_path / "memory")
    check.gather(own, "n1")
    assert not left.directory.exists() and len(mine.complete()) == 1


def beats(run: RunDirectory, *hosts: str, attempt: str = "job-2") -> None:
    for rank, host in enumerate(hosts):
        beat = {"rank": rank, "world": len(hosts), "host": host, "attempt": attempt}
        run.heartbeat(rank=rank).write_text(json.dumps(beat))


def test_a_node_that_was_left_out_of_the_newest_attempt_frees_its_memory_when_the_job_ends(
    tmp_path: Path,
) -> None:
    run, replicas = kept(tmp_path, "run")
    memory = tmp_path / "memory"
    assert free_memory_where_absent(run, memory, host="n1") is None, "no rank has told where it is"
    beats(run, "n2", "n1")
    assert free_memory_where_absent(run, memory, host="n1") is None
    beats(run, "n2", "n3")
    beats(run, "n2", attempt="job-3")
    run.heartbeat(rank=0).write_text(json.dumps({"rank": 0, "world": 2, "host": "n2", "attempt": "job-3"}))
    assert free_memory_where_absent(run, memory, host="n1") is None, "a rank of this attempt is not known yet"
    beats(run, "n2", "n3", attempt="job-3")
    replicas.create()
    assert free_memory_where_absent(run, memory, host="n1") is None, "a process here holds it"
    replicas.release()
    assert free_memory_where_absent(run, memory, host="n1") == replicas.directory
    assert (
        not replicas.directory.exists()
        and free_left_over(memory) == []
        and free_memory_of(run, memory) is None
    )
