"""Who may do what at the coordinator: one role a run, on the run's keys alone, and one user a peer.

Applying it again changes nothing, but for passwords that have changed.
"""

from __future__ import annotations

import base64
import dataclasses
import ssl
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bloomery.elastic.control.bundle import ACCOUNT, AUTHORITY, Account, read_account
from bloomery.elastic.control.certificates import PASSWORD, SERVER, SERVER_KEY
from bloomery.elastic.control.etcd import Etcd
from bloomery.elastic.control.gateway import Access, Refused
from bloomery.elastic.control.keys import Keys
from bloomery.errors import CoordinatorError

ROOT = "root"
_EXISTS = ("already exists", "already granted")


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


def accounts_in(directory: Path) -> tuple[Account, ...]:
    """Return the accounts of all bundles that were made there."""
    return tuple(read_account(path.parent) for path in sorted(directory.glob(f"*/*/{ACCOUNT}")))


def apply_access(endpoints: Sequence[str], root: Access, accounts: Iterable[Account]) -> int:
    """Make the coordinator know these accounts and nobody else but root; returns how many.

    Raises CoordinatorError.
    """
    with Etcd(endpoints, root, deadline_s=30.0) as etcd:
        try:
            etcd.call("auth/status", {})
            etcd.call("auth/user/list", {})
        except Refused:  # nobody is known yet
            nobody = dataclasses.replace(root, user="", password="")
            with Etcd(endpoints, nobody, deadline_s=30.0) as first:
                _user(first, ROOT, root.password)
                _ask(first, "auth/role/add", {"name": ROOT})
                _ask(first, "auth/user/grant", {"user": ROOT, "role": ROOT})
                first.call("auth/enable", {})
        count = 0
        for account in accounts:
            role = f"run-{account.run}"
            _ask(etcd, "auth/role/add", {"name": role})
            _ask(etcd, "auth/role/grant", {"name": role, "perm": _permission(account.run)})
            _user(etcd, account.user, account.password)
            _ask(etcd, "auth/user/grant", {"user": account.user, "role": role})
            count += 1
    return count


def _user(etcd: Etcd, name: str, password: str) -> None:
    if not _ask(etcd, "auth/user/add", {"name": name, "password": password}):
        etcd.call("auth/user/changepw", {"name": name, "password": password})


def _permission(run: str) -> dict[str, str]:
    prefix = Keys(run).root.encode()
    end = prefix[:-1] + bytes([prefix[-1] + 1])
    return {
        "permType": "READWRITE",
        "key": base64.b64encode(prefix).decode(),
        "range_end": base64.b64encode(end).decode(),
    }


def _ask(etcd: Etcd, path: str, body: Mapping[str, Any]) -> bool:  # Any: JSON
    """Whether it is new."""
    try:
        etcd.call(path, body)
    except Refused as error:
        if any(word in error.message for word in _EXISTS):
            return False
        raise
    return True
