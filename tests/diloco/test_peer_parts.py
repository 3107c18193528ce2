"""Which elements of its groups are in a rank's part of the peer's vector, and where each of them lies."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.parallel.test_host_copies import Cuda

from bloomery.diloco import peer_vector
from bloomery.diloco.peer_vector import PeerVector, _own_part
from bloomery.optim.groups import GroupLayout, LogicalPlacement, Share
from bloomery.parallel.host_copies import CopiesOnStreams


def group(name: str, numel: int, *, share: Share = "whole", held: range | None = None) -> GroupLayout:
    """A group of one vector that fills it."""
    place = LogicalPlacement(name=name, start=0, shape=(numel,), global_shape=(100,), offset=(40,))
    return GroupLayout(
        rule="plain", share=share, bucket="", parameters=(), logical=(place,), numel=numel,
        held=range(numel) if held is None else held,
    )  # fmt: skip


def mesh(*, index: int = 0, degree: int = 1, is_first: bool = True) -> Any:
    replica, tensor = SimpleNamespace(index=index, degree=degree), SimpleNamespace(is_first=is_first)
    return SimpleNamespace(replica=replica, tensor=tensor, world=1, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("share", "of_first", "of_others"),
    [
        ("whole", (0, 10), (0, 0)),
        ("partial", (0, 10), (0, 0)),
        ("split", (0, 10), (0, 10)),
        ("echoed", (0, 10), (0, 10)),
        ("echo", (0, 0), (0, 0)),
    ],
)
def test_what_tensor_parallel_ranks_hold_alike_is_in_the_part_of_the_first(
    share: Share, of_first: tuple[int, int], of_others: tuple[int, int]
) -> None:
    layout = group("x", 10, share=share)
    assert _own_part(layout, mesh()) == of_first
    assert _own_part(layout, mesh(is_first=False)) == of_others


def test_replicas_divide_what_they_hold_alike_and_the_last_one_may_have_less_or_nothing() -> None:
    layout = group("x", 30, held=range(10, 20))
    assert [_own_part(layout, mesh(index=index, degree=3)) for index in range(3)] == [(0, 4), (4, 8), (8, 10)]
    few = [_own_part(layout, mesh(index=index, degree=6)) for index in range(6)]
    assert few == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10), (10, 10)]


class Weights:
    """Two groups, of which a rank holds 6 and 4 elements; notes what follows a change."""

    def __init__(self) -> None:
        self.layouts = (group("a", 6), group("b", 4))
        self.master = [torch.arange(6.0), 10 + torch.arange(4.0)]
        self.reduced_gradient = [20 + torch.arange(6.0), 30 + torch.arange(4.0)]
        self.followed = list[str]()

    def copy_masters_to_working(self) -> None:
        self.followed.append("working")

    def copy_reduced_gradient(self) -> None:
        self.followed.append("gradient")

    def spoil_gradients(self) -> None:
        self.followed.append("spoiled")


def vector_of(*, index: int) -> tuple[PeerVector, Weights]:
    """That of one of two replicas: the first half of each group, or the second."""
    weights = Weights()
    return PeerVector(weights, mesh(index=index, degree=2)), weights  # type: ignore[arg-type]


def test_what_a_gpu_reads_and_writes_is_pinned_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda()
    monkeypatch.setattr(peer_vector, "link_to", lambda device: CopiesOnStreams(device, cuda=cuda))
    vector, _ = vector_of(index=0)
    base, offered = vector.pinned_zeros(), vector.pinned_zeros(3)
    assert cuda.registered == {base.data_ptr(): 4 * vector.numel, offered.data_ptr(): 4 * 3}
    vector.read_masters(base)
    assert base.tolist() == [0.0, 1, 2, 10, 11]
    strips = list(vector.each_master([range(0, 2), range(2, 3)]))
    assert sorted(cuda.registered.values())[:2] == [4 * 2, 4 * 2]
    assert {strip.data_ptr() for strip in strips} < set(cuda.registered)
    del vector
    gc.collect()
    assert cuda.registered == {}


def test_the_next_weights_come_while_the_caller_uses_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda()
    monkeypatch.setattr(peer_vector, "link_to", lambda device: CopiesOnStreams(device, cuda=cuda))
    vector, _ = vector_of(index=0)
    found = []
    for weights in vector.each_master([range(0, 2), range(2, 4), range(4, 5)]):
        cuda.calls.append("used")
        found += weights.tolist()
    assert found == [0.0, 1, 2, 10, 11]
    # The second range lies in two groups.
    begun_or_used = [call for call in cuda.calls if "begun" in call or call == "used"]
    assert begun_or_used == [*(f"down {n} begun" for n in range(3)), "used", "down 3 begun", "used", "used"]
    assert cuda.calls.index("down 0 awaited") < cuda.calls.index("used") < cuda.calls.index("down 2 awaited")
    assert list(vector.each_master([])) == []


def test_weights_are_copied_beside_the_next_step_and_the_update_waits_for_the_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = Cuda()
    monkeypatch.setattr(peer_vector, "link_to", lambda device: CopiesOnStreams(device, cuda=cuda))
    vector, _ = vector_of(index=0)
    into = vector.pinned_zeros(3)
    copied = vector.copy_masters(into, (range(1, 2), range(3, 5)))
    begun = ["down follows computing", "down 0 begun", "down follows computing", "down 1 begun"]
    assert cuda.calls == begun
    vector.keep_masters_until_copied()
    assert cuda.calls[4:] == ["computing follows down"]
    copied.synchronize()
    assert cuda.calls[5:] == ["down 0 awaited", "down 1 awaited"] and into.tolist() == [1.0, 10, 11]


def test_weights_are_mixed_on_the_device_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_vector, "PIECE_NUMEL", 2)
    vector, weights = vector_of(index=0)
    vector.mix_masters(torch.tensor([8.0, 8, 8]), (range(0, 1), range(2, 4)), share=0.25)
    assert weights.master[0].tolist() == [2.0, 1, 3.5, 3, 4, 5]
    assert weights.master[1].tolist() == [9.5, 11, 12, 13] and weights.followed == ["working"]
    vector.mix_masters(torch.tensor([7.0]), (range(4, 5),), share=1.0)
    assert weights.master[1].tolist() == [9.5, 7, 12, 13]


@pytest.mark.parametrize(("index", "part"), [(0, [0.0, 1, 2, 10, 11]), (1, [3.0, 4, 5, 12, 13])])
def test_a_part_is_read_from_any_element_on_over_the_borders_of_groups(index: int, part: list[float]) -> None:
    vector, _ = vector_of(index=index)
    assert vector.numel == 5 and vector.zeros().tolist() == [0.0] * 5
    for start in range(5):
        for stop in range(start, 6):
            into = torch.full((stop - start,), -1.0)
            vector.read_masters(into, start)
            assert into.tolist() == part[start:stop]
    gradients = vector.zeros()
    vector.read_gradients(gradients)
    assert gradients.tolist() == [value + 20 for value in part]


def test_what_is_written_goes_to_its_elements_alone_and_the_working_weights_follow() -> None:
    vector, weights = vector_of(index=1)
    vector.write_masters(torch.tensor([-1.0, -2, -3, -4, -5]), within=(range(1, 2), range(2, 4)))
    assert weights.master[0].tolist() == [0.0, 1, 2, 3, -2, -3]
    assert weights.master[1].tolist() == [10.0, 11, -4, 13] and weights.followed == ["working"]
    vector.write_gradients(torch.tensor([-1.0, -2, -3, -4, -5]))
    assert weights.reduced_gradient[0].tolist() == [20.0, 21, 22, -1, -2, -3]
    assert weights.reduced_gradient[1].tolist() == [30.0, 31, -4, -5]
    vector.spoil_gradients()
    assert weights.followed == ["working", "gradient", "spoiled"]
    vector.write_masters(torch.zeros(5), within=())
    assert weights.master[0].tolist() == [0.0, 1, 2, 3, -2, -3]


def test_a_part_is_described_as_boxes_of_the_logical_tensors() -> None:
    vector, _ = vector_of(index=1)
    assert vector.places() == [("a", range(0, 3)), ("b", range(3, 5))]
    flat = torch.arange(5.0)
    entries = list(vector.entries(flat, prefix="outer.base", scope="shared"))
    told = [(e.name, e.global_shape, e.dtype, e.box.offset, e.box.shape, e.scope) for e in entries]
    assert told == [
        ("outer.base.a", (100,), "float32", (43,), (3,), "shared"),
        ("outer.base.b", (100,), "float32", (42,), (2,), "shared"),
    ]
    assert [entry.tensor.tolist() for entry in entries] == [[0.0, 1.0, 2.0], [3.0, 4.0]]
    entries[1].tensor.fill_(9.0)
    assert flat.tolist() == [0.0, 1.0, 2.0, 9.0, 9.0], "they are views"
