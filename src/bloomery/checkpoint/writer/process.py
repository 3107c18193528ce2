"""The writer process of a rank: writes, verifies and replicates what the trainer staged in shared memory.

That of rank 0 also commits the checkpoint once all ranks have written.

It is spawned, never forked, and does not load torch. Orders come as JSON lines on its standard input, and
answers go to its standard output. It ends when its trainer does; what is not committed then never will be. It
pauses between writes, so that the training keeps the processors (`CpuThrottle`).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bloomery.checkpoint.format.commit import Part, error_to_json
from bloomery.checkpoint.format.deadlines import PROGRESS, PartProgress
from bloomery.checkpoint.format.verified_reader import GivenUp
from bloomery.checkpoint.writer.memory_replica import MemoryReplica, MemoryReplicas, write_label
from bloomery.checkpoint.writer.part_place import CpuThrottle, part_writer_for
from bloomery.checkpoint.writer.partner import ReplicaLimits, ReplicaServer, send_replica
from bloomery.checkpoint.writer.shared_buffer import SharedBuffer

_WATCH_S = 0.5
_NICENESS = 10


def main(arguments: list[str]) -> None:
    """Carry out the orders of one trainer. arguments: file descriptor and size of each buffer, in turn."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the trainer handles these, and still needs its writer then
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    pairs = zip(arguments[::2], arguments[1::2], strict=True)
    buffers = [SharedBuffer(int(file), bytes=int(size)) for file, size in pairs]
    orders: queue.Queue[dict[str, Any]] = queue.Queue()
    written: dict[str, Part] = {}
    threading.Thread(target=_listen, args=(orders, os.getppid()), name="listen", daemon=True).start()
    while True:
        order = orders.get()
        if "replica_server" in order:
            answer: dict[str, Any] = {"port": _replica_server(order["replica_server"]).port}
        elif "verify" in order:
            part = written.pop(order["verify"], None)
            answer = {"problem": _read_back(part, order, buffers[order["buffer"]], tell=_tell_progress)}
        else:
            written.clear()  # what was written before is read back by now, or not at all
            answer = _answer(order, buffers[order["buffer"]], tell=_tell_progress, written=written)
        try:
            os.write(1, json.dumps(answer).encode() + b"\n")
        except BrokenPipeError:
            return  # the trainer is gone


def _tell_progress(count: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # `_listen` ends this process
        os.write(1, json.dumps({PROGRESS: count}).encode() + b"\n")


def _ignore(count: int) -> None:
    """Nobody waits for signs of progress."""


def _replica_server(settings: Mapping[str, Any]) -> ReplicaServer:
    replicas = MemoryReplicas(Path(settings["root"]), Path(settings["run"]), settings["identity"])
    limits = ReplicaLimits.from_json(settings["limits"])
    return ReplicaServer(
        replicas, rank=settings["rank"], token=settings["token"], host=settings["host"], limits=limits
    )


def _listen(orders: queue.Queue[dict[str, Any]], parent: int) -> None:
    """Put orders into the queue; end this process when the trainer has closed the pipe or is gone."""
    buffered = b""
    while os.getppid() == parent:
        if not select.select([0], [], [], _WATCH_S)[0]:
            continue
        received = os.read(0, 1 << 20)
        if not received:
            break
        *lines, buffered = (buffered + received).split(b"\n")
        for line in lines:
            orders.put(json.loads(line))
    os._exit(0)


def _answer(
    order: Mapping[str, Any],
    buffer: SharedBuffer,
    *,
    tell: Callable[[int], None] = _ignore,
    written: dict[str, Part] | None = None,
) -> dict[str, Any]:
    """Carry out an order and return the answer, which holds `failure` where it failed.

    tell: called with a growing number while there is progress, at most once a second.
    written: gets the part that is written, by the directory.
    """
    place, rank = part_writer_for(order), order["rank"]
    progress = place.progress(rank, tell)
    try:
        part = place.written_before(order) if order["attempt"] > 1 else None
        if part is not None and not part.files:
            return {"bytes": _bytes(order), "copy_failure": None}
        if part is None:
            part = place.write(order, buffer, progress)
            if rank == 0:
                place.commit(part, order, progress)
            else:
                place.record(rank, part)
    except Exception as error:  # noqa: BLE001  — the process's edge: the trainer gets the error as the answer
        why = error_to_json(error)
        place.abandon(rank, files=[file["name"] for file in order["files"]], why=why)
        return {"failure": why}
    if written is not None:
        written[order["partial"]] = part
    return {
        "bytes": _bytes(order),
        "copy_failure": _keep_replicas(part, order, buffer) if "memory" in order else None,
    }


def _read_back(
    part: Part | None,
    order: Mapping[str, Any],
    buffer: SharedBuffer,
    *,
    tell: Callable[[int], None] = _ignore,
) -> str | None:
    """Return what is wrong with the files of a part; "" for nothing, None where that is not known.

    It is not known where another process wrote the part, and where the reading was given up.
    """
    if part is None:
        return None
    place, throttle = (
        part_writer_for({**order, "partial": order["verify"]}),
        CpuThrottle(lambda: buffer.stops_reading),
    )
    try:
        return place.read_back(
            part,
            order["rank"],
            read=PartProgress(tell).add,
            rest=throttle.rest,
            go_on=lambda: order["to_its_end"] or not buffer.stops_reading,
        )
    except GivenUp:
        return None


def _bytes(order: Mapping[str, Any]) -> int:
    return sum(file["bytes"] for file in order["files"])


def _keep_replicas(part: Part, order: Mapping[str, Any], buffer: SharedBuffer) -> str | None:
    """Label the buffer as a replica of this part, and send the part to the partner.

    Returns the error as a text; None where all went well. The checkpoint on disk does not depend on it.
    """
    memory, about = order["memory"], order["checkpoint"]
    replica = MemoryReplica(
        path=Path(memory["slot"]),
        step=about["step"],
        incarnation=about["incarnation"],
        rank=order["rank"],
        world=order["world"],
        time=order["time"],
        part=part,
        offsets={file["name"]: file["offset"] for file in order["files"]},
        values=order["values"],
        about=about["about"],
    )
    try:
        write_label(replica)
        if memory["partner"] is not None:
            host, port = memory["partner"]
            length = max((file["offset"] + file["bytes"] for file in order["files"]), default=0)
            send_replica((host, port), memory["token"], replica, buffer.view[:length])
    except OSError as error:
        return f"{error}"
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
