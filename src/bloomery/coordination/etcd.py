"""A client for the part of etcd v3 that a run needs: ranges, transactions, leases and watches.

Every call has a deadline and raises CoordinatorAway after it. The result of a transaction whose answer was
lost is `TransactionResult.UNKNOWN`: the caller must read whether it was carried out.
"""

from __future__ import annotations

import base64
import binascii
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from bloomery.coordination.etcd_answers import COMPACTED, AnswerTooLong, EtcdRefused
from bloomery.coordination.etcd_watch import KeyValue, KeyWatch
from bloomery.coordination.gateway import Access, Gateway, Json, OutcomeUnknown
from bloomery.errors import CoordinatorAway, CoordinatorError

DEADLINE_S = 5.0
VALUE_BYTES_AT_MOST = 1 << 20
_NOT_FOUND = 5
_PAGE, _SMALLER = 256, 8
"""The keys of one page of a listing, and by what the pages are divided where one is too long to be read."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Keys as they were at one revision of etcd.

    items: in the order of keys, or the reverse where only the newest were asked for.
    cluster: the id of the cluster; one that lost its data and began anew has another.
    """

    revision: int
    items: tuple[KeyValue, ...]
    cluster: int = 0


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A condition of a transaction: that one aspect of a key has the wanted value.

    aspect: value: the key's text; created, modified: its create_revision or mod_revision, 0 if it is absent.
    """

    key: str
    aspect: Literal["value", "created", "modified"]
    wanted: str | int


@dataclass(frozen=True, kw_only=True)
class Put:
    """The operation that writes a key. lease: the lease that it lies on; 0: none."""

    key: str
    value: str
    lease: int = 0


@dataclass(frozen=True, kw_only=True)
class Delete:
    """The operation that deletes a key or, with `prefix`, all keys that begin with it."""

    key: str
    prefix: bool = False


class TransactionResult(enum.Enum):
    """The result of a transaction."""

    DONE = "done"
    REFUSED = "a condition did not hold"
    UNKNOWN = "no answer came: it may have been carried out"


def absent(key: str) -> Condition:
    """Return the condition that a key does not exist."""
    return Condition(key=key, aspect="created", wanted=0)


class Etcd:
    """A client of one etcd cluster, for use by several threads. A context manager.

    deadline_s: of each call that names no other, seconds.
    """

    def __init__(
        self, endpoints: Sequence[str], access: Access | None = None, *, deadline_s: float = DEADLINE_S
    ) -> None:
        self._gateway = Gateway(endpoints, access)
        self._deadline_s = deadline_s

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The URLs of the cluster's members."""
        return self._gateway.endpoints

    def get(self, key: str, *, deadline_s: float | None = None) -> KeyValue | None:
        """Return a key, read linearizably; None if it is absent."""
        answer = self._call("kv/range", {"key": _coded(key)}, deadline_s)
        _header(answer)  # an answer without one does not tell that the key is absent
        rows = _rows(answer.get("kvs", []))
        return _item(rows[0]) if rows else None

    def list(
        self,
        prefix: str,
        *,
        revision: int = 0,
        newest: int = 0,
        keys_only: bool = False,
        deadline_s: float | None = None,
    ) -> Listing:
        """Return the keys that begin with `prefix`, read page by page as of one revision.

        A whole run over a slow link takes longer than one answer may, so `deadline_s` is that of one page.

        revision: as of this revision; 0: now.
        newest: the most items to return, from the last key backwards; 0: all.
        """
        place, page = _prefix(prefix), _PAGE
        cluster, items = 0, list[KeyValue]()
        while True:
            limit = min(page, newest - len(items)) if newest else page
            body: dict[str, Json] = {**place, "revision": str(revision), "keys_only": keys_only}
            body["limit"] = str(limit)
            if newest:
                body |= {"sort_order": "DESCEND", "sort_target": "KEY"}
            try:
                answer = self._call("kv/range", body, deadline_s)
            except AnswerTooLong:
                if page == 1:
                    raise
                page = max(1, page // _SMALLER)
                continue
            rows = _rows(answer.get("kvs", []))
            items += map(_item, rows)
            header = _header(answer)
            revision, cluster = revision or _whole(header, "revision"), _whole(header, "cluster_id")
            if not rows or answer.get("more") is not True or len(items) == newest:
                return Listing(revision=revision, items=tuple(items), cluster=cluster)
            last = str(rows[-1].get("key", ""))
            place |= {"range_end": last} if newest else {"key": _after(last)}

    def put(self, key: str, value: str, *, lease: int = 0, deadline_s: float | None = None) -> int:
        """Write a key and return etcd's revision. Raises LeaseGone."""
        answer = self._call("kv/put", _put(Put(key=key, value=value, lease=lease)), deadline_s)
        return _revision(answer)

    def put_once(self, key: str, value: str, *, lease: int, delete: Sequence[str] = ()) -> None:
        """Write a key on a lease, unless it has this value on this lease already. Raises LeaseGone.

        A request whose answer was lost is sent again and then changes nothing. So the key's revision, by
        which other peers name an offer, grows only once.

        delete: keys that are deleted in the same step, so that everybody who watches hears of all at once.
        """
        conditions = [
            {"key": _coded(key), "result": "EQUAL", "target": "VALUE", "value": _coded(value)},
            {"key": _coded(key), "result": "EQUAL", "target": "LEASE", "lease": str(lease)},
        ]
        deletes = [_operation(Delete(key=old)) for old in delete]
        put = _operation(Put(key=key, value=value, lease=lease))
        body = {"compare": conditions, "success": deletes, "failure": [put, *deletes]}
        self._call("kv/txn", body, None)

    def delete(self, key: str, *, prefix: bool = False, deadline_s: float | None = None) -> None:
        """Delete a key or, with `prefix`, all keys that begin with it."""
        self._call("kv/deleterange", _range_of(Delete(key=key, prefix=prefix)), deadline_s)

    def transact(
        self,
        conditions: Sequence[Condition],
        operations: Sequence[Put | Delete],
        *,
        deadline_s: float | None = None,
    ) -> TransactionResult:
        """Carry out all operations in one atomic step if all conditions hold. Raises LeaseGone."""
        body = {
            "compare": [_compare(condition) for condition in conditions],
            "success": [_operation(operation) for operation in operations],
        }
        try:
            answer = self._call("kv/txn", body, deadline_s, repeatable=False)
        except OutcomeUnknown:
            return TransactionResult.UNKNOWN
        return TransactionResult.DONE if answer.get("succeeded") is True else TransactionResult.REFUSED

    def grant(self, ttl_s: int, *, deadline_s: float | None = None) -> int:
        """Return the id of a new lease, which ends `ttl_s` after its last renewal."""
        answer = self._call("lease/grant", {"TTL": str(ttl_s)}, deadline_s)
        return _whole(answer, "ID")

    def keep_alive(self, lease: int, *, deadline_s: float | None = None) -> bool:
        """Renew a lease. Returns False if it has ended, and its keys with it."""
        answer = self._call("lease/keepalive", {"ID": str(lease)}, deadline_s)
        result = answer.get("result")
        if not isinstance(result, dict):
            raise _garbled("a lease's renewal")
        return _whole(result, "TTL") > 0

    def revoke(self, lease: int, *, deadline_s: float | None = None) -> None:
        """End a lease now, which deletes its keys. A lease that has ended already is no error."""
        try:
            self._call("lease/revoke", {"ID": str(lease)}, deadline_s)
        except LeaseGone:
            return

    def compact(self, revision: int, *, deadline_s: float | None = None) -> None:
        """Delete the history before a revision."""
        self._call("kv/compaction", {"revision": str(revision)}, deadline_s)

    def watch(
        self,
        prefix: str,
        *,
        after: int,
        cluster: int = 0,
        deadline_s: float | None = None,
        idle_s: float = 5.0,
    ) -> KeyWatch:
        """Open a stream of the changes to all keys that begin with `prefix`, and return it.

        after: the revision of the store after which changes are reported.
        cluster: the id of the cluster of which that is a revision; 0: any.
        deadline_s: seconds for opening the stream; None: those of this client.
        idle_s: seconds without a byte after which the stream counts as lost.
        """
        # In fragments, because all that was missed may be more than any answer of which the end is awaited.
        request = {**_prefix(prefix), "start_revision": str(after + 1), "fragment": True}
        body = {"create_request": request}
        limit_s = self._deadline_s if deadline_s is None else deadline_s
        stream = self._gateway.stream("watch", body, deadline_s=limit_s, idle_s=idle_s)
        return KeyWatch(stream, after=after, cluster=cluster, refused=self._gateway.stream_refused)

    def client_urls(self) -> tuple[str, ...]:
        """Return the URLs at which the members of the cluster say that clients reach them."""
        members = _rows(self._call("cluster/member/list", {}, None).get("members", []))
        lists = [member.get("clientURLs", []) for member in members]
        if not all(isinstance(urls, list) and all(isinstance(url, str) for url in urls) for urls in lists):
            raise _garbled("the members")
        return tuple(url for urls in lists for url in urls)

    def call(self, path: str, body: Mapping[str, Json], *, deadline_s: float | None = None) -> Json:
        """Call any other path of the API, such as those of users and roles, and return the answer."""
        return self._call(path, body, deadline_s)

    def load_certificate(self, certificate: Path, key: Path) -> None:
        """Show this certificate to the coordinator from now on. Raises OSError if it cannot be used."""
        self._gateway.load_certificate(certificate, key)

    def close(self) -> None:
        """Close the connections."""
        self._gateway.close()

    def __enter__(self) -> Etcd:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(
        self, path: str, body: Mapping[str, Json], deadline_s: float | None, *, repeatable: bool = True
    ) -> Json:
        limit_s = self._deadline_s if deadline_s is None else deadline_s
        try:
            answer = self._gateway.call(path, body, deadline_s=limit_s, repeatable=repeatable)
        except EtcdRefused as error:
            if error.code == _NOT_FOUND and "lease" in error.message:
                raise LeaseGone(error.message) from error
            if error.code == COMPACTED:  # between two pages; a listing of now succeeds
                raise CoordinatorAway(f"{error.message}, while it was read") from error
            raise
        if not isinstance(answer, dict):
            raise _garbled(path)
        return answer


class LeaseGone(CoordinatorError):
    """The lease has ended, because it was not renewed in time or was revoked."""


def _prefix(prefix: str) -> dict[str, str]:
    end = prefix.encode()
    return {"key": _coded(prefix), "range_end": base64.b64encode(end[:-1] + bytes([end[-1] + 1])).decode()}


def _after(key: str) -> str:
    """Return the first key after this one, which may be no text; both as the gateway writes keys."""
    try:
        return base64.b64encode(base64.b64decode(key, validate=True) + b"\0").decode()
    except ValueError as error:
        raise _garbled("a listing") from error


def _range_of(delete: Delete) -> dict[str, str]:
    return _prefix(delete.key) if delete.prefix else {"key": _coded(delete.key)}


def _put(put: Put) -> dict[str, Json]:
    size = len(put.value.encode())
    if size > VALUE_BYTES_AT_MOST:
        raise CoordinatorError(f"{put.key} would have {size:,} bytes, more than {VALUE_BYTES_AT_MOST:,}")
    return {"key": _coded(put.key), "value": _coded(put.value), "lease": str(put.lease)}


def _operation(operation: Put | Delete) -> dict[str, Json]:
    if isinstance(operation, Put):
        return {"request_put": _put(operation)}
    return {"request_delete_range": _range_of(operation)}


def _compare(condition: Condition) -> dict[str, Json]:
    common = {"key": _coded(condition.key), "result": "EQUAL"}
    if condition.aspect == "value":
        return {**common, "target": "VALUE", "value": _coded(str(condition.wanted))}
    if condition.aspect == "created":
        return {**common, "target": "CREATE", "create_revision": str(condition.wanted)}
    return {**common, "target": "MOD", "mod_revision": str(condition.wanted)}


def _coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _decoded(text: Json) -> str:
    """Decode a key or a value. Bytes that are no text are replaced, and their record is then refused."""
    try:
        return base64.b64decode(text, validate=True).decode(errors="replace")
    except (binascii.Error, TypeError, ValueError) as error:
        raise _garbled("a value") from error


def _item(row: Mapping[str, Json]) -> KeyValue:
    return KeyValue(
        key=_decoded(row.get("key", "")),
        value=_decoded(row.get("value", "")),
        created=_whole(row, "create_revision"),
        modified=_whole(row, "mod_revision"),
        lease=_whole(row, "lease"),
    )


def _rows(rows: Json) -> list[dict[str, Json]]:
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise _garbled("a listing")
    return rows


def _revision(answer: Mapping[str, Json]) -> int:
    return _whole(_header(answer), "revision")


def _header(answer: Mapping[str, Json]) -> dict[str, Json]:
    header = answer.get("header")
    if not isinstance(header, dict):
        raise _garbled("an answer")
    return header


def _whole(row: Mapping[str, Json], name: str) -> int:
    """Return a 64-bit number, which the gateway writes as text, and omits if it is 0."""
    try:
        return int(row.get(name, 0))
    except (TypeError, ValueError) as error:
        raise _garbled(name) from error


def _garbled(what: str) -> CoordinatorAway:
    return CoordinatorAway(
        f"the coordinator's answer about {what} cannot be understood",
        remedy="Is this an etcd of version 3.4 or later?",
    )
