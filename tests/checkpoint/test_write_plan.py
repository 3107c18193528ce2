import json

import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpoint.thread_ranks import Threads

from bloomery.checkpoint.format.state import Box, StateEntry, whole
from bloomery.checkpoint.save.write_plan import (
    HeldBox,
    RankWritePlan,
    WritePlanner,
    assign_writers,
    held_boxes_from_json,
)
from bloomery.checkpoint.writer.ranks import Ranks

boxes = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 1000)), max_size=30)


def rank_of(listed: list[tuple[int, int]]) -> list[HeldBox]:
    return [HeldBox(f"t{name}", (0,), (size,), 4 * size) for name, size in dict(listed).items()]


@given(st.lists(boxes, min_size=1, max_size=5))
def test_every_box_is_written_once_by_a_rank_that_holds_it(everyones: list[list[tuple[int, int]]]):
    ranks = [rank_of(listed) for listed in everyones]
    assigned = assign_writers(ranks)
    assert all(keys <= {box.key for box in rank} for keys, rank in zip(assigned, ranks, strict=True))
    written = [key for keys in assigned for key in keys]
    assert sorted(written) == sorted({box.key for rank in ranks for box in rank})


@given(st.integers(1, 6), boxes)
def test_replicas_are_shared_out_to_within_the_largest_of_them(world: int, listed: list[tuple[int, int]]):
    ranks = [rank_of(listed)] * world
    sizes = {box.key: box.bytes for box in ranks[0]}
    loads = [sum(sizes[key] for key in keys) for keys in assign_writers(ranks)]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


def test_what_one_rank_alone_holds_counts_before_replicas_are_shared_out():
    shared = [HeldBox("shared", (part,), (1,), 10) for part in range(4)]
    alone = HeldBox("alone", (0,), (1,), 30)
    first, second = assign_writers([[*shared, alone], shared])
    assert alone.key in first and len(first) == 2 and len(second) == 3


def test_a_list_of_boxes_crosses_as_json():
    listed = rank_of([(3, 7), (1, 2)])
    assert held_boxes_from_json([box.to_json() for box in listed]) == listed


def test_each_rank_knows_how_much_all_write_to_files_and_to_shared_buffers():
    """A header lies in the file alone, and files in a buffer begin at pages: the two sizes differ."""

    def agreed(ranks: Ranks) -> tuple[RankWritePlan, list[int], list[int]]:
        planner = WritePlanner(ranks, file_bytes=1 << 10)
        entries = [
            whole(f"t{ranks.rank}{number}", torch.zeros(300 + 100 * ranks.rank)) for number in range(3)
        ]
        plan = planner.agree(entries, ranks.gather(planner.digest(entries)))
        return plan, planner.file_bytes, planner.buffer_bytes

    plans = Threads(2).run(agreed)
    assert all(plan.bytes != plan.file_bytes for plan, *_ in plans)
    for _, file_bytes, buffer_bytes in plans:
        assert file_bytes == [plan.file_bytes for plan, *_ in plans]
        assert buffer_bytes == [plan.bytes for plan, *_ in plans]


def test_what_all_ranks_hold_is_written_by_one_of_them_also_after_the_state_has_changed():
    def agreed(ranks: Ranks) -> list[tuple[list[str], list[str]]]:
        planner, found = WritePlanner(ranks, file_bytes=1 << 20), []
        for names in ("ab", "abcd", "c"):
            entries = [whole(f"model.{name}", torch.zeros(100)) for name in names]
            plan = planner.agree(entries, ranks.gather(planner.digest(entries)))
            mine = [entry.name for entry in planner.entries_to_write(entries)]
            found.append((mine, [box["name"] for box in json.loads(plan.boxes)]))
        return found

    first, second = Threads(2).run(agreed)
    assert first == [(names, names) for names in (["model.a"], ["model.a", "model.c"], ["model.c"])]
    assert second == [(names, names) for names in (["model.b"], ["model.b", "model.d"], [])]


def test_pieces_of_a_shard_are_its_own_rows():
    tensor = torch.arange(40 * 16, dtype=torch.float32).view(40, 16)  # rows 100 to 139 of a tensor
    box = Box(offset=(100, 0), shape=(40, 16))
    shard = StateEntry(name="t", dtype="float32", tensor=tensor, global_shape=(200, 16), box=box)
    planner = WritePlanner(Ranks(), file_bytes=1024)
    plan = planner.agree([shard], [planner.digest([shard])])
    items = [item for file in plan.files for item in file.items]
    assert len(items) > 2 and all(item.entry == 0 and item.rows is not None for item in items)
    rows = sorted((item.rows.start, item.rows.stop) for item in items if item.rows is not None)
    assert [begin for begin, _ in rows] == [0, *(end for _, end in rows[:-1])] and rows[-1][1] == 40
