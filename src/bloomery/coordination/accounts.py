"""Creates the peers' accounts in etcd, with the credentials of root, whom etcd allows everything."""

from __future__ import annotations

import base64
import dataclasses
import ssl
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bloomery.coordination.certificates import (
    PASSWORD,
    PASSWORD_REMEDY,
    SERVER,
    SERVER_KEY,
    server_certificates,
)
from bloomery.coordination.credentials import ACCOUNT, AUTHORITY, CoordinatorAccount, account_made_for
from bloomery.coordination.etcd import Etcd
from bloomery.coordination.etcd_answers import EtcdRefused
from bloomery.coordination.gateway import Access
from bloomery.errors import CoordinatorError
from bloomery.protocol.keys import Keys

ROOT = "root"
_WRONG_PASSWORD = "invalid user ID or password"
_EXISTS = ("already exists", "already granted", "role name not found")


def root_access(directory: Path) -> Access:
    """Return the credentials of root, whom etcd allows everything. Raises CoordinatorError.

    directory: where `bloomery coordinate --init-certs` made the certificates.
    """
    central = directory / "coordinator"
    server_certificates(directory)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(central / AUTHORITY)
        context.load_cert_chain(central / SERVER, central / SERVER_KEY)
        password = (central / PASSWORD).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError; the password may be no text
        raise CoordinatorError(
            f"{central} cannot be used: {error}",
            remedy="Name the directory that `bloomery coordinate --init-certs` made.",
        ) from error
    return Access(context=context, user=ROOT, password=password)


def accounts_in(directory: Path) -> tuple[CoordinatorAccount, ...]:
    """Return the accounts of all bundles that were made in `directory`. Raises CoordinatorError."""
    bundles = (path.parent for path in sorted(directory.glob(f"*/*/{ACCOUNT}")))
    return tuple(account_made_for(bundle, run=bundle.parent.name, peer=bundle.name) for bundle in bundles)


def apply_access(endpoints: Sequence[str], root: Access, accounts: Iterable[CoordinatorAccount]) -> int:
    """Create or update these accounts and root in etcd, and switch authentication on.

    Returns the number of accounts. Raises CoordinatorError.
    """
    made = tuple(accounts)
    with Etcd(endpoints, dataclasses.replace(root, user="", password=""), deadline_s=30.0) as open_etcd:
        if not _asks_for_passwords(open_etcd):
            _user(open_etcd, ROOT, root.password)
            _ask(open_etcd, "auth/role/add", {"name": ROOT})
            _ask(open_etcd, "auth/user/grant", {"user": ROOT, "role": ROOT})
            # Peers that were connected to an etcd of before ask this one all the time. If it asked for their
            # passwords before it had their accounts, it would refuse them, and they would end.
            _create(open_etcd, made)
            open_etcd.call("auth/enable", {})
            return len(made)
    with Etcd(endpoints, root, deadline_s=30.0) as etcd:
        try:
            etcd.call("auth/user/list", {})
        except EtcdRefused as error:
            if _WRONG_PASSWORD in error.message:
                raise CoordinatorError(
                    f"this etcd knows another password of root than {PASSWORD}", remedy=PASSWORD_REMEDY
                ) from error
            raise
        _create(etcd, made)
    return len(made)


def _asks_for_passwords(open_etcd: Etcd) -> bool:
    """Whether authentication is on, as a client without a user finds out."""
    try:
        return open_etcd.call("auth/status", {}).get("enabled") is True
    except EtcdRefused:
        return True


def _create(etcd: Etcd, accounts: Iterable[CoordinatorAccount]) -> None:
    for account in accounts:
        role = f"peer-{account.run}/{account.peer}"
        _ask(etcd, "auth/role/add", {"name": role})
        for permission in _permissions(Keys(account.run), account.peer):
            _ask(etcd, "auth/role/grant", {"name": role, "perm": permission})
        _user(etcd, account.user, account.password)
        _ask(etcd, "auth/user/grant", {"user": account.user, "role": role})
        # Earlier versions made this role, which let every peer of a run write all of the run's keys.
        _ask(etcd, "auth/role/delete", {"role": f"run-{account.run}"})


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
