"""`bloomery coordinate`: starts the etcd of elastic runs, makes accounts, shows or restores a run."""

from __future__ import annotations

import signal
import socket
import subprocess
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from bloomery.cli.argument_values import whole
from bloomery.cli.arguments import parser
from bloomery.cli.coordinate_status import show
from bloomery.coordination import etcd_log
from bloomery.coordination.accounts import accounts_in, apply_access, root_access
from bloomery.coordination.certificates import DAYS, init_certificates, server_certificates
from bloomery.coordination.credentials import (
    ACCOUNT,
    CERTIFICATE,
    endpoints_of,
    read_bundle,
    restore_revocations,
    revoke,
)
from bloomery.coordination.etcd import Etcd
from bloomery.coordination.etcd_process import EtcdServer, find_etcd, start_single, take_over, version_of
from bloomery.coordination.gateway import Access
from bloomery.coordination.orphan import serving
from bloomery.coordination.recovery import adopt
from bloomery.errors import ConfigError, CoordinatorError, PeerError, UsageError
from bloomery.protocol.keys import Keys, is_name, name_mistake
from bloomery.transport.listener import raise_descriptor_limit
from bloomery.transport.sockets import split_address
from bloomery.transport.trust import is_loopback

if TYPE_CHECKING:
    from bloomery.errors import Mistake


EXAMPLES = """\
bloomery coordinate                                serve peers on this machine
bloomery coordinate --init-certs certs --run night --peers oslo,lyon --hosts 203.0.113.7
                                                   make certificates, and a bundle for each peer
bloomery coordinate --certificates certs --run night --revoke lyon
                                                   remove a peer from a run at once
bloomery coordinate --certificates certs --listen 0.0.0.0:2379
                                                   serve the peers that hold these certificates
bloomery coordinate --status night                 show members, round and epoch (--json for programs)
bloomery coordinate --adopt night                  after --data was lost: restore the run from its peers
bloomery coordinate --certificates certs --endpoints https://a:2379,https://b:2379 --grant
                                                   create the peers' accounts in an etcd that runs already
"""

DEFAULT_LISTEN = "127.0.0.1:2379"
_CONSISTENT = (3, 5, 3)

_CONNECT_S = 2.0


def run(arguments: list[str]) -> int:
    """Start a coordinator and serve until it is stopped, or do what another option asks for and return."""
    options = _parser().parse_args(arguments)
    _check_names(options)
    _refuse_loose_options(options)
    if options.init_certs is not None:
        return _init_certificates(options)
    if options.grant:
        return _grant(options)
    if options.revoke is not None:
        return _revoke(options)
    if options.status is not None:
        _refuse_unless_listening(_endpoints(options))
        with _client(options) as etcd:
            return show(etcd, Keys(options.status), as_json=options.json)
    if options.adopt is not None:
        return _adopt(options)
    return _serve(options)


def _parser() -> ArgumentParser:
    options = parser(
        "coordinate",
        "Start the coordinator of elastic runs, which is an etcd with one member, and serve until Ctrl-C.\n"
        "Peers find each other and agree on rounds through it; no tensor passes through it. While\n"
        "it is away, peers go on for a while and then wait; when it is back, they continue. Its state is in\n"
        "--data and survives restarts. In production run an etcd with three members, 3.5.6 or later, and\n"
        "name its endpoints in elastic.coordinator.",
        examples=EXAMPLES,
    )
    options.add_argument(
        "--data",
        metavar="DIR",
        type=Path,
        default=Path("coordinator"),
        help="directory of the coordinator's state (default: coordinator)",
    )
    options.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help=f"address that peers connect to (default: {DEFAULT_LISTEN}; port 0 takes any free port)",
    )
    options.add_argument(
        "--certificates",
        type=Path,
        metavar="DIR",
        help="the directory that --init-certs made, or the bundle of a peer",
    )
    options.add_argument(
        "--init-certs", type=Path, metavar="DIR", help="make certificates and bundles in this directory"
    )
    options.add_argument(
        "--run", metavar="RUN", help="with --init-certs and --revoke: the run whose peers are meant"
    )
    options.add_argument(
        "--days",
        type=whole(1, 36_500),
        default=DAYS,
        metavar="N",
        help=f"with --init-certs: days that a peer's certificate is valid (default: {DAYS})",
    )
    options.add_argument(
        "--renew", action="store_true", help="with --init-certs: new certificates for --peers that have one"
    )
    options.add_argument(
        "--revoke", metavar="PEER", help="with --certificates and --run: remove a peer from the run at once"
    )
    options.add_argument("--peers", metavar="NAME,…", help="with --init-certs: the names of the peers")
    options.add_argument(
        "--hosts",
        metavar="HOST,…",
        default="",
        help="with --init-certs: names and addresses of the coordinator that peers connect to",
    )
    options.add_argument(
        "--grant", action="store_true", help="create the peers' accounts in an etcd that runs already"
    )
    options.add_argument(
        "--endpoints",
        metavar="URL,…",
        help="endpoints of a running etcd (default: BLOOMERY_COORDINATOR, else the one on this machine)",
    )
    options.add_argument("--status", metavar="RUN", help="show the members, round and epoch of a run")
    options.add_argument(
        "--adopt", metavar="RUN", help="restore a run from what its peers and their checkpoints know"
    )
    options.add_argument("--json", action="store_true", help="with --status: print one JSON object")
    return options


def _refuse_loose_options(options: Namespace) -> None:
    """Raise UsageError for an option that says more about another one, which is not there."""
    needs = {
        "--renew": (options.renew, "--init-certs", options.init_certs),
        "--peers": (options.peers, "--init-certs", options.init_certs),
        "--hosts": (options.hosts, "--init-certs", options.init_certs),
        "--json": (options.json, "--status", options.status),
        "--run": (options.run, "--init-certs or --revoke", options.init_certs or options.revoke),
    }
    for option, (given, wanted, there) in needs.items():
        if given and there is None:
            raise UsageError(f"{option} goes with {wanted}", remedy=f"Add {wanted}, or leave {option} out.")


def _check_names(options: Namespace) -> None:
    mistakes: list[Mistake] = []
    for option in ("run", "status", "adopt", "revoke"):
        value = getattr(options, option)
        if value is not None and not is_name(value):
            mistakes.append(name_mistake(f"--{option}", value, "command line"))
    for peer in _listed(options.peers or ""):
        if not is_name(peer):
            mistakes.append(name_mistake("--peers", peer, "command line"))
    if mistakes:
        raise ConfigError(mistakes, of="the command")


def _init_certificates(options: Namespace) -> int:
    peers = _listed(options.peers or "")
    if options.run is None or not peers:
        raise UsageError(
            "--init-certs needs the run and its peers", remedy="Add --run RUN --peers NAME,NAME,…"
        )
    issued = init_certificates(
        options.init_certs,
        run=options.run,
        peers=peers,
        hosts=_listed(options.hosts) or ("127.0.0.1",),
        days=options.days,
        renews=options.renew,
    )
    for bundle in issued.bundles:
        print(f"made    {bundle}")
    if issued.is_server_renewed:
        print(f"made    {issued.server.certificate} anew: start the coordinator again")
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
        raise UsageError("--grant needs --certificates DIR", remedy="Make them with --init-certs.")
    endpoints = _endpoints(options)
    count = apply_access(endpoints, root_access(options.certificates), accounts_in(options.certificates))
    restore_revocations(options.certificates, root_access(options.certificates), endpoints)
    print(f"{', '.join(endpoints)}: {count} peer{'s' if count != 1 else ''} may connect")
    return 0


def _revoke(options: Namespace) -> int:
    if options.certificates is None or options.run is None:
        raise UsageError("--revoke needs --certificates DIR and --run RUN", remedy="Add both.")
    endpoints = _endpoints(options)
    with Etcd(endpoints, root_access(options.certificates)) as etcd:
        serials = revoke(options.certificates, etcd, run=options.run, peer=options.revoke)
    certificates = f"certificate{'s' if len(serials) > 1 else ''} {', '.join(serials)}"
    print(f"revoked  {options.revoke} of {options.run}: its account, and its {certificates}")
    print("Peers close their connections to it. --init-certs can make a new bundle for the name.")
    return 0


def _adopt(options: Namespace) -> int:
    with _client(options) as etcd:
        adopted = adopt(etcd, Keys(options.adopt))
    if adopted.round < 0:
        print(f"{options.adopt}: epochs go on at {adopted.epoch}; no peer remembers a commit")
        return 0
    whose = (
        f"as told by {', '.join(adopted.peers_ahead)}"
        if adopted.peers_ahead
        else "as the coordinator knew it"
    )
    print(f"{options.adopt}: goes on after round {adopted.round}, epoch {adopted.epoch}, {whose}")
    if not adopted.holders:
        print(
            "No peer that is here holds the state of that round. Start those that may have it within\n"
            "elastic.grace_s; then the run goes back to the newest state that any peer here holds."
        )
    return 0


def _endpoints(options: Namespace) -> tuple[str, ...]:
    """Return the endpoints of the coordinator that is meant; with certificates the default has some, too."""
    return endpoints_of(options.endpoints or "", has_certificates=options.certificates is not None)


def _client(options: Namespace) -> Etcd:
    return Etcd(_endpoints(options), _access(options.certificates))


def _refuse_unless_listening(endpoints: Sequence[str]) -> None:
    """Raise CoordinatorError at once if every endpoint refuses connections: then waiting cannot help."""
    refusing = []
    for endpoint in endpoints:
        try:
            with socket.create_connection(split_address(urlsplit(endpoint).netloc), timeout=_CONNECT_S):
                return
        except ConnectionRefusedError:
            refusing.append(endpoint)
        except (OSError, ValueError, PeerError):
            return  # slow or without a port: the client says more of it
    raise CoordinatorError(
        f"no coordinator listens at {', '.join(refusing)}: the connection was refused",
        remedy="Is it running (`bloomery coordinate`), and is the address right (--endpoints)?",
    )


def _access(directory: Path | None) -> Access:
    if directory is None:
        return Access()
    if any((directory / name).exists() for name in (ACCOUNT, CERTIFICATE)):
        return read_bundle(directory).access()
    return root_access(directory)


def _serve(options: Namespace) -> int:
    host, port = split_address(options.listen or DEFAULT_LISTEN)
    if options.certificates is None and not is_loopback(host):
        raise UsageError(
            f"without certificates anybody could control a coordinator at {host}",
            remedy="Make them with --init-certs and add --certificates DIR, or listen on 127.0.0.1.",
        )
    program = find_etcd()
    version = version_of(program)
    raise_descriptor_limit()  # the etcd inherits it
    files = None if options.certificates is None else server_certificates(options.certificates)
    with serving(options.data):
        server = take_over(options.data, host=host, port=port, certificates=files)
        if server is not None:
            print(f"taken over   the etcd that a coordinator left running (process {server.process.pid})")
        else:
            server = start_single(options.data, host=host, port=port, certificates=files, program=program)
        return _attend(server, options, version)


def _attend(server: EtcdServer, options: Namespace, version: tuple[int, ...]) -> int:
    """Create the peers' accounts, print the address, and serve. The etcd is stopped however this ends."""
    try:
        # Signals are handled before the address is printed: whoever reads it may send one at once.
        stop_signals = _handle_stop_signals()
        if options.certificates is not None:
            root = root_access(options.certificates)
            apply_access([server.endpoint], root, accounts_in(options.certificates))
            restore_revocations(options.certificates, root, [server.endpoint])
        _print_addresses(server, options, version)
        return _wait(server, options.data, stop_signals)
    finally:
        server.stop()


def _print_addresses(server: EtcdServer, options: Namespace, version: tuple[int, ...]) -> None:
    shown = ".".join(map(str, version))
    print(f"coordinator  etcd {shown} at {server.member.listens}, data in {options.data}")
    print(f"peers        elastic.coordinator={server.endpoint}   (or BLOOMERY_COORDINATOR)")
    if server.endpoint != server.member.listens:
        print("             on other machines with this one's address, as --hosts named it")
    print("Ctrl-C stops it. Peers go on for a while without it, and find it again on the same address.")
    if (3, 5, 0) <= version < _CONSISTENT:
        print(f"note: etcd {shown} may lose data when killed under load; in production use 3.5.6 or later.")
    print(flush=True)


def _handle_stop_signals() -> Sequence[int]:
    """Handle SIGINT and SIGTERM from now on; each one that arrives is appended to the returned list."""
    received: list[int] = []

    def append(number: int, frame: FrameType | None) -> None:
        received.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, append)
    return received


def _wait(server: EtcdServer, data: Path, stop_signals: Sequence[int]) -> int:
    """Wait until a signal arrives. Raises CoordinatorError when the etcd ends by itself."""
    while not stop_signals:
        try:
            status = server.process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            etcd_log.shorten(data / etcd_log.NAME)
            continue
        raise CoordinatorError(
            f"etcd ended by itself, with status {status}", remedy=f"Its log is {data / etcd_log.NAME}."
        )
    print("stopped")
    return 0


def _listed(text: str) -> Sequence[str]:
    return tuple(word.strip() for word in text.split(",") if word.strip())
