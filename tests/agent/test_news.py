"""How rarely an agent looks at a run that changes all the time."""

from __future__ import annotations

import pytest

from bloomery.agent.news import pause_s


@pytest.mark.parametrize("look_s", [0.0, 1e-4, 2e-3, 0.5])
@pytest.mark.parametrize("members", [1, 4, 64, 500, 5000])
def test_looks_take_a_fourth_of_a_core_at_most_and_hold_up_no_round(look_s: float, members: int) -> None:
    pause = pause_s(look_s, members=members)
    assert look_s <= 0.25 * (look_s + pause) + 1e-12
    assert pause <= max(3 * look_s, 0.02)
    assert pause <= max(3 * look_s, 1e-3) or members > 4, "few members do not wait for each other"


def test_the_changes_of_many_members_share_a_look() -> None:
    look_s = 1e-4  # at 64 members
    changes_a_second = 64 / 0.05
    assert changes_a_second * (look_s + pause_s(look_s, members=64)) > 10
