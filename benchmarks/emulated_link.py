"""Hosts on an emulated wide-area network: namespaces, between which link_emulator.cpp carries packets.

Needs root, /dev/net/tun, iproute2 and g++.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("link_emulator.cpp")
PROGRAM = Path(__file__).parents[1] / "build" / "link_emulator"


@dataclass(frozen=True)
class Hosts:
    """One namespace and one address a host."""

    namespaces: tuple[str, ...]
    addresses: tuple[str, ...]


@contextlib.contextmanager
def emulated(
    count: int,
    *,
    rate_mbit: float,
    round_trip_ms: float,
    queue_ms: float = 100,
    offload: bool = False,
    congestion_control: str = "bbr",
) -> Iterator[Hosts]:
    """So many hosts, each sending rate_mbit, with MTU 1500. Raises SystemExit where that cannot be had.

    offload: TCP segments cross a device unsplit, as they do with network cards that split and join them: a
    gigabit then takes a tenth of the processor's time. Either way the rate is that of packets of 1500 bytes.
    """
    missing = [tool for tool in ("ip", "sysctl", "g++") if not shutil.which(tool)]
    if os.geteuid() != 0 or missing or not os.access("/dev/net/tun", os.W_OK):
        raise SystemExit("emulated hosts need root, /dev/net/tun, iproute2, procps and g++")
    build()
    name = f"bw{os.getpid() % 10**8}-"  # devices have at most 15 letters
    arguments = [str(count), str(rate_mbit), str(round_trip_ms / 2), str(queue_ms), str(int(offload)), name]
    namespaces = tuple(f"bloomery-{os.getpid()}-{host}" for host in range(count))
    addresses = tuple(f"10.78.0.{host + 1}" for host in range(count))
    with contextlib.ExitStack() as stack:
        emulator = stack.enter_context(
            subprocess.Popen([PROGRAM, *arguments], stdout=subprocess.PIPE, text=True)
        )
        stack.callback(emulator.terminate)
        assert emulator.stdout
        if emulator.stdout.readline() != "ready\n":
            raise SystemExit("the emulator of a network did not begin")
        with contextlib.suppress(PermissionError):
            # It shares the cores with both ends, and what comes late through it is not the link's doing.
            os.sched_setscheduler(emulator.pid, os.SCHED_RR, os.sched_param(10))
        for host, (namespace, address) in enumerate(zip(namespaces, addresses, strict=True)):
            run("ip", "netns", "add", namespace)
            stack.callback(run, "ip", "netns", "del", namespace)
            device = f"{name}{host}"
            run("ip", "link", "set", device, "netns", namespace)
            run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", device)
            run("ip", "-n", namespace, "link", "set", device, "mtu", "1500", "up")
            run("ip", "-n", namespace, "link", "set", "lo", "up")
            setting = f"net.ipv4.tcp_congestion_control={congestion_control}"
            run("ip", "netns", "exec", namespace, "sysctl", "-qw", setting)
        stack.callback(emulator.terminate)  # before its devices go
        yield Hosts(namespaces=namespaces, addresses=addresses)


def build() -> None:
    """Compile the emulator, where it is older than its source."""
    if PROGRAM.exists() and PROGRAM.stat().st_mtime > SOURCE.stat().st_mtime:
        return
    PROGRAM.parent.mkdir(exist_ok=True)
    made = PROGRAM.with_name(f"{PROGRAM.name}.{os.getpid()}")  # others may be at it, too
    command = ["g++", "-std=c++17", "-O2", "-Wall", "-Wextra", "-o", str(made), str(SOURCE)]
    subprocess.run(command, check=True)
    made.replace(PROGRAM)


def run(*command: str) -> None:
    """Raises SystemExit with what the command said."""
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if ended.returncode:
        raise SystemExit(f"no emulated hosts: {' '.join(command)}: {ended.stderr.strip()}")
