"""Certificates, accounts and roles, against a real etcd: who belongs gets in, and nobody else."""

import dataclasses
import json
import ssl
import stat

import pytest
from tests.coordination.test_membership import WITHIN_S, member, until

from bloomery.coordination.accounts import _permission, accounts_in, apply_access, root_access
from bloomery.coordination.certificates import init_certificates, server_certificates
from bloomery.coordination.credentials import (
    ACCOUNT,
    COORDINATOR,
    endpoints_of,
    read_bundle,
    read_certificate,
    restore_revocations,
    revoke,
)
from bloomery.coordination.etcd import Delete, Etcd, Put
from bloomery.coordination.etcd_process import start_single
from bloomery.coordination.gateway import Access
from bloomery.coordination.membership import Membership
from bloomery.coordination.run_view import RunView
from bloomery.errors import CoordinatorError
from bloomery.protocol.keys import Keys

ONE, TWO = Keys("one"), Keys("two")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    directory = tmp_path_factory.mktemp("certificates")
    init_certificates(directory, run="one", peers=["a", "b"])
    init_certificates(directory, run="two", peers=["a"])
    return directory


@pytest.fixture(scope="module")
def guarded(certificates, tmp_path_factory):
    """A coordinator that knows three peers of two runs."""
    server = start_single(tmp_path_factory.mktemp("guarded"), certificates=server_certificates(certificates))
    for _ in range(2):  # a second time changes nothing
        count = apply_access([server.endpoint], root_access(certificates), accounts_in(certificates))
        assert count == 3
    yield server
    server.stop()


def client(server, certificates, name, **changed):
    access = read_bundle(certificates / name).access()
    return Etcd([server.endpoint], dataclasses.replace(access, **changed), deadline_s=WITHIN_S)


def test_a_peer_does_all_it_needs_on_the_keys_of_its_run(guarded, certificates):
    with client(guarded, certificates, "one/a") as etcd, RunView(etcd, ONE) as view:
        membership = Membership(etcd, ONE, lease_s=60.0, heartbeat_s=0.2)
        membership.join(member("a"))
        assert set(until(view, lambda snapshot: snapshot.members).members) == {"a"}
        membership.leave()
        until(view, lambda snapshot: not snapshot.members)


SELF = [ONE.member("a"), ONE.ready(3, "a"), ONE.done(3, 4, "a"), ONE.failed(3, 4, "a")]
SELF += [ONE.recovery_record("a"), ONE.settings("a"), ONE.rate("a")]
SHARED = [ONE.epoch, ONE.attempt(3, 4), ONE.commit(3), ONE.shares(3)]
ANOTHERS = [key.replace("/peers/a/", "/peers/b/") for key in SELF]


def test_a_peer_writes_below_its_own_name_and_what_all_must_write_and_nothing_else(guarded, certificates):
    with client(guarded, certificates, "one/a") as etcd:
        for key in (*SELF, *SHARED):
            etcd.put(key, "x")
            etcd.delete(key)
        for key in (*ANOTHERS, ONE.adopted, ONE.token, f"{ONE.peers}aa", f"{ONE.root}of/tomorrow"):
            assert etcd.get(key) is None  # it may read all of its run
            for write in (
                lambda key=key: etcd.put(key, "x"),
                lambda key=key: etcd.delete(key),
                lambda key=key: etcd.transact([], [Put(key=key, value="x")]),
                lambda key=key: etcd.transact([], [Put(key=ONE.epoch, value="1"), Delete(key=key)]),
            ):
                with pytest.raises(CoordinatorError, match="refuses"):
                    write()
        for prefix in (ONE.peers, ONE.root):
            with pytest.raises(CoordinatorError, match="refuses"):
                etcd.delete(prefix, prefix=True)


def test_a_peer_does_not_end_anothers_lease_nor_take_its_name(guarded, certificates):
    with (
        client(guarded, certificates, "one/b") as theirs,
        client(guarded, certificates, "one/a") as mine,
        Membership(theirs, ONE, lease_s=60.0, heartbeat_s=0.2) as b,
    ):
        b.join(member("b"))
        with pytest.raises(CoordinatorError, match="refuses"):
            mine.revoke(b.lease)
        with pytest.raises(CoordinatorError, match="refuses"):
            Membership(mine, ONE, lease_s=60.0, heartbeat_s=0.2).join(member("b", "2"), deadline_s=1.0)
        assert mine.get(ONE.member("b")).lease == b.lease


def test_what_earlier_versions_let_a_peer_write_is_taken_back(tmp_path, certificates):
    server = start_single(tmp_path, certificates=server_certificates(certificates))
    root, accounts = root_access(certificates), accounts_in(certificates)
    apply_access([server.endpoint], root, accounts)
    with Etcd([server.endpoint], root, deadline_s=WITHIN_S) as etcd:
        etcd.call("auth/role/add", {"name": "run-one"})
        whole = _permission("READWRITE", ONE.root)
        etcd.call("auth/role/grant", {"name": "run-one", "perm": whole})
        etcd.call("auth/user/grant", {"user": "one/a", "role": "run-one"})
    with client(server, certificates, "one/a") as etcd:
        etcd.put(ONE.member("b"), "x")
        apply_access([server.endpoint], root, accounts)
        with pytest.raises(CoordinatorError, match="refuses"):
            etcd.put(ONE.member("b"), "x")
        etcd.put(ONE.member("a"), "x")
    server.stop()


@pytest.mark.parametrize(
    "ask",
    [
        lambda etcd: etcd.get(TWO.epoch),
        lambda etcd: etcd.put(TWO.epoch, "1"),
        lambda etcd: etcd.list("/"),
        lambda etcd: etcd.delete(TWO.root, prefix=True),
        lambda etcd: etcd.transact([], [Put(key=TWO.epoch, value="1")]),
        lambda etcd: [list(etcd.watch(TWO.root, after=1, idle_s=WITHIN_S).batches()) for _ in range(2)],
        lambda etcd: etcd.call("auth/user/add", {"name": "me", "password": "x"}),
        lambda etcd: etcd.call("auth/disable", {}),
    ],
    ids=["get", "put", "list", "delete", "transact", "watch", "user", "disable"],
)
def test_another_runs_keys_and_the_accounts_are_not_its_business(guarded, certificates, ask):
    with client(guarded, certificates, "one/a") as etcd, pytest.raises(CoordinatorError, match="refuses"):
        ask(etcd)


def test_a_view_of_another_run_is_refused_and_not_tried_for_ever(guarded, certificates):
    with client(guarded, certificates, "one/a") as etcd, pytest.raises(CoordinatorError, match="one/a"):
        RunView(etcd, TWO).start(deadline_s=WITHIN_S)


def test_a_wrong_password_and_no_user_are_refused(guarded, certificates):
    for changed in (dict(password="wrong"), dict(user="", password=""), dict(user="two/a")):
        etcd = client(guarded, certificates, "one/a", **changed)
        with etcd, pytest.raises(CoordinatorError, match="refuses"):
            etcd.get(ONE.epoch)


def test_without_a_certificate_nobody_answers(guarded, certificates):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(certificates / "one" / "a" / COORDINATOR)
    account = read_bundle(certificates / "one" / "a").account
    plain = guarded.endpoint.replace("https", "http")
    for endpoint, trusting in ((guarded.endpoint, context), (plain, None)):
        access = Access(context=trusting, user=account.user, password=account.password)
        with Etcd([endpoint], access) as etcd, pytest.raises(CoordinatorError):
            etcd.get(ONE.epoch, deadline_s=0.5)


def test_tokens_that_die_with_a_restart_are_asked_for_again_also_by_a_watch(tmp_path, certificates):
    files = server_certificates(certificates)
    server = start_single(tmp_path, certificates=files)
    apply_access([server.endpoint], root_access(certificates), accounts_in(certificates))
    with client(server, certificates, "one/a") as etcd, RunView(etcd, ONE, idle_s=1.0) as view:
        etcd.put(ONE.epoch, "1")
        until(view, lambda snapshot: snapshot.epoch == 1)
        server.kill()
        server = start_single(tmp_path, port=server.member.port, certificates=files)
        with client(server, certificates, "one/b") as other:  # this one's token is new; the view's is not
            other.put(ONE.epoch, "2")
        until(view, lambda snapshot: snapshot.epoch == 2)
    server.stop()


def test_what_is_there_is_not_made_again_and_secrets_are_their_owners_alone(certificates):
    before = {path: path.read_bytes() for path in certificates.rglob("*") if path.is_file()}
    issued = init_certificates(certificates, run="one", peers=["a", "b"])
    assert issued.bundles == ()
    assert {path: path.read_bytes() for path in certificates.rglob("*") if path.is_file()} == before
    for path in before:
        secret = path.suffix in (".key", ".password") or path.name in ("key.pem", "account.json")
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == (0 if secret else 0o044)
    assert "password" not in repr(read_bundle(certificates / "one" / "a"))


@pytest.mark.parametrize(
    "lacks", ["key.pem", "certificate.pem", "authority.pem", "coordinator.pem", "account.json"]
)
def test_a_bundle_that_is_not_whole_is_refused_with_what_lacks(tmp_path, lacks):
    init_certificates(tmp_path, run="one", peers=["a"])
    (tmp_path / "one" / "a" / lacks).unlink()
    with pytest.raises(CoordinatorError, match=lacks):
        read_bundle(tmp_path / "one" / "a")


@pytest.mark.parametrize(
    "stored", [[], {}, {"run": 1}, {"run": "../x", "peer": "a", "user": "u", "password": "p"}]
)
def test_an_account_that_makes_no_sense_is_refused(tmp_path, stored):
    init_certificates(tmp_path, run="one", peers=["a"])
    (tmp_path / "one" / "a" / "account.json").write_text(json.dumps(stored))
    with pytest.raises(CoordinatorError, match="cannot be used"):
        read_bundle(tmp_path / "one" / "a")


def test_a_revoked_peer_is_off_the_list_at_once_and_stays_out_also_of_an_empty_coordinator(tmp_path):
    directory = tmp_path / "certificates"
    init_certificates(directory, run="one", peers=["a", "b"])
    earlier = read_certificate(directory / "one/a/certificate.pem")  # whoever has stolen it may use it still
    init_certificates(directory, run="one", peers=["a"], renews=True)
    server = start_single(tmp_path / "data", certificates=server_certificates(directory))
    root = root_access(directory)
    try:
        apply_access([server.endpoint], root, accounts_in(directory))
        with (
            client(server, directory, "one/a") as theirs,
            client(server, directory, "one/b") as mine,
            Etcd([server.endpoint], root, deadline_s=WITHIN_S) as etcd,
            RunView(mine, ONE) as view,
        ):
            membership = Membership(theirs, ONE, lease_s=600.0, heartbeat_s=600.0)
            membership.join(member("a"))
            until(view, lambda snapshot: "a" in snapshot.members)
            certificate = read_certificate(directory / "one/a/certificate.pem")
            assert revoke(directory, etcd, run="one", peer="a") == (certificate.serial, earlier.serial)
            snapshot = until(view, lambda snapshot: "a" not in snapshot.members)  # long before its lease ends
            assert snapshot.revoked == {certificate.serial, earlier.serial}
            with pytest.raises(CoordinatorError):
                theirs.put(ONE.rate("a"), "{}")
            with pytest.raises(CoordinatorError):
                mine.put(ONE.revoked("00"), "c")  # no peer revokes another
            assert {account.peer for account in accounts_in(directory)} == {"b"}
            with pytest.raises(CoordinatorError, match="no bundle of a peer 'a'"):
                revoke(directory, etcd, run="one", peer="a")
            membership.withdraw()
    finally:
        server.stop()
    server = start_single(tmp_path / "empty", certificates=server_certificates(directory))
    try:
        init_certificates(directory, run="one", peers=["a"])  # the name comes back, its old certificate not
        apply_access([server.endpoint], root, accounts_in(directory))
        assert restore_revocations(directory, root, [server.endpoint]) == 2
        with client(server, directory, "one/a") as etcd, RunView(etcd, ONE) as view:
            assert view.snapshot.revoked == {certificate.serial, earlier.serial}
            etcd.put(ONE.rate("a"), "{}")
    finally:
        server.stop()


def test_certificates_live_as_long_as_chosen_and_are_renewed_with_their_account(tmp_path):
    cryptography = pytest.importorskip("cryptography.x509")
    init_certificates(tmp_path, run="one", peers=["a"], days=20)
    bundle = tmp_path / "one/a"
    account, path = (bundle / ACCOUNT).read_bytes(), bundle / "certificate.pem"
    before = read_certificate(path)
    assert 19.9 < before.days_left() <= 20.0
    theirs = cryptography.load_pem_x509_certificate(path.read_bytes())
    assert (int(before.serial, 16), before.ends) == (theirs.serial_number, theirs.not_valid_after_utc)
    assert init_certificates(tmp_path, run="one", peers=["a"]).bundles == ()
    assert init_certificates(tmp_path, run="one", peers=["a"], days=900, renews=True).bundles == (bundle,)
    assert read_certificate(path).serial != before.serial and read_certificate(path).days_left() > 899
    assert (bundle / ACCOUNT).read_bytes() == account
    (bundle / "certificate.pem").write_text("no certificate")
    with pytest.raises(CoordinatorError, match="cannot be read"):
        read_certificate(path)


def test_the_default_coordinator_of_whoever_has_certificates_has_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("BLOOMERY_COORDINATOR", raising=False)
    assert endpoints_of("") == ("http://127.0.0.1:2379",)
    assert endpoints_of("", has_certificates=True) == ("https://127.0.0.1:2379",)
    assert endpoints_of("https://a:1, https://b:2", has_certificates=True) == ("https://a:1", "https://b:2")
