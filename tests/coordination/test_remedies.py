"""What helps against each error of the coordinator is told with it; without a coordinator."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.coordination.test_adopting import KEYS, Etcd, lost
from tests.coordination.test_etcd_calls import FakeGateway
from tests.coordination.test_membership import member

from bloomery.coordination import etcd as etcd_module
from bloomery.coordination import etcd_process
from bloomery.coordination.accounts import root_access
from bloomery.coordination.certificates import init_certificates, server_certificates
from bloomery.coordination.credentials import endpoints_of, read_bundle, read_certificate, revoke
from bloomery.coordination.etcd import TransactionResult
from bloomery.coordination.etcd_process import EtcdMember, EtcdServer, PortTaken
from bloomery.coordination.gateway import Gateway
from bloomery.coordination.membership import NameTaken
from bloomery.coordination.orphan import serving
from bloomery.coordination.recovery import adopt
from bloomery.errors import CoordinatorError
from bloomery.protocol.encoding import ProtocolError


def remedy_of(call: Callable[[], Any]) -> str:
    with pytest.raises(CoordinatorError) as told:
        call()
    return told.value.remedy


def certificates(directory: Path, **how: Any) -> Any:
    return init_certificates(directory, **{"run": "r", "peers": ["a"], **how})


def blocked(directory: Path) -> Path:
    """A path below a file, where no directory can be made."""
    (directory / "file").write_text("")
    return directory / "file" / "certificates"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda at: endpoints_of("here:1"), ("http://host:2379", "elastic.coordinator", "--endpoints")),
        (lambda at: read_bundle(at), ("--init-certs",)),
        (lambda at: read_certificate(at / "none.pem"), ("--init-certs",)),
        (lambda at: revoke(at, None, run="r", peer="a"), ("--init-certs", "one of its peers")),  # type: ignore[arg-type]
        (lambda at: server_certificates(at), ("--init-certs", "--peers")),
        (lambda at: root_access(at), ("--init-certs",)),
        (lambda at: certificates(at, run="coordinator"), ("is the coordinator's",)),
        (lambda at: certificates(blocked(at)), ("may be written to",)),
        (lambda at: Gateway([]), ("elastic.coordinator", "BLOOMERY_COORDINATOR", "`bloomery coordinate`")),
        (lambda at: Gateway(["https://a:1"]), ("elastic.certificates",)),
        (lambda at: Gateway(["ftp://a:1"]), ("http://HOST:PORT", "https://HOST:PORT", "commas")),
        (lambda at: Gateway(["http://a:1"]).call("x", {}, deadline_s=0.0), ("`bloomery coordinate`",)),
        (lambda at: etcd_process.version_of(at / "etcd"), ("PATH",)),
        (lambda at: etcd_process.free_ports(1, "192.0.2.1"), ("--listen 0.0.0.0:PORT", "--hosts")),
        (lambda at: etcd_process.free_ports(1, "no name"), ("--listen 0.0.0.0:PORT",)),
        (lambda at: etcd_process.free_ports(-1), ("--listen HOST:PORT",)),
    ],
)
def test_an_error_of_the_coordinator_comes_with_what_to_do(tmp_path: Path, call, words) -> None:
    remedy = remedy_of(lambda: call(tmp_path))
    for word in words:
        assert word in remedy


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NameTaken("a"), ("elastic.peer", "BLOOMERY_PEER")),
        (
            PortTaken(EtcdMember(name="n", host="::1", port=1, peer_port=2, data=Path("x"))),
            ("another port", "--listen HOST:PORT"),
        ),
        (ProtocolError("Commit", "it is none"), ("same version",)),
    ],
)
def test_an_error_of_a_peer_or_an_address_comes_with_what_to_do(error: CoordinatorError, words) -> None:
    for word in words:
        assert word in error.remedy


def test_without_the_library_that_makes_certificates_its_package_is_named(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'bloomery[coordinator]'" in remedy_of(lambda: certificates(tmp_path))


def test_a_second_coordinator_on_the_same_data_is_told_to_take_other_data(tmp_path: Path) -> None:
    with serving(tmp_path):
        assert "--data DIR" in remedy_of(lambda: serving(tmp_path).__enter__())


def test_an_answer_that_makes_no_sense_asks_for_the_version_of_etcd(monkeypatch) -> None:
    monkeypatch.setattr(etcd_module, "Gateway", FakeGateway)
    client = etcd_module.Etcd(["http://a:1"])
    assert "3.4 or later" in remedy_of(lambda: client.get("k"))


@pytest.mark.parametrize(("status", "within_s"), [(1, 60.0), (None, 0.0)])
def test_an_etcd_that_does_not_start_names_its_log(
    tmp_path: Path, status: int | None, within_s: float
) -> None:
    log = tmp_path / "etcd.log"
    log.write_bytes(b"\n\nbad flag\n")
    process: Any = SimpleNamespace(poll=lambda: status, send_signal=lambda number: None, wait=lambda s: 0)
    server = EtcdServer(EtcdMember(name="n", host="h", port=1, peer_port=2, data=tmp_path), process)
    assert str(log) in remedy_of(lambda: etcd_process.wait_until_ready(server, within_s=within_s))


def changed_meanwhile() -> Etcd:
    etcd = lost()
    etcd.result = TransactionResult.REFUSED
    return etcd


def ahead_of_all() -> Etcd:
    etcd = lost()
    etcd.put(KEYS.member("c"), member("c", epoch=30, round=9, digest="d"))
    return etcd


@pytest.mark.parametrize(
    ("etcd", "words"),
    [
        (Etcd, ("Start the peers",)),
        (changed_meanwhile, ("--status", "again")),
        (ahead_of_all, ("again in some seconds", "known.json")),
    ],
)
def test_a_run_that_cannot_be_restored_yet_says_what_has_to_come_first(etcd, words) -> None:
    remedy = remedy_of(lambda: adopt(etcd(), KEYS))
    for word in words:
        assert word in remedy
