"""Whom the coordinator's root trusts, which certificate is made anew, and who is refused after a restart."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tests.coordination.test_credentials import Etcd

from bloomery.coordination import credentials
from bloomery.coordination.accounts import root_access
from bloomery.coordination.certificates import init_certificates
from bloomery.coordination.credentials import (
    CertificateWatch,
    read_bundle,
    read_certificate,
    restore_revocations,
    revoke,
)
from bloomery.coordination.gateway import Access
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


def test_a_watch_of_a_certificate_looks_from_its_beginning_until_it_is_closed(tmp_path: Path) -> None:
    init_certificates(tmp_path, run="one", peers=["a"])
    bundle, before = read_bundle(tmp_path / "one/a"), set(threading.enumerate())
    watch = CertificateWatch(bundle.certificate, bundle.key, [])
    (thread,) = set(threading.enumerate()) - before
    assert thread.name == "certificate" and thread.daemon
    watch.close()
    thread.join(60.0)
    assert not thread.is_alive()
