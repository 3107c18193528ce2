"""What a ring asks of the library, and what it makes of the library's report."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bloomery.transport import ring_all_reduce
from bloomery.transport.connection import DeliveryStatistics, HopRateLimit
from bloomery.transport.gradient_codec import RingCall, RingOptions, RingReport
from bloomery.transport.ring_all_reduce import ReduceResult, Ring, RingError, _usual_threads

KEYS = [b"s" * 32, b"t" * 32]


class Library:
    """Stands for the native library: notes calls, and reports what a test wants."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, grace: bool = False, **report: Any) -> None:
        self.report, self.options, self.calls = report, dict[str, Any](), list[Any]()
        names = ["ring_create", "ring_all_reduce", "ring_cancel", "ring_destroy"]
        names += ["ring_grace"] if grace else []
        monkeypatch.setattr(
            ring_all_reduce, "functions", lambda: {name: getattr(self, name) for name in names}
        )

    def ring_create(self, address: int) -> int:
        options = RingOptions.from_address(address)
        self.options = {name: getattr(options, name) for name, _ in RingOptions._fields_}
        of_streams = ctypes.c_int32 * options.streams
        for name in ("next", "previous"):
            self.options[name] = list(of_streams.from_address(getattr(options, name)))
        for name in ("send_keys", "receive_keys"):
            self.options[name] = ctypes.string_at(getattr(options, name), 32 * options.streams)
        return 99

    def ring_all_reduce(self, handle: int, call_at: int, report_at: int) -> None:
        call, report = RingCall.from_address(call_at), RingReport.from_address(report_at)
        self.calls.append((handle, {name: getattr(call, name) for name, _ in RingCall._fields_}))
        assert report.size == ctypes.sizeof(RingReport)
        for name, value in self.report.items():
            setattr(report, name, value)

    def ring_grace(self, handle: int, seconds: float) -> None:
        self.calls.append(("grace", handle, seconds))

    def ring_cancel(self, handle: int) -> None:
        self.calls.append(("cancel", handle))

    def ring_destroy(self, handle: int) -> None:
        self.calls.append(("destroy", handle))


@pytest.fixture
def ring_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes rings, and closes them before the real library is back."""
    rings: list[Ring] = []

    def make(**more: Any) -> Ring:
        usual = dict(index=1, size=3, next_fds=[5, 6], previous_fds=[7, 8], codec="int4", threads=2)
        rings.append(Ring(**usual | dict(send_keys=KEYS, receive_keys=KEYS[::-1]) | more))  # type: ignore[arg-type]
        return rings[-1]

    yield make
    for ring in rings:
        ring.close()


@pytest.mark.parametrize(
    ("more", "changed"),
    [
        ({}, {}),
        ({"reduce_codec": "bf16"}, {"codec": 1, "gather": 4}),
        ({"codec": "words"}, {"codec": 4}),
        ({"threads": 0}, {"threads": 0}),
        ({"codec": "fp32", "chunk": 1024, "rank": 5}, {"codec": 0, "chunk": 1024, "lane": 5}),
        ({"codec": "int8", "reduce_codec": "int8"}, {"codec": 2, "gather": 3}),
    ],
)
def test_a_ring_is_made_with_its_place_its_connections_and_its_codecs(
    ring_of, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], changed: dict[str, Any]
) -> None:
    library = Library(monkeypatch)
    ring = ring_of(**more)
    usual = dict(
        size=ctypes.sizeof(RingOptions), index=1, members=3, streams=2, codec=3, lane=0, threads=2, gather=0,
        chunk=0, next=[5, 6], previous=[7, 8], send_keys=b"s" * 32 + b"t" * 32,
        receive_keys=b"t" * 32 + b"s" * 32,
    )  # fmt: skip
    assert library.options == usual | changed
    ring.close()
    assert library.calls == [("cancel", 99), ("destroy", 99)]
    ring.close()
    ring.cancel()
    assert len(library.calls) == 2


def test_a_call_and_what_it_reports_are_passed_on_whole(ring_of, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(
        monkeypatch, seconds=2.0, sent_bytes=300, received_bytes=200, blocked_s=0.5,
        delivered_bytes=290, lost_bytes=29, best_bytes_s=160.0,
    )  # fmt: skip
    pace = HopRateLimit(1e6)
    with ring_of(pace=pace) as ring:
        values, out, residual = (np.zeros(7, np.float32) for _ in range(3))
        call = dict(round=3, epoch=11, stall_s=4.0, deadline_s=90.0)
        result = ring.all_reduce(values, **call, weight=0.25, residual=residual, out=out)  # type: ignore[arg-type]
        delivered = DeliveryStatistics(seconds=2.0, delivered_bytes=290, lost_bytes=29, best_bytes_s=160.0)
        assert result == ReduceResult(
            seconds=2.0, limit_bytes_s=1e6, sent_bytes=300, received_bytes=200, blocked_s=0.5,
            delivered=delivered,
        )  # fmt: skip
        whole = call | dict(
            size=ctypes.sizeof(RingCall), weight=0.25, count=7, values=values.ctypes.data,
            out=out.ctypes.data, residual=residual.ctypes.data, rate_limit_bytes_s=1e6,
        )  # fmt: skip
        assert library.calls == [(99, whole)]
        assert pace.limit_bytes_s == pytest.approx(1.1 * 160.0), "it has learnt from the losses"
        result = ring.all_reduce(values, **call)  # type: ignore[arg-type]
        assert result.limit_bytes_s == pytest.approx(176.0)
        assert library.calls[1][1] | {"rate_limit_bytes_s": 0.0} == whole | dict(
            weight=1.0, out=values.ctypes.data, residual=None, rate_limit_bytes_s=0.0
        )
    assert library.calls[2:] == [("cancel", 99), ("destroy", 99)]


def test_words_are_gathered_as_they_are(ring_of, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(monkeypatch)
    ring = ring_of(codec="words")
    words = np.zeros((3, 5), np.uint32)
    ring.all_gather(words, round=3, epoch=11, stall_s=4.0, deadline_s=90.0)
    ((_, call),) = library.calls
    assert (call["values"], call["out"], call["count"]) == (words.ctypes.data, words.ctypes.data, 15)
    assert (call["round"], call["epoch"], call["stall_s"], call["deadline_s"]) == (3, 11, 4.0, 90.0)
    assert (call["weight"], call["residual"], call["rate_limit_bytes_s"]) == (1.0, None, 0.0)


@pytest.mark.parametrize(
    ("kind", "culprit", "expected"),
    [
        (1, 1, ("closed", "previous")),
        (2, 2, ("stalled", "next")),
        (3, 0, ("deadline", None)),
        (4, 1, ("authentication", "previous")),
        (5, 1, ("garbage", "previous")),
        (6, 0, ("cancelled", None)),
        (7, 0, ("not finite", None)),
        (8, 2, ("closed", "next")),
        (-2, 0, RuntimeError),
        (-3, 0, RuntimeError),
        (-1, 0, ValueError),
        (-4, 0, ValueError),
    ],
)
def test_each_kind_of_failure_is_told_by_its_name_and_its_side(
    ring_of, monkeypatch: pytest.MonkeyPatch, kind: int, culprit: int, expected: Any
) -> None:
    Library(monkeypatch, kind=kind, culprit=culprit, text=b"in words", lost_bytes=10**9, best_bytes_s=1.0)
    pace = HopRateLimit()
    ring = ring_of(pace=pace)
    with pytest.raises((RingError, RuntimeError, ValueError)) as failed:
        ring.all_reduce(np.zeros(3, np.float32), round=1, epoch=1, stall_s=1.0, deadline_s=1.0)
    assert str(failed.value).startswith("in words")
    if isinstance(expected, tuple):
        assert isinstance(failed.value, RingError)
        assert (failed.value.kind, failed.value.culprit) == expected
    else:
        assert type(failed.value) is expected
    assert pace.limit_bytes_s is None, "a ring that failed teaches nothing"


def test_a_ring_that_is_closed_says_so_and_calls_nothing(ring_of, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(monkeypatch)
    ring = ring_of()
    ring.close()
    library.calls.clear()
    with pytest.raises(RingError, match="this ring is closed") as failed:
        ring.all_reduce(np.zeros(3, np.float32), round=1, epoch=1, stall_s=1.0, deadline_s=1.0)
    assert failed.value.kind == "closed" and library.calls == []


def test_a_ring_of_one_says_what_it_did_and_is_cancelled_like_others() -> None:
    ring = Ring(index=0, size=1, next_fds=[], previous_fds=[], send_keys=[], receive_keys=[], codec="fp32")
    call = dict(round=0, epoch=0, stall_s=1.0, deadline_s=1.0)
    values, out = np.array([2.0, -4.0], np.float32), np.zeros(2, np.float32)
    result = ring.all_reduce(values, **call, weight=0.5, out=out)  # type: ignore[arg-type]
    nothing = DeliveryStatistics(seconds=0.0, delivered_bytes=0, lost_bytes=0, best_bytes_s=0.0)
    assert result == ReduceResult(
        seconds=0.0, limit_bytes_s=None, sent_bytes=0, received_bytes=0, blocked_s=0.0, delivered=nothing
    )
    assert values.tolist() == [2.0, -4.0] and out.tolist() == [1.0, -2.0]
    edge = np.array([2.0**100], np.float32)
    ring.all_reduce(edge, **call)  # type: ignore[arg-type]
    with pytest.raises(RingError, match=r"own values are not finite, or beyond 2\^100"):
        ring.all_reduce(edge, **call, weight=1.01)  # type: ignore[arg-type]
    ring.cancel()
    with pytest.raises(RingError) as cancelled:
        ring.all_reduce(values, **call)  # type: ignore[arg-type]
    assert cancelled.value.kind == "cancelled"


def test_the_main_thread_leaves_the_call_to_another_one_so_that_signals_are_handled(
    ring_of,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library, threads = Library(monkeypatch), list[bool]()
    called = library.ring_all_reduce
    library.ring_all_reduce = lambda *given: (  # type: ignore[method-assign,assignment]
        threads.append(threading.current_thread() is threading.main_thread()),
        called(*given),
    )
    ring = ring_of()
    ring.all_reduce(np.zeros(3, np.float32), round=1, epoch=1, stall_s=1.0, deadline_s=1.0)
    assert threads == [False]


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (3, 2), (9, 8), (64, 8)])
def test_a_ring_uses_the_cores_beside_the_calling_thread_up_to_eight(
    ring_of, monkeypatch: pytest.MonkeyPatch, cores: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert _usual_threads() == threads
    library = Library(monkeypatch)
    ring_of(threads=None)
    assert library.options["threads"] == threads


def test_others_may_begin_a_gathering_as_much_later_as_a_sum(
    ring_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library(monkeypatch, grace=True)
    ring = ring_of(codec="words")
    call = dict(round=3, epoch=11, stall_s=4.0, deadline_s=90.0)
    ring.all_gather(np.zeros((3, 5), np.uint32), **call, grace_s=2.5)  # type: ignore[arg-type]
    ring.all_reduce(np.zeros(5, np.float32), **call, grace_s=3.5)  # type: ignore[arg-type]
    ring.all_reduce(np.zeros(5, np.float32), **call)  # type: ignore[arg-type]
    assert library.calls[::2] == [("grace", 99, 2.5), ("grace", 99, 3.5), ("grace", 99, 0.0)]


def test_an_interrupt_cancels_the_call_that_it_leaves_behind(
    ring_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library(monkeypatch)

    class Thread:
        def __init__(self, **given: Any) -> None:
            assert given["daemon"]

        def start(self) -> None:
            """Begin the call, which takes for ever."""

        def is_alive(self) -> bool:
            return True

        def join(self, timeout_s: float) -> None:
            raise KeyboardInterrupt

    ring = ring_of()
    main = threading.current_thread()
    stand_in = SimpleNamespace(Thread=Thread, current_thread=lambda: main, main_thread=lambda: main)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(ring_all_reduce, "threading", stand_in)
        ring.all_reduce(np.zeros(3, np.float32), round=1, epoch=1, stall_s=1.0, deadline_s=1.0)
    assert library.calls == [("cancel", 99)]
