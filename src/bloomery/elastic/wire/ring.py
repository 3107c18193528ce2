"""One member's end of a ring over connected stream sockets. The work is native: see docs/notes/ring.md."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from bloomery.elastic.wire.codec import Codec, largest_magnitude
from bloomery.elastic.wire.kernels import RingCall, RingOptions, RingReport, functions
from bloomery.elastic.wire.pace import Delivered, Pace
from bloomery.errors import BloomeryError

Float32 = npt.NDArray[np.float32]
Culprit = Literal["previous", "next"]

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
    """An all-reduce that did not happen.

    kind: closed, stalled, deadline, authentication, garbage, cancelled; or "not finite": own values were
    refused, nothing was sent, and the ring can be used again. culprit: the neighbour waited for, or that
    sent it.
    """

    def __init__(self, message: str, *, kind: str, culprit: Culprit | None) -> None:
        super().__init__(message)
        self.kind = kind
        self.culprit = culprit


@dataclass(frozen=True, kw_only=True)
class ReduceResult:
    """How an all-reduce went. blocked_s: time in which something was to be sent and no socket took it."""

    seconds: float
    limit_bytes_s: float | None
    sent_bytes: int
    received_bytes: int
    blocked_s: float
    delivered: Delivered


class Ring:
    """One member's end of a ring over connected stream sockets. No names, no dialling.

    Each stream is a descriptor to the next member, one from the previous, and a 32-byte key for each; they
    stay the caller's to close, after `close`. All members name the same size, codec and chunk, and call
    `all_reduce` in the same order; both ends of a hop have equally many streams. After a success the
    sockets stand at a frame's boundary, and serve for the next call, also in another round or epoch. After
    a failure the ring is of no more use, and neither are its sockets, save for the kind "not finite". Not
    to be used after a fork.
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
        chunk: int | None = None,
        pace: Pace | None = None,
        threads: int | None = None,
        lane: int = 0,
    ) -> None:
        """chunk: values a frame, a multiple of 512. threads: beside the calling one; usually a core fewer.

        pace: of the hop to the next member, which learns from this ring; usually a new one without a limit.
        """
        self._pace = pace or Pace()
        self._alone = size == 1
        self._handle: int | None = None
        self._process = os.getpid()
        self._cancelled = False
        self._in_use, self._in_hand = (
            threading.Lock(),
            threading.Lock(),
        )  # by a call; while the handle is passed on
        kind = Codec(codec)
        if self._alone:
            return
        _check(next_fds, previous_fds, send_keys, receive_keys)
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
            codec=kind.number,
            lane=lane,
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
                f"no ring: index {index} of {size}, {streams} streams, chunk {chunk}, lane {lane}"
            )

    def all_reduce(
        self,
        values: Float32,
        *,
        round: int,
        epoch: int,
        stall_s: float,
        deadline_s: float,
        weight: float = 1.0,
        residual: Float32 | None = None,
        out: Float32 | None = None,
    ) -> ReduceResult:
        """Replace `values` with the sum over members of weight * values, equal to the bit on all of them.

        Collective over the ring. With `out` the sum goes there, and `values` stay as they are, whatever
        happens; without it a failure leaves them undefined. residual += what quantising here lost, over the
        weight: added to the values of the next round it is made up for (error feedback), so nothing is lost
        but by members of weight 0. stall_s: how long nothing may come, or be taken. Raises RingError.
        Ctrl-C cancels.
        """
        target = values if out is None else out
        for one in (values, target) if residual is None else (values, target, residual):
            _check_array(one, values.size)
        if self._alone:
            return self._scale(values, target, weight)
        if self._process != os.getpid():
            raise RuntimeError("this ring was made in another process: rings do not survive a fork")
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
        delivered = Delivered(
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

    def cancel(self) -> None:
        """End a running `all_reduce`, refuse later ones; from any thread. Then nothing touches the arrays."""
        self._cancelled = True
        if self._process != os.getpid():
            return
        with self._in_hand:
            if self._handle is not None:
                functions()["ring_cancel"](self._handle)

    def close(self) -> None:
        """Cancel, and free what the library holds. The descriptors stay open."""
        if self._process != os.getpid() or self._handle is None:
            return
        self.cancel()
        with self._in_use, self._in_hand:
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

    def _run(self, call: RingCall, report: RingReport) -> None:
        """Call where a signal's handler can run meanwhile: a main thread waits for another, in turns."""
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
        with self._in_use:
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
        nothing = Delivered(seconds=0.0, delivered_bytes=0, lost_bytes=0, best_bytes_s=0.0)
        return ReduceResult(
            seconds=0.0, limit_bytes_s=None, sent_bytes=0, received_bytes=0, blocked_s=0.0, delivered=nothing
        )


def _check(
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
