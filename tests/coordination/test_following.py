"""How a view lists a run and follows it, and how its listener and a lease's thread go on and end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.coordination.test_membership import member
from tests.coordination.test_membership_calls import Coordinator
from tests.protocol import example

from bloomery.coordination.etcd import Listing
from bloomery.coordination.etcd_watch import HistoryLost, KeyValue, WatchBatch, WatchEvent
from bloomery.coordination.membership import Membership
from bloomery.coordination.run_view import RunView, SnapshotListener
from bloomery.errors import CoordinatorAway, CoordinatorError
from bloomery.protocol.encoding import encode_text
from bloomery.protocol.keys import Keys

KEYS = Keys("r")
WITHIN_S = 60.0


def item(key: str, value: str, revision: int) -> KeyValue:
    return KeyValue(key=key, value=value, created=revision, modified=revision)


class Watch:
    """A watch that tells its batches, or raises what is among them, and then waits until it is stopped."""

    def __init__(self, told: list[Any], *, waits: bool) -> None:
        self.told, self.waits, self.stopped = told, waits, threading.Event()

    def batches(self) -> Iterator[WatchBatch]:
        for one in self.told:
            if isinstance(one, Exception):
                raise one
            yield one
        if self.waits:
            assert self.stopped.wait(WITHIN_S)

    def stop(self) -> None:
        self.stopped.set()


CLUSTER = 77


class Etcd:
    """Lists what it has; each watch tells what is next in `watches`, and the last one waits for the end."""

    def __init__(self, *watches: list[Any]) -> None:
        self.items = {
            KEYS.commits: [item(KEYS.commit(0), encode_text(example.commit(round=0, members=())), 3)],
            KEYS.peers: [item(KEYS.member("a"), encode_text(member("a")), 4)],
            KEYS.epoch: [item(KEYS.epoch, "2", 5)],
        }
        self.revision, self.away, self.cluster = 9, 0, CLUSTER
        self.listed: list[tuple[str, dict[str, Any]]] = []
        self.watches, self.watched = list(watches), list[Any]()
        self.opened: queue.Queue[Watch] = queue.Queue()

    def list(self, prefix: str, **how: Any) -> Listing:
        self.listed.append((prefix, how))
        if self.away:
            self.away -= 1
            raise CoordinatorAway("nobody answers")
        return Listing(revision=self.revision, items=tuple(self.items.get(prefix, ())), cluster=self.cluster)

    def watch(self, prefix: str, *, after: int, cluster: int, idle_s: float, deadline_s: float) -> Watch:
        assert cluster == (self.cluster if self.listed else 0)
        self.watched.append((prefix, after, idle_s, deadline_s))
        told = self.watches.pop(0) if self.watches else []
        if told and isinstance(told[0], CoordinatorAway):
            raise told[0]
        watch = Watch(told, waits=not self.watches)
        self.opened.put(watch)
        return watch


def view_of(etcd: Etcd) -> RunView:
    return RunView(etcd, KEYS, clock=lambda: 7.0, idle_s=3.0, pause_s=0.0)  # type: ignore[arg-type]


def epoch(number: int, revision: int) -> WatchBatch:
    event = WatchEvent(key=KEYS.epoch, item=item(KEYS.epoch, str(number), revision))
    return WatchBatch(revision=revision, changes=(event,))


def listing_calls(deadline_s: float) -> list[Any]:
    """Commits first: the rest is listed as of their revision, so that all of it is of one moment."""
    root = KEYS.root
    prefixes = [f"{root}{name}" for name in ("peers/", "attempt/", "shares/", "adopted", "revoked/")]
    return [
        (KEYS.commits, {"newest": 2001, "deadline_s": deadline_s}),
        *((prefix, {"revision": 9, "deadline_s": deadline_s}) for prefix in (*prefixes, KEYS.epoch)),
    ]


def test_a_run_is_listed_as_of_one_revision_and_followed_from_there() -> None:
    etcd = Etcd([WatchBatch(revision=9), epoch(3, 12), WatchBatch(revision=14)], [epoch(4, 15)])
    view = view_of(etcd)
    first = view.start(deadline_s=11.0)
    assert etcd.listed == listing_calls(11.0)
    assert (set(first.members), first.round) == ({"a"}, 1) and first.epoch >= 2
    snapshot = first
    while snapshot.epoch < 4:
        snapshot = view.changed(snapshot.version, timeout_s=WITHIN_S)
    assert (snapshot.revision, snapshot.version) == (15, 3) and snapshot.commit is not None
    assert etcd.watched == [(KEYS.root, 9, 3.0, 3.0), (KEYS.root, 14, 3.0, 3.0)]
    view.close()
    assert view._thread is not None and not view._thread.is_alive()


def test_a_view_whose_history_is_gone_lists_again_until_it_can_and_one_that_is_away_watches_again(
    caplog,
) -> None:
    etcd = Etcd([HistoryLost(4)], [CoordinatorAway("silent")], [])
    view = view_of(etcd)
    view.start()
    etcd.opened.get(timeout=WITHIN_S)
    etcd.opened.get(timeout=WITHIN_S)
    assert [after for _, after, _, _ in etcd.watched] == [9, 9, 9]
    assert etcd.listed == listing_calls(30.0) + listing_calls(3.0)
    assert "history is no longer available (the coordinator stands at revision 4)" in caplog.text
    assert "the coordinator does not answer: silent" in caplog.text
    view.close()
    etcd = Etcd()
    again = view_of(etcd)
    etcd.away = 2
    assert again._list_until_there(5) == 9 and len(etcd.listed) == 2 + 7
    again._ended.set()
    assert again._list_until_there(5) == 5


def test_a_view_follows_the_cluster_that_it_listed_last() -> None:
    etcd = Etcd([HistoryLost(4)], [])
    view = view_of(etcd)
    view._list(deadline_s=1.0)
    etcd.cluster = CLUSTER + 1  # it lost its data and began anew
    view._list(deadline_s=1.0)
    with pytest.raises(HistoryLost):
        view._watch_once(9)
    assert len(etcd.watched) == 1


def test_a_view_pauses_before_it_lists_or_watches_again() -> None:
    etcd, waits = Etcd([WatchBatch(revision=9)], []), list[float]()
    view: Any = RunView(etcd, KEYS, idle_s=3.0, pause_s=1e6)  # type: ignore[arg-type]
    view._ended.wait = waits.append
    etcd.away = 2
    assert view._list_until_there(5) == 9 and waits == [1e6, 1e6]
    waits.clear()
    assert view._watch_once(9) == 9
    assert len(waits) == 1 and 9e5 < waits[0] <= 1e6


def test_a_view_knows_what_its_peer_remembered() -> None:
    record = example.recovery_record(epoch=77)
    view = RunView(Etcd(), KEYS, remembered=record)  # type: ignore[arg-type]
    view._list(deadline_s=1.0)
    assert view.snapshot.highest == 77 and view.snapshot.forgotten


def test_a_listener_rests_nine_times_as_long_as_the_last_look_took() -> None:
    waits: list[float] = []
    view: Any = SimpleNamespace(wait=lambda since, *, timeout_s: since + 1)
    listener: Any = SnapshotListener(view, wake=lambda: None, failed=lambda error: None)

    def wait(seconds: float) -> None:
        waits.append(seconds)
        listener.close()

    listener._ended.wait = wait
    listener.note_cost(2.0)
    listener._bring(4)
    assert waits == [18.0]


def test_a_watch_that_was_opened_while_its_view_closed_is_stopped() -> None:
    etcd = Etcd()
    view = view_of(etcd)
    view._ended.set()
    assert view._watch_once(9) == 9
    assert etcd.opened.get_nowait().stopped.is_set()


def test_whoever_waits_is_told_of_the_error_that_ended_the_view() -> None:
    view, told = view_of(Etcd()), queue.Queue[CoordinatorError]()
    view._list(deadline_s=1.0)

    def wait() -> None:
        try:
            view.wait(99, timeout_s=10 * WITHIN_S)
        except CoordinatorError as error:
            told.put(error)

    threading.Thread(target=wait, daemon=True).start()
    view._fail(CoordinatorError("refused"))
    assert told.get(timeout=WITHIN_S).message == "refused"
    with pytest.raises(CoordinatorError, match="refused"):
        _ = view.snapshot


def test_a_batch_without_changes_makes_no_version_but_is_heard() -> None:
    view = view_of(Etcd())
    view._list(deadline_s=1.0)
    version = view.wait(0, timeout_s=0.0)
    assert view._take(WatchBatch(revision=20), 9) == 20 and view._take(WatchBatch(revision=5), 20) == 20
    assert view.wait(version, timeout_s=-1.0) == version and view.snapshot.revision == 20
    view.wake()
    assert view.wait(version, timeout_s=0.0) == version + 1


def test_whoever_waits_for_a_later_version_is_woken_by_it_and_by_the_end_of_the_view() -> None:
    view, versions = view_of(Etcd()), queue.Queue[int]()
    view._list(deadline_s=1.0)
    version = view.wait(0, timeout_s=0.0)

    def wait(since: int) -> None:
        versions.put(view.wait(since, timeout_s=1e6))

    for happens, expected in ((view.wake, version + 1), (view.close, version + 1)):
        waiting = threading.Event()
        view._news.wait_for = _noting(view._news.wait_for, waiting)  # type: ignore[method-assign]
        threading.Thread(target=wait, args=(version,), daemon=True).start()
        assert waiting.wait(WITHIN_S)
        happens()
        assert versions.get(timeout=WITHIN_S) == expected
        version = expected


def _noting(wait_for: Any, begun: threading.Event) -> Any:
    """Tell when somebody waits; whoever then takes the lock of the condition comes after that."""

    def noted(predicate: Any, timeout: float) -> Any:
        begun.set()
        return wait_for(predicate, timeout)

    return noted


def test_a_run_that_is_listed_again_is_what_is_there_then() -> None:
    etcd = Etcd()
    view = view_of(etcd)
    view._list(deadline_s=1.0)
    assert set(view.snapshot.members) == {"a"}
    del etcd.items[KEYS.peers]
    etcd.revision = 12
    assert view._list(deadline_s=1.0) == 12
    assert view.snapshot.members == {} and view.snapshot.revision == 12


def test_a_listener_wakes_for_each_later_version_alone_and_ends_with_the_error_of_its_view() -> None:
    versions: list[Any] = [4, 5, 5, 7, CoordinatorError("refused")]
    asked, woken, failed = list[Any](), list[int](), queue.Queue[CoordinatorError]()

    class View:
        def wait(self, since: int, *, timeout_s: float) -> int:
            asked.append((since, timeout_s))
            told = versions.pop(0)
            if isinstance(told, CoordinatorError):
                raise told
            return int(told)

    view: Any = View()
    listener = SnapshotListener(view, wake=lambda: woken.append(1), failed=failed.put)
    listener.start(4)
    assert failed.get(timeout=WITHIN_S).message == "refused"
    assert asked == [(4, 60.0), (4, 60.0), (5, 60.0), (5, 60.0), (7, 60.0)] and len(woken) == 2
    listener.close()
    assert listener._ended.is_set()


def leases() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lease"]


def test_one_thread_renews_a_lease_from_the_listing_of_a_peer_until_it_leaves() -> None:
    before = set(leases())
    membership = Membership(Coordinator(), KEYS, lease_s=9.0, heartbeat_s=600.0)  # type: ignore[arg-type]
    membership.join(member("a"))
    (thread,) = set(leases()) - before
    membership.join(member("a"))
    assert set(leases()) - before == {thread} and thread.daemon
    with membership as entered:
        assert entered is membership
    assert not thread.is_alive()
    membership.join(member("a"))
    (again,) = set(leases()) - before
    membership.withdraw()
    assert not again.is_alive()
