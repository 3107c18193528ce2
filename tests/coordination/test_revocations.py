"""Certificates that end, peers that are revoked, and the accounts of a run in etcd."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from tests.coordination.test_credentials import KEYS

from bloomery.coordination import accounts, credentials
from bloomery.coordination.accounts import apply_access
from bloomery.coordination.certificates import init_certificates
from bloomery.coordination.credentials import (
    CertificateWatch,
    CoordinatorAccount,
    read_certificate,
    restore_revocations,
    revoke,
)
from bloomery.coordination.etcd_answers import EtcdRefused
from bloomery.coordination.etcd_watch import KeyValue
from bloomery.coordination.gateway import Access
from bloomery.errors import CoordinatorError


def test_an_end_is_warned_of_once_a_day_from_thirty_days_before_it(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    caplog.set_level(logging.INFO)
    now, days, loads = [1000.0], [30.0], list[tuple[Path, Path]]()
    ends = datetime.datetime(2030, 1, 2, tzinfo=datetime.UTC)

    class Dates:
        def __init__(self) -> None:
            self.ends = ends

        def days_left(self) -> float:
            return days[0]

    monkeypatch.setattr(credentials, "read_certificate", lambda path: Dates())
    monkeypatch.setattr(credentials, "_require_pair", lambda *files: None)
    monkeypatch.setattr(credentials.time, "monotonic", lambda: now[0])
    files = tmp_path / "certificate.pem", tmp_path / "key.pem"
    for file in files:
        file.touch()
    watch = CertificateWatch(*files, [lambda *both: loads.append(both)])
    watch.close()
    assert caplog.messages == []

    def warned() -> list[str]:
        caplog.clear()
        watch.check()
        return [message.split(":")[0] for message in caplog.messages]

    days[0] = 29.9
    assert warned() == ["this peer's certificate ends in 30 days"]
    now[0] += 24 * 3600.0 - 0.1
    assert warned() == []
    now[0] += 0.1
    days[0] = 0.0
    assert warned() == ["this peer's certificate ends in 0 days"]
    assert loads == []
    days[0] = -0.1
    os.utime(files[1], ns=(1, 1))
    assert warned() == [
        "the certificate was renewed",
        "this peer's certificate has ended",
    ], "of a new certificate one is warned at once"
    assert loads == [files] and warned() == []
    waits, checks = iter([False, False, True]), list[float]()
    watch._ended.wait = lambda seconds: checks.append(seconds) or next(waits)  # type: ignore[method-assign, assignment]
    now[0] += 24 * 3600.0
    caplog.clear()
    watch._run()
    assert checks == [60.0] * 3 and len(caplog.messages) == 1, "it looks once a minute"
    files[0].unlink()
    assert warned()[0] == "the certificate was renewed" and len(loads) == 2


class Etcd:
    """Notes each call; refuses those of these paths with this message."""

    def __init__(self, endpoints: Any = (), access: Any = None, *, deadline_s: float = 0.0) -> None:
        self.opened, self.calls = (endpoints, access, deadline_s), list[Any]()
        self.refuses: dict[str, str] = {}
        self.member: KeyValue | None = None

    def call(self, path: str, body: Any) -> Any:
        self.calls.append((path, body))
        if path in self.refuses:
            raise EtcdRefused(f"the coordinator refuses: {self.refuses[path]}", code=9)
        return {}

    def put(self, key: str, value: str) -> None:
        self.calls.append(("put", key, value))

    def get(self, key: str) -> KeyValue | None:
        return self.member if key == KEYS.member("site-a") else None

    def revoke(self, lease: int) -> None:
        self.calls.append(("revoke", lease))

    def delete(self, key: str, *, prefix: bool) -> None:
        self.calls.append(("delete", key, prefix))

    def __enter__(self) -> Etcd:
        return self

    def __exit__(self, *error: object) -> None:
        self.calls.append("closed")


def removal(*serials: str) -> list[Any]:
    return [
        *(("put", KEYS.revoked(serial), "site-a") for serial in serials),
        ("auth/user/delete", {"name": "one/site-a"}),
        ("auth/role/delete", {"role": "peer-one/site-a"}),
    ]


def test_a_peer_is_revoked_with_all_its_certificates_its_account_its_lease_and_its_records(
    tmp_path: Path, monkeypatch
) -> None:
    for renews in (False, True):
        init_certificates(tmp_path, run="one", peers=["site-a"], renews=renews)
    bundle, etcd = tmp_path / "one/site-a", Etcd()
    in_use = read_certificate(bundle / "certificate.pem").serial
    (earlier,) = (path.stem for path in (bundle / "earlier").iterdir())
    etcd.member = KeyValue(key=KEYS.member("site-a"), value="", created=1, modified=1, lease=77)
    etcd.refuses = {"auth/user/delete": "user name not found", "auth/role/delete": "role name not found"}
    gone = ("delete", KEYS.of_peer("site-a"), True)
    assert revoke(tmp_path, etcd, run="one", peer="site-a") == (in_use, earlier)  # type: ignore[arg-type]
    assert etcd.calls == [*removal(in_use, earlier), ("revoke", 77), gone]
    kept = tmp_path / "one/.revoked" / f"site-a-{in_use}"
    assert (kept / "certificate.pem").is_file() and not bundle.exists()
    assert kept.parent.stat().st_mode & 0o777 == 0o700
    opened: list[Etcd] = []
    monkeypatch.setattr(
        credentials, "Etcd", lambda *how, **more: opened.append(Etcd(*how, **more)) or opened[-1]
    )
    assert restore_revocations(tmp_path, "root", ["http://c:1"]) == 2  # type: ignore[arg-type]
    assert opened[0].opened == (["http://c:1"], "root", 30.0)
    assert opened[0].calls == [*removal(in_use, earlier), gone, "closed"], "it is not listed"
    init_certificates(tmp_path, run="one", peers=["site-a"])
    assert restore_revocations(tmp_path, "root", ["http://c:1"]) == 2  # type: ignore[arg-type]
    assert opened[1].calls == [*removal(in_use, earlier)[:2], "closed"], "the name has a new account"
    assert restore_revocations(tmp_path / "one", "root", []) == 0 and len(opened) == 2  # type: ignore[arg-type]


def test_a_revoked_peer_whose_record_lies_on_no_lease_has_none_ended(tmp_path: Path) -> None:
    init_certificates(tmp_path, run="one", peers=["site-a"])
    etcd = Etcd()
    etcd.member = KeyValue(key=KEYS.member("site-a"), value="", created=1, modified=1)
    serials = revoke(tmp_path, etcd, run="one", peer="site-a")  # type: ignore[arg-type]
    assert etcd.calls == [*removal(*serials), ("delete", KEYS.of_peer("site-a"), True)]


def test_a_revocation_that_etcd_refuses_is_told_and_so_is_a_bundle_that_cannot_be_moved(
    tmp_path: Path, monkeypatch
) -> None:
    init_certificates(tmp_path, run="one", peers=["a"])
    etcd = Etcd()
    etcd.refuses = {"auth/user/delete": "permission denied"}
    with pytest.raises(EtcdRefused):
        revoke(tmp_path, etcd, run="one", peer="a")  # type: ignore[arg-type]
    etcd.refuses = {}
    (tmp_path / "one/.revoked").write_text("in the way")
    with pytest.raises(CoordinatorError, match="'a' is revoked, but its bundle cannot be moved to") as told:
        revoke(tmp_path, etcd, run="one", peer="a")  # type: ignore[arg-type]
    assert "Move it by hand" in told.value.remedy


@pytest.mark.parametrize("is_open", [True, False])
def test_accounts_are_made_with_their_rights_before_etcd_asks_for_any_password(
    monkeypatch, is_open: bool
) -> None:
    opened: list[Etcd] = []

    def client(*how: Any, **more: Any) -> Etcd:
        opened.append(Etcd(*how, **more))
        opened[-1].refuses = {
            "auth/role/add": "role name already exists",
            "auth/role/delete": "role name not found",
        }
        if not is_open:
            opened[-1].refuses |= {"auth/user/add": "user name already exists", "auth/status": "user name is"}
        return opened[-1]

    monkeypatch.setattr(accounts, "Etcd", client)
    root = Access(user="root", password="secret")
    account = CoordinatorAccount(run="one", peer="a", user="one/a", password="p")
    assert apply_access(["c"], root, [account]) == 1
    role = "peer-one/a"
    made: list[Any] = [("auth/role/add", {"name": role})]
    for permission in accounts._permissions(KEYS, "a"):
        made.append(("auth/role/grant", {"name": role, "perm": permission}))
    made.append(("auth/user/add", {"name": "one/a", "password": "p"}))
    if not is_open:
        made.append(("auth/user/changepw", {"name": "one/a", "password": "p"}))
    made += [
        ("auth/user/grant", {"user": "one/a", "role": role}),
        ("auth/role/delete", {"role": "run-one"}),
    ]
    own = [
        ("auth/user/add", {"name": "root", "password": "secret"}),
        ("auth/role/add", {"name": "root"}),
        ("auth/user/grant", {"user": "root", "role": "root"}),
    ]
    asked = [("auth/status", {}), *([*own, *made, ("auth/enable", {})] if is_open else []), "closed"]
    assert opened[0].opened == (["c"], dataclasses.replace(root, user="", password=""), 30.0)
    assert opened[0].calls == asked
    if not is_open:
        assert opened[1].opened == (["c"], root, 30.0)
        assert opened[1].calls == [("auth/user/list", {}), *made, "closed"]
    assert len(opened) == 2 - is_open


def test_a_right_that_etcd_does_not_give_is_told(monkeypatch) -> None:
    etcd = Etcd()
    etcd.refuses = {"auth/user/add": "permission denied"}
    monkeypatch.setattr(accounts, "Etcd", lambda *how, **more: etcd)
    with pytest.raises(EtcdRefused, match="permission denied"):
        apply_access(["c"], Access(), [CoordinatorAccount(run="one", peer="a", user="u", password="p")])
