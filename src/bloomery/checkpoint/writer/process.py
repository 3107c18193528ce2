"""The writer process of a rank: writes to disk what the trainer staged in shared memory, and commits it.

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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bloomery.checkpoint.format.commit import (
    Part,
    abandon_part,
    commit,
    error_to_json,
    final_directory,
    part_record_path,
    publish,
    read_part_record,
    wait_for_part_record,
    write_part_record,
)
from bloomery.checkpoint.format.data_file import write_image
from bloomery.checkpoint.format.manifest import (
    INDEX,
    MANIFEST,
    FileRecord,
    read_manifest,
    without_garbage_collection,
)
from bloomery.checkpoint.format.part_progress import PROGRESS, PartProgress
from bloomery.checkpoint.format.read_back import GivenUp, read_back, read_back_index
from bloomery.checkpoint.writer.memory_replica import MemoryReplica, MemoryReplicas, write_label
from bloomery.checkpoint.writer.partner import ReplicaLimits, ReplicaServer, send_replica
from bloomery.checkpoint.writer.shared_buffer import ABANDONED, SharedBuffer
from bloomery.errors import CheckpointError, StorageError, free_bytes, no_space, storage_error

_SHARE = 1 / 128
"""The fraction of a rank's processors that its writer uses. A step slows down by more than this fraction,
because it waits for the slowest of its threads."""
_LONGEST_PAUSE_S = 0.15
"""With a few megabytes between pauses, the rate stays well above `deadlines.SLOWEST_BYTES_PER_S`."""
_POLL_URGENT_S = 0.02


class CpuThrottle:
    """Limits this process to its share of the processors, by pauses, while its work is not urgent."""

    def __init__(self, is_urgent: Callable[[], bool]) -> None:
        self._is_urgent = is_urgent
        self._share = _SHARE * processors_of_a_rank()
        self._begun_s, self._used_s = time.monotonic(), time.process_time()

    def rest(self) -> None:
        """Pause until the processor time used since the last pause is within the share again."""
        due_s = (time.process_time() - self._used_s) / self._share
        end = min(self._begun_s + due_s, time.monotonic() + _LONGEST_PAUSE_S)
        while (left_s := end - time.monotonic()) > 0 and not self._is_urgent():
            time.sleep(min(left_s, _POLL_URGENT_S))
        self._begun_s, self._used_s = time.monotonic(), time.process_time()


def processors_of_a_rank() -> float:
    """Return how many of this machine's processors each of its ranks has."""
    return len(os.sched_getaffinity(0)) / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


_DOING = "Saving a checkpoint"
_WATCH_S = 0.5
_STAGING_POLL_S = 0.0005
_NICENESS = 10
_MARGIN_BYTES = 1 << 20


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
    partial, rank = Path(order["partial"]), order["rank"]
    progress = PartProgress(tell, noted=(partial, rank) if rank else None)
    begun = time.monotonic()
    try:
        part = _part_already_written(partial, order) if order["attempt"] > 1 else None
        if part is not None and not part.files:
            return {"bytes": _bytes(order), "seconds": 0.0, "copy_failure": None}
        if part is None:
            part = _write(partial, order, buffer, progress)
            if rank == 0:
                _commit(partial, part, order, progress)
            else:
                progress.forget()
                write_part_record(partial, rank, part)
    except Exception as error:  # noqa: BLE001  — the process's edge: the trainer gets the error as the answer
        why = error_to_json(error)
        abandon_part(partial, rank, files=[file["name"] for file in order["files"]], why=why)
        return {"failure": why}
    if written is not None:
        written[order["partial"]] = part
    return {
        "bytes": _bytes(order),
        "seconds": time.monotonic() - begun,
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

    The first rank reads the manifest and the index back too. It is not known where another process wrote the
    part, and where the reading was given up.
    """
    if part is None:
        return None
    partial, throttle = Path(order["verify"]), CpuThrottle(lambda: buffer.stops_reading)
    problem = read_back_index(partial) if order["rank"] == 0 else ""
    try:
        return problem or read_back(
            partial,
            part.files,
            read=PartProgress(tell).add,
            rest=throttle.rest,
            go_on=lambda: order["to_its_end"] or not buffer.stops_reading,
        )
    except GivenUp:
        return None


def _part_already_written(partial: Path, order: Mapping[str, Any]) -> Part | None:
    """Return the part that a writer which died over this order has made durable; None to write it again.

    A part without files means that the checkpoint is committed. What a commit may already include must not be
    changed or removed. The checks come in the reverse order of a commit, which removes the part records once
    the manifest is durable, and only then renames the directory.
    """
    if order["rank"] == 0:
        if _is_whole(partial):
            publish(partial, records=_part_records(partial, order))
        if _is_whole(final_directory(partial)):
            return Part(files=(), boxes=())
        for name in (INDEX, MANIFEST):
            (partial / name).unlink(missing_ok=True)
        return None
    left = read_part_record(partial, order["rank"])
    if left is None and (_is_whole(partial) or _is_whole(final_directory(partial))):
        return Part(files=(), boxes=())
    return left


def _is_whole(directory: Path) -> bool:
    try:
        return bool(read_manifest(directory).files)
    except CheckpointError:
        return False


def _part_records(partial: Path, order: Mapping[str, Any]) -> list[Path]:
    return [part_record_path(partial, other) for other in range(1, order["world"])]


def _commit(partial: Path, part: Part, order: Mapping[str, Any], progress: PartProgress) -> None:
    until, parts = time.monotonic() + order["parts_s"], [part]
    with without_garbage_collection():
        for other in range(1, order["world"]):
            parts.append(
                wait_for_part_record(
                    partial, other, until=until, stall_s=order["stall_s"], progressed=progress.add
                )
            )
            progress.add(1)
        _refuse_lost_files(partial, parts)
        commit(
            partial,
            parts,
            time=order["time"],
            values=order["values"],
            records=_part_records(partial, order),
            **order["checkpoint"],
        )


def _refuse_lost_files(partial: Path, parts: Sequence[Part]) -> None:
    """Raise StorageError unless all files have their full size: other ranks wrote them some time ago."""
    for record in (record for part in parts for record in part.files):
        try:
            size = (partial / record.name).stat().st_size
        except OSError as error:
            raise storage_error(error, path=partial / record.name, doing=_DOING) from error
        if size != record.bytes:
            raise StorageError(
                f"{partial / record.name} has {size} bytes of the {record.bytes} that were written",
                remedy="Does something else write there? The next save is tried as usual.",
            )


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


def _write(partial: Path, order: Mapping[str, Any], buffer: SharedBuffer, progress: PartProgress) -> Part:
    """Write this rank's data files from the buffer, and return the part."""
    needed = _bytes(order) + _MARGIN_BYTES
    records: list[FileRecord] = []
    try:
        if free_bytes(partial) < needed:
            raise no_space(partial, doing=_DOING, bytes_needed=needed)
        for file in order["files"]:
            offset = file["offset"]
            image = buffer.view[offset:]

            def until_filled(bytes: int, offset: int = offset) -> None:
                _wait_until_filled(buffer, offset + bytes)

            path, throttle = partial / file["name"], CpuThrottle(lambda: buffer.is_urgent)
            records.append(
                write_image(
                    path,
                    image,
                    length=file["bytes"],
                    until_filled=until_filled,
                    rest=throttle.rest,
                    wrote=progress.add,
                    anew=order["attempt"] > 1,
                )
            )
    except OSError as error:
        raise storage_error(error, path=partial, doing=_DOING, bytes_needed=needed) from error
    return replace(Part.from_json({"files": [], "boxes": order["boxes"]}), files=tuple(records))


def _wait_until_filled(buffer: SharedBuffer, bytes: int) -> None:
    """Wait until so many bytes are staged: staging goes on while the first files are written.

    The trainer has the deadline. Raises CheckpointError where the staging failed.
    """
    while buffer.filled < bytes:
        time.sleep(_STAGING_POLL_S)
    if buffer.filled == ABANDONED:
        raise CheckpointError("the state could not be copied", remedy="The trainer's log says why.")


if __name__ == "__main__":
    main(sys.argv[1:])
