"""What the loop asks of a run in each step, in which order, and how a control is made where it runs."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bloomery.data.position import Position
from bloomery.events.run_directory import RunDirectory
from bloomery.guard.verdict import CarryOn, Save
from bloomery.parallel.mesh import Mesh
from bloomery.train import control as control_module
from bloomery.train import loop
from bloomery.train.control import SIGNALS, Control, LocalFacts
from bloomery.train.metrics import memory_in_use
from bloomery.train.state import Goal, TrainState


def test_each_step_is_recorded_before_what_follows_from_it_and_then_the_next_one_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    begun = TrainState(goal=Goal(steps=2))

    def noted(name: str, answer: Any = None) -> Any:
        def call(*told: Any) -> Any:
            calls.append((name, *(one.step if isinstance(one, TrainState) else one for one in told)))
            return answer(*told) if callable(answer) else answer

        return call

    verdicts = iter([CarryOn(judged_step=1), Save(judged_step=2, reason="due")])
    trainer = SimpleNamespace(
        saver=SimpleNamespace(restore=noted("restored", begun), save=noted("saved")),
        outer=SimpleNamespace(
            admit=noted("admitted", lambda state: state),
            average=noted("averaged", lambda state, verdict: (state, verdict)),
            share="share",
        ),
        phase=noted("phase", SimpleNamespace(global_batch=4, micro_batch=2)),
        order=SimpleNamespace(
            next_span=noted("span", lambda position, count, share: tuple(position.next_samples(count)))
        ),
        step_parts=noted("parts", "parts"),
        batches=SimpleNamespace(batch=noted("batch", "batch")),
        prefetch=noted("prefetched"),
        metrics=SimpleNamespace(
            report=noted("reported", lambda state, result, local: (state, SimpleNamespace(facts="facts")))
        ),
        control=SimpleNamespace(local_facts=lambda: "local"),
        guards="guards",
        record=lambda report, verdict: calls.append(("recorded", verdict.judged_step)),
        apply_requests=noted("requests", lambda state, facts: state),
        conclude=noted("concluded", "outcome"),
    )

    @contextmanager
    def build_trainer(*told: Any) -> Any:
        calls.append(("built", *told))
        yield trainer
        calls.append(("closed",))

    monkeypatch.setattr(loop, "build_trainer", build_trainer)
    monkeypatch.setattr(loop, "train_step", noted("stepped", "result"))
    monkeypatch.setattr(loop, "judge", lambda guards, report: next(verdicts))
    assert loop.train("loaded", "rundir", "options") == "outcome"  # type: ignore[arg-type,comparison-overlap]
    assert calls[:3] == [("built", "loaded", "rundir", "options"), ("restored",), ("admitted", 0)]
    phase = trainer.phase(begun)
    calls.pop()
    samples = [(range(4),), (range(4, 8),)]
    positions = [Position(), Position(consumed=4)]
    steps = []
    for number in (1, 2):
        verdict: Any = CarryOn(judged_step=1) if number == 1 else Save(judged_step=2, reason="due")
        steps += [
            ("phase", number - 1),
            ("span", positions[number - 1], 4, "share"),
            ("parts", phase),
            ("batch", samples[number - 1], 2),
            ("stepped", "parts", "batch", number - 1),
            ("prefetched", number),
            ("reported", number, "result", "local"),
            ("recorded", number),
            ("requests", number, "facts"),
            ("averaged", number, verdict),
            *([("saved", number)] if number == 2 else []),
            ("admitted", number),
        ]
    assert calls[3:] == [*steps, ("concluded", 2), ("closed",)]


def test_a_run_that_is_done_already_makes_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    done = TrainState(goal=Goal(steps=2), step=2)

    @contextmanager
    def build_trainer(*told: Any) -> Any:
        yield SimpleNamespace(
            saver=SimpleNamespace(restore=lambda: replace(done, step=0)),
            outer=SimpleNamespace(admit=lambda state: done),
            conclude=lambda state: state,
        )

    monkeypatch.setattr(loop, "build_trainer", build_trainer)
    assert loop.train(None, None, None) is done  # type: ignore[arg-type,comparison-overlap]


def test_facts_of_a_rank_are_sent_in_the_order_in_which_they_are_read() -> None:
    names = ("save", "stop", "interrupted", "terminated", "request", "minutes", "minutes_since_save")
    facts = LocalFacts(**{name: float(number) for number, name in enumerate(names)})
    assert facts.numbers() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_a_training_in_another_thread_hears_no_signals_and_leaves_their_handlers(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    rundir, seen = RunDirectory(tmp_path).create(), list[Any]()

    def other() -> None:
        control = Control(rundir, Mesh(device=torch.device("cpu")), ends_process=True)
        seen.append([signal.getsignal(number) for number in SIGNALS])
        control.close()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(20.0)
    assert seen == [before] == [[signal.getsignal(number) for number in SIGNALS]]


def test_the_signal_that_asks_for_a_save_is_let_through_once_somebody_hears_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    real = signal.signal
    stand_in = SimpleNamespace(**{name: getattr(signal, name) for name in dir(signal) if name.isupper()})
    stand_in.Signals = signal.Signals
    stand_in.signal = lambda number, handler: calls.append(number) or real(number, handler)
    stand_in.pthread_sigmask = lambda how, signals: calls.append((how, signals))
    monkeypatch.setattr(control_module, "signal", stand_in)
    Control(RunDirectory(tmp_path).create(), Mesh(device=torch.device("cpu"))).close()
    assert calls[: len(SIGNALS)] == list(SIGNALS)
    assert calls[len(SIGNALS)] == (signal.SIG_UNBLOCK, {signal.SIGUSR1})


def test_the_memory_of_a_gpu_is_what_torch_has_allocated_there(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: {gpu: 5 << 30}[device])
    assert memory_in_use(gpu) == float(5 << 30)
