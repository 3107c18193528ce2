"""A peer's bundle (certificate, key, account): reads it, warns before the certificate expires, revokes it.

authority.pem     the authority that signed the certificates of the run's peers
certificate.pem   this peer's certificate, with its name as subjectAltName and no common name
key.pem           the key of that certificate, mode 0600
coordinator.pem   the authority that signed the coordinator's certificate
account.json      run, peer, user and password, mode 0600
earlier/          the certificates that were renewed, each valid until its end: a revocation names them too

`endpoints_of` finds the coordinator: in the recipe, in the environment, or on this machine. Certificates are
read without `cryptography`, which only the machine that makes them needs.

The coordinator keeps the serial numbers of revoked certificates below a key that no peer may write. Every
peer reads them there, closes its connections to who holds such a certificate, and lets in nobody with one.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bloomery import durable
from bloomery.coordination.certificate_files import certificates_fault, content_fault, signed_fault
from bloomery.coordination.etcd import Etcd
from bloomery.coordination.etcd_answers import EtcdRefused
from bloomery.coordination.gateway import Access
from bloomery.errors import CoordinatorError
from bloomery.protocol.keys import Keys, is_name

log = logging.getLogger(__name__)

AUTHORITY, CERTIFICATE, KEY = "authority.pem", "certificate.pem", "key.pem"
COORDINATOR, ACCOUNT, EARLIER = "coordinator.pem", "account.json", "earlier"


@dataclass(frozen=True, kw_only=True)
class CoordinatorAccount:
    """A peer's user name and password at the coordinator, and the run and peer that they belong to."""

    run: str
    peer: str
    user: str
    password: str

    def __repr__(self) -> str:
        return f"Account(run={self.run!r}, peer={self.peer!r}, user={self.user!r})"

    def text(self) -> str:
        """Return the content of the bundle's account.json."""
        return json.dumps(asdict(self), indent=1) + "\n"


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A bundle's directory, and the account that it holds."""

    directory: Path
    account: CoordinatorAccount

    @property
    def authority(self) -> Path:
        """The file of the authority that signed the certificates of the run's peers."""
        return self.directory / AUTHORITY

    @property
    def certificate(self) -> Path:
        """The file of the peer's certificate."""
        return self.directory / CERTIFICATE

    @property
    def key(self) -> Path:
        """The file of the certificate's key."""
        return self.directory / KEY

    def access(self) -> Access:
        """Return the credentials with which this peer asks the coordinator. Raises CoordinatorError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_verify_locations(self.directory / COORDINATOR)
            context.load_cert_chain(self.certificate, self.key)
        except OSError as error:  # ssl.SSLError is an OSError
            raise _unusable(self.directory, str(error)) from error
        return Access(context=context, user=self.account.user, password=self.account.password)


def read_bundle(directory: Path) -> Bundle:
    """Return the bundle in a directory. Raises CoordinatorError if a file is missing or cannot be used."""
    account = read_account(directory)
    for name in (AUTHORITY, CERTIFICATE, KEY, COORDINATOR):
        if not (directory / name).exists():
            raise _unusable(directory, f"it has no {name}")
    bundle = Bundle(directory=directory, account=account)
    fault = signed_fault(
        authority=bundle.authority, certificate=bundle.certificate, key=bundle.key, peer=account.peer
    ) or certificates_fault(directory / COORDINATOR)
    if fault is not None:
        raise _unusable(directory, str(fault))
    return bundle


def account_made_for(directory: Path, *, run: str, peer: str) -> CoordinatorAccount:
    """Return the account of a bundle where it was made. Raises CoordinatorError if it is not that peer's."""
    account = read_account(directory, remedy=_ANOTHER_ACCOUNT)
    if (account.run, account.peer) != (run, peer):
        why = f"{ACCOUNT} is that of {account.peer!r} of the run {account.run!r}"
        raise _unusable(directory, why, remedy=_ANOTHER_ACCOUNT)
    return account


_COPY_AGAIN = (
    "Copy the bundle again from the machine on which `bloomery coordinate --init-certs` made it. There "
    "--renew makes its certificate, key and authorities anew, and its account, too, where "
    f"{ACCOUNT} was moved away."
)
_ANOTHER_ACCOUNT = (
    f"Copy {ACCOUNT} from the peer's machine; or move it away, let `bloomery coordinate --init-certs` make "
    "the peer another bundle, copy that to its machine, and start the coordinator again."
)


def read_account(directory: Path, *, remedy: str = _COPY_AGAIN) -> CoordinatorAccount:
    """Return the etcd account in a peer's directory of credentials.

    Raises CoordinatorError, with `remedy`.
    """
    fault = content_fault(directory / ACCOUNT)
    if fault is not None:
        raise _unusable(directory, str(fault), remedy=remedy)
    try:
        stored = json.loads((directory / ACCOUNT).read_text(encoding="utf-8"))
        account = CoordinatorAccount(**stored)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise _unusable(directory, f"{ACCOUNT} is damaged: {error}", remedy=remedy) from error
    if not (is_name(account.run) and is_name(account.peer)):
        raise _unusable(directory, "its account names no run and peer", remedy=remedy)
    if not all(isinstance(text, str) for text in (account.user, account.password)):
        raise _unusable(directory, "its account has no user and password", remedy=remedy)
    return account


def _unusable(directory: Path, why: str, *, remedy: str = _COPY_AGAIN) -> CoordinatorError:
    return CoordinatorError(f"the certificates in {directory} cannot be used: {why}", remedy=remedy)


ENVIRONMENT = "BLOOMERY_COORDINATOR"
DEFAULT_ADDRESS = "127.0.0.1:2379"


def endpoints_of(setting: str, *, has_certificates: bool = False) -> tuple[str, ...]:
    """Return the endpoints that `setting` names, else those of BLOOMERY_COORDINATOR, else the default.

    setting: elastic.coordinator, URLs separated by commas; "" for none.
    has_certificates: whether the default is a coordinator with certificates.
    Raises CoordinatorError.
    """
    default = f"{'https' if has_certificates else 'http'}://{DEFAULT_ADDRESS}"
    named = setting or os.environ.get(ENVIRONMENT, "") or default
    endpoints = tuple(word.strip() for word in named.split(",") if word.strip())
    for endpoint in endpoints:
        if not endpoint.startswith(("http://", "https://")):
            raise CoordinatorError(
                f"the endpoint {endpoint!r} of the coordinator is no URL",
                remedy=f"Write http://host:2379, in elastic.coordinator, --endpoints or {ENVIRONMENT}.",
            )
    return endpoints


WARN_DAYS = 30
"""The days before the end of a certificate from which on its peer warns of that."""
_SEQUENCE, _VERSION, _UTC_TIME = 0x30, 0xA0, 0x17
_CENTURY = 50


@dataclass(frozen=True, kw_only=True)
class CertificateDates:
    """What identifies a certificate, and when it ends.

    serial: in upper-case hexadecimal digits, as Python's ssl module shows it.
    ends: the last moment at which it is valid, UTC.
    """

    serial: str
    ends: datetime.datetime

    def days_left(self, now: datetime.datetime | None = None) -> float:
        """Return the days until it ends, below 0 if it has ended."""
        return (self.ends - (now or datetime.datetime.now(datetime.UTC))).total_seconds() / 86_400


def read_certificate(path: Path, *, remedy: str = _COPY_AGAIN) -> CertificateDates:
    """Return the serial number and the end of a PEM certificate. Raises CoordinatorError, with `remedy`."""
    try:
        content = ssl.PEM_cert_to_DER_cert(path.read_text(encoding="ascii"))
        return _parsed(content)
    except (OSError, ValueError, IndexError) as error:
        raise CoordinatorError(f"the certificate {path} cannot be read: {error}", remedy=remedy) from error


def _parsed(content: bytes) -> CertificateDates:
    """Walk through the fields of a certificate (RFC 5280, section 4.1) up to its validity."""
    tag, certificate, _ = _field(content)
    if tag != _SEQUENCE:
        raise ValueError("it is no certificate")
    _, fields, _ = _field(certificate)
    tag, value, rest = _field(fields)
    if tag == _VERSION:
        _, value, rest = _field(rest)
    serial = int.from_bytes(value, "big")
    for _ in ("signature algorithm", "issuer"):
        _, _, rest = _field(rest)
    _, validity, _ = _field(rest)
    _, _, last = _field(validity)
    tag, text, _ = _field(last)
    digits = text.decode("ascii")
    if tag == _UTC_TIME:  # years of two digits, from 1950 to 2049
        digits = f"{'19' if int(digits[:2]) >= _CENTURY else '20'}{digits}"
    ends = datetime.datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=datetime.UTC)
    shown = f"{serial:X}"
    return CertificateDates(serial=shown.zfill(len(shown) + len(shown) % 2), ends=ends)


def _field(content: bytes) -> tuple[int, bytes, bytes]:
    """Return the tag and the content of the first DER field, and what follows it."""
    tag, length, start = content[0], content[1], 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(content[2:start], "big")
    if start + length > len(content):
        raise ValueError("it ends too early")
    return tag, content[start : start + length], content[start + length :]


_CHECK_EVERY_S = 60.0
_WARN_EVERY_S = 24 * 3600.0


class CertificateWatch:
    """Reloads a peer's certificate when its file changes, and warns before it expires; a thread, until
    `close`.

    certificate, key: the files in the peer's bundle.
    users: called with both files after they have changed; each shows the new certificate from then on, and
        raises OSError if it cannot be used, as while only one of the two files is the new one.
    """

    def __init__(self, certificate: Path, key: Path, users: Sequence[Callable[[Path, Path], None]]) -> None:
        self._certificate, self._key, self._users = certificate, key, tuple(users)
        self._loaded = self._written()
        self._warned_s = float("-inf")
        self._ended = threading.Event()
        self.check()
        threading.Thread(target=self._run, name="certificate", daemon=True).start()

    def check(self) -> None:
        """Load the certificate if its files have changed, and warn once a day if it ends soon."""
        try:
            written = self._written()
            if written != self._loaded:
                _require_pair(self._certificate, self._key)
                for load in self._users:
                    load(self._certificate, self._key)
                self._loaded, self._warned_s = written, float("-inf")
                ends = read_certificate(self._certificate).ends
                log.info("the certificate was renewed: it is valid until %s", ends.date())
            days = read_certificate(self._certificate).days_left()
        except (OSError, CoordinatorError) as error:
            log.warning("the certificate cannot be loaded, so the one before is shown: %s", error)
            return
        now_s = time.monotonic()
        if days < WARN_DAYS and now_s >= self._warned_s + _WARN_EVERY_S:
            self._warned_s = now_s
            log.warning(
                "this peer's certificate %s: `bloomery coordinate --init-certs DIR --run RUN --peers NAME "
                "--renew` makes a new one; copy its certificate.pem and key.pem here, without a restart",
                f"ends in {days:.0f} days" if days >= 0 else "has ended",
            )

    def close(self) -> None:
        """End the thread."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(_CHECK_EVERY_S):
            self.check()

    def _written(self) -> tuple[int, ...]:
        """Return when both files were written; zeros for one that is missing."""
        paths = (self._certificate, self._key)
        return tuple(path.stat().st_mtime_ns if path.exists() else 0 for path in paths)


def _require_pair(certificate: Path, key: Path) -> None:
    """Raise OSError unless this is the certificate's key.

    A context that is given a certificate without its key shows neither that one nor the one before.
    """
    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(certificate, key)


_REVOKED = ".revoked"
_ABSENT = ("user name not found", "role name not found")


def revoke(directory: Path, etcd: Etcd, *, run: str, peer: str) -> tuple[str, ...]:
    """Revoke a peer's account and its certificates; return their serial numbers, that in use first.

    Its bundle is moved to DIRECTORY/RUN/.revoked, so that --init-certs can make a new one for the name.

    directory: where `--init-certs` made the certificates. etcd: a client with root's access.
    Raises CoordinatorError.
    """
    bundle = directory / run / peer
    if not (bundle / ACCOUNT).is_file():
        raise CoordinatorError(
            f"{directory} has no bundle of a peer {peer!r} of the run {run!r}",
            remedy="Name the directory of --init-certs, the run and one of its peers.",
        )
    in_use = read_certificate(
        bundle / CERTIFICATE,
        remedy="Copy it from the peer's machine: a revocation needs its serial number.",
    )
    serials = (in_use.serial, *_earlier_serials(bundle))
    _remove(etcd, Keys(run), run=run, peer=peer, serials=serials)
    kept_at = directory / run / _REVOKED / f"{peer}-{serials[0]}"
    try:
        kept_at.parent.mkdir(mode=0o700, exist_ok=True)
        durable.replace(bundle, kept_at)
    except OSError as error:
        raise CoordinatorError(
            f"{peer!r} is revoked, but its bundle cannot be moved to {kept_at}: {error.strerror}",
            remedy="Move it by hand, or the next start of the coordinator makes its account again.",
        ) from error
    return serials


def restore_revocations(directory: Path, root: Access, endpoints: Sequence[str]) -> int:
    """Write down again, in a coordinator that may have lost its data, who was revoked.

    Returns the number of certificates.
    """
    revoked = sorted(path for path in directory.glob(f"*/{_REVOKED}/*-*") if path.is_dir())
    if not revoked:
        return 0
    count = 0
    with Etcd(endpoints, root, deadline_s=30.0) as etcd:
        for bundle in revoked:
            run = bundle.parents[1].name
            peer, _, in_use = bundle.name.rpartition("-")
            serials = (in_use, *_earlier_serials(bundle))
            if (directory / run / peer / ACCOUNT).is_file():  # the name has a new bundle and account
                _refuse(etcd, Keys(run), peer, serials)
            else:
                _remove(etcd, Keys(run), run=run, peer=peer, serials=serials)
            count += len(serials)
    return count


def _earlier_serials(bundle: Path) -> tuple[str, ...]:
    """Return the serial numbers of the certificates that were renewed, after which their files are named."""
    return tuple(path.stem for path in sorted((bundle / EARLIER).glob("*.pem")))


def _refuse(etcd: Etcd, keys: Keys, peer: str, serials: Sequence[str]) -> None:
    """Write down for all peers that a peer's certificates are refused."""
    for serial in serials:
        etcd.put(keys.revoked(serial), peer)


def _remove(etcd: Etcd, keys: Keys, *, run: str, peer: str, serials: Sequence[str]) -> None:
    """Take away the account, then the lease with what lies on it, then the other records."""
    _refuse(etcd, keys, peer, serials)
    for path, body in (
        ("auth/user/delete", {"name": f"{run}/{peer}"}),
        ("auth/role/delete", {"role": f"peer-{run}/{peer}"}),
    ):
        try:
            etcd.call(path, body)
        except EtcdRefused as error:
            if not any(word in error.message for word in _ABSENT):
                raise
    listed = etcd.get(keys.member(peer))
    if listed is not None and listed.lease:
        etcd.revoke(listed.lease)
    etcd.delete(keys.of_peer(peer), prefix=True)
