"""Waits on the host for a device, with a deadline: its stream may wait for a rank that never comes.

A collective of NCCL is queued on a stream and returns at once. Where another rank is gone the stream stands
still, and whoever then copies a number to the host blocks in a call that no time-out covers.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Protocol

import torch

from bloomery import torch_private
from bloomery.errors import RankLost
from bloomery.events.timeouts import COLLECTIVE_TIMEOUT_S, wait_until

log = logging.getLogger(__name__)

_RECORD_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""The variables that say where NCCL's watchdog writes what its flight recorder holds, new name and old."""


class DeviceEvent(Protocol):
    """A place in a stream of a device. torch's events have this method."""

    def query(self) -> bool:
        """Return whether the device has done all that was queued before it."""
        ...


def wait_for_device(device: torch.device, *, within_s: float = COLLECTIVE_TIMEOUT_S) -> None:
    """Return once the device has done what was queued on the current stream; at once on a CPU.

    Call it before anything that makes the host wait for the device. Raises RankLost after `within_s` seconds:
    nothing that a rank computes by itself takes as long.
    """
    if device.type != "cuda":
        return
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    wait_for_event(event, within_s=within_s)


def wait_for_event(event: DeviceEvent, *, within_s: float = COLLECTIVE_TIMEOUT_S) -> None:
    """Return once the device has done what was queued before an event, on whichever stream.

    Raises RankLost after `within_s` seconds.
    """
    if not wait_until(event.query, within_s=within_s):
        _write_flight_record()
        raise RankLost(
            f"A collective timed out: this rank's device has waited {within_s:.0f} s for another rank.",
            remedy="Its message, if any, says why. The same command goes on from the newest checkpoint.",
        )


def _write_flight_record() -> None:
    """Write what NCCL's watchdog would write at its own deadline, which comes later."""
    prefix = next(filter(None, map(os.environ.get, _RECORD_PREFIXES)), None)
    if prefix is None:
        return
    path = Path(f"{prefix}{os.environ.get('RANK', '0')}")
    try:
        path.write_bytes(torch_private.flight_record())
    except OSError:
        log.exception("what the flight recorder holds could not be written to %s", path)
