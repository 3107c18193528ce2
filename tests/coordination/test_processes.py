"""How an etcd is started, found again and spoken to; without one that runs."""

from __future__ import annotations

import base64
import datetime
import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import urllib3

from bloomery import durable
from bloomery.coordination import etcd_answers, etcd_process, gateway, orphan
from bloomery.coordination.accounts import _permission, _permissions
from bloomery.coordination.credentials import CertificateDates, endpoints_of
from bloomery.coordination.etcd import (
    VALUE_BYTES_AT_MOST,
    Condition,
    Delete,
    Put,
    _compare,
    _operation,
    _prefix,
)
from bloomery.coordination.etcd_answers import AnswerTooLong, Lost, ResponseStream
from bloomery.coordination.etcd_process import EtcdMember, ServerCertificates, _options, take_over
from bloomery.coordination.etcd_watch import HistoryLost, KeyWatch
from bloomery.coordination.gateway import Gateway, _content
from bloomery.coordination.membership import Membership
from bloomery.coordination.orphan import EtcdProcessRecord, OrphanProcess, find_orphan, serving, write_record
from bloomery.errors import CoordinatorError
from bloomery.events.run_lock import process_identity
from bloomery.protocol.keys import Keys

MEMBER = EtcdMember(name="m1", host="127.0.0.1", port=2379, peer_port=2380, data=Path("/data"))
FILES = ServerCertificates(certificate=Path("/c"), key=Path("/k"), authority=Path("/a"))


@pytest.mark.parametrize(
    ("host", "endpoint", "listens"),
    [
        ("127.0.0.1", "http://127.0.0.1:2379", "http://127.0.0.1:2379"),
        ("0.0.0.0", "http://127.0.0.1:2379", "http://0.0.0.0:2379"),
        ("::", "http://[::1]:2379", "http://[::]:2379"),
        ("", "http://127.0.0.1:2379", "http://0.0.0.0:2379"),
        ("10.1.2.3", "http://10.1.2.3:2379", "http://10.1.2.3:2379"),
    ],
)
def test_a_server_that_listens_everywhere_is_reached_here_by_loopback_and_elsewhere_by_name(
    host: str, endpoint: str, listens: str
) -> None:
    member = replace(MEMBER, host=host)
    assert (member.endpoint, member.listens) == (endpoint, listens)
    is_everywhere = host in ("0.0.0.0", "::", "")
    assert member.advertised == (f"http://{os.uname().nodename}:2379" if is_everywhere else endpoint)
    assert member.peer_url == "http://127.0.0.1:2380"
    assert replace(member, certificates=FILES).endpoint.startswith("https://")


def test_a_server_is_started_with_the_intervals_limits_and_certificates_of_its_member() -> None:
    words = _options(replace(MEMBER, heartbeat_ms=50, election_ms=700))
    for word in (
        "--name=m1",
        "--data-dir=/data/data",
        "--listen-client-urls=http://127.0.0.1:2379",
        "--listen-peer-urls=http://127.0.0.1:2380",
        "--initial-cluster=m1=http://127.0.0.1:2380",
        "--initial-cluster-state=new",
        "--heartbeat-interval=50",
        "--election-timeout=700",
        "--auto-compaction-mode=periodic",
        "--auto-compaction-retention=10m",
        "--max-txn-ops=4096",
    ):
        assert word in words
    assert not any("cert" in word for word in words)
    several = {"m1": "http://a:1", "m2": "http://b:2"}
    joined = _options(replace(MEMBER, cluster=several, existing=True, certificates=FILES))
    assert "--initial-cluster=m1=http://a:1,m2=http://b:2" in joined
    assert "--initial-cluster-state=existing" in joined
    for prefix in ("--", "--peer-"):
        for word in ("cert-file=/c", "key-file=/k", "trusted-ca-file=/a", "client-cert-auth"):
            assert prefix + word in joined


def record(**changed: Any) -> EtcdProcessRecord:
    usual = dict(
        process=os.getpid(),
        born=process_identity(os.getpid()),
        host="127.0.0.1",
        port=2379,
        peer_port=2380,
        certificates=None,
    )
    return EtcdProcessRecord(**usual | changed)


def test_a_process_that_outlived_its_starter_is_found_by_its_birth_and_not_by_its_number(
    tmp_path: Path,
) -> None:
    assert find_orphan(tmp_path) is None
    write_record(tmp_path, record())
    found, process = find_orphan(tmp_path)  # type: ignore[misc]
    assert found == record() and process.pid == os.getpid() and process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.0)
    write_record(tmp_path, record(born="another"))
    assert find_orphan(tmp_path) is None
    (tmp_path / "process.json").write_text(json.dumps(vars(record()) | {"more": 1}))
    assert find_orphan(tmp_path) is None
    (tmp_path / "process.json").write_text("{")
    assert find_orphan(tmp_path) is None


def test_a_process_that_ended_and_nobody_waited_for_has_ended(monkeypatch) -> None:
    process = os.fork()
    if process == 0:
        signal.pause()
    orphan = OrphanProcess(process, process_identity(process))
    assert orphan.poll() is None
    orphan.kill()
    assert orphan.wait(60.0) == 0 and orphan.returncode == 0
    os.waitpid(process, 0)
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr("bloomery.coordination.orphan.os.kill", lambda *told: sent.append(told))
    other = OrphanProcess(os.getpid(), "of another birth")
    other.kill()
    assert other.poll() == 0 and other.wait(0.0) == 0 and not sent
    own = OrphanProcess(os.getpid(), process_identity(os.getpid()))
    own.send_signal(signal.SIGTERM)
    own.kill()
    assert sent == [(os.getpid(), signal.SIGTERM), (os.getpid(), signal.SIGKILL)]


def test_a_process_that_ends_just_before_its_signal_is_no_error(monkeypatch) -> None:
    def kill(process: int, number: int) -> None:
        raise ProcessLookupError

    monkeypatch.setattr("bloomery.coordination.orphan.os.kill", kill)
    OrphanProcess(os.getpid(), process_identity(os.getpid())).kill()


def test_a_process_that_ends_while_it_is_looked_at_has_ended(monkeypatch) -> None:
    def gone(process: int) -> None:
        raise orphan.psutil.NoSuchProcess(process)

    monkeypatch.setattr(orphan.psutil, "Process", gone)
    assert OrphanProcess(os.getpid(), process_identity(os.getpid())).poll() == 0


def test_an_etcd_is_taken_over_with_the_settings_that_it_has_and_else_ended(
    tmp_path: Path, monkeypatch
) -> None:
    stopped: list[int] = []
    monkeypatch.setattr(etcd_process.EtcdServer, "stop", lambda server: stopped.append(server.member.port))

    def taken(host: str = "127.0.0.1", port: int = 2379, certificates: ServerCertificates | None = None):
        return take_over(tmp_path, host=host, port=port, certificates=certificates)

    assert taken() is None and not stopped
    write_record(tmp_path, record())
    for port in (2379, 0):
        server = taken(port=port)
        assert server is not None and (server.member.port, server.member.peer_port) == (2379, 2380)
        assert server.endpoint == "http://127.0.0.1:2379" and server.process.pid == os.getpid()
    assert not stopped
    files = [tmp_path / name for name in "cka"]
    for file in files:
        file.write_text("one")
    certificates = ServerCertificates(certificate=files[0], key=files[1], authority=files[2])
    for wrong in ({"host": "0.0.0.0"}, {"port": 2378}, {"certificates": certificates}):
        assert taken(**wrong) is None
    assert stopped == [2379] * 3
    write_record(tmp_path, record(certificates=etcd_process._paths(certificates)))
    assert taken(certificates=certificates) is not None
    files[2].write_text("another authority, which the running one has not read")
    assert taken(certificates=certificates) is None


@pytest.mark.parametrize(("owner", "named"), [("\n", r"\?"), ("12\n", "12")])
def test_a_lock_whose_owner_has_not_written_its_name_yet_is_told(
    tmp_path: Path, monkeypatch, owner: str, named: str
) -> None:
    def locked(path: Path, *, owner: str) -> None:
        raise held

    held = durable.LockHeld(tmp_path, owner)
    monkeypatch.setattr(durable, "locked", locked)
    with pytest.raises(CoordinatorError, match=rf"\(process {named}\) serves"), serving(tmp_path):
        raise AssertionError


def test_two_coordinators_do_not_serve_the_same_data(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(data):
        assert data.stat().st_mode & 0o777 == 0o700
        with pytest.raises(CoordinatorError, match=f"process {os.getpid()}"), serving(data):
            raise AssertionError
    with serving(data):
        pass


class Stream:
    """A stream of answers, each a line of JSON."""

    def __init__(self, *answers: Any) -> None:
        self.lines = [
            answer if isinstance(answer, bytes) else json.dumps(answer).encode() for answer in answers
        ]
        self.is_shut = False

    def answers(self):
        yield from self.lines

    def shutdown(self) -> None:
        self.is_shut = True


def coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def result(revision: int, *events: dict, **more: Any) -> dict:
    return {"result": {"header": {"revision": str(revision)}, "events": list(events), **more}}


def put(key: str, value: str, created: int, modified: int, lease: int = 0) -> dict:
    numbers = {"create_revision": str(created), "mod_revision": str(modified), "lease": str(lease)}
    return {"kv": {"key": coded(key), "value": coded(value), **numbers}}


def watched(*answers: Any, after: int = 10, cluster: int = 0) -> tuple[list[Any], list[str]]:
    refused: list[str] = []
    stream: Any = Stream(*answers)
    watch = KeyWatch(stream, after=after, cluster=cluster, refused=refused.append)
    return list(watch.batches()), refused


def test_a_watch_tells_changes_with_the_revision_up_to_which_it_has_told_them() -> None:
    gone = {"type": "DELETE", "kv": {"key": coded("k2"), "mod_revision": "12"}}
    batches, refused = watched(
        result(14, created=True), result(12, put("k1", "v", 3, 12, lease=7), gone), result(15), after=10
    )
    assert [batch.revision for batch in batches] == [10, 12] and not refused
    assert batches[0].changes == ()
    first, second = batches[1].changes
    assert (first.key, second.key, second.item) == ("k1", "k2", None)
    item = first.item
    assert (item.value, item.created, item.modified, item.lease) == ("v", 3, 12, 7)


def test_a_watch_whose_changes_come_in_several_answers_knows_no_more_than_came() -> None:
    gone = {"type": "DELETE", "kv": {"key": coded("k"), "mod_revision": "13"}}
    batches, _ = watched(result(40, put("k", "v", 12, 12), gone), result(40, put("k", "w", 40, 40)))
    assert [batch.revision for batch in batches] == [13, 40], "a lost connection goes on after the first"
    batches, _ = watched(result(40, put("k", "v", 12, 13), fragment=True), result(40, put("l", "w", 13, 13)))
    assert [batch.revision for batch in batches] == [12, 13], "the rest of revision 13 may get lost"


def test_a_watch_ends_where_its_history_is_gone_or_it_is_refused_or_cannot_be_understood() -> None:
    with pytest.raises(HistoryLost) as lost:
        watched(result(9))
    assert lost.value.revision == 9
    assert watched(result(10, put("k", "v", 1, 10)))[0]
    other = {"result": {"header": {"revision": "12", "cluster_id": "18000000000000000000"}, "created": True}}
    assert watched(other, cluster=18_000_000_000_000_000_000)[0]
    assert watched(result(12, created=True), cluster=5)[0], "a proxy leaves the id out"
    with pytest.raises(HistoryLost):  # it has lost its data, and has as many revisions again
        watched(other, cluster=5)
    with pytest.raises(HistoryLost) as compacted:
        watched(result(20, canceled=True, compact_revision="15"))
    assert compacted.value.revision == 0
    later = result(11, put("k", "v", 1, 11))
    assert watched(result(20, canceled=True, cancel_reason="no"), later) == ([], ["no"])
    endless = b'{"x":' + b"[" * 100_000
    for garbage in (b"{", endless, {"result": {"events": 3}}, {"error": {"message": "closing"}}):
        assert watched(garbage, later) == ([], [])


def test_bytes_of_a_watch_that_are_no_text_are_replaced_and_a_watch_that_is_stopped_shuts_its_stream() -> (
    None
):
    coded_bytes = base64.b64encode(b"a\xff").decode()
    stream = Stream(result(12, {"kv": {"key": coded_bytes, "value": coded_bytes}}))
    watch = KeyWatch(stream, after=10, refused=lambda why: None)  # type: ignore[arg-type]
    (batch,) = watch.batches()
    (change,) = batch.changes
    assert change.item is not None and (change.key, change.item.value) == ("a\ufffd", "a\ufffd")
    watch.stop()
    assert stream.is_shut


def test_lines_of_a_stream_may_come_in_pieces_and_one_without_end_ends_it(monkeypatch) -> None:
    closed: list[bool] = []

    def stream_of(*pieces: bytes) -> ResponseStream:
        response = SimpleNamespace(stream=lambda size: iter(pieces), close=lambda: closed.append(True))
        return ResponseStream(response)  # type: ignore[arg-type]

    assert list(stream_of(b'{"a"', b":1}\n\n{}", b"\n{").answers()) == [b'{"a":1}', b"{}"]
    assert closed == [True]
    monkeypatch.setattr(etcd_answers, "ANSWER_BYTES_AT_MOST", 8)
    assert list(stream_of(b"x" * 8, b"\n", b"y" * 9, b"\n").answers()) == [b"x" * 8]


@pytest.mark.parametrize(
    "error", [OSError("reset"), ValueError("closed"), urllib3.exceptions.ProtocolError("cut")]
)
def test_a_stream_that_breaks_or_is_closed_already_ends_quietly(error: Exception) -> None:
    closed: list[bool] = []

    def broken(*size: int) -> Any:
        yield b"{}\n{"
        raise error

    def shutdown() -> None:
        raise RuntimeError if isinstance(error, urllib3.exceptions.ProtocolError) else error

    response = SimpleNamespace(stream=broken, close=lambda: closed.append(True), shutdown=shutdown)
    stream = ResponseStream(response)  # type: ignore[arg-type]
    assert list(stream.answers()) == [b"{}"] and closed == [True]
    stream.shutdown()


def test_an_answer_of_too_many_bytes_or_too_late_is_given_up(monkeypatch) -> None:
    monkeypatch.setattr(gateway, "ANSWER_BYTES_AT_MOST", 8)
    ended: list[str] = []

    def response_of(*pieces: bytes) -> Any:
        left = [*pieces, b""]
        return SimpleNamespace(
            read1=lambda size: left.pop(0),
            close=lambda: ended.append("closed"),
            release_conn=lambda: ended.append("released"),
        )

    later = time.monotonic() + 60.0
    assert _content(response_of(b"1234", b"5678"), until=later) == b"12345678"
    for pieces, until, error in (((b"1234", b"56789"), later, AnswerTooLong), ((b"1",), 0.0, Lost)):
        with pytest.raises(error):
            _content(response_of(*pieces), until=until)
    assert ended == ["released", "closed", "closed"]


def test_the_endpoint_that_answered_last_is_asked_first_and_the_others_after_it_in_turn() -> None:
    made = Gateway(["http://a:1", "http://b:2", "http://c:3"])
    assert made._order() == [0, 1, 2]
    made._prefer(1)
    assert made._order() == [1, 2, 0]
    made._prefer(3)
    assert made._order() == [0, 1, 2]
    made.close()


def test_what_is_asked_of_keys_below_a_prefix_ends_with_the_first_key_beyond_it() -> None:
    assert _prefix("a/") == {"key": coded("a/"), "range_end": coded("a0")}
    assert _operation(Delete(key="a/", prefix=True)) == {"request_delete_range": _prefix("a/")}
    assert _operation(Delete(key="a/")) == {"request_delete_range": {"key": coded("a/")}}
    assert _operation(Put(key="k", value="v", lease=5)) == {
        "request_put": {"key": coded("k"), "value": coded("v"), "lease": "5"}
    }
    assert _permission("READ", "r/x") == {"permType": "READ", "key": coded("r/x")}
    assert _permission("READWRITE", "r/") == {
        "permType": "READWRITE",
        "key": coded("r/"),
        "range_end": coded("r0"),
    }
    keys = Keys("run")
    allowed = [(each["permType"], base64.b64decode(each["key"]).decode()) for each in _permissions(keys, "a")]
    assert allowed == [
        ("READ", keys.root),
        *(("READWRITE", key) for key in (keys.of_peer("a"), *keys.shared)),
    ]


def test_each_condition_asks_for_its_own_aspect() -> None:
    asked = {
        aspect: _compare(Condition(key="k", aspect=aspect, wanted=7))  # type: ignore[arg-type]
        for aspect in ("value", "created", "modified")
    }
    common = {"key": coded("k"), "result": "EQUAL"}
    assert asked["value"] == {**common, "target": "VALUE", "value": coded("7")}
    assert asked["created"] == {**common, "target": "CREATE", "create_revision": "7"}
    assert asked["modified"] == {**common, "target": "MOD", "mod_revision": "7"}


def test_a_value_is_as_long_as_etcd_takes_it() -> None:
    _operation(Put(key="k", value="v" * VALUE_BYTES_AT_MOST))
    with pytest.raises(CoordinatorError, match="more than"):
        _operation(Put(key="k", value="v" * (VALUE_BYTES_AT_MOST + 1)))
    _operation(Put(key="k", value="é" * (VALUE_BYTES_AT_MOST // 2)))
    with pytest.raises(CoordinatorError, match="more than"):
        _operation(Put(key="k", value="é" * (VALUE_BYTES_AT_MOST // 2 + 1)))


@pytest.mark.parametrize(("lease_s", "ttl_s"), [(10.0, 10), (2.1, 3), (0.2, 1)])
def test_a_lease_lasts_at_least_as_long_as_it_was_asked_for(lease_s: float, ttl_s: int) -> None:
    membership = Membership(None, Keys("r"), lease_s=lease_s, heartbeat_s=1.0)  # type: ignore[arg-type]
    assert membership._ttl_s == ttl_s and membership.lease == 0 and membership.round_trip_s == 0.0


def test_the_coordinator_is_the_recipes_before_that_of_the_environment(monkeypatch) -> None:
    monkeypatch.setenv("BLOOMERY_COORDINATOR", "http://e:1")
    assert endpoints_of("http://r:1, https://s:2,") == ("http://r:1", "https://s:2")
    assert endpoints_of("") == ("http://e:1",)
    monkeypatch.delenv("BLOOMERY_COORDINATOR")
    assert endpoints_of("") == ("http://127.0.0.1:2379",)
    assert endpoints_of("", has_certificates=True) == ("https://127.0.0.1:2379",)
    with pytest.raises(CoordinatorError, match="no URL"):
        endpoints_of("http://r:1,s:2")


def test_the_days_of_a_certificate_are_counted_to_its_last_moment() -> None:
    end = datetime.datetime(2030, 1, 3, 12, tzinfo=datetime.UTC)
    dates = CertificateDates(serial="0A", ends=end)
    assert dates.days_left(end - datetime.timedelta(hours=36)) == 1.5
    assert dates.days_left(end + datetime.timedelta(hours=12)) == -0.5
