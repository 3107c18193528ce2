"""What the client asks of etcd's gateway, and what it makes of the answers; without an etcd."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from bloomery.coordination import etcd as etcd_module
from bloomery.coordination.etcd import Condition, Delete, Etcd, LeaseGone, Listing, Put, TransactionResult
from bloomery.coordination.etcd_answers import AnswerTooLong, EtcdRefused
from bloomery.coordination.etcd_watch import KeyValue, WatchBatch
from bloomery.coordination.gateway import OutcomeUnknown
from bloomery.errors import CoordinatorAway, CoordinatorError


def coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


class Stream:
    def __init__(self, *lines: bytes) -> None:
        self.lines = lines

    def answers(self) -> Any:
        yield from self.lines


class FakeGateway:
    """Gives the answers that it has, or raises them, and notes what it was asked."""

    def __init__(self, endpoints: Any, access: Any) -> None:
        self.endpoints, self.access = tuple(endpoints), access
        self.asked: list[tuple[str, Any, float, bool]] = []
        self.answers: list[Any] = []
        self.notes: list[Any] = []

    def call(self, path: str, body: Any, *, deadline_s: float, repeatable: bool = True) -> Any:
        self.asked.append((path, body, deadline_s, repeatable))
        answer = self.answers.pop(0) if self.answers else {}
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stream(self, path: str, body: Any, *, deadline_s: float, idle_s: float) -> Stream:
        self.notes.append((path, body, deadline_s, idle_s))
        return Stream(b'{"result": {"header": {"revision": "9"}, "canceled": true, "cancel_reason": "no"}}')

    def stream_refused(self, reason: str) -> None:
        self.notes.append(("refused", reason))

    def load_certificate(self, certificate: Any, key: Any) -> None:
        self.notes.append(("certificate", certificate, key))

    def close(self) -> None:
        self.notes.append("closed")


@pytest.fixture
def etcd(monkeypatch) -> Etcd:
    monkeypatch.setattr(etcd_module, "Gateway", FakeGateway)
    return Etcd(["http://a:1"], "access", deadline_s=7.0)  # type: ignore[arg-type]


def gateway_of(etcd: Etcd, *answers: Any) -> Any:
    gateway: Any = etcd._gateway
    gateway.answers = list(answers)
    return gateway


HEADER = {"header": {"revision": "44"}}
ROW = {
    "key": coded("k"),
    "value": coded("v"),
    "create_revision": "3",
    "mod_revision": "5",
    "lease": "77",
}
ITEM = KeyValue(key="k", value="v", created=3, modified=5, lease=77)
BELOW_K = {"key": coded("k/"), "range_end": coded("k0")}


@pytest.mark.parametrize(
    ("ask", "answer", "path", "body", "result"),
    [
        (lambda e: e.get("k"), {**HEADER, "kvs": [ROW]}, "kv/range", {"key": coded("k")}, ITEM),
        (lambda e: e.get("k"), HEADER, "kv/range", {"key": coded("k")}, None),
        (
            lambda e: e.list("k/"),
            {**HEADER, "kvs": [ROW, {"key": coded("l")}]},
            "kv/range",
            {**BELOW_K, "revision": "0", "keys_only": False, "limit": "256"},
            Listing(revision=44, items=(ITEM, KeyValue(key="l", value="", created=0, modified=0))),
        ),
        (
            lambda e: e.list("k/", revision=12, newest=3, keys_only=True),
            HEADER,
            "kv/range",
            {
                **BELOW_K,
                "revision": "12",
                "keys_only": True,
                "limit": "3",
                "sort_order": "DESCEND",
                "sort_target": "KEY",
            },
            Listing(revision=12, items=()),
        ),
        (
            lambda e: e.put("k", "v", lease=77),
            HEADER,
            "kv/put",
            {"key": coded("k"), "value": coded("v"), "lease": "77"},
            44,
        ),
        (
            lambda e: e.put("k", "v"),
            HEADER,
            "kv/put",
            {"key": coded("k"), "value": coded("v"), "lease": "0"},
            44,
        ),
        (lambda e: e.delete("k"), {}, "kv/deleterange", {"key": coded("k")}, None),
        (lambda e: e.delete("k/", prefix=True), {}, "kv/deleterange", BELOW_K, None),
        (lambda e: e.grant(12), {"ID": "77"}, "lease/grant", {"TTL": "12"}, 77),
        (lambda e: e.keep_alive(77), {"result": {"TTL": "1"}}, "lease/keepalive", {"ID": "77"}, True),
        (lambda e: e.keep_alive(77), {"result": {}}, "lease/keepalive", {"ID": "77"}, False),
        (lambda e: e.revoke(77), {}, "lease/revoke", {"ID": "77"}, None),
        (lambda e: e.compact(9), {}, "kv/compaction", {"revision": "9"}, None),
        (
            lambda e: e.client_urls(),
            {"members": [{"clientURLs": ["http://a:1", "http://b:1"]}, {}, {"clientURLs": ["http://c:1"]}]},
            "cluster/member/list",
            {},
            ("http://a:1", "http://b:1", "http://c:1"),
        ),
        (lambda e: e.call("auth/x", {"a": 1}), {"b": 2}, "auth/x", {"a": 1}, {"b": 2}),
    ],
)
def test_each_call_asks_for_what_it_says_and_returns_what_was_answered(
    etcd: Etcd, ask, answer, path, body, result
) -> None:
    gateway = gateway_of(etcd, answer)
    assert ask(etcd) == result
    assert gateway.asked == [(path, body, 7.0, True)]


@pytest.mark.parametrize(
    "ask",
    [
        lambda e: e.get("k", deadline_s=2.0),
        lambda e: e.list("k/", deadline_s=2.0),
        lambda e: e.put("k", "v", deadline_s=2.0),
        lambda e: e.delete("k", deadline_s=2.0),
        lambda e: e.transact([], [], deadline_s=2.0),
        lambda e: e.grant(1, deadline_s=2.0),
        lambda e: e.keep_alive(1, deadline_s=2.0),
        lambda e: e.revoke(1, deadline_s=2.0),
        lambda e: e.compact(1, deadline_s=2.0),
        lambda e: e.call("x", {}, deadline_s=2.0),
    ],
)
def test_a_deadline_that_a_call_names_counts_for_that_call(etcd: Etcd, ask) -> None:
    gateway = gateway_of(etcd, {**HEADER, "result": {"TTL": "1"}})
    ask(etcd)
    assert gateway.asked[0][2] == 2.0


def test_a_transaction_is_sent_once_with_its_conditions_and_operations(etcd: Etcd) -> None:
    gateway = gateway_of(etcd, {"succeeded": True}, {"succeeded": False}, {}, OutcomeUnknown("lost"))
    conditions = [Condition(key="a", aspect="created", wanted=0)]
    operations = [Put(key="k", value="v"), Delete(key="k/", prefix=True)]
    results = [etcd.transact(conditions, operations) for _ in range(4)]
    assert results == [
        TransactionResult.DONE,
        TransactionResult.REFUSED,
        TransactionResult.REFUSED,
        TransactionResult.UNKNOWN,
    ]
    body = {
        "compare": [{"key": coded("a"), "result": "EQUAL", "target": "CREATE", "create_revision": "0"}],
        "success": [
            {"request_put": {"key": coded("k"), "value": coded("v"), "lease": "0"}},
            {"request_delete_range": BELOW_K},
        ],
    }
    assert gateway.asked == [("kv/txn", body, 7.0, False)] * 4


def test_what_is_put_once_is_not_put_again_where_it_lies_on_its_lease_but_outdated_keys_go(
    etcd: Etcd,
) -> None:
    gateway = gateway_of(etcd)
    etcd.put_once("k", "v", lease=77, delete=["old"])
    ((path, body, _, is_repeatable),) = gateway.asked
    delete = {"request_delete_range": {"key": coded("old")}}
    put = {"request_put": {"key": coded("k"), "value": coded("v"), "lease": "77"}}
    assert (path, is_repeatable) == ("kv/txn", True)
    assert body == {
        "compare": [
            {"key": coded("k"), "result": "EQUAL", "target": "VALUE", "value": coded("v")},
            {"key": coded("k"), "result": "EQUAL", "target": "LEASE", "lease": "77"},
        ],
        "success": [delete],
        "failure": [put, delete],
    }


@pytest.mark.parametrize(
    ("message", "code", "is_gone"),
    [
        ("requested lease not found", 5, True),
        ("requested lease not found", 9, False),
        ("user name not found", 5, False),
    ],
)
def test_only_a_lease_that_is_not_found_is_told_as_one_that_is_gone(
    etcd: Etcd, message: str, code: int, is_gone: bool
) -> None:
    def refusal() -> EtcdRefused:
        return EtcdRefused(message, code=code)

    gateway_of(etcd, refusal(), refusal())
    with pytest.raises(CoordinatorError) as told:
        etcd.put("k", "v", lease=77)
    assert isinstance(told.value, LeaseGone) is is_gone and told.value.message == message
    if is_gone:
        etcd.revoke(77)
    else:
        with pytest.raises(EtcdRefused):
            etcd.revoke(77)


@pytest.mark.parametrize(
    ("ask", "answer", "named"),
    [
        (lambda e: e.get("k"), [], "kv/range"),
        (lambda e: e.get("k"), {**HEADER, "kvs": {}}, "a listing"),
        (lambda e: e.get("k"), {**HEADER, "kvs": [5]}, "a listing"),
        (lambda e: e.get("k"), {**HEADER, "kvs": [{"key": "?"}]}, "a value"),
        (lambda e: e.get("k"), {**HEADER, "kvs": [{"key": 5}]}, "a value"),
        (lambda e: e.get("k"), {**HEADER, "kvs": [{**ROW, "lease": "x"}]}, "lease"),
        (lambda e: e.get("k"), {}, "an answer"),
        (lambda e: e.put("k", "v"), {"header": {"revision": []}}, "revision"),
        (lambda e: e.keep_alive(1), {}, "a lease's renewal"),
        (lambda e: e.grant(1), {"ID": None}, "ID"),
        (lambda e: e.client_urls(), {"members": [{"clientURLs": [5]}]}, "the members"),
        (lambda e: e.client_urls(), {"members": [{"clientURLs": "x"}]}, "the members"),
    ],
)
def test_an_answer_that_makes_no_sense_is_told_with_what_it_is_about(etcd: Etcd, ask, answer, named) -> None:
    gateway_of(etcd, answer)
    with pytest.raises(CoordinatorAway) as told:
        ask(etcd)
    assert told.value.message == f"the coordinator's answer about {named} cannot be understood"


def test_bytes_that_are_no_text_are_replaced(etcd: Etcd) -> None:
    coded_bytes = base64.b64encode(b"a\xff").decode()
    gateway_of(etcd, {**HEADER, "kvs": [{**ROW, "key": coded_bytes, "value": coded_bytes}]})
    item = etcd.get("k")
    assert item is not None and (item.key, item.value) == ("a\ufffd", "a\ufffd")


def test_a_watch_begins_after_the_revision_that_is_known(etcd: Etcd) -> None:
    gateway = gateway_of(etcd)
    body = {"create_request": {**BELOW_K, "start_revision": "9", "fragment": True}}
    for limits, expected in (({}, (7.0, 5.0)), ({"deadline_s": 2.0, "idle_s": 3.0}, (2.0, 3.0))):
        watch = etcd.watch("k/", after=8, **limits)
        assert gateway.notes.pop() == ("watch", body, *expected)
    assert list(watch.batches()) == list[WatchBatch]()
    assert gateway.notes == [("refused", "no")]


def test_a_client_is_of_its_endpoints_and_access_and_is_closed_at_its_end(etcd: Etcd) -> None:
    gateway = gateway_of(etcd)
    assert etcd.endpoints == ("http://a:1",) and gateway.access == "access"
    with etcd as entered:
        assert entered is etcd
        etcd.load_certificate("certificate", "key")  # type: ignore[arg-type]
    assert gateway.notes == [("certificate", "certificate", "key"), "closed"]
    default = Etcd(["http://a:1"])
    assert default._deadline_s == 5.0


def test_a_listing_is_read_in_pages_of_one_revision_and_smaller_ones_where_one_is_too_long(
    etcd: Etcd,
) -> None:
    odd = base64.b64encode(b"\xff").decode()
    pages = [{**HEADER, "more": True, "kvs": [{"key": odd}]}, AnswerTooLong(), {"header": {"revision": "60"}}]
    gateway = gateway_of(etcd, *pages)
    assert etcd.list("k/").revision == 44
    after = base64.b64encode(b"\xff\0").decode()
    asked = [(body["key"], body["revision"], body["limit"]) for _, body, _, _ in gateway.asked]
    assert asked == [(coded("k/"), "0", "256"), (after, "44", "256"), (after, "44", "32")]

    gateway = gateway_of(etcd, *[AnswerTooLong()] * 4)
    with pytest.raises(AnswerTooLong):
        etcd.list("k/")
    two = {**HEADER, "more": True, "kvs": [{"key": coded("k/9")}, {"key": coded("k/8")}]}
    gateway = gateway_of(etcd, AnswerTooLong(), two, {**HEADER, "more": True, "kvs": [{"key": coded("k/7")}]})
    gateway.asked.clear()
    assert [item.key for item in etcd.list("k/", newest=3).items] == ["k/9", "k/8", "k/7"]
    asked = [(body["range_end"], body["limit"]) for _, body, _, _ in gateway.asked]
    assert asked == [(coded("k0"), "3"), (coded("k0"), "3"), (coded("k/8"), "1")]


def test_a_revision_that_is_compacted_while_it_is_read_is_no_refusal(
    etcd: Etcd,
) -> None:
    gateway_of(etcd, EtcdRefused("required revision has been compacted", code=11))
    with pytest.raises(CoordinatorAway, match="compacted, while it was read"):
        etcd.list("k/", revision=3)
