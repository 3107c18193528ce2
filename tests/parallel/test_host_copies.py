"""State in the CPU's memory: what is copied when, on which stream, and that it trains the same bits."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.layouts.layouts import LLAMA
from tests.layouts.styles import recipe_of
from tests.layouts.training import build
from tests.parallel.small import CPU

from bloomery.data_loader.batches import MicroBatch
from bloomery.parallel import host_copies, precision
from bloomery.parallel.build import TrainingModel
from bloomery.parallel.host_copies import CopiesAtOnce, CopiesOnStreams, OffloadedShard
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.optimizers import Optimizers


@dataclass(eq=False)
class Cuda:
    """What stands for `torch.cuda`: it notes each call, and copies are made at once."""

    calls: list[str] = field(default_factory=list)
    registered: dict[int, int] = field(default_factory=dict)
    refuses: int = 0
    current: str = "computing"
    names: Iterator[str] = field(default_factory=lambda: iter(("down", "up")))

    def Stream(self, device: torch.device) -> Any:
        return self._stream(next(self.names))

    def Event(self) -> Any:
        return SimpleNamespace(query=lambda: True)

    def current_stream(self, device: torch.device) -> Any:
        return self._stream(self.current)

    def _stream(self, name: str) -> Any:
        count = iter(range(10**6))

        def record(event: Any) -> None:
            number = next(count)
            self.calls.append(f"{name} {number} begun")

            def query() -> bool:
                self.calls.append(f"{name} {number} awaited")
                return True

            event.query = query

        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.calls.append(f"{name} follows {other.name}"),
            record_event=record,
        )

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield

    def cudart(self) -> Any:
        def register(address: int, size: int, flags: int) -> int:
            if not self.refuses:
                self.registered[address] = size
            return self.refuses

        return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=self.registered.pop)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda()


def test_a_piece_is_updated_while_later_gradients_come_and_earlier_masters_go(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_copies, "PIECE_NUMEL", 4)
    shard = OffloadedShard(10, link=CopiesOnStreams(CPU, cuda=cuda))
    assert shard.pieces == (range(4), range(4, 8), range(8, 10))
    reduced, working = torch.arange(10.0), torch.zeros(10, dtype=torch.bfloat16)
    shard.begin_down(reduced)
    for piece in shard.pieces:
        shard.wait_for_gradient(piece)
        cuda.calls.append(f"update {piece.start}")
        shard.master[piece.start : piece.stop] -= shard.gradient[piece.start : piece.stop]
        shard.begin_up(piece, working)
    shard.finish_up(working)
    before_down, before_up = ("down follows computing", "up follows computing")
    assert cuda.calls == [
        *(call for number in range(3) for call in (before_down, f"down {number} begun")),
        *("down 0 awaited", "update 0", before_up, "up 0 begun"),
        *("down 1 awaited", "update 4", before_up, "up 1 begun"),
        *("down 2 awaited", "update 8", before_up, "up 2 begun"),
        # The next forward follows the copies, and so does whatever changes the masters next.
        *("computing follows up", "up 0 awaited", "up 1 awaited", "up 2 awaited"),
    ]
    assert torch.equal(working.float(), -reduced) and torch.equal(shard.master, -reduced)


def test_masters_that_change_after_they_went_up_go_up_again(cuda: Cuda) -> None:
    shard = OffloadedShard(6, link=CopiesOnStreams(CPU, cuda=cuda))
    working = torch.zeros(6)
    shard.begin_up(range(6), working)
    shard.forget_up()
    assert cuda.calls[-1] == "up 0 awaited", "no copy reads what is about to change"
    shard.master.fill_(3.0)
    shard.finish_up(working)
    assert torch.equal(working, shard.master)
    assert [call for call in cuda.calls if "begun" in call] == ["up 0 begun", "up 1 begun"]


def test_what_is_pinned_is_masters_and_gradients_to_the_byte_and_is_released_with_them(cuda: Cuda) -> None:
    shard = OffloadedShard(1000, link=CopiesOnStreams(CPU, cuda=cuda))
    assert sorted(cuda.registered.values()) == [4000, 4000]
    assert set(cuda.registered) == {shard.master.data_ptr(), shard.gradient.data_ptr()}
    OffloadedShard(0, link=CopiesOnStreams(CPU, cuda=Cuda()))  # of a group of which this rank holds nothing
    del shard
    gc.collect()
    assert cuda.registered == {}


def test_memory_that_cannot_be_pinned_is_told_and_used_all_the_same(
    cuda: Cuda, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.refuses = 2
    shard = OffloadedShard(1000, link=CopiesOnStreams(CPU, cuda=cuda))
    shard.begin_down(torch.ones(1000))
    assert shard.gradient.sum() == 1000.0
    # A copy of such memory is a call that waits for the device, so the host waits before, with a deadline.
    waited = ["computing 0 begun", "computing 0 awaited"]
    assert cuda.calls == [*waited, "down follows computing", "down 0 begun"]
    assert "cannot be pinned (error 2)" in caplog.text
    del shard
    gc.collect()


def trained(*settings: str, qk_clip: float = 0.0) -> tuple[TrainingModel, list[torch.Tensor]]:
    """A model after three steps, and its masters by logical name's order."""
    recipe = recipe_of(LLAMA, ("train.precision=bf16", f"optim.qk_clip={qk_clip}", *settings))
    model = build(recipe, Mesh(device=CPU))
    model.initialise(seed=1, bigrams=lambda: torch.zeros(1, 1))
    model.set_phase(precision="bf16", recompute="none")
    optimizers = Optimizers(model.weights, recipe.optim, precision="bf16")
    for step in range(3):
        text = torch.arange(64).reshape(2, 32) * (2 * step + 3) % 90
        batch = MicroBatch(tokens=text, targets=text.roll(-1, 1), documents=None, samples=torch.arange(2))
        model.accumulate([batch], step, weight=1 / 64)
        model.weights.reduce()
        facts = model.weights.examine(limit=1.0, unscale=1.0)
        optimizers.step(optimizers.limit(facts, unscale=1.0), learning_rate=1e-2)
        model.after_update(facts)
        model.weights.copy_masters_to_working()
    entries = sorted(model.weights.state_entries(), key=lambda entry: entry.name)
    return model, [entry.tensor.clone() for entry in entries]


CASES = [(), ("parallel.working=by-block",), ("optim.name=muon",), ("optim.clip_method=tensor",)]


@pytest.mark.parametrize("settings", CASES, ids=lambda case: case[0] if case else "adamw")
@pytest.mark.parametrize("qk_clip", [0.0, 0.01])
@pytest.mark.parametrize("streams", [False, True])
def test_offloaded_state_is_trained_to_the_bits_of_one_that_is_not(
    settings: tuple[str, ...], qk_clip: float, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = trained(*settings, qk_clip=qk_clip)
    monkeypatch.setattr(host_copies, "PIECE_NUMEL", 4096)
    link = CopiesOnStreams(CPU, cuda=Cuda()) if streams else CopiesAtOnce()
    monkeypatch.setattr(precision, "link_to", lambda device: link)
    model, found = trained("parallel.offload=cpu", *settings, qk_clip=qk_clip)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert len(found) > 9
    for master, working in zip(model.weights.master, model.weights.working, strict=True):
        if working.untyped_storage().size():
            assert torch.equal(working, master.to(working.dtype))
