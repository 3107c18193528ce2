"""A file of certificates that is empty, damaged, unreadable or another's is told by name, with a remedy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.in_process import status_of
from tests.coordination.test_revocations import Etcd

from bloomery.coordination import accounts
from bloomery.coordination.accounts import accounts_in, apply_access, root_access
from bloomery.coordination.certificate_files import signed_fault
from bloomery.coordination.certificates import init_certificates, server_certificates
from bloomery.coordination.credentials import read_bundle, read_certificate, restore_revocations, revoke
from bloomery.coordination.gateway import Access
from bloomery.errors import CoordinatorError

pytest.importorskip("cryptography")

Damage = Callable[[Path, Path], None]
"""Damages a file. The second path is a file of the same kind that belongs elsewhere."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made")
    init_certificates(directory, run="one", peers=["a", "b"])
    init_certificates(directory, run="two", peers=["a"])
    return directory


def directory_in_its_place(path: Path, other: Path) -> None:
    path.unlink()
    path.mkdir()


def first_line_of_content_changed(path: Path, other: Path) -> None:
    """Change a byte far within: the file still has its form."""
    lines = path.read_text().splitlines(keepends=True)
    middle = len(lines) // 2
    lines[middle] = "A" * 8 + lines[middle][8:]
    path.write_text("".join(lines))


DAMAGES: list[tuple[str, Damage]] = [
    ("empty", lambda path, other: path.write_bytes(b"\n") and None),
    ("other text", lambda path, other: path.write_text("damaged") and None),
    ("no text", lambda path, other: path.write_bytes(b"\xff\x00") and None),
    ("cut", lambda path, other: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]) and None),
    ("changed", first_line_of_content_changed),
    ("a directory", directory_in_its_place),
    ("another's", lambda path, other: path.write_bytes(other.read_bytes()) and None),
]
CENTRAL = {
    "authority.pem": "one/authority.pem",
    "authority.key": "one/authority.key",
    "server.pem": "one/a/certificate.pem",
    "server.key": "one/a/key.pem",
    "clients.pem": "coordinator/server.pem",
}
BUNDLE = {
    "authority.pem": "two/a/authority.pem",
    "certificate.pem": "one/b/certificate.pem",
    "key.pem": "one/b/key.pem",
    "coordinator.pem": "coordinator/root.password",
    "account.json": "one/b/account.json",
}


def refusal(call: Callable[[], object]) -> CoordinatorError:
    with pytest.raises(CoordinatorError) as told:
        call()
    assert told.value.remedy
    return told.value


def copied(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "certs")


@pytest.mark.parametrize(("kind", "damage"), DAMAGES)
@pytest.mark.parametrize("name", BUNDLE)
def test_a_bundle_with_one_file_that_cannot_be_used_is_refused_by_the_name_of_a_file(
    made: Path, tmp_path: Path, name: str, kind: str, damage: Damage
) -> None:
    certs = copied(made, tmp_path)
    if (name, kind) == ("coordinator.pem", "changed"):
        return  # only the coordinator can tell: another authority is as whole as its own
    damage(certs / "one/a" / name, made / BUNDLE[name])
    told = refusal(lambda: read_bundle(certs / "one/a"))
    assert told.message.startswith(f"the certificates in {certs}/one/a cannot be used: ")
    assert any(file in told.message for file in BUNDLE) and "Copy the bundle again" in told.remedy
    if kind in ("empty", "a directory"):
        why = "is empty" if kind == "empty" else "cannot be read: Is a directory"
        assert told.message.endswith(f"{name} {why}")


@pytest.mark.parametrize(("kind", "damage"), DAMAGES)
@pytest.mark.parametrize("name", ["authority.pem", "server.pem", "server.key", "clients.pem"])
def test_a_coordinator_does_not_start_with_a_file_that_cannot_be_used(
    made: Path, tmp_path: Path, name: str, kind: str, damage: Damage
) -> None:
    certs = copied(made, tmp_path)
    if (name, kind) == ("clients.pem", "changed"):
        return  # the damaged one of its authorities may be another run's, and etcd itself tells
    damage(certs / "coordinator" / name, made / CENTRAL[name])
    for call in (server_certificates, root_access):
        told = refusal(lambda call=call: call(certs))  # type: ignore[misc]
        assert told.message.startswith(f"the certificates in {certs}/coordinator cannot be used: ")
        assert "--init-certs" in told.remedy


@pytest.mark.parametrize(("kind", "damage"), DAMAGES)
@pytest.mark.parametrize("place", ["coordinator", "one"])
@pytest.mark.parametrize("name", ["authority.pem", "authority.key"])
def test_nothing_is_signed_by_an_authority_that_is_damaged(
    made: Path, tmp_path: Path, place: str, name: str, kind: str, damage: Damage
) -> None:
    certs = copied(made, tmp_path)
    damage(certs / place / name, made / "two" / name)
    told = refusal(lambda: init_certificates(certs, run="one", peers=["c"]))
    assert told.message.startswith(f"the certificates in {certs}/{place} cannot be used: authority.")
    assert not (certs / "one/c").exists()


def test_an_authority_that_is_moved_away_is_made_anew_from_its_key_and_earlier_bundles_stay_valid(
    made: Path, tmp_path: Path
) -> None:
    certs = copied(made, tmp_path)
    for place in ("coordinator", "one"):
        (certs / place / "authority.pem").unlink()
    init_certificates(certs, run="one", peers=["c"])
    server_certificates(certs)
    for authority, bundle in [("one/authority.pem", "one/b"), ("one/b/authority.pem", "one/c")]:
        files = {"certificate": certs / bundle / "certificate.pem", "key": certs / bundle / "key.pem"}
        assert signed_fault(authority=certs / authority, **files) is None
    server = {"certificate": certs / "coordinator/server.pem", "key": certs / "coordinator/server.key"}
    assert signed_fault(authority=certs / "one/b/coordinator.pem", **server) is None


@pytest.mark.parametrize("name", ["server.pem", "server.key", "clients.pem", "root.password"])
def test_what_is_moved_away_is_made_anew_by_the_command_that_the_remedy_names(
    made: Path, tmp_path: Path, name: str
) -> None:
    certs = copied(made, tmp_path)
    (certs / "coordinator" / name).unlink()
    told = refusal(lambda: server_certificates(certs))
    assert told.message == f"{certs}/coordinator has no {name}" and "--init-certs" in told.remedy
    done = init_certificates(certs, run="one", peers=["a"], hosts=("10.0.0.9",))
    assert server_certificates(certs) == done.server


@pytest.mark.parametrize("content", [b"", b"\xff\xfe"])
def test_a_password_of_root_that_is_none_is_refused_before_the_coordinator_starts(
    made: Path, tmp_path: Path, content: bytes
) -> None:
    certs = copied(made, tmp_path)
    (certs / "coordinator/root.password").write_bytes(content)
    assert "--adopt" in refusal(lambda: server_certificates(certs)).remedy


def test_another_password_of_root_than_the_one_that_etcd_knows_is_told(monkeypatch) -> None:
    etcd = Etcd()
    etcd.refuses = {"auth/status": "user name is empty"}
    etcd.refuses["auth/user/list"] = "authentication failed, invalid user ID or password"
    monkeypatch.setattr(accounts, "Etcd", lambda *how, **more: etcd)
    told = refusal(lambda: apply_access(["c"], Access(user="root", password="p"), []))
    assert "root.password" in told.message and "from a copy" in told.remedy


@pytest.mark.parametrize("renews", [False, True])
def test_an_account_that_is_damaged_or_another_peers_is_told_where_it_was_made(
    made: Path, tmp_path: Path, renews: bool
) -> None:
    certs = copied(made, tmp_path)
    account = certs / "one/a/account.json"

    def told() -> CoordinatorError:
        if renews:
            return refusal(lambda: init_certificates(certs, run="one", peers=["a"], renews=True))
        return refusal(lambda: accounts_in(certs))

    account.write_bytes((certs / "one/b/account.json").read_bytes())
    assert told().message.endswith("account.json is that of 'b' of the run 'one'")
    account.write_text("{")
    assert "account.json is damaged" in told().message and "move it away" in told().remedy
    account.unlink()
    init_certificates(certs, run="one", peers=["a"])
    assert read_bundle(certs / "one/a").account in accounts_in(certs)


def test_a_damaged_certificate_is_neither_replaced_nor_revoked_without_its_serial_number(
    made: Path, tmp_path: Path
) -> None:
    certs = copied(made, tmp_path)
    (certs / "one/a/certificate.pem").write_text("damaged")
    renewal = refusal(lambda: init_certificates(certs, run="one", peers=["a"], renews=True))
    assert "move it away" in renewal.remedy
    revocation = refusal(lambda: revoke(certs, Etcd(), run="one", peer="a"))  # type: ignore[arg-type]
    assert "serial number" in revocation.remedy and (certs / "one/a").exists()


def test_who_was_revoked_is_known_from_the_names_of_files_whatever_is_in_them(
    tmp_path: Path, monkeypatch
) -> None:
    for renews in (False, True):
        init_certificates(tmp_path, run="one", peers=["site-a"], renews=renews)
    in_use = read_certificate(tmp_path / "one/site-a/certificate.pem").serial
    (earlier,) = (tmp_path / "one/site-a/earlier").iterdir()
    earlier.write_text("damaged")
    etcd = Etcd()
    assert revoke(tmp_path, etcd, run="one", peer="site-a") == (in_use, earlier.stem)  # type: ignore[arg-type]
    (tmp_path / f"one/.revoked/site-a-{in_use}/certificate.pem").unlink()
    monkeypatch.setattr("bloomery.coordination.credentials.Etcd", lambda *how, **more: etcd)
    assert restore_revocations(tmp_path, Access(), ["c"]) == 2


def test_an_expired_certificate_is_no_damaged_one(tmp_path: Path) -> None:
    init_certificates(tmp_path, run="one", peers=["a"], days=0)
    assert read_certificate(tmp_path / "one/a/certificate.pem").days_left() <= 0
    assert read_bundle(tmp_path / "one/a").account.peer == "a"


def test_the_commands_tell_it_as_one_message(made: Path, tmp_path: Path, capsys) -> None:
    certs = copied(made, tmp_path)
    (certs / "one/authority.pem").write_text("damaged")
    (certs / "one/a/account.json").unlink()
    words = ["coordinate", "--init-certs", str(certs), "--run", "one", "--peers", "c"]
    assert status_of(*words) == 1
    told = capsys.readouterr().err
    assert "authority.pem holds no certificate, or a damaged one\n  Move it away" in told
    assert status_of("coordinate", "--adopt", "one", "--certificates", str(certs / "one/a")) == 1
    assert f"the certificates in {certs}/one/a cannot be used: account.json" in capsys.readouterr().err


def test_an_address_in_a_certificate_is_no_name_of_its_bearer(tmp_path: Path) -> None:
    init_certificates(tmp_path, run="one", peers=["a"], hosts=("10.0.0.9",))
    found = signed_fault(
        authority=tmp_path / "one/a/coordinator.pem",
        certificate=tmp_path / "coordinator/server.pem",
        key=tmp_path / "coordinator/server.key",
        peer="10.0.0.9",
    )
    assert found is not None and found.why.endswith("and not of '10.0.0.9'")
