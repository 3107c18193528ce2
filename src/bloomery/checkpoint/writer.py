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
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bloomery.checkpoint.arena import GIVEN_UP, Arena
from bloomery.checkpoint.commit import Part, commit, final_directory, publish
from bloomery.checkpoint.imagefile import write_image
from bloomery.checkpoint.leisure import Leisure
from bloomery.checkpoint.manifest import INDEX, MANIFEST, FileRecord, read_manifest
from bloomery.checkpoint.partner import Keeper, Limits, send_part
from bloomery.checkpoint.partnote import give_up, leave_part, note_of, part_left, told, wait_for_part
from bloomery.checkpoint.ramcopy import Holding, Holdings, write_label
from bloomery.errors import CheckpointError, StorageError
from bloomery.events.storage import free_bytes, no_space, storage_error

_DOING = "Saving a checkpoint"
_WATCH_S = 0.5
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
        try:
            os.write(1, json.dumps(answer).encode() + b"\n")
        except BrokenPipeError:
            return  # the trainer is gone, and nobody wants to know


def _keeper(keep: Mapping[str, Any]) -> Keeper:
    holdings = Holdings(Path(keep["root"]), Path(keep["run"]), keep["identity"])
    limits = Limits.from_json(keep["limits"])
    return Keeper(holdings, rank=keep["rank"], token=keep["token"], host=keep["host"], limits=limits)


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
        part = _part_made(partial, order) if order["attempt"] > 1 else None
        if part is not None and not part.files:
            return {"bytes": _bytes(order), "seconds": 0.0, "copy_failure": None}
        if part is None:
            part = _write(partial, order, arena)
            if rank == 0:
                _commit(partial, part, order)
            else:
                leave_part(partial, rank, part)
    except Exception as error:  # noqa: BLE001  — the edge of the process: the trainer is told
        why = told(error)
        give_up(partial, rank, files=[file["name"] for file in order["files"]], why=why)
        return {"failure": why}
    return {
        "bytes": _bytes(order),
        "seconds": time.monotonic() - begun,
        "copy_failure": _copy(part, order, arena) if "memory" in order else None,
    }


def _part_made(partial: Path, order: Mapping[str, Any]) -> Part | None:
    """Return what a writer that died over this order has made durable, None when it must be made again.

    What is already part of a commit must not be touched, let alone removed. A part without files: there is
    nothing left to do. The order of these questions is the reverse of that of a commit, which takes the notes
    away once the manifest is durable, and only then gives the directory its name.
    """
    if order["rank"] == 0:
        if _is_whole(partial):
            publish(partial, notes=_notes(partial, order))
        if _is_whole(final_directory(partial)):
            return Part(files=(), boxes=())
        for name in (INDEX, MANIFEST):
            (partial / name).unlink(missing_ok=True)
        return None
    left = part_left(partial, order["rank"])
    if left is None and (_is_whole(partial) or _is_whole(final_directory(partial))):
        return Part(files=(), boxes=())
    return left


def _is_whole(directory: Path) -> bool:
    try:
        return bool(read_manifest(directory).files)
    except CheckpointError:
        return False


def _notes(partial: Path, order: Mapping[str, Any]) -> list[Path]:
    return [note_of(partial, other) for other in range(1, order["world"])]


def _commit(partial: Path, part: Part, order: Mapping[str, Any]) -> None:
    until = time.monotonic() + order["parts_s"]
    parts = [part, *(wait_for_part(partial, other, until=until) for other in range(1, order["world"]))]
    _refuse_lost_files(partial, parts)
    notes = _notes(partial, order)
    commit(partial, parts, time=order["time"], values=order["values"], notes=notes, **order["checkpoint"])


def _refuse_lost_files(partial: Path, parts: Sequence[Part]) -> None:
    """Raise StorageError unless all files are there in full: their ranks wrote them some time ago."""
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
        values=order["values"],
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
    needed = _bytes(order) + _MARGIN_BYTES
    records: list[FileRecord] = []
    try:
        if free_bytes(partial) < needed:
            raise no_space(partial, doing=_DOING, bytes_needed=needed)
        for file in order["files"]:
            offset = file["offset"]
            image = arena.view[offset:]

            def until_filled(bytes: int, offset: int = offset) -> None:
                _wait_until_filled(arena, offset + bytes)

            path, leisure = partial / file["name"], Leisure(lambda: arena.is_hurried)
            records.append(
                write_image(
                    path,
                    image,
                    length=file["bytes"],
                    until_filled=until_filled,
                    rest=leisure.rest,
                    anew=order["attempt"] > 1,
                )
            )
    except OSError as error:
        raise storage_error(error, path=partial, doing=_DOING, bytes_needed=needed) from error
    return replace(Part.from_json({"files": [], "boxes": order["boxes"]}), files=tuple(records))


def _wait_until_filled(arena: Arena, bytes: int) -> None:
    """Wait for the staging, which goes on while the first files are written. The trainer has the deadline."""
    while arena.filled < bytes:
        time.sleep(_STAGING_POLL_S)
    if arena.filled == GIVEN_UP:
        raise CheckpointError("the state could not be copied", remedy="The trainer's log says why.")


if __name__ == "__main__":
    main(sys.argv[1:])
