"""Reads a peer's bundle, the directory with its certificate, key and account, and finds the endpoints.

authority.pem     the authority that signed the certificates of the run's peers
certificate.pem   this peer's certificate, with its name as subjectAltName and no common name
key.pem           the key of that certificate, mode 0600
coordinator.pem   the authority that signed the coordinator's certificate
account.json      run, peer, user and password, mode 0600

`endpoints_of` finds the coordinator: in the recipe, in the environment, or on this machine.
"""

from __future__ import annotations

import json
import os
import ssl
from dataclasses import asdict, dataclass
from pathlib import Path

from bloomery.coordination.gateway import Access
from bloomery.errors import CoordinatorError
from bloomery.protocol.keys import is_name

AUTHORITY, CERTIFICATE, KEY = "authority.pem", "certificate.pem", "key.pem"
COORDINATOR, ACCOUNT = "coordinator.pem", "account.json"


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
    """Return the bundle in a directory. Raises CoordinatorError if a file is missing."""
    account = read_account(directory)
    for name in (AUTHORITY, CERTIFICATE, KEY, COORDINATOR):
        if not (directory / name).is_file():
            raise _unusable(directory, f"it has no {name}")
    return Bundle(directory=directory, account=account)


def read_account(directory: Path) -> CoordinatorAccount:
    """Return the account of a bundle. Raises CoordinatorError."""
    try:
        stored = json.loads((directory / ACCOUNT).read_text(encoding="utf-8"))
        account = CoordinatorAccount(**stored)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise _unusable(directory, str(error)) from error
    if not (is_name(account.run) and is_name(account.peer)):
        raise _unusable(directory, "its account names no run and peer")
    if not all(isinstance(text, str) for text in (account.user, account.password)):
        raise _unusable(directory, "its account has no user and password")
    return account


def _unusable(directory: Path, why: str) -> CoordinatorError:
    return CoordinatorError(
        f"the certificates in {directory} cannot be used: {why}",
        remedy="`bloomery coordinate --init-certs` makes a bundle for each peer.",
    )


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
