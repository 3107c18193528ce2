"""From any layout into any other: bit for bit, each byte read once. All pairs: `make soak PART=reshard`."""

from pathlib import Path

import pytest
import torch
from tests.checkpoint.layout_maps import LAYOUTS, MOMENTS, Shape, entry_of, flat_boxes, parts_of
from tests.checkpoint.resharding import bytes_of_reading, loaded_everywhere, saved_by

from bloomery.checkpoint.format.catalogue import verify

SMALL = Shape(hidden=16, inner=44, layers=5, vocabulary=52, key_rows=4)
LARGE = Shape(hidden=1024, inner=2816, layers=5, vocabulary=32_768, key_rows=256)


@pytest.mark.parametrize("number", range(len(LAYOUTS)))
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_layout_loads_what_the_next_one_saved_bit_for_bit(tmp_path: Path, number: int, tied: bool):
    shape = Shape(**{**vars(SMALL), "tied": tied})
    before, after = LAYOUTS[number], LAYOUTS[number * 5 % 16 - 1]
    directory, state = saved_by(shape, before, tmp_path, seed=number)
    assert verify(directory) == []
    wrong, _ = loaded_everywhere(shape, after, directory, state)
    assert wrong == []


def test_of_a_state_of_a_gigabyte_each_layout_reads_hardly_more_than_it_needs():
    """Arithmetic alone: what is planned, in whole blocks, over all ranks together."""
    state_bytes = 3 * 4 * sum(torch.Size(size).numel() for size in LARGE.tensors().values())
    assert state_bytes > 1e9
    for before, after in zip(LAYOUTS, (*LAYOUTS[5:], *LAYOUTS[:5]), strict=True):
        read = bytes_of_reading(LARGE, before, after)
        assert state_bytes <= read <= 1.1 * state_bytes, (str(before), str(after), read / state_bytes)


def test_the_boxes_of_a_flat_range_are_its_elements_in_order():
    shape = (3, 4, 5)
    numbers = torch.arange(60).view(shape)
    for start in range(61):
        for stop in range(start, 61):
            boxes = list(flat_boxes(shape, start, stop))
            found = []
            for box in boxes:
                cut = numbers[tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))]
                found += cut.flatten().tolist()
            assert found == list(range(start, stop)) and len(boxes) <= 5


def test_the_layouts_are_what_they_claim_to_be():
    """Each holds all of the state, and what is to be saved fills each tensor once, replicas aside."""
    for layout in LAYOUTS:
        boxes = {}
        for rank in range(layout.world):
            for part in parts_of(SMALL, layout, rank):
                if part.saved:
                    boxes.setdefault(part.name, set()).add(part.box)
        for name, size in SMALL.tensors().items():
            for prefix in ("model.", *MOMENTS):
                assert sum(box.size for box in boxes[prefix + name]) == torch.Size(size).numel()
    assert entry_of(parts_of(SMALL, LAYOUTS[0], 0)[0], torch.zeros(52, 16)).name == "model.embedding.weight"
