"""Whom the coordinator's root trusts, which certificate is made anew, and who is refused after a restart."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tests.coordination.test_revocations import Etcd

from bloomery.coordination import accounts, credentials
from bloomery.coordination.accounts import accounts_in, apply_access, root_access
from bloomery.coordination.certificates import init_certificates
from bloomery.coordination.credentials import (
    CertificateWatch,
    read_bundle,
    read_certificate,
    restore_revocations,
    revoke,
)
from bloomery.coordination.gateway import Access
from bloomery.errors import CoordinatorError
from bloomery.protocol.keys import Keys

pytest.importorskip("cryptography")


def test_root_and_peers_trust_the_authority_of_the_coordinator_and_of_no_run(tmp_path: Path) -> None:
    init_certificates(tmp_path, run="one", peers=["a"])
    for access in (root_access(tmp_path), read_bundle(tmp_path / "one/a").access()):
        assert access.context is not None
        (trusted,) = access.context.get_ca_certs()
        serial = read_certificate(tmp_path / "coordinator/authority.pem").serial
        assert trusted["serialNumber"] == serial


def test_a_coordinator_whose_key_is_gone_has_a_new_certificate_and_a_new_one_is_no_renewal(
    tmp_path: Path,
) -> None:
    central = tmp_path / "coordinator"
    assert not init_certificates(tmp_path, run="one", peers=["a"]).is_server_renewed
    (central / "server.key").unlink()
    assert init_certificates(tmp_path, run="one", peers=["a"]).is_server_renewed
    assert not init_certificates(tmp_path, run="one", peers=["b"]).is_server_renewed
    for name in ("server.key", "server.pem"):
        (central / name).unlink()
    assert not init_certificates(tmp_path, run="one", peers=["a"]).is_server_renewed


def test_all_peers_that_were_revoked_are_refused_again_each_in_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    etcd: Any = Etcd()
    serials: dict[tuple[str, str], tuple[str, ...]] = {}
    for run, peer in (("one", "a"), ("one", "b"), ("two", "a")):
        for renews in (False, True):
            init_certificates(tmp_path, run=run, peers=[peer], renews=renews)
        serials[run, peer] = revoke(tmp_path, etcd, run=run, peer=peer)
    (tmp_path / "one/.revoked/note-to-myself").write_text("no bundle")
    init_certificates(tmp_path, run="two", peers=["a"])
    etcd.calls.clear()
    monkeypatch.setattr(credentials, "Etcd", lambda *how, **more: etcd)
    assert restore_revocations(tmp_path, Access(), ["c"]) == 6
    refused = [call[1:] for call in etcd.calls if call[0] == "put"]
    assert sorted(refused) == sorted(
        (Keys(run).revoked(serial), peer) for (run, peer), own in serials.items() for serial in own
    )
    gone = [call[1]["name"] for call in etcd.calls if call[0] == "auth/user/delete"]
    assert gone == ["one/a", "one/b"], "the name of the third has a new account"


@pytest.mark.parametrize("host", ["köln.example", "10.0.0.9:2379", "[::1]", "https://c.example", ""])
def test_a_host_whose_name_a_certificate_cannot_have_is_told(tmp_path: Path, host: str) -> None:
    with pytest.raises(CoordinatorError) as refused:
        init_certificates(tmp_path, run="one", peers=["a"], hosts=(host,))
    assert refused.value.message == f"a certificate cannot name the host {host!r}"
    assert "xn--" in refused.value.remedy and "no port" in refused.value.remedy


def test_a_watch_of_a_certificate_looks_from_its_beginning_until_it_is_closed(tmp_path: Path) -> None:
    init_certificates(tmp_path, run="one", peers=["a"])
    bundle, before = read_bundle(tmp_path / "one/a"), set(threading.enumerate())
    watch = CertificateWatch(bundle.certificate, bundle.key, [])
    (thread,) = set(threading.enumerate()) - before
    assert thread.name == "certificate" and thread.daemon
    watch.close()
    thread.join(60.0)
    assert not thread.is_alive()


def test_a_peer_whose_account_was_moved_away_gets_another_and_its_certificate_stays_known(
    tmp_path: Path,
) -> None:
    init_certificates(tmp_path, run="one", peers=["a"])
    bundle = tmp_path / "one/a"
    first, before = read_certificate(bundle / "certificate.pem").serial, read_bundle(bundle).account
    (bundle / "account.json").unlink()
    init_certificates(tmp_path, run="one", peers=["a"])
    now = read_bundle(bundle)
    assert [path.stem for path in (bundle / "earlier").iterdir()] == [first]
    assert now.account.user == before.user and now.account.password != before.password
    assert (now.access().user, now.access().password) == ("one/a", now.account.password)


@pytest.mark.parametrize("asks_for_passwords", [False, True])
def test_every_account_of_several_runs_is_made_in_etcd(
    asks_for_passwords: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run, peers in (("one", ["a", "b"]), ("two", ["a"])):
        init_certificates(tmp_path, run=run, peers=peers)
    etcd: Any = Etcd()
    etcd.refuses = {"auth/user/grant": "role is already granted"}
    if asks_for_passwords:
        etcd.refuses["auth/status"] = "user name is empty"
    monkeypatch.setattr(accounts, "Etcd", lambda *how, **more: etcd)
    assert apply_access(["c"], root_access(tmp_path), iter(accounts_in(tmp_path))) == 3
    own = [] if asks_for_passwords else ["root"]
    for path, key in (("auth/user/add", "name"), ("auth/user/grant", "user")):
        asked = [call[1][key] for call in etcd.calls if call[0] == path]
        assert asked == [*own, "one/a", "one/b", "two/a"]
