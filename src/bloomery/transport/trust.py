"""Decides whether the other end belongs to the run: by certificates, or on loopback by a shared token.

`PeerRefused` says why a connection is refused, and `RefusalLog` limits how many refusals are logged.

`derive_key` derives the keys of a connection by HKDF with SHA-256 (RFC 5869).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import ssl
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from bloomery.errors import PeerError

log = logging.getLogger(__name__)

_PERIOD_S = 10.0
_LINES_A_PERIOD = 10


class PeerRefused(Exception):
    """A connection is refused: its other end is not of this run, or not expected, or not expected now."""


class RefusalLog:
    """Logs refused connections; of a flood it logs the first ones and a count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = float("-inf")
        self._lines = self._silent = 0
        self.count = 0

    def write(self, origin: str, why: str) -> None:
        """Log that a connection was refused. origin: the address that it came from."""
        now = time.monotonic()
        with self._lock:
            self.count += 1
            if now - self._began > _PERIOD_S:
                if self._silent:
                    log.warning("%d more connections were refused", self._silent)
                self._began, self._lines, self._silent = now, 0, 0
            self._lines += 1
            self._silent += self._lines > _LINES_A_PERIOD
            is_logged = self._lines <= _LINES_A_PERIOD
        if is_logged:
            log.warning("refused a connection from %s: %s", origin, why)


@dataclass(frozen=True, kw_only=True)
class Trust:
    """How this peer proves that it belongs to the run, and what it demands of the other end.

    token: a secret of the run. It suffices on loopback only.
    to_listen, to_dial: TLS 1.3 with the run's authority, where both ends show certificates; None: there are
        no certificates, so no connection leaves the machine.
    revoked: serial numbers of certificates that are no longer trusted; it grows while the peer runs.
    dials_loopback: whether loopback addresses that others advertise are dialled; False where the run is on
        several machines, for such an address then leads to this machine and not to its advertiser.
    """

    token: bytes = b""
    to_listen: ssl.SSLContext | None = None
    to_dial: ssl.SSLContext | None = None
    revoked: set[str] = field(default_factory=set)
    dials_loopback: bool = True

    @property
    def has_certificates(self) -> bool:
        """Whether connections may leave the machine."""
        return self.to_listen is not None

    def check_address(self, host: str) -> None:
        """Raise PeerRefused if `host` is another machine and there are no certificates."""
        if not self.has_certificates and not is_loopback(host):
            raise PeerRefused(f"{host} is another machine, and this peer has no certificates")

    def check_dialled(self, host: str) -> None:
        """Raise PeerRefused if an address that another peer advertised must not be dialled."""
        self.check_address(host)
        if not self.dials_loopback and is_loopback(host):
            raise PeerRefused(f"{host} is this machine, and not where its peer is")

    def check_certificate(self, connection: object) -> None:
        """Raise PeerRefused if the other end of a TLS connection shows a certificate that was revoked."""
        if isinstance(connection, ssl.SSLSocket) and self.revoked:
            serial = str((connection.getpeercert() or {}).get("serialNumber", ""))
            if serial in self.revoked:
                raise PeerRefused(f"its certificate {serial} was revoked")

    def load_certificate(self, certificate: Path, key: Path) -> None:
        """Show this certificate from now on, as after a renewal. Raises OSError if it cannot be used."""
        for context in (self.to_listen, self.to_dial):
            if context is not None:
                context.load_cert_chain(certificate, key)


def trust_certificates(*, authority: Path, certificate: Path, key: Path) -> Trust:
    """Return the trust in peers with a certificate of `authority`. PeerError: a file cannot be used."""
    contexts = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # certificates name peers, not machines: `check_names` checks them
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # no byte of TLS may be left in the socket when the ring begins
        try:
            context.load_verify_locations(authority)
            context.load_cert_chain(certificate, key)
        except OSError as error:  # ssl.SSLError is an OSError
            raise PeerError(
                f"The certificates in {certificate.parent} cannot be used: {error}.",
                remedy="`bloomery coordinate --init-certs` makes a bundle for each peer.",
            ) from error
        contexts.append(context)
    return Trust(to_listen=contexts[0], to_dial=contexts[1])


def is_loopback(host: str) -> bool:
    """Whether an address, as a socket gives it, is this machine's own."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host == "localhost"
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback


def is_any_address(host: str) -> bool:
    """Whether an address stands for all of a machine, so that it can be listened on and not be dialled."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == ""


def check_names(connection: ssl.SSLSocket, peer: str) -> None:
    """Raise PeerRefused if the certificate of the other end does not name `peer`."""
    names = _names(connection)
    if peer not in names:
        raise PeerRefused(f"'{peer}' shows a certificate of {', '.join(names) or 'no peer'}")


def names_of(connection: object) -> str:
    """Return whom the certificate of the other end names, as one text; "" without TLS."""
    return ", ".join(_names(connection)) if isinstance(connection, ssl.SSLSocket) else ""


def _names(connection: ssl.SSLSocket) -> list[str]:
    certificate = connection.getpeercert() or {}
    entries = certificate.get("subjectAltName", ())
    assert isinstance(entries, tuple), "as the ssl module documents it"
    return sorted(str(value) for kind, value in entries if kind in ("DNS", "URI"))


KEY_BYTES = 32


def derive_key(secret: bytes, *, salt: bytes, purpose: str) -> bytes:
    """Return a key of KEY_BYTES that depends on the secret, the salt and the purpose."""
    extracted = hmac.digest(salt, secret, "sha256")
    return hmac.digest(extracted, purpose.encode() + b"\x01", "sha256")


def proof(key: bytes, *words: bytes) -> bytes:
    """Return a message authentication code of `words`, in which the borders between the words count too."""
    code = hmac.new(key, digestmod=hashlib.sha256)
    for word in words:
        code.update(len(word).to_bytes(4, "big") + word)
    return code.digest()


def is_proof(code: bytes, key: bytes, *words: bytes) -> bool:
    """Whether `code` is the `proof` of these words; compared in constant time."""
    return hmac.compare_digest(code, proof(key, *words))
