"""Creates etcd users and roles: one for each peer, which may write that peer's own keys alone.

It reads its run's keys alone, and writes what it says of itself, and what every peer of the run must be able
to write (`Keys.shared`): no member, offer, announcement or testimony in another's name. Nor does it end
another's lease, for etcd lets only those end a lease who may write what lies on it.

Applying it again changes nothing, but for passwords that have changed.
"""

from __future__ import annotations

import base64
import dataclasses
import ssl
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bloomery.coordination.certificates import PASSWORD, SERVER, SERVER_KEY
from bloomery.coordination.credentials import ACCOUNT, AUTHORITY, CoordinatorAccount, read_account
from bloomery.coordination.etcd import Etcd
from bloomery.coordination.gateway import Access, EtcdRefused
from bloomery.errors import CoordinatorError
from bloomery.protocol.keys import Keys

ROOT = "root"
_EXISTS = ("already exists", "already granted", "role name not found")


def root_access(directory: Path) -> Access:
    """What the one who made the certificates shows: everything is allowed. Raises CoordinatorError."""
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
    """Return the accounts of all bundles that were made there."""
    return tuple(read_account(path.parent) for path in sorted(directory.glob(f"*/*/{ACCOUNT}")))


def apply_access(endpoints: Sequence[str], root: Access, accounts: Iterable[CoordinatorAccount]) -> int:
    """Make the coordinator know these accounts and nobody else but root; returns how many.

    Raises CoordinatorError.
    """
    with Etcd(endpoints, root, deadline_s=30.0) as etcd:
        try:
            etcd.call("auth/status", {})
            etcd.call("auth/user/list", {})
        except EtcdRefused:  # nobody is known yet
            nobody = dataclasses.replace(root, user="", password="")
            with Etcd(endpoints, nobody, deadline_s=30.0) as first:
                _user(first, ROOT, root.password)
                _ask(first, "auth/role/add", {"name": ROOT})
                _ask(first, "auth/user/grant", {"user": ROOT, "role": ROOT})
                first.call("auth/enable", {})
        count = 0
        for account in accounts:
            role = f"peer-{account.run}/{account.peer}"
            _ask(etcd, "auth/role/add", {"name": role})
            for permission in _permissions(Keys(account.run), account.peer):
                _ask(etcd, "auth/role/grant", {"name": role, "perm": permission})
            _user(etcd, account.user, account.password)
            _ask(etcd, "auth/user/grant", {"user": account.user, "role": role})
            # Of earlier versions: it let every peer of a run write all of the run's keys.
            _ask(etcd, "auth/role/delete", {"role": f"run-{account.run}"})
            count += 1
    return count


def _user(etcd: Etcd, name: str, password: str) -> None:
    if not _ask(etcd, "auth/user/add", {"name": name, "password": password}):
        etcd.call("auth/user/changepw", {"name": name, "password": password})


def _permissions(keys: Keys, peer: str) -> list[dict[str, str]]:
    written = (keys.of_peer(peer), *keys.shared)
    return [_permission("READ", keys.root), *(_permission("READWRITE", key) for key in written)]


def _permission(kind: str, key: str) -> dict[str, str]:
    """Of a key, or of all below one that ends with a slash."""
    first = key.encode()
    permission = {"permType": kind, "key": base64.b64encode(first).decode()}
    if key.endswith("/"):
        end = first[:-1] + bytes([first[-1] + 1])
        permission["range_end"] = base64.b64encode(end).decode()
    return permission


def _ask(etcd: Etcd, path: str, body: Mapping[str, Any]) -> bool:  # Any: JSON
    """Whether it changed something."""
    try:
        etcd.call(path, body)
    except EtcdRefused as error:
        if any(word in error.message for word in _EXISTS):
            return False
        raise
    return True
