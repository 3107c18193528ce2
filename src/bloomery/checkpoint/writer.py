"""The writer: a process beside each rank, which makes checkpoints of what was staged in shared memory.

It is spawned, never forked, and loads no torch. Orders come as JSON lines on its standard input, answers go
to its standard output. It ends when its trainer does: what is not committed by then is not.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bloomery.checkpoint.arena import GIVEN_UP, Arena
from bloomery.checkpoint.commit import Part, commit
from bloomery.checkpoint.imagefile import write_image
from bloomery.checkpoint.manifest import FileRecord
from bloomery.checkpoint.partner import Keeper, send_part
from bloomery.checkpoint.ramcopy import Holding, Holdings, write_label
from bloomery.errors import BloomeryError, CheckpointError, StorageError
from bloomery.events.storage import free_bytes, no_space, storage_error

_DOING = "Saving a checkpoint"
_WATCH_S = 0.5
_POLL_S = 0.01
_STAGING_POLL_S = 0.0005
_NICENESS = 10
_MARGIN_BYTES = 1 << 20


def main(arguments: list[str]) -> None:
    """Serve one trainer. arguments: the file descriptor and the size of each arena, in turn."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # they are the trainer's, who still needs its writer then
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    pairs = zip(arguments[::2], arguments[1::2], strict=True)
    arenas = [Arena(int(file), bytes=int(size)) for file, size in pairs]
    orders: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_listen, args=(orders, os.getppid()), name="listen", daemon=True).start()
    while True:
        order = orders.get()
        if "keep" in order:
            answer: dict[str, Any] = {"port": _keeper(order["keep"]).port}
        else:
            answer = _answer(order, arenas[order["arena"]])
        os.write(1, json.dumps(answer).encode() + b"\n")


def _keeper(keep: Mapping[str, Any]) -> Keeper:
    holdings = Holdings(Path(keep["root"]), Path(keep["run"]), keep["identity"])
    return Keeper(holdings, rank=keep["rank"], token=keep["token"], host=keep["host"])


def _listen(orders: queue.Queue[dict[str, Any]], parent: int) -> None:
    """Pass orders on; end this process when nobody can give any more."""
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


def _answer(order: Mapping[str, Any], arena: Arena) -> dict[str, Any]:
    """Carry out an order and return what became of it."""
    partial, rank = Path(order["partial"]), order["rank"]
    begun = time.monotonic()
    try:
        part = _write(partial, order, arena)
        written_s = time.monotonic() - begun
        if rank == 0:
            parts = [part, *(_part_of(partial, other, order) for other in range(1, order["world"]))]
            commit(partial, parts, time=order["time"], **order["checkpoint"])
        else:
            _leave(partial, rank, {"part": part.to_json()})
    except Exception as error:  # noqa: BLE001  — the edge of the process: the trainer is told
        told = _told(error)
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        else:
            _clear(partial, order)
            with contextlib.suppress(OSError):
                _leave(partial, rank, {"failure": told})
        return {"failure": told}
    seconds = time.monotonic() - begun
    return {
        "bytes": sum(file.bytes for file in part.files),
        "written_s": written_s,
        "seconds": seconds,
        "copy_failure": _copy(part, order, arena) if "memory" in order else None,
    }


def _copy(part: Part, order: Mapping[str, Any], arena: Arena) -> str | None:
    """Say that the arena holds this part, and have the partner keep it; return what was wrong with that."""
    memory, about = order["memory"], order["checkpoint"]
    holding = Holding(
        path=Path(memory["slot"]),
        step=about["step"],
        incarnation=about["incarnation"],
        rank=order["rank"],
        world=order["world"],
        time=order["time"],
        part=part,
        offsets={file["name"]: file["offset"] for file in order["files"]},
        values=about["values"],
        about=about["about"],
    )
    try:
        write_label(holding)
        if memory["partner"] is not None:
            host, port = memory["partner"]
            length = max((file["offset"] + file["bytes"] for file in order["files"]), default=0)
            send_part((host, port), memory["token"], holding, arena.view[:length])
    except OSError as error:
        return f"{error}"
    return None


def _write(partial: Path, order: Mapping[str, Any], arena: Arena) -> Part:
    """Write this rank's files."""
    needed = sum(file["bytes"] for file in order["files"]) + _MARGIN_BYTES
    records: list[FileRecord] = []
    try:
        if free_bytes(partial) < needed:
            raise no_space(partial, doing=_DOING, bytes_needed=needed)
        for file in order["files"]:
            offset = file["offset"]
            image = arena.view[offset:]

            def until_filled(bytes: int, offset: int = offset) -> None:
                _wait_until_filled(arena, offset + bytes)

            path = partial / file["name"]
            records.append(write_image(path, image, length=file["bytes"], until_filled=until_filled))
    except OSError as error:
        raise storage_error(error, path=partial, doing=_DOING, bytes_needed=needed) from error
    return replace(Part.from_json({"files": [], "boxes": order["boxes"]}), files=tuple(records))


def _wait_until_filled(arena: Arena, bytes: int) -> None:
    """Wait for the staging, which goes on while the first files are written. The trainer has the deadline."""
    while arena.filled < bytes:
        time.sleep(_STAGING_POLL_S)
    if arena.filled == GIVEN_UP:
        raise CheckpointError("the state could not be copied", remedy="The trainer's log says why.")


def _part_of(partial: Path, rank: int, order: Mapping[str, Any]) -> Part:
    """Wait until another rank has written its part, and take what it left. Raises StorageError."""
    path = partial / _name_of(rank)
    deadline = time.monotonic() + order["deadline_s"]
    while not path.exists():
        if not partial.exists():
            raise StorageError(f"{partial} has vanished", remedy="Is the disk still mounted?")
        if time.monotonic() > deadline:
            raise StorageError(
                f"{_DOING} was given up: rank {rank} has not written its part of {partial.name} "
                f"after {order['deadline_s']:.0f} s",
                remedy="Look at that rank's log and its disk; the next save is tried as usual.",
            )
        time.sleep(_POLL_S)
    content = json.loads(path.read_bytes())
    path.unlink()
    if "failure" in content:
        failure = content["failure"]
        raise StorageError(f"rank {rank}: {failure['message']}", remedy=failure["remedy"])
    return Part.from_json(content["part"])


def _leave(partial: Path, rank: int, content: Mapping[str, Any]) -> None:
    """Leave what the committing rank waits for, all of it at once."""
    path = partial / _name_of(rank)
    path.with_suffix(".new").write_text(json.dumps(content))
    path.with_suffix(".new").rename(path)


def _clear(partial: Path, order: Mapping[str, Any]) -> None:
    """Make room again: what this rank wrote of a save that failed."""
    for file in order["files"]:
        with contextlib.suppress(OSError):
            (partial / file["name"]).unlink(missing_ok=True)


def _name_of(rank: int) -> str:
    return f"part-r{rank:05d}.json"


def _told(error: Exception) -> dict[str, str]:
    if isinstance(error, BloomeryError):
        kind = "storage" if isinstance(error, StorageError) else "checkpoint"
        return {"kind": kind, "message": error.message, "remedy": error.remedy}
    if isinstance(error, OSError):
        return {"kind": "storage", "message": str(error), "remedy": "Look at the disk (dmesg, df)."}
    import traceback

    text = "".join(traceback.format_exception(error))
    return {"kind": "checkpoint", "message": f"the writer failed:\n{text}", "remedy": "Please report this."}


if __name__ == "__main__":
    main(sys.argv[1:])
