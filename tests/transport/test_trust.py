"""Which addresses are this machine's, what a proof covers, and how a flood of refusals is logged."""

from __future__ import annotations

import hashlib
import hmac
import ssl
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.diloco.elastic_peers import Authority
from tests.diloco.recorder import Recorder

from bloomery.errors import PeerError
from bloomery.transport import trust
from bloomery.transport.connection import ConnectionPlace
from bloomery.transport.relay import circuit_of
from bloomery.transport.trust import (
    PeerRefused,
    RefusalLog,
    Trust,
    check_names,
    derive_key,
    is_loopback,
    is_proof,
    proof,
    trust_certificates,
)


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


def test_with_certificates_both_ends_must_show_one_in_tls_1_3_and_nothing_follows_the_handshake(
    tmp_path,
) -> None:
    trusted = Authority(tmp_path / "authority", "run r").trust("a")
    for context in (trusted.to_listen, trusted.to_dial):
        assert context is not None
        assert context.verify_mode is ssl.CERT_REQUIRED and not context.check_hostname
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.verify_flags & ssl.VERIFY_X509_STRICT
    assert trusted.to_listen.num_tickets == 0


@pytest.mark.parametrize("wrong", ["authority", "certificate", "key"])
@pytest.mark.parametrize("content", [None, b"no certificate"])
def test_certificates_that_are_missing_or_damaged_are_told_by_their_directory(
    tmp_path: Path, wrong: str, content: bytes | None
) -> None:
    made = Authority(tmp_path / "made", "run r")
    made.trust("a")
    files = {"authority": made.file, "certificate": made.directory / "a.pem", "key": made.directory / "a.key"}
    files[wrong] = tmp_path / "other" / "file.pem"
    if content is not None:
        files[wrong].parent.mkdir()
        files[wrong].write_bytes(content)
    with pytest.raises(PeerError, match=f"in {files['certificate'].parent} cannot be used") as refused:
        trust_certificates(**files)
    assert "--init-certs" in refused.value.remedy


def test_another_machine_is_dialled_and_let_in_with_certificates_alone() -> None:
    certified = Trust(to_listen=ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    certified.check_address("192.0.2.1")
    certified.check_dialled("192.0.2.1")
    for check in (Trust().check_address, Trust().check_dialled):
        check("127.0.0.1")
        with pytest.raises(PeerRefused, match="no certificates"):
            check("192.0.2.1")


def test_both_ends_of_a_connection_through_a_relay_call_it_by_one_name_and_no_other_connection_so() -> None:
    a, b = ("a", "a1"), ("b", "b1")
    name = circuit_of("r", a, ConnectionPlace(*b, 2, 3, True), 7)
    assert name == circuit_of("r", b, ConnectionPlace(*a, 2, 3, False), 7)
    others = {
        circuit_of(run, me, ConnectionPlace(*other, rank, stream, sends), epoch)
        for run, me, other, rank, stream, sends, epoch in (
            ("s", a, b, 2, 3, True, 7),
            ("r", a, b, 3, 3, True, 7),
            ("r", a, b, 2, 2, True, 7),
            ("r", a, b, 2, 3, False, 7),
            ("r", a, b, 2, 3, True, 8),
            ("r", a, ("b", "b2"), 2, 3, True, 7),
            ("r", ("a", "a2"), b, 2, 3, True, 7),
        )
    }
    assert len(others) == 7 and name not in others


def test_a_certificate_names_its_peer_by_name_or_address_of_a_resource() -> None:
    names = (("DNS", "b"), ("URI", "urn:b"), ("IP Address", "192.0.2.1"))
    connection: Any = SimpleNamespace(getpeercert=lambda: {"subjectAltName": names})
    for name in ("b", "urn:b"):
        check_names(connection, name)
    for other in ("a", "192.0.2.1"):
        with pytest.raises(PeerRefused, match=f"'{other}' shows a certificate of b, urn:b"):
            check_names(connection, other)
    connection.getpeercert = lambda: None
    with pytest.raises(PeerRefused, match="'a' shows a certificate of no peer"):
        check_names(connection, "a")


def test_a_renewed_certificate_is_shown_by_who_listens_and_by_who_dials(tmp_path: Path) -> None:
    calls: list[Any] = []
    listening, dialling = (Recorder(name, calls) for name in ("listen", "dial"))
    files = (tmp_path / "certificate", tmp_path / "key")
    Trust(to_listen=listening, to_dial=dialling).load_certificate(*files)  # type: ignore[arg-type]
    assert calls == [("listen", "load_cert_chain", *files), ("dial", "load_cert_chain", *files)]
    Trust(token=b"x").load_certificate(*files)


def test_keys_are_those_of_hkdf_and_codes_those_of_hmac_with_lengths_before_the_words() -> None:
    """The third vector of RFC 5869, appendix A, and HMAC-SHA-256 as the standard library has it."""
    key = bytes.fromhex("8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d")
    assert derive_key(b"\x0b" * 22, salt=b"", purpose="") == key
    words = b"\0\0\0\2ab\0\0\0\1c"
    assert proof(b"key", b"ab", b"c") == hmac.digest(b"key", words, "sha256")


def test_a_circuit_has_the_name_that_other_versions_compute() -> None:
    words = "('r', 'a', 'a1', 'b', 'b1', 2, 3, 7)"
    expected = hashlib.sha256(words.encode()).hexdigest()
    assert circuit_of("r", ("a", "a1"), ConnectionPlace("b", "b1", 2, 3, True), 7) == expected
