"""Ring all_reduce, and ring all_gather of words, between peers over connected stream sockets.

The native library does the work (native/src/ring*); docs/notes/ring.md explains the algorithm and its
figures. `Ring` is one member's end.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from bloomery.errors import BloomeryError
from bloomery.transport.connection import DeliveryStatistics, HopRateLimit
from bloomery.transport.gradient_codec import (
    Codec,
    RingCall,
    RingOptions,
    RingReport,
    functions,
    largest_magnitude,
)

Float32 = npt.NDArray[np.float32]
Culprit = Literal["previous", "next"]

Words = npt.NDArray[np.uint32]

WORDS = "words"
"""As the codec of a ring: it hands words round as they are (`Ring.all_gather`), and adds nothing up."""
_WORDS_NUMBER = 4
KEY_BYTES = 32
LARGEST_OWN = 2.0**100
_KINDS = {
    1: "closed",
    2: "stalled",
    3: "deadline",
    4: "authentication",
    5: "garbage",
    6: "cancelled",
    7: "not finite",
    8: "closed",
}
_CULPRITS: dict[int, Culprit] = {1: "previous", 2: "next"}
_CLOSED, _FORKED, _BUSY = 1, -2, -3


class RingError(BloomeryError):
    """An all_reduce failed.

    kind: closed, stalled, deadline, authentication, garbage or cancelled; or "not finite": this member's own
    values were refused, nothing was sent, and the ring can be used again.
    culprit: the neighbour that was waited for, or that sent what was refused; None if unknown.
    """

    def __init__(self, message: str, *, kind: str, culprit: Culprit | None) -> None:
        super().__init__(message)
        self.kind = kind
        self.culprit = culprit


@dataclass(frozen=True, kw_only=True)
class ReduceResult:
    """Statistics of an all_reduce.

    limit_bytes_s: the rate limit in force; None: none.
    blocked_s: time in which data was ready to be sent and no socket accepted it, seconds.
    """

    seconds: float
    limit_bytes_s: float | None
    sent_bytes: int
    received_bytes: int
    blocked_s: float
    delivered: DeliveryStatistics


class Ring:
    """One member's end of a ring over sockets that are connected already.

    Each stream has one descriptor to the next member, one from the previous member, and a 32-byte key for
    each. The caller closes the descriptors, after `close`. All members give the same size, codec and chunk,
    and call `all_reduce` in the same order; both ends of a hop have the same number of streams. After a
    success the sockets are at a frame boundary and can be used for the next call, also of another round or
    epoch. After a failure neither the ring nor its sockets can be used again, except for the kind "not
    finite". A ring must not be used after a fork.
    """

    def __init__(
        self,
        *,
        index: int,
        size: int,
        next_fds: Sequence[int],
        previous_fds: Sequence[int],
        send_keys: Sequence[bytes],
        receive_keys: Sequence[bytes],
        codec: str,
        reduce_codec: str | None = None,
        chunk: int | None = None,
        pace: HopRateLimit | None = None,
        threads: int | None = None,
        rank: int = 0,
    ) -> None:
        """Create this member's end.

        index, size: this member's place in the ring, and how many members it has.
        codec: in which sums are sent that are complete, and, without a `reduce_codec`, partial sums too; or
            WORDS for a ring that only gathers.
        reduce_codec: in which partial sums are sent, with at least as many bytes a value.
        chunk: values per frame, a multiple of 512; None: the library's default.
        pace: the rate limit of the hop to the next member, which learns from this ring; None: a new one.
        threads: beside the calling one; None: one fewer than the cores, at most 8.
        rank: this rank within its peer, which the frames carry as their `lane`.
        """
        self._pace = pace or HopRateLimit()
        self._alone = size == 1
        self._handle: int | None = None
        self._process = os.getpid()
        self._cancelled = False
        # _call_lock is held for a whole call, so close() waits until the call has ended. _handle_lock is held
        # only while the handle is read or freed, so cancel() never waits for a call.
        self._call_lock, self._handle_lock = threading.Lock(), threading.Lock()
        number = _WORDS_NUMBER if codec == WORDS else Codec(codec).number
        if self._alone:
            return
        _check_streams(next_fds, previous_fds, send_keys, receive_keys)
        if not functions():
            raise BloomeryError(
                "the ring between peers needs the native library",
                remedy="install g++, then install bloomery again (pip install --force-reinstall --no-deps .)",
            )
        streams = len(next_fds)
        descriptors = ctypes.c_int32 * streams
        # The library copies these before it returns.
        arrays = (
            descriptors(*next_fds),
            descriptors(*previous_fds),
            b"".join(send_keys),
            b"".join(receive_keys),
        )
        options = RingOptions(
            size=ctypes.sizeof(RingOptions),
            index=index,
            members=size,
            streams=streams,
            codec=number if reduce_codec is None else Codec(reduce_codec).number,
            gather=0 if reduce_codec is None else 1 + number,
            lane=rank,
            threads=_usual_threads() if threads is None else threads,
            chunk=chunk or 0,
            next=ctypes.addressof(arrays[0]),
            previous=ctypes.addressof(arrays[1]),
            send_keys=ctypes.cast(ctypes.c_char_p(arrays[2]), ctypes.c_void_p),
            receive_keys=ctypes.cast(ctypes.c_char_p(arrays[3]), ctypes.c_void_p),
        )
        self._handle = functions()["ring_create"](ctypes.addressof(options))
        if not self._handle:
            raise ValueError(
                f"no ring: index {index} of {size}, {streams} streams, chunk {chunk}, rank {rank}"
            )

    def all_reduce(
        self,
        values: Float32,
        *,
        round: int,
        epoch: int,
        stall_s: float,
        deadline_s: float,
        grace_s: float = 0.0,
        weight: float = 1.0,
        residual: Float32 | None = None,
        out: Float32 | None = None,
    ) -> ReduceResult:
        """Replace `values` with the sum over members of weight * values.

        The result is bit-identical on all members.

        Collective over the ring: every member calls, in the same order.

        round, epoch: of the attempt; frames of another one are refused.
        stall_s: longest time without progress in either direction, seconds. deadline_s: for the whole call.
        grace_s: how much later than this one other members may call, seconds; their silence counts from then.
        residual: float32, like values. The quantization error of this member, divided by its weight, is added
            to it. A caller that adds it to its values of the next round loses nothing (error feedback).
        out: where the sum is written, so that `values` stay unchanged even after a failure; None: it is
            written into `values`, which are undefined after a failure.
        Raises RingError. Ctrl-C cancels the call.
        """
        target = values if out is None else out
        for array in (values, target) if residual is None else (values, target, residual):
            _check_array(array, values.size)
        if self._alone:
            return self._scale(values, target, weight)
        if self._process != os.getpid():
            raise RuntimeError("this ring was made in another process: rings do not survive a fork")
        self._allow(grace_s)
        limit_bytes_s = self._pace.limit_bytes_s
        call = RingCall(
            size=ctypes.sizeof(RingCall),
            weight=weight,
            values=values.ctypes.data,
            out=target.ctypes.data,
            residual=None if residual is None else residual.ctypes.data,
            count=values.size,
            round=round,
            epoch=epoch,
            stall_s=stall_s,
            deadline_s=deadline_s,
            rate_limit_bytes_s=limit_bytes_s or 0.0,
        )
        report = RingReport(size=ctypes.sizeof(RingReport))
        self._run(call, report)
        if report.kind:
            raise _error(report)
        delivered = DeliveryStatistics(
            seconds=report.seconds,
            delivered_bytes=report.delivered_bytes,
            lost_bytes=report.lost_bytes,
            best_bytes_s=report.best_bytes_s,
        )
        self._pace.learn(delivered)
        return ReduceResult(
            seconds=report.seconds,
            limit_bytes_s=limit_bytes_s,
            sent_bytes=report.sent_bytes,
            received_bytes=report.received_bytes,
            blocked_s=report.blocked_s,
            delivered=delivered,
        )

    def all_gather(
        self, words: Words, *, round: int, epoch: int, stall_s: float, deadline_s: float, grace_s: float = 0.0
    ) -> ReduceResult:
        """Fill `words`, [members, n], with each member's row, bit for bit; the own row is in its place.

        Collective over a ring of WORDS, as `all_reduce` over others. Nothing is said of what the words mean:
        whoever decodes them checks them. Raises RingError.
        """
        as_values = words.reshape(-1).view(np.float32)
        return self.all_reduce(
            as_values, round=round, epoch=epoch, stall_s=stall_s, deadline_s=deadline_s, grace_s=grace_s
        )

    def cancel(self) -> None:
        """End a running `all_reduce` and refuse later ones; any thread may call.

        The arrays are not touched afterwards.
        """
        self._cancelled = True
        if self._process != os.getpid():
            return
        with self._handle_lock:
            if self._handle is not None:
                functions()["ring_cancel"](self._handle)

    def close(self) -> None:
        """Cancel, and free the library's memory. The descriptors stay open."""
        if self._process != os.getpid() or self._handle is None:
            return
        self.cancel()
        with self._call_lock, self._handle_lock:
            handle, self._handle = self._handle, None
            if handle is not None:
                functions()["ring_destroy"](handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.close()

    def _allow(self, grace_s: float) -> None:
        with self._call_lock:
            if self._handle is not None and "ring_grace" in functions():
                functions()["ring_grace"](self._handle, grace_s)

    def _run(self, call: RingCall, report: RingReport) -> None:
        """Run the call in a thread if this is the main thread, so that signal handlers can run meanwhile."""
        if threading.current_thread() is not threading.main_thread():
            self._call(call, report)
            return
        thread = threading.Thread(target=self._call, args=(call, report), name="ring", daemon=True)
        try:
            thread.start()
            while thread.is_alive():
                thread.join(0.5)
        except BaseException:
            self.cancel()  # wherever the thread stands, it touches no array from here on
            raise

    def _call(self, call: RingCall, report: RingReport) -> None:
        with self._call_lock:
            if self._handle is None:
                report.kind = _CLOSED
            else:
                arguments = ctypes.addressof(call), ctypes.addressof(report)
                functions()["ring_all_reduce"](self._handle, *arguments)

    def _scale(self, values: Float32, target: Float32, weight: float) -> ReduceResult:
        if self._cancelled:
            raise RingError("cancelled", kind="cancelled", culprit=None)
        if not largest_magnitude(values) * weight <= LARGEST_OWN:
            raise RingError("own values are not finite, or beyond 2^100", kind="not finite", culprit=None)
        np.multiply(values, np.float32(weight), out=target)
        no_delivery = DeliveryStatistics(seconds=0.0, delivered_bytes=0, lost_bytes=0, best_bytes_s=0.0)
        return ReduceResult(
            seconds=0.0,
            limit_bytes_s=None,
            sent_bytes=0,
            received_bytes=0,
            blocked_s=0.0,
            delivered=no_delivery,
        )


def _check_streams(
    next_fds: Sequence[int],
    previous_fds: Sequence[int],
    send_keys: Sequence[bytes],
    receive_keys: Sequence[bytes],
) -> None:
    counts = {len(next_fds), len(previous_fds), len(send_keys), len(receive_keys)}
    if len(counts) != 1 or 0 in counts:
        raise ValueError("a stream is a descriptor and a key in either direction")
    if any(len(key) != KEY_BYTES for key in (*send_keys, *receive_keys)):
        raise ValueError(f"a key has {KEY_BYTES} bytes")


def _check_array(array: Float32, size: int) -> None:
    if array.dtype != np.float32 or not array.flags.c_contiguous or not array.flags.writeable:
        raise ValueError("a ring works on contiguous, writeable float32 arrays")
    if array.size != size:
        raise ValueError(f"an array of {array.size} values beside one of {size}")


def _error(report: RingReport) -> Exception:
    text = report.text.decode(errors="replace") or "this ring is closed"
    if report.kind in _KINDS:
        return RingError(text, kind=_KINDS[report.kind], culprit=_CULPRITS.get(report.culprit))
    if report.kind in (_FORKED, _BUSY):
        return RuntimeError(text)
    return ValueError(text)


def _usual_threads() -> int:
    return max(1, min(8, len(os.sched_getaffinity(0)) - 1))
