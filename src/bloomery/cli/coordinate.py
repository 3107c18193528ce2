"""`bloomery coordinate`: the coordinator of a run between peers: an etcd, its certificates, its state."""

from __future__ import annotations

import signal
import subprocess
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from bloomery.cli.arguments import parser
from bloomery.cli.coordinate_status import show
from bloomery.elastic.control.access import accounts_in, apply_access, root_access
from bloomery.elastic.control.adoption import adopt
from bloomery.elastic.control.bundle import ACCOUNT, read_bundle
from bloomery.elastic.control.certificates import init_certificates, server_certificates
from bloomery.elastic.control.endpoints import endpoints_of
from bloomery.elastic.control.etcd import Etcd
from bloomery.elastic.control.gateway import Access
from bloomery.elastic.control.keys import Keys, is_name, name_mistake
from bloomery.elastic.control.orphan import serving
from bloomery.elastic.control.server import Server, find_etcd, start_single, take_over, version_of
from bloomery.elastic.links.sockets import split_address
from bloomery.elastic.links.trust import is_loopback
from bloomery.errors import ConfigError, CoordinatorError

if TYPE_CHECKING:
    from bloomery.errors import Mistake

EXAMPLES = """\
bloomery coordinate                                one etcd on this machine, for peers on this machine
bloomery coordinate --init-certs certs --run night --peers oslo,lyon --hosts 203.0.113.7
                                                   certificates, and a bundle for each peer
bloomery coordinate --certificates certs --listen 0.0.0.0:2379
                                                   the coordinator that lets these peers in
bloomery coordinate --status night                 members, round, epoch (--json for programs)
bloomery coordinate --adopt night                  after its data was lost: go on from what the peers remember
bloomery coordinate --certificates certs --endpoints https://a:2379,https://b:2379 --grant
                                                   make an etcd of three that runs already know the peers
"""

DEFAULT_LISTEN = "127.0.0.1:2379"
_CONSISTENT = (3, 5, 3)


def run(arguments: list[str]) -> int:
    """Start a coordinator and stay until it is ended; or do one of the other things and end."""
    options = _parser().parse_args(arguments)
    _check_names(options)
    if options.init_certs is not None:
        return _init_certificates(options)
    if options.grant:
        return _grant(options)
    if options.status is not None:
        with _client(options) as etcd:
            return show(etcd, Keys(options.status), as_json=options.json)
    if options.adopt is not None:
        return _adopt(options)
    return _serve(options)


def _parser() -> ArgumentParser:
    options = parser(
        "coordinate",
        "Starts the coordinator of runs between peers, an etcd of one member, and stays. Peers find one\n"
        "another through it and decide rounds by it; no tensor passes it. When it is away peers go on for a\n"
        "while and then wait; when it is back they go on. What it knows lies in --data and survives\n"
        "restarts. In production run an etcd of three members, 3.5.6 or later, and name its endpoints in\n"
        "elastic.coordinator.",
        examples=EXAMPLES,
    )
    options.add_argument(
        "--data", type=Path, default=Path("coordinator"), help="directory of its data (default: coordinator)"
    )
    options.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help=f"where peers find it (default {DEFAULT_LISTEN}; port 0: any that is free)",
    )
    options.add_argument(
        "--certificates", type=Path, metavar="DIR", help="what --init-certs made, or a peer's bundle"
    )
    options.add_argument("--init-certs", type=Path, metavar="DIR", help="make certificates and bundles there")
    options.add_argument("--run", help="the run whose peers get bundles, with --init-certs")
    options.add_argument("--peers", metavar="A,B,…", help="their names, with --init-certs")
    options.add_argument(
        "--hosts", metavar="HOST,…", default="", help="names and addresses that peers dial, with --init-certs"
    )
    options.add_argument("--grant", action="store_true", help="make a running etcd know the peers")
    options.add_argument(
        "--endpoints", help="of a running etcd; default BLOOMERY_COORDINATOR, or the one on this machine"
    )
    options.add_argument("--status", metavar="RUN", help="show a run's members, round and epoch")
    options.add_argument("--adopt", metavar="RUN", help="restore a run from what its peers remember")
    options.add_argument("--json", action="store_true", help="with --status: one JSON object")
    return options


def _check_names(options: Namespace) -> None:
    mistakes: list[Mistake] = []
    for option in ("run", "status", "adopt"):
        value = getattr(options, option)
        if value is not None and not is_name(value):
            mistakes.append(name_mistake(f"--{option}", value, "command line"))
    for peer in _listed(options.peers or ""):
        if not is_name(peer):
            mistakes.append(name_mistake("--peers", peer, "command line"))
    if mistakes:
        raise ConfigError(mistakes, of="the command")


def _init_certificates(options: Namespace) -> int:
    if options.run is None or not options.peers:
        raise CoordinatorError(
            "--init-certs wants the run and its peers", remedy="Add --run RUN --peers NAME,NAME,…"
        )
    peers = _listed(options.peers)
    issued = init_certificates(
        options.init_certs, run=options.run, peers=peers, hosts=_listed(options.hosts) or ("127.0.0.1",)
    )
    for bundle in issued.bundles:
        print(f"made    {bundle}")
    if not issued.bundles:
        print(f"every peer has its bundle already, in {options.init_certs / options.run}")
    print(
        f"\nCopy each peer's directory to its machine, and nothing else, and set\n"
        f"  elastic.certificates=…/{peers[0]}   (or BLOOMERY_CERTIFICATES)\n"
        f"Then start: bloomery coordinate --certificates {options.init_certs} --listen HOST:2379"
    )
    return 0


def _grant(options: Namespace) -> int:
    if options.certificates is None:
        raise CoordinatorError("--grant wants --certificates DIR", remedy="Make them with --init-certs.")
    endpoints = endpoints_of(options.endpoints or "")
    count = apply_access(endpoints, root_access(options.certificates), accounts_in(options.certificates))
    print(f"{', '.join(endpoints)}: {count} peer{'s' if count != 1 else ''} may come in")
    return 0


def _adopt(options: Namespace) -> int:
    with _client(options) as etcd:
        adopted = adopt(etcd, Keys(options.adopt))
    if adopted.round < 0:
        print(f"{options.adopt}: epochs go on at {adopted.epoch}; no peer remembers a commit")
    else:
        print(
            f"{options.adopt}: goes on after round {adopted.round}, epoch {adopted.epoch}, as remembered by "
            f"{', '.join(adopted.witnesses)}"
        )
    return 0


def _client(options: Namespace) -> Etcd:
    return Etcd(endpoints_of(options.endpoints or ""), _access(options.certificates))


def _access(directory: Path | None) -> Access:
    if directory is None:
        return Access()
    if (directory / ACCOUNT).exists():
        return read_bundle(directory).access()
    return root_access(directory)


def _serve(options: Namespace) -> int:
    host, port = split_address(options.listen or DEFAULT_LISTEN)
    if options.certificates is None and not is_loopback(host):
        raise CoordinatorError(
            f"without certificates a coordinator at {host} would obey anybody",
            remedy="Make them with --init-certs and add --certificates DIR, or listen on 127.0.0.1.",
        )
    program = find_etcd()
    files = None if options.certificates is None else server_certificates(options.certificates)
    with serving(options.data):
        server = take_over(options.data, host=host, port=port, certificates=files)
        if server is not None:
            print(f"taken over   the etcd that a coordinator left running (process {server.process.pid})")
        else:
            server = start_single(options.data, host=host, port=port, certificates=files, program=program)
        return _attend(server, options, version_of(program))


def _attend(server: Server, options: Namespace, version: tuple[int, ...]) -> int:
    """Let the peers in, say where it is, and stay; however this ends, the etcd ends with it."""
    try:
        # Before the address is told: who reads it may ask for the end at once.
        asked = _asked_to_end()
        if options.certificates is not None:
            apply_access(
                [server.endpoint], root_access(options.certificates), accounts_in(options.certificates)
            )
        _tell(server, options, version)
        return _stay(server, options.data, asked)
    finally:
        server.stop()


def _tell(server: Server, options: Namespace, version: tuple[int, ...]) -> None:
    shown = ".".join(map(str, version))
    print(f"coordinator  etcd {shown} at {server.member.listens}, data in {options.data}")
    print(f"peers        elastic.coordinator={server.endpoint}   (or BLOOMERY_COORDINATOR)")
    if server.endpoint != server.member.listens:
        print("             on other machines with this one's address, as --hosts named it")
    print("Ctrl-C stops it. Peers go on for a while without it, and find it again on the same address.")
    if (3, 5, 0) <= version < _CONSISTENT:
        print(f"note: etcd {shown} may lose data when killed under load; in production use 3.5.6 or later.")
    print(flush=True)


def _asked_to_end() -> Sequence[int]:
    """Take Ctrl-C and SIGTERM from now on: each that comes is found in what is returned."""
    asked: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    return asked


def _stay(server: Server, data: Path, asked: Sequence[int]) -> int:
    """Wait until somebody ends this, or the etcd ends by itself."""
    while not asked:
        try:
            status = server.process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            continue
        raise CoordinatorError(
            f"etcd ended by itself, with status {status}", remedy=f"Its log is {data / 'etcd.log'}."
        )
    print("stopped")
    return 0


def _listed(text: str) -> Sequence[str]:
    return tuple(word.strip() for word in text.split(",") if word.strip())
