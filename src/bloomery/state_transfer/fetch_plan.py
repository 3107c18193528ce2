"""What is fetched of a state, and which of its files each source has; the answers are computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bloomery.checkpoint.format.manifest import FileRecord, Manifest
from bloomery.state_transfer.partial_checkpoint import PartialCheckpoint
from bloomery.state_transfer.source import PeerSource, ServedState


@dataclass(kw_only=True)
class FetchSource:
    """A peer that has sent its manifest.

    text: the manifest as it was sent.
    records: the files in the manifest.
    failures: how often it has failed since its last block.
    is_out: whether it has been given up.
    """

    state: ServedState
    manifest: Manifest
    text: bytes
    records: frozenset[FileRecord]
    failures: int = 0
    is_out: bool = False


@dataclass(frozen=True, kw_only=True)
class FetchPlan:
    """What is fetched: the leader's checkpoint. Any thread may ask it.

    A state has thousands of files, and is fetched in half a million runs of blocks. So what a source has is
    computed once, and what it alone has once for each set of other sources.

    partial: the files fetched so far.
    index: the leader's index as it was sent.
    """

    leader: FetchSource
    partial: PartialCheckpoint
    index: bytes
    _files: dict[PeerSource, frozenset[str]] = field(default_factory=dict)
    _own: dict[PeerSource, tuple[tuple[PeerSource, ...], frozenset[str]]] = field(default_factory=dict)
    """By source, the other sources for which it was computed, and the files that none of them has."""

    def files_of(self, source: FetchSource) -> frozenset[str]:
        """Return the names of the files that a source has identically to the leader."""
        origin = source.state.origin
        files = self._files.get(origin)
        if files is None:
            files = frozenset(record.name for record in self.leader.records & source.records)
            self._files[origin] = files
        return files

    def own_files(self, source: FetchSource, others: Sequence[FetchSource]) -> frozenset[str]:
        """Return the names of those files of a source that none of the others has."""
        origin, beside = source.state.origin, tuple(other.state.origin for other in others)
        computed_for, own = self._own.get(origin, (None, frozenset[str]()))
        if computed_for != beside:
            own = self.files_of(source).difference(*map(self.files_of, others))
            self._own[origin] = beside, own
        return own
