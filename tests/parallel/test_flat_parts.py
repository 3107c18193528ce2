"""Which gradients a group sums over whom, in which buckets, and when weights are gathered and freed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bloomery.config.optim import OptimSection
from bloomery.optim.groups import ParameterPiece, lay_out
from bloomery.parallel.axis import Axis, PendingCollective
from bloomery.parallel.block_weights import gather_around
from bloomery.parallel.flat import FlatGroup, ReductionsInFlight, WeightStorage
from bloomery.parallel.gradient_buckets import GradientBuckets, _buckets_of
from bloomery.parallel.host_copies import CopiesAtOnce
from bloomery.parallel.mesh import Mesh

CPU = torch.device("cpu")
SHAPES = {"blocks.0.mlp.up.weight": (2, 4), "blocks.0.mlp.down.weight": (4, 2)}


class Noted(Axis):
    """An axis of two ranks that notes its collectives by name; those of `after` give what is to come."""

    def __init__(self, calls: list[Any], name: str, *, degree: int = 2) -> None:
        object.__setattr__(self, "index", 0)
        object.__setattr__(self, "ranks", tuple(range(degree)))
        object.__setattr__(self, "group", None)
        object.__setattr__(self, "calls", calls)
        object.__setattr__(self, "name", name)

    def _note(self, what: str, tensor: torch.Tensor, *more: Any) -> None:
        if self.degree > 1:
            self.calls.append((f"{self.name}.{what}", tensor.numel(), *more))  # type: ignore[attr-defined]

    def all_reduce(self, tensor: torch.Tensor, *, maximum: bool = False) -> torch.Tensor:
        self._note("all_reduce", tensor)
        return tensor

    def reduce_scatter(self, flat: torch.Tensor) -> torch.Tensor:
        self._note("reduce_scatter", flat)
        return self.local_shard(flat)

    def begin_all_reduce(self, tensor: torch.Tensor) -> PendingCollective:
        self._note("begin_all_reduce", tensor)
        return self._pending()

    def begin_reduce_scatter(self, flat: torch.Tensor, elements: range) -> PendingCollective:
        self._note("begin_reduce_scatter", flat, elements)
        return self._pending()

    def begin_all_gather(self, flat: torch.Tensor, elements: range | None = None) -> PendingCollective:
        self._note("begin_all_gather", flat, *(() if elements is None else (elements,)))
        return self._pending()

    def all_gather(self, flat: torch.Tensor) -> None:
        self._note("all_gather", flat)

    def _pending(self) -> PendingCollective:
        wait = lambda: self.calls.append((f"{self.name}.waited",))  # type: ignore[attr-defined]  # noqa: E731
        return PendingCollective(works=(SimpleNamespace(wait=wait),))  # type: ignore[arg-type]


def group_of(
    calls: list[Any],
    *,
    shards: int = 1,
    replicas: int = 1,
    share: str = "whole",
    storage: WeightStorage | None = None,
    limit: int = 0,
    bucket: str | None = None,
) -> FlatGroup:
    pieces = [
        ParameterPiece(
            name=name,
            parameter_name=name,
            row_start=0,
            shape=shape,
            global_shape=shape,
            offset=(0, 0),
            share=share,  # type: ignore[arg-type]
        )
        for name, shape in SHAPES.items()
    ]
    by_block = bucket is not None
    (layout,) = lay_out(
        list(SHAPES.items()),
        pieces,
        OptimSection(learning_rate=0.1),
        shards=shards,
        shard=0,
        by_block=by_block,
    )
    assert layout.share == share
    mesh = Mesh(
        device=CPU,
        shard=Noted(calls, "shard", degree=shards),
        replica=Noted(calls, "replica", degree=replicas),
        data=Noted(calls, "data", degree=shards * replicas),
        tensor=Noted(calls, "tensor"),
        embedding=Noted(calls, "embedding"),
    )
    return FlatGroup(
        layout,
        {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()},
        mesh=mesh,
        storage=storage or WeightStorage(),
        in_flight=ReductionsInFlight(limit),
        link=CopiesAtOnce(),
    )


@pytest.mark.parametrize(
    ("share", "shards", "replicas", "zero", "called"),
    [
        ("whole", 1, 1, 0, []),
        ("whole", 1, 2, 0, []),  # whose ranges were summed before
        ("whole", 1, 2, 2, []),  # shards of one rank are no shards
        ("whole", 2, 1, 1, []),
        ("whole", 2, 2, 1, ["replica.all_reduce"]),
        ("whole", 2, 2, 2, ["replica.all_reduce"]),
        ("partial", 1, 1, 0, ["tensor.all_reduce"]),
        ("partial", 1, 2, 0, ["tensor.all_reduce", "replica.all_reduce"]),
        ("partial", 2, 2, 1, ["tensor.all_reduce", "shard.reduce_scatter", "replica.all_reduce"]),
        ("partial", 2, 1, 2, ["tensor.all_reduce"]),
        ("echoed", 1, 2, 0, ["embedding.all_reduce"]),
        ("echo", 2, 2, 1, ["replica.all_reduce", "embedding.all_reduce"]),
    ],
)
def test_gradients_are_summed_over_each_axis_that_holds_parts_of_them_and_in_that_order(
    share: str, shards: int, replicas: int, zero: int, called: list[str]
) -> None:
    calls: list[Any] = []
    group = group_of(calls, share=share, shards=shards, replicas=replicas, storage=WeightStorage(zero=zero))
    shards_gradients = zero >= 2 and shards > 1
    assert group.reduces_ranges is (shards * replicas > 1 and not shards_gradients and share != "partial")
    group.reduce()
    assert [name for name, *_ in calls] == called
    whole, own = group.layout.numel, len(group.layout.held)
    for name, count in calls:
        is_whole = name.endswith("scatter") or (name.startswith("tensor") and zero < 2)
        assert count == (whole if is_whole else own), name


@pytest.mark.parametrize(
    ("shards", "bucket", "zero", "shares"),
    [(2, "block", 3, True), (1, "block", 3, False), (2, None, 3, False), (2, "block", 2, False)],
)
def test_weights_of_blocks_are_gathered_where_several_ranks_hold_them(
    shards: int, bucket: str | None, zero: int, shares: bool
) -> None:
    group = group_of([], shards=shards, bucket=bucket, storage=WeightStorage(zero=zero))
    assert group.shards_weights is group.frees_weights is shares


@pytest.mark.parametrize(("bucket", "frees"), [("block", True), (None, False)])
def test_weights_are_rounded_by_block_where_they_are_no_masters(bucket: str | None, frees: bool) -> None:
    group = group_of([], bucket=bucket, storage=WeightStorage(rounds_by_block=True))
    group.set_working_dtype(torch.float32)
    assert not group.frees_weights and group.working is group.master
    group.set_working_dtype(torch.bfloat16)
    assert group.frees_weights is frees


def test_a_range_is_summed_over_shards_or_else_over_replicas() -> None:
    calls: list[Any] = []
    group_of(calls, shards=2, replicas=2, storage=WeightStorage(zero=1)).begin_reduction(range(3, 7))
    group_of(calls, replicas=2).begin_reduction(range(3, 7))
    (scattered, count, elements), reduced = calls
    assert (scattered, elements) == ("shard.begin_reduce_scatter", range(3, 7)) and count >= 16
    assert reduced == ("replica.begin_all_reduce", 4)


def test_sums_in_flight_are_finished_in_order_once_there_are_more_than_the_limit() -> None:
    done: list[int] = []
    for limit, expected in ((0, [[0], [0, 1], [0, 1, 2]]), (1, [[], [0], [0, 1]])):
        in_flight = ReductionsInFlight(limit)
        done.clear()
        for number in range(3):
            in_flight.add(f"blocks.{number}", lambda number=number: done.append(number))  # type: ignore[misc]
            assert done == expected[number]
        in_flight.finish()
        assert done == [0, 1, 2]


def test_the_sums_of_a_block_run_beside_the_backward_of_the_next_and_those_of_the_ends_one_at_a_time() -> (
    None
):
    in_flight, done = ReductionsInFlight(1), list[str]()
    seen = []
    for number, bucket in enumerate(("blocks.1", "blocks.1", "blocks.0", "blocks.0", "", "")):
        in_flight.add(bucket, lambda number=number: done.append(str(number)))  # type: ignore[misc]
        seen.append("".join(done))
    assert seen == ["", "", "01", "01", "0123", "01234"]


@pytest.mark.parametrize(("limit", "waits"), [(0, True), (1, False)])
def test_sharded_gradients_of_each_backward_are_summed_by_the_last_parameter_and_added_up(
    limit: int, waits: bool
) -> None:
    calls: list[Any] = []
    group = group_of(calls, shards=2, storage=WeightStorage(zero=2), limit=limit)
    group.set_working_dtype(torch.float32)
    group.begin_accumulation()
    for times in (1.0, 2.0):
        for number, parameter in enumerate(group.parameters):
            assert len([call for call in calls if "scatter" in call[0]]) == times - 1
            parameter.grad = torch.full_like(parameter, times)
            group.accumulate(parameter, is_last=False)
            if number == 0:
                parameter.grad = torch.zeros_like(parameter)
                group.accumulate(parameter)
        parameter.grad = torch.full_like(parameter, 10.0)
        group.accumulate(parameter)
        assert parameter.grad is None
    assert calls.count(("shard.waited",)) == (2 if waits else 1)
    group.end_accumulation()
    assert calls.count(("shard.waited",)) == 2
    place = next(iter(group.layout.held_logical()))
    held = group.reduced_gradient[place.start : place.start + place.numel]
    assert set(held.tolist()) <= {3.0, 23.0} and held.numel()


def test_offloaded_gradients_are_copied_to_the_masters_side_once_they_are_reduced() -> None:
    group = group_of([], storage=WeightStorage(offload=True))
    assert group.gradient is not group.reduced_gradient and group.master.device == CPU
    group.reduced_gradient.fill_(3.0)
    group.reduce()
    assert (group.gradient == 3.0).all()
    kept = group_of([])
    assert kept.gradient is kept.reduced_gradient
    group.set_working_dtype(torch.float32)
    assert group.working is not group.master, "what computes is on the device"
    kept.set_working_dtype(torch.float32)
    assert kept.working is kept.master and not kept.frees_weights


def test_freed_weights_are_gathered_once_and_waited_for_before_they_are_used() -> None:
    calls: list[Any] = []
    group = group_of(calls, shards=2, storage=WeightStorage(zero=3), bucket="block")
    assert group.shards_weights and group.frees_weights
    group.master.fill_(5.0)
    group.set_working_dtype(torch.bfloat16)
    assert group.working.untyped_storage().size() == 0
    group.begin_gathering()
    group.begin_gathering()
    assert calls == [("shard.begin_all_gather", group.layout.numel)]
    assert group.working.untyped_storage().size() == 2 * group.layout.numel
    assert (group.working[: len(group.layout.held)] == 5.0).all()
    group.all_gather_weights()
    group.all_gather_weights()
    assert calls[1:] == [("shard.waited",)]
    group.round_masters()
    assert group.working.untyped_storage().size() == 0
    group.begin_gathering()
    group.free_weights()
    assert calls[-1] == ("shard.waited",) and group.working.untyped_storage().size() == 0


def test_weights_are_freed_by_the_last_gradient_of_a_backward_also_where_it_is_dropped() -> None:
    group = group_of([], shards=2, storage=WeightStorage(zero=3), bucket="block")
    group.set_working_dtype(torch.float32)
    for drop in (True, False):
        group.all_gather_weights()
        group.begin_accumulation()
        for number, parameter in enumerate(group.parameters):
            parameter.grad = torch.ones_like(parameter)
            group.discard(parameter) if drop else group.accumulate(parameter)
            is_freed = group.working.untyped_storage().size() == 0
            assert is_freed is (number == 1)
            assert parameter.grad is None
    group.all_gather_weights()
    first, second = group.parameters
    for parameter in (first, first):
        parameter.grad = torch.ones_like(parameter)
        group.discard(parameter)
    group.free_weights()
    group.all_gather_weights()
    second.grad = torch.ones_like(second)
    group.discard(second)
    assert group.working.untyped_storage().size() > 0, "the first's gradient was one of the backward before"


def test_a_backward_that_stopped_half_way_lets_the_next_one_keep_its_weights_to_the_end() -> None:
    group = group_of([], shards=2, storage=WeightStorage(zero=3), bucket="block")
    group.set_working_dtype(torch.float32)
    first, second = group.parameters
    group.all_gather_weights()
    group.discard(first)
    group.free_weights()
    group.all_gather_weights()
    left = []  # sizes apart from the weights: a failing assertion would show weights that have no memory
    for parameter in (second, first):
        group.discard(parameter)
        left.append(group.working.untyped_storage().size())
    assert left == [4 * group.layout.numel, 0]


@pytest.mark.parametrize("zero", [0, 2])
def test_gradients_of_a_step_are_its_own_and_none_where_no_backward_came(zero: int) -> None:
    group = group_of([], shards=2 if zero else 1, storage=WeightStorage(zero=zero), limit=1)
    group.set_working_dtype(torch.float32)
    for value, reached in ((1.0, 2), (5.0, 2), (7.0, 1), (9.0, 0)):
        group.begin_accumulation()
        for parameter in group.parameters[:reached]:
            parameter.grad = torch.full_like(parameter, value)
            group.accumulate(parameter)
        group.end_accumulation()
        found = []
        for place in group.layout.held_logical():
            found += group.reduced_gradient[place.start : place.start + place.numel].tolist()
        assert set(found) <= {value, 0.0} and (value in found) is (reached > 0)
        assert (0.0 in found) is (reached < 2 and (zero == 0 or reached == 0))


def test_a_blocks_weights_are_there_for_its_forward_and_its_backward_and_its_neighbours_are_begun() -> None:
    calls: list[str] = []

    def group(name: str) -> Any:
        return SimpleNamespace(
            all_gather_weights=lambda: calls.append(f"gather {name}"),
            begin_gathering=lambda: calls.append(f"begin {name}"),
            free_weights=lambda: calls.append(f"free {name}"),
        )

    block = nn.Linear(2, 2)
    gather_around(block, [group("own"), group("own 2")], before=[group("before")], after=[group("after")])
    output = block(torch.ones(1, 2))
    forward = ["gather own", "gather own 2", "begin after", "free own", "free own 2"]
    assert calls == forward
    output.sum().backward()
    assert calls[5:] == ["gather own", "gather own 2", "begin before"]
    calls.clear()
    with torch.no_grad():
        block(torch.ones(1, 2))
    assert calls == forward


class Group:
    """A group of four parameters of 10 elements each, and a padding of 2."""

    reduces_ranges = True

    def __init__(self, calls: list[Any], *names: str) -> None:
        self._calls = calls
        places = [SimpleNamespace(name=name, start=10 * number) for number, name in enumerate(names)]
        self.layout = SimpleNamespace(parameters=places, numel=10 * len(names) + 2)
        self.parameters = tuple(nn.Parameter(torch.zeros(10)) for _ in names)

    def begin_reduction(self, elements: range) -> PendingCollective:
        self._calls.append(elements)
        wait = lambda: self._calls.append(("waited", elements))  # noqa: E731
        return PendingCollective(works=(SimpleNamespace(wait=wait),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bucket_bytes", "elements"),
    [
        (0, [range(42)]),
        (48, [range(30, 42), range(10, 30), range(10)]),
        (49, [range(20, 42), range(20)]),
        (88, [range(20, 42), range(20)]),
        (10_000, [range(42)]),
    ],
)
def test_buckets_are_closed_from_the_end_once_they_are_large_enough(
    bucket_bytes: int, elements: list[range]
) -> None:
    group: Any = Group([], "a", "b", "embedding.weight", "d")
    positions = {parameter: number for number, parameter in enumerate(group.parameters)}
    buckets = _buckets_of(group, positions, bucket_bytes=bucket_bytes)
    assert [bucket.elements for bucket in buckets] == elements
    for bucket in buckets:
        numbers = range(bucket.elements.start // 10, min(4, -(-bucket.elements.stop // 10)))
        assert bucket.position == numbers.start and bucket.is_tied is (2 in numbers)
        assert set(bucket.parameters) == {group.parameters[number] for number in numbers}
        assert bucket.group is group and bucket.reduction is None


@pytest.mark.parametrize("overlaps", [True, False])
def test_buckets_are_begun_in_the_order_of_a_backward_as_soon_as_each_is_complete(overlaps: bool) -> None:
    calls: list[Any] = []
    group: Any = Group(calls, "embedding.weight", "b", "c")
    other: Any = Group(calls, "not summed in ranges")
    other.reduces_ranges = False
    first, second, third = group.parameters
    buckets = GradientBuckets(
        [other, group], [*other.parameters, *group.parameters], bucket_bytes=40, overlaps=overlaps
    )
    assert len(buckets) == 3
    for _ in range(2):
        calls.clear()
        buckets.begin_step(backwards=2)
        for parameter in (third, second, first, *other.parameters, second):
            buckets.add(parameter)
        assert calls == [] and buckets.begun == 0, "the third's second gradient is to come"
        buckets.add(third)
        buckets.add(first)
        begun = [range(20, 32), range(10, 20)]
        assert calls == (begun if overlaps else [])
        assert buckets.begun == (2 if overlaps else 0)
        buckets.finish()
        every = [*begun, range(10)]
        if overlaps:
            assert calls == [*every, *(("waited", elements) for elements in every)]
        else:
            assert calls == [one for elements in every for one in (elements, ("waited", elements))]
        assert buckets.begun == 3
    calls.clear()
    buckets.begin_step(backwards=1)
    assert calls == [] and buckets.begun == 0
    buckets.add(third)
    buckets.begin_step(backwards=1)
    left = range(20, 32)
    assert calls == ([left, ("waited", left)] if overlaps else []), "a step that was given up is waited for"
    buckets.add(third)
    if overlaps:
        with pytest.raises(AssertionError, match="after the sum of its bucket had been begun"):
            buckets.add(third)


def test_masters_are_rounded_into_the_own_shard_and_then_gathered_from_all_ranks() -> None:
    calls: list[Any] = []
    group = group_of(calls, shards=2, storage=WeightStorage(zero=1))
    group.master.fill_(5.0)
    group.set_working_dtype(torch.bfloat16)
    assert group.gathers_after_update and not (group.working[: len(group.layout.held)] == 5.0).all()
    group.round_masters()
    assert calls == [] and (group.working[: len(group.layout.held)] == 5.0).all()
    group.begin_gathering_range(range(2, 7)).wait_for_collective()
    assert calls == [("shard.begin_all_gather", group.layout.numel, range(2, 7)), ("shard.waited",)]
    alone = group_of(calls)
    alone.set_working_dtype(torch.float32)
    alone.round_masters()
    assert not alone.gathers_after_update and alone.working is alone.master
    by_block = group_of([], shards=2, storage=WeightStorage(zero=3), bucket="block")
    assert not by_block.gathers_after_update, "its weights are gathered when they are needed"
