"""Strangers at every port of a run between peers: what 2,000 connections a minute to each cost a round.

Real agents with certificates, a coordinator, connections and rings on this machine; the ranks are NumPy's. A
program opens connections to the ring port and the state port of each peer and to the coordinator: idle ones,
garbage, half a TLS hello, and whole hellos without a certificate. It holds each until the other end
closes it. Rounds without strangers and with them alternate, so that the machine's load cancels out.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from contract import Measurement, measurement, report
from elastic import CommitClock
from tests.agent.crew import Crew

from bloomery.coordination.certificates import init_certificates
from bloomery.coordination.etcd_process import start_single
from bloomery.protocol.encoding import decode
from bloomery.protocol.records import Member

PEERS = ("a", "b", "c")
PER_MINUTE = 2_000
HELD_AT_MOST = 400
"""Connections that the strangers hold at once to one port; then the oldest one is closed."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=20.0, help="of each part")
    options.add_argument("--parts", type=int, default=3, help="of either kind")
    options.add_argument("--attack", help=argparse.SUPPRESS)
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args(arguments)
    if chosen.attack:
        return attack(json.loads(chosen.attack))
    with tempfile.TemporaryDirectory() as place:
        found = strangers(Path(place), seconds=chosen.seconds, parts=chosen.parts)
    return report(found, as_json=chosen.json)


def strangers(place: Path, *, seconds: float, parts: int) -> list[Measurement]:
    """Rounds of three peers, with strangers and without, in turns."""
    init_certificates(place, run="strangers", peers=PEERS)
    server = start_single(place / "etcd")
    try:
        with Crew(place, server.endpoint, "strangers", peers=len(PEERS)) as crew:
            for name in PEERS:
                bundle = str(place / "strangers" / name)
                crew.start(name, elements=1_000_000, step_s=0.1, certificates=bundle)
            clock = CommitClock(server.endpoint, "strangers")
            crew.until_committed(*PEERS, more=3)
            targets = [server.endpoint.removeprefix("http://"), *_ports(crew)]
            rounds: dict[str, list[float]] = {"alone": [], "strangers": []}
            told = {"opened": 0, "ended by the other end": 0}
            for part in range(2 * parts):
                what = ("alone", "strangers")[part % 2]
                attacker = _attacker(targets) if what == "strangers" else None
                began = time.monotonic()
                time.sleep(seconds)
                times = [at for at, commit in clock.seen if at > began]
                rounds[what] += [later - earlier for earlier, later in pairwise(times)]
                if attacker is not None:
                    attacker.terminate()
                    for kind, count in json.loads(attacker.communicate()[0]).items():
                        told[kind] += count
            members = {len(commit.members) for at, commit in clock.seen}
            crew.stop()
            crew.check_accounts()
    finally:
        server.stop()
    ratio = median(rounds["strangers"]) / median(rounds["alone"])
    per_port = 60.0 * told["opened"] / len(targets) / (parts * seconds)
    beside = f"{len(rounds['strangers'])} rounds of {median(rounds['strangers']):.3f} s with them, "
    beside += f"{len(rounds['alone'])} of {median(rounds['alone']):.3f} s without; {len(targets)} ports"
    return [
        measurement(
            "elastic_strangers: a round with strangers at every port, beside one without",
            ratio,
            unit="times",
            reference=beside,
            bar="<= 1.1",
        ),
        measurement(
            "elastic_strangers: connections a minute to each port",
            per_port,
            unit="connections",
            reference=f"{told['ended by the other end']} of {told['opened']} were ended by the other end",
            bar=f">= {0.95 * PER_MINUTE:.0f}",
        ),
        measurement(
            "elastic_strangers: fewest members of a commit",
            min(members - {0}),
            unit="members",
            reference=f"{len(clock.seen)} commits; every sample counted once",
            bar=f">= {len(PEERS)}",
        ),
    ]


def _ports(crew: Crew) -> list[str]:
    """The ring port and the state port of each peer."""
    ports = []
    for name in PEERS:
        stored = crew.etcd.get(crew.keys.member(name))
        assert stored is not None
        member = decode(stored.value, Member)
        ports += [*member.addresses, *(url.partition("://")[2] for url in member.serves)]
    return ports


def _attacker(targets: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__)), "--attack", json.dumps(list(targets))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def attack(targets: Sequence[str]) -> int:
    """Open connections at an even pace until SIGTERM; then say how many, and how many the other end ended."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: ended.set())
    held: dict[str, deque[socket.socket]] = {target: deque() for target in targets}
    chance, opened, closed = random.Random(1), 0, 0
    hello = _client_hello()
    pace_s = 60.0 / PER_MINUTE / len(targets)
    began = time.monotonic()
    while not ended.is_set():
        target = targets[opened % len(targets)]
        host, _, port = target.rpartition(":")
        with suppress(OSError):
            connection = socket.create_connection((host, int(port)), timeout=1.0)
            words = (b"", b"GET / HTTP/1.0\r\n", chance.randbytes(300), hello[:100], hello)
            connection.settimeout(0.0)
            with suppress(OSError):
                connection.send(words[opened % len(words)])
            held[target].append(connection)
            if len(held[target]) > HELD_AT_MOST:
                closed += _is_ended(held[target].popleft())
        opened += 1
        time.sleep(max(0.0, began + opened * pace_s - time.monotonic()))
    closed += sum(_is_ended(connection) for connections in held.values() for connection in connections)
    print(json.dumps({"opened": opened, "ended by the other end": closed}))
    return 0


def _is_ended(connection: socket.socket) -> bool:
    """Whether the other end has closed it; this end is closed in any case."""
    with connection:
        try:
            while content := connection.recv(4096):
                del content
            return True
        except BlockingIOError:
            return False
        except OSError:
            return True


def _client_hello() -> bytes:
    """The first bytes of a TLS connection."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    tls = context.wrap_bio(incoming, outgoing)
    with suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


if __name__ == "__main__":
    sys.exit(main())
