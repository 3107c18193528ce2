"""What the trainer hands to a step, and how a run waits for its backup when it ends."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
from tests.train.test_trainer import STATE, Noted, named, report, trainer_of

from bloomery.checkpoint.format.deadlines import BACKUP_AFTER_ERROR_S
from bloomery.events.heartbeat import RankActivity
from bloomery.guard.trend import THROUGHPUT
from bloomery.guard.verdict import Watch
from bloomery.plan.schedule import Phase
from bloomery.train import trainer as trainer_module
from bloomery.train.trainer import Trainer, _finish, backed_up_at_the_end

Calls = list[tuple[Any, ...]]
FP16 = Phase(global_batch=8, micro_batch=2, precision="fp16", recompute="full")
BF16 = Phase(global_batch=16, micro_batch=4, precision="bf16", recompute="none")


@pytest.fixture
def calls() -> Calls:
    return []


def trainer_with_phases(calls: Calls) -> Trainer:
    """A trainer whose parts note what is asked of them."""
    recipe = SimpleNamespace(
        guard=SimpleNamespace(growth_steps=5), data=SimpleNamespace(sequence_length=32), checkpoint=None
    )
    settings = SimpleNamespace(
        recipe=recipe,
        clip="clip",
        clamps="clamps",
        learning_rate="rate",
        guards="guards",
        phase=lambda state: (FP16, state),
        apply_requests=lambda *told, **more: ("asked", *told, more),
    )
    learner = SimpleNamespace(model=Noted(calls, "model."), optimizers="optimizers", loss_scale="scale")
    trainer = trainer_of(
        calls,
        settings=settings,
        learner=learner,
        outer=SimpleNamespace(average_gradients="average", share="share", skipping="skipping"),
        store=SimpleNamespace(incarnation=5, wait_staged="staged"),
        saver=SimpleNamespace(last_report=None),
        _check="check",
        _steps={},
        _steps_recipe=recipe,
    )
    return trainer


def test_a_step_gets_the_parts_of_its_run_and_what_its_phase_says(calls: Calls) -> None:
    trainer = trainer_with_phases(calls)
    parts = trainer.step_parts(FP16)
    assert (parts.phase, parts.model, parts.optimizers) == (FP16, trainer.learner.model, "optimizers")
    assert (parts.loss_scale, parts.clip, parts.clamps, parts.learning_rate) == (
        "scale",
        "clip",
        "clamps",
        "rate",
    )
    assert (parts.sequence_length, parts.average_gradients, parts.wait_staged, parts.check) == (
        32,
        "average",
        "staged",
        "check",
    )
    assert parts.sizes_every() == 5
    trainer.settings.recipe.guard.growth_steps = 7  # type: ignore[misc]
    assert parts.sizes_every() == 7, "as the recipe says it now"
    parts.enter(RankActivity.COMPUTING)
    assert calls == [
        ("heartbeat.enter", RankActivity.WAITING_FOR_SAMPLES),
        ("model.set_phase", "fp16", "full"),
        ("heartbeat.expect_compilation",),
        ("journal.write", "phase", 5, 0, 8, 2, "fp16", "full"),
        ("heartbeat.enter", RankActivity.COMPUTING),
    ]
    assert trainer.step_parts(BF16).loss_scale is None


def test_a_phase_is_journalled_where_it_begins_and_again_after_a_change_of_settings(calls: Calls) -> None:
    trainer = trainer_with_phases(calls)
    first = trainer.step_parts(FP16)
    trainer.saver.last_report = report(step=9)
    assert trainer.step_parts(FP16) is first
    other = trainer.step_parts(BF16)
    assert trainer.step_parts(FP16) is first and trainer.step_parts(BF16) is other
    assert [call[1:5] for call in named(calls, "journal.write")] == [("phase", 5, 0, 8), ("phase", 5, 9, 16)]
    assert len(named(calls, "heartbeat.expect_compilation")) == 2
    assert [call[1] for call in named(calls, "model.set_phase")][-2:] == ["fp16", "bf16"]
    trainer.settings.recipe = SimpleNamespace(**vars(trainer.settings.recipe))  # type: ignore[assignment]
    again = trainer.step_parts(FP16)
    assert again is not first and trainer.step_parts(FP16) is again
    assert len(named(calls, "journal.write")) == 3


def test_what_is_asked_of_a_trainer_is_passed_to_the_part_that_knows(calls: Calls) -> None:
    trainer = trainer_with_phases(calls)
    trainer._data_stream = SimpleNamespace(  # type: ignore[assignment]
        order="order", batches="batches", prefetch=lambda state, **told: calls.append((state, told))
    )
    assert (trainer.guards, trainer.order, trainer.batches) == ("guards", "order", "batches")
    assert trainer.phase(STATE) == (FP16, STATE)
    assert trainer.apply_requests(STATE, "facts") == ("asked", STATE, "facts", {"skip": "skipping"})  # type: ignore[arg-type]
    trainer.prefetch(STATE)
    ((state, told),) = calls
    assert state is STATE and told == {"phase_of": trainer.phase, "share": "share"}


def test_the_update_of_others_is_made_with_the_parts_of_the_phase(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_with_phases(calls)
    trainer.settings.phase = lambda state: BF16  # type: ignore[method-assign]
    monkeypatch.setattr(trainer_module, "follow_update", lambda parts, state: (parts, state))
    assert trainer.follow(STATE) == (trainer.step_parts(BF16), STATE)


def test_what_saves_a_run_gets_its_parts_and_what_its_start_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "RunSaver", lambda **given: given)
    monkeypatch.setattr(trainer_module, "SlowRanks", lambda mesh: f"slow ranks of {mesh}")
    names = ("mesh", "learner", "data_stream", "store", "control", "journal", "on_begin", "take_fallback")
    own = {name: f"the {name}" for name in names}
    others = {name: name for name in ("metrics", "held_out", "observers", "check")}
    settings, heartbeat = SimpleNamespace(recipe="recipe"), SimpleNamespace(enter="enter")
    made = Trainer(
        **own,  # type: ignore[arg-type]
        **others,
        settings=settings,
        heartbeat=heartbeat,
        make_outer=lambda trainer: ("outer of", trainer),
    )
    outer = ("outer of", made)
    assert made.outer == outer
    assert made.saver == {**own, "settings": settings, "outer": outer, "enter": "enter"}


@pytest.mark.parametrize(("is_first", "slow"), [(True, True), (True, False), (False, True)])
def test_slow_ranks_are_named_by_the_first_rank_where_there_are_any(
    is_first: bool, slow: bool, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of(calls)
    found = {"slow": [[3, "node3", 2.5], [0, "node0", 2.0]] if slow else [], "usual_s": 1.25, "ranks": 4}
    trainer._slow_ranks = Noted(calls, "slow.", compare=found)  # type: ignore[assignment]
    trainer.mesh.is_first = is_first  # type: ignore[misc]
    watch = Watch(judged_step=7, kind="x", reason="slower")
    trainer.settings.guards.findings = ((THROUGHPUT, watch), ("spike", watch))  # type: ignore[misc]
    trainer.record(report(), watch)
    assert len(named(calls, "slow.compare")) == 1
    warned = [(one.levelno, one.getMessage()) for one in caplog.records]
    expected = (
        "steps are slower: each takes rank 3 on node3 2.5 s, rank 0 on node0 2.0 s; other ranks take 1.25 s"
    )
    assert warned == ([(logging.WARNING, expected)] if is_first and slow else [])


class Alone:
    """A mesh of one rank, which notes what its first rank does."""

    def __init__(self) -> None:
        self.doing: list[str] = []
        self.ticks = 0

    def run_on_rank_zero(self, task: Any, *, doing: str) -> None:
        self.doing.append(doing)

        def tick() -> None:
            self.ticks += 1

        task(tick)


def backed_up(backup: Any, mesh: Any, progress: list[str]) -> AbstractContextManager[None]:
    return backed_up_at_the_end(
        backup,
        mesh,
        interruptions=lambda: 0,
        say=lambda line: None,
        on_progress=lambda: progress.append("progress"),
    )


def test_a_run_that_ends_well_waits_for_its_backup_and_shows_that_it_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    def finish(backup: Any, tick: Any, **told: Any) -> None:
        tick()
        seen.append((backup, set(told)))

    monkeypatch.setattr(trainer_module, "_finish", finish)
    mesh, progress = Alone(), list[str]()
    with backed_up("backup", mesh, progress):
        assert not mesh.doing
    assert mesh.doing == ["backing up the last checkpoints"]
    assert seen == [("backup", {"interruptions", "say"})] and (mesh.ticks, progress) == (1, ["progress"])


def test_after_an_error_nobody_waits_for_the_backup_for_more_than_a_moment() -> None:
    closes: list[float] = []
    backup = SimpleNamespace(close=lambda *, wait_s: closes.append(wait_s))
    for error in (ValueError, KeyboardInterrupt):
        for part in (backup, None):
            mesh = Alone()
            with pytest.raises(error), backed_up(part, mesh, []):
                raise error
            assert not mesh.doing
    assert closes == [BACKUP_AFTER_ERROR_S] * 2


def test_what_is_left_to_copy_is_told_at_once_and_then_every_half_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, said, ticks = [100.0], list[str](), list[float]()

    class Slow:
        """A backup that copies two checkpoints in 100 s; then its thread is over."""

        def close(self) -> None:
            """Begin to copy."""

        def due(self) -> list[Any]:
            return [SimpleNamespace(name=name) for name in ("step-7", "step-9")][now[0] > 140.0 :]

    class Thread:
        def __init__(self, *, target: Any, name: str, daemon: bool) -> None:
            assert daemon

        def start(self) -> None:
            """Begin at the time that the clock has."""

        def join(self, timeout: float) -> None:
            now[0] += 10.0

        def is_alive(self) -> bool:
            return now[0] < 200.0

    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(trainer_module, "threading", SimpleNamespace(Thread=Thread))
    _finish(Slow(), lambda: ticks.append(now[0]), interruptions=lambda: 1, say=said.append)  # type: ignore[arg-type]
    end = "Ctrl-C leaves it to the next start"
    assert said == [
        f"backing up step-7 and 1 more before the end, 10 s so far; {end}",
        f"backing up step-9 before the end, 50 s so far; {end}",
        f"backing up step-9 before the end, 90 s so far; {end}",
    ]
    assert ticks == [110.0 + 10.0 * each for each in range(10)]
