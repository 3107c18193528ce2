"""Keeps the averages of rounds that a listed peer was not in, until all listed peers are in one.

A round's average is of 4 bytes a parameter (of the fragment), and a state of about 20. So who missed a few
rounds fetches their averages, and computes the states that follow (`diloco/missed_rounds.py`).
"""

from __future__ import annotations

import shutil
from pathlib import Path

from bloomery.agent.agent_context import FetchAverage
from bloomery.coordination.snapshot import RunSnapshot
from bloomery.protocol.records import Commit
from bloomery.state_transfer.served_states import ServedStates


class KeptAverages:
    """The averages of the newest rounds that a listed peer was not in, in a directory of this peer's run.

    directory: where the ranks write them; what an earlier process left there is removed.
    states: serves them.
    fetch: fetches those of rounds that this peer was not in.
    at_most: of how many rounds they are kept; 0 keeps none, and this peer fetches none.
    """

    def __init__(self, directory: Path, states: ServedStates, fetch: FetchAverage, *, at_most: int) -> None:
        self._directory, self._states, self._at_most = directory, states, at_most
        self.fetch = fetch
        self._kept: list[str] = []
        shutil.rmtree(directory, ignore_errors=True)

    @property
    def at_most(self) -> int:
        """Of how many rounds averages are kept, here as on other peers."""
        return self._at_most

    def places(self, commit: Commit, snapshot: RunSnapshot, *, ranks: int) -> list[Path]:
        """Return where each rank writes the average of this round; [] if no listed peer has missed it.

        Call it once for each commit that includes this peer's part. Averages that nobody needs are removed.
        """
        missed_by = set(snapshot.members) - set(commit.members)
        places: list[Path] = []
        if not missed_by or not self._at_most:
            self._kept = []
        else:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._kept = [*self._kept, commit.digest][-self._at_most :]
            places = [self._directory / f"{commit.digest}.{rank}" for rank in range(ranks)]
        self._states.serve_averages({digest: self._directory for digest in self._kept})
        for path in self._directory.glob("*"):
            if path.name.partition(".")[0] not in self._kept:
                path.unlink(missing_ok=True)
        return places
