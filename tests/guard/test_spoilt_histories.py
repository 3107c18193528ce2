"""Histories of guards that another peer's checkpoint holds: with whatever is in them the training goes on."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tests.guard.reports import guards_of, report

from bloomery.guard.judge import LADDER, Guards
from bloomery.guard.verdict import Rewind, Rung, Stop

EVERY = dict(corruption_steps=5, growth_steps=5, trial_steps=10)
NAMES = [guard.name for guard in guards_of(**EVERY).guards]


def reports(first: int, count: int) -> list[Any]:
    return [
        report(
            step,
            2.0 + step % 3 / 100,
            held_out_loss=2.0,
            memory_bytes=1e9,
            shared_seconds=1.0,
            loss_scale=64.0,
        )
        for step in range(first, first + count)
    ]


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    """What a checkpoint keeps of guards that have judged for a while."""
    guards = guards_of(**EVERY)
    for each in reports(1, 250):
        guards.judge(each)
    kept: dict[str, Any] = json.loads(json.dumps(guards.state_values()))
    return kept


def spoilt(value: Any, chance: random.Random) -> Any:
    """Put something else in the place of one part of a history."""
    if not isinstance(value, dict | list) or not value or chance.random() < 0.2:
        return chance.choice(["x", None, [], {}, -1, ["x"] * 96, {"x": 1}])
    key = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
    changed = value.copy()
    changed[key] = spoilt(value[key], chance)
    return changed


@pytest.mark.parametrize("name", NAMES)
def test_a_history_that_is_spoilt_ends_no_training(name: str, values: dict[str, Any]) -> None:
    chance, guards = random.Random(name), guards_of(**EVERY)
    guards = Guards([guard for guard in guards.guards if guard.name == name], ladder=guards.ladder)
    for number in range(12):
        guards.load_state_values({name: spoilt(values[name], chance)})
        if number % 2:
            guards.resumed()
        for each in reports(251, 40):
            guards.judge(each)
        guards.rewound({name: spoilt(values[name], chance)}, rung=Rung.SKIP)
        for each in reports(251, 40):
            guards.judge(each)


def test_a_guard_whose_history_is_of_no_use_begins_anew_and_the_others_go_on(
    values: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    level = {**values["throughput"]["level"], "window": ["x"] * 96}
    guards, right = guards_of(**EVERY), guards_of(**EVERY)
    guards.load_state_values({**values, "throughput": {**values["throughput"], "level": level}})
    right.load_state_values({**values, "throughput": None})
    for each in reports(251, 60):
        assert guards.judge(each) == right.judge(each)
    assert caplog.messages == ["throughput begins anew: it cannot judge by its history"]
    others = NAMES[:]
    others.remove("throughput")
    assert all(guards.state_values()[name] == right.state_values()[name] for name in (*others, LADDER))


def test_a_ladder_that_holds_no_steps_begins_anew(values: dict[str, Any]) -> None:
    guards = guards_of(**EVERY)
    guards.load_state_values({**values, LADDER: {**values[LADDER], "steps": [["x", 0, 2.0, True]]}})
    guards.judge(reports(251, 1)[0])
    assert [step for step, *_ in guards.state_values()[LADDER]["steps"]] == [251]  # type: ignore[call-overload, index]


def test_a_ladder_that_is_spoilt_ends_no_training(values: dict[str, Any]) -> None:
    chance, guards = random.Random(5), guards_of(**EVERY)
    guards = Guards([guard for guard in guards.guards if guard.name == "not_finite"], ladder=guards.ladder)
    guards.load_state_values({LADDER: values[LADDER]})
    guards.rewound({LADDER: values[LADDER]}, rung=Rung.REPEAT)
    guards.judge(reports(251, 1)[0])
    on_trial = json.loads(json.dumps(guards.state_values()[LADDER]))
    assert on_trial["trial"] is not None
    for number in range(400):
        guards.load_state_values({LADDER: spoilt(on_trial, chance)})
        for each in reports(252, number % 12):
            guards.judge(each)
        found = [guards.judge(report(300 + step, float("nan"))) for step in range(30)]
        assert any(isinstance(verdict, Rewind | Stop) for verdict in found)
        guards.rewound({LADDER: spoilt(on_trial, chance)}, rung=Rung.SKIP)
