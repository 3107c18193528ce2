"""A start on several nodes: one shared run directory is proven within seconds, another is named."""

from pathlib import Path

import pytest
from tests.checkpoint.thread_ranks import Threads

from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.errors import StorageError
from bloomery.events import run_directory
from bloomery.events.run_directory import prove_shared

NODES = ("a", "a", "b", "b", "c")


def started(directories: list[Path], nodes: tuple[str, ...] = NODES) -> list[object]:
    """What each rank's proof returns or raises; each node sees its own directory of the list."""

    def prove(ranks: Ranks) -> None:
        prove_shared(
            directories[ranks.rank],
            rank=ranks.rank,
            node=nodes[ranks.rank],
            gather=ranks.gather,
            within_s=0.3,
        )

    return Threads(len(nodes)).run(prove)


def test_nodes_that_share_the_directory_start_and_leave_nothing_there(tmp_path: Path):
    assert started([tmp_path] * len(NODES)) == [None] * len(NODES)
    assert list(tmp_path.iterdir()) == []


def test_a_node_with_a_directory_of_its_own_is_named_with_the_path_on_every_rank(tmp_path: Path):
    shared, alone = tmp_path / "run", tmp_path / "another disk" / "run"
    failures = started([shared, shared, alone, alone, shared])
    for failure in failures:
        assert isinstance(failure, StorageError) and "is not one directory on all nodes" in failure.message
        assert f"{shared}" in failure.message and "node a does not see what b wrote" in failure.message
    assert [path for path in tmp_path.rglob(".shared*")] == []


def test_a_node_that_may_not_write_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    closed = tmp_path / "file" / "run"
    failures = started([tmp_path, tmp_path, closed, closed, tmp_path])
    assert all(
        isinstance(failure, StorageError) and "node b cannot write" in failure.message for failure in failures
    )
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "what the others wrote is removed"


def test_ranks_of_one_node_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_directory, "_write", lambda *_: pytest.fail("one node has nothing to prove"))
    assert started([tmp_path] * 3, nodes=("a", "a", "a")) == [None] * 3


def test_nodes_of_one_rank_each_look_for_one_another(tmp_path: Path):
    first, second = started([tmp_path / "one", tmp_path / "other"], nodes=("a", "b"))
    assert isinstance(first, StorageError) and isinstance(second, StorageError)
    assert "node a does not see what b wrote" in first.message
    shared = tmp_path / "shared"
    assert started([shared] * 2, nodes=("a", "b")) == [None, None] and list(shared.iterdir()) == []


def test_the_files_stay_until_every_node_has_told_what_it_sees(tmp_path: Path):
    lasting = list[int]()

    def prove(ranks: Ranks) -> None:
        asked = list[object]()

        def gather(value: object) -> list[object]:
            asked.append(value)
            if len(asked) == 3:
                lasting.append(len(list(tmp_path.glob(".shared-*/*"))))
            return ranks.gather(value)

        prove_shared(tmp_path, rank=ranks.rank, node=NODES[ranks.rank], gather=gather)

    assert Threads(len(NODES)).run(prove) == [None] * len(NODES)
    assert lasting == [3] * len(NODES) and list(tmp_path.iterdir()) == []


def test_machines_of_one_name_are_several_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    failures = started([tmp_path / "one", tmp_path / "other"], nodes=("a", "a"))
    for failure in failures:
        assert isinstance(failure, StorageError)
        assert "node a (rank 0) does not see what a (rank 1) wrote there" in failure.message
    boots = iter("012")
    monkeypatch.setattr(run_directory, "machine_id", lambda: next(boots))
    written = list[str]()
    write = run_directory._write
    monkeypatch.setattr(run_directory, "_write", lambda *how: written.append(how[2]) or write(*how))
    shared = tmp_path / "shared"
    assert started([shared] * 3, nodes=("a", "a", "a")) == [None] * 3 and list(shared.iterdir()) == []
    assert sorted(written) == ["a (rank 0)", "a (rank 1)", "a (rank 2)"]


def test_a_directory_is_known_before_it_is_made_by_what_is_above_it(tmp_path: Path):
    seen, other = tmp_path / "runs" / "one", tmp_path / "runs" / "other"
    assert run_directory._found_at(seen) == run_directory._found_at(seen) != run_directory._found_at(other)
    assert run_directory._found_at(seen).endswith(f":{tmp_path.stat().st_ino}/runs/one")
