"""An all-reduce between peers: over loopback beside gloo's and beside memcpy, or over a link of a known rate.

Over loopback (no options) it stands beside gloo in fp32, each as processes of their own, taken in turns.
With --rate-mbit and --addresses (or --namespaces too, one a member) it runs over the link that lies between
those, emulated or real, and is given as a share of the ideal, 2 (n - 1) / n * elements * 1 byte / rate,
back to back and after a pause.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
from contract import Measurement, measurement, report

KEY = bytes(32)
CALL: dict[str, Any] = {"epoch": 1, "stall_s": 60.0, "deadline_s": 600.0}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.worker:
        return work(options.worker)
    found = over_link(options) if options.rate_mbit else over_loopback(options)
    return report(found, as_json=options.json)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=16 << 20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--warm-up", type=int, default=5, help="rounds before, over a link: they learn its pace (%(default)s)"
    )
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--chunk", type=int, default=None)
    parser.add_argument("--addresses", default="", help="one a member, with commas; needs --rate-mbit")
    parser.add_argument("--namespaces", default="", help="network namespaces, one a member; needs root")
    parser.add_argument("--rate-mbit", type=float, default=None)
    parser.add_argument("--limit-mbit", type=float, default=None, help="the ring's own limit of its rate")
    parser.add_argument(
        "--pause-s", type=float, default=0.0, help="then rounds after such a pause are measured too"
    )
    parser.add_argument("--bar", type=float, default=None, help="share of the ideal, back to back")
    parser.add_argument("--bar-after-pause", type=float, default=None)
    parser.add_argument("--without-gloo", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", choices=["ring", "gloo"], help=argparse.SUPPRESS)
    return parser


def over_loopback(options: argparse.Namespace) -> list[Measurement]:
    """Ours and gloo's in turns, with a copy of the array before each."""
    ours = Group("ring", options)
    gloo = None if options.without_gloo else Group("gloo", options)
    copies, ring_s, gloo_s = [], [], []
    values, other = np.ones((2, options.elements), np.float32)
    for _ in range(options.rounds + 1):
        began = time.perf_counter()
        np.copyto(other, values)
        copies.append(time.perf_counter() - began)
        ring_s.append(ours.reduce())
        if gloo:
            gloo_s.append(gloo.reduce())
    ours.end()
    ring, copy = median(ring_s[1:]), median(copies[1:])
    beside = f"{described(options)}, memcpy {copy * 1e3:.1f} ms"
    title = "elastic_ring: loopback"
    found = [
        measurement(f"{title}, all-reduce", ring, unit="s", reference=beside),
        measurement(f"{title}, against a copy of the array", ring / copy, unit="x memcpy", reference=beside),
    ]
    if gloo:
        gloo.end()
        ratios = [theirs / mine for theirs, mine in zip(gloo_s[1:], ring_s[1:], strict=True)]
        beside += f", gloo fp32 {median(gloo_s[1:]):.3f} s"
        found.append(measurement(f"{title}, speed against gloo", median(ratios), unit="x", reference=beside))
    return found


def over_link(options: argparse.Namespace, where: str = "") -> list[Measurement]:
    """Shares of the ideal: rounds back to back, then rounds after a pause each. where: said of the link."""
    ideal_s = 2 * (options.members - 1) / options.members * options.elements / (options.rate_mbit * 125_000)
    link = f"{options.rate_mbit:g} Mbit/s{where and ', '}{where}"
    beside = f"{described(options)}, {link}, ideal {ideal_s:.3f} s"
    title = f"elastic_ring: {options.members} members, {options.elements >> 20}M, {link}"
    ours = Group("ring", options)
    for _ in range(options.warm_up):
        ours.reduce()
    runs = [("back to back", 0.0, options.bar)]
    if options.pause_s:
        runs.append((f"after {options.pause_s:g} s", options.pause_s, options.bar_after_pause))
    found = []
    for name, pause_s, bar in runs:
        times, bare = [], []
        for _ in range(options.rounds):
            bare.append(ours.send_bare(int(ideal_s * options.rate_mbit * 125_000)))
            time.sleep(pause_s)
            if not pause_s:
                ours.reduce()  # what bare sockets left in the network's queues is not this ring's
            times.append(ours.reduce())
        spread = f"{beside}, {min(times):.3f} to {max(times):.3f} s"
        limit = None if bar is None else f">= {bar}"
        share = ideal_s / median(times)
        found.append(measurement(f"{title}, {name}", share, unit="of the ideal", reference=spread, bar=limit))
        spread = f"{beside}, bare sockets {median(bare):.3f} s"
        ratio = median(bare) / median(times)
        found.append(
            measurement(f"{title}, {name}, speed of bare sockets", ratio, unit="x", reference=spread)
        )
    ours.end()
    if not options.without_gloo:
        theirs = Group("gloo", options)
        theirs.reduce()
        gloo_s = median([theirs.reduce() for _ in range(min(2, options.rounds))])
        theirs.end()
        found.append(measurement(f"{title}, gloo fp32", gloo_s, unit="s", reference=beside))
    return found


def described(options: argparse.Namespace) -> str:
    values = f"{options.elements / 1e6:.1f}M values"
    return f"{values}, {options.members} members, {options.codec}, {options.streams} streams"


class Group:
    """Members of a ring, or of a gloo group, each a process that answers a line with a line."""

    def __init__(self, kind: str, options: argparse.Namespace) -> None:
        self.count = options.members
        namespaces = options.namespaces.split(",") if options.namespaces else [""] * self.count
        addresses = options.addresses.split(",") if options.addresses else ["127.0.0.1"] * self.count
        command = [sys.executable, __file__, "--worker", kind]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(
                (["ip", "netns", "exec", space] if space else []) + command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for space in namespaces[: self.count]
        ]
        about = {
            name: getattr(options, name) for name in ("elements", "codec", "streams", "threads", "chunk")
        }
        about |= {"size": self.count, "addresses": addresses[: self.count]}
        about["limit_bytes_s"] = options.limit_mbit and options.limit_mbit * 125_000
        ports = [self.ask(index, about | {"index": index}) for index in range(self.count)]
        self.ask_all({"ports": ports})
        self.number = 0

    def ask(self, index: int, question: dict[str, Any]) -> Any:
        self._write(index, question)
        return self._read(index)

    def ask_all(self, question: dict[str, Any]) -> list[Any]:
        for index in range(self.count):
            self._write(index, question)
        return [self._read(index) for index in range(self.count)]

    def reduce(self) -> float:
        """Seconds of the slowest member."""
        self.number += 1
        return max(self.ask_all({"round": self.number}))

    def send_bare(self, size: int) -> float:
        """Seconds in which each member sends the next so many bytes over the ring's sockets, as they are."""
        return max(self.ask_all({"bare": size}))

    def end(self) -> None:
        for process in self.processes:
            process.communicate(timeout=60)

    def _write(self, index: int, question: dict[str, Any]) -> None:
        pipe = self.processes[index].stdin
        assert pipe
        pipe.write(json.dumps(question) + "\n")
        pipe.flush()

    def _read(self, index: int) -> Any:
        pipe = self.processes[index].stdout
        assert pipe
        line = pipe.readline()
        if not line:
            raise SystemExit(f"member {index} ended with {self.processes[index].wait()}")
        return json.loads(line)


def work(kind: str) -> int:
    """One member: told what to do on its standard input, a line at a time."""
    about = json.loads(sys.stdin.readline())
    values = np.random.default_rng(about["index"]).standard_normal(about["elements"], np.float32)
    reduce = (joined_ring if kind == "ring" else joined_gloo)(about, values)
    for line in sys.stdin:
        began = time.perf_counter()
        reduce(**json.loads(line))
        answer(time.perf_counter() - began)
    return 0


def answer(value: Any) -> None:
    print(json.dumps(value), flush=True)


def joined_ring(about: dict[str, Any], values: np.ndarray) -> Any:
    from bloomery.transport.connection import HopRateLimit
    from bloomery.transport.ring_all_reduce import Ring

    index, size, streams = about["index"], about["size"], about["streams"]
    with socket.create_server((about["addresses"][index], 0), backlog=streams) as server:
        answer(server.getsockname()[1])
        ports = json.loads(sys.stdin.readline())["ports"]
        following = (index + 1) % size
        sending = [
            socket.create_connection((about["addresses"][following], ports[following]))
            for _ in range(streams)
        ]
        receiving = [server.accept()[0] for _ in range(streams)]
    ring = Ring(
        index=index,
        size=size,
        next_fds=[one.fileno() for one in sending],
        previous_fds=[one.fileno() for one in receiving],
        send_keys=[KEY] * streams,
        receive_keys=[KEY] * streams,
        codec=about["codec"],
        chunk=about["chunk"],
        threads=about["threads"],
        pace=HopRateLimit(about["limit_bytes_s"]),
    )
    total = np.empty_like(values)
    answer("joined")

    def reduce(round: int = 0, bare: int = 0) -> None:
        if bare:
            exchange_bare(sending, receiving, bare)
        else:
            ring.all_reduce(values, out=total, round=round, **CALL)

    return reduce


def exchange_bare(sending: list[socket.socket], receiving: list[socket.socket], size: int) -> None:
    """What sockets alone make of it: so many bytes out and in, striped as the ring stripes its frames."""
    data, space = bytes(64 << 10), bytearray(1 << 20)
    poll, streams = select.poll(), {one.fileno(): one for one in (*sending, *receiving)}
    incoming = {one.fileno() for one in receiving}
    for one in streams:
        poll.register(one, select.POLLIN if one in incoming else select.POLLOUT)
    sent = received = 0
    while sent < size or received < size:
        for one, _ in poll.poll(60_000):
            if one in incoming and received < size:
                received += streams[one].recv_into(
                    space, min(len(space), size - received), socket.MSG_DONTWAIT
                )
            elif one not in incoming and sent < size:
                sent += streams[one].send(data[: size - sent], socket.MSG_DONTWAIT)
            else:
                poll.unregister(one)


def joined_gloo(about: dict[str, Any], values: np.ndarray) -> Any:
    import torch
    import torch.distributed as dist

    index, address = about["index"], about["addresses"][about["index"]]
    torch.set_num_threads(1)
    with socket.create_server((address, 0)) as server:
        port = server.getsockname()[1]
    answer(port)
    first = (about["addresses"][0], json.loads(sys.stdin.readline())["ports"][0])
    store = dist.TCPStore(*first, about["size"], is_master=index == 0)
    device = dist.ProcessGroupGloo.create_device(hostname=address)
    options = dist.ProcessGroupGloo._Options()
    options._devices, options._threads = [device], 2
    group = dist.ProcessGroupGloo(store, index, about["size"], options)
    tensor = torch.from_numpy(values)
    answer("joined")
    return lambda round: group.allreduce(tensor).wait()


if __name__ == "__main__":
    raise SystemExit(main())
