"""What certificates and accounts say, and which of them are refused."""

from __future__ import annotations

import datetime
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bloomery.coordination import accounts, certificates, credentials
from bloomery.coordination.certificates import init_certificates, server_certificates
from bloomery.coordination.credentials import (
    CertificateDates,
    CoordinatorAccount,
    _parsed,
    read_account,
    read_certificate,
)
from bloomery.errors import CoordinatorError
from bloomery.protocol.keys import Keys

x509 = pytest.importorskip("cryptography.x509")
KEYS = Keys("one")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The certificates of two runs, of which the first has two peers; one of them was renewed."""
    directory = tmp_path_factory.mktemp("made")
    init_certificates(directory, run="one", peers=["a", "b"], hosts=("10.0.0.9", "c.example"), days=20)
    init_certificates(directory, run="one", peers=["a"], days=40, renews=True)
    init_certificates(directory, run="two", peers=["a"])
    return directory


def loaded(path: Path) -> Any:
    return x509.load_pem_x509_certificate(path.read_bytes())


def extension(certificate: Any, kind: Any) -> Any:
    return certificate.extensions.get_extension_for_class(kind)


def test_a_peers_certificate_names_it_and_its_run_and_is_signed_by_the_runs_authority(made: Path) -> None:
    mine, authority = loaded(made / "one/a/certificate.pem"), loaded(made / "one/authority.pem")
    assert list(mine.subject) == [] and mine.issuer == authority.subject
    mine.verify_directly_issued_by(authority)
    names = extension(mine, x509.SubjectAlternativeName)
    assert names.critical and [name.value for name in names.value] == ["a", "bloomery:one/a"]
    lasts = mine.not_valid_after_utc - mine.not_valid_before_utc
    assert lasts == datetime.timedelta(days=40, hours=1)
    basic = extension(mine, x509.BasicConstraints)
    assert basic.critical and not basic.value.ca
    usage = extension(mine, x509.KeyUsage)
    assert usage.critical and usage.value.digital_signature and not usage.value.key_cert_sign
    uses = extension(mine, x509.ExtendedKeyUsage).value
    oids = x509.oid.ExtendedKeyUsageOID
    assert set(uses) == {oids.SERVER_AUTH, oids.CLIENT_AUTH}
    assert (
        extension(mine, x509.AuthorityKeyIdentifier).value.key_identifier
        == extension(authority, x509.SubjectKeyIdentifier).value.digest
    )
    (name,) = authority.subject
    assert name.value == "bloomery run one" and authority.issuer == authority.subject
    signs = extension(authority, x509.BasicConstraints)
    assert signs.critical and signs.value.ca and signs.value.path_length == 0
    usage = extension(authority, x509.KeyUsage).value
    assert (usage.digital_signature, usage.key_cert_sign, usage.crl_sign) == (False, True, True)
    assert authority.not_valid_after_utc - authority.not_valid_before_utc == datetime.timedelta(
        days=3650, hours=1
    )


def test_the_coordinators_certificate_names_its_hosts_and_this_machine(made: Path) -> None:
    server, authority = loaded(made / "coordinator/server.pem"), loaded(made / "coordinator/authority.pem")
    server.verify_directly_issued_by(authority)
    names = [str(name.value) for name in extension(server, x509.SubjectAlternativeName).value]
    assert names == ["10.0.0.9", "c.example", "127.0.0.1", "::1", "localhost"]
    clients = x509.load_pem_x509_certificates((made / "coordinator/clients.pem").read_bytes())
    authorities = [loaded(made / name / "authority.pem") for name in ("coordinator", "one", "two")]
    assert clients == authorities and len({one.serial_number for one in authorities}) == 3
    lasts = server.not_valid_after_utc - server.not_valid_before_utc
    assert lasts == datetime.timedelta(days=3650, hours=1), "the days that were asked for are the peers'"
    assert (made / "one/a/coordinator.pem").read_bytes() == (made / "coordinator/authority.pem").read_bytes()
    assert (made / "one/a/authority.pem").read_bytes() == (made / "one/authority.pem").read_bytes()
    assert len((made / "coordinator/root.password").read_text()) == 43


def test_a_host_that_the_coordinators_certificate_lacks_is_added_and_no_other_one_is_lost(
    tmp_path: Path,
) -> None:
    server = tmp_path / "coordinator/server.pem"

    def hosts(*given: str) -> tuple[bool, list[str]]:
        done = init_certificates(tmp_path, run="one", peers=["a"], hosts=given)
        return done.is_server_renewed, [
            str(name.value) for name in extension(loaded(server), x509.SubjectAlternativeName).value
        ]

    here = ["127.0.0.1", "::1", "localhost"]
    assert hosts("10.0.0.9") == (False, ["10.0.0.9", *here])
    first = server.read_bytes()
    assert hosts() == hosts("10.0.0.9") == (False, ["10.0.0.9", *here]) and server.read_bytes() == first
    assert hosts("c.example") == (True, ["10.0.0.9", *here, "c.example"])
    loaded(server).verify_directly_issued_by(loaded(tmp_path / "coordinator/authority.pem"))
    accounts.root_access(tmp_path)  # certificate and key belong together
    server.write_bytes(b"damaged")
    with pytest.raises(CoordinatorError, match=r"server\.pem holds no certificate, or a damaged one") as told:
        hosts()
    assert "Move it away" in told.value.remedy


def test_an_account_is_of_its_run_and_peer_and_a_renewed_peer_keeps_it_and_its_earlier_certificate(
    made: Path,
) -> None:
    account = read_account(made / "one/a")
    assert (account.run, account.peer, account.user, len(account.password)) == ("one", "a", "one/a", 43)
    assert "password" not in repr(account)
    (earlier,) = (made / "one/a/earlier").iterdir()
    assert (
        earlier.stem
        == read_certificate(earlier).serial
        != read_certificate(made / "one/a/certificate.pem").serial
    )
    assert not (made / "one/b/earlier").exists()
    found = [(one.run, one.peer) for one in accounts.accounts_in(made)]
    assert found == [("one", "a"), ("one", "b"), ("two", "a")]


def test_what_cannot_be_made_or_is_not_whole_is_told_with_a_remedy(
    made: Path, tmp_path: Path, monkeypatch
) -> None:
    with pytest.raises(CoordinatorError, match="a run cannot be named 'coordinator'"):
        init_certificates(tmp_path, run="coordinator", peers=["a"])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(CoordinatorError, match="cannot be made"):
        init_certificates(tmp_path / "file", run="one", peers=["a"])
    with pytest.raises(CoordinatorError, match=r"has no server\.pem"):
        server_certificates(tmp_path)
    with pytest.raises(CoordinatorError, match=r"has no server\.pem"):
        accounts.root_access(tmp_path)
    root = accounts.root_access(made)
    assert root.user == "root" and root.password == (made / "coordinator/root.password").read_text().strip()
    monkeypatch.setattr(certificates.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CoordinatorError, match="made with `cryptography`"):
        init_certificates(tmp_path, run="one", peers=["a"])


GOOD = {"run": "one", "peer": "a", "user": "u", "password": "p"}


@pytest.mark.parametrize(
    ("stored", "why"),
    [
        (GOOD, None),
        (GOOD | {"run": "../x"}, "its account names no run and peer"),
        (GOOD | {"peer": 3}, "its account names no run and peer"),
        (GOOD | {"user": 3}, "its account has no user and password"),
        (GOOD | {"password": None}, "its account has no user and password"),
        (GOOD | {"more": 1}, "more"),
        ({"run": "one"}, "peer"),
        ([], "mapping"),
        ("{", "Expecting"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_an_account_is_read_whole_or_refused_with_the_reason(
    tmp_path: Path, stored: Any, why: str | None
) -> None:
    text = stored if isinstance(stored, str) else json.dumps(stored)
    (tmp_path / "account.json").write_text(text)
    if why is None:
        account = read_account(tmp_path)
        assert account == CoordinatorAccount(**stored) and json.loads(account.text()) == stored
        return
    with pytest.raises(CoordinatorError) as told:
        read_account(tmp_path)
    assert told.value.message.startswith(f"the certificates in {tmp_path} cannot be used: ")
    assert why in told.value.message


def field(tag: int, content: bytes) -> bytes:
    """A DER field, with the long form of its length where it has 128 bytes or more."""
    if len(content) < 128:
        return bytes([tag, len(content)]) + content
    return bytes([tag, 0x82]) + len(content).to_bytes(2, "big") + content


def certificate(
    *, serial: bytes, end: bytes, tag: int = 0x17, version: bool = True, padding: int = 0
) -> bytes:
    validity = field(0x17, b"200101000000Z") + field(tag, end)
    fields = (field(0xA0, b"\x02\x01\x02") if version else b"") + field(0x02, serial)
    fields += field(0x30, b"algorithm") + field(0x30, b"x" * padding) + field(0x30, validity)
    return field(0x30, field(0x30, fields + field(0x30, b"the subject and what else follows")))


@pytest.mark.parametrize(
    ("parts", "serial", "end"),
    [
        (dict(serial=b"\x0a", end=b"491231235959Z"), "0A", (2049, 12, 31, 23, 59, 59)),
        (dict(serial=b"\x00\xff\x01", end=b"500101000000Z"), "FF01", (1950, 1, 1)),
        (dict(serial=b"\x01\x23", end=b"20500102030405Z", tag=0x18), "0123", (2050, 1, 2, 3, 4, 5)),
        (dict(serial=b"\x7f", end=b"300101000000Z", version=False, padding=500), "7F", (2030, 1, 1)),
    ],
)
def test_serial_and_end_are_read_from_any_certificate(parts: Any, serial: str, end: Any) -> None:
    expected = CertificateDates(serial=serial, ends=datetime.datetime(*end, tzinfo=datetime.UTC))
    assert _parsed(certificate(**parts)) == expected


@pytest.mark.parametrize("content", [b"", b"\x31\x00", certificate(serial=b"\x01", end=b"x")[:-3]])
def test_what_is_no_certificate_is_none(content: bytes) -> None:
    with pytest.raises((ValueError, IndexError)):
        _parsed(content)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n"],
    ids=["empty", "no ASCII", "no fields"],
)
def test_a_file_that_holds_no_certificate_is_told_by_its_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "certificate.pem").write_bytes(content)
    with pytest.raises(CoordinatorError, match=f"the certificate {tmp_path}/certificate.pem cannot be read"):
        read_certificate(tmp_path / "certificate.pem")


@pytest.mark.parametrize("name", ["coordinator.pem", "certificate.pem", "key.pem"])
def test_a_bundle_with_a_damaged_file_is_told_with_a_remedy(made: Path, tmp_path: Path, name: str) -> None:
    bundle = credentials.read_bundle(shutil.copytree(made / "one/b", tmp_path / "b"))
    assert bundle.access().user == "one/b"
    (tmp_path / "b" / name).write_text("damaged")
    with pytest.raises(CoordinatorError, match="cannot be used") as told:
        bundle.access()
    assert "--init-certs" in told.value.remedy


def test_the_password_of_root_may_end_its_line_and_is_told_where_it_is_no_text(
    made: Path, tmp_path: Path
) -> None:
    password = shutil.copytree(made / "coordinator", tmp_path / "coordinator") / "root.password"
    password.write_text("secret\n")
    assert accounts.root_access(tmp_path).password == "secret"
    password.write_bytes(b"\xff")
    with pytest.raises(CoordinatorError, match="cannot be used"):
        accounts.root_access(tmp_path)
