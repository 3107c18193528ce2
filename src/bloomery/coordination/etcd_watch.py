"""Decodes the response stream of an etcd watch into batches of changed keys."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from bloomery.coordination.etcd_answers import ResponseStream

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class KeyValue:
    """A key and its value at some revision.

    created, modified: etcd's create_revision and mod_revision.
    lease: the lease that it lies on; 0: none.
    """

    key: str
    value: str
    created: int
    modified: int
    lease: int = 0


@dataclass(frozen=True, kw_only=True)
class WatchEvent:
    """The change of one key. item: None: the key was deleted."""

    key: str
    item: KeyValue | None


@dataclass(frozen=True, kw_only=True)
class WatchBatch:
    """Changes of keys that etcd sent together; afterwards all up to and including `revision` are known.

    The first batch of a watch has no changes: it says that the watch has begun.
    """

    revision: int
    changes: tuple[WatchEvent, ...] = ()


class HistoryLost(Exception):
    """A watch cannot go on from its revision, so the caller must list again.

    revision: the coordinator's, which is lower than the watch's or of another cluster, as after it lost its
        data; 0: the history was compacted.
    """

    def __init__(self, revision: int) -> None:
        super().__init__(f"the coordinator stands at revision {revision}")
        self.revision = revision


class KeyWatch:
    """A watch: `batches` yields changes until the connection ends or another thread calls `stop`.

    after: the revision after which changes are reported.
    cluster: the id of the cluster of which that is a revision; 0: any.
    refused: called with etcd's reason where it ends the watch.
    """

    def __init__(
        self, stream: ResponseStream, *, after: int, refused: Callable[[str], None], cluster: int = 0
    ) -> None:
        self._stream, self._after, self._refused, self._cluster = stream, after, refused, cluster

    def batches(self) -> Iterator[WatchBatch]:
        """Yield the changes in order. Raises HistoryLost, and EtcdRefused where access is not permitted."""
        for line in self._stream.answers():
            result = _watched(line)
            if result is None:  # etcd ends the watch: it is closing, or has no leader
                return
            if result.canceled:
                if result.compact_revision:
                    raise HistoryLost(0)
                self._refused(result.cancel_reason)
                return
            revision = result.header.revision
            # A proxy may leave the cluster's id out.
            is_other = self._cluster and result.header.cluster_id not in (0, self._cluster)
            if revision < self._after or is_other:
                raise HistoryLost(revision)
            changes = tuple(_change(row) for row in result.events)
            if changes:
                # Not the store's revision: of more than 1,000 revisions etcd sends the rest in later answers.
                # The rest of a fragment's last revision may still come, too.
                known = result.events[-1].kv.mod_revision - result.fragment
                yield WatchBatch(revision=known, changes=changes)
            elif result.created:
                yield WatchBatch(revision=self._after)

    def stop(self) -> None:
        """End the watch from any thread: a call of `batches` that waits for events returns."""
        self._stream.shutdown()


class _Header(msgspec.Struct, frozen=True):
    revision: int = 0
    cluster_id: int = 0


class _Stored(msgspec.Struct, frozen=True):
    key: bytes = b""
    value: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0
    lease: int = 0


class _Change(msgspec.Struct, frozen=True):
    kv: _Stored
    type: str = "PUT"


class _Result(msgspec.Struct, frozen=True):
    header: _Header
    created: bool = False
    fragment: bool = False
    canceled: bool = False
    compact_revision: int = 0
    cancel_reason: str = ""
    events: tuple[_Change, ...] = ()


class _Answer(msgspec.Struct, frozen=True):
    result: _Result | None = None


_ANSWERS = msgspec.json.Decoder(_Answer, strict=False)
"""Not strict, because the gateway writes 64-bit numbers as text. Made once, before any thread decodes.

Hundreds of members write thousands of keys a round, and each of their agents reads them all.
"""


def _watched(line: bytes) -> _Result | None:
    """Return what one answer of a watch says; None where it says nothing, so that the watch is begun anew."""
    try:
        return _ANSWERS.decode(line).result
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors
        log.warning("the coordinator's answer about a watch cannot be understood: %s", error)
        return None


def _change(row: _Change) -> WatchEvent:
    """Return a change. Bytes that are no text are replaced, and their record is then refused."""
    stored = row.kv
    key = stored.key.decode(errors="replace")
    if row.type == "DELETE":
        return WatchEvent(key=key, item=None)
    item = KeyValue(
        key=key,
        value=stored.value.decode(errors="replace"),
        created=stored.create_revision,
        modified=stored.mod_revision,
        lease=stored.lease,
    )
    return WatchEvent(key=key, item=item)
