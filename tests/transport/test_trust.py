"""Which addresses are this machine's, what a proof covers, and how a flood of refusals is logged."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bloomery.transport import trust
from bloomery.transport.trust import RefusalLog, derive_key, is_loopback, is_proof, proof


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("fe80::1%lo", False),
        ("::ffff:10.0.0.1", False),
        ("10.0.0.1", False),
        ("0.0.0.0", False),
        ("::", False),
        ("localhost.example.org", False),
        ("", False),
    ],
)
def test_loopback_addresses_are_told_from_those_that_lead_elsewhere(host: str, is_own: bool) -> None:
    assert is_loopback(host) is is_own


def test_of_a_flood_of_refusals_the_first_are_logged_and_then_how_many_more_there_were(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    monkeypatch.setattr(trust, "time", SimpleNamespace(monotonic=lambda: now))
    refusals = RefusalLog()
    for number in range(25):
        refusals.write(f"h:{number}", "it is late")
    assert caplog.messages == [f"refused a connection from h:{number}: it is late" for number in range(10)]
    for more in ("15 more connections were refused", None):
        caplog.clear()
        now += 10.1
        refusals.write("h", "it is late")
        line = "refused a connection from h: it is late"
        assert caplog.messages == ([line] if more is None else [more, line])
    assert refusals.count == 27


def test_a_proof_is_of_its_key_its_words_and_the_borders_between_them() -> None:
    code = proof(b"key", b"ab", b"c")
    assert is_proof(code, b"key", b"ab", b"c")
    for key, *words in (
        (b"other", b"ab", b"c"),
        (b"key", b"a", b"bc"),
        (b"key", b"abc"),
        (b"key", b"c", b"ab"),
        (b"key", b"ab", b"c", b""),
    ):
        assert not is_proof(code, key, *words)
    assert not is_proof(code[:-1], b"key", b"ab", b"c")


def test_a_key_depends_on_the_secret_the_salt_and_the_purpose() -> None:
    keys = {
        derive_key(secret, salt=salt, purpose=purpose)
        for secret in (b"s", b"t")
        for salt in (b"", b"x")
        for purpose in ("ring", "proof")
    }
    assert len(keys) == 8 and {len(key) for key in keys} == {32}
