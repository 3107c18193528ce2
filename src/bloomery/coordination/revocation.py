"""Removes a peer from a run by name: its account, its certificate, and all that it has written.

The coordinator keeps the serial numbers of revoked certificates below a key that no peer may write. Every
peer reads them there, closes its connections to who holds such a certificate, and lets in nobody with one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bloomery import durable
from bloomery.coordination.credentials import ACCOUNT, CERTIFICATE, read_certificate
from bloomery.coordination.etcd import Etcd
from bloomery.coordination.gateway import Access, EtcdRefused
from bloomery.errors import CoordinatorError
from bloomery.protocol.keys import Keys

_REVOKED = ".revoked"
_ABSENT = ("user name not found", "role name not found")


def revoke(directory: Path, etcd: Etcd, *, run: str, peer: str) -> str:
    """Revoke a peer's account and certificate; return the certificate's serial number.

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
    serial = read_certificate(bundle / CERTIFICATE).serial
    _remove(etcd, Keys(run), run=run, peer=peer, serial=serial)
    kept_at = directory / run / _REVOKED / f"{peer}-{serial}"
    try:
        kept_at.parent.mkdir(mode=0o700, exist_ok=True)
        durable.replace(bundle, kept_at)
    except OSError as error:
        raise CoordinatorError(
            f"{peer!r} is revoked, but its bundle cannot be moved to {kept_at}: {error.strerror}",
            remedy="Move it by hand, or the next start of the coordinator makes its account again.",
        ) from error
    return serial


def restore_revocations(directory: Path, root: Access, endpoints: Sequence[str]) -> int:
    """Write down again, in a coordinator that may have lost its data, who was revoked; return how many."""
    revoked = sorted(directory.glob(f"*/{_REVOKED}/*/{CERTIFICATE}"))
    if not revoked:
        return 0
    with Etcd(endpoints, root, deadline_s=30.0) as etcd:
        for certificate in revoked:
            run = certificate.parents[2].name
            peer, _, serial = certificate.parent.name.rpartition("-")
            if (directory / run / peer / ACCOUNT).is_file():  # the name has a new bundle and account
                etcd.put(Keys(run).revoked(serial), peer)
            else:
                _remove(etcd, Keys(run), run=run, peer=peer, serial=serial)
    return len(revoked)


def _remove(etcd: Etcd, keys: Keys, *, run: str, peer: str, serial: str) -> None:
    """Take away the account, then the lease with what lies on it, then the other records."""
    etcd.put(keys.revoked(serial), peer)
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
