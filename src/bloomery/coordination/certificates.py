"""Creates the certificates of a coordinator and of a run's peers, and their accounts in etcd.

    DIRECTORY/coordinator/   authority.pem, authority.key; server.pem, server.key; clients.pem; root.password
    DIRECTORY/RUN/           authority.pem, authority.key
    DIRECTORY/RUN/PEER/      the peer's bundle (see `credentials.py`)

Each run has an authority of its own, so a peer of one run is a stranger to another's. Certificates have no
common name: etcd's gateway refuses those that have one. A peer's name is a subjectAltName.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import importlib.util
import ipaddress
import secrets
import ssl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery import durable
from bloomery.coordination.credentials import (
    ACCOUNT,
    AUTHORITY,
    CERTIFICATE,
    COORDINATOR,
    EARLIER,
    KEY,
    CoordinatorAccount,
    read_account,
    read_certificate,
)
from bloomery.coordination.etcd import Etcd
from bloomery.coordination.etcd_process import ServerCertificates
from bloomery.coordination.gateway import Access, EtcdRefused
from bloomery.errors import CoordinatorError
from bloomery.protocol.keys import Keys

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
    is_server_renewed: whether the coordinator's certificate was made anew, because it lacked a host.
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
        if lacking:
            _issue(top, central / SERVER, central / SERVER_KEY, names=[*named, *lacking])
        if not (central / PASSWORD).exists():
            _write(central / PASSWORD, secrets.token_urlsafe(32).encode(), mode=0o600)
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
            remedy="Name a directory that may be written to.",
        ) from error
    server = server_certificates(directory)
    return NewCertificates(server=server, bundles=bundles, is_server_renewed=bool(named and lacking))


def server_certificates(directory: Path) -> ServerCertificates:
    """Return the coordinator's certificate and key, and the authorities of its clients.

    Raises CoordinatorError if one of the files is missing.
    """
    central = directory / "coordinator"
    for name in (SERVER, SERVER_KEY, CLIENTS, PASSWORD):
        if not (central / name).is_file():
            raise CoordinatorError(
                f"{central} has no {name}",
                remedy="`bloomery coordinate --init-certs DIRECTORY --run RUN --peers a,b` makes it.",
            )
    return ServerCertificates(
        certificate=central / SERVER, key=central / SERVER_KEY, authority=central / CLIENTS
    )


@dataclass(frozen=True)
class _Signer:
    certificate: x509.Certificate
    key: EllipticCurvePrivateKey


def _bundle(signer: _Signer, central: Path, place: Path, *, run: str, peer: str, days: int) -> Path:
    from cryptography import x509

    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    if (place / CERTIFICATE).exists():
        _keep_earlier(place)
    names = [x509.DNSName(peer), x509.UniformResourceIdentifier(f"bloomery:{run}/{peer}")]
    _issue(signer, place / CERTIFICATE, place / KEY, names=names, days=days)
    _write(place / AUTHORITY, (place.parent / AUTHORITY).read_bytes())
    _write(place / COORDINATOR, (central / AUTHORITY).read_bytes())
    if (place / ACCOUNT).exists():
        return place
    account = CoordinatorAccount(run=run, peer=peer, user=f"{run}/{peer}", password=secrets.token_urlsafe(32))
    _write(place / ACCOUNT, account.text().encode(), mode=0o600)
    return place


def _keep_earlier(bundle: Path) -> None:
    """Keep the certificate that is about to be replaced, so that a revocation names it too."""
    certificate = bundle / CERTIFICATE
    (bundle / EARLIER).mkdir(exist_ok=True, mode=0o700)
    _write(bundle / EARLIER / f"{read_certificate(certificate).serial}.pem", certificate.read_bytes())


def _authority(place: Path, name: str) -> _Signer:
    """Return the certificate authority of a directory; make one if there is none."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    if (place / AUTHORITY).exists():
        key = serialization.load_pem_private_key((place / _AUTHORITY_KEY).read_bytes(), password=None)
        assert isinstance(key, ec.EllipticCurvePrivateKey), "it was made here"
        return _Signer(x509.load_pem_x509_certificate((place / AUTHORITY).read_bytes()), key)
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.ORGANIZATION_NAME, name)])
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        _builder(subject, subject, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(identifier, critical=False)
    ).sign(key, _sha256())
    _write_key(place / _AUTHORITY_KEY, key)
    _write(place / AUTHORITY, certificate.public_bytes(serialization.Encoding.PEM))
    return _Signer(certificate, key)


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
            names.append(x509.DNSName(host))
    return names


def _named_hosts(certificate: Path) -> list[x509.GeneralName]:
    """Return the hosts that the coordinator's certificate names; none where there is no certificate yet."""
    from cryptography import x509

    if not certificate.exists():
        return []
    try:
        loaded = x509.load_pem_x509_certificate(certificate.read_bytes())
        return list(loaded.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except (ValueError, x509.ExtensionNotFound) as error:
        raise CoordinatorError(
            f"{certificate} is not a certificate that was made here: {error}",
            remedy="Move it away, and the same command makes another; then start the coordinator again.",
        ) from error


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


ROOT = "root"
_EXISTS = ("already exists", "already granted", "role name not found")


def root_access(directory: Path) -> Access:
    """Return the credentials of root, whom etcd allows everything. Raises CoordinatorError.

    directory: where `bloomery coordinate --init-certs` made the certificates.
    """
    central = directory / "coordinator"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(central / AUTHORITY)
        context.load_cert_chain(central / SERVER, central / SERVER_KEY)
        password = (central / PASSWORD).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise CoordinatorError(
            f"{central} cannot be used: {error}",
            remedy="Name the directory that `bloomery coordinate --init-certs` made.",
        ) from error
    return Access(context=context, user=ROOT, password=password)


def accounts_in(directory: Path) -> tuple[CoordinatorAccount, ...]:
    """Return the accounts of all bundles that were made in `directory`."""
    return tuple(read_account(path.parent) for path in sorted(directory.glob(f"*/*/{ACCOUNT}")))


def apply_access(endpoints: Sequence[str], root: Access, accounts: Iterable[CoordinatorAccount]) -> int:
    """Create or update these accounts and root in etcd, and switch authentication on.

    Returns the number of accounts. Raises CoordinatorError.
    """
    with Etcd(endpoints, root, deadline_s=30.0) as etcd:
        try:
            etcd.call("auth/status", {})
            etcd.call("auth/user/list", {})
        except EtcdRefused:  # authentication is off, so root does not exist yet
            without_user = dataclasses.replace(root, user="", password="")
            with Etcd(endpoints, without_user, deadline_s=30.0) as open_etcd:
                _user(open_etcd, ROOT, root.password)
                _ask(open_etcd, "auth/role/add", {"name": ROOT})
                _ask(open_etcd, "auth/user/grant", {"user": ROOT, "role": ROOT})
                open_etcd.call("auth/enable", {})
        count = 0
        for account in accounts:
            role = f"peer-{account.run}/{account.peer}"
            _ask(etcd, "auth/role/add", {"name": role})
            for permission in _permissions(Keys(account.run), account.peer):
                _ask(etcd, "auth/role/grant", {"name": role, "perm": permission})
            _user(etcd, account.user, account.password)
            _ask(etcd, "auth/user/grant", {"user": account.user, "role": role})
            # Earlier versions made this role, which let every peer of a run write all of the run's keys.
            _ask(etcd, "auth/role/delete", {"role": f"run-{account.run}"})
            count += 1
    return count


def _user(etcd: Etcd, name: str, password: str) -> None:
    if not _ask(etcd, "auth/user/add", {"name": name, "password": password}):
        etcd.call("auth/user/changepw", {"name": name, "password": password})


def _permissions(keys: Keys, peer: str) -> list[dict[str, str]]:
    writable = (keys.of_peer(peer), *keys.shared)
    return [_permission("READ", keys.root), *(_permission("READWRITE", key) for key in writable)]


def _permission(kind: str, key: str) -> dict[str, str]:
    """Return a permission as JSON: for one key or, where `key` ends with a slash, for all keys below it."""
    start = key.encode()
    permission = {"permType": kind, "key": base64.b64encode(start).decode()}
    if key.endswith("/"):
        end = start[:-1] + bytes([start[-1] + 1])
        permission["range_end"] = base64.b64encode(end).decode()
    return permission


def _ask(etcd: Etcd, path: str, body: Mapping[str, Any]) -> bool:  # Any: JSON
    """Call etcd's API and return whether this changed something: what exists already is no error."""
    try:
        etcd.call(path, body)
    except EtcdRefused as error:
        if any(word in error.message for word in _EXISTS):
            return False
        raise
    return True
