"""Creates the certificates of a coordinator and of a run's peers, and checks those that are there.

    DIRECTORY/coordinator/   authority.pem, authority.key; server.pem, server.key; clients.pem; root.password
    DIRECTORY/RUN/           authority.pem, authority.key
    DIRECTORY/RUN/PEER/      the peer's bundle (see `credentials.py`)

Each run has an authority of its own, so a peer of one run is a stranger to another's. Certificates have no
common name: etcd's gateway refuses those that have one. A peer's name is a subjectAltName.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import ipaddress
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery import durable
from bloomery.coordination.certificate_files import (
    UnusableFile,
    certificates_fault,
    pair_fault,
    signed_fault,
    text_fault,
)
from bloomery.coordination.credentials import (
    ACCOUNT,
    AUTHORITY,
    CERTIFICATE,
    COORDINATOR,
    EARLIER,
    KEY,
    CoordinatorAccount,
    account_made_for,
    read_certificate,
)
from bloomery.coordination.etcd_process import ServerCertificates
from bloomery.errors import CoordinatorError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.hashes import SHA256

DAYS = 3650
"""The days that a certificate is valid."""
CLIENTS, SERVER, SERVER_KEY, PASSWORD = "clients.pem", "server.pem", "server.key", "root.password"
_AUTHORITY_KEY = "authority.key"
_OVERLAP = datetime.timedelta(hours=1)
"""Certificates are valid from this long ago, so a peer whose clock is behind by less accepts a new one."""


@dataclass(frozen=True, kw_only=True)
class NewCertificates:
    """The certificates that `init_certificates` made.

    server: files of the coordinator.
    bundles: directories of the peers that had no bundle before.
    is_server_renewed: whether the coordinator's certificate was made anew, because it lacked a host, or its
        key was gone.
    """

    server: ServerCertificates
    bundles: tuple[Path, ...]
    is_server_renewed: bool


def init_certificates(
    directory: Path,
    *,
    run: str,
    peers: Sequence[str],
    hosts: Sequence[str] = ("127.0.0.1", "localhost"),
    days: int = DAYS,
    renews: bool = False,
) -> NewCertificates:
    """Make the missing certificates of a coordinator and of a run's peers; those that exist stay unchanged.

    directory: the parent of `coordinator/` and of one directory for each run.
    hosts: names and addresses under which peers reach the coordinator. A certificate of the coordinator that
        lacks one of them is made anew, with those that it names already.
    days: how long the peers' certificates are valid.
    renews: whether peers that have a bundle get a new certificate and key in it; their accounts stay.
    Raises CoordinatorError.
    """
    if importlib.util.find_spec("cryptography") is None:
        raise CoordinatorError(
            "certificates are made with `cryptography`, which is not installed",
            remedy="pip install 'bloomery[coordinator]'",
        )
    central = directory / "coordinator"
    if run == central.name:
        raise CoordinatorError(
            f"a run cannot be named {run!r}", remedy="That directory is the coordinator's."
        )
    try:
        top = _authority(central, "bloomery coordinator")
        named, wanted = _named_hosts(central / SERVER), _host_names(hosts)
        lacking = [name for name in wanted if name not in named]
        is_issued = bool(lacking) or not (central / SERVER_KEY).exists()
        if is_issued:
            _issue(top, central / SERVER, central / SERVER_KEY, names=[*named, *lacking])
        if not (central / PASSWORD).exists():
            _write(central / PASSWORD, secrets.token_urlsafe(32).encode(), mode=0o600)
        refuse_unusable(_own_fault(central))
        signer = _authority(directory / run, f"bloomery run {run}")
        bundles = tuple(
            _bundle(signer, central, directory / run / peer, run=run, peer=peer, days=days)
            for peer in peers
            if renews or not (directory / run / peer / ACCOUNT).exists()
        )
        authorities = sorted(path for path in directory.glob(f"*/{AUTHORITY}"))
        _write(central / CLIENTS, b"".join(path.read_bytes() for path in authorities))
    except OSError as error:
        raise CoordinatorError(
            f"the certificates in {directory} cannot be made: {error}",
            remedy="Name a directory that may be written to; move away a directory in the place of a file.",
        ) from error
    server = server_certificates(directory)
    return NewCertificates(server=server, bundles=bundles, is_server_renewed=bool(named) and is_issued)


def server_certificates(directory: Path) -> ServerCertificates:
    """Return the coordinator's certificate and key, and the authorities of its clients.

    Raises CoordinatorError if one of the files is missing or cannot be used.
    """
    central = directory / "coordinator"
    for name in (SERVER, SERVER_KEY, CLIENTS, PASSWORD, AUTHORITY):
        if not (central / name).exists():
            raise CoordinatorError(
                f"{central} has no {name}",
                remedy="`bloomery coordinate --init-certs DIRECTORY --run RUN --peers a,b` makes it.",
            )
    files = ServerCertificates(
        certificate=central / SERVER, key=central / SERVER_KEY, authority=central / CLIENTS
    )
    refuse_unusable(_own_fault(central) or certificates_fault(files.authority))
    # etcd's gateway is a client of etcd, with the same certificate.
    if signed_fault(authority=files.authority, certificate=files.certificate, key=files.key) is not None:
        raise _unusable(UnusableFile(files.authority, f"lacks the authority of {SERVER}, or is damaged"))
    return files


def _own_fault(central: Path) -> UnusableFile | None:
    """Return which of the coordinator's own files cannot be used, and why."""
    return signed_fault(
        authority=central / AUTHORITY, certificate=central / SERVER, key=central / SERVER_KEY
    ) or text_fault(central / PASSWORD)


PASSWORD_REMEDY = (
    f"Bring {PASSWORD} back from a copy. Without one, move it away, let `bloomery coordinate --init-certs` "
    "make another, start the coordinator on a new --data, and restore each run with --adopt."
)
_REMEDIES = {
    AUTHORITY: "Move it away, and `bloomery coordinate --init-certs` makes it anew from "
    f"{_AUTHORITY_KEY}; all that was signed stays valid.",
    _AUTHORITY_KEY: f"Bring {AUTHORITY} and {_AUTHORITY_KEY} back from a copy. Without one, move both away: "
    "`bloomery coordinate --init-certs` makes another authority then, and with --renew the bundles that all "
    "its peers need.",
    SERVER: "Move it away, and `bloomery coordinate --init-certs` with the same --hosts makes another.",
    SERVER_KEY: "Move it away, and `bloomery coordinate --init-certs` makes another, with a certificate.",
    CLIENTS: "`bloomery coordinate --init-certs`, with any run and its peers, makes it anew.",
    PASSWORD: PASSWORD_REMEDY,
}


def refuse_unusable(fault: UnusableFile | None) -> None:
    """Raise CoordinatorError, with what to do, about a file of the coordinator or of a run's authority."""
    if fault is not None:
        raise _unusable(fault)


def _unusable(fault: UnusableFile) -> CoordinatorError:
    return CoordinatorError(
        f"the certificates in {fault.path.parent} cannot be used: {fault}", remedy=_REMEDIES[fault.path.name]
    )


@dataclass(frozen=True)
class _Signer:
    certificate: x509.Certificate
    key: EllipticCurvePrivateKey


def _bundle(signer: _Signer, central: Path, place: Path, *, run: str, peer: str, days: int) -> Path:
    from cryptography import x509

    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    has_account = (place / ACCOUNT).exists()
    if has_account:
        account_made_for(place, run=run, peer=peer)
    if (place / CERTIFICATE).exists():
        _keep_earlier(place)
    names = [x509.DNSName(peer), x509.UniformResourceIdentifier(f"bloomery:{run}/{peer}")]
    _issue(signer, place / CERTIFICATE, place / KEY, names=names, days=days)
    _write(place / AUTHORITY, (place.parent / AUTHORITY).read_bytes())
    _write(place / COORDINATOR, (central / AUTHORITY).read_bytes())
    if has_account:
        return place
    account = CoordinatorAccount(run=run, peer=peer, user=f"{run}/{peer}", password=secrets.token_urlsafe(32))
    _write(place / ACCOUNT, account.text().encode(), mode=0o600)
    return place


def _keep_earlier(bundle: Path) -> None:
    """Keep the certificate that is about to be replaced, so that a revocation names it too."""
    certificate = bundle / CERTIFICATE
    serial = read_certificate(
        certificate,
        remedy="Copy it from the peer's machine; or move it away, and the same command makes another, but a "
        "revocation then leaves the one of before valid.",
    ).serial
    (bundle / EARLIER).mkdir(exist_ok=True, mode=0o700)
    _write(bundle / EARLIER / f"{serial}.pem", certificate.read_bytes())


def _authority(place: Path, name: str) -> _Signer:
    """Return the certificate authority of a directory; make one if there is none.

    A certificate that is gone is made anew from its key, and what the key has signed stays valid.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    certificate_file, key_file = place / AUTHORITY, place / _AUTHORITY_KEY
    if certificate_file.exists():
        refuse_unusable(certificates_fault(certificate_file))
        certificate = _read_authority(certificate_file)
        refuse_unusable(pair_fault(certificate_file, key_file))
        return _Signer(certificate, _read_key(key_file))
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    key = _read_key(key_file) if key_file.exists() else ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.ORGANIZATION_NAME, name)])
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        _builder(subject, subject, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(identifier, critical=False)
    ).sign(key, _sha256())
    _write_key(key_file, key)
    _write(certificate_file, certificate.public_bytes(serialization.Encoding.PEM))
    return _Signer(certificate, key)


def _read_authority(path: Path) -> x509.Certificate:
    """Return an authority's certificate, which it signed itself. Raises CoordinatorError."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        certificate.verify_directly_issued_by(certificate)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise _unusable(UnusableFile(path, "is damaged, or no authority's certificate")) from error
    return certificate


def _read_key(path: Path) -> EllipticCurvePrivateKey:
    """Return an authority's key. Raises CoordinatorError."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key: object = None
    with contextlib.suppress(ValueError, TypeError):  # TypeError: it is encrypted
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise _unusable(UnusableFile(path, "holds no key that was made here, or a damaged one"))
    return key


def _issue(
    signer: _Signer,
    certificate: Path,
    key_file: Path,
    *,
    names: Sequence[x509.GeneralName],
    days: int = DAYS,
) -> None:
    """Make a key and a certificate signed by `signer`, valid for so many days.

    The certificate serves both ends of a connection, because etcd's gateway is itself a client of etcd.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    key = ec.generate_private_key(ec.SECP256R1())
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    signer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.key.public_key())
    issued = (
        _builder(x509.Name([]), signer.certificate.subject, key, days=days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=True)  # the subject is empty
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(signer_key, critical=False)
    ).sign(signer.key, _sha256())
    _write_key(key_file, key)
    _write(certificate, issued.public_bytes(serialization.Encoding.PEM))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey, *, days: int = DAYS
) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _OVERLAP)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _sha256() -> SHA256:
    from cryptography.hazmat.primitives import hashes

    return hashes.SHA256()


def _host_names(hosts: Sequence[str]) -> list[x509.GeneralName]:
    from cryptography import x509

    names: list[x509.GeneralName] = []
    for host in dict.fromkeys((*hosts, "127.0.0.1", "::1", "localhost")):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            if re.fullmatch(r"[A-Za-z0-9*._-]+", host) is None:
                raise CoordinatorError(
                    f"a certificate cannot name the host {host!r}",
                    remedy="Write its name in ASCII (xn--…), or its address, and no port.",
                ) from None
            names.append(x509.DNSName(host))
    return names


def _named_hosts(certificate: Path) -> list[x509.GeneralName]:
    """Return the hosts that the coordinator's certificate names; none where there is no certificate yet."""
    from cryptography import x509

    if not certificate.exists():
        return []
    refuse_unusable(certificates_fault(certificate))
    try:
        loaded = x509.load_pem_x509_certificate(certificate.read_bytes())
        return list(loaded.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except (ValueError, x509.ExtensionNotFound) as error:
        raise _unusable(UnusableFile(certificate, "is not a certificate that was made here")) from error


def _write_key(path: Path, key: EllipticCurvePrivateKey) -> None:
    from cryptography.hazmat.primitives import serialization

    content = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    _write(path, content, mode=0o600)


def _write(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write a file whole, with `mode` from the start: a key is never readable by others for a moment."""
    durable.write_whole(path, content, mode=mode)
