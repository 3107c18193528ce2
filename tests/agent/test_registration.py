"""Which differences between a peer's settings and the run's keep it out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.agent.registration import Admission, OtherRun, fingerprint
from bloomery.data.position import RULE_KEY
from bloomery.protocol.encoding import encode_settings


def judged(
    theirs: dict[str, str], mine: dict[str, str], *, commits: dict[int, str]
) -> tuple[bool, list[OtherRun]]:
    """Whether a member with the settings `theirs` is taken for another run's in the end, and the refusals."""
    refused: list[Any] = []
    published = SimpleNamespace(value=encode_settings(theirs))
    context: Any = SimpleNamespace(
        me="new",
        settings=SimpleNamespace(settings={}, incarnation="new1"),
        keys=SimpleNamespace(settings=lambda name: f"settings/{name}"),
        etcd=SimpleNamespace(put=lambda key, text: None, get=lambda key: published),
        writer=SimpleNamespace(write=lambda what, work: work()),
    )
    admission = Admission(context, refuse=refused.append)
    admission.publish(mine)
    listed = SimpleNamespace(life=1, member=SimpleNamespace(recipe=fingerprint(theirs), incarnation="old1"))
    snapshot: Any = SimpleNamespace(members={"old": listed}, commits=commits)
    admission.is_other(snapshot)
    return admission.is_other(snapshot), refused


@pytest.mark.parametrize("commits", [{}, {3: "a commit"}])
def test_a_peer_of_other_settings_is_refused_at_any_time(commits: dict[int, str]) -> None:
    is_other, refused = judged({"run.seed": "1"}, {"run.seed": "2"}, commits=commits)
    assert is_other and "run.seed is 1 there and 2 here" in str(refused[0])


def test_another_rule_of_the_mixture_is_refused_until_a_state_says_which_one_the_run_follows() -> None:
    theirs, mine = {"run.seed": "1"}, {"run.seed": "1", RULE_KEY: "3"}
    is_other, refused = judged(theirs, mine, commits={})
    assert is_other and f"{RULE_KEY} is unknown there and 3 here" in str(refused[0])
    assert judged(theirs, mine, commits={3: "a commit"}) == (False, [])
    assert judged(mine, mine, commits={}) == (False, [])
