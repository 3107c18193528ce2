"""Who waits for a run of blocks, and who is woken."""

from __future__ import annotations

import queue
import threading

import pytest

from bloomery.state_transfer.partial_checkpoint import TWICE, BlockRun, MissingBlocks

DEADLINE_S = 60.0
RUN = BlockRun(file="f", begin=0, end=1 << 20)


class LookedAt(list[str]):
    """Names of files; tells that it was looked into."""

    def __init__(self, *names: str) -> None:
        super().__init__(names)
        self.looks = threading.Event()

    def __contains__(self, name: object) -> bool:
        self.looks.set()
        return super().__contains__(name)


@pytest.mark.parametrize("what", ["given back", "fetched"])
def test_who_finds_every_run_taken_waits_until_one_is_given_back_or_fetched(what: str) -> None:
    missing, files = MissingBlocks([RUN, BlockRun(file="of others", begin=0, end=1 << 20)]), LookedAt("f")
    taken: queue.SimpleQueue[BlockRun | None] = queue.SimpleQueue()
    for _ in range(TWICE):
        assert missing.take(["f"], timeout_s=0.0) == RUN
    waiting = threading.Thread(
        target=lambda: taken.put(missing.take(files, timeout_s=10 * DEADLINE_S)), daemon=True
    )
    waiting.start()
    assert files.looks.wait(DEADLINE_S)  # it holds the lock until it waits
    if what == "fetched":
        assert missing.done(RUN)
        assert taken.get(timeout=DEADLINE_S) is None and missing.files() == {"of others"}
    else:
        missing.give_back(RUN)
        assert taken.get(timeout=DEADLINE_S) == RUN and missing.is_missing(RUN)


def test_a_run_that_was_fetched_or_given_back_twice_is_no_longer_given_back() -> None:
    missing = MissingBlocks([RUN])
    for _ in range(TWICE):
        missing.take(["f"], timeout_s=0.0)
    assert missing.done(RUN) and not missing.done(RUN)
    missing.give_back(RUN)  # by the slower of the two
    assert missing.is_over and missing.take(["f"], timeout_s=10 * DEADLINE_S) is None


def test_a_run_of_a_file_that_nobody_else_has_is_handed_out_first() -> None:
    runs = [BlockRun(file=file, begin=0, end=1 << 20) for file in ("common", "own", "other")]
    missing = MissingBlocks(runs)
    assert missing.take(["common", "own"], ["own"], timeout_s=0.0).file == "own"
    assert missing.take(["common", "own"], ["own"], timeout_s=0.0).file == "common"
    assert missing.files() == {"common", "own", "other"}
    assert missing.take(["nothing"], timeout_s=0.0) is None


def test_who_takes_a_run_looks_at_files_and_not_at_each_of_a_large_checkpoints_runs() -> None:
    class Counted(set[str]):
        looks = 0

        def __contains__(self, name: object) -> bool:
            Counted.looks += 1
            return super().__contains__(name)

    files = ("a", "b", "c")
    missing = MissingBlocks(
        BlockRun(file=file, begin=n << 20, end=(n + 1) << 20) for file in files for n in range(999)
    )
    run = missing.take(Counted(files), Counted(["own"]), timeout_s=0.0)
    assert run is not None and (run.file, run.begin) == ("a", 0) and Counted.looks <= 2 * len(files)
    missing.done(run)
    run = missing.take(Counted(files), timeout_s=0.0)
    assert run is not None and (run.file, run.begin) == ("a", 1 << 20), "each file from its beginning"


def test_no_more_than_two_fetch_the_same_run() -> None:
    missing = MissingBlocks([RUN])
    assert [missing.take(["f"], timeout_s=0.0) for _ in range(3)] == [RUN, RUN, None]


def test_nobody_waits_where_nothing_is_missing() -> None:
    waiting = threading.Thread(target=MissingBlocks([]).wait, args=(1e6,), daemon=True)
    waiting.start()
    waiting.join(DEADLINE_S)
    assert not waiting.is_alive()
