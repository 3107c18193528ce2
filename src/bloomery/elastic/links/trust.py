"""How two peers know that both belong to the run: its certificates, or on loopback a token it shares."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from bloomery.elastic.links.refusal import Refused
from bloomery.errors import PeerError


@dataclass(frozen=True, kw_only=True)
class Trust:
    """What this peer shows, and what it wants to see.

    token: a secret of the run; enough on loopback alone. to_listen, to_dial: TLS 1.3 with the run's
    authority, both ways; None: no certificates, so no connection leaves the machine.
    """

    token: bytes = b""
    to_listen: ssl.SSLContext | None = None
    to_dial: ssl.SSLContext | None = None

    @property
    def has_certificates(self) -> bool:
        """Whether connections may leave the machine."""
        return self.to_listen is not None

    def check_address(self, host: str) -> None:
        """Raise Refused for another machine where there are no certificates."""
        if not self.has_certificates and not is_loopback(host):
            raise Refused(f"{host} is another machine, and this peer has no certificates")


def trust_certificates(*, authority: Path, certificate: Path, key: Path) -> Trust:
    """Trust whoever has a certificate of `authority`. PeerError: a file is missing or is something else."""
    contexts = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # names of peers, not of machines: the greeting checks them
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # nothing is to lie in the socket when TLS ends and the ring begins
        try:
            context.load_verify_locations(authority)
            context.load_cert_chain(certificate, key)
        except OSError as error:  # ssl.SSLError is one
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


def check_names(connection: ssl.SSLSocket, peer: str) -> None:
    """Raise Refused where the certificate at the other end was made for other peers than `peer`."""
    certificate = connection.getpeercert() or {}
    entries = certificate.get("subjectAltName", ())
    assert isinstance(entries, tuple), "as the ssl module documents it"
    names = {str(value) for kind, value in entries if kind in ("DNS", "URI")}
    if peer not in names:
        raise Refused(f"a certificate of {', '.join(sorted(names)) or 'nobody'} used by '{peer}'")
