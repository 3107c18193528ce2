"""Peers that only connect, on loopback, and authorities that certify them."""

from __future__ import annotations

import datetime
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from bloomery.transport.connection import Connection, Contact
from bloomery.transport.connection_manager import ConnectionManager
from bloomery.transport.connection_pool import DialTiming, Neighbour
from bloomery.transport.handshake import OwnIdentity
from bloomery.transport.sockets import TcpTimeouts
from bloomery.transport.trust import Trust, trust_certificates

DEADLINE_S = 60.0
TOKEN = Trust(token=b"t" * 32)
TURNS = DialTiming(turn_s=DEADLINE_S, answer_s=DEADLINE_S, retry_s=0.1)
IMPATIENT = DialTiming(turn_s=0.2, answer_s=DEADLINE_S, retry_s=0.1)


def connection_manager(peer: str, trust: Trust = TOKEN, **options: object) -> ConnectionManager:
    chosen: dict = {"listen": ("127.0.0.1:0",), "turns": TURNS, "patience": TcpTimeouts()} | options
    run = chosen.pop("run", "r")
    encrypt = chosen.pop("encrypt", False)
    identity = OwnIdentity(run=run, peer=peer, incarnation=f"{peer}1", encrypt=encrypt)
    return ConnectionManager(identity, trust, **chosen)


def contact(of: ConnectionManager, addresses: Sequence[str] | None = None) -> Contact:
    where = of.addresses if addresses is None else tuple(addresses)
    return Contact(peer=of.identity.peer, incarnation=of.identity.incarnation, addresses=where)


def hop(to: ConnectionManager, *, sends: bool, ranks: int = 1, streams: int = 2, addresses=None) -> Neighbour:
    target = contact(to, addresses)
    return Neighbour(
        peer=target.peer,
        incarnation=target.incarnation,
        addresses=target.addresses,
        sends=sends,
        ranks=tuple(range(ranks)),
        streams=streams,
    )


def gathered(
    *sides: tuple[ConnectionManager, Sequence[Neighbour]], epoch: int, relays: bool = False
) -> list[list[Connection]]:
    """Each station's connections, all gathered at once."""
    found: dict[int, list[Connection] | BaseException] = {}

    def gather(number: int, of: ConnectionManager, hops: Sequence[Neighbour]) -> None:
        try:
            found[number] = of.pool.gather(
                hops, epoch=epoch, deadline_s=DEADLINE_S, cancelled=threading.Event(), relays=relays
            )
        except BaseException as error:  # noqa: BLE001  — it is the test's
            found[number] = error

    threads = [threading.Thread(target=gather, args=(n, *side)) for n, side in enumerate(sides)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE_S)
    results = []
    for number in range(len(sides)):
        links = found[number]
        if isinstance(links, BaseException):
            raise links
        results.append(links)
    return results


def pair(
    one: ConnectionManager, other: ConnectionManager, *, epoch: int, streams: int = 2, **options
) -> tuple:
    """Connections on which `one` sends and `other` receives."""
    return tuple(
        gathered(
            (one, [hop(other, sends=True, streams=streams)]),
            (other, [hop(one, sends=False, streams=streams)]),
            epoch=epoch,
            **options,
        )
    )


def are_ends_of_one(sending: Connection, receiving: Connection) -> bool:
    """Send through one and receive from the other; keys must agree."""
    for source, sink, message in ((sending, receiving, b"forth"), (receiving, sending, b"back!")):
        for end in (source, sink):
            end.connection.settimeout(DEADLINE_S)
        source.connection.sendall(message)
        got = b""
        while len(got) < 5:
            got += sink.connection.recv(5 - len(got))
        if got != message:
            return False
    for end in (sending, receiving):
        end.connection.settimeout(0.0)
    return sending.key == receiving.key and len(sending.key) == 32


def until(holds: Callable[[], bool], event: threading.Event | None = None) -> None:
    """Wait for something that another thread brings about."""
    waiting = event or threading.Event()
    for _ in range(int(DEADLINE_S / 0.01)):
        if holds():
            return
        waiting.wait(0.01)
    raise AssertionError("it did not happen")


class Authority:
    """A small certificate authority."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory, self._name = directory, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        directory.mkdir()
        self._key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        built = (
            self._builder(self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
        )
        self._certificate = built.sign(self._key, hashes.SHA256())
        self.file = directory / "authority.pem"
        self.file.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def trust(self, peer: str) -> Trust:
        key = ec.generate_private_key(ec.SECP256R1())
        identifier = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        built = (
            self._builder(x509.Name([]), key)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(peer)]), critical=True)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False
            )
        )
        certificate, private = self.directory / f"{peer}.pem", self.directory / f"{peer}.key"
        signed = built.sign(self._key, hashes.SHA256())
        certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return trust_certificates(authority=self.file, certificate=certificate, key=private)

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )


def raw(to: ConnectionManager) -> socket.socket:
    """A connection of a stranger."""
    host, _, port = to.addresses[0].rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=DEADLINE_S)
