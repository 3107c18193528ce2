"""What a peer's parent writes down of the rounds: RUN/rounds.jsonl."""

from __future__ import annotations

from bloomery.events.journal import Journal


class RoundJournal:
    """Implements `means.Events`. `peer` of each event is whose journal it is."""

    def __init__(self, journal: Journal, peer: str) -> None:
        self._journal, self._peer = journal, peer

    def write(self, event: str, *, round: int, **fields: object) -> None:
        """Append one event of this peer."""
        self._journal.write(event, incarnation=0, step=0, peer=self._peer, round=round, **fields)
