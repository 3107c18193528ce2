"""Records of settings that cannot be read: who is asked instead, and what the refusal says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tests.agent.test_registration_jobs import KEYS, MINE, THEIRS, Admitted, of

from bloomery.coordination.snapshot import RunSnapshot
from bloomery.data.position import RULE_KEY

GARBAGE = ["", "{", "[]", '{"k": 2}', '{"k": "\\u0007"}', "9" * 4000, "[" * 100_000]


class Damaged(Admitted):
    """Peer 'a', and a coordinator whose record of the settings of 'b' is `garbage`."""

    def __init__(self, garbage: str, **published: dict[str, str]) -> None:
        self.garbage = garbage
        super().__init__(**published)

    def _get(self, key: str):
        if key == KEYS.settings("b"):
            self.asked.append(key)
            return SimpleNamespace(value=self.garbage)
        return super()._get(key)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_record_that_cannot_be_read_is_named_in_the_refusal(garbage: str) -> None:
    admitted = Damaged(garbage)
    assert admitted.is_other(b=of("b", THEIRS, life=1))
    admitted.writer.run()
    (refusal,) = admitted.refused
    assert refusal.message.startswith("'b', who was there before, trains another run by the fingerprint")
    assert KEYS.settings("b") in refusal.message and "is no table of settings" in refusal.message
    assert "start it again" in refusal.remedy and "--revoke b" in refusal.remedy


def test_another_member_with_the_same_fingerprint_tells_what_an_unreadable_record_does_not(caplog) -> None:
    admitted = Damaged("{", c=THEIRS)
    assert admitted.is_other(c=of("c", THEIRS, life=2), b=of("b", THEIRS, life=1))
    admitted.writer.run()
    assert admitted.asked == [KEYS.settings("b"), KEYS.settings("c")]
    (refusal,) = admitted.refused
    assert refusal.message == "'c', who was there before, trains another run: k is 2 there and 1 here"
    assert f"the key {KEYS.settings('b')} is ignored" in caplog.text


def test_an_unreadable_record_keeps_nobody_out_whose_settings_another_member_shares() -> None:
    ruled = {**MINE, RULE_KEY: "older"}
    admitted = Damaged("{", c=ruled)
    members = {name: of(name, ruled, life=life) for life, name in enumerate("bc", start=1)}
    snapshot = RunSnapshot(commits={0: None}, members=members)  # type: ignore[dict-item]
    assert admitted.admission.is_other(snapshot)
    admitted.writer.run()
    assert admitted.refused == [] and not admitted.admission.is_other(snapshot)


def test_at_most_eight_members_are_asked() -> None:
    admitted = Damaged("{")
    assert admitted.is_other(
        **{f"m{number:02d}": of(f"m{number:02d}", THEIRS, life=number) for number in range(1, 40)}
    )
    admitted.writer.run()
    assert admitted.asked == [KEYS.settings(f"m{number:02d}") for number in range(1, 9)]
    assert admitted.refused == []  # all of these have left: the next look asks again
