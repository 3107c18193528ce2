"""A step waits for the device once: counted on the CPU, where each wait is a call that can be seen."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.train.test_loop import go
from torch.utils._python_dispatch import TorchDispatchMode

from bloomery.train import loop

WAITING_OPERATIONS = {
    *("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select"),
    *("_unique2", "unique_dim", "unique_consecutive", "bincount", "repeat_interleave"),
}
"""Operations whose result the host needs: `item`, `bool`, `float` and `int` of a tensor, and data-dependent
shapes."""
WAITING_METHODS = ("tolist", "numpy", "cpu")
"""Methods that copy to the host without an operation where the tensor is there already."""


class _Waits(TorchDispatchMode):
    """Counts what would wait for a device, by step; `step` is 0 outside of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.by_step = 0, Counter[tuple[int, str]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        # A choice by booleans counts them, and so does an assignment, unless it is a `masked_fill`.
        by_booleans = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if by_booleans or name in WAITING_OPERATIONS:
            self.by_step[self.step, name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "switches",
    [
        ("optim.name=adamw",),
        ("optim.name=adamw", "train.precision=fp16"),
        ("optim.clip_method=z-score", "optim.skip_outliers=6", "optim.qk_clip=0.1", "model.qk_norm=false"),
        ("optim.clip_method=tensor", "model.qk_norm=true", "model.embedding_norm=true"),
        ("train.precision=fp8", "train.recompute=full"),
        ("model.position=alibi", "model.norm=layernorm", "model.bias=true", "model.attention_dropout=0.1"),
        ("data.mask_documents=true", "optim.name=muon"),
    ],
    ids=[
        *("guards", "loss scale", "z-score, outliers, QK-clip", "by tensor, QK-norm, embedding norm"),
        *("FP8, recomputation", "BLOOM style, dropout of weights", "documents, Muon"),
    ],
)
def test_each_step_waits_for_the_device_once(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, switches: tuple[str, ...]
) -> None:
    waits, main = _Waits(), threading.current_thread()
    for method in WAITING_METHODS:
        real = getattr(torch.Tensor, method)

        def counted(tensor: torch.Tensor, *args: Any, _real: Any = real, _name: str = method) -> Any:
            if threading.current_thread() is main:
                waits.by_step[waits.step, _name] += 1
            return _real(tensor, *args)

        monkeypatch.setattr(torch.Tensor, method, counted)
    for owner, maker in ((torch, "tensor"), (torch, "as_tensor"), (torch.Tensor, "new_tensor")):
        made = getattr(owner, maker)

        def make(*args: Any, _made: Any = made, _name: str = maker, **more: Any) -> Any:
            # The host waits for copies from pageable memory: see `host_numbers`.
            if threading.current_thread() is main and "pin_memory" not in more:
                waits.by_step[waits.step, _name] += 1
            return _made(*args, **more)

        monkeypatch.setattr(owner, maker, make)
    real_step = loop.train_step

    def train_step(parts: Any, micro_batches: Any, state: Any) -> Any:
        waits.step = state.step + 1
        return real_step(parts, micro_batches, state)

    monkeypatch.setattr(loop, "train_step", train_step)
    loaded, path = start(
        *switches, "checkpoint.every_steps=0", "evaluate.every_steps=0", "guard.growth_steps=2"
    )
    with waits:
        go(loaded, path)
    steps = max(step for step, _ in waits.by_step)
    assert steps > 10
    # The last step takes the last checkpoint, too.
    by_step = {
        step: {name: count for (at, name), count in waits.by_step.items() if at == step}
        for step in range(1, steps)
    }
    assert by_step == {step: {"tolist": 1} for step in range(1, steps)}


def test_a_second_wait_would_be_counted() -> None:
    waits = _Waits()
    with waits:
        tensor = torch.ones(3)
        assert tensor.sum() and float(tensor[0]) == 1.0 and tensor.nonzero().numel()
        assert tensor[tensor > 0.0].numel() and tensor[torch.tensor([0, 1])].numel()
        tensor[tensor > 2.0] = torch.zeros(0)
    expected = {"_local_scalar_dense": 2, "nonzero": 1, "index": 1, "index_put_": 1}
    assert waits.by_step == {(0, name): count for name, count in expected.items()}
