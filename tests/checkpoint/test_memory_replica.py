"""Copies in memory: a lost node costs no read of the disk, and what is not whole is never taken."""

import itertools
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint import memory_rank
from tests.checkpoint.memory_rank import WORLD, Shards
from tests.checkpoint.thread_ranks import Threads
from tests.forked import forked

from bloomery.checkpoint.format.catalogue import checkpoints
from bloomery.checkpoint.format.commit import Part
from bloomery.checkpoint.format.manifest import INDEX, MANIFEST, FileRecord, read_manifest
from bloomery.checkpoint.writer.memory_replica import (
    HeldPart,
    MemoryReplica,
    MemoryReplicas,
    MemorySource,
    find_in_memory,
    label_of,
    newest_complete,
    partners_of,
    read_replica,
    write_label,
)
from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.config.checkpoint import CheckpointSection
from bloomery.events.incarnation import begin, identity
from bloomery.events.run_directory import RunDirectory
from bloomery.train.checkpoint_store import Store
from bloomery.train.saved_state import Restored, RunStateToSave

DEADLINE_S = 240.0


def wait_for(seen: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not seen():
        assert time.monotonic() < deadline, f"waited in vain for {seen}"
        time.sleep(0.02)


def in_four_processes(act: Callable[..., None], *arguments: str) -> list[multiprocessing.process.BaseProcess]:
    context = forked()
    ranks = [context.Process(target=act, args=(rank, *arguments), daemon=True) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    return ranks


def test_the_loss_of_one_of_four_nodes_is_restored_bit_for_bit_without_the_disk(tmp_path: Path):
    run, nodes = tmp_path / "run", tmp_path / "nodes"
    RunDirectory(run).create()
    for rank in range(WORLD):
        (nodes / str(rank)).mkdir(parents=True)
    first = in_four_processes(memory_rank.save_and_wait, str(run), str(nodes), str(tmp_path / "first"))
    try:
        wait_for(lambda: all((nodes / f"saved-{rank}").exists() for rank in range(WORLD)))
    finally:
        for process in (first[2], *first):  # one dies, and the launcher ends the others
            process.kill()
    for process in first:
        process.join(DEADLINE_S)
    shutil.rmtree(nodes / "2")
    (nodes / "2").mkdir()
    for path in (run / "checkpoints").glob("*/*.safetensors"):
        path.write_bytes(b"")  # whoever reads the disk learns nothing there
    second = in_four_processes(memory_rank.restore, str(run), str(nodes), str(tmp_path / "second"))
    for process in second:
        process.join(DEADLINE_S)
        assert process.exitcode == 0
    told = [(nodes / f"restored-{rank}").read_text() for rank in range(WORLD)]
    assert told == ["2 True"] * WORLD
    assert checkpoints(RunDirectory(run))[-1].step == 3
    assert not list(nodes.glob("*/*/*")), "a run that ended well leaves nothing in memory"


class Nodes:
    """Four ranks as threads, each on a node of its own."""

    def __init__(self, path: Path) -> None:
        self.rundir = RunDirectory(path / "run").create()
        self.path = path / "nodes"

    def live(self, act: Callable[[Store, Shards, Restored | None], object], *, dies: bool = True) -> list:
        """Restore and act on every rank; then end well, or as one that dies does, with memory left."""

        def one(ranks: Ranks) -> object:
            section = CheckpointSection(
                background="on", partner_copies=True, memory_directory=str(self.path / str(ranks.rank))
            )
            store = Store(
                self.rundir,
                section,
                rank=ranks.rank,
                world=ranks.world,
                gather=ranks.gather,
                exchange=ranks.exchange,
            )
            state = Shards(ranks.rank)
            restored = store.restore({"model": state})
            result = act(store, state, restored)
            store.wait_for_saves()
            store._saver.close(remove_replicas=not dies)
            return result

        return Threads(WORLD).run(one)

    def replicas(self, rank: int) -> MemoryReplicas:
        return MemoryReplicas(self.path / str(rank), self.rundir.path, identity(self.rundir))

    def spoil_disk(self) -> None:
        for path in self.rundir.checkpoints.glob("*/*.safetensors"):
            path.write_bytes(b"")


def save(*steps: int) -> Callable[[Store, Shards, Restored | None], None]:
    def act(store: Store, state: Shards, restored: Restored | None) -> None:
        for step in steps:
            state.fill(step)
            store.save(RunStateToSave({"model": state}, step=step))

    return act


def what_came_back(store: Store, state: Shards, restored: Restored | None) -> object:
    return None if restored is None else (restored.step, state.equals(restored.step))


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


def test_each_part_is_with_its_rank_and_with_one_partner(nodes: Nodes):
    assert nodes.live(save(1, 2, 3)) == [None] * WORLD
    for rank in range(WORLD):
        kept = sorted((replica.rank, replica.step) for replica in nodes.replicas(rank).complete())
        assert kept == sorted((owner, step) for owner in (rank, (rank - 1) % WORLD) for step in (2, 3))


def test_two_neighbours_lost_at_once_are_too_many_and_the_disk_is_read(nodes: Nodes):
    nodes.live(save(1))
    for rank in (1, 2):
        shutil.rmtree(nodes.path / str(rank))
    assert nodes.live(what_came_back) == [(1, True)] * WORLD


def test_a_newer_checkpoint_on_the_disk_is_taken_before_an_older_one_in_memory(nodes: Nodes):
    nodes.live(save(1))
    old = nodes.path.with_name("old")
    shutil.copytree(nodes.path, old)
    nodes.live(save(2))
    shutil.rmtree(nodes.path)
    old.rename(nodes.path)
    assert nodes.live(what_came_back) == [(2, True)] * WORLD


def test_bytes_that_are_damaged_in_memory_are_found_and_the_disk_is_read(nodes: Nodes):
    nodes.live(save(1))
    for replica in (one for rank in range(WORLD) for one in nodes.replicas(rank).complete()):
        content = bytearray(replica.path.read_bytes())
        content[5000] ^= 1
        replica.path.write_bytes(content)
    assert nodes.live(what_came_back) == [(1, True)] * WORLD


def test_what_a_rewind_abandoned_is_not_taken_from_memory(nodes: Nodes):
    def rewound(store: Store, state: Shards, restored: Restored | None) -> None:
        save(1, 2)(store, state, restored)
        store.restore({"model": state}, up_to_step=1)

    nodes.live(rewound)
    assert nodes.live(what_came_back) == [(1, True)] * WORLD


def test_a_checkpoint_that_only_memory_still_has_is_gone_on_from(nodes: Nodes):
    nodes.live(save(1, 2))
    shutil.rmtree(nodes.rundir.checkpoints / "step-000002.i001")
    assert nodes.live(what_came_back) == [(2, True)] * WORLD
    assert nodes.live(save(3)) == [None] * WORLD
    assert [found.step for found in checkpoints(nodes.rundir)] == [1, 3]


def test_another_run_at_the_same_path_gets_nothing_of_the_one_that_was_removed(nodes: Nodes):
    nodes.live(save(1, 2))
    before = {nodes.replicas(rank).directory for rank in range(WORLD)}
    assert all(directory.is_dir() for directory in before)
    shutil.rmtree(nodes.rundir.path)
    nodes.rundir.create()
    assert nodes.live(what_came_back) == [None] * WORLD
    assert not any(directory.exists() for directory in before), "its memory is freed"
    assert nodes.live(save(1)) == [None] * WORLD
    assert nodes.live(what_came_back) == [(1, True)] * WORLD


def replicas_of(directory: Path, name: str) -> MemoryReplicas:
    """The replicas of a run that has begun, in one memory for all runs."""
    rundir = RunDirectory(directory / name).create()
    begin(rundir, base=None, reason="start")
    made = MemoryReplicas(directory / "memory", rundir.path, identity(rundir))
    made.create()
    return made


def test_only_memory_of_runs_that_are_gone_and_that_nobody_holds_is_freed(tmp_path: Path):
    living, gone, held = (replicas_of(tmp_path, name) for name in ("living", "gone", "held"))
    for one in (living, gone, held):
        one.slot(0, 0).write_bytes(b"x")
    for one in (living, gone):
        one.release()
    for name in ("gone", "held"):
        shutil.rmtree(tmp_path / name)
    (tmp_path / "memory" / "bloomery-of-somebody-else").mkdir()
    assert living.sweep() == [gone.directory]
    assert living.directory.is_dir() and held.directory.is_dir()
    held.release()
    assert living.sweep() == [held.directory]
    living.remove(0)
    assert [path.name for path in (tmp_path / "memory").iterdir()] == ["bloomery-of-somebody-else"]


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"run": 5, "identity": "it"}', '{"run": "/none"}'])
def test_memory_whose_owner_cannot_be_read_is_left_alone_and_none_stays_open(tmp_path: Path, content: str):
    living, other = replicas_of(tmp_path, "living"), replicas_of(tmp_path, "other")
    other.release()
    (other.directory / "run.json").write_text(content)
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert living.sweep() == [] and other.directory.is_dir()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    living.release()


def test_a_run_finds_its_memory_by_whichever_path_it_is_named(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    names = {MemoryReplicas(tmp_path, tmp_path / name, "it").directory for name in ("run", "link")}
    assert len(names) == 1


def test_a_killed_writer_takes_no_copy_along_and_the_next_one_keeps_parts_again(nodes: Nodes):
    def act(store: Store, state: Shards, restored: Restored | None) -> None:
        save(1)(store, state, restored)
        background = store._saver.background
        assert background is not None and background.writer_pid is not None
        if state.rank == 1:
            os.kill(background.writer_pid, signal.SIGKILL)
        save(2, 3, 4)(store, state, restored)

    assert nodes.live(act) == [None] * WORLD
    nodes.spoil_disk()
    shutil.rmtree(nodes.path / "1")
    assert nodes.live(what_came_back) == [(4, True)] * WORLD


def test_partners_are_on_other_nodes_and_shared_out():
    assert partners_of(["a"] * 3) == [1, 2, 0]
    assert partners_of(["a", "a", "b", "b"]) == [2, 3, 0, 1]
    assert partners_of(["a", "b", "c"]) == [1, 2, 0]
    assert partners_of(["a", "a", "a", "b"]) == [3, 3, 3, 0]


def test_only_a_checkpoint_of_which_all_parts_are_there_is_taken():
    def part(rank: int, step: int, world: int = 2) -> HeldPart:
        return HeldPart(step=step, incarnation=1, world=world, rank=rank)

    everyones = [[part(0, 1), part(0, 2), part(0, 3)], [part(1, 1), part(1, 2)]]
    every = {(1, 1), (2, 1), (3, 1)}
    assert newest_complete(everyones, every) == [part(0, 2), part(1, 2)]
    assert newest_complete(everyones, every - {(2, 1)}) == [part(0, 1), part(1, 1)]
    assert newest_complete([[part(0, 1)], [part(1, 1, world=3)]], every) == []


def test_of_each_part_that_is_taken_one_rank_tells_the_label_whoever_else_has_it(tmp_path: Path) -> None:
    world, hashes, sent = 4, "ab" * 5000, list[int]()

    def on_node(node: str) -> MemoryReplicas:
        return MemoryReplicas(tmp_path / node, tmp_path / "run", "it")

    for node in "ab":  # each part is staged on one of two nodes and kept on the other, in two versions
        held = on_node(node)
        held.create()
        for rank, slot in itertools.product(range(world), range(2)):
            path, name = held.slot(rank, slot), f"f{rank}.safetensors"
            path.write_bytes(b"abc")
            file = FileRecord(name=name, bytes=3, blocks=hashes, xxh3_128="0" * 32)
            usual = {
                "incarnation": 1,
                "time": 0.0,
                "values": {"train": {"at": hashes}},
                "about": {},
                "rank": rank,
            }
            part, offsets = Part(files=(file,), boxes=()), {name: 0}
            write_label(MemoryReplica(path=path, step=slot, world=world, part=part, offsets=offsets, **usual))
        held.release()

    def find(ranks: Ranks) -> object:
        def gather(value: Any) -> list[Any]:
            sent.append(len(json.dumps(value)))
            return ranks.gather(value)

        counted = replace(ranks, gather=gather)
        found = find_in_memory(on_node("ab"[ranks.rank // 2]), counted, lambda bases: bases)
        assert found is not None and found.base == (1, 1)
        assert read_manifest(found.source).values == {"train": {"at": hashes}}
        return found.readers

    every = {f"f{rank}.safetensors": list(range(world)) for rank in range(world)}
    assert Threads(world).run(find) == [every] * world
    assert sum(sent) < (world + 2) * len(hashes) and max(sent) < 3 * len(hashes)


def test_a_label_is_only_believed_beside_its_bytes(tmp_path: Path):
    slot = tmp_path / "rank-00000-0"
    replica = MemoryReplica(
        path=slot,
        step=1,
        incarnation=1,
        rank=0,
        world=1,
        time=0.0,
        part=Part(files=(), boxes=()),
        offsets={"f": 0},
        values={"train": {"x": 1}},
        about={},
    )
    write_label(replica)
    assert read_replica(label_of(slot)) is None
    slot.write_bytes(b"")
    assert read_replica(label_of(slot)) == replica
    assert MemoryReplica.from_json(json.loads(json.dumps(replica.to_json()))) == replica
    write_label(replace(replica, step=2))
    moved = tmp_path / "rank-00000-1"
    moved.write_bytes(b"")
    label_of(slot).rename(label_of(moved))
    assert read_replica(label_of(moved)) == replace(replica, step=2, path=moved), (
        "it is of the bytes beside it"
    )
    label_of(slot).write_text('{"step": 1}')
    assert read_replica(label_of(slot)) is None


def test_what_lies_in_memory_says_how_large_each_of_its_files_is_and_where(tmp_path: Path):
    file = FileRecord(name="rank-00000.bin", bytes=7, blocks="", xxh3_128="0" * 32)
    path = tmp_path / "rank-00000-0"
    path.write_bytes(b"-1234567-")
    replica = MemoryReplica(
        path=path,
        step=1,
        incarnation=1,
        rank=0,
        world=1,
        time=0.0,
        part=Part(files=(file,), boxes=()),
        offsets={file.name: 1},
        values={},
        about={},
    )
    here, elsewhere = MemorySource([replica], [replica]), MemorySource([replica], [])
    for source in (here, elsewhere):
        assert source.size(file.name) == 7
        for text in (INDEX, MANIFEST):
            assert source.size(text) == len(source.content(text, at_most=1 << 20)) > 0
            assert source.content(text, at_most=5) == source.content(text, at_most=1 << 20)[:5]
        with pytest.raises(FileNotFoundError):
            source.content("other", at_most=5)
    assert str(path) in here.place(file.name) and "in memory" in elsewhere.place(file.name)
    with pytest.raises(FileNotFoundError):
        elsewhere.open(file.name)
    content = bytearray(9)
    with here.open(file.name) as opened:
        assert opened.read_into([memoryview(content)[:3], memoryview(content)[3:]], begin=1) == 6
    assert bytes(content) == b"234567\0\0\0"
    path.write_bytes(b"-1234")
    before = len(list(Path("/proc/self/fd").iterdir()))
    with here.open(file.name) as opened:
        assert opened.read_into([memoryview(content)[:2], memoryview(content)[2:]], begin=1) == 3, "cut short"
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_rank_that_is_alone_finds_its_own_part_and_no_damaged_one(tmp_path: Path):
    replicas = replicas_of(tmp_path, "run")
    file = FileRecord(name="f.safetensors", bytes=3, blocks="", xxh3_128="0" * 32)
    replicas.slot(0, 0).write_bytes(b"abc")
    replica = MemoryReplica(
        path=replicas.slot(0, 0),
        step=4,
        incarnation=1,
        rank=0,
        world=1,
        time=0.0,
        part=Part(files=(file,), boxes=()),
        offsets={file.name: 0},
        values={},
        about={},
    )
    write_label(replica)
    replicas.slot(0, 1).write_bytes(b"half")
    label_of(replicas.slot(0, 1)).write_text("{")
    assert replicas.complete() == [replica]
    found = find_in_memory(replicas, Ranks(), lambda bases: iter(bases))
    assert found is not None and found.base == (4, 1) and found.readers == {file.name: [0]}
    replicas.release()


def test_what_a_rank_that_has_ended_leaves_of_others_is_freed_once_their_run_is_gone(tmp_path: Path):
    living, gone = replicas_of(tmp_path, "living"), replicas_of(tmp_path, "gone")
    for rank in (0, 1):
        gone.slot(rank, 0).write_bytes(b"x")
    gone.remove(0)
    gone.release()
    assert gone.slot(1, 0).exists() and not gone.slot(0, 0).exists()
    shutil.rmtree(tmp_path / "gone")
    assert living.sweep() == [gone.directory]
    living.release()
