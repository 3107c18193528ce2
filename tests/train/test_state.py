"""Nothing that training remembers is missing from its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bloomery.checkpoint.format.state import collect
from bloomery.config.load import LoadedRecipe
from bloomery.events.run_directory import RunDirectory
from bloomery.train.assemble import build_trainer
from bloomery.train.settings import StartOptions
from bloomery.train.step import train_step

Start = Callable[..., tuple[LoadedRecipe, Path]]


BOTH = pytest.mark.parametrize(
    "optim",
    [
        ("optim.name=adamw", "optim.clip_method=z-score"),
        ("optim.name=muon", "optim.clip_method=tensor", "optim.skip_outliers=6", "optim.qk_clip=0.1"),
    ],
    ids=["adamw", "muon"],
)


@BOTH
def test_every_tensor_that_a_step_changes_is_registered_or_derived(
    start: Start, optim: tuple[str, ...]
) -> None:
    loaded, path = start(*optim, "train.precision=fp16", "model.bias=true", "model.norm=layernorm")
    with build_trainer(loaded, RunDirectory(path), StartOptions(say=lambda line: None)) as trainer:
        state, learner = trainer.saver.restore(), trainer.learner
        stored = {
            entry.tensor.untyped_storage().data_ptr() for entry in collect(trainer.saver.stateful).entries
        }
        phase = trainer.phase(state)
        trainer.step_parts(phase)
        derived = {
            flat.untyped_storage().data_ptr()
            for flat in (*learner.model.weights.working, *learner.model.weights.gradient)
        }
        holders = (learner, trainer.guards, trainer.outer)
        before = {id(t): (t, t.clone()) for holder in holders for t in tensors_of(holder)}
        for _ in range(2):
            span = trainer.order.next_span(state.position, phase.global_batch, trainer.outer.share)
            train_step(trainer.step_parts(phase), trainer.batches.batch(span, phase.micro_batch), state)
            state = state.after(span)
        changed = [t for t, old in before.values() if t.shape == old.shape and not torch.equal(t, old)]
        assert len(changed) > 5
        for tensor in changed:
            assert tensor.untyped_storage().data_ptr() in stored | derived


@BOTH
def test_no_tensor_of_a_checkpoint_changes_before_the_saves_that_still_copy_it_were_waited_for(
    start: Start, optim: tuple[str, ...]
) -> None:
    """The histories of gradient norms did: a checkpoint could hold those of the step after it."""
    loaded, path = start(*optim, "train.precision=fp16")
    with build_trainer(loaded, RunDirectory(path), StartOptions(say=lambda line: None)) as trainer:
        state = trainer.saver.restore()
        phase = trainer.phase(state)
        changed = 0
        for _ in range(3):
            before = {entry.name: entry.tensor.clone() for entry in collect(trainer.saver.stateful).entries}
            different: list[set[str]] = []

            def look(before: dict[str, torch.Tensor] = before, found: list[set[str]] = different) -> None:
                now = collect(trainer.saver.stateful).entries
                found.append({e.name for e in now if not torch.equal(e.tensor, before[e.name])})

            span = trainer.order.next_span(state.position, phase.global_batch, trainer.outer.share)
            batch = trainer.batches.batch(span, phase.micro_batch)
            train_step(replace(trainer.step_parts(phase), wait_staged=look), batch, state)
            assert different == [set()]
            look()
            changed += len(different[-1])
            state = state.after(span)
        assert changed > 5


def tensors_of(holder: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Every tensor reachable from an object through attributes and containers."""
    seen = set() if seen is None else seen
    if id(holder) in seen:
        return
    seen.add(id(holder))
    if isinstance(holder, torch.Tensor):
        yield holder
    elif isinstance(holder, dict):
        for value in (*holder.keys(), *holder.values()):
            yield from tensors_of(value, seen)
    elif isinstance(holder, list | tuple | set):
        for value in holder:
            yield from tensors_of(value, seen)
    elif hasattr(holder, "__dict__") and type(holder).__module__.startswith(
        ("bloomery", "torch.nn", "torch.optim")
    ):
        yield from tensors_of(vars(holder), seen)


def test_logical_names_do_not_depend_on_what_a_module_fuses(start: Start) -> None:
    loaded, path = start()
    with build_trainer(loaded, RunDirectory(path), StartOptions(say=lambda line: None)) as trainer:
        names = {entry.name for entry in collect(trainer.saver.stateful).entries}
    assert "model.blocks.0.attention.query.weight" in names
    assert "optim.blocks.1.mlp.gate.weight.momentum" in names
    assert not any("qkv" in name or "expand" in name for name in names)
