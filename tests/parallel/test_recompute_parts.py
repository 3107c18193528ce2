"""What each block computes again, how often, and what the first rank writes while the others wait."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from bloomery.errors import DataError, RankLost
from bloomery.parallel import rank_zero_task, recompute
from bloomery.parallel.rank_zero_task import run_as_rank_zero
from bloomery.parallel.recompute import _checkpointed_once, _SavedTensors, compiled_function, set_recompute

KEY = "rank_zero_task/3"


class Block:
    """A block without linear layers, whose methods tell what they are."""

    def modules(self) -> tuple[Block, ...]:
        return (self,)

    def __init__(self, index: int) -> None:
        self.index, self.attention = index, Attention(index)

    def forward(self) -> str:
        return f"forward {self.index}: {self.mix()}, {self.expand()}"

    def mix(self) -> str:
        return f"mix {self.index}"

    def expand(self) -> str:
        return f"expand {self.index}"


class Attention:
    def __init__(self, index: int) -> None:
        self.index = index

    def modules(self) -> tuple[Attention, ...]:
        return (self,)

    def attend(self) -> str:
        return f"attend {self.index}"


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("compiles", [True, False])
def test_each_block_is_wrapped_as_its_mode_says_and_unwrapped_before(
    splits: bool, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def marking(mark: str) -> Any:
        return lambda function, **_device: lambda: f"{mark}({function()})"

    names = {"_checkpointed": "full", "_checkpointed_once": "once", "_keeping_products": "products"}
    for name, mark in {**names, "compiled_function": "compiled"}.items():
        monkeypatch.setattr(recompute, name, marking(mark))
    decoder: Any = SimpleNamespace(blocks=[Block(index) for index in range(5)], device=None)

    def seen(*modes: str) -> list[tuple[str, str]]:
        set_recompute(decoder, dict(enumerate(modes)), splits_backward=splits, compiles=compiles)
        return [(block.forward(), block.attention.attend()) for block in decoder.blocks]

    wrap = "once" if splits else "full"

    def compiled(inner: str) -> str:
        return f"compiled({inner})" if compiles else inner

    def forward(index: int, mix: str = "mix {}", expand: str = "expand {}") -> str:
        return f"forward {index}: {mix}, {expand}".replace("{}", str(index))

    modes = ("none", "full", "elementwise", "selective", "mlp")
    expected = [
        (compiled(forward(0)), "attend 0"),
        (compiled(f"{wrap}({forward(1)})"), "attend 1"),
        (compiled(f"products({forward(2)})"), "attend 2"),
        (compiled(forward(3)), f"{wrap}(attend 3)"),
        (compiled(forward(4, "products(mix {})", f"{wrap}(expand {{}})")), "attend 4"),
    ]
    assert seen(*modes) == expected
    assert seen(*modes) == expected, "not wrapped twice"
    assert seen(*["none"] * 5) == [(compiled(forward(index)), f"attend {index}") for index in range(5)]


class Counted:
    """A function of two tensors and a number that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, factor: float) -> torch.Tensor:
        self.calls += 1
        return (x @ weight).sin().square() * factor


def leaves() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(3, 3, generator=generator).requires_grad_() for _ in range(2))
    return x, weight


def test_a_function_is_computed_again_once_however_often_a_backward_runs_over_it() -> None:
    plain, again = Counted(), Counted()
    x, weight = leaves()
    wanted = torch.autograd.grad(plain(x, weight, 2.0).sum(), (x, weight))
    result = _checkpointed_once(again)(x, weight, 2.0)
    assert again.calls == 1
    for _ in range(2):  # as a backward by inputs and one by weights
        found = torch.autograd.grad(result.sum(), (x, weight), retain_graph=True)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        assert again.calls == 2


def test_what_needs_no_gradient_gets_none_when_it_is_computed_again_and_nothing_is_kept_without_any() -> None:
    function = Counted()
    x, weight = leaves()
    result = _checkpointed_once(function)(x.detach(), weight, 2.0)
    (by_weight,) = torch.autograd.grad(result.sum(), weight)
    (wanted,) = torch.autograd.grad(function(x.detach(), weight, 2.0).sum(), weight)
    assert torch.equal(by_weight, wanted)
    with torch.no_grad():
        assert not _checkpointed_once(function)(x, weight, 2.0).requires_grad
    assert function.calls == 4


def test_what_a_backward_needs_is_kept_without_its_graph_and_what_it_was_made_of_is_let_go() -> None:
    function = Counted()
    saved = _SavedTensors(function, (*leaves(), 2.0))
    with saved_tensors_hooks(saved.pack, saved.unpack):
        function(*leaves(), 2.0)
    assert not any(saved.unpack(number).requires_grad for number in range(saved._count))
    assert saved._count > 0 and saved._arguments == ()


@pytest.mark.parametrize(("device", "options"), [("cpu", {"emulate_precision_casts": True}), ("cuda", None)])
def test_a_function_is_compiled_as_one_graph_for_its_very_shapes_and_on_cpus_with_the_roundings_of_eager_code(
    device: str, options: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **told: (function, told))
    told = {"dynamic": False, "fullgraph": True, "options": options}
    assert compiled_function(len, device=torch.device(device)) == (len, told)  # type: ignore[comparison-overlap]


class Store:
    """A store that keeps each value of a key; `lost` is what it raises."""

    def __init__(self) -> None:
        self.written: list[dict[str, Any]] = []
        self.has_status = threading.Event()
        self.was_asked_in_vain = threading.Event()
        self.lost: RuntimeError | None = None

    def set(self, key: str, value: str) -> None:
        assert key == KEY
        if self.lost is not None:
            self.was_asked_in_vain.set()
            raise self.lost
        self.written.append(json.loads(value))
        self.has_status.set()


def test_the_first_rank_tells_how_far_its_task_is_and_at_last_how_it_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_zero_task, "STATUS_EVERY_S", 1000.0)
    store: Any = Store()

    def task(report_progress: Any) -> str:
        assert store.has_status.wait(20.0), "a status comes at once"
        for _ in range(3):
            report_progress()
        return "made"

    assert run_as_rank_zero(store, KEY, task) == "made"
    first, last = store.written
    assert (first["count"], first["outcome"]) == (1, "")
    assert (last["count"], last["steps"], last["outcome"]) == (-1, 3, "done")
    assert last["processor_s"] >= first["processor_s"] >= 0


def test_a_task_that_fails_is_told_as_failed_and_its_error_stays_also_where_the_store_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def task(report_progress: Any) -> str:
        assert store.has_status.wait(20.0)
        store.lost = lost
        raise DataError("nowhere.txt does not exist")

    for lost in (None, RuntimeError("Connection reset by peer")):
        store: Any = Store()
        with pytest.raises(DataError, match="does not exist"):
            run_as_rank_zero(store, KEY, task)
        assert (store.written[-1]["outcome"] == "failed") is (lost is None)


def test_a_store_that_is_lost_at_the_end_of_a_task_is_told_and_meanwhile_is_not() -> None:
    store: Any = Store()

    def task(report_progress: Any) -> None:
        assert store.has_status.wait(20.0)
        store.lost = RuntimeError("Connection reset by peer")

    with pytest.raises(RankLost, match="The store where the ranks meet is gone"):
        run_as_rank_zero(store, KEY, task)


def test_whoever_writes_the_status_ends_without_a_word_where_the_store_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_zero_task, "STATUS_EVERY_S", 0.0)
    said: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", said.append)
    store: Any = Store()

    def task(report_progress: Any) -> None:
        writers = [thread for thread in threading.enumerate() if thread.name == KEY]
        store.lost = RuntimeError("Connection reset by peer")
        assert store.was_asked_in_vain.wait(20.0)
        for thread in writers:
            thread.join(20.0)

    with pytest.raises(RankLost):
        run_as_rank_zero(store, KEY, task)
    assert said == []


def test_what_child_processes_compute_is_progress_of_the_first_rank_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = SimpleNamespace(user=1.0, system=20.0, children_user=300.0, children_system=4000.5)
    monkeypatch.setattr(rank_zero_task, "os", SimpleNamespace(times=lambda: used))
    store: Any = Store()
    run_as_rank_zero(store, KEY, lambda report_progress: None)
    assert store.written[-1]["processor_s"] == 4321


def test_no_status_comes_after_the_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_task, "STATUS_EVERY_S", 0.0)
    store: Any = Store()

    def task(report_progress: Any) -> None:
        while len(store.written) < 5:
            store.has_status.wait(20.0)

    run_as_rank_zero(store, KEY, task)
    for thread in threading.enumerate():
        if thread.name == KEY:
            thread.join(5.0)
            assert not thread.is_alive(), "nobody writes on after the task"
    counts = [status["count"] for status in store.written[:-1]]
    assert counts == list(range(1, len(counts) + 1)) and store.written[-1]["count"] == -1


@pytest.mark.parametrize("wrap", [recompute._checkpointed, recompute._keeping_products])
def test_weights_get_their_gradient_though_the_input_needs_none_and_no_random_state_is_kept(
    wrap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_rng_state", lambda: pytest.fail("it was asked for"))
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    wrap(lambda x: (weight * x).sin())(torch.zeros(2)).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [0.0, 0.0]
